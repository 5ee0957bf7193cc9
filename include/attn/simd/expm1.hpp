// SPDX-License-Identifier: MIT
#pragma once

#include <attn/simd/exp.hpp>

namespace attn::simd {

/// e^x − 1 of each of U batches, for x <= 0, in double: no cancellation where x is small; −1 for
/// −inf. NaN stays NaN.
///
/// With x = n ln 2 + f and 2^f = 1 + q(f) it is 2^n q(f) + (2^n − 1), and 2^n − 1 is 0 for small x.
/// **Numerics** at most 8 ulp (tests/unit/expm1_test.cpp): the polynomial is made for 1 + q.
template <class Arch, int U>
ATTN_INLINE void expm1_each(batch<double, Arch> (&x)[U]) noexcept {
  using B = batch<double, Arch>;
  constexpr double bias = 1023, magic = 6755399441055744 + bias;  // n stands in the low bits of t
  constexpr double lowest = -709.089565712824;                    // 2^n is 0
  constexpr int degree = 11;
  double q_over_f[degree];
  for (int i = 0; i < degree; ++i) q_over_f[i] = detail::exp2_round_f64[i + 1];

  B f[U], scale[U];
  ATTN_UNROLL for (int u = 0; u < U; ++u) {
#if defined(__AVX512DQ__)
    if constexpr (is_avx512dq<Arch>) {
      const B t = x[u] * B(detail::log2e<double>);
      f[u] = _mm512_reduce_pd(t, 8);  // t − round(t), t itself where x is small
      scale[u] = _mm512_scalef_pd(B(1.0), t - f[u]);
      continue;
    }
#endif
    const B y = at_least(x[u], B(lowest));
    const B t = multiply_add(y, B(detail::log2e<double>), B(magic));
    f[u] = multiply_add(y, B(detail::log2e<double>), B(magic) - t);
    f[u] = multiply_add(y, B(detail::log2e_rest), f[u]);
    scale[u] = from_bits<double, Arch>(to_bits<double, Arch>(t) << 52);
  }
  detail::horner_each(q_over_f, f, x);
  ATTN_UNROLL for (int u = 0; u < U; ++u) {
    x[u] = multiply_add(scale[u], f[u] * x[u], scale[u] - B(1.0));
  }
}

}  // namespace attn::simd
