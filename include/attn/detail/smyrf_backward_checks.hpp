// SPDX-License-Identifier: MIT
//
// From the public call of the backward pass of SMYRF to its kernel: checks, then one call.
#pragma once

#include <string_view>
#include <type_traits>

#include <attn/detail/dense_attention_backward_checks.hpp>
#include <attn/detail/smyrf_attention_checks.hpp>
#include <attn/detail/smyrf_backward_run.hpp>

namespace attn::detail {

template <class Arch, class Q, class K, class V, class O, class L, class DO, class DQ, class DK,
          class DV, score_rule R>
void smyrf_backward_checked(std::string_view function, const tensor_view<Q>& q,
                            const tensor_view<K>& k, const tensor_view<V>& v,
                            const tensor_view<O>& out, const tensor_view<L>& lse,
                            const tensor_view<DO>& d_out, const tensor_view<DQ>& d_q,
                            const tensor_view<DK>& d_k, const tensor_view<DV>& d_v,
                            const smyrf_options& options, const smyrf_plan& plan, const R& rule,
                            context& ctx) {
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
  check_plan(function, plan, q, k);
  check_far_field(function, options, rule);
  rule.check(function, attention_shape{q.extent(0), q.extent(1), q.extent(2), k.extent(2)});

  const dense_options dense{.scale = options.scale, .softcap = options.softcap};
  const smyrf_backward_problem<T> problem{
      .plan = &plan,
      .n_batch = q.extent(0),
      .n_heads = q.extent(1),
      .n_heads_kv = k.extent(1),
      .n_q = q.extent(2),
      .n_kv = k.extent(2),
      .d_qk = q.extent(3),
      .d_v = v.extent(3),
      .scale = static_cast<T>(scale_of(dense, q.extent(3))),
      .softcap = static_cast<T>(options.softcap),
      .removes_duplicates = options.duplicates == smyrf_duplicates::removed && options.rounds > 1,
      .attend_self = options.attend_self,
      .far_field = options.far_field == smyrf_far_field::means,
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
  smyrf_backward_run<T, Arch, R::kind>(problem, smyrf_rule<T>(rule), ctx);
}

}  // namespace attn::detail
