// SPDX-License-Identifier: MIT
//
// From the public calls of SMYRF attention to their kernels: checks, then one call.
#pragma once

#include <string>
#include <string_view>
#include <type_traits>

#include <attn/detail/dense_attention_backward_checks.hpp>
#include <attn/detail/smyrf_attention_run.hpp>
#include <attn/detail/smyrf_checks.hpp>

namespace attn::detail {

/// The operands have the shapes the plan was made for.
template <class Q, class K>
void check_plan(std::string_view function, const smyrf_plan& plan, const tensor_view<Q>& q,
                const tensor_view<K>& k) {
  check_extent(function, "q", q, 0, plan.n_batch, "batch of the clusters");
  check_extent(function, "q", q, 1, plan.n_heads, "heads of the clusters");
  check_extent(function, "q", q, 2, plan.n_q, "queries of the clusters");
  check_extent(function, "k", k, 1, plan.n_heads_kv, "key heads of the clusters");
  check_extent(function, "k", k, 2, plan.n_kv, "keys of the clusters");
}

template <score_rule R>
void check_far_field(std::string_view function, const smyrf_options& options, const R&) {
  if (options.far_field == smyrf_far_field::none || std::is_same_v<R, no_mask>) return;
  raise<option_error>(std::string(function) + ": far_field is means with a score rule, expected " +
                      "no_mask or smyrf_far_field::none");
}

template <class Arch, class Q, class K, class V, class O, class L, score_rule R>
void smyrf_attention_checked(std::string_view function, const tensor_view<Q>& q,
                             const tensor_view<K>& k, const tensor_view<V>& v,
                             const tensor_view<O>& out, const tensor_view<L>& lse, bool wants_lse,
                             const smyrf_options& options, const smyrf_plan& plan, const R& rule,
                             context& ctx) {
  using T = simd::compute_t<Q>;
  check_attention(function, q, k, v, out, lse, wants_lse);
  check_plan(function, plan, q, k);
  check_far_field(function, options, rule);
  rule.check(function, attention_shape{q.extent(0), q.extent(1), q.extent(2), k.extent(2)});

  const dense_options dense{.scale = options.scale, .softcap = options.softcap};
  const smyrf_problem<T> problem{
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
      .out = make_head_sink<T, Arch>(out),
      .lse = lse,
  };
  smyrf_attention_clustered<T, Arch>(problem, rule, ctx);
}

}  // namespace attn::detail
