// SPDX-License-Identifier: MIT
#include "reference/scorers.hpp"
#include "support/allocation_counter.hpp"
#include "support/catch.hpp"
#include "support/compare.hpp"
#include "support/dense_call.hpp"
#include "support/rule_operands.hpp"

#include <attn/blockwise_attention.hpp>
#include <attn/scorers.hpp>

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

using namespace attn_test;
using reference::tensor;

#define ELEMENT_TYPES float, double, Eigen::half, Eigen::bfloat16

namespace {

constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();

template <class T>
std::vector<T> rounded(const tensor& t) {
  std::vector<T> x;
  for (const double e : t.elements()) x.push_back(static_cast<T>(e));
  return x;
}

/// power_scorer after dense attention under a rule, against column sums of the oracle's weights.
template <class T, class Rule = attn::no_mask>
void check_power(const dense_problem& p, const Rule& rule = {},
                 const reference::score_rule& meaning = {},
                 const attn::dense_options& options = {}) {
  dense_operands<T> x(p);
  attend(x, rule, options);
  const reference::dense_result expected = x.expected(meaning, meaning_of(options));
  for (const index_t groups : {p.n_heads, index_t{1}}) {
    for (const auto diagonal :
         {attn::attention_diagonal::included, attn::attention_diagonal::excluded}) {
      tensor_buffer<arithmetic_t<T>> scores({p.n_batch, groups, p.n_kv, 1}, p.outputs,
                                            from_double<arithmetic_t<T>>(nan_value));
      const attn::power_scorer scorer{diagonal, options};
      scorer(std::as_const(x.q).view(), std::as_const(x.k).view(), std::as_const(x.lse).view(),
             scores.view(), rule);
      double bound = 1;
      for (const double s : expected.score_bound.elements()) bound = std::max(bound, 1 + s);
      for (const double s : expected.lse.elements()) {
        if (std::isfinite(s)) bound = std::max(bound, 1 + std::abs(s));
      }
      const tensor sums = reference::power_scores(expected.weights, groups,
                                                  diagonal == attn::attention_diagonal::excluded);
      double largest = 1;
      for (const double s : sums.elements()) largest = std::max(largest, s);
      INFO(p);
      CHECK(compare_within(scores.values(), sums, 16 * arithmetic_epsilon<T> * bound * largest));
      CHECK(scores.canaries_alive());
    }
  }
}

}  // namespace

TEMPLATE_TEST_CASE("power_scorer: column sums of the weights", "", ELEMENT_TYPES) {
  for (const index_t n_q : {1, 2, 17, 48, 49, 150}) {
    for (const index_t n_kv : {1, 7, 130, 600}) {
      check_power<TestType>(
          {.n_batch = 2, .n_heads = 4, .n_kv_heads = 2, .n_q = n_q, .n_kv = n_kv, .d_qk = 9});
    }
  }
  for (const layout l : plain_layouts) {
    check_power<TestType>({.n_batch = 2,
                           .n_heads = 2,
                           .n_kv_heads = 2,
                           .n_q = 53,
                           .n_kv = 53,
                           .d_qk = 12,
                           .inputs = l,
                           .outputs = l});
  }
}

TEST_CASE("power_scorer under every rule and option") {
  const dense_problem p{
      .n_batch = 2, .n_heads = 2, .n_kv_heads = 1, .n_q = 150, .n_kv = 150, .d_qk = 6};
  check_power<float>(p, attn::causal_mask{}, reference::causal_mask());
  check_power<float>(p, attn::window_mask{.left = 9, .right = 3}, reference::window_mask(9, 3));
  const std::vector<index_t> lengths{70, 0};
  check_power<float>(p, attn::key_lengths{lengths}, reference::key_lengths(lengths));
  const rule_operand<bool> mask(coin_tensor(p.score_extents(), 5));
  check_power<float>(p, attn::boolean_mask{mask.view()}, reference::boolean_mask(mask.values));
  const rule_operand<float> bias(normal_tensor(p.score_extents(), 6));
  check_power<float>(p, attn::causal_mask{3} & attn::additive_bias{bias.view()},
                     reference::causal_mask(3) & reference::additive_bias(bias.values));
  const auto f = [](double s, index_t, index_t h, index_t i, index_t j) {
    return (i + j + h) % 5 == 0 ? reference::forbidden : s + static_cast<double>(j % 3);
  };
  check_power<float>(p, attn::score_rule_fn(f), reference::score_rule_fn(f));
  check_power<float>(p, attn::block_mask{64} & attn::causal_mask{},
                     reference::score_rule_fn([](double s, index_t, index_t, index_t i, index_t j) {
                       return i / 64 == j / 64 ? s : reference::forbidden;
                     }) & reference::causal_mask());
  const std::vector<float> sinks{0.5f, -1.0f};
  check_power<double>(p, attn::no_mask{}, {}, {.scale = 0.8, .softcap = 2, .sinks = sinks});
}

