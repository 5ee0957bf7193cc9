// SPDX-License-Identifier: MIT
//
// Score rules: masks and biases of attention scores, one concept for all.
//
// A rule maps a scaled (and softcapped) score of query i and key j, query head h, batch b, to a
// score or to −inf, which means "not allowed". Rules are applied left to right; a key that one of
// them forbids stays forbidden whatever the others do.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include <attn/detail/checks.hpp>
#include <attn/view.hpp>

namespace attn {

/// Keys [begin, end) that a row may attend to; empty where begin >= end.
struct key_range {
  index_t begin, end;
};

/// What a kernel has to do for a rule, from cheap to dear.
enum class rule_kind {
  range,     ///< keys(b, h, i, n_kv) says all: the allowed keys of a row are one range
  bias,      ///< adds a number that does not depend on the score, or forbids
  function,  ///< any function of the score
};

/// Shapes of the call a rule is checked against.
struct attention_shape {
  index_t n_batch, n_heads, n_q, n_kv;
};

/// A score rule. `rule(score, b, h, i, j)` is its meaning for one score (float or double);
/// `rule.keys(b, h, i, n_kv)` bounds the keys that row i may attend to: no key outside is looked
/// at; `rule.check(function, shape)` throws where the rule does not fit the call.
template <class R>
concept score_rule = std::is_object_v<R> &&
    requires(const R& rule, index_t n, std::string_view function, const attention_shape& shape) {
  { R::kind } -> std::convertible_to<rule_kind>;
  { rule(1.0f, n, n, n, n) } -> std::convertible_to<float>;
  { rule(1.0, n, n, n, n) } -> std::convertible_to<double>;
  { rule.keys(n, n, n, n) } -> std::same_as<key_range>;
  {rule.check(function, shape)};
};

namespace detail {

template <class S>
inline constexpr S forbidden = -std::numeric_limits<S>::infinity();

// Positions may be anywhere in 63 bits ("unlimited" among them): sums saturate.
[[nodiscard]] constexpr index_t saturating_add(index_t a, index_t b) noexcept {
  index_t sum = 0;
  if (!__builtin_add_overflow(a, b, &sum)) return sum;
  return a > 0 ? std::numeric_limits<index_t>::max() : std::numeric_limits<index_t>::min();
}

// Stride of axis r with broadcasting: an axis of extent 1 does not move.
template <class T>
[[nodiscard]] constexpr index_t step(const tensor_view<T>& x, int r) noexcept {
  return x.extent(r) == 1 ? 0 : x.stride(r);
}

template <class T>
void check_rule_view(std::string_view function, std::string_view argument, const tensor_view<T>& x,
                     const attention_shape& s, bool per_head) {
  check_view(function, argument, x, access::read);
  check_broadcast(function, argument, x, 0, s.n_batch, "batch of q");
  if (per_head) check_broadcast(function, argument, x, 1, s.n_heads, "heads of q");
}

template <class T>
void check_count(std::string_view function, std::string_view argument, std::span<T> x, index_t n,
                 std::string_view what) {
  if (static_cast<index_t>(x.size()) == n) return;
  raise<shape_error>(std::string(function) + ": " + std::string(argument) + " has " +
                     std::to_string(x.size()) + " elements, expected " + std::to_string(n) + " (" +
                     std::string(what) + ")");
}

}  // namespace detail

/// Every query may attend to every key.
struct no_mask {
  static constexpr rule_kind kind = rule_kind::range;
  template <class S>
  [[nodiscard]] constexpr S operator()(S score, index_t, index_t, index_t, index_t) const noexcept {
    return score;
  }
  [[nodiscard]] constexpr key_range keys(index_t, index_t, index_t, index_t n_kv) const noexcept {
    return {0, n_kv};
  }
  void check(std::string_view, const attention_shape&) const noexcept {}
};

/// j ≤ i + offset. Offset 0 aligns the first query with the first key (top-left).
struct causal_mask {
  static constexpr rule_kind kind = rule_kind::range;
  index_t offset = 0;

