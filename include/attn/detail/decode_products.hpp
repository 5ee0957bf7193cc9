// SPDX-License-Identifier: MIT
//
// The two products of attention of few queries: lanes run along the head dimension, R rows (queries
// of heads that share keys and values) meet a block of keys while it is in L1.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>

#include <attn/detail/tile_products.hpp>
#include <attn/simd/reduce.hpp>

namespace attn::detail::decode {

inline constexpr int block_keys = 32;
inline constexpr int tile_rows = 4;

/// R <= tile_rows rows and the keys [0, n_keys) of a block.
template <class T>
struct operands {
  const T* q;  ///< [R][ld_q] scaled, zeros from d_qk to ld_q
  index_t ld_q;
  const T* k;  ///< [n_keys][d_qk]
  index_t ldk, d_qk;
  const T* v;  ///< [n_keys][d_v]
  index_t ldv, d_v;
  index_t n_keys;
  T* s;  ///< [R][block_keys] scores, then weights
  T* o;  ///< [R][ld_o] output, not normalised
  index_t ld_o;
  bool first_rows;  ///< the first rows to meet the block: they ask for the next one
};

// s[r][j] = q_r · k_j, K keys at a time: their sums over lanes are taken together.
template <class T, class Arch, int R>
__attribute__((noinline)) void scores(const operands<T>& x) noexcept {
  using B = simd::batch<T, Arch>;
  constexpr int W = simd::width<T, Arch>, K = simd::lane_columns<T>;
  const operands<T> a = x;
  for (index_t j = 0; j < a.n_keys; j += K) {
    // The last group repeats its last key rather than read past it.
    std::array<const T*, K> k;
    for (int i = 0; i < K; ++i) {
      k[static_cast<std::size_t>(i)] = a.k + std::min<index_t>(j + i, a.n_keys - 1) * a.ldk;
    }
    B sum[R][K];
    ATTN_UNROLL for (int r = 0; r < R; ++r) {
      ATTN_UNROLL for (int i = 0; i < K; ++i) sum[r][i] = B(T(0));
    }
    const auto step = [&](index_t c, const auto& load) ATTN_LAMBDA_INLINE {
      B key[K];
      ATTN_UNROLL for (int i = 0; i < K; ++i) key[i] = load(k[static_cast<std::size_t>(i)] + c);
      ATTN_UNROLL for (int r = 0; r < R; ++r) {
        const B query = simd::load<T, Arch>(a.q + r * a.ld_q + c);
        ATTN_UNROLL for (int i = 0; i < K; ++i) {
          sum[r][i] = simd::multiply_add(key[i], query, sum[r][i]);
        }
      }
    };
    index_t c = 0;
    for (; c + W <= a.d_qk; c += W) {
      // One block ahead (16 KB at d = 128), into L2: 14.4 GB/s on a Zen 4 that reads 18; into L1
      // 7.5, not better than without.
      if (a.first_rows) {
        ATTN_UNROLL for (int i = 0; i < K; ++i) {
          __builtin_prefetch(k[static_cast<std::size_t>(i)] + block_keys * a.ldk + c, 0, 2);
        }
      }
      step(c, [](const T* p) ATTN_LAMBDA_INLINE { return simd::load_unaligned<T, Arch>(p); });
    }
    if (const index_t rest = a.d_qk - c; rest > 0) {
      step(c,
           [rest](const T* p) ATTN_LAMBDA_INLINE { return simd::load_partial<T, Arch>(p, rest); });
    }
    ATTN_UNROLL for (int r = 0; r < R; ++r) {
      T sums[K];
      simd::sums<T, Arch>(sum[r], sums);
      const auto valid = static_cast<std::size_t>(std::min<index_t>(K, a.n_keys - j));
      std::copy_n(sums, valid, a.s + r * block_keys + j);
    }
  }
}

// o_r += Σ_j s_rj v_j for N vectors of columns from c; N = 0: the last columns, fewer than W. The
// sum starts from 0, so that no chain of additions is longer than a block or the blocks of a chunk.
template <class T, class Arch, int R, int N>
ATTN_INLINE void value_columns(const operands<T>& a, index_t c) noexcept {
  using B = simd::batch<T, Arch>;
  constexpr int W = simd::width<T, Arch>, vectors = N == 0 ? 1 : N;
  T* o = a.o + c;
  B sum[R][vectors];
  ATTN_UNROLL for (int r = 0; r < R; ++r) {
    ATTN_UNROLL for (int x = 0; x < vectors; ++x) sum[r][x] = B(T(0));
  }
  const T* v = a.v + c;
  for (index_t j = 0; j < a.n_keys; ++j, v += a.ldv) {
    B value[vectors];
    ATTN_UNROLL for (int x = 0; x < vectors; ++x) {
      if (a.first_rows) __builtin_prefetch(v + block_keys * a.ldv + x * W, 0, 2);
      value[x] = N == 0 ? simd::load_partial<T, Arch>(v, a.d_v - c)
                        : simd::load_unaligned<T, Arch>(v + x * W);
    }
    ATTN_UNROLL for (int r = 0; r < R; ++r) {
      const B weight(a.s[r * block_keys + j]);
      ATTN_UNROLL for (int x = 0; x < vectors; ++x) {
        sum[r][x] = simd::multiply_add(weight, value[x], sum[r][x]);
      }
    }
  }
  ATTN_UNROLL for (int r = 0; r < R; ++r) {
    ATTN_UNROLL for (int x = 0; x < vectors; ++x) {
      T* out = o + r * a.ld_o + x * W;
      (simd::load<T, Arch>(out) + sum[r][x]).store_aligned(out);
    }
  }
}

template <class T, class Arch, int R>
__attribute__((noinline)) void values(const operands<T>& x) noexcept {
  constexpr int W = simd::width<T, Arch>;
  const operands<T> a = x;
  index_t c = 0;
  for (; c + 4 * W <= a.d_v; c += 4 * W) value_columns<T, Arch, R, 4>(a, c);
  for (; c + W <= a.d_v; c += W) value_columns<T, Arch, R, 1>(a, c);
  if (c < a.d_v) value_columns<T, Arch, R, 0>(a, c);
}

// The same where V holds an infinity or NaN that a row may not see: forbidden weights (−0) are left
// out. Same order of summation, so same bits.
template <class T, class Arch>
void selective_values(const operands<T>& a, int n_rows) noexcept {
  using B = simd::batch<T, Arch>;
  constexpr int W = simd::width<T, Arch>;
  for (int r = 0; r < n_rows; ++r) {
    for (index_t c = 0; c < a.d_v; c += W) {
      B sum(T(0));
      for (index_t j = 0; j < a.n_keys; ++j) {
        const T weight = a.s[r * block_keys + j];
        if (weight == T(0) && std::signbit(weight)) continue;
        const T* v = a.v + j * a.ldv + c;
        const B value = c + W <= a.d_v ? simd::load_unaligned<T, Arch>(v)
                                       : simd::load_partial<T, Arch>(v, a.d_v - c);
        sum = simd::multiply_add(B(weight), value, sum);
      }
      T* out = a.o + r * a.ld_o + c;
      (simd::load<T, Arch>(out) + sum).store_aligned(out);
    }
  }
}

// f.template operator()<R>() for R = n_rows.
template <class F>
void on_rows(index_t n_rows, const F& f) noexcept {
  switch (n_rows) {
  case 4:
    return f.template operator()<4>();
  case 3:
    return f.template operator()<3>();
  case 2:
    return f.template operator()<2>();
  default:
    return f.template operator()<1>();
  }
}

}  // namespace attn::detail::decode
