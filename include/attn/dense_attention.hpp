// SPDX-License-Identifier: MIT
//
// Dense scaled dot-product attention.
#pragma once

#include <cmath>
#include <type_traits>

#include <attn/attention_weights.hpp>
#include <attn/context.hpp>
#include <attn/dense_attention_backward.hpp>
#include <attn/dense_options.hpp>
#include <attn/detail/dense_attention_checks.hpp>
#include <attn/detail/dense_attention_kernel.hpp>
#include <attn/eigen.hpp>
#include <attn/score_rule.hpp>
#include <attn/view.hpp>

namespace attn {

/// Exact attention, out = softmax(rule(softcap(scale · q kᵀ))) v, and its log-sum-exp; the scores
/// are never stored.
///
///     s_ij  = scale · q_i·k_j, then softcap, then rule (−inf: not allowed)
///     lse_i = ln Σ_j exp(s_ij)                 (and + exp(sink) where there are sinks)
///     out_i = Σ_j exp(s_ij − lse_i) v_j
///
/// Operands are anything `attn::view` takes: tensor_view, Eigen matrices (one head), Eigen tensors;
/// float, double, Eigen::half or Eigen::bfloat16, also mixed, all but double computed in float.
///
/// @param q [B, H, n_q, d_qk]
/// @param k [B, Hkv, n_kv, d_qk]; Hkv divides H, query head h reads head h / (H / Hkv)
/// @param v [B, Hkv, n_kv, d_v]
/// @param out [B, H, n_q, d_v], in memory of its own
/// @param lse [B, H, n_q, 1], float (double for double tensors); leave it out if not needed
/// @param rule masks and biases, composed with `&` (score_rule.hpp)
/// @param options scale, softcap, sinks, precision (dense_options.hpp)
/// @param ctx threads and reused scratch (context.hpp)
///
/// **Numerics** |error| ≤ 16 eps (1 + S/√d_qk) max|v| with S = max_ij scale·Σ_c |q_ic k_jc|
/// (docs/numerics.md). A row that may attend to no key: out 0, lse −inf (lse is the sink where
/// there is one). NaN in a query makes its row NaN, NaN in a key or value the rows that may attend
/// to it, a score of +inf its row; a forbidden key or value may hold anything. Scores of any finite
/// size are exact. A row's bits depend on its own query, keys, values, rule and options, not on the
/// batch, the other rows or the threads. On x86 subnormal numbers count as 0; the caller's mode is
/// restored.
/// **Errors** shape_error, option_error, before anything is written.
/// **Cost** 2 n_q n_kv (d_qk + d_v) flops per head over the tiles that the rule leaves; scratch
/// O(tile) per thread, plus one head (n_kv (d_qk + d_v)) where it is strided, half or goes to AMX.
/// **References** Rabe & Staats 2021; Dao et al. 2022 (online softmax over tiles).
/// **Example** examples/dense_attention.cpp
template <viewable Q, viewable K, viewable V, viewable O, viewable L, score_rule R = no_mask,
          class Arch = simd::default_arch>
void dense_attention(const Q& q, const K& k, const V& v, O&& out, L&& lse, const R& rule = {},
                     const dense_options& options = {}, context& ctx = default_context()) {
  detail::dense_attention_checked<Arch>("dense_attention", view(q), view(k), view(v), view(out),
                                        view(lse), true, rule, options, ctx);
}

/// The same without the log-sum-exp.
template <viewable Q, viewable K, viewable V, viewable O, score_rule R = no_mask,
          class Arch = simd::default_arch>
void dense_attention(const Q& q, const K& k, const V& v, O&& out, const R& rule = {},
                     const dense_options& options = {}, context& ctx = default_context()) {
  using T = simd::compute_t<element_t<const Q&>>;
  detail::dense_attention_checked<Arch>("dense_attention", view(q), view(k), view(v), view(out),
                                        tensor_view<T>(), false, rule, options, ctx);
}

/// One head of Eigen matrices, [n_q, d_qk], [n_kv, d_qk], [n_kv, d_v]: returns softmax(q kᵀ/√d_qk)
/// v as a plain matrix [n_q, d_v] of v's storage order.
template <class Q, class K, class V, score_rule R = no_mask, class Arch = simd::default_arch>
requires detail::eigen_matrix<Q> && detail::eigen_matrix<K> && detail::eigen_matrix<V>
[[nodiscard]] auto dense_attention(const Q& q, const K& k, const V& v, const R& rule = {},
                                   const dense_options& options = {},
                                   context& ctx = default_context()) {
  constexpr int order = V::IsRowMajor ? Eigen::RowMajor : Eigen::ColMajor;
  Eigen::Matrix<typename V::Scalar, Eigen::Dynamic, Eigen::Dynamic, order> out(q.rows(), v.cols());
  dense_attention(q, k, v, out, rule, options, ctx);
  return out;
}

}  // namespace attn
