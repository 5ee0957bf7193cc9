// SPDX-License-Identifier: MIT
//
// The tile instructions of amx.hpp in plain C++, for tests on machines without them
// (ATTN_EMULATE_AMX), after the operation that Intel's manual describes. Slow. On a machine with
// AMX unit.amx_emulation holds them against the instructions, bit by bit.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include <attn/view.hpp>

namespace attn::simd::amx::emulation {

/// Eight tiles of 16 rows of 64 bytes.
struct tile_registers {
  std::uint32_t word[8][16][16];
};

[[nodiscard]] inline tile_registers& tiles() noexcept {
  static thread_local tile_registers all;
  return all;
}

/// Rows of 64 bytes, `stride` bytes apart.
inline void load(int tile, const void* p, index_t stride) noexcept {
  for (int r = 0; r < 16; ++r) {
    std::memcpy(tiles().word[tile][r], static_cast<const char*>(p) + r * stride, 64);
  }
}
inline void store(int tile, void* p, index_t stride) noexcept {
  for (int r = 0; r < 16; ++r) {
    std::memcpy(static_cast<char*>(p) + r * stride, tiles().word[tile][r], 64);
  }
}
inline void clear(int tile) noexcept {
  std::memset(tiles().word[tile], 0, sizeof tiles().word[tile]);
}

/// What TDPBF16PS does: even and odd numbers are summed apart by fused multiply-adds, both from 0,
/// and then added to the tile. Subnormal numbers count as 0, whatever the mode: operands, and every
/// sum. A product may leave the range of float as long as the sum with it does not. NaN and
/// infinities are IEEE 754's; which NaN comes out is left open.
///
/// The FMA instructions are taken for granted: without them each of the 8192 operations is a call.
#if defined(__x86_64__)
__attribute__((target("avx2,fma")))
#endif
inline void
multiply(int sums, int a, int b) noexcept {
  const auto high = [](std::uint32_t word) { return std::bit_cast<float>(word & 0xffff0000u); };
  const auto low = [](std::uint32_t word) { return std::bit_cast<float>(word << 16); };
  const auto flush = [](float x) {
    return x > -0x1p-126f && x < 0x1p-126f ? std::copysign(0.0f, x) : x;
  };
  tile_registers& t = tiles();
  float b_even[16][16], b_odd[16][16];
  for (int k = 0; k < 16; ++k) {
    for (int n = 0; n < 16; ++n) {
      b_even[k][n] = flush(low(t.word[b][k][n]));
      b_odd[k][n] = flush(high(t.word[b][k][n]));
    }
  }
  for (int m = 0; m < 16; ++m) {
    float even[16] = {}, odd[16] = {};
    for (int k = 0; k < 16; ++k) {
      const float a0 = flush(low(t.word[a][m][k])), a1 = flush(high(t.word[a][m][k]));
      for (int n = 0; n < 16; ++n) {
        even[n] = flush(std::fma(a0, b_even[k][n], even[n]));
        odd[n] = flush(std::fma(a1, b_odd[k][n], odd[n]));
      }
    }
    for (int n = 0; n < 16; ++n) {
      std::uint32_t& sum = t.word[sums][m][n];
      const float x = flush(std::bit_cast<float>(sum));
      sum = std::bit_cast<std::uint32_t>(flush(x + flush(even[n] + odd[n])));
    }
  }
}

}  // namespace attn::simd::amx::emulation
