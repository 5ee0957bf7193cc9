// SPDX-License-Identifier: MIT
//
// SMYRF: attention inside balanced clusters of queries and keys.
#pragma once

#include <string_view>
#include <type_traits>

#include <attn/context.hpp>
#include <attn/detail/smyrf_attention_checks.hpp>
#include <attn/detail/smyrf_backward_checks.hpp>
#include <attn/eigen.hpp>
#include <attn/score_rule.hpp>
#include <attn/smyrf_clusters.hpp>
#include <attn/smyrf_options.hpp>
#include <attn/view.hpp>

namespace attn {

/// Attention of each query to the keys of its clusters, over all rounds of a plan.
///
///     s_ij  = scale · q_i·k_j, then softcap, then rule at the original positions i, j
///     m_ij  = rounds in which i and j share a cluster; with duplicates removed min(1, that)
///     lse_i = ln Σ_j m_ij exp(s_ij)        out_i = Σ_j m_ij exp(s_ij − lse_i) v_j
///
/// With one cluster out is that of dense attention; with duplicates removed out and lse are, under
/// the mask of all pairs that meet. `attend_self` adds m_ii = 1 where it would be 0. With
/// `smyrf_far_field::means` the keys that a query does not meet in a round count by the means of
/// log2(clusters) groups of them.
///
/// @param q [B, H, n_q, d_qk]
/// @param k [B, Hkv, n_kv, d_qk]; Hkv divides H, query head h reads head h / (H / Hkv)
/// @param v [B, Hkv, n_kv, d_v]
/// @param out [B, H, n_q, d_v], in memory of its own
/// @param lse [B, H, n_q, 1], float (double for double tensors); leave it out if not needed
/// @param c clusters made for this batch, these heads and lengths; scale, softcap and the rest are
/// its options
/// @param rule masks and biases, composed with `&` (score_rule.hpp)
/// @param ctx threads and reused scratch (context.hpp)
///
/// **Numerics** as dense_attention, and one rounding per round for the merge. Rows that see no key,
/// and rows past the query lengths: out 0, lse −inf. NaN in a query makes its row NaN, NaN in a key
/// or value the rows that meet it (with a far field all rows of the head). A row's bits depend on
/// its own query, the keys and values it meets, the rule and the options, not on the threads.
/// **Errors** shape_error: shapes that do not fit each other or the plan, outputs that share memory
/// with an operand. option_error: a rule where there is a far field.
/// **Cost** 2 n_q n_kv (d_qk + d_v) · rounds / clusters flops per head, and per round one gather of
/// the rows of q, k, v and one merge of those of out. Scratch per thread: one cluster, and where
/// out is not rows of T, one head.
/// **References** Daras, Kitaev, Odena, Dimakis, "SMYRF: Efficient Attention using Asymmetric
/// Clustering", NeurIPS 2020. Removing duplicates: Chen et al., "Scatterbrain", NeurIPS 2021.
/// **Example** examples/smyrf.cpp
template <viewable Q, viewable K, viewable V, viewable O, viewable L, score_rule R = no_mask,
          class Arch = simd::default_arch>
void smyrf_attention(const Q& q, const K& k, const V& v, O&& out, L&& lse, const smyrf_clusters& c,
                     const R& rule = {}, context& ctx = default_context()) {
  detail::smyrf_attention_checked<Arch>("smyrf_attention", view(q), view(k), view(v), view(out),
                                        view(lse), true, c.options(), c.data(), rule, ctx);
}

/// The same without the log-sum-exp.
template <viewable Q, viewable K, viewable V, viewable O, score_rule R = no_mask,
          class Arch = simd::default_arch>
void smyrf_attention(const Q& q, const K& k, const V& v, O&& out, const smyrf_clusters& c,
                     const R& rule = {}, context& ctx = default_context()) {
  using T = simd::compute_t<element_t<const Q&>>;
  detail::smyrf_attention_checked<Arch>("smyrf_attention", view(q), view(k), view(v), view(out),
                                        tensor_view<T>(), false, c.options(), c.data(), rule, ctx);
}

/// Clusters and attention in one call. It allocates the plan; where calls repeat, keep a
/// smyrf_clusters and `assign` to it.
///
/// **Errors** those of smyrf_clusters, in its name, and those above, before anything is written.
template <viewable Q, viewable K, viewable V, viewable O, viewable L, score_rule R = no_mask,
          class Arch = simd::default_arch>
void smyrf_attention(const Q& q, const K& k, const V& v, O&& out, L&& lse,
                     const smyrf_options& options, const R& rule = {},
                     context& ctx = default_context()) {
  smyrf_clusters c;
  c.template assign<Q, K, Arch>(q, k, options, ctx);
  detail::smyrf_attention_checked<Arch>("smyrf_attention", view(q), view(k), view(v), view(out),
                                        view(lse), true, options, c.data(), rule, ctx);
}

/// The same without the log-sum-exp.
template <viewable Q, viewable K, viewable V, viewable O, score_rule R = no_mask,
          class Arch = simd::default_arch>
void smyrf_attention(const Q& q, const K& k, const V& v, O&& out, const smyrf_options& options,
                     const R& rule = {}, context& ctx = default_context()) {
  using T = simd::compute_t<element_t<const Q&>>;
  smyrf_clusters c;
  c.template assign<Q, K, Arch>(q, k, options, ctx);
  detail::smyrf_attention_checked<Arch>("smyrf_attention", view(q), view(k), view(v), view(out),
                                        tensor_view<T>(), false, options, c.data(), rule, ctx);
}

/// Gradients of SMYRF attention through scores, values and the merge of rounds; the clusters are a
/// constant.
///
///     P_ij = m_ij exp(s_ij − lse_i)      D_i = d_out_i·out_i
///     d_v_j = Σ_i P_ij d_out_i           G_ij = P_ij (d_out_i·v_j − D_i) · ds_ij/d(scale q_i·k_j)
///     d_q_i = scale Σ_j G_ij k_j         d_k_j = scale Σ_i G_ij q_i
///
/// @param q, k, v, out, lse, c as in the forward call: out and lse are its results; also rule, last
/// @param d_out [B, H, n_q, d_v] gradient of out, before c
/// @param d_q, d_k, d_v like q, k and v; overwritten, 0 past the lengths and for rows without keys
///
/// **Numerics** as dense_attention_backward. With a far field the means are differentiated too.
/// **Errors** shape_error: shapes that do not fit each other or the plan, gradients that share
/// memory with anything. option_error: a rule where there is a far field.
/// **Cost** 2.5 times the flops of the forward call. Bits do not depend on the threads.
/// **Example** examples/smyrf.cpp
template <viewable Q, viewable K, viewable V, viewable O, viewable L, viewable DO, viewable DQ,
          viewable DK, viewable DV, score_rule R = no_mask, class Arch = simd::default_arch>
void smyrf_attention_backward(const Q& q, const K& k, const V& v, const O& out, const L& lse,
                              const DO& d_out, const smyrf_clusters& c, DQ&& d_q, DK&& d_k,
                              DV&& d_v, const R& rule = {}, context& ctx = default_context()) {
  detail::smyrf_backward_checked<Arch>("smyrf_attention_backward", view(q), view(k), view(v),
                                       view(out), view(lse), view(d_out), view(d_q), view(d_k),
                                       view(d_v), c.options(), c.data(), rule, ctx);
}

}  // namespace attn
