// SPDX-License-Identifier: MIT
//
// What bisection is made of: rows as integers, their products, and the cut by rank, each against
// its definition.
#include "support/catch.hpp"
#include "support/random.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include <attn/context.hpp>
#include <attn/detail/smyrf_coarse_rows.hpp>
#include <attn/detail/smyrf_directions.hpp>
#include <attn/detail/smyrf_halves.hpp>
#include <attn/eigen.hpp>

using namespace attn_test;
using attn::index_t;
using attn::detail::scratch_carver;
using arch = attn::simd::default_arch;

namespace {

/// A part that lives in scratch, with memory of its own.
template <class Part>
struct with_memory {
  attn::detail::scratch_buffer memory;
  Part part;
  template <class... Sizes>
  explicit with_memory(Sizes... sizes) {
    scratch_carver bytes;
    part.carve(bytes, sizes...);
    scratch_carver block(memory.reserve(bytes.used()));
    part.carve(block, sizes...);
  }
};

using coarse_rows = with_memory<attn::detail::smyrf_coarse_rows>;

/// The exponent of the largest unit.
int load(coarse_rows& rows, const std::vector<float>& x, index_t n, index_t d) {
  const attn::tensor_view<const float> view(x.data(), 1, 1, n, d);
  const int e = rows.part.load<arch>(attn::detail::make_row_source<float, arch>(view, 0, 0), n);
  rows.part.set_units(n, e);
  return e;
}

}  // namespace

TEST_CASE("smyrf_bisection: products of integers are exact, also where they are largest") {
  random_source random(1);
  for (const index_t d : {1, 2, 7, 31, 32, 33, 64, 100, 128, 500, 4096})
    for (const int kind : {0, 1, 2}) {
      // Noise; numbers that are all as large; one large number among noise.
      std::vector<float> x;
      for (index_t r = 0; r < 5; ++r)
        for (index_t c = 0; c < d; ++c) {
          double v = random.normal();
          if (kind == 1) v = r % 2 == 0 ? 1.9999 : -1.9999;
          if (kind == 2 && c == d / 2) v = 1e4;
          x.push_back(static_cast<float>(v));
        }
      coarse_rows rows(index_t{5}, d);
      (void)load(rows, x, 5, d);
      const std::int16_t* const four[4] = {rows.part(0), rows.part(1), rows.part(2), rows.part(3)};
      const std::int16_t* const two[2] = {rows.part(2), rows.part(4)};
      const std::int16_t* a = rows.part(4);
      const index_t stride = attn::detail::smyrf_coarse_stride(d);
      const auto sum = [&](const std::int16_t* row) {
        std::int64_t all = 0, absolute = 0;
        for (index_t c = 0; c < d; ++c) {
          all += std::int64_t{row[c]} * a[c];
          absolute += std::abs(std::int64_t{row[c]} * a[c]);
        }
        CHECK(absolute < (std::int64_t{1} << 31));
        return all;
      };
      std::int32_t dots[4];
      attn::simd::integer_dots<arch>(four, a, stride, dots);
      for (int r = 0; r < 4; ++r) CHECK(dots[r] == sum(four[r]));
      attn::simd::integer_dots<arch>(two, a, stride, dots);
      for (int r = 0; r < 2; ++r) CHECK(dots[r] == sum(two[r]));
      // A large number has all 14 bits, noise one less than its share of a sum of 2^30.
      const auto largest = [&](index_t r) {
        return std::abs(*std::max_element(rows.part(r), rows.part(r) + d,
                                          [](int u, int v) { return std::abs(u) < std::abs(v); }));
      };
      if (kind == 2) CHECK(largest(0) > 8191);
      if (kind == 1)
        CHECK(largest(0) >= std::min(8191.0, 16383 / std::sqrt(static_cast<double>(d))));
    }
}

TEST_CASE("smyrf_bisection: rows as integers are off by half a step at most") {
  random_source random(2);
  const index_t n = 40;
  for (const index_t d : {1, 7, 8, 9, 32, 37, 64}) {
    std::vector<float> x(static_cast<std::size_t>(n * d));
    for (index_t i = 0; i < n; ++i) {
      const double scale = std::exp2(static_cast<double>(i % 20) - 10);
      for (index_t c = 0; c < d; ++c) {
        x[static_cast<std::size_t>(i * d + c)] = static_cast<float>(scale * random.normal());
      }
    }
    coarse_rows rows(n, d);
    const int e = load(rows, x, n, d);
    for (index_t i = 0; i < n; ++i) {
      const double step = std::ldexp(static_cast<double>(rows.part.unit(i)), e);
      for (index_t c = 0; c < d; ++c) {
        const double value = rows.part(i)[c] * step;
        CHECK(std::abs(value - static_cast<double>(x[static_cast<std::size_t>(i * d + c)])) <=
              step / 2);
      }
      for (index_t c = d; c < attn::detail::smyrf_coarse_stride(d); ++c) {
        CHECK(rows.part(i)[c] == 0);
      }
    }
  }
}

