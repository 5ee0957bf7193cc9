// SPDX-License-Identifier: MIT
//
// From scores to weights where a softcap or a function of the score stands between them, and the
// slope of both.
#pragma once

#include <algorithm>
#include <limits>

#include <attn/detail/backward_fold.hpp>
#include <attn/detail/score_slope.hpp>
#include <attn/simd/math.hpp>

namespace attn::detail {

/// Scores of one run in w.p to weights, −0 where forbidden; d(mapped score)/d(score) into w.slope.
/// The block begins at key k0; a bias tile lies in w.bias.
template <class T, class Arch, score_rule Rule>
void weigh_scores(const Rule& rule, T softcap, index_t b, index_t h,
                  const backward_tile<T, Arch>& t, index_t k0, const key_run& run,
                  const backward_scratch<T>& w) noexcept {
  using B = simd::batch<T, Arch>;
  constexpr int W = tile_size<T, Arch>::width, QS = tile_size<T, Arch>::max_rows;
  constexpr bool has_bias = Rule::kind == rule_kind::bias;
  constexpr T infinity = std::numeric_limits<T>::infinity();
  // 1. c tanh(s / c), whose slope is 1 − tanh².
  const B cap(softcap), inverse(softcap == T(0) ? T(0) : T(1) / softcap);
  for (index_t x = run.first * QS; x < run.last * QS; x += W) {
    B slope(T(1));
    if (softcap != T(0)) {
      const B y = simd::tanh<T, Arch>(simd::load<T, Arch>(w.p + x) * inverse);
      slope = (B(T(1)) - y) * (B(T(1)) + y);
      (cap * y).store_aligned(w.p + x);
    }
    slope.store_aligned(w.slope + x);
  }
  // 2. The rule itself, pair by pair, where ranges allow it.
  if constexpr (Rule::kind == rule_kind::function) {
    for (index_t r = 0; r < t.n_rows; ++r) {
      const key_range keys = t.ranges.lane[static_cast<std::size_t>(r)];
      const index_t last = std::min(keys.end, k0 + run.last), i = t.first_row + r;
      for (index_t j = std::max(keys.begin, k0 + run.first); j < last; ++j) {
        const index_t at = (j - k0) * QS + r;
        T& score = w.p[at];
        if (score == -infinity) continue;
        if constexpr (has_slope<Rule>) w.slope[at] *= slope_of<T>(rule, score, b, h, i, j);
        score = rule(score, b, h, i, j);
      }
    }
  }
  // 3. Weights.
  alignas(64) T lo[QS], hi[QS];
  t.ranges.bounds(k0, lo, hi);
  for (index_t key = run.first; key < run.last; ++key) {
    for (int lane = 0; lane < run.v1 * W; lane += W) {
      T* p = w.p + key * QS + lane;
      const B at(static_cast<T>(key)), s = simd::load<T, Arch>(p);
      B bias(T(0));
      if (has_bias) bias = simd::load<T, Arch>(w.bias + key * QS + lane);
      // Not x != −inf: xsimd 8.1 says no to that where x is NaN.
      const auto forbidden = (bias == B(-infinity)) | (s == B(-infinity));
      const auto in_range =
          (simd::load<T, Arch>(lo + lane) <= at) & (at < simd::load<T, Arch>(hi + lane));
      const B e = tiles::weight<T, Arch>(s + bias + simd::load<T, Arch>(t.neg_lse + lane));
      xsimd::select(in_range & !forbidden, e, B(T(-0.0))).store_aligned(p);
    }
  }
}

}  // namespace attn::detail