TEST_CASE("power_scorer skips what is forbidden, whatever it holds") {
  const dense_problem p{.n_q = 60, .n_kv = 60, .d_qk = 8};
  dense_operands<float> x(p);
  const std::vector<index_t> lengths{40};
  tensor k = x.k.values();
  for (index_t j = 40; j < 60; ++j)
    for (index_t c = 0; c < 8; ++c) k(0, 0, j, c) = nan_value;
  k(0, 0, 7, 0) = -HUGE_VAL;  // its scores are ±inf or NaN: it is a column of its own
  x.k.assign(k);
  tensor q = x.q.values();
  for (index_t i = 0; i < 60; ++i) q(0, 0, i, 0) = 1;  // −inf for every query: weight 0
  x.q.assign(q);
  attend(x, attn::key_lengths{lengths});
  std::vector<float> scores(60);
  attn::power_scorer{}(std::as_const(x.q).view(), std::as_const(x.k).view(),
                       std::as_const(x.lse).view(), attn::bhld(scores.data(), 1, 1, 60, 1),
                       attn::key_lengths{lengths});
  double sum = 0;
  for (const float s : scores) {
    CHECK(std::isfinite(s));
    sum += static_cast<double>(s);
  }
  CHECK(std::abs(sum - 60) < 1e-3);  // every row of weights sums to 1
  CHECK(scores[7] == 0);
  CHECK(scores[45] == 0);
}

TEST_CASE("embedding, random and index scorers") {
  const tensor x = normal_tensor({2, 3, 5, 4}, 1);
  tensor_buffer<float> buffer(x.extents(), layout::heads_interleaved, 0.0f);
  buffer.assign(x);
  tensor_buffer<float> scores({2, 3, 5, 1}, layout::padded_by_one, -7.0f);
  attn::embedding_scorer{.channel = 2}(buffer.view(), scores.view());
  CHECK(scores.view()(1, 2, 3, 0) == buffer.view()(1, 2, 3, 2));

  attn::index_scorer{.stride = 2}(scores.view());
  CHECK(scores.view()(1, 1, 0, 0) == 1);
  CHECK(scores.view()(1, 1, 1, 0) == 0);
  CHECK(scores.view()(1, 1, 4, 0) == 1);

  // The same on every platform: numbers of this implementation, kept.
  attn::random_scorer{.seed = 42}(scores.view());
  const tensor first = scores.values();
  CHECK(first(0, 0, 0, 0) == 12673321 * 0x1p-24);
  CHECK(first(1, 2, 3, 0) == 4176224 * 0x1p-24);
  tensor_buffer<double> longer({2, 3, 9, 1}, layout::contiguous, 0.0);
  attn::random_scorer{.seed = 42}(longer.view());
  CHECK(longer.view()(1, 2, 3, 0) == first(1, 2, 3, 0));
  attn::random_scorer{.seed = 43}(longer.view());
  CHECK(longer.view()(1, 2, 3, 0) != first(1, 2, 3, 0));
  double sum = 0, squares = 0;
  std::vector<double> many(100000);
  attn::random_scorer{.seed = 1}(attn::bhld(many.data(), 1, 1, 100000, 1));
  bool in_range = true;
  for (const double v : many) {
    in_range = in_range && v >= 0 && v < 1;
    sum += v, squares += v * v;
  }
  CHECK(in_range);
  CHECK(std::abs(sum / 1e5 - 0.5) < 5e-3);
  CHECK(std::abs(squares / 1e5 - 1.0 / 3) < 5e-3);
}

