// SPDX-License-Identifier: MIT
#pragma once

#include <bit>
#include <limits>

#include <attn/simd/exp.hpp>

namespace attn::simd {

namespace detail {

// ln((1 + s) / (1 − s)) = 2 s + s R(s²) for |s| <= 0.1716, R by Remez exchange, of degree 4 and 7
// in s²: the approximations of FreeBSD's logf and log.
inline constexpr float log_even_f32[] = {0.66666662693f, 0.28498786688f};
inline constexpr float log_odd_f32[] = {0.40000972152f, 0.24279078841f};
inline constexpr double log_even_f64[] = {6.666666666666735130e-01, 2.857142874366239149e-01,
                                          1.818357216161805012e-01, 1.479819860511658591e-01};
inline constexpr double log_odd_f64[] = {3.999999999940941908e-01, 2.222219843214978396e-01,
                                         1.531383769920937332e-01};

}  // namespace detail

/// Natural logarithm of 0 and of positive normal numbers, ∞ and NaN; at most 1.5 ulp. xsimd 8.1's
/// does not compile with AVX-512 and -O0.
template <class T, class Arch>
ATTN_INLINE batch<T, Arch> log(const batch<T, Arch>& x) noexcept {
  using B = batch<T, Arch>;
  using I = batch<bits_t<T>, Arch>;
  using integer = bits_t<T>;
  constexpr bool single = sizeof(T) == 4;
  constexpr int mantissa = single ? 23 : 52;
  constexpr integer one = single ? integer{0x3f800000} : static_cast<integer>(0x3ff0000000000000);
  constexpr integer half_root =  // sqrt(1/2)
      single ? integer{0x3f3504f3} : static_cast<integer>(0x3fe6a09e667f3bcd);
  constexpr T infinity = std::numeric_limits<T>::infinity();
  // 1. x = 2^k (1 + f), sqrt(1/2) <= 1 + f < sqrt(2). k through the low bits of a large number.
  const I shifted = to_bits<T, Arch>(x) + I(one - half_root);
  constexpr T large = single ? T(8388608) : T(4503599627370496);  // 2^mantissa
  constexpr T bias = single ? T(127) : T(1023);
  const I exponent = (shifted >> mantissa) | I(std::bit_cast<integer>(large));
  const B k = from_bits<T, Arch>(exponent) - B(large + bias);
  const I fraction = shifted & I((integer{1} << mantissa) - 1);
  const B f = from_bits<T, Arch>(fraction + I(half_root)) - B(T(1));
  // 2. ln(1 + f) = f − (f²/2 − s (f²/2 + R)), s = f / (2 + f).
  const B s = f / (B(T(2)) + f), z = s * s, w = z * z, half_square = B(T(0.5)) * f * f;
  B r;
  if constexpr (single)
    r = z * detail::horner(detail::log_even_f32, w) + w * detail::horner(detail::log_odd_f32, w);
  else
    r = z * detail::horner(detail::log_even_f64, w) + w * detail::horner(detail::log_odd_f64, w);
  // 3. k ln 2 in two parts, of which k times the first is exact.
  const B ln2_high(single ? T(6.9313812256e-01) : T(6.93147180369123816490e-01));
  const B ln2_low(single ? T(9.0580006145e-06) : T(1.90821492927058770002e-10));
  const B rest = half_square - (s * (half_square + r) + k * ln2_low);
  const B y = k * ln2_high - (rest - f);
  return xsimd::select(x == B(T(0)), B(-infinity), xsimd::select(x < B(infinity), y, x));
}

/// Hyperbolic tangent; ±1 at ±inf, NaN stays NaN.
template <class T, class Arch>
ATTN_INLINE batch<T, Arch> tanh(const batch<T, Arch>& x) noexcept {
  return xsimd::tanh(x);
}

}  // namespace attn::simd
