// SPDX-License-Identifier: MIT
//
// Checks shared by everything that selects or pools k of n rows by their scores.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include <attn/detail/checks.hpp>
#include <attn/eigen.hpp>
#include <attn/score_rule.hpp>
#include <attn/simd/convert.hpp>
#include <attn/soft_topk_options.hpp>
#include <attn/view.hpp>

namespace attn::detail {

inline void check_topk_strength(std::string_view function, const soft_topk_options& options) {
  const bool exponential = options.boost == topk_boost::exponential;
  const double lowest = exponential ? 1 : 0;
  if (std::isfinite(options.strength) && options.strength > lowest) return;
  raise_option(function, "strength", to_text(options.strength),
               std::string("a finite number above ") + (exponential
                                                            ? "1 (base of topk_boost::exponential)"
                                                            : "0 (factor of topk_boost::scaled)"));
}

// 1 <= k <= n, and k <= lengths[b] <= n.
inline void check_topk_lengths(std::string_view function, std::span<const index_t> lengths,
                               index_t n_batch, index_t n, index_t k) {
  if (k < 1 || k > n) {
    raise_option(function, "k", std::to_string(k),
                 n < 1 ? "scores that are not of length 0"
                       : "1 to " + std::to_string(n) + " (length of scores)");
  }
  if (lengths.empty()) return;
  check_count(function, "lengths", lengths, n_batch, "batch of scores");
  for (std::size_t b = 0; b < lengths.size(); ++b) {
    if (lengths[b] >= k && lengths[b] <= n) continue;
    raise_option(function, "lengths[" + std::to_string(b) + "]", std::to_string(lengths[b]),
                 std::to_string(k) + " to " + std::to_string(n) + " (k to length of scores)");
  }
}

template <class T>
void check_topk_scores(std::string_view function, const tensor_view<T>& scores) {
  check_view(function, "scores", scores, access::read);
  check_extent(function, "scores", scores, 3, 1, "one score per position");
}

// Plans number sources by 32 bits.
template <class T>
void check_tournament_length(std::string_view function, const tensor_view<T>& scores) {
  constexpr index_t most = (index_t{1} << 32) - 1;
  if (scores.extent(2) <= most) return;
  raise_shape(function, "scores", scores.extents(), "a length below 2^32");
}

// `x` has the extents [B, H, length, dim]; the reasons say where length and dim come from.
template <class T>
void check_topk_operand(std::string_view function, std::string_view argument,
                        const tensor_view<T>& x, access mode, std::array<index_t, 4> expected,
                        std::string_view length_reason, std::string_view dim_reason) {
  check_view(function, argument, x, mode);
  check_extent(function, argument, x, 0, expected[0], "batch of scores");
  check_extent(function, argument, x, 1, expected[1], "heads of scores");
  check_extent(function, argument, x, 2, expected[2], length_reason);
  check_extent(function, argument, x, 3, expected[3], dim_reason);
}

inline constexpr std::string_view per_position = "length of scores";
inline constexpr std::string_view per_slot = "slots of the tournament";

[[nodiscard]] inline index_t length_of(std::span<const index_t> lengths, index_t b,
                                       index_t n) noexcept {
  return lengths.empty() ? n : lengths[static_cast<std::size_t>(b)];
}

// Operands that are computed in one type: all double, or none.
template <class X, class... Others>
concept computed_alike =
    (std::is_same_v<simd::compute_t<element_t<X>>, simd::compute_t<element_t<Others>>> && ...);

// The operands of a top-k from scores to pooled rows, checked.
template <class X, class V, class P, class D>
struct topk_call {
  tensor_view<const X> x;        // [B, H, n, d]
  tensor_view<const V> scores;   // [B, H, n, 1]
  tensor_view<P> pooled;         // [B, H, k, d]
  tensor_view<D> pooled_scores;  // [B, H, k, 1]
  index_t n_batch, n_heads, n, k, d;

  topk_call(std::string_view function, tensor_view<const X> x_view,
            tensor_view<const V> scores_view, tensor_view<P> pooled_view,
            tensor_view<D> pooled_scores_view, std::span<const index_t> lengths)
      : x(x_view), scores(scores_view), pooled(pooled_view), pooled_scores(pooled_scores_view),
        n_batch(scores.extent(0)), n_heads(scores.extent(1)), n(scores.extent(2)),
        k(pooled.extent(2)), d(x.extent(3)) {
    check_topk_scores(function, scores);
    check_topk_operand(function, "x", x, access::read, {n_batch, n_heads, n, d}, per_position, "");
    check_topk_operand(function, "pooled", pooled, access::write, {n_batch, n_heads, k, d}, "",
                       "dim of x");
    check_topk_operand(function, "pooled_scores", pooled_scores, access::write,
                       {n_batch, n_heads, k, 1}, "length of pooled", "one score per slot");
    check_topk_lengths(function, lengths, n_batch, n, k);
    check_disjoint(function, "pooled", pooled, "x", x);
    check_disjoint(function, "pooled", pooled, "scores", scores);
    check_disjoint(function, "pooled_scores", pooled_scores, "x", x);
    check_disjoint(function, "pooled_scores", pooled_scores, "scores", scores);
    check_disjoint(function, "pooled_scores", pooled_scores, "pooled", pooled);
  }
};
template <class X, class V, class P, class D>
topk_call(std::string_view, tensor_view<X>, tensor_view<V>, tensor_view<P>, tensor_view<D>,
          std::span<const index_t>)
    -> topk_call<std::remove_const_t<X>, std::remove_const_t<V>, P, D>;

}  // namespace attn::detail
