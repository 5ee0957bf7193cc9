// SPDX-License-Identifier: MIT
//
// The backward pass of dense attention.
#pragma once

#include <attn/context.hpp>
#include <attn/dense_options.hpp>
#include <attn/detail/dense_attention_backward_checks.hpp>
#include <attn/eigen.hpp>
#include <attn/score_rule.hpp>
#include <attn/view.hpp>

namespace attn {

/// The gradients of a loss with respect to the operands of `dense_attention`, from its results and
/// the gradient of the loss with respect to `out`; weights are computed again and never stored.
///
///     p_ij = exp(s_ij − lse_i)                   D_i = d_out_i·out_i
///     g_ij = p_ij (d_out_i·v_j − D_i) · scale    (· the slope of softcap and rule at s_ij)
///     d_q_i = Σ_j g_ij k_j     d_k_j = Σ_i g_ij q_i     d_v_j = Σ_i p_ij d_out_i
///
/// With grouped heads Σ_i is also over the query heads that read a key/value head. Operands are
/// anything `attn::view` takes, of the element types of `dense_attention`, also mixed.
///
/// @param q, k, v, rule, options as in the call of dense_attention
/// @param out [B, H, n_q, d_v] its output
/// @param lse [B, H, n_q, 1] its log-sum-exp, sinks included; −inf says: a row without keys
/// @param d_out [B, H, n_q, d_v]
/// @param d_q [B, H, n_q, d_qk], @param d_k [B, Hkv, n_kv, d_qk], @param d_v [B, Hkv, n_kv, d_v]
///        overwritten; each in memory of its own
/// @param ctx threads and reused scratch (context.hpp)
///
/// A rule is taken to add a number that does not depend on the score, or to forbid. One that does
/// more tells its derivative: a member `slope(score, b, h, i, j)`, d(score after) / d(score
/// before), of the function in score_rule_fn or of a rule of the user's own. A sink takes part
/// through the lse; its own gradient is −Σ_i D_i exp(sink − lse_i).
///
/// **Numerics** error and how it was measured: docs/kernels/dense_attention_backward.md. A row that
/// may attend to no key adds nothing and has a d_q of 0; so does a key that no row may attend to,
/// in d_k and d_v. A forbidden pair is skipped, not multiplied by 0: a key, value, query or d_out
/// that holds NaN or inf reaches the gradients of those alone that it is allowed to meet. Keys past
/// key_lengths are never read. Half types: sums are float and rounded once. Each sum has one order,
/// so the bits do not depend on the number of threads.
/// **Errors** shape_error, option_error, before anything is written.
/// **Cost** n_q n_kv (6 d_qk + 4 d_v) flops per head over the tiles that the rule leaves; 4/3 to
/// 8/5 of it where there are fewer key/value heads than threads. Scratch per thread: 4 query tiles,
/// and n_kv (d_qk + d_v) sums of one head.
/// **References** Dao et al. 2022, "FlashAttention", appendix B.
/// **Example** examples/dense_attention_backward.cpp
template <viewable Q, viewable K, viewable V, viewable O, viewable L, viewable DO, viewable DQ,
          viewable DK, viewable DV, score_rule R = no_mask, class Arch = simd::default_arch>
void dense_attention_backward(const Q& q, const K& k, const V& v, const O& out, const L& lse,
                              const DO& d_out, DQ&& d_q, DK&& d_k, DV&& d_v, const R& rule = {},
                              const dense_options& options = {}, context& ctx = default_context()) {
  detail::dense_attention_backward_checked<Arch>(
      "dense_attention_backward", view(q), view(k), view(v), view(out), view(lse), view(d_out),
      view(d_q), view(d_k), view(d_v), rule, options, ctx);
}

}  // namespace attn
