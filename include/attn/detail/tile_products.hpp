// SPDX-License-Identifier: MIT
//
// The two products of attention on register tiles, with the softmax between them.
//
// Layout. Vector lanes are queries: a query tile is NR vectors of W queries, and everything that
// belongs to it is transposed, [..][QS] with QS = NR W. Keys are scalars that are broadcast from
// memory as they lie, so K and V need no packing. Maximum, sum and rescaling of the softmax are
// lane-wise: no horizontal reduction anywhere.
//
//           queries (lanes) ->
//   QT  [d_qk][QS]   scaled queries          P   [keys][QS]   weights of a block of keys
//   OT  [d_v ][QS]   output, not normalised  l, −m  [QS]      state of the softmax
//
// A register tile is MR keys x N vectors: 8 x 3 where there are 32 registers (24 accumulators, 3
// queries, 1 key), 4 x 3 where there are 16. N < NR is a part of the tile: at the diagonal of a
// causal mask only the later vectors see a key.
//
// A forbidden weight is stored as −0, which exp never gives: the product with V can tell it from
// one that underflowed, without knowing the mask.
#pragma once

#include <algorithm>
#include <limits>

#include <attn/detail/lookahead.hpp>
#include <attn/simd/exp.hpp>
#include <attn/view.hpp>

