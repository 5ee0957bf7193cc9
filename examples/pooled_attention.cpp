// SPDX-License-Identifier: MIT
//
// A decoder that attends to a long document: 64 queries over 8192 keys, once to all of them and
// once to 512 that a tournament over scores has pooled.
#include <attn/pooled_attention.hpp>
#include <attn/scorers.hpp>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <vector>

using attn::index_t;

int main() {
  constexpr index_t n_heads = 4, n_q = 64, n_kv = 8192, d = 64, kept = 512;
  std::vector<float> q(n_heads * n_q * d), k(n_heads * n_kv * d), v(k.size());
  for (std::size_t i = 0; i < q.size(); ++i) q[i] = std::sin(0.37f * static_cast<float>(i % 4999));
  for (std::size_t i = 0; i < k.size(); ++i) {
    k[i] = std::sin(0.11f * static_cast<float>(i % 7919));
    v[i] = std::cos(0.23f * static_cast<float>(i % 6007));
  }
  const auto Q = attn::bhld(q.data(), 1, n_heads, n_q, d);
  const auto K = attn::bhld(k.data(), 1, n_heads, n_kv, d);
  const auto V = attn::bhld(v.data(), 1, n_heads, n_kv, d);
  std::vector<float> full(q.size()), pooled(q.size()), lse(n_heads * n_q);
  const auto Full = attn::bhld(full.data(), 1, n_heads, n_q, d);
  const auto Pooled = attn::bhld(pooled.data(), 1, n_heads, n_q, d);
  const auto L = attn::bhld(lse.data(), 1, n_heads, n_q, 1);

  const auto milliseconds = [](const auto& call) {
    const auto start = std::chrono::steady_clock::now();
    call();
    return 1e3 * std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };

  // 1. What each key is worth, [1, n_heads, n_kv, 1]: here a weight vector applied to the key. A
  //    sigmoid behind it, since the default boost wants scores in a bounded range.
  const std::vector<float> w(d, 0.2f);
  std::vector<float> scores(n_heads * n_kv);
  const auto S = attn::bhld(scores.data(), 1, n_heads, n_kv, 1);
  const attn::linear_scorer<float> scorer{w, 0.0f};
  scorer(K, S);
  attn::squash_scores(S, S);

  // 2. Attention to all keys, and to the 512 survivors.
  const double t_full = milliseconds([&] { attn::dense_attention(Q, K, V, Full); });
  const attn::pooled_options options{.k = kept};
  const double t_pooled =
      milliseconds([&] { attn::pooled_attention(Q, K, V, S, Pooled, L, options); });
  std::printf(
      "%td keys: %.2f ms; pooled to %td: %.2f ms, and 16 times less for every further layer "
      "that uses them\n",
      n_kv, t_full, kept, t_pooled);

  // 3. Training: the gradients of queries, keys, values and scores, and on to the scorer's own. A
  //    model adds d_k_scored to d_k.
  const std::vector<float> d_out(q.size(), 1.0f);
  std::vector<float> d_q(q.size()), d_k(k.size()), d_v(v.size()), d_scores(scores.size());
  attn::pooled_attention_backward(
      Q, K, V, S, Pooled, L, attn::bhld(d_out.data(), 1, n_heads, n_q, d),
      attn::bhld(d_q.data(), 1, n_heads, n_q, d), attn::bhld(d_k.data(), 1, n_heads, n_kv, d),
      attn::bhld(d_v.data(), 1, n_heads, n_kv, d), attn::bhld(d_scores.data(), 1, n_heads, n_kv, 1),
      options);
  const auto D = attn::bhld(d_scores.data(), 1, n_heads, n_kv, 1);
  attn::squash_scores_backward(S, D, D);
  std::vector<float> d_k_scored(k.size()), d_w(d);
  float d_b = 0;
  scorer.backward(K, D, attn::bhld(d_k_scored.data(), 1, n_heads, n_kv, d), d_w, d_b);
  index_t learning = 0;
  for (const float g : d_scores) learning += g != 0;
  std::printf("%td of %td scores have a gradient\n", learning, n_heads * n_kv);
  return learning > kept ? 0 : 1;
}
