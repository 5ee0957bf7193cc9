// SPDX-License-Identifier: MIT
#pragma once

#include "reference/score_rules.hpp"
#include "reference/tensor.hpp"

#include <optional>
#include <vector>

namespace reference {

struct dense_options {
  std::optional<double> scale = {};  // 1/sqrt(d_qk) if absent
  double softcap = 0;                // 0 is off
  std::vector<double> sinks = {};    // one logit per query head, or none
};

/// Softmax attention, and beside each row what a rounding-error bound of that row needs.
struct dense_result {
  tensor out;      // [B, H, n_q, d_v]
  tensor lse;      // [B, H, n_q, 1]
  tensor weights;  // [B, H, n_q, n_kv]
  /// Over the row's allowed keys: the largest Σ_c |scale q_c k_c| / √d_qk plus what the rules
  /// added to the score. Its product with eps bounds the rounding error of a score.
  tensor score_bound;  // [B, H, n_q, 1]
  tensor value_bound;  // [B, H, n_q, 1]: the largest |v| of an allowed key
};

/// o_i = Σ_j p_ij v_j, p_ij = exp(s_ij − lse_i), s = rule(softcap(scale q kᵀ)).
///
/// q [B, H, n_q, d_qk], k [B, Hkv, n_kv, d_qk], v [B, Hkv, n_kv, d_v]; query head h reads
/// key/value head h / (H / Hkv). A row with no allowed key has out 0; its lse is −inf, or the
/// sink where there is one.
dense_result dense_attention(const tensor& q, const tensor& k, const tensor& v,
                             const score_rule& rule = {}, const dense_options& options = {});

struct dense_gradients {
  tensor d_q, d_k, d_v;
};

/// The gradients of Σ d_out · out, from the weights of a forward pass.
dense_gradients dense_attention_backward(const tensor& q, const tensor& k, const tensor& v,
                                         const tensor& d_out, const score_rule& rule = {},
                                         const dense_options& options = {});

}  // namespace reference
