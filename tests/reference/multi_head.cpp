// SPDX-License-Identifier: MIT
#include "reference/multi_head.hpp"

#include "reference/dense_attention.hpp"

#include <cmath>
#include <cstddef>

namespace reference {
namespace {

// Sequence s of x, [1, 1, n, width].
tensor sequence(const tensor& x, index_t s) {
  tensor r({1, 1, x.extent(2), x.extent(3)});
  for (index_t i = 0; i < x.extent(2); ++i)
    for (index_t c = 0; c < x.extent(3); ++c)
      r(0, 0, i, c) = x(s / x.extent(1), s % x.extent(1), i, c);
  return r;
}

tensor absolute(tensor x) {
  for (double& e : x.elements()) e = std::abs(e);
  return x;
}

std::vector<double> absolute(std::vector<double> x) {
  for (double& e : x) e = std::abs(e);
  return x;
}

// x W + b, column h·d + c seen as head h, component c: [1, n_heads, n, d].
tensor project(const tensor& x, const tensor& w, const std::vector<double>& b, index_t n_heads) {
  const index_t d = w.extent(3) / n_heads;
  tensor r({1, n_heads, x.extent(2), d});
  for (index_t i = 0; i < x.extent(2); ++i) {
    for (index_t column = 0; column < w.extent(3); ++column) {
      double sum = b.empty() ? 0 : b[static_cast<std::size_t>(column)];
      for (index_t c = 0; c < w.extent(2); ++c) sum += x(0, 0, i, c) * w(0, 0, c, column);
      r(0, column / d, i, column % d) = sum;
    }
  }
  return r;
}

// Heads side by side: [1, H, n, d] as [1, 1, n, H d].
tensor concatenate(const tensor& x) {
  const index_t d = x.extent(3);
  tensor r({1, 1, x.extent(2), x.extent(1) * d});
  for (index_t h = 0; h < x.extent(1); ++h)
    for (index_t i = 0; i < x.extent(2); ++i)
      for (index_t c = 0; c < d; ++c) r(0, 0, i, h * d + c) = x(0, h, i, c);
  return r;
}

}  // namespace

multi_head_result multi_head_attention(const tensor& x, const tensor& source,
                                       const multi_head_weights& w, index_t n_heads,
                                       index_t n_kv_heads,
                                       const std::function<score_rule(index_t)>& rule) {
  const std::array<index_t, 4> extents{x.extent(0), x.extent(1), x.extent(2), w.w_o.extent(3)};
  multi_head_result r{tensor(extents), tensor(extents)};
  for (index_t s = 0; s < x.extent(0) * x.extent(1); ++s) {
    // 1. The sequence through the layer.
    const tensor xs = sequence(x, s), ss = sequence(source, s);
    const tensor q = project(xs, w.w_q, w.b_q, n_heads);
    const tensor k = project(ss, w.w_k, w.b_k, n_kv_heads);
    const tensor v = project(ss, w.w_v, w.b_v, n_kv_heads);
    const tensor out = concatenate(dense_attention(q, k, v, rule(s)).out);
    const tensor y = project(out, w.w_o, w.b_o, 1);

    // 2. The same with absolute values: (1 + largest Σ|q||k| scale/√d) max|v| bounds a row of out.
    const dense_result a = dense_attention(
        project(absolute(xs), absolute(w.w_q), absolute(w.b_q), n_heads),
        project(absolute(ss), absolute(w.w_k), absolute(w.b_k), n_kv_heads),
        project(absolute(ss), absolute(w.w_v), absolute(w.b_v), n_kv_heads), rule(s));
    tensor out_bound(a.out.extents());
    for (index_t h = 0; h < n_heads; ++h)
      for (index_t i = 0; i < out_bound.extent(2); ++i)
        for (index_t c = 0; c < out_bound.extent(3); ++c)
          out_bound(0, h, i, c) = (1 + a.score_bound(0, h, i, 0)) * a.value_bound(0, h, i, 0);
    const tensor y_bound = project(concatenate(out_bound), absolute(w.w_o), absolute(w.b_o), 1);

    for (index_t i = 0; i < y.extent(2); ++i) {
      for (index_t c = 0; c < y.extent(3); ++c) {
        r.y(s / x.extent(1), s % x.extent(1), i, c) = y(0, 0, i, c);
        r.bound(s / x.extent(1), s % x.extent(1), i, c) = y_bound(0, 0, i, c);
      }
    }
  }
  return r;
}

}  // namespace reference
