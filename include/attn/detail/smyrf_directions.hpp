// SPDX-License-Identifier: MIT
//
// Directions from samples of rows.
//
// All sums are of integers, so they are the same on every platform.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include <attn/detail/scratch_carver.hpp>
#include <attn/detail/smyrf_coarse_rows.hpp>
#include <attn/detail/smyrf_halves.hpp>
#include <attn/simd/batch.hpp>
#include <attn/simd/int16.hpp>
#include <attn/view.hpp>

namespace attn::detail {

/// hash[i] = row(i)·a · unit(i) for n rows, +∞ for those that are not finite.
template <class Arch, class Row, class Unit>
void smyrf_project(const Row& row, const Unit& unit, index_t n, const std::int16_t* a,
                   index_t stride, float* hash) noexcept {
  for (index_t i = 0; i < n; i += 4) {
    const index_t last = n - 1;
    const index_t j[4] = {i, std::min(i + 1, last), std::min(i + 2, last), std::min(i + 3, last)};
    const std::int16_t* const four[4] = {row(j[0]), row(j[1]), row(j[2]), row(j[3])};
    std::int32_t dot[4];
    simd::integer_dots<Arch>(four, a, stride, dot);
    for (int r = 0; r < 4; ++r) {
      const float u = unit(j[r]);
      hash[i + r] =
          u == u ? static_cast<float>(dot[r]) * u : std::numeric_limits<float>::infinity();
    }
  }
}

/// Rows that a direction is made of.
struct smyrf_sample {
  static constexpr index_t most = 128;
  std::array<const std::int16_t*, most> row;
  std::array<float, most> unit;
  index_t n = 0;

  void add(const std::int16_t* x, float u) noexcept {
    row[static_cast<std::size_t>(n)] = x, unit[static_cast<std::size_t>(n)] = u;
    ++n;
  }
};

/// Makes directions for rows of d numbers.
template <class Arch>
class smyrf_directions {
  using signs = std::array<std::int16_t, smyrf_sample::most>;

 public:
  void carve(scratch_carver& memory, index_t d) noexcept {
    d_ = d, stride_ = smyrf_coarse_stride(d);
    halving_.carve(memory, smyrf_sample::most);
    sum_ = memory.take<std::int32_t>(stride_);
    column_ = memory.take<float>(d);
  }

  /// out = the direction of x[i] − x[j]
  void difference(const smyrf_sample& x, index_t i, index_t j, std::int16_t* out) const noexcept {
    smyrf_sample two;
    for (const index_t r : {i, j}) {
      two.add(x.row[static_cast<std::size_t>(r)], x.unit[static_cast<std::size_t>(r)]);
    }
    signs sign;
    sign[0] = 1, sign[1] = -1;
    direction_of_sum(two, sign, 2, out);
  }

  /// out = the direction of mean(upper half of the rows by x·a) − mean(lower half). Of an odd
  /// number of rows the last one is left out.
  void difference_of_halves(const smyrf_sample& x, const std::int16_t* a,
                            std::int16_t* out) const noexcept {
    const index_t n = x.n / 2 * 2;
    smyrf_project<Arch>([&](index_t i) { return x.row[static_cast<std::size_t>(i)]; },
                        [&](index_t i) { return x.unit[static_cast<std::size_t>(i)]; }, n, a,
                        stride_, halving_.hash);
    const smyrf_threshold cut = halving_.template find<Arch>(n, n / 2);
    signs sign;
    for (index_t i = 0; i < n; ++i) {
      sign[static_cast<std::size_t>(i)] = cut.is_above(halving_.hash[i], i) ? -1 : 1;
    }
    direction_of_sum(x, sign, n, out);
  }

 private:
  // Σ ± unit · row over an even number of rows. Units are taken as a power of two of the largest,
  // and rows that are less than 2^−9 of it count for nothing.
  void direction_of_sum(const smyrf_sample& x, const signs& sign, index_t n,
                        std::int16_t* out) const noexcept {
    float largest = 0;
    for (index_t i = 0; i < n; ++i) {
      largest = std::max(largest, x.unit[static_cast<std::size_t>(i)]);
    }
    const float scale = 0x1p9f / largest;  // 128 rows of 2^14 times 2^9: 2^30
    signs weight;
    for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
      weight[i] = static_cast<std::int16_t>(sign[i] * static_cast<int>(x.unit[i] * scale));
    }
    simd::integer_sums<Arch>(x.row.data(), weight.data(), n, stride_, sum_);
    for (index_t c = 0; c < d_; ++c) column_[c] = static_cast<float>(sum_[c]);
    int e = 0;
    (void)smyrf_exponent<Arch>(column_, d_, e);
    (void)smyrf_coarsen<Arch>(column_, e, d_, out);
  }

  index_t d_ = 0, stride_ = 0;
  smyrf_halving halving_;
  std::int32_t* sum_ = nullptr;
  float* column_ = nullptr;
};

}  // namespace attn::detail