  /// The last query sees the last key: what a key/value cache needs.
  [[nodiscard]] static constexpr causal_mask bottom_right(index_t n_q, index_t n_kv) noexcept {
    return {.offset = n_kv - n_q};
  }
  template <class S>
  [[nodiscard]] constexpr S operator()(S score, index_t, index_t, index_t i,
                                       index_t j) const noexcept {
    return j <= detail::saturating_add(i, offset) ? score : detail::forbidden<S>;
  }
  [[nodiscard]] constexpr key_range keys(index_t, index_t, index_t i, index_t n_kv) const noexcept {
    const index_t last = detail::saturating_add(i, offset);
    return {0, last < n_kv ? last + 1 : n_kv};
  }
  void check(std::string_view, const attention_shape&) const noexcept {}
};

/// No bound on that side of a window.
inline constexpr index_t unlimited = std::numeric_limits<index_t>::max();

/// i + offset − left ≤ j ≤ i + offset + right.
struct window_mask {
  static constexpr rule_kind kind = rule_kind::range;
  index_t left = unlimited;
  index_t right = unlimited;
  index_t offset = 0;

  template <class S>
  [[nodiscard]] constexpr S operator()(S score, index_t, index_t, index_t i,
                                       index_t j) const noexcept {
    const key_range allowed = keys(0, 0, i, unlimited);
    return j >= allowed.begin && j < allowed.end ? score : detail::forbidden<S>;
  }
  [[nodiscard]] constexpr key_range keys(index_t, index_t, index_t i, index_t n_kv) const noexcept {
    const index_t at = detail::saturating_add(i, offset);
    const index_t first = left == unlimited ? 0 : detail::saturating_add(at, -left);
    const index_t last = right == unlimited ? unlimited : detail::saturating_add(at, right);
    return {std::max<index_t>(0, first), last < n_kv ? last + 1 : n_kv};
  }
  void check(std::string_view function, const attention_shape&) const {
    if (left < 0) {
      detail::raise_option(function, "window_mask.left", std::to_string(left),
                           "at least 0 or attn::unlimited");
    }
    if (right < 0) {
      detail::raise_option(function, "window_mask.right", std::to_string(right),
                           "at least 0 or attn::unlimited");
    }
  }
};

/// Keys at or past lengths[b] do not exist: they are never read.
struct key_lengths {
  static constexpr rule_kind kind = rule_kind::range;
  std::span<const index_t> lengths;

  template <class S>
  [[nodiscard]] constexpr S operator()(S score, index_t b, index_t, index_t,
                                       index_t j) const noexcept {
    return j < lengths[static_cast<std::size_t>(b)] ? score : detail::forbidden<S>;
  }
  [[nodiscard]] constexpr key_range keys(index_t b, index_t, index_t, index_t n_kv) const noexcept {
    return {0, std::min(n_kv, lengths[static_cast<std::size_t>(b)])};
  }
  void check(std::string_view function, const attention_shape& s) const {
    detail::check_count(function, "key_lengths", lengths, s.n_batch, "batch of q");
    for (std::size_t b = 0; b < lengths.size(); ++b) {
      if (lengths[b] >= 0 && lengths[b] <= s.n_kv) continue;
      detail::raise_option(function, "key_lengths[" + std::to_string(b) + "]",
                           std::to_string(lengths[b]),
                           "0 to " + std::to_string(s.n_kv) + " (n_kv)");
    }
  }
};

/// j < prefix[b] or j ≤ i + offset: all see the prefix, the rest is causal.
struct prefix_mask {
  static constexpr rule_kind kind = rule_kind::range;
  std::span<const index_t> prefix;
  index_t offset = 0;

  template <class S>
  [[nodiscard]] constexpr S operator()(S score, index_t b, index_t, index_t i,
                                       index_t j) const noexcept {
    const bool allowed =
        j < prefix[static_cast<std::size_t>(b)] || j <= detail::saturating_add(i, offset);
    return allowed ? score : detail::forbidden<S>;
  }
  [[nodiscard]] constexpr key_range keys(index_t b, index_t, index_t i,
                                         index_t n_kv) const noexcept {
    const index_t last = detail::saturating_add(i, offset);
    const index_t causal_end = last < n_kv ? last + 1 : n_kv;
    return {0, std::min(n_kv, std::max(prefix[static_cast<std::size_t>(b)], causal_end))};
  }
  void check(std::string_view function, const attention_shape& s) const {
    detail::check_count(function, "prefix_mask.prefix", prefix, s.n_batch, "batch of q");
    for (std::size_t b = 0; b < prefix.size(); ++b) {
      if (prefix[b] >= 0) continue;
      detail::raise_option(function, "prefix_mask.prefix[" + std::to_string(b) + "]",
                           std::to_string(prefix[b]), "at least 0");
    }
  }
};

/// true = may attend. The view is [B|1, H|1, n_q|1, n_kv|1].
struct boolean_mask {
  static constexpr rule_kind kind = rule_kind::bias;
  tensor_view<const bool> allowed;

