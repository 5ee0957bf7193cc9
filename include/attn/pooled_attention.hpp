// SPDX-License-Identifier: MIT
//
// Attention to keys and values that a soft top-k has pooled.
#pragma once

#include <algorithm>
#include <limits>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>

#include <attn/context.hpp>
#include <attn/dense_attention.hpp>
#include <attn/dense_options.hpp>
#include <attn/detail/pooled_attention_kernel.hpp>
#include <attn/eigen.hpp>
#include <attn/soft_topk.hpp>
#include <attn/view.hpp>

namespace attn {

/// Options of pooled attention: how many keys are kept, the options of the tournament and those of
/// dense attention.
struct pooled_options {
  index_t k = 512;
  topk_boost boost = topk_boost::exponential;
  double strength = 20;
  topk_sort sort = topk_sort::every_round;
  std::span<const index_t> lengths = {};  ///< keys of each batch, or none: later ones do not exist

  std::optional<double> scale = {};
  double softcap = 0;
  std::span<const float> sinks = {};
  precision_mode precision = precision_mode::automatic;

  /// The order of the slots does not matter to attention: by rank saves putting them in another.
  [[nodiscard]] constexpr soft_topk_options pooling() const noexcept {
    return {.boost = boost,
            .strength = strength,
            .sort = sort,
            .order = topk_order::by_rank,
            .lengths = lengths};
  }
  [[nodiscard]] constexpr dense_options dense() const noexcept {
    return {.scale = scale, .softcap = softcap, .sinks = sinks, .precision = precision};
  }
};

/// Attention to n_kv keys through k of them: one tournament over the scores pools keys and values
/// alike, then every query attends to the k survivors.
///
///     k'_r = Σ_j w_rj k_j,  v'_r = Σ_j w_rj v_j,   out = softmax(softcap(scale · q k'ᵀ)) v'
///
/// @param q [B, H, n_q, d_qk]
/// @param k [B, Hkv, n_kv, d_qk]; Hkv divides H, query head h reads key/value head h / (H / Hkv)
/// @param v [B, Hkv, n_kv, d_v]
/// @param scores [B, Hkv, n_kv, 1] what the tournament is over; a head stride of 0 shares one
///     tournament between all heads
/// @param out [B, H, n_q, d_v], in memory of its own
/// @param lse [B, H, n_q, 1], float (double for double tensors); leave it out if not needed
/// @param options k, and the options of tournament and dense_attention
/// @param ctx threads and reused scratch (context.hpp)
///
/// **Numerics** pooled keys and values are float (double for double tensors), never rounded to a
/// half type; then as in dense_attention. Keys and values past their length, or of weight 0, are
/// not read.
/// **Errors** those of tournament and dense_attention, in the name of pooled_attention.
/// **Cost** a tournament, n_kv (d_qk + d_v) multiply-adds and 2 n_q k (d_qk + d_v) flops per head:
/// n_q · n_kv becomes n_q · k. Pooled keys and values, and the plan of the tournament, are kept per
/// calling thread for the next call.
/// **References** Pietruszka, Borchmann, Garncarek, "Sparsifying Transformer Models with Trainable
/// Representation Pooling", ACL 2022.
/// **Example** examples/pooled_attention.cpp
template <viewable Q, viewable K, viewable V, viewable S, viewable O, viewable L,
          class Arch = simd::default_arch>
void pooled_attention(const Q& q, const K& k, const V& v, const S& scores, O&& out, L&& lse,
                      const pooled_options& options = {}, context& ctx = default_context()) {
  detail::pooled_attention_checked<Arch>("pooled_attention", view(q), view(k), view(v),
                                         view(scores), view(out), view(lse), true, options.k,
                                         options.pooling(), options.dense(), ctx);
}

/// The same without the log-sum-exp.
template <viewable Q, viewable K, viewable V, viewable S, viewable O,
          class Arch = simd::default_arch>
void pooled_attention(const Q& q, const K& k, const V& v, const S& scores, O&& out,
                      const pooled_options& options = {}, context& ctx = default_context()) {
  using T = simd::compute_t<element_t<const Q&>>;
  detail::pooled_attention_checked<Arch>("pooled_attention", view(q), view(k), view(v),
                                         view(scores), view(out), tensor_view<T>(), false,
                                         options.k, options.pooling(), options.dense(), ctx);
}

/// The gradients of a loss with respect to the operands of `pooled_attention`, the scores among
/// them: through the pooled keys and values to the weights of the tournament.
///
/// @param q, k, v, scores, options as in the call of pooled_attention
/// @param out [B, H, n_q, d_v] its output  @param lse [B, H, n_q, 1] its log-sum-exp
/// @param d_out [B, H, n_q, d_v]
/// @param d_q [B, H, n_q, d_qk], @param d_k [B, Hkv, n_kv, d_qk], @param d_v [B, Hkv, n_kv, d_v]
/// @param d_scores [B, Hkv, n_kv, 1]; all four overwritten, each in memory of its own
///
/// **Numerics** as in dense_attention_backward and soft_topk_backward. Keys past their length get
/// gradients of 0.
/// **Errors** those of the two, in the name of pooled_attention_backward.
/// **Cost** a tournament, 3 n_kv (d_qk + d_v) multiply-adds and n_q k (6 d_qk + 4 d_v) flops per
/// head.
/// **Example** examples/pooled_attention.cpp
template <viewable Q, viewable K, viewable V, viewable S, viewable O, viewable L, viewable DO,
          viewable DQ, viewable DK, viewable DV, viewable DS, class Arch = simd::default_arch>
void pooled_attention_backward(const Q& q, const K& k, const V& v, const S& scores, const O& out,
                               const L& lse, const DO& d_out, DQ&& d_q, DK&& d_k, DV&& d_v,
                               DS&& d_scores, const pooled_options& options = {},
                               context& ctx = default_context()) {
  detail::pooled_attention_backward_checked<Arch>(
      "pooled_attention_backward", view(q), view(k), view(v), view(scores), view(out), view(lse),
      view(d_out), view(d_q), view(d_k), view(d_v), view(d_scores), options.k, options.pooling(),
      options.dense(), ctx);
}

}  // namespace attn
