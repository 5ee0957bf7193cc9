// SPDX-License-Identifier: MIT
//
// Score rules on a tile of scores: what a block of keys means to a tile of queries.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include <attn/detail/packing.hpp>
#include <attn/detail/tile_products.hpp>
#include <attn/score_rule.hpp>
#include <attn/simd/convert.hpp>

namespace attn::detail {

/// What a rule does to a tile of scores.
enum class tile_effect {
  none,  ///< no pair is allowed
  all,   ///< every pair is allowed and no score changes
  some,
};

/// Numbers to add to the scores of queries [i0, i0 + n_rows) and keys [j0, j0 + n_keys) of (b, h):
/// value[key][lane], lanes up to `ld`, a multiple of W. −inf forbids.
template <class T>
struct bias_tile {
  T* value;
  T* staging;  ///< [max_rows][key_block + W], for rules that come row by row
  index_t ld;
  index_t b, h, i0, n_rows, j0, n_keys;
  bool written = false;  ///< a rule further left has written: add instead

  static constexpr T infinity = std::numeric_limits<T>::infinity();

  template <class Arch>
  ATTN_INLINE void put(index_t key, index_t lane, const simd::batch<T, Arch>& x) const noexcept {
    using B = simd::batch<T, Arch>;
    T* at = value + key * ld + lane;
    if (!written) return x.store_aligned(at);
    const B old = simd::load<T, Arch>(at);
    const auto forbidden = (old == B(-infinity)) | (x == B(-infinity));
    xsimd::select(forbidden, B(-infinity), old + x).store_aligned(at);
  }

  /// Adds rows of T in `staging` (row stride `stride`), transposed.
  template <class Arch>
  void put_staged(const T* rows, index_t stride) noexcept {
    if (!written) {
      transpose_in<T, Arch>(rows, stride, n_rows, n_keys, T(1), value, ld);
    } else {
      constexpr int W = simd::width<T, Arch>;
      alignas(64) T columns[key_block * W];
      for (index_t lane = 0; lane < n_rows; lane += W) {
        transpose_in<T, Arch>(rows + lane * stride, stride, std::min<index_t>(W, n_rows - lane),
                              n_keys, T(1), columns, W);
        for (index_t key = 0; key < n_keys; ++key) {
          put<Arch>(key, lane, simd::load<T, Arch>(columns + key * W));
        }
      }
    }
    written = true;
  }

