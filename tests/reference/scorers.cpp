// SPDX-License-Identifier: MIT
#include "reference/scorers.hpp"

#include <cmath>
#include <cstddef>

namespace reference {
namespace {

std::size_t at(index_t i) { return static_cast<std::size_t>(i); }

template <class F>
void for_each_row(const tensor& x, F f) {
  for (index_t b = 0; b < x.extent(0); ++b)
    for (index_t h = 0; h < x.extent(1); ++h)
      for (index_t i = 0; i < x.extent(2); ++i) f(b, h, i);
}

}  // namespace

tensor linear_scores(const tensor& x, const std::vector<double>& w, double b0) {
  tensor scores({x.extent(0), x.extent(1), x.extent(2), 1}, b0);
  for_each_row(x, [&](index_t b, index_t h, index_t i) {
    for (index_t c = 0; c < x.extent(3); ++c) scores(b, h, i, 0) += x(b, h, i, c) * w[at(c)];
  });
  return scores;
}

linear_score_gradients linear_scores_backward(const tensor& x, const std::vector<double>& w,
                                              const tensor& d_scores) {
  linear_score_gradients g{tensor(x.extents()), std::vector<double>(w.size())};
  for_each_row(x, [&](index_t b, index_t h, index_t i) {
    const double d = d_scores(b, h, i, 0);
    g.d_b += d;
    for (index_t c = 0; c < x.extent(3); ++c) {
      g.d_x(b, h, i, c) = d * w[at(c)];
      g.d_w[at(c)] += d * x(b, h, i, c);
    }
  });
  return g;
}

tensor nonlinear_scores(const tensor& x, const tensor& w1, const std::vector<double>& b1,
                        const std::vector<double>& w2, double b2) {
  tensor scores({x.extent(0), x.extent(1), x.extent(2), 1}, b2);
  for_each_row(x, [&](index_t b, index_t h, index_t i) {
    for (index_t e = 0; e < w1.extent(3); ++e) {
      double s = b1[at(e)];
      for (index_t c = 0; c < x.extent(3); ++c) s += x(b, h, i, c) * w1(0, 0, c, e);
      scores(b, h, i, 0) += std::tanh(s) * w2[at(e)];
    }
  });
  return scores;
}

nonlinear_score_gradients nonlinear_scores_backward(const tensor& x, const tensor& w1,
                                                    const std::vector<double>& b1,
                                                    const std::vector<double>& w2,
                                                    const tensor& d_scores) {
  nonlinear_score_gradients g{tensor(x.extents()), tensor(w1.extents()),
                              std::vector<double>(b1.size()), std::vector<double>(w2.size())};
  for_each_row(x, [&](index_t b, index_t h, index_t i) {
    const double d = d_scores(b, h, i, 0);
    g.d_b2 += d;
    for (index_t e = 0; e < w1.extent(3); ++e) {
      double s = b1[at(e)];
      for (index_t c = 0; c < x.extent(3); ++c) s += x(b, h, i, c) * w1(0, 0, c, e);
      const double t = std::tanh(s), u = d * w2[at(e)] * (1 - t * t);
      g.d_w2[at(e)] += d * t;
      g.d_b1[at(e)] += u;
      for (index_t c = 0; c < x.extent(3); ++c) {
        g.d_w1(0, 0, c, e) += u * x(b, h, i, c);
        g.d_x(b, h, i, c) += u * w1(0, 0, c, e);
      }
    }
  });
  return g;
}

tensor power_scores(const tensor& weights, index_t groups, bool without_diagonal) {
  const index_t per_group = weights.extent(1) / groups;
  tensor scores({weights.extent(0), groups, weights.extent(3), 1});
  for_each_row(weights, [&](index_t b, index_t h, index_t i) {
    for (index_t j = 0; j < weights.extent(3); ++j) {
      if (without_diagonal && i == j) continue;
      scores(b, h / per_group, j, 0) += weights(b, h, i, j) / static_cast<double>(per_group);
    }
  });
  return scores;
}

}  // namespace reference