TEST_CASE("squash_scores and its gradient") {
  std::vector<double> raw{-1000, -1, 0, 2, 1000, -HUGE_VAL}, scores(6), g(6, 2.0), d_raw(6);
  const auto column = [](std::vector<double>& v) { return attn::bhld(v.data(), 1, 1, 6, 1); };
  attn::squash_scores(column(raw), column(scores));
  CHECK(scores[0] == 0);
  CHECK(scores[2] == 0.5);
  CHECK(scores[3] == Approx(1 / (1 + std::exp(-2.0))).epsilon(1e-15));
  CHECK(scores[4] == 1);
  CHECK(scores[5] == 0);
  attn::squash_scores_backward(column(scores), column(g), column(d_raw));
  CHECK(d_raw[2] == 0.5);
  CHECK(d_raw[0] == 0);
  attn::squash_scores(column(raw), column(raw));  // in place
  CHECK(raw == scores);
}

TEST_CASE("Threads change no bit of the scorers") {
  attn::context threaded(3), serial(1);
  const index_t d = 150, d_hidden = 300;
  const std::array<index_t, 4> shape{2, 1, 200, d};
  const auto run = [&](attn::context& ctx) {
    std::vector<float> x = rounded<float>(normal_tensor(shape, 1));
    const std::vector<float> w = rounded<float>(normal_tensor({1, 1, 1, d}, 2));
    const std::vector<float> w1 = rounded<float>(normal_tensor({1, 1, d, d_hidden}, 3));
    const std::vector<float> b1(d_hidden), w2(d_hidden, 0.1f);
    std::vector<float> scores(400), d_x(x.size()), d_w(w.size()), d_w1(w1.size()), d_b1(d_hidden),
        d_w2(d_hidden), all;
    float d_b = 0;
    const auto rows = attn::bhld(x.data(), 2, 1, 200, d);
    const auto column = attn::bhld(scores.data(), 2, 1, 200, 1);
    const attn::linear_scorer<float> linear{w, 0.5f};
    linear(rows, column, ctx);
    all = scores;
    linear.backward(rows, column, attn::bhld(d_x.data(), 2, 1, 200, d), std::span<float>(d_w), d_b,
                    ctx);
    all.insert(all.end(), d_x.begin(), d_x.end());
    all.insert(all.end(), d_w.begin(), d_w.end());
    const attn::nonlinear_scorer<float> nonlinear{attn::bhld(w1.data(), 1, 1, d, d_hidden), b1, w2};
    nonlinear(rows, column, ctx);
    all.insert(all.end(), scores.begin(), scores.end());
    nonlinear.backward(rows, column, attn::bhld(d_x.data(), 2, 1, 200, d),
                       attn::bhld(d_w1.data(), 1, 1, d, d_hidden), std::span<float>(d_b1),
                       std::span<float>(d_w2), d_b, ctx);
    all.insert(all.end(), d_x.begin(), d_x.end());
    all.insert(all.end(), d_w1.begin(), d_w1.end());
    return all;
  };
  CHECK(run(serial) == run(threaded));
}

TEST_CASE("What the scorers refuse") {
  const auto message = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const std::invalid_argument& e) {
      return e.what();
    }
    return "accepted";
  };
  std::vector<float> x(12), scores(3), short_w(2);
  const auto rows = attn::bhld(x.data(), 1, 1, 3, 4);
  const auto column = attn::bhld(scores.data(), 1, 1, 3, 1);
  CHECK(message([&] { attn::linear_scorer<float>{short_w}(rows, column); }) ==
        "linear_scorer: w has 2 elements, expected 4 (dim of x)");
  CHECK(message([&] { attn::linear_scorer<float>{short_w}(rows, rows); }) ==
        "linear_scorer: scores is [1, 1, 3, 4], expected dim 1 (one score per position)");
  CHECK(message([&] { attn::embedding_scorer{.channel = 4}(rows, column); }) ==
        "embedding_scorer: channel is 4, expected 0 to 3 (dim of x)");
  CHECK(message([&] { attn::index_scorer{.stride = 0}(column); }) ==
        "index_scorer: stride is 0, expected at least 1");
  CHECK(message([&] { attn::random_scorer{}(rows); }) ==
        "random_scorer: scores is [1, 1, 3, 4], expected dim 1 (one score per position)");
  std::vector<float> q(24), lse(6), s(6);
  CHECK(message([&] {
          attn::power_scorer{}(attn::bhld(q.data(), 1, 2, 3, 4), attn::bhld(x.data(), 1, 1, 3, 4),
                               attn::bhld(lse.data(), 1, 2, 3, 1),
                               attn::bhld(s.data(), 1, 3, 3, 1));
        }) == "power_scorer: scores is [1, 3, 3, 1], expected heads that divide 2 (heads of q)");
}