  static constexpr index_t staging_stride = key_block + 16;
};

/// Asks for the part of a mask or bias that the next block of keys will need: each row of it is a
/// stream of its own, too many for the hardware to follow.
template <class Stored>
void prefetch_rows(const Stored* p, index_t row, index_t n_rows, index_t n_keys) noexcept {
  constexpr index_t line = 64 / static_cast<index_t>(sizeof(Stored));
  for (index_t i = 0; i < n_rows; ++i) {
    for (index_t j = 0; j < n_keys; j += line) {
      __builtin_prefetch(p + i * row + n_keys + j, 0, 2);
    }
  }
}

/// Rules whose keys() says all have nothing to add.
template <class Arch, class T, score_rule Rule>
requires(Rule::kind == rule_kind::range) tile_effect add_bias(const Rule&, bias_tile<T>&)
noexcept { return tile_effect::all; }

template <class Arch, class T>
tile_effect add_bias(const boolean_mask& rule, bias_tile<T>& t) noexcept {
  const index_t row = step(rule.allowed, 2), column = step(rule.allowed, 3);
  const bool* mask = rule.at(t.b, t.h, t.i0, t.j0);
  // 1. Most blocks of real masks are all true or all false: look first.
  if (column == 1 && row != 0) prefetch_rows(mask, row, t.n_rows, t.n_keys);
  simd::bool_summary<Arch> seen;
  const index_t n_different = row == 0 ? 1 : t.n_rows;
  for (index_t i = 0; i < n_different; ++i) {
    const bool* m = mask + i * row;
    if (column == 1)
      seen.add(m, t.n_keys);
    else
      for (index_t j = 0; j < (column == 0 ? 1 : t.n_keys); ++j) seen.add(m[j * column]);
  }
  if (!seen.any()) return tile_effect::none;
  if (seen.every()) return tile_effect::all;
  // 2. Rows of 0 and −inf, then transposed.
  constexpr int W = simd::width<T, Arch>;
  for (index_t i = 0; i < t.n_rows; ++i) {
    const bool* m = mask + i * row;
    T* out = t.staging + i * bias_tile<T>::staging_stride;
    index_t j = 0;
    if (column == 1) {
      for (; j + W <= t.n_keys; j += W) {
        simd::load_mask<T, Arch>(m + j).store_unaligned(out + j);
      }
    }
    for (; j < t.n_keys; ++j) out[j] = m[j * column] ? T(0) : -bias_tile<T>::infinity;
  }
  t.template put_staged<Arch>(t.staging, bias_tile<T>::staging_stride);
  return tile_effect::some;
}

template <class Arch, class T, class Stored>
tile_effect add_bias(const additive_bias<Stored>& rule, bias_tile<T>& t) noexcept {
  const index_t row = step(rule.bias, 2), column = step(rule.bias, 3);
  const Stored* bias = rule.at(t.b, t.h, t.i0, t.j0);
  if (column == 1 && row != 0) prefetch_rows(bias, row, t.n_rows, t.n_keys);
  // Rows of a large bias often lie a multiple of 4 KB apart, in one set of L1: transposing 16 of
  // them in place would miss at each step, so they are copied first.
  copy_rows<T, Arch>(bias, row, column, t.n_rows, t.n_keys, t.staging,
                     bias_tile<T>::staging_stride);
  t.template put_staged<Arch>(t.staging, bias_tile<T>::staging_stride);
  return tile_effect::some;
}

template <class Arch, class T>
tile_effect add_bias(const alibi_bias& rule, bias_tile<T>& t) noexcept {
  using B = simd::batch<T, Arch>;
  constexpr int W = simd::width<T, Arch>;
  const B negative_slope(-static_cast<T>(rule.slopes[static_cast<std::size_t>(t.h)]));
  for (index_t r = 0; r < t.n_rows; r += W) {
    // Distances are exact as long as T holds them.
    const index_t first = saturating_add(saturating_add(t.i0 + r, rule.offset), -t.j0);
    const B distance = B(static_cast<T>(first)) + simd::iota<T, Arch>();
    for (index_t key = 0; key < t.n_keys; ++key) {
      t.template put<Arch>(key, r, negative_slope * xsimd::abs(distance - B(static_cast<T>(key))));
    }
  }
  t.written = true;
  return tile_effect::some;
}

/// Smallest and largest of n ids. Four chains: a block that is left out costs little else.
struct id_range {
  index_t min, max;
};
[[nodiscard]] inline id_range range_of_ids(const index_t* id, index_t stride, index_t n) noexcept {
  id_range x[4] = {{id[0], id[0]}, {id[0], id[0]}, {id[0], id[0]}, {id[0], id[0]}};
  const auto see = [](id_range& r, index_t value) {
    r = {std::min(r.min, value), std::max(r.max, value)};
  };
  index_t i = 0;
  for (; i + 4 <= n; i += 4) {
    ATTN_UNROLL for (int u = 0; u < 4; ++u) see(x[u], id[(i + u) * stride]);
  }
  for (; i < n; ++i) see(x[0], id[i * stride]);
  for (int u = 1; u < 4; ++u) see(x[0], x[u].min), see(x[0], x[u].max);
  return x[0];
}

template <class Arch, class T>
tile_effect add_bias(const segment_mask& rule, bias_tile<T>& t) noexcept {
  using B = simd::batch<T, Arch>;
  constexpr int W = simd::width<T, Arch>;
  // 1. Packed sequences are sorted: most blocks are of one segment, or of others altogether.
  const id_range q_range = range_of_ids(rule.q_at(t.b, t.i0), rule.q_ids.stride(2), t.n_rows);
  const id_range k_range = range_of_ids(rule.k_at(t.b, t.j0), rule.k_ids.stride(2), t.n_keys);
  if (q_range.max < k_range.min || k_range.max < q_range.min) return tile_effect::none;
  const index_t smallest = std::min(q_range.min, k_range.min);
  const index_t largest = std::max(q_range.max, k_range.max);
  if (smallest == largest) return tile_effect::all;
  // 2. Ids relative to the smallest are compared as numbers where T holds them exactly. The
  //    difference is taken without sign: it may not fit a signed one.
  const auto base = static_cast<std::uint64_t>(smallest);
  const auto spread = static_cast<std::uint64_t>(largest) - base;
  if (spread < (std::uint64_t{1} << std::numeric_limits<T>::digits)) {
    T* q = t.staging;
    for (index_t i = 0; i < t.n_rows; ++i) {
      q[i] = static_cast<T>(static_cast<std::uint64_t>(rule.q_id(t.b, t.i0 + i)) - base);
    }
    for (index_t key = 0; key < t.n_keys; ++key) {
      const B id(static_cast<T>(static_cast<std::uint64_t>(rule.k_id(t.b, t.j0 + key)) - base));
      for (index_t r = 0; r < t.n_rows; r += W) {
        const auto equal = simd::load<T, Arch>(q + r) == id;
        t.template put<Arch>(key, r, xsimd::select(equal, B(T(0)), B(-bias_tile<T>::infinity)));
      }
    }
    t.written = true;
    return tile_effect::some;
  }
  for (index_t i = 0; i < t.n_rows; ++i) {
    const index_t id = rule.q_id(t.b, t.i0 + i);
    for (index_t j = 0; j < t.n_keys; ++j) {
      t.staging[i * bias_tile<T>::staging_stride + j] =
          id == rule.k_id(t.b, t.j0 + j) ? T(0) : -bias_tile<T>::infinity;
    }
  }
  t.template put_staged<Arch>(t.staging, bias_tile<T>::staging_stride);
  return tile_effect::some;
}

template <class Arch, class T, class First, class Second>
requires(composed_rule<First, Second>::kind == rule_kind::bias) tile_effect
    add_bias(const composed_rule<First, Second>& rule, bias_tile<T>& t)
noexcept {
  const tile_effect first = add_bias<Arch>(rule.first, t);
  if (first == tile_effect::none) return first;
  const tile_effect second = add_bias<Arch>(rule.second, t);
  return second == tile_effect::all ? first : second;
}

/// Any rule of kind bias that has no version of its own (one a user wrote): pair by pair.
template <class Arch, class T, score_rule Rule>
requires(Rule::kind == rule_kind::bias) tile_effect add_bias(const Rule& rule, bias_tile<T>& t)
noexcept {
  for (index_t i = 0; i < t.n_rows; ++i) {
    for (index_t j = 0; j < t.n_keys; ++j) {
      t.staging[i * bias_tile<T>::staging_stride + j] = rule(T(0), t.b, t.h, t.i0 + i, t.j0 + j);
    }
  }
  t.template put_staged<Arch>(t.staging, bias_tile<T>::staging_stride);
  return tile_effect::some;
}

/// One score after the rule. What a bias adds is asked for apart, as for a tile: a key is forbidden
/// if that is −inf, and a score that overflowed to −inf meets +inf or NaN as NaN. A function is not
/// asked about −inf.
template <class T, score_rule Rule>
[[nodiscard]] T ruled_score(const Rule& rule, T score, index_t b, index_t h, index_t i, index_t j) {
  if constexpr (Rule::kind == rule_kind::function) {
    return score == -bias_tile<T>::infinity ? score : static_cast<T>(rule(score, b, h, i, j));
  } else {
    const T bias = static_cast<T>(rule(T(0), b, h, i, j));
    return bias == -bias_tile<T>::infinity ? bias : score + bias;
  }
}

/// The rule itself, pair by pair, on scores s[key][lane] of queries [i0, i0 + n_rows): what rules
/// of kind function need. Keys outside a row's range become −inf.
template <class T, score_rule Rule>
void apply_rule(const Rule& rule, const bias_tile<T>& t, T* s, index_t n_kv) noexcept {
  for (index_t i = 0; i < t.n_rows; ++i) {
    const key_range keys = rule.keys(t.b, t.h, t.i0 + i, n_kv);
    for (index_t j = 0; j < t.n_keys; ++j) {
      T& score = s[j * t.ld + i];
      const index_t key = t.j0 + j;
      if (key < keys.begin || key >= keys.end)
        score = -bias_tile<T>::infinity;
      else
        score = ruled_score(rule, score, t.b, t.h, t.i0 + i, key);
    }
  }
}

}  // namespace attn::detail