TEST_CASE("smyrf_bisection: rows that are not finite are zeros without a unit, alone") {
  constexpr float inf = std::numeric_limits<float>::infinity();
  const index_t d = 19;
  for (const float poison : {std::nanf(""), inf, -inf})
    for (index_t at = 0; at < d; ++at) {
      std::vector<float> x(static_cast<std::size_t>(3 * d), 1.0f);
      x[static_cast<std::size_t>(d + at)] = poison;
      coarse_rows rows(index_t{3}, d);
      (void)load(rows, x, 3, d);
      CHECK(!rows.part.is_finite(1));
      CHECK(std::all_of(rows.part(1), rows.part(1) + d, [](std::int16_t v) { return v == 0; }));
      CHECK(rows.part.unit(0) == 1);
      CHECK(rows.part.unit(2) == 1);
      CHECK(std::all_of(rows.part(2), rows.part(2) + d,
                        [&](std::int16_t v) { return v == rows.part(0)[0] && v > 0; }));
    }
}

TEST_CASE("smyrf_bisection: the ends of float") {
  const index_t d = 8;
  std::vector<float> x;
  for (const float scale : {std::numeric_limits<float>::max(), 1.0f, 0x1p-100f, 0x1p-149f, 0.0f}) {
    for (index_t c = 0; c < d; ++c) x.push_back(c % 2 == 0 ? scale : -scale / 2);
  }
  coarse_rows rows(index_t{5}, d);
  (void)load(rows, x, 5, d);
  for (index_t i = 0; i < 5; ++i) {
    CHECK(rows.part.unit(i) > 0);
    CHECK(rows.part.unit(i) <= 1);
    CHECK(rows.part.is_finite(i));
  }
  CHECK(rows.part(0)[0] > 0);
  CHECK(rows.part(0)[1] < 0);
  CHECK(rows.part(1)[1] < 0);
  CHECK(rows.part(4)[0] == 0);
}

TEST_CASE("smyrf_bisection: the cut by rank is that of a sort by hash and item") {
  random_source random(3);
  constexpr float inf = std::numeric_limits<float>::infinity();
  for (const index_t n : {1, 2, 3, 15, 16, 17, 100, 129, 1000, 5000})
    for (const int kind : {0, 1, 2, 3, 4, 5}) {
      with_memory<attn::detail::smyrf_halving> halving(n);
      std::vector<float> hash;
      for (index_t i = 0; i < n; ++i) {
        const double x = random.normal();
        hash.push_back(static_cast<float>(kind == 0   ? x
                                          : kind == 1 ? std::round(2 * x)  // ties
                                          : kind == 2 ? 3.0
                                          : kind == 3 ? std::exp(20 * x)  // all in a few buckets
                                                      : 1e-30 * x));
        if ((kind == 1 && x > 1.5) || kind == 5) hash.back() = inf;
      }
      if (kind == 2) hash[static_cast<std::size_t>(n / 2)] = inf;
      std::vector<index_t> sorted(static_cast<std::size_t>(n));
      std::iota(sorted.begin(), sorted.end(), index_t{0});
      std::stable_sort(sorted.begin(), sorted.end(), [&](index_t i, index_t j) {
        return hash[static_cast<std::size_t>(i)] < hash[static_cast<std::size_t>(j)];
      });
      for (const index_t rank : {index_t{0}, n / 3, n / 2, n - 1}) {
        std::copy(hash.begin(), hash.end(), halving.part.hash);
        const auto cut = halving.part.find<arch>(n, rank);
        CHECK(cut.item == sorted[static_cast<std::size_t>(rank)]);
        CHECK(cut.hash == hash[static_cast<std::size_t>(cut.item)]);
        // Items of other numbers, so that places and items differ.
        std::vector<index_t> list;
        for (index_t i = 0; i < n; ++i) list.push_back(10 * i + 1);
        halving.part.split(list.data(), n, cut);
        std::vector<index_t> parts(sorted);
        std::sort(parts.begin(), parts.begin() + rank);
        std::sort(parts.begin() + rank, parts.end());
        for (index_t& i : parts) i = 10 * i + 1;
        CHECK(list == parts);
      }
    }
}

TEST_CASE("smyrf_bisection: a direction is the difference of the means of halves") {
  // Two groups of rows on either side of a plane; the direction that tells them apart is e_1.
  const index_t n = 64, d = 40;
  random_source random(4);
  std::vector<float> x(static_cast<std::size_t>(n * d));
  for (index_t i = 0; i < n; ++i)
    for (index_t c = 0; c < d; ++c) {
      const double side = c == 1 || c == 5 ? (i % 2 == 0 ? 3 : -3) : 0;
      x[static_cast<std::size_t>(i * d + c)] = static_cast<float>(side + 0.01 * random.normal());
    }
  coarse_rows rows(n, d);
  (void)load(rows, x, n, d);
  attn::detail::smyrf_sample sample;
  for (index_t i = 0; i < n; ++i) sample.add(rows.part(i), rows.part.unit(i));
  with_memory<attn::detail::smyrf_directions<arch>> directions(d);
  std::vector<std::int16_t> a(64, std::int16_t{0}), b(64, std::int16_t{1});
  a[5] = 100;
  directions.part.difference_of_halves(sample, a.data(), b.data());
  const int top = b[1];
  CHECK(top > 1000);
  for (index_t c = 0; c < d; ++c) {
    if (c == 1 || c == 5)
      CHECK(b[static_cast<std::size_t>(c)] > top / 2);
    else
      CHECK(std::abs(b[static_cast<std::size_t>(c)]) < top / 50);
  }
  directions.part.difference(sample, 1, 0, b.data());
  CHECK(b[1] < -top / 2);
  CHECK(b[5] < -top / 2);
}
