// SPDX-License-Identifier: MIT
#pragma once

#include "reference/score_rules.hpp"
#include "reference/tensor.hpp"

#include <functional>
#include <vector>

namespace reference {

/// Row vectors on the left, matrices [1, 1, in, out]; an empty bias is none.
struct multi_head_weights {
  tensor w_q, w_k, w_v, w_o;
  std::vector<double> b_q, b_k, b_v, b_o;
};

struct multi_head_result {
  tensor y;  // [B, H, n_q, d_out]
  /// What a rounding error of eps in every operation can move y by, up to a constant: the sums of
  /// absolute values along the way.
  tensor bound;
};

/// y = concat_h(attention(x W_q^h, source W_k^h, source W_v^h)) W_o for each of the B·H sequences,
/// which each have a rule of their own.
multi_head_result multi_head_attention(
    const tensor& x, const tensor& source, const multi_head_weights& weights, index_t n_heads,
    index_t n_kv_heads,
    const std::function<score_rule(index_t sequence)>& rule = [](index_t) { return score_rule{}; });

}  // namespace reference
