// SPDX-License-Identifier: MIT
//
// From the public call of dense attention to its kernel: checks, then one call.
#pragma once

#include <cmath>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>

#include <attn/detail/amx_attention.hpp>
#include <attn/detail/checks.hpp>
#include <attn/detail/decode_attention_kernel.hpp>
#include <attn/detail/dense_attention_kernel.hpp>
#include <attn/detail/erased_rule.hpp>

namespace attn::detail {

template <class T>
inline constexpr bool is_element =
    std::is_same_v<T, float> || std::is_same_v<T, double> || std::is_same_v<T, Eigen::half> ||
    std::is_same_v<T, Eigen::bfloat16>;

/// X is an element type that is computed in T.
template <class T, class X>
inline constexpr bool is_operand =
    is_element<std::remove_const_t<X>>&& std::is_same_v<simd::compute_t<X>, T>;

/// Shapes of q, k, v against each other.
template <class Q, class K, class V>
void check_qkv(std::string_view function, const tensor_view<Q>& q, const tensor_view<K>& k,
               const tensor_view<V>& v) {
  check_view(function, "q", q, access::read);
  check_view(function, "k", k, access::read);
  check_view(function, "v", v, access::read);
  check_extent(function, "k", k, 0, q.extent(0), "batch of q");
  check_extent(function, "k", k, 3, q.extent(3), "d_qk of q");
  check_extent(function, "v", v, 0, q.extent(0), "batch of q");
  check_extent(function, "v", v, 1, k.extent(1), "heads of k");
  check_extent(function, "v", v, 2, k.extent(2), "length of k");
  const index_t heads = q.extent(1), heads_kv = k.extent(1);
  if (heads_kv == 0 ? heads != 0 : heads % heads_kv != 0) {
    raise_shape(function, "k", k.extents(),
                "heads that divide " + std::to_string(heads) + " (heads of q)");
  }
}

/// An output [B, H, n_q, dim] of a call with query `q`.
template <class O, class Q>
void check_output(std::string_view function, std::string_view argument, const tensor_view<O>& out,
                  const tensor_view<Q>& q, index_t dim, std::string_view dim_reason) {
  static_assert(!std::is_const_v<O>, "an output must be writable: not const, no expression");
  check_view(function, argument, out, access::write);
  check_extent(function, argument, out, 0, q.extent(0), "batch of q");
  check_extent(function, argument, out, 1, q.extent(1), "heads of q");
  check_extent(function, argument, out, 2, q.extent(2), "length of q");
  check_extent(function, argument, out, 3, dim, dim_reason);
}

/// Operands and results of a call against each other; lse only if it is wanted.
template <class Q, class K, class V, class O, class L>
void check_attention(std::string_view function, const tensor_view<Q>& q, const tensor_view<K>& k,
                     const tensor_view<V>& v, const tensor_view<O>& out, const tensor_view<L>& lse,
                     bool wants_lse) {
  using T = simd::compute_t<Q>;
  static_assert(is_operand<T, Q> && is_operand<T, K> && is_operand<T, V> && is_operand<T, O>,
                "attn computes with float, double, Eigen::half and Eigen::bfloat16; q, k, v and "
                "out are all double, or none");
  static_assert(std::is_same_v<L, T>, "lse is double for double tensors, else float");

  check_qkv(function, q, k, v);
  check_output(function, "out", out, q, v.extent(3), "d_v of v");
  check_disjoint(function, "out", out, "q", q);
  check_disjoint(function, "out", out, "k", k);
  check_disjoint(function, "out", out, "v", v);
  if (wants_lse) {
    check_output(function, "lse", lse, q, 1, "one per query");
    check_disjoint(function, "lse", lse, "q", q);
    check_disjoint(function, "lse", lse, "k", k);
    check_disjoint(function, "lse", lse, "v", v);
    check_disjoint(function, "lse", lse, "out", out);
  }
}

/// The softcaps c that T computes: c and 1/c are normal numbers, and what a score loses to
/// underflow in s/c stays below eps.
template <class T>
inline constexpr double smallest_softcap = static_cast<double>(std::numeric_limits<T>::min());
template <class T>
inline constexpr double
    largest_softcap = static_cast<double>(std::numeric_limits<T>::epsilon()) / smallest_softcap<T>;

/// Options of a call that computes in T.
template <class T>
void check_options(std::string_view function, const dense_options& options, index_t n_heads) {
  constexpr auto largest = static_cast<double>(std::numeric_limits<T>::max());
  const std::string type = std::is_same_v<T, float> ? " (float)" : " (double)";
  if (options.scale && !std::isfinite(*options.scale)) {
    raise_option(function, "scale", to_text(*options.scale), "a finite number");
  }
  if (options.scale && std::abs(*options.scale) > largest) {
    raise_option(function, "scale", to_text(*options.scale),
                 "at most " + to_text(largest) + " in size" + type);
  }
  const double cap = options.softcap;
  if (!std::isfinite(cap) || cap < 0) {
    raise_option(function, "softcap", to_text(cap), "0 (off) or a positive number");
  }
  if (cap != 0 && (cap < smallest_softcap<T> || cap > largest_softcap<T>)) {
    raise_option(function, "softcap", to_text(cap),
                 "0 (off) or " + to_text(smallest_softcap<T>) + " to " +
                     to_text(largest_softcap<T>) + type);
  }
  if (!options.sinks.empty()) {
    check_count(function, "sinks", options.sinks, n_heads, "heads of q");
  }
}

/// The scale of a call: 1/sqrt(d_qk) if none is given.
[[nodiscard]] inline double scale_of(const dense_options& options, index_t d_qk) noexcept {
  if (options.scale) return *options.scale;
  return d_qk == 0 ? 1.0 : 1.0 / std::sqrt(static_cast<double>(d_qk));
}

template <class Arch, class Q, class K, class V, class O, class L, score_rule R>
void dense_attention_checked(std::string_view function, const tensor_view<Q>& q,
                             const tensor_view<K>& k, const tensor_view<V>& v,
                             const tensor_view<O>& out, const tensor_view<L>& lse, bool wants_lse,
                             const R& rule, const dense_options& options, context& ctx) {
  using T = simd::compute_t<Q>;
  check_attention(function, q, k, v, out, lse, wants_lse);
  check_options<T>(function, options, q.extent(1));
  rule.check(function, attention_shape{q.extent(0), q.extent(1), q.extent(2), k.extent(2)});

  const dense_problem<T> problem{
      .n_batch = q.extent(0),
      .n_heads = q.extent(1),
      .n_heads_kv = k.extent(1),
      .n_q = q.extent(2),
      .n_kv = k.extent(2),
      .d_qk = q.extent(3),
      .d_v = v.extent(3),
      .scale = static_cast<T>(scale_of(options, q.extent(3))),
      .softcap = static_cast<T>(options.softcap),
      .sinks = options.sinks,
      .q = make_head_source<T, Arch>(q),
      .k = make_head_source<T, Arch>(k),
      .v = make_head_source<T, Arch>(v),
      .out = make_head_sink<T, Arch>(out),
      .lse = lse,
  };
  const erased_rule<T, Arch, R::kind> erased(rule);
  // On AMX tiles where they are faster; never a strict call.
  if constexpr (std::is_same_v<T, float>) {
    constexpr bool all_bfloat16 = std::is_same_v<std::remove_const_t<Q>, Eigen::bfloat16> &&
                                  std::is_same_v<std::remove_const_t<K>, Eigen::bfloat16> &&
                                  std::is_same_v<std::remove_const_t<V>, Eigen::bfloat16>;
    if (dense_attention_on_tiles<Arch, all_bfloat16>(problem, erased, options.precision, ctx)) {
      return;
    }
  }
  // A strict call has one order of summation for every n_q.
  const bool few = problem.n_q <= decode_max_queries<T, Arch>;
  if (few && options.precision != precision_mode::strict) {
    dense_attention_decode<T, Arch>(problem, erased, ctx);
  } else {
    dense_attention_tiled<T, Arch>(problem, erased, ctx);
  }
}

}  // namespace attn::detail
