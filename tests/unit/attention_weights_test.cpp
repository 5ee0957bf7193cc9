// SPDX-License-Identifier: MIT
//
// attention_weights against the oracle's: shapes, layouts, rules, special values.
#include "reference/dense_attention.hpp"
#include "support/allocation_counter.hpp"
#include "support/catch.hpp"
#include "support/compare.hpp"
#include "support/dense_problem.hpp"
#include "support/element.hpp"
#include "support/random.hpp"
#include "support/tensor_buffer.hpp"

#include <attn/attention_weights.hpp>

#include <Eigen/Core>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

using attn::index_t;
using attn_test::dense_operands;
using attn_test::dense_problem;
using attn_test::layout;
using attn_test::tensor_buffer;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

/// Weights in a buffer of canaries.
template <class T>
tensor_buffer<T> make_weights(const dense_problem& p, double canary = std::nan("")) {
  return tensor_buffer<T>(p.score_extents(), p.outputs, attn_test::from_double<T>(canary));
}

/// |Δp| ≤ 24 eps (1 + score bound) p, plus what underflows or is rounded when it is stored.
template <class T>
attn_test::comparison compare_weights(const tensor_buffer<T>& weights,
                                      const reference::dense_result& expected) {
  if (!weights.canaries_alive()) return {false, "written outside of the weights"};
  const reference::tensor got = weights.values(), &want = expected.weights;
  const double floor = std::is_same_v<T, Eigen::half> ? 0x1p-25
                       : std::is_same_v<T, double>    ? 1e-300
                                                      : 2 * 0x1p-126;
  for (index_t b = 0; b < got.extent(0); ++b) {
    for (index_t h = 0; h < got.extent(1); ++h) {
      for (index_t i = 0; i < got.extent(2); ++i) {
        for (index_t j = 0; j < got.extent(3); ++j) {
          const double g = got(b, h, i, j), w = want(b, h, i, j);
          const double unit =
              24 * attn_test::arithmetic_epsilon<T> * (1 + expected.score_bound(b, h, i, 0)) * w;
          const double bound = unit + attn_test::storage_rounding<T>() * (w + unit) + floor;
          // A forbidden key has weight 0, not almost 0.
          const bool ok = std::isnan(w) ? std::isnan(g)
                          : w == 0      ? g < floor
                                        : std::abs(g - w) <= bound;
          if (!ok) {
            return {false, "weight (" + std::to_string(b) + ", " + std::to_string(h) + ", " +
                               std::to_string(i) + ", " + std::to_string(j) + ") is " +
                               std::to_string(g) + ", expected " + std::to_string(w)};
          }
        }
      }
    }
  }
  return {};
}

template <class T, class Rule = attn::no_mask>
attn_test::comparison check(const dense_problem& p, const Rule& rule = {},
                            const reference::score_rule& oracle_rule = {},
                            const attn::dense_options& options = {}) {
  const dense_operands<T> x(p);
  auto weights = make_weights<T>(p);
  attn::attention_weights(x.q.view(), x.k.view(), weights.view(), rule, options);
  reference::dense_options expected{.scale = options.scale, .softcap = options.softcap};
  for (const float s : options.sinks) expected.sinks.push_back(s);
  return compare_weights<T>(weights, x.expected(oracle_rule, expected));
}

}  // namespace

TEMPLATE_TEST_CASE("Weights of any shape", "", float, double, Eigen::half, Eigen::bfloat16) {
  const index_t n_q = GENERATE(1, 2, 11, 12, 13, 24, 47, 48, 49, 97);
  const index_t n_kv = GENERATE(1, 3, 16, 127, 128, 129, 259);
  const index_t d = GENERATE(1, 3, 64);
  const dense_problem p{.n_q = n_q, .n_kv = n_kv, .d_qk = d, .d_v = 1};
  CAPTURE(p);
  CHECK(check<TestType>(p));
}

TEMPLATE_TEST_CASE("Weights of batches, grouped heads and any layout", "", float, double,
                   Eigen::half) {
  const layout in = GENERATE(layout::contiguous, layout::padded_by_one, layout::heads_interleaved,
                             layout::column_major, layout::strided_dim, layout::broadcast_heads);
  const layout out =
      GENERATE(layout::contiguous, layout::padded_wide, layout::column_major, layout::strided_dim);
  const dense_problem p{.n_batch = 2,
                        .n_heads = 6,
                        .n_kv_heads = 2,
                        .n_q = 21,
                        .n_kv = 140,
                        .d_qk = 20,
                        .d_v = 1,
                        .inputs = in,
                        .outputs = out};
  CAPTURE(p);
  CHECK(check<TestType>(p));
}

