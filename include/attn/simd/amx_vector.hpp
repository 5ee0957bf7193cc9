// SPDX-License-Identifier: MIT
//
// The vector code beside the tiles: AVX-512 whatever the program is built for (amx.hpp), where the
// batches of the rest of this folder cannot be used.
#pragma once

#include <attn/simd/amx.hpp>

#if defined(ATTN_HAS_AMX)

#include <bit>

#include <immintrin.h>

#include <attn/simd/exp.hpp>

namespace attn::simd::amx {

using floats = __m512;
using words = __m512i;

// GCC before 13 warns of its own intrinsics where they start from an undefined vector; the versions
// with a mask, here of every lane, start from zero and compile to the same instruction.
inline constexpr __mmask16 every_word = 0xffff;
inline constexpr __mmask8 every_pair = 0xff;

ATTN_AMX_INLINE floats load(const float* p) noexcept { return _mm512_loadu_ps(p); }
ATTN_AMX_INLINE void store(float* p, floats x) noexcept { _mm512_storeu_ps(p, x); }
ATTN_AMX_INLINE void store(std::uint16_t* p, words x) noexcept { _mm512_storeu_si512(p, x); }
ATTN_AMX_INLINE floats fill(float x) noexcept { return _mm512_set1_ps(x); }
ATTN_AMX_INLINE floats zero() noexcept { return _mm512_setzero_ps(); }
ATTN_AMX_INLINE floats add(floats a, floats b) noexcept { return _mm512_add_ps(a, b); }
/// The product rounded, also where the compiler would fuse it with an addition that follows: scores
/// that masks have gone over are scaled in memory, and the others must get the same bits.
ATTN_AMX_INLINE floats multiply(floats a, floats b) noexcept {
  floats x = _mm512_mul_ps(a, b);
  asm("" : "+v"(x));
  return x;
}

/// Lanes [0, n), none where n <= 0.
ATTN_AMX_INLINE __mmask16 first_lanes(index_t n) noexcept {
  return static_cast<__mmask16>(n >= 16 ? 0xffffu : n <= 0 ? 0u : (1u << n) - 1u);
}
ATTN_AMX_INLINE floats load_lanes(const float* p, __mmask16 lanes) noexcept {
  return _mm512_maskz_loadu_ps(lanes, p);
}
ATTN_AMX_INLINE void store_lanes(float* p, floats x, __mmask16 lanes) noexcept {
  _mm512_mask_storeu_ps(p, lanes, x);
}

/// 2^x for any x: the exp of exp.hpp on a number already multiplied by log2(e).
ATTN_AMX_INLINE floats exp2(floats x) noexcept {
  const floats f = _mm512_maskz_reduce_ps(every_word, x, 1 | 8);  // x − floor(x)
  floats p = fill(simd::detail::exp2_floor_f32[5]);
  p = _mm512_fmadd_ps(p, f, fill(simd::detail::exp2_floor_f32[4]));
  p = _mm512_fmadd_ps(p, f, fill(simd::detail::exp2_floor_f32[3]));
  p = _mm512_fmadd_ps(p, f, fill(simd::detail::exp2_floor_f32[2]));
  p = _mm512_fmadd_ps(p, f, fill(simd::detail::exp2_floor_f32[1]));
  p = _mm512_fmadd_ps(p, f, fill(simd::detail::exp2_floor_f32[0]));
  return _mm512_maskz_scalef_ps(every_word, p, x);
}

/// The same to 1e-4, for weights that are rounded to 8 bits anyway (Remez exchange, as there).
ATTN_AMX_INLINE floats exp2_rough(floats x) noexcept {
  const floats f = _mm512_maskz_reduce_ps(every_word, x, 1 | 8);
  floats p = fill(0.0770670465f);
  p = _mm512_fmadd_ps(p, f, fill(0.227644985f));
  p = _mm512_fmadd_ps(p, f, fill(0.695116788f));
  p = _mm512_fmadd_ps(p, f, fill(1.0f));
  return _mm512_maskz_scalef_ps(every_word, p, x);
}

/// a and b as sums of Parts bfloat16 numbers, the largest first: lane i of part p is the pair of
/// the p-th parts of a_i (low) and b_i (high). Three parts hold every float whose exponent leaves
/// room for them, |x| >= smallest_split; two hold 16 bits of it, one 8. Rounds half away from 0.
template <int Parts>
ATTN_AMX_INLINE void split(floats a, floats b, words (&parts)[Parts]) noexcept {
  const words half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32(-0x10000);
#pragma GCC unroll 3
  for (int p = 0; p < Parts; ++p) {
    const words ra = _mm512_add_epi32(_mm512_castps_si512(a), half);
    const words rb = _mm512_add_epi32(_mm512_castps_si512(b), half);
    const words low = _mm512_maskz_srli_epi32(every_word, ra, 16);
    parts[p] = _mm512_ternarylogic_epi32(upper, rb, low, 0xca);  // upper ? rb : low
    if (p + 1 < Parts) {
      a = _mm512_sub_ps(a, _mm512_castsi512_ps(_mm512_and_si512(ra, upper)));
      b = _mm512_sub_ps(b, _mm512_castsi512_ps(_mm512_and_si512(rb, upper)));
    }
  }
}

/// Below it the third part of a number would be subnormal, which tile products read as 0; above
/// the largest the first part would round to infinity.
inline constexpr float smallest_split = 0x1p-102f, largest_split = 3.3e38f;

/// Whether numbers can be split, kept over a row: 0 can.
struct split_check {
  words largest, smallest;

