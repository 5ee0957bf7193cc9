// SPDX-License-Identifier: MIT
//
// Six ways to score the positions of a sequence, and which 4 of 16 each would keep.
#include <attn/dense_attention.hpp>
#include <attn/scorers.hpp>
#include <attn/topk_baselines.hpp>

#include <cmath>
#include <cstdio>
#include <vector>

using attn::index_t;

int main() {
  constexpr index_t n = 16, k = 4, d = 32, d_hidden = 8;
  std::vector<float> x(n * d), scores(n);
  for (index_t i = 0; i < n; ++i)
    for (index_t c = 0; c < d; ++c)
      x[static_cast<std::size_t>(i * d + c)] = std::sin(static_cast<float>((i + 1) * (c + 3)));
  const auto rows = attn::bhld(x.data(), 1, 1, n, d);
  const auto column = attn::bhld(scores.data(), 1, 1, n, 1);
  bool all_in_range = true;
  const auto show = [&](const char* name) {
    std::vector<index_t> kept(k);
    attn::hard_topk(column, attn::bhld(kept.data(), 1, 1, k, 1));
    std::printf("%-10s keeps", name);
    for (const index_t i : kept) {
      std::printf(" %td", i);
      all_in_range = all_in_range && i >= 0 && i < n;
    }
    std::printf("\n");
  };

  // Learned: a weight vector, or a small network. Their backward() gives the gradients.
  const std::vector<float> w(d, 0.1f);
  attn::linear_scorer<float>{w}(rows, column);
  show("linear");
  const std::vector<float> w1(d * d_hidden, 0.05f), b1(d_hidden, 0.1f), w2(d_hidden, -1.0f);
  attn::nonlinear_scorer<float>{attn::bhld(w1.data(), 1, 1, d, d_hidden), b1, w2}(rows, column);
  show("nonlinear");

  // What attention looks at: column sums of its weights, a position's own weight left out.
  std::vector<float> out(x.size()), lse(n);
  const auto log_sum = attn::bhld(lse.data(), 1, 1, n, 1);
  attn::dense_attention(rows, rows, rows, attn::bhld(out.data(), 1, 1, n, d), log_sum);
  attn::power_scorer{attn::attention_diagonal::excluded}(rows, rows, log_sum, column);
  show("power");

  // Without parameters: a channel of the vectors, chance, every fourth position.
  attn::embedding_scorer{.channel = 0}(rows, column);
  show("embedding");
  attn::random_scorer{.seed = 7}(column);
  show("random");
  attn::index_scorer{.stride = n / k}(column);
  show("index");
  return all_in_range ? 0 : 1;
}
