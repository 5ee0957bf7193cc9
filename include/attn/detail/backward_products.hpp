// SPDX-License-Identifier: MIT
//
// The products of the backward pass on register tiles.
//
// Layout as in tile_products.hpp: lanes are queries, and what belongs to a tile of queries is
// transposed, [..][QS]. Here QS is that of a full tile whatever the number of its vectors, so that
// one set of kernels serves all.
//
//   P   [keys][QS] = exp(QT·K − lse)                    weights
//   G   [keys][QS] = P ∘ (dOT·V − D)                    gradients of the scores
//   dQT [d_qk][QS] += K^T G                             tiles::pv of the forward pass
//   dV  [keys][d_v ] += P dO,  dK [keys][d_qk] += G Q   lanes are columns
//
// A forbidden pair is −0 in P and in G, which no allowed one is.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include <attn/detail/tile_products.hpp>

namespace attn::detail::tiles {

/// Operands of start + XT·Y over one run of keys: scores from Q and K, and dO·v from dO and V.
template <class T>
struct lane_product {
  const T* xt;  ///< [d][QS], from the first vector of the run
  const T* y;   ///< [n_keys][d], rows ldy apart
  index_t ldy;
  index_t d;
  index_t n_keys;
  const T* start;  ///< [QS]
  T* padded;       ///< [MR][d], for the last rows where n_keys is no multiple of MR
};

/// What a run may see, per lane and key of the run.
template <class T>
struct lane_mask {
  const T *lo, *hi;  ///< masking::range: lane may see keys lo <= first_key + key < hi
  index_t first_key;
  const T* bias;  ///< masking::bias: [n_keys][QS], −inf forbids
};

// epilogue(key, lane, value) for every vector of the product; keys up to the next multiple of MR.
template <class T, class Arch, int N, int QS, class Epilogue>
ATTN_INLINE void for_each_product(const lane_product<T>& a, const Epilogue& epilogue) noexcept {
  using B = batch<T, Arch>;
  constexpr int MR = tile_size<T, Arch>::keys, W = tile_size<T, Arch>::width;
  for (index_t i = 0; i < a.n_keys; i += MR) {
    const T* y = a.y + i * a.ldy;
    index_t ldy = a.ldy;
    if (i + MR > a.n_keys) {
      for (index_t r = 0; r < MR; ++r) {
        if (i + r < a.n_keys)
          std::copy_n(y + r * ldy, a.d, a.padded + r * a.d);
        else
          std::fill_n(a.padded + r * a.d, a.d, T(0));
      }
      y = a.padded, ldy = a.d;
    }
    B s[MR][N];
    ATTN_UNROLL for (int j = 0; j < N; ++j) {
      const B start = simd::load<T, Arch>(a.start + j * W);
      ATTN_UNROLL for (int r = 0; r < MR; ++r) s[r][j] = start;
    }
    accumulate_scores<T, Arch, MR, N, QS, false>(s, a.xt, y, ldy, a.d, {});
    ATTN_UNROLL for (int j = 0; j < N; ++j) {
      ATTN_UNROLL for (int r = 0; r < MR; ++r) epilogue(i + r, j * W, s[r][j]);
    }
  }
}

// Scores as they are.
template <class T, class Arch, int N, int QS>
__attribute__((noinline)) void scores(const lane_product<T>& operands, T* s) noexcept {
  // A copy, whose address nobody has: see qk_softmax.
  const lane_product<T> a = operands;
  for_each_product<T, Arch, N, QS>(
      a, [s](index_t key, int lane, const batch<T, Arch>& x)
             ATTN_LAMBDA_INLINE { x.store_aligned(s + key * QS + lane); });
}

/// e^x for a score less its lse. No weight is above 1; where scores are so large that their
/// rounding is, the exponential could be anything up to infinity.
template <class T, class Arch>
ATTN_INLINE batch<T, Arch> weight(const batch<T, Arch>& x) noexcept {
  return simd::exp<T, Arch>(simd::at_most(x, batch<T, Arch>(T(0))));
}

// P of one run; operands.start is −lse.
template <class T, class Arch, int N, int QS, masking M>
__attribute__((noinline)) void weights(const lane_product<T>& operands, const lane_mask<T>& masks,
                                       T* p) noexcept {
  using B = batch<T, Arch>;
  constexpr T infinity = std::numeric_limits<T>::infinity();
  const lane_product<T> a = operands;
  const lane_mask<T> mask = masks;
  for_each_product<T, Arch, N, QS>(a, [&](index_t key, int lane, const B& x) ATTN_LAMBDA_INLINE {
    B e;
    if constexpr (M == masking::none) {
      e = weight<T, Arch>(x);
    } else if constexpr (M == masking::range) {
      const B at(static_cast<T>(mask.first_key + key));
      const auto allowed =
          (simd::load<T, Arch>(mask.lo + lane) <= at) & (at < simd::load<T, Arch>(mask.hi + lane));
      e = xsimd::select(allowed, weight<T, Arch>(x), B(T(-0.0)));
    } else {
      const B bias = simd::load<T, Arch>(mask.bias + key * QS + lane);
      e = xsimd::select(bias == B(-infinity), B(T(-0.0)), weight<T, Arch>(x + bias));
    }
    e.store_aligned(p + key * QS + lane);
  });
}

/// `x` where the weight p is of an allowed pair, else −0. x + 0 is never −0.
template <class T, class Arch>
ATTN_INLINE batch<T, Arch> where_allowed(const batch<T, Arch>& p,
                                         const batch<T, Arch>& x) noexcept {
  // As integers: −0 == 0 as numbers.
  const auto forbidden = simd::to_bits<T, Arch>(batch<T, Arch>(T(-0.0)));
  const auto bits = simd::to_bits<T, Arch>(x + batch<T, Arch>(T(0)));
  return simd::from_bits<T, Arch>(
      simd::select_bits<T, Arch>(simd::to_bits<T, Arch>(p) == forbidden, forbidden, bits));
}

// G of one run; operands.start is −D. `slope` [n_keys][QS] multiplies it, null is 1 (Masked alone).
template <class T, class Arch, int N, int QS, bool Masked>
__attribute__((noinline)) void score_gradients(const lane_product<T>& operands, const T* p,
                                               [[maybe_unused]] const T* slope, T* g) noexcept {
  using B = batch<T, Arch>;
  const lane_product<T> a = operands;
  for_each_product<T, Arch, N, QS>(a, [&](index_t key, int lane, const B& x) ATTN_LAMBDA_INLINE {
    const index_t at = key * QS + lane;
    const B weight = simd::load<T, Arch>(p + at);
    B gradient = weight * x;
    if constexpr (Masked) {
      if (slope != nullptr) gradient = gradient * simd::load<T, Arch>(slope + at);
      gradient = where_allowed<T, Arch>(weight, gradient);
    }
    gradient.store_aligned(g + at);
  });
}

/// Operands of C += A X: dV from P and dO, dK from G and Q. Each sum starts from 0 and is then
/// added to C: one chain over all queries rounds the same way each time where terms are alike.
template <class T>
struct column_product {
  const T* a;  ///< [n_keys][QS], from the first row of the run
  const T* x;  ///< [n_rows][columns], rows ldx apart
  index_t ldx;
  T* c;  ///< [n_keys][columns], rows ldc apart
  index_t ldc;
  index_t n_keys, n_rows, columns;  ///< columns: a multiple of W
};

/// Keys x vectors of columns in registers: 16 or 12 accumulators, the vectors of a row of X, a key.
template <class Arch>
inline constexpr int column_keys = simd::registers<Arch> == 32 ? 4 : 6;
template <class Arch>
inline constexpr int column_vectors = simd::registers<Arch> == 32 ? 4 : 2;

template <class T, class Arch, int MR, int N, int QS>
ATTN_INLINE void column_tile(const column_product<T>& p, index_t key, index_t column) noexcept {
  using B = batch<T, Arch>;
  constexpr int W = tile_size<T, Arch>::width;
  const T* a = p.a + key * QS;
  const T* x = p.x + column;
  T* c = p.c + key * p.ldc + column;
  B sum[MR][N];
  ATTN_UNROLL for (int r = 0; r < MR; ++r) {
    ATTN_UNROLL for (int j = 0; j < N; ++j) sum[r][j] = B(T(0));
  }
  for (index_t row = p.n_rows; row > 0; --row, ++a, x += p.ldx) {
    B y[N];
    ATTN_UNROLL for (int j = 0; j < N; ++j) y[j] = simd::load<T, Arch>(x + j * W);
    ATTN_UNROLL for (int r = 0; r < MR; ++r) {
      const B factor(a[r * QS]);
      ATTN_UNROLL for (int j = 0; j < N; ++j) {
        sum[r][j] = simd::multiply_add(factor, y[j], sum[r][j]);
      }
    }
  }
  ATTN_UNROLL for (int r = 0; r < MR; ++r) {
    ATTN_UNROLL for (int j = 0; j < N; ++j) {
      T* out = c + r * p.ldc + j * W;
      (simd::load<T, Arch>(out) + sum[r][j]).store_aligned(out);
    }
  }
}

template <class T, class Arch, int N, int QS>
__attribute__((noinline)) void column_strip(const column_product<T>& operands,
                                            index_t column) noexcept {
  constexpr int MR = column_keys<Arch>;
  const column_product<T> p = operands;
  index_t key = 0;
  for (; key + MR <= p.n_keys; key += MR) column_tile<T, Arch, MR, N, QS>(p, key, column);
  for (; key + 2 <= p.n_keys; key += 2) column_tile<T, Arch, 2, N, QS>(p, key, column);
  if (key < p.n_keys) column_tile<T, Arch, 1, N, QS>(p, key, column);
}

template <class T, class Arch, int QS>
void columns(const column_product<T>& p) noexcept {
  constexpr int W = tile_size<T, Arch>::width, N = column_vectors<Arch>;
  index_t column = 0;
  for (; column + N * W <= p.columns; column += N * W) column_strip<T, Arch, N, QS>(p, column);
  if constexpr (N > 2) {
    if (column + 2 * W <= p.columns) column_strip<T, Arch, 2, QS>(p, column), column += 2 * W;
  }
  if (column < p.columns) column_strip<T, Arch, 1, QS>(p, column);
}

// The same where X holds an infinity or NaN in a row that some key is not for: forbidden pairs are
// left out instead of multiplied. Same order of summation, so same bits. Rare, so plain.
template <class T, class Arch, int QS>
__attribute__((noinline)) void columns_selective(const column_product<T>& p) noexcept {
  using B = batch<T, Arch>;
  constexpr int W = tile_size<T, Arch>::width;
  for (index_t key = 0; key < p.n_keys; ++key) {
    for (index_t column = 0; column < p.columns; column += W) {
      B sum(T(0));
      for (index_t row = 0; row < p.n_rows; ++row) {
        const T factor = p.a[key * QS + row];
        if (factor == T(0) && std::signbit(factor)) continue;
        const B x = simd::load<T, Arch>(p.x + row * p.ldx + column);
        sum = simd::multiply_add(B(factor), x, sum);
      }
      T* c = p.c + key * p.ldc + column;
      (simd::load<T, Arch>(c) + sum).store_aligned(c);
    }
  }
}

}  // namespace attn::detail::tiles