  ATTN_AMX_INLINE void start() noexcept {
    largest = _mm512_setzero_si512();
    smallest = _mm512_set1_epi32(-1);
  }
  ATTN_AMX_INLINE void see(floats x) noexcept {
    const words u = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
    largest = _mm512_maskz_max_epu32(every_word, largest, u);
    // One less, so that 0 is the largest of all.
    smallest =
        _mm512_maskz_min_epu32(every_word, smallest, _mm512_add_epi32(u, _mm512_set1_epi32(-1)));
  }
  [[nodiscard]] ATTN_AMX_INLINE bool good(float limit) const noexcept {
    const words low = _mm512_set1_epi32(std::bit_cast<int>(smallest_split) - 1);
    const words high = _mm512_set1_epi32(std::bit_cast<int>(limit));
    return (_mm512_cmplt_epu32_mask(smallest, low) | _mm512_cmpgt_epu32_mask(largest, high)) == 0;
  }
};

/// 16 x 16 words transposed.
ATTN_AMX_INLINE void transpose(words (&r)[16]) noexcept {
  words t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_maskz_unpacklo_epi32(every_word, r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_maskz_unpackhi_epi32(every_word, r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_maskz_unpacklo_epi64(every_pair, t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_maskz_unpackhi_epi64(every_pair, t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_maskz_unpacklo_epi64(every_pair, t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_maskz_unpackhi_epi64(every_pair, t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_maskz_shuffle_i32x4(every_word, r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_maskz_shuffle_i32x4(every_word, r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_maskz_shuffle_i32x4(every_word, r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_maskz_shuffle_i32x4(every_word, r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_maskz_shuffle_i32x4(every_word, t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_maskz_shuffle_i32x4(every_word, t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_maskz_shuffle_i32x4(every_word, t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_maskz_shuffle_i32x4(every_word, t[i + 4], t[i + 12], 0xdd);
  }
}
ATTN_AMX_INLINE words as_words(floats x) noexcept { return _mm512_castps_si512(x); }
ATTN_AMX_INLINE floats as_floats(words x) noexcept { return _mm512_castsi512_ps(x); }

}  // namespace attn::simd::amx

#endif  // ATTN_HAS_AMX
