// SPDX-License-Identifier: MIT
//
// What happens to a chunk of scores between its product and its softmax, where anything does:
// softcap, rule, keys that cannot be split; a row's first maximum. Plain memory, Arch's vectors.
#pragma once

#include <algorithm>
#include <array>
#include <limits>

#include <attn/detail/amx_products.hpp>
#include <attn/score_rule.hpp>
#include <attn/simd/math.hpp>

#if defined(ATTN_HAS_AMX)

namespace attn::detail::amx {

/// One tile of 32 queries and what it has seen of its keys.
struct query_block {
  index_t first_row, n_rows;
  std::uint16_t* q;  // [steps][parts][1024]
  float* o;          // [dims][32]
  float* banked;     // the same, of earlier keys; only where there are many
  bool has_banked;
  float* negm;            // [32]  −m in units of ln 2; 0 while a lane has no m
  float* l;               // [32]  of the block
  float* l_before;        // [32]  of the blocks before
  float* l_lost;          // [32]  what rounding has taken from l_before so far
  float* factor;          // [32]  1/l, at the end
  std::uint32_t waiting;  // lanes that have not met a key yet
  std::uint32_t redo;     // lanes that met numbers that cannot be split
  std::uint32_t patch;    // lanes that met values of which some are infinite or NaN
  key_range any, all;     // keys that some, and every, lane sees
  std::array<key_range, tile_rows> lane;
};

/// What a chunk of scores [32 keys][32 queries] has to go through.
struct score_changes {
  float scale = 1;                 // by which scores are still to be multiplied
  float softcap = 0;               // 0: off
  const float* bias = nullptr;     // [n_bias][32], of the chunk; null: none
  index_t n_bias = 0;              // keys that have one; those behind are forbidden
  bool masked = false;             // lanes see different keys
  std::uint32_t unsplittable = 0;  // keys of the chunk
  std::uint32_t holes = 0;         // keys of which some values count as 0
};

inline constexpr float log2e = 1.44269504f, ln2 = 0.693147181f;

template <class Arch>
void change_scores(float* s, index_t k0, query_block& t, const score_changes& x) noexcept {
  using B = simd::batch<float, Arch>;
  constexpr int W = simd::width<float, Arch>;
  constexpr float infinity = std::numeric_limits<float>::infinity();
  alignas(64) float lo[tile_rows], hi[tile_rows];
  for (std::size_t r = 0; x.masked && r < tile_rows; ++r) {
    lo[r] = static_cast<float>(std::clamp<index_t>(t.lane[r].begin - k0, 0, chunk_keys));
    hi[r] = static_cast<float>(std::clamp<index_t>(t.lane[r].end - k0, 0, chunk_keys));
  }
  // Softcap in units of ln 2.
  const B cap(x.softcap * log2e), inverse(x.softcap == 0 ? 0 : ln2 / x.softcap);
  for (index_t key = 0; key < chunk_keys; ++key) {
    const B at(static_cast<float>(key));
    for (index_t r = 0; r < tile_rows; r += W) {
      float* p = s + key * tile_rows + r;
      B y = simd::load<float, Arch>(p) * B(x.scale);
      if (x.softcap != 0) y = cap * simd::tanh<float, Arch>(y * inverse);
      if (x.bias != nullptr) {
        if (key < x.n_bias) {
          const B bias = simd::load<float, Arch>(x.bias + key * tile_rows + r);
          const B sum = simd::multiply_add(bias, B(log2e), y);
          y = xsimd::select(bias == B(-infinity), bias, sum);
        } else {
          y = B(-infinity);
        }
      }
      if (x.masked) {
        const auto allowed =
            (simd::load<float, Arch>(lo + r) <= at) & (at < simd::load<float, Arch>(hi + r));
        y = xsimd::select(allowed, y, B(-infinity));
      }
      y.store_aligned(p);
    }
  }
  for (std::uint32_t keys = x.holes & ~x.unsplittable; keys != 0; keys &= keys - 1) {
    const float* row = s + index_t{__builtin_ctz(keys)} * tile_rows;
    for (int r = 0; r < tile_rows; ++r) {
      if (row[r] != -infinity) t.patch |= 1u << r;
    }
  }
  // Keys that cannot be split count as 0 in the products: a row that may attend to one is redone,
  // the others never notice.
  for (std::uint32_t bad = x.unsplittable; bad != 0; bad &= bad - 1) {
    float* row = s + index_t{__builtin_ctz(bad)} * tile_rows;
    for (int r = 0; r < tile_rows; ++r) {
      if (row[r] != -infinity) t.redo |= 1u << r;
      row[r] = -infinity;
    }
  }
}

/// Lanes that wait take the maximum of their first chunk with an allowed key as their m.
template <class Arch>
void take_first_maximum(const float* s, float scale, query_block& t) noexcept {
  using B = simd::batch<float, Arch>;
  constexpr int W = simd::width<float, Arch>;
  constexpr float infinity = std::numeric_limits<float>::infinity();
  for (int r0 = 0; r0 < tile_rows; r0 += W) {
    B m(-infinity);
    for (index_t key = 0; key < chunk_keys; ++key) {
      m = xsimd::max(m, simd::load<float, Arch>(s + key * tile_rows + r0) * B(scale));
    }
    alignas(64) float lanes[static_cast<std::size_t>(W)];
    m.store_aligned(lanes);
    for (int r = r0; r < r0 + W; ++r) {
      const float x = lanes[r - r0];
      if ((t.waiting >> r & 1) == 0 || x == -infinity) continue;
      t.negm[r] = -x;
      t.waiting &= ~(1u << r);
    }
  }
}

}  // namespace attn::detail::amx

#endif  // ATTN_HAS_AMX