  template <class S>
  [[nodiscard]] constexpr S operator()(S score, index_t b, index_t h, index_t i,
                                       index_t j) const noexcept {
    return *at(b, h, i, j) ? score : detail::forbidden<S>;
  }
  [[nodiscard]] constexpr key_range keys(index_t, index_t, index_t, index_t n_kv) const noexcept {
    return {0, n_kv};
  }
  [[nodiscard]] constexpr const bool* at(index_t b, index_t h, index_t i,
                                         index_t j) const noexcept {
    return allowed.data_handle() + b * detail::step(allowed, 0) + h * detail::step(allowed, 1) +
           i * detail::step(allowed, 2) + j * detail::step(allowed, 3);
  }
  void check(std::string_view function, const attention_shape& s) const {
    detail::check_rule_view(function, "boolean_mask", allowed, s, true);
    detail::check_broadcast(function, "boolean_mask", allowed, 2, s.n_q, "n_q");
    detail::check_broadcast(function, "boolean_mask", allowed, 3, s.n_kv, "n_kv");
  }
};

/// A query attends to the keys of its own segment: q_ids(b, 0, i, 0) == k_ids(b, 0, j, 0).
struct segment_mask {
  static constexpr rule_kind kind = rule_kind::bias;
  tensor_view<const index_t> q_ids;  ///< [B|1, 1, n_q, 1]
  tensor_view<const index_t> k_ids;  ///< [B|1, 1, n_kv, 1]

  template <class S>
  [[nodiscard]] constexpr S operator()(S score, index_t b, index_t, index_t i,
                                       index_t j) const noexcept {
    return q_id(b, i) == k_id(b, j) ? score : detail::forbidden<S>;
  }
  [[nodiscard]] constexpr key_range keys(index_t, index_t, index_t, index_t n_kv) const noexcept {
    return {0, n_kv};
  }
  [[nodiscard]] constexpr index_t q_id(index_t b, index_t i) const noexcept { return *q_at(b, i); }
  [[nodiscard]] constexpr index_t k_id(index_t b, index_t j) const noexcept { return *k_at(b, j); }
  [[nodiscard]] constexpr const index_t* q_at(index_t b, index_t i) const noexcept {
    return q_ids.data_handle() + b * detail::step(q_ids, 0) + i * q_ids.stride(2);
  }
  [[nodiscard]] constexpr const index_t* k_at(index_t b, index_t j) const noexcept {
    return k_ids.data_handle() + b * detail::step(k_ids, 0) + j * k_ids.stride(2);
  }
  void check(std::string_view function, const attention_shape& s) const {
    check_ids(function, "segment_mask.q_ids", q_ids, s, s.n_q, "n_q");
    check_ids(function, "segment_mask.k_ids", k_ids, s, s.n_kv, "n_kv");
  }

 private:
  static void check_ids(std::string_view function, std::string_view argument,
                        const tensor_view<const index_t>& ids, const attention_shape& s, index_t n,
                        std::string_view reason) {
    detail::check_rule_view(function, argument, ids, s, false);
    detail::check_extent(function, argument, ids, 1, 1, "shared by all heads");
    detail::check_extent(function, argument, ids, 2, n, reason);
    detail::check_extent(function, argument, ids, 3, 1, "one id each");
  }
};

/// score + bias; a bias of −inf forbids. The view is [B|1, H|1, n_q|1, n_kv|1].
template <class T>
struct additive_bias {
  static constexpr rule_kind kind = rule_kind::bias;
  tensor_view<const T> bias;

