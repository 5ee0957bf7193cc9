// SPDX-License-Identifier: MIT
//
// exp of a batch, made for softmax.
#pragma once

#include <attn/simd/batch.hpp>

namespace attn::simd {

namespace detail {

// c[0] + f (c[1] + f (c[2] + ...))
template <class T, class Arch, int N>
ATTN_INLINE batch<T, Arch> horner(const T (&c)[N], const batch<T, Arch>& f) noexcept {
  batch<T, Arch> p(c[N - 1]);
#pragma GCC unroll 16
  for (int i = N - 2; i >= 0; --i) p = multiply_add(p, f, batch<T, Arch>(c[i]));
  return p;
}

// Minimax polynomials of 2^f with value 1 at f = 0, so that exp(0) = 1 exactly (computed for this
// file by Remez exchange and linear programming; the figure is the largest relative error).
inline constexpr float exp2_floor_f32[] = {  // f in [0, 1], 8.2e-8
    1.0f, 0.6931513118f, 0.2401644501f, 0.0557999131f, 0.00901703028f, 0.00186713008f};
inline constexpr float exp2_round_f32[] = {  // f in [-1/2, 1/2], 9.2e-8
    1.0f, 0.693146978f, 0.240222421f, 0.0555073374f, 0.00967151264f, 0.0013264729f};
inline constexpr double exp2_round_f64[] = {  // f in [-1/2, 1/2], 1.8e-17
    1.0,
    0.6931471805599456968,
    0.2402265069591009801,
    0.05550410866479039455,
    0.00961812910760700238,
    0.001333355815343996475,
    0.0001540353044157213033,
    0.0000152527273851938682,
    1.321544267532982214e-6,
    1.018064765923413889e-7,
    7.07257041281442351e-9,
    4.078071929588336665e-10};

template <class T>
inline constexpr T log2e = static_cast<T>(1.4426950408889634074);
// log2(e) − log2e<double>
inline constexpr double log2e_rest = 2.0355273740931030e-17;

}  // namespace detail

/// e^x for any x: exp(−inf) = +0, exp(0) = 1, overflow (from 2^127.5, 2^1023.5 on) gives +inf, NaN
/// stays NaN, never negative.
///
/// **Numerics** at most 3 + 1.3 |x| ulp wherever the result is a normal number, so 3 ulp where a
/// weight counts (0.4 |x| in float with AVX2; 1 ulp in double with AVX2 or NEON). Results below the
/// smallest normal number are 0 except in double with AVX-512. Measured by the sweep of
/// tests/unit/math_test.cpp.
/// **Cost** float: AVX-512 8 instructions, others 12.
template <class T, class Arch>
ATTN_INLINE batch<T, Arch> exp(const batch<T, Arch>& x) noexcept {
  using B = batch<T, Arch>;
#if defined(__AVX512DQ__)
  // vscalef multiplies by 2^floor(t) and saturates both ways: no clamps.
  if constexpr (is_avx512dq<Arch> && sizeof(T) == 4) {
    const B t = x * B(detail::log2e<T>);
    const B f = _mm512_reduce_ps(t, 1 | 8);  // t − floor(t)
    const B p = detail::horner(detail::exp2_floor_f32, f);
    return _mm512_scalef_ps(p, t);
  }
  if constexpr (is_avx512dq<Arch> && sizeof(T) == 8) {
    const B t = x * B(detail::log2e<T>);
    const B f = _mm512_reduce_pd(t, 8);  // t − round(t)
    const B p = detail::horner(detail::exp2_round_f64, f);
    return _mm512_scalef_pd(p, t - f);
  }
#endif
  // n = round(x log2 e) stands, biased by the exponent's offset, in the low bits of t.
  constexpr bool single = sizeof(T) == 4;
  constexpr int mantissa = single ? 23 : 52;
  constexpr T bias = single ? T(127) : T(1023);
  constexpr T magic = (single ? T(12582912) : T(6755399441055744)) + bias;  // 1.5 * 2^mantissa
  constexpr T lowest = single ? T(-88.02969) : T(-709.089565712824);        // n = -bias: 2^n is 0
  constexpr T highest = single ? T(88.72284) : T(709.782712893384);         // n = bias + 1: inf
  const B y = at_most(at_least(x, B(lowest)), B(highest));
  const B t = multiply_add(y, B(detail::log2e<T>), B(magic));
  const B minus_n = B(magic) - t;
  B f = multiply_add(y, B(detail::log2e<T>), minus_n);
  const B scale = from_bits<T, Arch>(to_bits<T, Arch>(t) << mantissa);
  if constexpr (single) {
    return detail::horner(detail::exp2_round_f32, f) * scale;
  } else {
    f = multiply_add(y, B(detail::log2e_rest), f);
    return detail::horner(detail::exp2_round_f64, f) * scale;
  }
}

}  // namespace attn::simd
