// SPDX-License-Identifier: MIT
//
// Full attention inside the chunks of a sequence.
#pragma once

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include <attn/context.hpp>
#include <attn/dense_attention.hpp>
#include <attn/dense_options.hpp>
#include <attn/eigen.hpp>
#include <attn/score_rule.hpp>
#include <attn/view.hpp>

namespace attn {

/// Query i attends to key j if both are in the same chunk of `block` positions: i/block = j/block.
struct block_mask {
  static constexpr rule_kind kind = rule_kind::range;
  index_t block;

  template <class S>
  [[nodiscard]] constexpr S operator()(S score, index_t, index_t, index_t i,
                                       index_t j) const noexcept {
    return i / block == j / block ? score : detail::forbidden<S>;
  }
  [[nodiscard]] constexpr key_range keys(index_t, index_t, index_t i, index_t n_kv) const noexcept {
    const index_t first = i / block * block;
    return {first, block < n_kv - first ? first + block : n_kv};
  }
  void check(std::string_view function, const attention_shape&) const {
    if (block >= 1) return;
    detail::raise_option(function, "block", std::to_string(block), "at least 1");
  }
};

/// Options of blockwise attention: the length of a chunk, and those of dense attention.
struct blockwise_options {
  index_t block = 512;
  std::optional<double> scale = {};
  double softcap = 0;
  std::span<const float> sinks = {};
  precision_mode precision = precision_mode::automatic;

  [[nodiscard]] constexpr dense_options dense() const noexcept {
    return {.scale = scale, .softcap = softcap, .sinks = sinks, .precision = precision};
  }
};

/// Attention of every chunk of `block` positions to itself: the sequence is cut at multiples of
/// block, the last chunk may be short, and no query looks into another chunk.
///
///     out_i = Σ_j exp(s_ij − lse_i) v_j    over the j with j/block = i/block that the rule allows
///
/// It is dense attention under the block-diagonal mask; only the tiles on the diagonal are visited.
/// Rules see positions in the whole sequence.
///
/// @param q [B, H, n_q, d_qk]
/// @param k [B, Hkv, n_kv, d_qk]; Hkv divides H. n_q and n_kv are cut at the same positions
/// @param v [B, Hkv, n_kv, d_v]
/// @param out [B, H, n_q, d_v], in memory of its own
/// @param lse [B, H, n_q, 1], float (double for double tensors); leave it out if not needed
/// @param rule masks and biases, composed with `&` (score_rule.hpp)
/// @param options block, and the options of dense_attention
/// @param ctx threads and reused scratch (context.hpp)
///
/// **Numerics** those of dense_attention: same bound, same rules for NaN, infinities, empty rows.
/// **Errors** option_error: block below 1; otherwise those of dense_attention.
/// **Cost** 2 n_q block (d_qk + d_v) flops per head: 0.86 of the speed of dense attention of
/// length block at 128, 0.95 from 256 on (bench/blockwise_attention).
/// **References** Liu et al., "Generating Wikipedia by summarizing long sequences", 2018; blocks of
/// 512 as in Pietruszka, Borchmann, Garncarek, "Sparsifying Transformer Models with Trainable
/// Representation Pooling", ACL 2022.
/// **Example** examples/blockwise_attention.cpp
template <viewable Q, viewable K, viewable V, viewable O, viewable L, score_rule R = no_mask,
          class Arch = simd::default_arch>
void blockwise_attention(const Q& q, const K& k, const V& v, O&& out, L&& lse, const R& rule = {},
                         const blockwise_options& options = {}, context& ctx = default_context()) {
  detail::dense_attention_checked<Arch>("blockwise_attention", view(q), view(k), view(v), view(out),
                                        view(lse), true, block_mask{options.block} & rule,
                                        options.dense(), ctx);
}

/// The same without the log-sum-exp.
template <viewable Q, viewable K, viewable V, viewable O, score_rule R = no_mask,
          class Arch = simd::default_arch>
void blockwise_attention(const Q& q, const K& k, const V& v, O&& out, const R& rule = {},
                         const blockwise_options& options = {}, context& ctx = default_context()) {
  using T = simd::compute_t<element_t<const Q&>>;
  detail::dense_attention_checked<Arch>("blockwise_attention", view(q), view(k), view(v), view(out),
                                        tensor_view<T>(), false, block_mask{options.block} & rule,
                                        options.dense(), ctx);
}

/// The gradients of a loss with respect to the operands of `blockwise_attention`: those of
/// dense_attention_backward under the block-diagonal mask.
///
/// @param q, k, v, rule, options as in the call of blockwise_attention
/// @param out [B, H, n_q, d_v] its output  @param lse [B, H, n_q, 1] its log-sum-exp
/// @param d_out [B, H, n_q, d_v]
/// @param d_q [B, H, n_q, d_qk], @param d_k [B, Hkv, n_kv, d_qk], @param d_v [B, Hkv, n_kv, d_v]
///        overwritten; each in memory of its own
///
/// **Numerics**, **Errors** as in dense_attention_backward; option_error: block below 1.
/// **Cost** n_q block (6 d_qk + 4 d_v) flops per head.
/// **Example** examples/blockwise_attention.cpp
template <viewable Q, viewable K, viewable V, viewable O, viewable L, viewable DO, viewable DQ,
          viewable DK, viewable DV, score_rule R = no_mask, class Arch = simd::default_arch>
void blockwise_attention_backward(const Q& q, const K& k, const V& v, const O& out, const L& lse,
                                  const DO& d_out, DQ&& d_q, DK&& d_k, DV&& d_v, const R& rule = {},
                                  const blockwise_options& options = {},
                                  context& ctx = default_context()) {
  detail::dense_attention_backward_checked<Arch>(
      "blockwise_attention_backward", view(q), view(k), view(v), view(out), view(lse), view(d_out),
      view(d_q), view(d_k), view(d_v), block_mask{options.block} & rule, options.dense(), ctx);
}

}  // namespace attn
