// SPDX-License-Identifier: MIT
//
// Products of vectors with the directions of a hash, the same to the bit on every platform.
//
// Layout: as in attention, vector lanes are rows and directions are scalars that are broadcast. A
// tile is two vectors of doubles wide. Products of a float and a coefficient of up to 29 bits are
// exact in double and sums run over the coordinates in order, so neither the width of the vectors
// nor a fused multiply-add shows in the result.
#pragma once

#include <algorithm>

#include <attn/detail/packing.hpp>
#include <attn/lsh.hpp>
#include <attn/simd/batch.hpp>
#include <attn/simd/widen.hpp>
#include <attn/view.hpp>

namespace attn::detail {

/// Coefficients a[c][direction] of the coordinates of a vector, padded with zeros to `stride`.
struct lsh_directions {
  static constexpr index_t group = 4;  // directions per pass over a tile
  const double* a;
  index_t stride;  // a multiple of `group`
  index_t n;
};

template <class Arch>
class lsh_tile {
  static constexpr int W = simd::width<double, Arch>, N = 2;
  using B = simd::batch<double, Arch>;

 public:
  static constexpr index_t rows = N * W;

  /// Numbers of scratch: `floats` for d coordinates, `doubles` for n directions.
  [[nodiscard]] static constexpr index_t floats(index_t d) noexcept { return 2 * rows * d; }
  [[nodiscard]] static constexpr index_t doubles(index_t stride) noexcept {
    return rows * (stride + 1);
  }

  lsh_tile(float* scratch, double* result, index_t d, const lsh_directions& directions) noexcept
      : xt_(scratch), x_(scratch + rows * d), result_(result), d_(d), a_(directions) {}

  /// Takes in rows [first, first + n) of a head, n ≤ `rows`: ‖x‖² and all products.
  template <class Source>
  void load(const Source& source, index_t first, index_t n) noexcept {
    if (source.direct != nullptr) {
      transpose_in<float, Arch>(source.direct + first * source.row_stride, source.row_stride, n, d_,
                                1.0f, xt_, rows);
    } else {
      source.read(first, n, d_, x_, d_);
      transpose_in<float, Arch>(x_, d_, n, d_, 1.0f, xt_, rows);
    }
    constexpr int R = static_cast<int>(lsh_directions::group);
    if (a_.stride == 0) return multiply<true, 0>(0);
    multiply<true, R>(0);
    for (index_t r = R; r < a_.stride; r += R) multiply<false, R>(r);
  }

  [[nodiscard]] const double* norm2() const noexcept { return result_; }
  [[nodiscard]] const double* product(index_t direction) const noexcept {
    return result_ + (direction + 1) * rows;
  }

 private:
  // Directions [r, r + R) against the tile; with the first ones the norms.
  template <bool Norm, int R>
  void multiply(index_t r) noexcept {
    B sum[R + 1][N], norm[N];
    for (int j = 0; j < N; ++j) {
      norm[j] = B(0.0);
      for (int i = 0; i < R; ++i) sum[i][j] = B(0.0);
    }
    const float* x = xt_;
    const double* a = a_.a + r;
    for (index_t c = 0; c < d_; ++c, x += rows, a += a_.stride) {
      B v[N];
#pragma GCC unroll 2
      for (int j = 0; j < N; ++j) v[j] = simd::widen<Arch>(x + j * W);
      if constexpr (Norm) {
#pragma GCC unroll 2
        for (int j = 0; j < N; ++j) norm[j] = simd::multiply_add(v[j], v[j], norm[j]);
      }
#pragma GCC unroll 4
      for (int i = 0; i < R; ++i) {
        const B coefficient(a[i]);
#pragma GCC unroll 2
        for (int j = 0; j < N; ++j) sum[i][j] = simd::multiply_add(v[j], coefficient, sum[i][j]);
      }
    }
    for (int j = 0; j < N; ++j) {
      if constexpr (Norm) norm[j].store_aligned(result_ + j * W);
      for (int i = 0; i < R; ++i) sum[i][j].store_aligned(result_ + (r + i + 1) * rows + j * W);
    }
  }

  float* xt_;  // [d][rows]
  float* x_;   // [rows][d]
  double* result_;
  index_t d_;
  lsh_directions a_;
};

/// A set of rows of one head as float, whatever they are stored as.
template <class Arch, class Stored>
[[nodiscard]] row_source<float> make_lsh_source(const tensor_view<Stored>& x, index_t b,
                                                index_t h) noexcept {
  return make_row_source<float, Arch>(x, b, h);
}

}  // namespace attn::detail
