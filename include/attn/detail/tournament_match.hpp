// SPDX-License-Identifier: MIT
//
// Matches of a tournament: from the scores of two players to the weight of the loser and the score
// of what is left.
#pragma once

#include <cmath>
#include <limits>

#include <attn/simd/expm1.hpp>
#include <attn/soft_topk_options.hpp>
#include <attn/view.hpp>

namespace attn::detail {

// ln B or C: the factor of the scores in the boost.
[[nodiscard]] inline double boost_rate(topk_boost boost, double strength) noexcept {
  return boost == topk_boost::exponential ? std::log(strength) : strength;
}

// U vectors of matches side by side: weights of the losers, and results. `result` may be `winner`.
//
// With hi >= lo the two scores of a match, the weight of lo is 1 / (1 + e^d), where
//   exponential  d = B^hi − B^lo = −B^hi (B^(lo − hi) − 1): B^hi may overflow to inf, and does so
//                to the right limit, since the second factor is no 0 unless the scores are equal,
//   scaled       d = C (hi − lo).
// Equal scores, infinite ones too, share alike; against anything else −inf has weight 0.
template <class Arch, int U>
ATTN_INLINE void play_vectors(const double* winner, const double* loser, double* loser_weight,
                              double* result, topk_boost boost, double rate) noexcept {
  using B = simd::batch<double, Arch>;
  constexpr index_t W = simd::width<double, Arch>;
  const B one(1.0), half(0.5), absent(-std::numeric_limits<double>::infinity());
  B a[U], z[U], hi[U], lo[U], d[U];
  ATTN_UNROLL for (int u = 0; u < U; ++u) {
    a[u] = simd::load_unaligned<double, Arch>(winner + u * W);
    z[u] = simd::load<double, Arch>(loser + u * W);
    hi[u] = simd::at_least(a[u], z[u]);
    lo[u] = simd::at_most(a[u], z[u]);
    d[u] = B(rate) * (hi[u] - lo[u]);
  }
  if (boost == topk_boost::exponential) {
    B power[U];
    ATTN_UNROLL for (int u = 0; u < U; ++u) {
      power[u] = B(rate) * hi[u];
      d[u] = -d[u];
    }
    simd::exp_each(power);
    simd::expm1_each(d);
    ATTN_UNROLL for (int u = 0; u < U; ++u) d[u] = power[u] * -d[u];
  }
  simd::exp_each(d);
  ATTN_UNROLL for (int u = 0; u < U; ++u) {
    const auto equal = a[u] == z[u];
    B lo_weight = one / (one + d[u]);
    lo_weight = xsimd::select(lo[u] == absent, B(0.0), lo_weight);
    lo_weight = xsimd::select(equal, half, lo_weight);
    // 1 − w is exact here: w <= 1/2 is either at least 2^-53 or lost against 1.
    const B hi_weight = one - lo_weight;
    // One rounding named, for a compiler may join either product, and not the same for every U.
    B mixed = simd::multiply_add(hi_weight, hi[u], lo_weight * lo[u]);
    mixed = xsimd::select(equal, a[u], mixed);
    xsimd::select(a[u] < z[u], hi_weight, lo_weight).store_unaligned(loser_weight + u * W);
    xsimd::select(lo_weight == B(0.0), hi[u], mixed).store_unaligned(result + u * W);
  }
}

// Matches in vectors, so up to W − 1 elements behind are lost.
template <class Arch>
void play_matches(const double* winner, const double* loser, double* loser_weight, double* result,
                  index_t count, topk_boost boost, double rate) noexcept {
  // A vector of matches is some 200 cycles from end to end, most of them spent waiting: four side
  // by side take half of the time (AVX2).
  constexpr index_t W = simd::width<double, Arch>, together = 4;
  index_t t = 0;
  for (; t + together * W <= count; t += together * W) {
    play_vectors<Arch, together>(winner + t, loser + t, loser_weight + t, result + t, boost, rate);
  }
  for (; t < count; t += W) {
    play_vectors<Arch, 1>(winner + t, loser + t, loser_weight + t, result + t, boost, rate);
  }
}

}  // namespace attn::detail
