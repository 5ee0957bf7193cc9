// SPDX-License-Identifier: MIT
#include "support/catch.hpp"

#include <attn/simd/expm1.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

namespace {

using arch = attn::simd::default_arch;

double expm1_of(double x) {
  alignas(64) double lanes[attn::simd::width<double, arch>];
  std::fill(std::begin(lanes), std::end(lanes), x);
  const auto y = attn::simd::expm1(attn::simd::load<double, arch>(lanes));
  y.store_aligned(lanes);
  return lanes[0];
}

}  // namespace

TEST_CASE("expm1 over its range, in ulp of the result") {
  double worst = 0;
  const auto check = [&](double x) {
    const double expected = std::expm1(x);
    const double ulp = std::nextafter(std::abs(expected), HUGE_VAL) - std::abs(expected);
    worst = std::max(worst, std::abs(expm1_of(x) - expected) / ulp);
  };
  for (double x = 1e-300; x < 800; x *= 1.001) check(-x);
  for (double x = 0; x < 40; x += 1e-3) check(-x);
  CAPTURE(worst);
  CHECK(worst <= 8);
}

TEST_CASE("expm1 of special values") {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  CHECK(expm1_of(0) == 0);
  CHECK(expm1_of(-infinity) == -1);
  CHECK(expm1_of(-1e300) == -1);
  CHECK(std::isnan(expm1_of(std::numeric_limits<double>::quiet_NaN())));
  CHECK(expm1_of(-1e-300) < 0);
}
