// SPDX-License-Identifier: MIT
//
// Storage types to the type that kernels compute in, W elements at a time.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <type_traits>

#include <Eigen/Core>

#include <attn/simd/batch.hpp>
#include <attn/view.hpp>

namespace attn::simd {

/// float for float and the half types, double for double.
template <class Stored>
using compute_t =
    std::conditional_t<std::is_same_v<std::remove_cv_t<Stored>, double>, double, float>;

/// W elements of any storage type as a batch of T.
template <class T, class Arch, class Stored>
ATTN_INLINE batch<T, Arch> load_as(const Stored* p) noexcept {
  if constexpr (std::is_same_v<Stored, T>) return load_unaligned<T, Arch>(p);
#if defined(__AVX512F__)
  if constexpr (is_avx512<Arch> && std::is_same_v<T, float>) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    if constexpr (std::is_same_v<Stored, Eigen::half>) return _mm512_cvtph_ps(raw);
    if constexpr (std::is_same_v<Stored, Eigen::bfloat16>) {
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
    }
  }
#endif
#if defined(__AVX2__)
  if constexpr (is_avx<Arch> && std::is_same_v<T, float>) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
#if defined(__F16C__)
    if constexpr (std::is_same_v<Stored, Eigen::half>) return _mm256_cvtph_ps(raw);
#endif
    if constexpr (std::is_same_v<Stored, Eigen::bfloat16>) {
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
    }
  }
#endif
  alignas(64) T lanes[width<T, Arch>];
  for (int i = 0; i < width<T, Arch>; ++i) lanes[i] = static_cast<T>(p[i]);
  return load<T, Arch>(lanes);
}

/// W elements of a batch of T rounded to nearest into any storage type.
template <class T, class Arch, class Stored>
ATTN_INLINE void store_as(Stored* p, const batch<T, Arch>& x) noexcept {
  if constexpr (std::is_same_v<Stored, T>) {
    x.store_unaligned(p);
  } else {
#if defined(__AVX512F__)
    if constexpr (is_avx512<Arch> && std::is_same_v<Stored, Eigen::half>) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                          _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
      return;
    }
#endif
    alignas(64) T lanes[width<T, Arch>];
    x.store_aligned(lanes);
    for (int i = 0; i < width<T, Arch>; ++i) p[i] = static_cast<Stored>(lanes[i]);
  }
}

/// Whether any and whether all of the bools of some rows are true.
template <class Arch>
class bool_summary {
  using bytes = batch<std::uint8_t, Arch>;

 public:
  ATTN_INLINE void add(const bool* p, index_t n) noexcept {
    constexpr int width = static_cast<int>(bytes::size);
    const auto* raw = reinterpret_cast<const std::uint8_t*>(p);
    index_t i = 0;
    for (; i + width <= n; i += width) {
      const bytes x = bytes::load_unaligned(raw + i);
      any_ = any_ | x;
      every_ = every_ & x;
    }
    for (; i < n; ++i) add(p[i]);
  }
  ATTN_INLINE void add(bool x) noexcept {
    tail_any_ |= x;
    tail_every_ &= x;
  }
  [[nodiscard]] ATTN_INLINE bool any() const noexcept {
    return tail_any_ || xsimd::any(any_ != bytes(std::uint8_t{0}));
  }
  [[nodiscard]] ATTN_INLINE bool every() const noexcept {
    return tail_every_ && xsimd::all(every_ == bytes(std::uint8_t{1}));
  }

 private:
  bytes any_ = bytes(std::uint8_t{0}),
        every_ = bytes(std::uint8_t{1});  // {} would be a list of lanes
  bool tail_any_ = false, tail_every_ = true;
};

/// W bools as numbers to add to scores: true is 0, false is −inf.
template <class T, class Arch>
ATTN_INLINE batch<T, Arch> load_mask(const bool* p) noexcept {
#if defined(__AVX512F__)
  if constexpr (is_avx512<Arch> && sizeof(T) == 4) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __mmask16 forbidden = _mm512_cmpeq_epi32_mask(wide, _mm512_setzero_si512());
    return _mm512_maskz_mov_ps(forbidden, _mm512_set1_ps(-std::numeric_limits<float>::infinity()));
  }
#endif
#if defined(__AVX2__)
  if constexpr (is_avx<Arch> && sizeof(T) == 4) {
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m256 forbidden = _mm256_castsi256_ps(_mm256_cmpeq_epi32(wide, _mm256_setzero_si256()));
    return _mm256_and_ps(forbidden, _mm256_set1_ps(-std::numeric_limits<float>::infinity()));
  }
#endif
  alignas(64) T lanes[width<T, Arch>];
  for (int i = 0; i < width<T, Arch>; ++i) {
    lanes[i] = p[i] ? T(0) : -std::numeric_limits<T>::infinity();
  }
  return load<T, Arch>(lanes);
}

}  // namespace attn::simd
