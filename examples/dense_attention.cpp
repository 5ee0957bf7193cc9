// SPDX-License-Identifier: MIT
//
// Dense attention as a model calls it: a batch, more query heads than key heads, a cache of keys
// longer than the queries, and the lse that the backward pass and merging need.
#include <attn/dense_attention.hpp>

#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

using attn::index_t;

namespace {

// Noise, uniform in ±1 and the same on every machine.
std::vector<float> noise(index_t n) {
  static std::uint32_t state = 1;
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& e : x) {
    state = state * 1664525u + 1013904223u;
    e = static_cast<float>(state >> 8) / 8388608.0f - 1.0f;
  }
  return x;
}

}  // namespace

int main() {
  // 1. Shapes: 8 query heads share 2 key/value heads, 30 new queries meet a cache of 100 keys, and
  //    values are wider than keys.
  constexpr index_t n_batch = 2, n_heads = 8, n_kv_heads = 2, n_q = 30, n_kv = 100, d_qk = 64,
                    d_v = 80;
  const std::vector<float> memory_q = noise(n_batch * n_heads * n_q * d_qk);
  const std::vector<float> memory_k = noise(n_batch * n_kv_heads * n_kv * d_qk);
  const std::vector<float> memory_v = noise(n_batch * n_kv_heads * n_kv * d_v);
  const auto q = attn::bhld(memory_q.data(), n_batch, n_heads, n_q, d_qk);
  const auto k = attn::bhld(memory_k.data(), n_batch, n_kv_heads, n_kv, d_qk);
  const auto v = attn::bhld(memory_v.data(), n_batch, n_kv_heads, n_kv, d_v);
  std::vector<float> memory_out(static_cast<std::size_t>(n_batch * n_heads * n_q * d_v));
  std::vector<float> memory_lse(static_cast<std::size_t>(n_batch * n_heads * n_q));
  const auto out = attn::bhld(memory_out.data(), n_batch, n_heads, n_q, d_v);
  const auto lse = attn::bhld(memory_lse.data(), n_batch, n_heads, n_q, 1);

  // 2. One call. The last query sees the last key; scores are capped at ±30 before the softmax.
  attn::dense_attention(q, k, v, out, lse, attn::causal_mask::bottom_right(n_q, n_kv),
                        {.softcap = 30});

  // 3. The same for every head by the formula, with the matrix of weights that the kernel avoids.
  using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  float error = 0, lse_error = 0;
  for (index_t b = 0; b < n_batch; ++b) {
    for (index_t h = 0; h < n_heads; ++h) {
      const index_t g = h / (n_heads / n_kv_heads);
      const Eigen::Map<const matrix> Q(&q(b, h, 0, 0), n_q, d_qk), K(&k(b, g, 0, 0), n_kv, d_qk),
          V(&v(b, g, 0, 0), n_kv, d_v);
      const matrix s = 30 * (Q * K.transpose() / (30 * std::sqrt(float{d_qk}))).array().tanh();
      for (index_t i = 0; i < n_q; ++i) {
        const index_t n_allowed = i + n_kv - n_q + 1;
        const Eigen::RowVectorXf p = s.row(i).head(n_allowed).array().exp();
        const Eigen::RowVectorXf expected = p * V.topRows(n_allowed) / p.sum();
        for (index_t c = 0; c < d_v; ++c) {
          error = std::max(error, std::abs(out(b, h, i, c) - expected(c)));
        }
        lse_error = std::max(lse_error, std::abs(lse(b, h, i, 0) - std::log(p.sum())));
      }
    }
  }
  std::printf("out(1, 7, 29, 0) = %.6f, largest error %.1e\n", out(1, 7, 29, 0), error);
  std::printf("lse(1, 7, 29)    = %.6f, largest error %.1e\n", lse(1, 7, 29, 0), lse_error);

  // 4. A call that makes no sense says so before it writes anything.
  try {
    attn::dense_attention(q, k, v, lse);
    return 1;
  } catch (const attn::shape_error& e) {
    std::printf("%s\n", e.what());
  }

  // 5. Matrices of Eigen are one head, and what comes back is a matrix.
  const Eigen::Map<const matrix> Q(&q(0, 0, 0, 0), n_q, d_qk), K(&k(0, 0, 0, 0), n_kv, d_qk),
      V(&v(0, 0, 0, 0), n_kv, d_v);
  const matrix one_head = attn::dense_attention(Q, K, V);
  std::printf("one head: %td x %td\n", one_head.rows(), one_head.cols());
  return error < 1e-5f && lse_error < 1e-5f ? 0 : 1;
}
