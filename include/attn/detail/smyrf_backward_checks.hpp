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
  check_gradients(function, q, k, v, out, lse, d_out, d_q, d_k, d_v);
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
