// SPDX-License-Identifier: MIT
#pragma once

#include <attn/simd/exp.hpp>

namespace attn::simd {

/// Natural logarithm, at most 1.5 ulp (xsimd's).
template <class T, class Arch>
ATTN_INLINE batch<T, Arch> log(const batch<T, Arch>& x) noexcept {
  return xsimd::log(x);
}

/// Hyperbolic tangent; ±1 at ±inf, NaN stays NaN.
template <class T, class Arch>
ATTN_INLINE batch<T, Arch> tanh(const batch<T, Arch>& x) noexcept {
  return xsimd::tanh(x);
}

}  // namespace attn::simd
