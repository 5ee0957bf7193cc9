// SPDX-License-Identifier: MIT
//
// exp of a batch, made for softmax.
#pragma once

#include <attn/simd/batch.hpp>

namespace attn::simd {

namespace detail {

// c[0] + f (c[1] + f (c[2] + ...)), of U batches side by side: each step waits for the one before.
template <class T, class Arch, int N, int U>
ATTN_INLINE void horner_each(const T (&c)[N], const batch<T, Arch> (&f)[U],
                             batch<T, Arch> (&p)[U]) noexcept {
  ATTN_UNROLL for (int u = 0; u < U; ++u) p[u] = batch<T, Arch>(c[N - 1]);
  ATTN_UNROLL for (int i = N - 2; i >= 0; --i) {
    ATTN_UNROLL for (int u = 0; u < U; ++u) p[u] = multiply_add(p[u], f[u], batch<T, Arch>(c[i]));
  }
}
template <class T, class Arch, int N>
ATTN_INLINE batch<T, Arch> horner(const T (&c)[N], const batch<T, Arch>& f) noexcept {
  const batch<T, Arch> f_of[1] = {f};
  batch<T, Arch> p[1];
  horner_each(c, f_of, p);
  return p[0];
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

/// exp of each of U batches, as below. One alone is a chain of some 80 cycles, with room for
/// others.
template <class T, class Arch, int U>
ATTN_INLINE void exp_each(batch<T, Arch> (&x)[U]) noexcept {
  using B = batch<T, Arch>;
  constexpr bool single = sizeof(T) == 4;
  B t[U], f[U];
#if defined(__AVX512DQ__)
  // vscalef multiplies by 2^floor(t) and saturates both ways: no clamps.
  if constexpr (is_avx512dq<Arch>) {
    ATTN_UNROLL for (int u = 0; u < U; ++u) {
      t[u] = x[u] * B(detail::log2e<T>);
      if constexpr (single) {
        f[u] = _mm512_reduce_ps(t[u], 1 | 8);  // t − floor(t)
      } else {
        f[u] = _mm512_reduce_pd(t[u], 8);  // t − round(t)
        t[u] -= f[u];
      }
    }
    if constexpr (single) {
      detail::horner_each(detail::exp2_floor_f32, f, x);
      ATTN_UNROLL for (int u = 0; u < U; ++u) x[u] = _mm512_scalef_ps(x[u], t[u]);
    } else {
      detail::horner_each(detail::exp2_round_f64, f, x);
      ATTN_UNROLL for (int u = 0; u < U; ++u) x[u] = _mm512_scalef_pd(x[u], t[u]);
    }
    return;
  }
#endif
  // n = round(x log2 e) stands, biased by the exponent's offset, in the low bits of t.
  constexpr int mantissa = single ? 23 : 52;
  constexpr T bias = single ? T(127) : T(1023);
  constexpr T magic = (single ? T(12582912) : T(6755399441055744)) + bias;  // 1.5 * 2^mantissa
  constexpr T lowest = single ? T(-88.02969) : T(-709.089565712824);        // n = -bias: 2^n is 0
  constexpr T highest = single ? T(88.72284) : T(709.782712893384);         // n = bias + 1: inf
  ATTN_UNROLL for (int u = 0; u < U; ++u) {
    const B y = at_most(at_least(x[u], B(lowest)), B(highest));
    t[u] = multiply_add(y, B(detail::log2e<T>), B(magic));
    const B minus_n = B(magic) - t[u];
    f[u] = multiply_add(y, B(detail::log2e<T>), minus_n);
    if constexpr (!single) f[u] = multiply_add(y, B(detail::log2e_rest), f[u]);
  }
  if constexpr (single) {
    detail::horner_each(detail::exp2_round_f32, f, x);
  } else {
    detail::horner_each(detail::exp2_round_f64, f, x);
  }
  ATTN_UNROLL for (int u = 0; u < U; ++u) {
    x[u] *= from_bits<T, Arch>(to_bits<T, Arch>(t[u]) << mantissa);
  }
}

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
  batch<T, Arch> y[1] = {x};
  exp_each(y);
  return y[0];
}

}  // namespace attn::simd
