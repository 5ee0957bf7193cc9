// SPDX-License-Identifier: MIT
#pragma once

#include "reference/dense_attention.hpp"
#include "reference/tensor.hpp"

#include <vector>

namespace reference {

/// x w + b, [B, H, n, 1].
tensor linear_scores(const tensor& x, const std::vector<double>& w, double b);

struct linear_score_gradients {
  tensor d_x;
  std::vector<double> d_w;
  double d_b = 0;
};
linear_score_gradients linear_scores_backward(const tensor& x, const std::vector<double>& w,
                                              const tensor& d_scores);

/// tanh(x w1 + b1) w2 + b2, with w1 [1, 1, d, d_hidden].
tensor nonlinear_scores(const tensor& x, const tensor& w1, const std::vector<double>& b1,
                        const std::vector<double>& w2, double b2);

struct nonlinear_score_gradients {
  tensor d_x, d_w1;
  std::vector<double> d_b1, d_w2;
  double d_b2 = 0;
};
nonlinear_score_gradients nonlinear_scores_backward(const tensor& x, const tensor& w1,
                                                    const std::vector<double>& b1,
                                                    const std::vector<double>& w2,
                                                    const tensor& d_scores);

/// [B, groups, n_kv, 1]: per key the sum over queries of attention weights [B, H, n_q, n_kv], the
/// mean of the heads of each group.
tensor power_scores(const tensor& weights, index_t groups, bool without_diagonal);

}  // namespace reference