  template <class S>
  [[nodiscard]] constexpr S operator()(S score, index_t b, index_t h, index_t i,
                                       index_t j) const noexcept {
    const S x = static_cast<S>(*at(b, h, i, j));
    return x == detail::forbidden<S> ? x : score + x;
  }
  [[nodiscard]] constexpr key_range keys(index_t, index_t, index_t, index_t n_kv) const noexcept {
    return {0, n_kv};
  }
  [[nodiscard]] constexpr const T* at(index_t b, index_t h, index_t i, index_t j) const noexcept {
    return bias.data_handle() + b * detail::step(bias, 0) + h * detail::step(bias, 1) +
           i * detail::step(bias, 2) + j * detail::step(bias, 3);
  }
  void check(std::string_view function, const attention_shape& s) const {
    detail::check_rule_view(function, "additive_bias", bias, s, true);
    detail::check_broadcast(function, "additive_bias", bias, 2, s.n_q, "n_q");
    detail::check_broadcast(function, "additive_bias", bias, 3, s.n_kv, "n_kv");
  }
};
template <class T>
additive_bias(tensor_view<T>) -> additive_bias<std::remove_const_t<T>>;

/// score − slopes[h] · |i + offset − j| (Press et al., "Train Short, Test Long", 2021).
struct alibi_bias {
  static constexpr rule_kind kind = rule_kind::bias;
  std::span<const float> slopes;  ///< one per query head
  index_t offset = 0;

  template <class S>
  [[nodiscard]] constexpr S operator()(S score, index_t, index_t h, index_t i,
                                       index_t j) const noexcept {
    const index_t distance = detail::saturating_add(detail::saturating_add(i, offset), -j);
    // As a number first: the smallest index_t has no positive counterpart.
    const S far = static_cast<S>(distance);
    return score - static_cast<S>(slopes[static_cast<std::size_t>(h)]) * (far < 0 ? -far : far);
  }
  [[nodiscard]] constexpr key_range keys(index_t, index_t, index_t, index_t n_kv) const noexcept {
    return {0, n_kv};
  }
  void check(std::string_view function, const attention_shape& s) const {
    detail::check_count(function, "alibi_bias.slopes", slopes, s.n_heads, "heads of q");
  }
};

/// Any function f(score, b, h, i, j) -> score, called once per allowed score with a float or (for
/// double tensors) double. −inf forbids. It may be called from several threads and must not throw.
template <class F>
struct score_rule_fn {
  static constexpr rule_kind kind = rule_kind::function;
  F f;

  constexpr explicit score_rule_fn(F function) : f(std::move(function)) {}

  template <class S>
  [[nodiscard]] constexpr S operator()(S score, index_t b, index_t h, index_t i, index_t j) const {
    return static_cast<S>(f(score, b, h, i, j));
  }
  [[nodiscard]] constexpr key_range keys(index_t, index_t, index_t, index_t n_kv) const noexcept {
    return {0, n_kv};
  }
  void check(std::string_view, const attention_shape&) const noexcept {}
};
/// `first`, then `second`: what `first & second` makes.
template <score_rule First, score_rule Second>
struct composed_rule {
  static constexpr rule_kind kind = std::max(First::kind, Second::kind);
  First first;
  Second second;

  template <class S>
  [[nodiscard]] constexpr S operator()(S score, index_t b, index_t h, index_t i, index_t j) const {
    const S s = first(score, b, h, i, j);
    // Nothing that comes later may bring a forbidden key back, NaN and +inf included.
    return s == detail::forbidden<S> ? s : static_cast<S>(second(s, b, h, i, j));
  }
  [[nodiscard]] constexpr key_range keys(index_t b, index_t h, index_t i,
                                         index_t n_kv) const noexcept {
    const key_range x = first.keys(b, h, i, n_kv), y = second.keys(b, h, i, n_kv);
    return {std::max(x.begin, y.begin), std::min(x.end, y.end)};
  }
  void check(std::string_view function, const attention_shape& s) const {
    first.check(function, s);
    second.check(function, s);
  }
};

template <score_rule First, score_rule Second>
[[nodiscard]] constexpr composed_rule<First, Second> operator&(First first, Second second) {
  return {std::move(first), std::move(second)};
}

}  // namespace attn
