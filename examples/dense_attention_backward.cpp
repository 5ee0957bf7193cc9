// SPDX-License-Identifier: MIT
//
// Training through attention: gradients of a loss with respect to q, k and v, a check of them by
// finite differences, and gradient descent.
#include <attn/dense_attention.hpp>

#include <Eigen/Core>

#include <cmath>
#include <cstdio>

using matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// Values that look random and are the same everywhere.
matrix waves(Eigen::Index rows, Eigen::Index cols, double phase) {
  return matrix::NullaryExpr(rows, cols, [=](Eigen::Index i, Eigen::Index c) {
    return std::sin(phase + 1.7 * static_cast<double>(i) + 0.9 * static_cast<double>(c * c));
  });
}

// A score rule that is neither a mask nor a bias says its derivative: s + s²/50.
struct bent {
  template <class S, class I>
  S operator()(S s, I, I, I, I) const {
    return s + s * s / 50;
  }
  template <class S, class I>
  S slope(S s, I, I, I, I) const {
    return 1 + s / 25;
  }
};

struct head {
  matrix q = waves(12, 8, 0), k = waves(12, 8, 1), v = waves(12, 4, 2);  // one head, causal
  const matrix target = waves(12, 4, 3);
  matrix out = matrix(12, 4), lse = matrix(12, 1);
  matrix d_q = matrix(12, 8), d_k = matrix(12, 8), d_v = matrix(12, 4);
  static constexpr auto rule = attn::causal_mask{} & attn::score_rule_fn(bent{});

  // loss = ½ ‖out − target‖²
  double loss() {
    attn::dense_attention(q, k, v, out, lse, rule);
    return (out - target).squaredNorm() / 2;
  }

  // After loss(): d_q, d_k, d_v from d loss / d out = out − target.
  void gradients() {
    const matrix d_out = out - target;
    attn::dense_attention_backward(q, k, v, out, lse, d_out, d_q, d_k, d_v, rule);
  }
};

int main() {
  head h;
  double loss = h.loss();
  h.gradients();

  // 1. d loss / d k(3, 5) by a central difference: they agree to about ε².
  constexpr double eps = 1e-5;
  double& x = h.k(3, 5);
  const double x0 = x;
  x = x0 + eps;
  const double above = h.loss();
  x = x0 - eps;
  const double below = h.loss();
  x = x0;
  const double difference = (above - below) / (2 * eps);
  std::printf("d loss / d k(3, 5): %.9f, by finite difference %.9f\n", h.d_k(3, 5), difference);
  bool good = std::abs(difference - h.d_k(3, 5)) < 1e-8;

  // 2. Gradient descent.
  const double first = loss;
  for (int step = 1; step <= 40; ++step) {
    h.loss();
    h.gradients();
    h.q -= 0.5 * h.d_q;
    h.k -= 0.5 * h.d_k;
    h.v -= 0.5 * h.d_v;
    if (step % 10 == 0) std::printf("step %d: loss %.6f\n", step, h.loss());
  }
  loss = h.loss();
  good = good && loss < first / 10;
  return good ? 0 : 1;
}
