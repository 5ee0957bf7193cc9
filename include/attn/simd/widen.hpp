// SPDX-License-Identifier: MIT
#pragma once

#include <attn/simd/batch.hpp>

namespace attn::simd {

/// W floats from any address as the W doubles of a batch; exact. (Left to itself GCC 12 converts in
/// halves through memory, and the load that follows waits for both stores.)
template <class Arch>
ATTN_INLINE batch<double, Arch> widen(const float* p) noexcept {
#if defined(__AVX512F__)
  if constexpr (is_avx512<Arch>) return _mm512_cvtps_pd(_mm256_loadu_ps(p));
#endif
#if defined(__AVX__)
  if constexpr (is_avx<Arch>) return _mm256_cvtps_pd(_mm_loadu_ps(p));
#endif
#if defined(__SSE2__)
  if constexpr (is_sse<Arch>) {
    // Not by way of double*: that may neither alias floats nor stand at their addresses.
    return _mm_cvtps_pd(_mm_castsi128_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i_u*>(p))));
  }
#endif
#if defined(__aarch64__)
  if constexpr (is_neon64<Arch>) return vcvt_f64_f32(vld1_f32(p));
#endif
  alignas(64) double lanes[width<double, Arch>];
  for (int i = 0; i < width<double, Arch>; ++i) lanes[i] = static_cast<double>(p[i]);
  return load<double, Arch>(lanes);
}

/// The doubles of a batch, rounded to nearest, as W floats at any address.
template <class Arch>
ATTN_INLINE void narrow(const batch<double, Arch>& x, float* p) noexcept {
#if defined(__AVX512F__)
  if constexpr (is_avx512<Arch>) return _mm256_storeu_ps(p, _mm512_cvtpd_ps(x));
#endif
#if defined(__AVX__)
  if constexpr (is_avx<Arch>) return _mm_storeu_ps(p, _mm256_cvtpd_ps(x));
#endif
#if defined(__SSE2__)
  if constexpr (is_sse<Arch>) {  // as in widen
    return _mm_storel_epi64(reinterpret_cast<__m128i_u*>(p), _mm_castps_si128(_mm_cvtpd_ps(x)));
  }
#endif
#if defined(__aarch64__)
  if constexpr (is_neon64<Arch>) return vst1_f32(p, vcvt_f32_f64(x));
#endif
  alignas(64) double lanes[width<double, Arch>];
  x.store_aligned(lanes);
  for (int i = 0; i < width<double, Arch>; ++i) p[i] = static_cast<float>(lanes[i]);
}

}  // namespace attn::simd
