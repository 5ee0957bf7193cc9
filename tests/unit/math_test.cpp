// SPDX-License-Identifier: MIT
//
// exp and log of a batch against the C library in long double.
#include "support/catch.hpp"

#include <attn/simd/exp.hpp>
#include <attn/simd/math.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

namespace {

using arch = attn::simd::default_arch;

// In the last lane, with other numbers in the others.
template <class T, class F>
T in_a_batch(const F& f, T x) {
  constexpr int width = attn::simd::width<T, arch>;
  alignas(64) T lanes[width];
  for (int i = 0; i < width; ++i) lanes[i] = static_cast<T>(i + 1);
  lanes[width - 1] = x;
  f(attn::simd::load<T, arch>(lanes)).store_aligned(lanes);
  return lanes[width - 1];
}
template <class T>
T exp_of(T x) {
  return in_a_batch([](const auto& v) { return attn::simd::exp<T, arch>(v); }, x);
}
template <class T>
T log_of(T x) {
  return in_a_batch([](const auto& v) { return attn::simd::log<T, arch>(v); }, x);
}

template <class T>
double ulps(T got, long double right) {
  const T nearest = std::abs(static_cast<T>(right));
  const T ulp = std::nextafter(nearest, std::numeric_limits<T>::infinity()) - nearest;
  return static_cast<double>(std::abs(static_cast<long double>(got) - right) /
                             static_cast<long double>(ulp));
}

}  // namespace

TEMPLATE_TEST_CASE("exp: 3 + 1.3 |x| ulp wherever the result is a normal number", "", float,
                   double) {
  const double lowest = std::log(static_cast<double>(std::numeric_limits<TestType>::min()));
  // Half an octave earlier than it must, a result overflows.
  const double highest = std::log(static_cast<double>(std::numeric_limits<TestType>::max())) - 0.5;
  double worst = 0, at = 0;
  const auto check = [&](double wanted) {
    const auto x = static_cast<TestType>(wanted);
    const double allowed = 3 + 1.3 * std::abs(static_cast<double>(x));
    const double error = ulps(exp_of(x), std::exp(static_cast<long double>(x))) / allowed;
    if (error > worst) worst = error, at = wanted;
  };
  for (double x = lowest * 0.999; x < highest * 0.999; x += (highest - lowest) / 300'000) check(x);
  for (double x = 1e-30; x < 80; x *= 1.0007) check(x), check(-x);
  CAPTURE(at);
  CHECK(worst <= 1);
}

TEMPLATE_TEST_CASE("exp of special values", "", float, double) {
  constexpr TestType infinity = std::numeric_limits<TestType>::infinity();
  CHECK(exp_of(TestType(0)) == 1);
  CHECK(exp_of(TestType(-0.0)) == 1);
  CHECK(exp_of(-infinity) == 0);
  CHECK_FALSE(std::signbit(exp_of(-infinity)));
  CHECK(exp_of(infinity) == infinity);
  CHECK(exp_of(TestType(1e30)) == infinity);
  CHECK(exp_of(TestType(-1e30)) == 0);
  CHECK(std::isnan(exp_of(std::numeric_limits<TestType>::quiet_NaN())));
}

TEMPLATE_TEST_CASE("log: 1.5 ulp over all normal numbers", "", float, double) {
  double worst = 0, at = 0;
  const auto check = [&](double wanted) {
    const auto x = static_cast<TestType>(wanted);
    const long double right = std::log(static_cast<long double>(x));
    const double error =
        right == 0 ? std::abs(static_cast<double>(log_of(x))) : ulps(log_of(x), right);
    if (error > worst) worst = error, at = wanted;
  };
  const auto smallest = static_cast<double>(std::numeric_limits<TestType>::min());
  const auto largest = static_cast<double>(std::numeric_limits<TestType>::max());
  for (double x = smallest; x < largest / 1.01; x *= sizeof(TestType) == 4 ? 1.001 : 1.01) check(x);
  for (double x = 0.5; x < 4; x += 1.3e-5) check(x);
  check(largest);
  CAPTURE(at);
  CHECK(worst <= 1.5);
}

TEMPLATE_TEST_CASE("log of special values", "", float, double) {
  constexpr TestType infinity = std::numeric_limits<TestType>::infinity();
  CHECK(log_of(TestType(1)) == 0);
  CHECK(log_of(TestType(0)) == -infinity);
  CHECK(log_of(infinity) == infinity);
  CHECK(std::isnan(log_of(std::numeric_limits<TestType>::quiet_NaN())));
}
