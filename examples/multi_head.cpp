// SPDX-License-Identifier: MIT
//
// A layer of multi-head attention, 8 heads of 64 in a width of 512: the four projections are the
// layer's, the kernel between them is yours. Checked against the textbook formula in plain Eigen.
#include <attn/dense_attention.hpp>
#include <attn/multi_head.hpp>

#include <Eigen/Core>

#include <cmath>
#include <cstdint>
#include <cstdio>

using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

namespace {

// Stand-in for trained weights: uniform in ±size, the same on every machine.
matrix noise(Eigen::Index rows, Eigen::Index cols, float size) {
  static std::uint32_t state = 1;
  return matrix::NullaryExpr(rows, cols, [&](Eigen::Index, Eigen::Index) {
    state = state * 1664525u + 1013904223u;
    return size * (static_cast<float>(state >> 8) / 8388608.0f - 1.0f);
  });
}

matrix softmax_rows(matrix s) {
  for (auto row : s.rowwise()) {
    row = (row.array() - row.maxCoeff()).exp().matrix();
    row /= row.sum();
  }
  return s;
}

}  // namespace

int main() {
  constexpr int n = 100, width = 512, heads = 8, d = width / heads;
  const matrix x = noise(n, width, 1);
  const matrix w_q = noise(width, width, 0.1f), w_k = noise(width, width, 0.1f),
               w_v = noise(width, width, 0.1f), w_o = noise(width, width, 0.1f);
  const Eigen::VectorXf b_o = noise(width, 1, 1).col(0);

  // 1. The layer looks at the weights where they are; biases that are not named are none.
  attn::multi_head_attention<float> layer(
      {.w_q = attn::view(w_q),
       .w_k = attn::view(w_k),
       .w_v = attn::view(w_v),
       .w_o = attn::view(w_o),
       .b_o = {b_o.data(), static_cast<std::size_t>(b_o.size())}},
      {.n_heads = heads});

  // 2. Self-attention. The kernel sees all heads at once: q is [1, 8, n, 64], a view.
  matrix y(n, width);
  layer.self_attention(x, y, [](auto q, auto k, auto v, auto out) {
    attn::dense_attention(q, k, v, out);  // the line to change for another kernel
  });

  // 3. The same, head by head.
  matrix all(n, width);
  for (int h = 0; h < heads; ++h) {
    const auto columns = [&](const matrix& w) { return x * w.middleCols(h * d, d); };
    const matrix q = columns(w_q), k = columns(w_k), v = columns(w_v);
    all.middleCols(h * d, d) = softmax_rows(q * k.transpose() / std::sqrt(float{d})) * v;
  }
  const matrix expected = (all * w_o).rowwise() + b_o.transpose();
  const float error = (y - expected).cwiseAbs().maxCoeff();
  std::printf("y(0, 0) = %.6f, largest difference from plain Eigen %.1e\n", y(0, 0), error);

  // 4. Keys and values from another sequence, and no query looks past the key of its own place.
  const matrix source = noise(40, width, 1);
  matrix z(n, width);
  layer.cross_attention(x, source, z, [](auto q, auto k, auto v, auto out) {
    attn::dense_attention(q, k, v, out, attn::causal_mask{});
  });
  // The first query sees the first key alone: its attention is that key's value.
  const matrix first = source.row(0) * w_v * w_o + b_o.transpose();
  const float first_error = (z.row(0) - first).cwiseAbs().maxCoeff();
  std::printf("z(0, 0) = %.6f, first row off by %.1e\n", z(0, 0), first_error);
  return error < 1e-4f && first_error < 1e-4f ? 0 : 1;
}