TEMPLATE_TEST_CASE("Every kind of rule", "", float, double) {
  const dense_problem p{
      .n_batch = 2, .n_heads = 4, .n_kv_heads = 2, .n_q = 53, .n_kv = 190, .d_qk = 9, .d_v = 1};
  const std::vector<index_t> lengths{7, 150};
  CHECK(check<TestType>(p, attn::causal_mask{.offset = 3}, reference::causal_mask(3)));
  CHECK(check<TestType>(p, attn::causal_mask::bottom_right(53, 190),
                        reference::causal_mask(190 - 53)));
  CHECK(check<TestType>(p, attn::window_mask{.left = 4, .right = 2, .offset = 60},
                        reference::window_mask(4, 2, 60)));
  CHECK(check<TestType>(p, attn::key_lengths{lengths}, reference::key_lengths(lengths)));
  CHECK(check<TestType>(p, attn::prefix_mask{lengths, -20}, reference::prefix_mask(lengths, -20)));

  auto coins = attn_test::coin_tensor({2, 1, 53, 190}, 5);
  for (index_t j = 0; j < 190; ++j) coins(1, 0, 17, j) = 0;  // a row without a key
  std::array<bool, 2 * 53 * 190> allowed;
  std::ranges::transform(coins.elements(), allowed.begin(), [](double c) { return c != 0; });
  const attn::tensor_view<const bool> mask(allowed.data(), 2, 1, 53, 190);
  CHECK(check<TestType>(p, attn::boolean_mask{mask}, reference::boolean_mask(coins)));

  tensor_buffer<float> bias({1, 4, 53, 190}, layout::contiguous, 0.0f);
  bias.assign(attn_test::normal_tensor({1, 4, 53, 190}, 6));
  bias.view()(0, 1, 2, 3) = -std::numeric_limits<float>::infinity();
  CHECK(check<TestType>(p, attn::additive_bias{bias.view()},
                        reference::additive_bias(bias.values())));

  const std::vector<float> slopes{0.5f, 0.25f, 0.125f, 0};
  CHECK(check<TestType>(p, attn::alibi_bias{slopes, 40} & attn::causal_mask{.offset = 40},
                        reference::alibi_bias({0.5, 0.25, 0.125, 0}, 40) &
                            reference::causal_mask(40)));
  const auto f = [](auto s, index_t, index_t h, index_t i, index_t j) {
    return (i + j + h) % 3 == 0 ? -std::numeric_limits<decltype(s)>::infinity() : s / 2;
  };
  CHECK(check<TestType>(p, attn::score_rule_fn(f), reference::score_rule_fn(f)));
}

TEMPLATE_TEST_CASE("Scale, softcap and sinks", "", float, double) {
  const dense_problem p{
      .n_heads = 3, .n_kv_heads = 3, .n_q = 20, .n_kv = 70, .d_qk = 8, .d_v = 1, .deviation = 4};
  CHECK(check<TestType>(p, attn::no_mask{}, {}, {.scale = 0.25}));
  CHECK(check<TestType>(p, attn::no_mask{}, {}, {.scale = -1}));
  CHECK(check<TestType>(p, attn::no_mask{}, {}, {.scale = 0}));
  CHECK(check<TestType>(p, attn::no_mask{}, {}, {.softcap = 2}));
  // Far below, within and far above the scores; −inf is a sink that takes nothing.
  const std::array<float, 3> sinks{-300, 1.5f, 12};
  CHECK(check<TestType>(p, attn::causal_mask{.offset = -2}, reference::causal_mask(-2),
                        {.sinks = sinks}));
  const std::array<float, 3> none{-HUGE_VALF, -HUGE_VALF, -HUGE_VALF};
  CHECK(check<TestType>(p, attn::causal_mask{.offset = -2}, reference::causal_mask(-2),
                        {.sinks = none}));
}

TEST_CASE("A sink far above every score takes everything") {
  Eigen::VectorXf q(1), k(2);
  q << 1;
  k << 1, 2;
  Eigen::MatrixXf w(1, 2);
  const std::array<float, 1> sink{3e38f};
  attn::attention_weights(q, k, w, attn::no_mask{}, {.sinks = sink});
  CHECK(w(0, 0) == 0);
  CHECK(w(0, 1) == 0);
}

TEST_CASE("Logits 1000 and 1001; logits a million apart; -200 everywhere") {
  Eigen::VectorXf q(1), k(2), far(2), low(5);
  q << 1;
  k << 1000, 1001;
  far << -5e8f, 5e8f;
  low.setConstant(-200);
  Eigen::MatrixXf w(1, 2);
  attn::attention_weights(q, k, w);
  CHECK(std::abs(w(0, 0) - 0.26894142f) < 1e-6f);
  CHECK(std::abs(w(0, 1) - 0.73105858f) < 1e-6f);
  attn::attention_weights(q, far, w);
  CHECK(w(0, 0) == 0);
  CHECK(w(0, 1) == 1);
  Eigen::MatrixXf fifth(1, 5);
  attn::attention_weights(q, low, fifth);
  for (int j = 0; j < 5; ++j) CHECK(fifth(0, j) == 0.2f);
}

