// SPDX-License-Identifier: MIT
//
// Directions from samples of rows.
//
// The same on every platform: rows and directions are floats, whose products are exact in double,
// and sums have 8 lanes or run in order, whatever the width of the vectors.
#pragma once

#include <algorithm>
#include <array>

#include <attn/detail/tile_products.hpp>
#include <attn/simd/batch.hpp>
#include <attn/simd/widen.hpp>
#include <attn/view.hpp>

namespace attn::detail {

/// Rows that a direction is made of, at most.
inline constexpr index_t smyrf_largest_sample = 128;

/// out[r] = Σ_c x[r][c] a[c] for R rows: eight sums of every eighth coordinate, added in one fixed
/// order. Several rows at a time hide the latency of the additions.
template <class Arch, int R>
ATTN_INLINE void smyrf_dots(const float* const (&x)[R], const double* a, index_t d,
                            double* out) noexcept {
  using B = simd::batch<double, Arch>;
  constexpr int W = simd::width<double, Arch>, lanes = 8, N = lanes / W;
  static_assert(N >= 1 && N * W == lanes);
  B sum[R][N];
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < N; ++j) sum[r][j] = B(0.0);
  }
  index_t c = 0;
  for (; c + lanes <= d; c += lanes) {
    ATTN_UNROLL for (int j = 0; j < N; ++j) {
      const B direction = simd::load<double, Arch>(a + c + j * W);
      ATTN_UNROLL for (int r = 0; r < R; ++r) {
        sum[r][j] = simd::multiply_add(simd::widen<Arch>(x[r] + c + j * W), direction, sum[r][j]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    alignas(64) double lane[lanes];
    for (int j = 0; j < N; ++j) sum[r][j].store_aligned(lane + j * W);
    for (index_t t = c; t < d; ++t) lane[t - c] += static_cast<double>(x[r][t]) * a[t];
    out[r] =
        ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
  }
}

/// out[i] = row(i)·a for n rows.
template <class Arch, class Row>
void smyrf_project(const Row& row, index_t n, const double* a, index_t d, double* out) noexcept {
  index_t i = 0;
  for (; i + 4 <= n; i += 4) {
    const float* const four[4] = {row(i), row(i + 1), row(i + 2), row(i + 3)};
    smyrf_dots<Arch>(four, a, d, out + i);
  }
  for (; i < n; ++i) {
    const float* const one[1] = {row(i)};
    smyrf_dots<Arch>(one, a, d, out + i);
  }
}

/// Whether a row has neither inf nor NaN.
template <class Arch>
[[nodiscard]] bool smyrf_finite(const float* x, index_t d) noexcept {
  using B = simd::batch<float, Arch>;
  constexpr int W = simd::width<float, Arch>;
  B bad(0.0f);
  float bad_tail = 0;
  index_t c = 0;
  for (; c + W <= d; c += W) {
    bad = simd::multiply_add(simd::load_unaligned<float, Arch>(x + c), B(0.0f), bad);
  }
  for (; c < d; ++c) bad_tail += x[c] * 0.0f;
  return xsimd::all(bad == B(0.0f)) && bad_tail == 0;
}

/// out = mean of the upper half of the rows x [n][d] by x·direction − mean of the lower half, as
/// floats. Of an odd number of rows the last one is left out. n is at most smyrf_largest_sample.
template <class Arch>
void smyrf_difference_of_halves(const float* x, index_t n, index_t d, const double* direction,
                                double* out) noexcept {
  using B = simd::batch<double, Arch>;
  constexpr index_t W = simd::width<double, Arch>, N = 4;
  const index_t half = n / 2;
  n = 2 * half;
  // 1. Signs of the rows: −1 for the half with the lower products, ties by position.
  struct projected {
    double product;
    index_t row;
  };
  const auto before = [](const projected& a, const projected& b) {
    return a.product != b.product ? a.product < b.product : a.row < b.row;
  };
  std::array<double, smyrf_largest_sample> sign;
  smyrf_project<Arch>([&](index_t i) { return x + i * d; }, n, direction, d, sign.data());
  std::array<projected, smyrf_largest_sample> sorted;
  for (index_t i = 0; i < n; ++i) {
    sorted[static_cast<std::size_t>(i)] = {sign[static_cast<std::size_t>(i)], i};
  }
  std::nth_element(sorted.begin(), sorted.begin() + half, sorted.begin() + n, before);
  for (index_t i = 0; i < n; ++i) {
    const index_t row = sorted[static_cast<std::size_t>(i)].row;
    sign[static_cast<std::size_t>(row)] = i < half ? -1 : 1;
  }
  // 2. Σ ± x / half, a few columns at a time; each sum runs over the rows in order.
  const double count = static_cast<double>(half);
  const auto store = [&](index_t c, double sum) {
    out[c] = static_cast<double>(static_cast<float>(sum / count));
  };
  index_t c = 0;
  for (; c + N * W <= d; c += N * W) {
    B sum[N];
    for (B& s : sum) s = B(0.0);
    for (index_t i = 0; i < n; ++i) {
      const B s(sign[static_cast<std::size_t>(i)]);
      ATTN_UNROLL for (index_t j = 0; j < N; ++j) {
        sum[j] = simd::multiply_add(s, simd::widen<Arch>(x + i * d + c + j * W), sum[j]);
      }
    }
    alignas(64) double lane[N * W];
    for (index_t j = 0; j < N; ++j) sum[j].store_aligned(lane + j * W);
    for (index_t j = 0; j < N * W; ++j) store(c + j, lane[j]);
  }
  for (; c < d; ++c) {
    double sum = 0;
    for (index_t i = 0; i < n; ++i) {
      sum += sign[static_cast<std::size_t>(i)] * static_cast<double>(x[i * d + c]);
    }
    store(c, sum);
  }
}

}  // namespace attn::detail
