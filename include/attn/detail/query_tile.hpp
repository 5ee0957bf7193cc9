// SPDX-License-Identifier: MIT
//
// A tile of queries, a block of keys and values, and the scratch in which they meet
// (tile_fold.hpp).
#pragma once

#include <algorithm>
#include <utility>

#include <attn/detail/tile_products.hpp>

namespace attn::detail {

/// The state of NR vectors of queries, in scratch memory.
template <class T>
struct query_tile {
  int n_vectors;
  index_t first_row, n_rows;  // rows past n_rows in the last vector are padding
  T* qt;                      // [d_qk][QS]
  T* ot;                      // [d_v][QS]
  T* negm;                    // [QS]  −m, 0 while a lane has no m
  T* l;                       // [QS]  Σ exp(s − m); within a block, of that block
  T* l_before;                // [QS]  l at the start of the block
  T* l_lost;                  // [QS]  what rounding has taken from l so far
  T* waiting;                 // [QS]  1: a lane that has not met a key yet, else 0
  T* lo;                      // [QS]  allowed keys of each lane, from the start of the block
  T* hi;
  bool any_waiting;
  bool has_output;  // OT has been written
  T* banked;        // [d_v][QS]  output of earlier keys; only where there are many
  bool has_banked;

  /// Keys after which OT is set aside and summed anew: together with value_chain no sum has more
  /// than n_kv / bank_keys terms, 32 or 64.
  static constexpr index_t bank_keys = 16 * key_block;

  /// Takes its arrays from a scratch_carver.
  template <class Arch, class Memory>
  void carve(Memory& memory, index_t d_qk, index_t d_v, index_t n_kv) noexcept {
    constexpr index_t rows = tile_size<T, Arch>::max_rows;
    qt = memory.template take<T>(rows * d_qk);
    ot = memory.template take<T>(rows * d_v);
    if (n_kv > bank_keys) banked = memory.template take<T>(rows * d_v);
    for (T** lane : {&negm, &l, &l_before, &l_lost, &waiting, &lo, &hi}) {
      *lane = memory.template take<T>(rows);
    }
  }

  /// Before any key.
  void clear(index_t lanes) noexcept {
    for (T* lane : {l, l_lost, negm}) std::fill_n(lane, lanes, T(0));
    has_output = has_banked = false;
  }

  /// OT to what is banked.
  template <class Arch>
  void bank(index_t d_v) noexcept {
    if (!has_output) return;
    if (has_banked) {
      for (index_t x = 0; x < d_v * n_vectors * simd::width<T, Arch>; x += simd::width<T, Arch>) {
        (simd::load<T, Arch>(banked + x) + simd::load<T, Arch>(ot + x)).store_aligned(banked + x);
      }
    } else {
      std::swap(banked, ot);
    }
    has_banked = true, has_output = false;
  }

  /// OT is all there is. To be called at the end.
  template <class Arch>
  void collect(index_t d_v) noexcept {
    if (has_banked)
      bank<Arch>(d_v), std::swap(banked, ot);
    else if (!has_output)
      std::fill_n(ot, d_v * n_vectors * simd::width<T, Arch>, T(0));
    has_banked = false, has_output = true;
  }
};

/// Keys [first, last) of a block for vectors [v0, v1). `first` is a multiple of MR from the start
/// of the block; without a mask `last − first` is too.
struct key_run {
  index_t first, last;
  int v0, v1;
  bool masked;
};

/// A block of keys and values, key 0 at an absolute position that is a multiple of key_block.
template <class T>
struct key_value_block {
  const T* k;
  index_t ldk;
  const T* v;
  index_t ldv;
  index_t n_keys;
  bool v_finite;  ///< false: some value is inf or NaN (only looked at where runs are masked)
};

/// Scratch that the tiles of a thread share.
template <class T>
struct tile_scratch {
  T* p;     // [key_block + MR][QS]  weights
  T* s;     // the same              scores, where they are needed
  T* bias;  // the same              numbers to add; null without a bias rule. May be p: a
            //                       weight takes the place of its bias, and L1 holds one of them
  T* k_padded;  // [MR][d_qk]
  T* chain;     // [d_v][QS]    sums over one value_chain, where several runs share it

  template <class Arch, class Memory>
  void carve(Memory& memory, index_t d_qk, index_t d_v) noexcept {
    p = memory.template take<T>(block_size<Arch>());
    s = memory.template take<T>(block_size<Arch>());
    k_padded = memory.template take<T>(tile_size<T, Arch>::keys * d_qk);
    chain = memory.template take<T>(tile_size<T, Arch>::max_rows * d_v);
  }

  template <class Arch>
  [[nodiscard]] static constexpr index_t block_size() noexcept {
    return tile_size<T, Arch>::max_rows * (key_block + tile_size<T, Arch>::keys);
  }
};

}  // namespace attn::detail
