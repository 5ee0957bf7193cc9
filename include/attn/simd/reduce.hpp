// SPDX-License-Identifier: MIT
//
// Horizontal reductions and partial vectors.
#pragma once

#include <algorithm>

#include <attn/simd/batch.hpp>
#include <attn/simd/transpose.hpp>

namespace attn::simd {

/// Largest lane; which of NaN and a number wins is not said.
template <class T, class Arch>
ATTN_INLINE T max(const batch<T, Arch>& x) noexcept {
  alignas(64) T lanes[width<T, Arch>];
  x.store_aligned(lanes);
  T m = lanes[0];
  for (int i = 1; i < width<T, Arch>; ++i) m = lanes[i] > m ? lanes[i] : m;
  return m;
}

/// out[i] = sum of the lanes of a[i], for the K = 16 / sizeof(T) vectors of a lane block: 15
/// instructions for 4 sums with AVX-512 instead of 10 each.
template <class T, class Arch>
ATTN_INLINE void sums(const batch<T, Arch> (&a)[lane_columns<T>], T* out) noexcept {
  if constexpr (has_lane_blocks<Arch>) {
    lane_block<T, Arch> x;
#pragma GCC unroll 4
    for (int i = 0; i < lane_columns<T>; ++i) x.v[i] = a[i];
    x.transpose();
    batch<T, Arch> s = x.v[0] + x.v[1];
    if constexpr (lane_columns<T> == 4) s = s + (x.v[2] + x.v[3]);
    fold_lanes(s, out);
  } else {
    for (int i = 0; i < lane_columns<T>; ++i) out[i] = sum(a[i]);
  }
}

/// p[0 .. n), zeros behind; reads nothing past p[n).
template <class T, class Arch>
ATTN_INLINE batch<T, Arch> load_partial(const T* p, index_t n) noexcept {
#if defined(__AVX512F__)
  if constexpr (is_avx512<Arch>) {
    const auto mask = static_cast<unsigned>((1u << n) - 1u);
    if constexpr (sizeof(T) == 4)
      return _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), p);
    else
      return _mm512_maskz_loadu_pd(static_cast<__mmask8>(mask), p);
  }
#endif
  alignas(64) T lanes[width<T, Arch>] = {};
  std::copy_n(p, n, lanes);
  return load<T, Arch>(lanes);
}

}  // namespace attn::simd
