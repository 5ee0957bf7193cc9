// SPDX-License-Identifier: MIT
//
// A layer of multi-head attention whose dense kernel is swapped for SMYRF: the weights and the
// projections stay, one line changes.
#include <attn/dense_attention.hpp>
#include <attn/multi_head.hpp>
#include <attn/smyrf_attention.hpp>

#include <Eigen/Core>

#include <cstdint>
#include <cstdio>

using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

namespace {

// Uniform in ±size, the same on every machine.
matrix noise(Eigen::Index rows, Eigen::Index cols, float size) {
  static std::uint32_t state = 1;
  return matrix::NullaryExpr(rows, cols, [&](Eigen::Index, Eigen::Index) {
    state = state * 1664525u + 1013904223u;
    return size * (static_cast<float>(state >> 8) / 8388608.0f - 1.0f);
  });
}

}  // namespace

int main() {
  // 1. Tokens of 40 topics, and heads that look for tokens of their own topic: trained attention is
  //    as peaked as that.
  constexpr int n = 1024, width = 256, heads = 4, topics = 40;
  const matrix topic = noise(topics, width, 1);
  matrix x = noise(n, width, 0.3f);
  for (int i = 0; i < n; ++i) x.row(i) += topic.row(i * 7 % topics);
  const matrix w_q = noise(width, width, 0.2f), w_k = w_q;
  const matrix w_v = noise(width, width, 0.1f), w_o = noise(width, width, 0.1f);
  attn::multi_head_attention<float> layer({.w_q = attn::view(w_q),
                                           .w_k = attn::view(w_k),
                                           .w_v = attn::view(w_v),
                                           .w_o = attn::view(w_o)},
                                          {.n_heads = heads});

  // 2. The layer as it was, and with the other kernel: every query meets 2 · 1024/32 keys.
  matrix dense(n, width), clustered(n, width);
  layer.self_attention(
      x, dense, [](auto q, auto k, auto v, auto out) { attn::dense_attention(q, k, v, out); });
  const attn::smyrf_options options{.clusters = 32,
                                    .rounds = 2,
                                    .clustering = attn::smyrf_clustering::bisection,
                                    .far_field = attn::smyrf_far_field::means};  // no mask here
  layer.self_attention(x, clustered, [&](auto q, auto k, auto v, auto out) {
    attn::smyrf_attention(q, k, v, out, options);  // the line that changed
  });
  const double error = static_cast<double>((clustered - dense).norm() / dense.norm());
  std::printf("%.1f%% of the scores, error of the layer's output %.4f\n", 100.0 * 2 / 32, error);
  return error < 0.15 ? 0 : 1;
}
