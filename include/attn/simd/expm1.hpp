// SPDX-License-Identifier: MIT
#pragma once

#include <attn/simd/exp.hpp>

namespace attn::simd {

/// e^x − 1 for x <= 0, in double: no cancellation where x is small; −1 for −inf. NaN stays NaN.
///
/// With x = n ln 2 + f and 2^f = 1 + q(f) it is 2^n q(f) + (2^n − 1), and 2^n − 1 is 0 for small x.
/// **Numerics** at most 8 ulp (tests/unit/expm1_test.cpp): the polynomial is made for 1 + q.
template <class Arch>
ATTN_INLINE batch<double, Arch> expm1(const batch<double, Arch>& x) noexcept {
  using B = batch<double, Arch>;
  constexpr double bias = 1023, magic = 6755399441055744 + bias;  // n stands in the low bits of t
  constexpr double lowest = -709.089565712824;                    // 2^n is 0
  constexpr int degree = 11;
  double q_over_f[degree];
  for (int i = 0; i < degree; ++i) q_over_f[i] = detail::exp2_round_f64[i + 1];

#if defined(__AVX512DQ__)
  if constexpr (is_avx512dq<Arch>) {
    const B t = x * B(detail::log2e<double>);
    const B f = _mm512_reduce_pd(t, 8);  // t − round(t), t itself where x is small
    const B scale = _mm512_scalef_pd(B(1.0), t - f);
    return multiply_add(scale, f * detail::horner(q_over_f, f), scale - B(1.0));
  }
#endif
  const B y = at_least(x, B(lowest));
  const B t = multiply_add(y, B(detail::log2e<double>), B(magic));
  const B n = t - B(magic);
  B f = multiply_add(y, B(detail::log2e<double>), -n);
  f = multiply_add(y, B(detail::log2e_rest), f);
  const B scale = from_bits<double, Arch>(to_bits<double, Arch>(t) << 52);
  const B q = f * detail::horner(q_over_f, f);
  return multiply_add(scale, q, scale - B(1.0));
}

}  // namespace attn::simd
