// SPDX-License-Identifier: MIT
//
// Rows of 16-bit integers. Their sums of products are exact, so they are the same in any order,
// whatever the width of the vectors.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <attn/simd/batch.hpp>
#include <attn/view.hpp>

namespace attn::simd {

/// Numbers in a row of integers come in groups of so many.
inline constexpr index_t int16_group = 32;

template <class Arch>
inline constexpr bool is_avx2 = is_avx512<Arch> || std::is_base_of_v<xsimd::avx2, Arch>;

/// out[i] = Σ_c x[i][c] a[c] over n numbers, whole groups, for R ≤ 4 rows; the rest of out is 0. No
/// sum of some of the products reaches 2^31.
template <class Arch, int R>
ATTN_INLINE void integer_dots(const std::int16_t* const (&x)[R], const std::int16_t* a, index_t n,
                              std::int32_t (&out)[4]) noexcept {
#if defined(__AVX2__)
  if constexpr (is_avx2<Arch>) {
    const auto at = [](const std::int16_t* p) ATTN_LAMBDA_INLINE {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    };
    __m256i sum[4];
    ATTN_UNROLL for (int i = 0; i < 4; ++i) sum[i] = _mm256_setzero_si256();
    for (index_t c = 0; c < n; c += 16) {
      const __m256i direction = at(a + c);
      ATTN_UNROLL for (int i = 0; i < R; ++i) {
        sum[i] = _mm256_add_epi32(sum[i], _mm256_madd_epi16(at(x[i] + c), direction));
      }
    }
    const __m256i s =
        _mm256_hadd_epi32(_mm256_hadd_epi32(sum[0], sum[1]), _mm256_hadd_epi32(sum[2], sum[3]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                     _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1)));
    return;
  }
#endif
#if defined(__SSE2__)
  if constexpr (is_sse<Arch> || is_avx<Arch>) {
    const auto at = [](const std::int16_t* p) ATTN_LAMBDA_INLINE {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    };
    __m128i sum[4];
    ATTN_UNROLL for (int i = 0; i < 4; ++i) sum[i] = _mm_setzero_si128();
    for (index_t c = 0; c < n; c += 8) {
      const __m128i direction = at(a + c);
      ATTN_UNROLL for (int i = 0; i < R; ++i) {
        sum[i] = _mm_add_epi32(sum[i], _mm_madd_epi16(at(x[i] + c), direction));
      }
    }
    const __m128i s01 =
        _mm_add_epi32(_mm_unpacklo_epi32(sum[0], sum[1]), _mm_unpackhi_epi32(sum[0], sum[1]));
    const __m128i s23 =
        _mm_add_epi32(_mm_unpacklo_epi32(sum[2], sum[3]), _mm_unpackhi_epi32(sum[2], sum[3]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                     _mm_add_epi32(_mm_unpacklo_epi64(s01, s23), _mm_unpackhi_epi64(s01, s23)));
    return;
  }
#endif
#if defined(__aarch64__)
  if constexpr (is_neon64<Arch>) {
    for (int i = 0; i < R; ++i) {
      int32x4_t low = vdupq_n_s32(0), high = vdupq_n_s32(0);
      for (index_t c = 0; c < n; c += 8) {
        const int16x8_t u = vld1q_s16(x[i] + c), v = vld1q_s16(a + c);
        low = vmlal_s16(low, vget_low_s16(u), vget_low_s16(v));
        high = vmlal_s16(high, vget_high_s16(u), vget_high_s16(v));
      }
      out[i] = vaddvq_s32(vaddq_s32(low, high));
    }
    std::fill(out + R, out + 4, 0);
    return;
  }
#endif
  std::fill(out + R, out + 4, 0);
  for (int i = 0; i < R; ++i) {
    std::int32_t sum = 0;
    for (index_t c = 0; c < n; ++c) sum += std::int32_t{x[i][c]} * a[c];
    out[i] = sum;
  }
}

/// out[c] = Σ_i x[i][c] w[i] for n columns, whole groups, and an even number of rows. No sum of
/// some of the products reaches 2^31.
template <class Arch>
ATTN_INLINE void integer_sums(const std::int16_t* const* x, const std::int16_t* w, index_t n_rows,
                              index_t n, std::int32_t* out) noexcept {
#if defined(__SSE2__)
  // Two rows at a time: their numbers side by side, times their weights side by side.
  const auto weights = [&](index_t i) ATTN_LAMBDA_INLINE {
    return static_cast<int>(static_cast<std::uint32_t>(static_cast<std::uint16_t>(w[i + 1])) << 16 |
                            static_cast<std::uint16_t>(w[i]));
  };
#endif
#if defined(__AVX2__)
  if constexpr (is_avx2<Arch>) {
    const auto at = [](const std::int16_t* p) ATTN_LAMBDA_INLINE {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    };
    for (index_t c = 0; c < n; c += 32) {
      __m256i low[2], high[2];  // columns 0 to 3 and 8 to 11 of 16, and the others
      ATTN_UNROLL for (int j = 0; j < 2; ++j) low[j] = high[j] = _mm256_setzero_si256();
      for (index_t i = 0; i < n_rows; i += 2) {
        const __m256i both = _mm256_set1_epi32(weights(i));
        ATTN_UNROLL for (int j = 0; j < 2; ++j) {
          const __m256i u = at(x[i] + c + 16 * j), v = at(x[i + 1] + c + 16 * j);
          low[j] = _mm256_add_epi32(low[j], _mm256_madd_epi16(_mm256_unpacklo_epi16(u, v), both));
          high[j] = _mm256_add_epi32(high[j], _mm256_madd_epi16(_mm256_unpackhi_epi16(u, v), both));
        }
      }
      ATTN_UNROLL for (int j = 0; j < 2; ++j) {
        auto* to = reinterpret_cast<__m256i*>(out + c + 16 * j);
        _mm256_storeu_si256(to, _mm256_permute2x128_si256(low[j], high[j], 0x20));
        _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(low[j], high[j], 0x31));
      }
    }
    return;
  }
#endif
#if defined(__SSE2__)
  if constexpr (is_sse<Arch> || is_avx<Arch>) {
    const auto at = [](const std::int16_t* p) ATTN_LAMBDA_INLINE {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    };
    for (index_t c = 0; c < n; c += 16) {
      __m128i low[2], high[2];
      ATTN_UNROLL for (int j = 0; j < 2; ++j) low[j] = high[j] = _mm_setzero_si128();
      for (index_t i = 0; i < n_rows; i += 2) {
        const __m128i both = _mm_set1_epi32(weights(i));
        ATTN_UNROLL for (int j = 0; j < 2; ++j) {
          const __m128i u = at(x[i] + c + 8 * j), v = at(x[i + 1] + c + 8 * j);
          low[j] = _mm_add_epi32(low[j], _mm_madd_epi16(_mm_unpacklo_epi16(u, v), both));
          high[j] = _mm_add_epi32(high[j], _mm_madd_epi16(_mm_unpackhi_epi16(u, v), both));
        }
      }
      ATTN_UNROLL for (int j = 0; j < 2; ++j) {
        auto* to = reinterpret_cast<__m128i*>(out + c + 8 * j);
        _mm_storeu_si128(to, low[j]), _mm_storeu_si128(to + 1, high[j]);
      }
    }
    return;
  }
#endif
  std::fill_n(out, n, 0);
  for (index_t i = 0; i < n_rows; ++i) {
    for (index_t c = 0; c < n; ++c) out[c] += std::int32_t{x[i][c]} * w[i];
  }
}

/// out[i] = factor · x[i] for n numbers, rounded to nearest, halves to even; no result is above
/// 2^15. `out` has whole groups, zeros behind the numbers.
template <class Arch>
ATTN_INLINE void to_int16(const float* x, float factor, index_t n, std::int16_t* out) noexcept {
  index_t c = 0;
#if defined(__SSE2__)
  const __m128 f = _mm_set1_ps(factor);
  for (; c + 8 <= n; c += 8) {
    const __m128i low = _mm_cvtps_epi32(_mm_mul_ps(_mm_loadu_ps(x + c), f));
    const __m128i high = _mm_cvtps_epi32(_mm_mul_ps(_mm_loadu_ps(x + c + 4), f));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + c), _mm_packs_epi32(low, high));
  }
#elif defined(__aarch64__)
  for (; c + 4 <= n; c += 4) {
    vst1_s16(out + c, vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + c), factor))));
  }
#endif
  for (; c < n; ++c) {
    out[c] =
        static_cast<std::int16_t>(std::clamp(std::nearbyint(x[c] * factor), -0x1p15f, 0x1p15f - 1));
  }
  std::fill(out + n, out + (n + int16_group - 1) / int16_group * int16_group, std::int16_t{0});
}

}  // namespace attn::simd
