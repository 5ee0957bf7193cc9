// SPDX-License-Identifier: MIT
#pragma once

#include "reference/tensor.hpp"

#include <vector>

namespace reference {

enum class topk_boost { exponential, scaled };
enum class topk_sort { every_round, once, never };
enum class topk_order { by_position, by_rank };

struct soft_topk_options {
  topk_boost boost = topk_boost::exponential;
  double strength = 20;
  topk_sort sort = topk_sort::every_round;
  topk_order order = topk_order::by_position;
  std::vector<index_t> lengths = {};  // one per batch, or none
};

/// The share that the first of two scores gets. Not a number and −inf are "not there": share 0
/// against anything that is. Equal scores (two that are not there too) share alike.
long double topk_share(double v, double other, topk_boost boost, double strength);

struct soft_topk_result {
  tensor pooled;         // [B, H, k, d]
  tensor pooled_scores;  // [B, H, k, 1]
  tensor weights;        // [B, H, k, n]: pooled = weights · x
  tensor champions;      // [B, H, k, 1]: position of the source that won all its matches
};

/// Successive Halving as it is told: every round copies the survivors. x [B, H, n, d], scores
/// [B, H, n, 1]. A round takes m survivors to m' = max(k, ⌈m/2⌉); the best 2m' − m by rank pass, of
/// the others the best meets the worst.
soft_topk_result soft_topk(const tensor& x, const tensor& scores, index_t k,
                           const soft_topk_options& options = {});

struct soft_topk_gradients {
  tensor d_x, d_scores;
};

/// Of Σ d_pooled · pooled + Σ d_pooled_scores · pooled_scores, round by round from the last.
soft_topk_gradients soft_topk_backward(const tensor& x, const tensor& scores, index_t k,
                                       const tensor& d_pooled, const tensor& d_pooled_scores,
                                       const soft_topk_options& options = {});

}  // namespace reference