namespace attn::detail {

/// Keys per block: P is 24 KB with AVX-512. 96 to 192 are equal within noise, 64 up to 5% slower.
inline constexpr int key_block = 128;

template <class T, class Arch>
struct tile_size {
  static constexpr int width = simd::width<T, Arch>;
  static constexpr int keys = simd::registers<Arch> == 32 ? 8 : 4;  // MR
  static constexpr int max_vectors = 3;                             // NR
  static constexpr int max_rows = max_vectors * width;
};

enum class masking {
  none,
  range,  ///< lane may see keys lo <= key < hi, counted from the start of the block
  bias,   ///< a tile of numbers to add, −inf forbids
};

/// Operands of one run of keys. Pointers to per-lane data start at the first vector of the run.
template <class T>
struct qk_operands {
  const T* qt;  ///< [d][QS]
  const T* k;   ///< [n_keys][d], rows ldk apart
  index_t ldk;
  index_t d;
  index_t n_keys;
  index_t first_key;  ///< within the block: P, bias and lo/hi count from there
  const T* negm;      ///< [QS]
  T* l;               ///< [QS]
  T* p;               ///< [n_keys][QS]
  const T* lo;        ///< [QS]
  const T* hi;        ///< [QS]
  const T* bias;      ///< [n_keys][QS]
  T* k_padded;        ///< [MR][d], for the last rows where n_keys is no multiple of MR
};

namespace tiles {

template <class T, class Arch>
using batch = simd::batch<T, Arch>;

/// Steps of a product of scores between two prefetches.
inline constexpr int steps_per_line = 4;

// s[r][j] += Σ_c k[r][c] qt[c][j]
template <class T, class Arch, int MR, int N, int QS, bool Prefetch, class Run = line_run>
ATTN_INLINE void accumulate_scores(batch<T, Arch> (&s)[MR][N], const T* qt, const T* k, index_t ldk,
                                   index_t d, Run ahead) noexcept {
  constexpr int W = tile_size<T, Arch>::width;
  // Two base pointers reach 8 rows with the scaled addressing of x86.
  const T* k4 = k + (MR > 4 ? 4 : 0) * ldk;
  const auto step = [&]() ATTN_LAMBDA_INLINE {
    batch<T, Arch> q[N];
    ATTN_UNROLL for (int j = 0; j < N; ++j) q[j] = simd::load<T, Arch>(qt + j * W);
    ATTN_UNROLL for (int r = 0; r < MR; ++r) {
      const batch<T, Arch> key(r < 4 ? k[r * ldk] : k4[(r - 4) * ldk]);
      ATTN_UNROLL for (int j = 0; j < N; ++j) s[r][j] = simd::multiply_add(key, q[j], s[r][j]);
    }
    qt += QS;
    ++k;
    ++k4;
  };
  for (index_t c = d / steps_per_line; c > 0; --c) {
    if constexpr (Prefetch) ahead.ask();
    for (int u = simd::opaque(steps_per_line); u > 0; --u) step();
  }
  for (index_t c = d % steps_per_line; c > 0; --c) step();
}

// MR keys: scores, minus the running maximum, exp, row sums. Subtracting m costs nothing: the
// accumulators start from −m.
template <class T, class Arch, int N, int QS, masking M, class Ahead>
ATTN_INLINE void qk_softmax_tile(const qk_operands<T>& a, const T* k, index_t ldk, index_t i,
                                 Ahead* ahead) noexcept {
  using B = batch<T, Arch>;
  constexpr int MR = tile_size<T, Arch>::keys, W = tile_size<T, Arch>::width;
  B s[MR][N];
  ATTN_UNROLL for (int j = 0; j < N; ++j) {
    const B negm = simd::load<T, Arch>(a.negm + j * W);
    ATTN_UNROLL for (int r = 0; r < MR; ++r) s[r][j] = negm;
  }
  using run = decltype(ahead->next(0));
  const run lines = ahead != nullptr ? ahead->next(a.d / steps_per_line) : run{};
  accumulate_scores<T, Arch, MR, N, QS, true>(s, a.qt, k, ldk, a.d, lines);
  ATTN_UNROLL for (int j = 0; j < N; ++j) {
    B sum[2];
    ATTN_UNROLL for (int r = 0; r < MR; ++r) {
      B e;
      if constexpr (M == masking::none) {
        e = simd::exp<T, Arch>(s[r][j]);
      } else if constexpr (M == masking::range) {
        const B key(static_cast<T>(a.first_key + i + r));
        const auto allowed =
            (simd::load<T, Arch>(a.lo + j * W) <= key) & (key < simd::load<T, Arch>(a.hi + j * W));
        e = xsimd::select(allowed, simd::exp<T, Arch>(s[r][j]), B(T(-0.0)));
      } else {
        const B bias = simd::load<T, Arch>(a.bias + (i + r) * QS + j * W);
        e = xsimd::select(bias == B(-std::numeric_limits<T>::infinity()), B(T(-0.0)),
                          simd::exp<T, Arch>(s[r][j] + bias));
      }
      e.store_aligned(a.p + (i + r) * QS + j * W);
      if (r < 2)
        sum[r] = e;
      else
        sum[r & 1] = sum[r & 1] + e;
    }
    (simd::load<T, Arch>(a.l + j * W) + (sum[0] + sum[1])).store_aligned(a.l + j * W);
  }
}

// The last rows of K, fewer than MR, with zeros behind them.
template <class T, class Arch>
const T* pad_keys(const qk_operands<T>& a, index_t first) noexcept {
  constexpr int MR = tile_size<T, Arch>::keys;
  for (index_t r = 0; r < MR; ++r) {
    T* row = a.k_padded + r * a.d;
    if (first + r < a.n_keys)
      std::copy_n(a.k + (first + r) * a.ldk, a.d, row);
    else
      std::fill_n(row, a.d, T(0));
  }
  return a.k_padded;
}

// One run of keys through qk_softmax_tile. `ahead`: what to prefetch meanwhile, or null.
template <class T, class Arch, int N, int QS, masking M, class Ahead>
__attribute__((noinline)) void qk_softmax(const qk_operands<T>& operands, Ahead* ahead) noexcept {
  // A copy, whose address nobody has: vector stores may alias anything, so that the fields behind
  // the reference would be loaded again after each of them.
  const qk_operands<T> a = operands;
  constexpr int MR = tile_size<T, Arch>::keys;
  index_t i = 0;
  for (; i + MR <= a.n_keys; i += MR) {
    qk_softmax_tile<T, Arch, N, QS, M>(a, a.k + i * a.ldk, a.ldk, i, ahead);
  }
  if constexpr (M != masking::none) {
    if (i < a.n_keys) {
      qk_softmax_tile<T, Arch, N, QS, M>(a, pad_keys<T, Arch>(a, i), a.d, i, ahead);
    }
  }
}

// Scores as they are, into p: [n_keys][QS], all vectors of the tile. They start from `init`.
template <class T, class Arch, int NR>
__attribute__((noinline)) void qk_scores(const qk_operands<T>& operands, const T* init) noexcept {
  const qk_operands<T> a = operands;
  using B = batch<T, Arch>;
  constexpr int MR = tile_size<T, Arch>::keys, W = tile_size<T, Arch>::width, QS = NR * W;
  for (index_t i = 0; i < a.n_keys; i += MR) {
    const bool whole = i + MR <= a.n_keys;
    const T* k = whole ? a.k + i * a.ldk : pad_keys<T, Arch>(a, i);
    B s[MR][NR];
    ATTN_UNROLL for (int j = 0; j < NR; ++j) {
      const B start = simd::load<T, Arch>(init + j * W);
      ATTN_UNROLL for (int r = 0; r < MR; ++r) s[r][j] = start;
    }
    accumulate_scores<T, Arch, MR, NR, QS, false>(s, a.qt, k, whole ? a.ldk : a.d, a.d, {});
    ATTN_UNROLL for (int r = 0; r < MR; ++r) {
      ATTN_UNROLL for (int j = 0; j < NR; ++j) {
        s[r][j].store_aligned(a.p + (i + r) * QS + j * W);
      }
    }
  }
}

/// Keys whose products with V are summed in one go, from 0, before the sum is added to the output:
/// with one chain over all keys, equal values and weights came out wrong by 6e-5 of themselves at
/// n_kv = 8192 (rounding that goes the same way each time), now by 9e-7.
inline constexpr int value_chain = 64;
static_assert(key_block % value_chain == 0);

/// What the sums of a run become.
enum class sums_are {
  stored,     ///< OT has no content: saves a pass of zeros
  added,      ///< summed from 0, then added to OT
  continued,  ///< start from OT
};

/// Operands of OT += V^T P over one run of keys.
template <class T>
struct pv_operands {
  const T* p;  ///< [n_keys][QS]
  const T* v;  ///< [n_keys][d], rows ldv apart
  index_t ldv;
  index_t n_keys;
  index_t d;
  T* ot;  ///< [d][QS]
  sums_are sums;
};

template <class T, class Arch, int MR, int N, int QS>
ATTN_INLINE void pv_tile(const pv_operands<T>& a, index_t c) noexcept {
  using B = batch<T, Arch>;
  constexpr int W = tile_size<T, Arch>::width;
  B o[MR][N];
  if (a.sums != sums_are::continued) {
    ATTN_UNROLL for (int r = 0; r < MR; ++r) {
      ATTN_UNROLL for (int j = 0; j < N; ++j) o[r][j] = B(T(0));
    }
  } else {
    ATTN_UNROLL for (int r = 0; r < MR; ++r) {
      ATTN_UNROLL for (int j = 0; j < N; ++j) {
        o[r][j] = simd::load<T, Arch>(a.ot + (c + r) * QS + j * W);
      }
    }
  }
  const T* p = a.p;
  const T* v = a.v + c;
  for (index_t n = a.n_keys; n > 0; --n, p += QS, v += a.ldv) {
    B weight[N];
    ATTN_UNROLL for (int j = 0; j < N; ++j) weight[j] = simd::load<T, Arch>(p + j * W);
    ATTN_UNROLL for (int r = 0; r < MR; ++r) {
      const B value(v[r]);
      ATTN_UNROLL for (int j = 0; j < N; ++j) {
        o[r][j] = simd::multiply_add(value, weight[j], o[r][j]);
      }
    }
  }
  if (a.sums == sums_are::added) {
    ATTN_UNROLL for (int r = 0; r < MR; ++r) {
      ATTN_UNROLL for (int j = 0; j < N; ++j) {
        o[r][j] = simd::load<T, Arch>(a.ot + (c + r) * QS + j * W) + o[r][j];
      }
    }
  }
  ATTN_UNROLL for (int r = 0; r < MR; ++r) {
    ATTN_UNROLL for (int j = 0; j < N; ++j) o[r][j].store_aligned(a.ot + (c + r) * QS + j * W);
  }
}

template <class T, class Arch, int N, int QS>
__attribute__((noinline)) void pv(const pv_operands<T>& operands) noexcept {
  const pv_operands<T> a = operands;
  constexpr int MR = tile_size<T, Arch>::keys;
  index_t c = 0;
  for (; c + MR <= a.d; c += MR) pv_tile<T, Arch, MR, N, QS>(a, c);
  if constexpr (MR > 4) {
    if (c + 4 <= a.d) pv_tile<T, Arch, 4, N, QS>(a, c), c += 4;
  }
  if (c + 2 <= a.d) pv_tile<T, Arch, 2, N, QS>(a, c), c += 2;
  if (c < a.d) pv_tile<T, Arch, 1, N, QS>(a, c);
}

// The same where V holds an infinity or NaN that some lanes may not see: forbidden weights (−0)
// are left out instead of multiplied. Same order of summation, so same bits. Rare, so plain.
template <class T, class Arch, int QS>
__attribute__((noinline)) void pv_selective(const pv_operands<T>& a, int n_vectors) noexcept {
  using B = batch<T, Arch>;
  constexpr int W = tile_size<T, Arch>::width;
  for (index_t c = 0; c < a.d; ++c) {
    for (int j = 0; j < n_vectors; ++j) {
      T* out = a.ot + c * QS + j * W;
      B o = a.sums == sums_are::continued ? simd::load<T, Arch>(out) : B(T(0));
      for (index_t n = 0; n < a.n_keys; ++n) {
        const B weight = simd::load<T, Arch>(a.p + n * QS + j * W);
        const auto forbidden = B(T(1)) / weight == B(-std::numeric_limits<T>::infinity());
        const B sum = simd::multiply_add(B(a.v[n * a.ldv + c]), weight, o);
        o = xsimd::select(forbidden, o, sum);
      }
      if (a.sums == sums_are::added) o = simd::load<T, Arch>(out) + o;
      o.store_aligned(out);
    }
  }
}

}  // namespace tiles
}  // namespace attn::detail
