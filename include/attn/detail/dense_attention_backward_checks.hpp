// SPDX-License-Identifier: MIT
//
// From the public call of the backward pass to its kernel: checks, then one call.
#pragma once

#include <string>
#include <string_view>

#include <attn/detail/dense_attention_backward_kernel.hpp>
#include <attn/detail/dense_attention_checks.hpp>
#include <attn/detail/erased_rule.hpp>

namespace attn::detail {

/// `x` has the extents of `like`, whose name is `name`, but for a dim of its own.
template <class X, class L>
void check_rows_like(std::string_view function, std::string_view argument, const tensor_view<X>& x,
                     access mode, const tensor_view<L>& like, const std::string& name, index_t dim,
                     std::string_view dim_reason) {
  check_view(function, argument, x, mode);
  check_extent(function, argument, x, 0, like.extent(0), "batch of " + name);
  check_extent(function, argument, x, 1, like.extent(1), "heads of " + name);
  check_extent(function, argument, x, 2, like.extent(2), "length of " + name);
  check_extent(function, argument, x, 3, dim, dim_reason);
}

/// Operands and gradients of a backward pass against each other.
template <class Q, class K, class V, class O, class L, class DO, class DQ, class DK, class DV>
void check_gradients(std::string_view function, const tensor_view<Q>& q, const tensor_view<K>& k,
                     const tensor_view<V>& v, const tensor_view<O>& out, const tensor_view<L>& lse,
                     const tensor_view<DO>& d_out, const tensor_view<DQ>& d_q,
                     const tensor_view<DK>& d_k, const tensor_view<DV>& d_v) {
  using T = simd::compute_t<Q>;
  static_assert(is_operand<T, Q> && is_operand<T, K> && is_operand<T, V> && is_operand<T, O> &&
                    is_operand<T, DO> && is_operand<T, DQ> && is_operand<T, DK> &&
                    is_operand<T, DV>,
                "attn computes with float, double, Eigen::half and Eigen::bfloat16; the operands "
                "are all double, or none");
  static_assert(std::is_same_v<std::remove_const_t<L>, T>,
                "lse is double for double tensors, else float");
  static_assert(!std::is_const_v<DQ> && !std::is_const_v<DK> && !std::is_const_v<DV>,
                "gradients must be writable: not const, no expression");

  check_qkv(function, q, k, v);
  check_rows_like(function, "out", out, access::read, q, "q", v.extent(3), "d_v of v");
  check_rows_like(function, "lse", lse, access::read, q, "q", 1, "one per query");
  check_rows_like(function, "d_out", d_out, access::read, q, "q", v.extent(3), "d_v of v");
  check_rows_like(function, "d_q", d_q, access::write, q, "q", q.extent(3), "d_qk of q");
  check_rows_like(function, "d_k", d_k, access::write, k, "k", k.extent(3), "d_qk of k");
  check_rows_like(function, "d_v", d_v, access::write, v, "v", v.extent(3), "d_v of v");
  const auto check_apart = [&](std::string_view name, const auto& gradient) {
    check_disjoint(function, name, gradient, "q", q);
    check_disjoint(function, name, gradient, "k", k);
    check_disjoint(function, name, gradient, "v", v);
    check_disjoint(function, name, gradient, "out", out);
    check_disjoint(function, name, gradient, "lse", lse);
    check_disjoint(function, name, gradient, "d_out", d_out);
  };
  check_apart("d_q", d_q);
  check_apart("d_k", d_k);
  check_apart("d_v", d_v);
  check_disjoint(function, "d_k", d_k, "d_q", d_q);
  check_disjoint(function, "d_v", d_v, "d_q", d_q);
  check_disjoint(function, "d_v", d_v, "d_k", d_k);
}

template <class Arch, class Q, class K, class V, class O, class L, class DO, class DQ, class DK,
          class DV, score_rule R>
void dense_attention_backward_checked(std::string_view function, const tensor_view<Q>& q,
                                      const tensor_view<K>& k, const tensor_view<V>& v,
                                      const tensor_view<O>& out, const tensor_view<L>& lse,
                                      const tensor_view<DO>& d_out, const tensor_view<DQ>& d_q,
                                      const tensor_view<DK>& d_k, const tensor_view<DV>& d_v,
                                      const R& rule, const dense_options& options, context& ctx) {
  using T = simd::compute_t<Q>;
  check_gradients(function, q, k, v, out, lse, d_out, d_q, d_k, d_v);
  check_options<T>(function, options, q.extent(1));
  rule.check(function, attention_shape{q.extent(0), q.extent(1), q.extent(2), k.extent(2)});

  const dense_backward_problem<T> problem{
      .n_batch = q.extent(0),
      .n_heads = q.extent(1),
      .n_heads_kv = k.extent(1),
      .n_q = q.extent(2),
      .n_kv = k.extent(2),
      .d_qk = q.extent(3),
      .d_v = v.extent(3),
      .scale = static_cast<T>(scale_of(options, q.extent(3))),
      .softcap = static_cast<T>(options.softcap),
      .q = make_head_source<T, Arch>(q),
      .k = make_head_source<T, Arch>(k),
      .v = make_head_source<T, Arch>(v),
      .out = make_head_source<T, Arch>(out),
      .d_out = make_head_source<T, Arch>(d_out),
      .lse = lse,
      .dq = make_head_sink<T, Arch>(d_q),
      .dk = make_head_sink<T, Arch>(d_k),
      .dv = make_head_sink<T, Arch>(d_v),
  };
  if constexpr (R::kind == rule_kind::function) {  // may have a slope
    dense_attention_backward_tiled<T, Arch>(problem, rule, ctx);
  } else {
    dense_attention_backward_tiled<T, Arch>(problem, erased_rule<T, Arch, R::kind>(rule), ctx);
  }
}

}  // namespace attn::detail
