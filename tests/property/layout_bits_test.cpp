// SPDX-License-Identifier: MIT
//
// Bits depend on the numbers and not on how they lie in memory: pooling, blockwise and SMYRF.
#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/tensor_buffer.hpp"

#include <attn/blockwise_attention.hpp>
#include <attn/pooled_attention.hpp>
#include <attn/scorers.hpp>
#include <attn/smyrf_attention.hpp>
#include <attn/topk_baselines.hpp>

#include <array>
#include <span>
#include <vector>

using namespace attn_test;

namespace {

using shape = std::array<index_t, 4>;
using buffer = tensor_buffer<float>;

constexpr index_t n_batch = 2, n_heads = 4, n_heads_kv = 2, n = 37, n_slots = 5;

buffer input(const shape& extents, layout l, std::uint64_t seed) {
  buffer x(extents, l, quiet_nan<float>());
  x.assign(normal_tensor(extents, seed));
  return x;
}
buffer output(const shape& extents, layout l) { return {extents, l, quiet_nan<float>()}; }

/// All elements of some results, one after the other.
template <class... Buffers>
std::vector<double> numbers(const Buffers&... results) {
  std::vector<double> all;
  const auto append = [&](const auto& x) {
    const auto values = x.values();
    all.insert(all.end(), values.elements().begin(), values.elements().end());
  };
  (append(results), ...);
  return all;
}

std::vector<double> pooling(layout l, index_t d) {
  const buffer x = input({n_batch, n_heads, n, d}, l, 1), s = input({n_batch, n_heads, n, 1}, l, 2);
  const buffer d_pooled = input({n_batch, n_heads, n_slots, d}, l, 3);
  const buffer d_pooled_scores = input({n_batch, n_heads, n_slots, 1}, l, 4);
  buffer pooled = output(d_pooled.view().extents(), l), d_x = output(x.view().extents(), l);
  buffer pooled_scores = output(d_pooled_scores.view().extents(), l);
  buffer d_s = output(s.view().extents(), l);
  attn::soft_topk(x.view(), s.view(), pooled.view(), pooled_scores.view());
  attn::soft_topk_backward(attn::tournament(s.view(), n_slots), x.view(), d_pooled.view(),
                           d_pooled_scores.view(), d_x.view(), d_s.view());
  std::vector<double> all = numbers(pooled, pooled_scores, d_x, d_s);
  attn::iterative_topk(x.view(), s.view(), pooled.view(), pooled_scores.view());
  for (const double number : numbers(pooled, pooled_scores)) all.push_back(number);
  return all;
}

std::vector<double> scoring(layout l, index_t d) {
  const buffer x = input({n_batch, n_heads, n, d}, l, 1), g = input({n_batch, n_heads, n, 1}, l, 2);
  const std::vector<float> w(static_cast<std::size_t>(d), 0.3f);
  std::vector<float> d_w(w.size());
  float d_b = 0;
  buffer s = output(g.view().extents(), l), d_x = output(x.view().extents(), l);
  const attn::linear_scorer<float> scorer{w};
  scorer(x.view(), s.view());
  scorer.backward(x.view(), g.view(), d_x.view(), std::span<float>(d_w), d_b);
  std::vector<double> all = numbers(s, d_x);
  all.insert(all.end(), d_w.begin(), d_w.end());
  all.push_back(static_cast<double>(d_b));
  return all;
}

/// Operands and results of attention and its gradients.
struct attention {
  buffer q, k, v, scores, d_out, out, lse, d_q, d_k, d_v, d_scores;

  attention(layout l, index_t d)
      : q(input({n_batch, n_heads, n, d}, l, 1)), k(input({n_batch, n_heads_kv, n, d}, l, 2)),
        v(input({n_batch, n_heads_kv, n, d}, l, 3)),
        scores(input({n_batch, n_heads_kv, n, 1}, l, 4)),
        d_out(input({n_batch, n_heads, n, d}, l, 5)), out(output({n_batch, n_heads, n, d}, l)),
        lse(output({n_batch, n_heads, n, 1}, l)), d_q(output({n_batch, n_heads, n, d}, l)),
        d_k(output({n_batch, n_heads_kv, n, d}, l)), d_v(output({n_batch, n_heads_kv, n, d}, l)),
        d_scores(output({n_batch, n_heads_kv, n, 1}, l)) {}

  [[nodiscard]] std::vector<double> results() const { return numbers(out, lse, d_q, d_k, d_v); }
};

std::vector<double> pooled(layout l, index_t d) {
  attention a(l, d);
  const attn::pooled_options options{.k = n_slots};
  attn::pooled_attention(a.q.view(), a.k.view(), a.v.view(), a.scores.view(), a.out.view(),
                         a.lse.view(), options);
  attn::pooled_attention_backward(a.q.view(), a.k.view(), a.v.view(), a.scores.view(), a.out.view(),
                                  a.lse.view(), a.d_out.view(), a.d_q.view(), a.d_k.view(),
                                  a.d_v.view(), a.d_scores.view(), options);
  std::vector<double> all = a.results();
  for (const double number : numbers(a.d_scores)) all.push_back(number);
  return all;
}

std::vector<double> blockwise(layout l, index_t d) {
  attention a(l, d);
  const attn::blockwise_options options{.block = 16};
  attn::blockwise_attention(a.q.view(), a.k.view(), a.v.view(), a.out.view(), a.lse.view(),
                            attn::causal_mask{}, options);
  attn::blockwise_attention_backward(a.q.view(), a.k.view(), a.v.view(), a.out.view(), a.lse.view(),
                                     a.d_out.view(), a.d_q.view(), a.d_k.view(), a.d_v.view(),
                                     attn::causal_mask{}, options);
  return a.results();
}

std::vector<double> smyrf(layout l, index_t d) {
  attention a(l, d);
  const attn::smyrf_clusters c(
      a.q.view(), a.k.view(),
      {.clusters = 3, .rounds = 2, .duplicates = attn::smyrf_duplicates::removed});
  attn::smyrf_attention(a.q.view(), a.k.view(), a.v.view(), a.out.view(), a.lse.view(), c);
  attn::smyrf_attention_backward(a.q.view(), a.k.view(), a.v.view(), a.out.view(), a.lse.view(),
                                 a.d_out.view(), c, a.d_q.view(), a.d_k.view(), a.d_v.view());
  return a.results();
}

}  // namespace

TEST_CASE("The same bits in every layout") {
  const auto l = GENERATE(layout::padded_by_one, layout::heads_interleaved, layout::column_major,
                          layout::strided_dim);
  const index_t d = GENERATE(1, 3, 16, 33);
  CAPTURE(l, d);
  CHECK(pooling(l, d) == pooling(layout::contiguous, d));
  CHECK(scoring(l, d) == scoring(layout::contiguous, d));
  CHECK(pooled(l, d) == pooled(layout::contiguous, d));
  CHECK(blockwise(l, d) == blockwise(layout::contiguous, d));
  CHECK(smyrf(l, d) == smyrf(layout::contiguous, d));
}
