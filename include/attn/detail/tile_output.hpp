// SPDX-License-Identifier: MIT
//
// From the state of a query tile to its output, and what there is to know of values where that is
// not finite.
#pragma once

#include <algorithm>
#include <array>
#include <limits>

#include <attn/detail/query_tile.hpp>
#include <attn/simd/math.hpp>
#include <attn/simd/reduce.hpp>

namespace attn::detail {

struct value_survey {
  bool finite = true;
  bool huge = false;  // times the largest weight, past the largest number
};

/// Of [n_rows][d_v] values.
template <class T, class Arch>
[[nodiscard]] value_survey survey_values(const T* v, index_t ldv, index_t n_rows, index_t d_v,
                                         T largest_weight) noexcept {
  using B = simd::batch<T, Arch>;
  constexpr int W = simd::width<T, Arch>;
  const T limit = std::numeric_limits<T>::max() / largest_weight;
  B not_finite(T(0)), largest(T(0));
  for (index_t r = 0; r < n_rows; ++r, v += ldv) {
    for (index_t c = 0; c < d_v; c += W) {
      const B x = c + W <= d_v ? simd::load_unaligned<T, Arch>(v + c)
                               : simd::load_partial<T, Arch>(v + c, d_v - c);
      const B zero = x * B(T(0));  // NaN if x is not finite
      not_finite = not_finite + zero;
      const B finite = xsimd::select(zero == B(T(0)), xsimd::abs(x), B(T(0)));
      largest = xsimd::select(finite > largest, finite, largest);
    }
  }
  return {xsimd::all(not_finite == B(T(0))), !xsimd::all(largest <= B(limit))};
}

/// factor = what OT is to be multiplied by per lane: 1/l after the sink (−inf: none) has joined
/// maximum and denominator; 0 for a row without keys. lse, if not null, = the log-sum-exp.
template <class T, class Arch>
void normalise(const query_tile<T>& t, T sink_logit, T* factor, T* lse) noexcept {
  using B = simd::batch<T, Arch>;
  constexpr int W = simd::width<T, Arch>;
  constexpr T infinity = std::numeric_limits<T>::infinity();
  const bool has_sink = sink_logit != -infinity;
  const B sink(sink_logit);
  for (int j = 0; j < t.n_vectors * W; j += W) {
    const B l = simd::load<T, Arch>(t.l + j), m = -simd::load<T, Arch>(t.negm + j);
    const auto empty = l == B(T(0));
    B total = l, top = m, scale(T(1));
    if (has_sink) {
      top = xsimd::select(empty | (sink > m), sink, m);
      scale = xsimd::select(empty, B(T(0)), simd::exp<T, Arch>(m - top));
      total = simd::multiply_add(l, scale, simd::exp<T, Arch>(sink - top));
    }
    const auto nothing = total == B(T(0));
    xsimd::select(empty, B(T(0)), scale / xsimd::select(nothing, B(T(1)), total))
        .store_aligned(factor + j);
    if (lse == nullptr) continue;
    xsimd::select(nothing, B(-infinity), top + simd::log<T, Arch>(total)).store_aligned(lse + j);
  }
}

/// Marks the lanes whose l is a number and whose output is not. One multiply-add per output vector.
template <class T, class Arch, class Lanes>
[[nodiscard]] bool find_overflow(const query_tile<T>& t, const T* factor, index_t d_v,
                                 Lanes& lanes) noexcept {
  using B = simd::batch<T, Arch>;
  constexpr int W = simd::width<T, Arch>;
  const index_t qs = t.n_vectors * W;
  bool any = false;
  for (index_t j = 0; j < qs; j += W) {
    const B f = simd::load<T, Arch>(factor + j) * B(T(0));
    std::array<B, 4> bad{f, f, f, f};  // four, since each sum waits for itself
    index_t c = 0;
    for (; c + 4 <= d_v; c += 4) {
      ATTN_UNROLL for (int x = 0; x < 4; ++x) {
        B& sum = bad[static_cast<std::size_t>(x)];
        sum = simd::multiply_add(simd::load<T, Arch>(t.ot + (c + x) * qs + j), f, sum);
      }
    }
    for (; c < d_v; ++c) {
      bad[0] = simd::multiply_add(simd::load<T, Arch>(t.ot + c * qs + j), f, bad[0]);
    }
    const B sum = (bad[0] + bad[1]) + (bad[2] + bad[3]), l = simd::load<T, Arch>(t.l + j);
    const auto overflow = simd::is_nan(sum) & (l == l);
    if (!xsimd::any(overflow)) {
      std::fill_n(lanes.begin() + j, W, false);
      continue;
    }
    any = true;
    alignas(64) std::array<T, static_cast<std::size_t>(W)> flags;
    xsimd::select(overflow, B(T(1)), B(T(0))).store_aligned(flags.data());
    std::transform(flags.begin(), flags.end(), lanes.begin() + j,
                   [](T flag) { return flag != T(0); });
  }
  return any;
}

}  // namespace attn::detail
