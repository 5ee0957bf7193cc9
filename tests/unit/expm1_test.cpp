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
  attn::simd::batch<double, arch> y[1] = {attn::simd::load<double, arch>(lanes)};
  attn::simd::expm1_each(y);
  y[0].store_aligned(lanes);
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

TEST_CASE("exp and expm1 of batches side by side are those of each alone") {
  constexpr int together = 3, width = attn::simd::width<double, arch>;
  using batch = attn::simd::batch<double, arch>;
  alignas(64) double x[together * width], expected[together * width];
  for (int i = 0; i < together * width; ++i) x[i] = -1.75 * i;
  batch exps[together], expm1s[together];
  for (int u = 0; u < together; ++u) {
    exps[u] = expm1s[u] = attn::simd::load<double, arch>(x + u * width);
    attn::simd::exp(exps[u]).store_aligned(expected + u * width);
  }
  attn::simd::exp_each(exps);
  attn::simd::expm1_each(expm1s);
  alignas(64) double lanes[width];
  for (int i = 0; i < together * width; ++i) {
    exps[i / width].store_aligned(lanes);
    CHECK(lanes[i % width] == expected[i]);
    expm1s[i / width].store_aligned(lanes);
    CHECK(lanes[i % width] == expm1_of(x[i]));
  }
}
