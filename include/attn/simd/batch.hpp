// SPDX-License-Identifier: MIT
//
// The vector type of the kernels and the few operations in which xsimd's versions (8.1 to 14) or
// the instruction sets differ. Only this folder includes xsimd or names an intrinsic.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include <xsimd/xsimd.hpp>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

// Small functions that must disappear into their caller: the tile products live in registers.
#define ATTN_INLINE inline __attribute__((always_inline))
#define ATTN_LAMBDA_INLINE __attribute__((always_inline))
#define ATTN_UNROLL _Pragma("GCC unroll 64")

namespace attn::simd {

/// The instruction set the translation unit is compiled for. Everything whose code depends on it
/// has it as a template parameter, so that objects built with different -m flags link together.
using default_arch = xsimd::default_arch;

template <class T, class Arch>
using batch = xsimd::batch<T, Arch>;

template <class T, class Arch>
inline constexpr int width = static_cast<int>(batch<T, Arch>::size);

template <class Arch>
inline constexpr bool is_avx512 = std::is_base_of_v<xsimd::avx512f, Arch>;
template <class Arch>
inline constexpr bool is_avx512dq = std::is_base_of_v<xsimd::avx512dq, Arch>;
template <class Arch>
inline constexpr bool is_avx = std::is_base_of_v<xsimd::avx, Arch>;
template <class Arch>
inline constexpr bool is_sse = std::is_base_of_v<xsimd::sse2, Arch> && !is_avx<Arch>;
template <class Arch>
inline constexpr bool is_neon64 = std::is_base_of_v<xsimd::neon64, Arch>;

/// Architectural vector registers: what a register tile is cut to.
template <class Arch>
inline constexpr int registers = is_avx512<Arch> || is_neon64<Arch> ? 32 : 16;

template <class T, class Arch>
ATTN_INLINE batch<T, Arch> load(const T* p) noexcept {
  return batch<T, Arch>::load_aligned(p);
}
template <class T, class Arch>
ATTN_INLINE batch<T, Arch> load_unaligned(const T* p) noexcept {
  return batch<T, Arch>::load_unaligned(p);
}

/// a * b + c. xsimd 8.1 has no AVX-512 version: it multiplies and adds, which clang does not join
/// (45% instead of 86% of the peak).
template <class T, class Arch>
ATTN_INLINE batch<T, Arch> multiply_add(const batch<T, Arch>& a, const batch<T, Arch>& b,
                                        const batch<T, Arch>& c) noexcept {
#if defined(__AVX512F__)
  if constexpr (is_avx512<Arch>) {
    if constexpr (sizeof(T) == 4)
      return _mm512_fmadd_ps(a, b, c);
    else
      return _mm512_fmadd_pd(a, b, c);
  }
#endif
  return xsimd::fma(a, b, c);
}

/// The same for one number, with the bits of a lane: a sum of products is joined or not as a
/// compiler likes, differently in each loop.
template <class T>
ATTN_INLINE T multiply_add(T a, T b, T c) noexcept {
#if defined(__FMA__) || defined(__AVX512F__) || defined(__aarch64__)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

/// Lanes that are NaN. Not x != x: xsimd 8.1 compares that as "ordered and different" on AVX and
/// AVX-512, where it is false for NaN.
template <class T, class Arch>
ATTN_INLINE auto is_nan(const batch<T, Arch>& x) noexcept {
  return !(x == x);
}

/// The larger of x and a bound that is no NaN; a NaN in x stays. xsimd::max keeps or loses it
/// depending on its version, so on x86 the instruction itself is named: it returns its second
/// operand where one is NaN.
template <class T, class Arch>
ATTN_INLINE batch<T, Arch> at_least(const batch<T, Arch>& x, const batch<T, Arch>& bound) noexcept {
#if defined(__AVX512F__)
  if constexpr (is_avx512<Arch> && sizeof(T) == 4) return _mm512_max_ps(bound, x);
  if constexpr (is_avx512<Arch> && sizeof(T) == 8) return _mm512_max_pd(bound, x);
#elif defined(__AVX__)
  if constexpr (is_avx<Arch> && sizeof(T) == 4) return _mm256_max_ps(bound, x);
  if constexpr (is_avx<Arch> && sizeof(T) == 8) return _mm256_max_pd(bound, x);
#elif defined(__SSE2__)
  if constexpr (is_sse<Arch> && sizeof(T) == 4) return _mm_max_ps(bound, x);
  if constexpr (is_sse<Arch> && sizeof(T) == 8) return _mm_max_pd(bound, x);
#endif
  return xsimd::select(x < bound, bound, x);
}

/// The smaller of x and a bound that is no NaN; a NaN in x stays.
template <class T, class Arch>
ATTN_INLINE batch<T, Arch> at_most(const batch<T, Arch>& x, const batch<T, Arch>& bound) noexcept {
#if defined(__AVX512F__)
  if constexpr (is_avx512<Arch> && sizeof(T) == 4) return _mm512_min_ps(bound, x);
  if constexpr (is_avx512<Arch> && sizeof(T) == 8) return _mm512_min_pd(bound, x);
#elif defined(__AVX__)
  if constexpr (is_avx<Arch> && sizeof(T) == 4) return _mm256_min_ps(bound, x);
  if constexpr (is_avx<Arch> && sizeof(T) == 8) return _mm256_min_pd(bound, x);
#elif defined(__SSE2__)
  if constexpr (is_sse<Arch> && sizeof(T) == 4) return _mm_min_ps(bound, x);
  if constexpr (is_sse<Arch> && sizeof(T) == 8) return _mm_min_pd(bound, x);
#endif
  return xsimd::select(x > bound, bound, x);
}

/// Bits of a float batch as integers of the same size, and back.
template <class T>
using bits_t = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;

template <class T, class Arch>
ATTN_INLINE batch<bits_t<T>, Arch> to_bits(const batch<T, Arch>& x) noexcept {
#if XSIMD_VERSION_MAJOR >= 9
  return xsimd::bitwise_cast<bits_t<T>>(x);
#else
  return xsimd::bitwise_cast<batch<bits_t<T>, Arch>>(x);
#endif
}
template <class T, class Arch>
ATTN_INLINE batch<T, Arch> from_bits(const batch<bits_t<T>, Arch>& x) noexcept {
#if XSIMD_VERSION_MAJOR >= 9
  return xsimd::bitwise_cast<T>(x);
#else
  return xsimd::bitwise_cast<batch<T, Arch>>(x);
#endif
}

/// a where `which`, else b. xsimd 8.1's own does not compile with AVX-512 and -O0.
template <class T, class Arch, class Which>
ATTN_INLINE batch<bits_t<T>, Arch> select_bits(const Which& which, const batch<bits_t<T>, Arch>& a,
                                               const batch<bits_t<T>, Arch>& b) noexcept {
#if defined(__AVX512F__)
  if constexpr (is_avx512<Arch> && sizeof(T) == 4) {
    return _mm512_mask_blend_epi32(static_cast<__mmask16>(which.data), b, a);
  } else if constexpr (is_avx512<Arch>) {
    return _mm512_mask_blend_epi64(static_cast<__mmask8>(which.data), b, a);
  } else {
    return xsimd::select(which, a, b);
  }
#else
  return xsimd::select(which, a, b);
#endif
}

/// The same number, of which the compiler knows nothing: keeps it from unrolling or rescheduling a
/// loop. Inner products written as loops of an opaque trip count of 4 are as fast as unrolled by
/// hand and, unlike that, fast with every compiler (clang 19 spilled: 41-65% of the peak).
ATTN_INLINE int opaque(int n) noexcept {
  asm volatile("" : "+r"(n));
  return n;
}

/// Sum over the lanes.
template <class T, class Arch>
ATTN_INLINE T sum(const batch<T, Arch>& x) noexcept {
#if XSIMD_VERSION_MAJOR >= 9
  return xsimd::reduce_add(x);
#else
  return xsimd::hadd(x);
#endif
}

/// {0, 1, 2, ...}
template <class T, class Arch>
ATTN_INLINE batch<T, Arch> iota() noexcept {
  alignas(64) T lanes[width<T, Arch>];
  for (int i = 0; i < width<T, Arch>; ++i) lanes[i] = static_cast<T>(i);
  return load<T, Arch>(lanes);
}

}  // namespace attn::simd