TEMPLATE_TEST_CASE("NaN and infinity stay where they belong", "", float, double, Eigen::half,
                   Eigen::bfloat16) {
  const dense_problem p{.n_q = 50, .n_kv = 140, .d_qk = 4, .d_v = 1};
  dense_operands<TestType> x(p);
  const double bad = GENERATE(std::nan(""), infinity, -infinity);
  CAPTURE(bad);
  x.k.view()(0, 0, 20, 2) = attn_test::from_double<TestType>(bad);
  x.q.view()(0, 0, 45, 1) = attn_test::from_double<TestType>(bad);
  auto weights = make_weights<TestType>(p);
  SECTION("a forbidden key has weight 0 and touches nothing") {
    attn::attention_weights(x.q.view(), x.k.view(), weights.view(), attn::causal_mask{});
    for (index_t i = 0; i < 50; ++i) {
      for (index_t j = 0; j < 140; ++j) {
        const double w = attn_test::to_double(weights.view()(0, 0, i, j));
        CAPTURE(i, j);
        if (j > i) {
          CHECK(w == 0);
        } else if (i < 20) {
          CHECK(std::isfinite(w));
        }
      }
    }
  }
  SECTION("as the oracle has it") {
    attn::attention_weights(x.q.view(), x.k.view(), weights.view());
    CHECK(compare_weights<TestType>(weights, x.expected()));
  }
  SECTION("rows past the length are not read") {
    const std::vector<index_t> lengths{20};
    attn::attention_weights(x.q.view(), x.k.view(), weights.view(), attn::key_lengths{lengths});
    CHECK(compare_weights<TestType>(weights, x.expected(reference::key_lengths(lengths))));
  }
  SECTION("a function that gives NaN to one pair") {
    const auto f = [](auto s, index_t, index_t, index_t i, index_t j) {
      return i == 3 && j == 9 ? std::numeric_limits<decltype(s)>::quiet_NaN() : s;
    };
    attn::attention_weights(x.q.view(), x.k.view(), weights.view(),
                            attn::causal_mask{.offset = 10} & attn::score_rule_fn(f));
    CHECK(std::isnan(attn_test::to_double(weights.view()(0, 0, 3, 0))));
    CHECK(attn_test::to_double(weights.view()(0, 0, 3, 14)) == 0);
    CHECK(std::isfinite(attn_test::to_double(weights.view()(0, 0, 2, 0))));
  }
}

TEST_CASE("Sinks of +inf and NaN make their rows NaN") {
  const dense_problem p{.n_heads = 2, .n_kv_heads = 2, .n_q = 3, .n_kv = 5, .d_qk = 4, .d_v = 1};
  const std::array<float, 2> sinks{HUGE_VALF, NAN};
  CHECK(check<float>(p, attn::no_mask{}, {}, {.sinks = sinks}));
}

TEST_CASE("Zero lengths") {
  auto none = make_weights<float>({.n_q = 3, .n_kv = 0});
  const dense_operands<float> x({.n_q = 3, .n_kv = 0}), y({.n_q = 0, .n_kv = 3});
  attn::attention_weights(x.q.view(), x.k.view(), none.view());
  CHECK(none.untouched());
  auto rows = make_weights<float>({.n_q = 0, .n_kv = 3});
  attn::attention_weights(y.q.view(), y.k.view(), rows.view());
  CHECK(rows.untouched());
}

TEST_CASE("Threads, other rows and the scratch change no bit; a repeated call allocates nothing") {
  const dense_problem p{
      .n_batch = 2, .n_heads = 3, .n_kv_heads = 3, .n_q = 130, .n_kv = 300, .d_qk = 16, .d_v = 1};
  const dense_operands<float> x(p);
  const attn::window_mask rule{.left = 100, .right = 7, .offset = 90};
  auto expected = make_weights<float>(p);
  attn::attention_weights(x.q.view(), x.k.view(), expected.view(), rule);
  for (const int n_threads : {2, 5}) {
    attn::context ctx(n_threads);
    auto weights = make_weights<float>(p, 1e30);
    attn::attention_weights(x.q.view(), x.k.view(), weights.view(), rule, {}, ctx);
    CHECK(attn_test::compare_bits(weights.values(), expected.values()));
    const auto q = x.q.view(), k = x.k.view();
    const auto w = weights.view();
    const attn_test::allocation_counter allocations;
    attn::attention_weights(q, k, w, rule, {}, ctx);
    CHECK(allocations.count() == 0);
  }
  // Row 100 of head 2 of batch 1 alone.
  const auto q = x.q.view();
  const attn::tensor_view<const float> one(&q(1, 2, 100, 0), 1, 1, 1, 16);
  const attn::tensor_view<const float> keys(&x.k.view()(1, 2, 0, 0), 1, 1, 300, 16);
  std::vector<float> row(300);
  attn::attention_weights(one, keys, attn::bhld(row.data(), 1, 1, 1, 300),
                          attn::window_mask{.left = 100, .right = 7, .offset = 190});
  for (index_t j = 0; j < 300; ++j) {
    CHECK(row[static_cast<std::size_t>(j)] == expected.view()(1, 2, 100, j));
  }
}
