// SPDX-License-Identifier: MIT
//
// d(score after a rule) / d(score before it), for the backward pass.
//
// A mask or bias adds a number that does not depend on the score, or forbids: 1. A rule of the
// user's, or the function in a score_rule_fn, may have a member `slope(score, b, h, i, j)`; without
// one it counts as 1 too, which is right for whatever adds or forbids.
#pragma once

#include <type_traits>

#include <attn/score_rule.hpp>

namespace attn::detail {

template <class R>
concept sloped = requires(const R& rule, index_t n) {
  { rule.slope(1.0, n, n, n, n) } -> std::convertible_to<double>;
};

template <class R>
inline constexpr bool has_slope = sloped<R>;
template <class F>
inline constexpr bool has_slope<score_rule_fn<F>> = sloped<F>;
template <class First, class Second>
inline constexpr bool has_slope<composed_rule<First, Second>> =
    has_slope<First> || has_slope<Second>;

/// The slope of `rule` at a score that it allows.
template <class T, class R>
[[nodiscard]] T slope_of(const R& rule, T score, index_t b, index_t h, index_t i, index_t j) {
  if constexpr (sloped<R>)
    return static_cast<T>(rule.slope(score, b, h, i, j));
  else
    return T(1);
}
template <class T, class F>
[[nodiscard]] T slope_of(const score_rule_fn<F>& rule, T score, index_t b, index_t h, index_t i,
                         index_t j) {
  return slope_of<T, F>(rule.f, score, b, h, i, j);
}
template <class T, class First, class Second>
[[nodiscard]] T slope_of(const composed_rule<First, Second>& rule, T score, index_t b, index_t h,
                         index_t i, index_t j) {
  const T first = slope_of<T>(rule.first, score, b, h, i, j);
  if constexpr (has_slope<Second>)
    return first * slope_of<T>(rule.second, rule.first(score, b, h, i, j), b, h, i, j);
  else
    return first;
}

}  // namespace attn::detail
