// SPDX-License-Identifier: MIT
#pragma once

#include "reference/tensor.hpp"

#include <vector>

namespace reference {

struct topk_result {
  tensor pooled;         // [B, H, k, d]
  tensor pooled_scores;  // [B, H, k, 1]
};

/// Positions of the k largest scores, best first: a stable sort, NaN last. [B, H, k, 1]
tensor hard_topk_ranks(const tensor& scores, index_t k, const std::vector<index_t>& lengths = {});

/// Their rows, in the order of position.
topk_result hard_topk(const tensor& x, const tensor& scores, index_t k,
                      const std::vector<index_t>& lengths = {});

/// k times: weights softmax(−alpha (s − m)²) around the largest score m that is left; then its
/// first owner leaves. Scores that are −inf or not a number count once no other is left.
topk_result iterative_topk(const tensor& x, const tensor& scores, index_t k, double alpha,
                           const std::vector<index_t>& lengths = {});

/// Mean over batch, heads and i of max_j cos(truth_i, approximation_j).
double chamfer_cosine_similarity(const tensor& truth, const tensor& approximation);

}  // namespace reference
