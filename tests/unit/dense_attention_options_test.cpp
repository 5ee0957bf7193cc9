// SPDX-License-Identifier: MIT
//
// Scale, softcap, sinks, and the order in which they meet the rule.
#include "support/catch.hpp"
#include "support/dense_call.hpp"
#include "support/rule_operands.hpp"

#include <cmath>
#include <limits>
#include <vector>

using namespace attn_test;

#define ELEMENT_TYPES float, double, Eigen::half, Eigen::bfloat16

namespace {

const std::vector<dense_problem> problems = {
    {.n_heads = 4, .n_kv_heads = 2, .n_q = 1, .n_kv = 150, .d_qk = 20, .d_v = 9},
    {.n_batch = 2, .n_heads = 4, .n_kv_heads = 2, .n_q = 53, .n_kv = 140},
    {.n_heads = 4, .n_kv_heads = 1, .n_q = 7, .n_kv = 3},
};

const std::vector<float> sinks = {0.5f, -20.0f, 3.0f, 40.0f};

}  // namespace

TEMPLATE_TEST_CASE("Any finite scale", "", ELEMENT_TYPES) {
  const double scale = GENERATE(0.0, 1.0, 0.1, -0.5, 3.0);
  CAPTURE(scale);
  for (const dense_problem& p : problems) {
    INFO(p);
    CHECK(check_dense<TestType>(p, attn::no_mask{}, {}, {.scale = scale}));
    CHECK(check_dense<TestType>(p, attn::causal_mask{.offset = 2}, reference::causal_mask(2),
                                {.scale = scale}));
  }
}

TEMPLATE_TEST_CASE("Softcap", "", ELEMENT_TYPES) {
  const double cap = GENERATE(0.1, 2.0, 30.0, 1e4);
  CAPTURE(cap);
  for (dense_problem p : problems)
    for (const double deviation : {1.0, 20.0}) {
      p.deviation = deviation;
      INFO(p);
      CHECK(check_dense<TestType>(p, attn::no_mask{}, {}, {.softcap = cap}));
      CHECK(check_dense<TestType>(p, attn::causal_mask{.offset = 2}, reference::causal_mask(2),
                                  {.softcap = cap}));
    }
}

TEST_CASE("Softcap by hand: cap 2, logits 0 and 10") {
  dense_operands<float> x({.n_q = GENERATE(1, 20), .n_kv = 2, .d_qk = 1, .d_v = 1});
  x.q.assign(reference::tensor({1, 1, x.problem.n_q, 1}, 1));
  reference::tensor k({1, 1, 2, 1}), v({1, 1, 2, 1});
  k(0, 0, 1, 0) = 10;
  v(0, 0, 1, 0) = 1;
  x.k.assign(k);
  x.v.assign(v);
  attend(x, attn::no_mask{}, {.scale = 1.0, .softcap = 2});
  CHECK(std::abs(x.out.view()(0, 0, 0, 0) - 0.8807780f) < 2e-7f);
}

TEST_CASE("Softcap comes before the rule: a bias may leave it, a mask is not capped") {
  const dense_problem p{.n_heads = 2, .n_kv_heads = 1, .n_q = GENERATE(1, 53), .n_kv = 140};
  INFO(p);
  reference::tensor values = normal_tensor(p.score_extents(), 5, 5);
  random_source random(6);
  for (double& x : values.elements())
    x = random.coin(0.3) ? reference::forbidden : to_double(static_cast<float>(x));
  const rule_operand<float> bias(values);
  CHECK(check_dense<float>(p, attn::additive_bias{bias.view()}, reference::additive_bias(values),
                           {.softcap = 1.5}));
}

TEMPLATE_TEST_CASE("Sinks: one logit per query head", "", ELEMENT_TYPES) {
  for (const dense_problem& p : problems) {
    INFO(p);
    CHECK(check_dense<TestType>(p, attn::no_mask{}, {}, {.sinks = sinks}));
    CHECK(check_dense<TestType>(p, attn::causal_mask{.offset = -3}, reference::causal_mask(-3),
                                {.sinks = sinks}));
    CHECK(check_dense<TestType>(p, attn::no_mask{}, {},
                                {.scale = 0.7, .softcap = 3, .sinks = sinks}));
  }
}

TEMPLATE_TEST_CASE("A row with a sink and no allowed key: out 0, lse is the sink", "",
                   ELEMENT_TYPES) {
  const std::vector<index_t> nothing = {0};
  const dense_problem p{
      .n_heads = 4, .n_kv_heads = 2, .n_q = GENERATE(1, 53), .n_kv = GENERATE(0, 5)};
  dense_operands<TestType> x(p);
  attend(x, attn::key_lengths{nothing}, {.sinks = sinks});
  CHECK(compare_bits(x.out.values(), reference::tensor(p.out_extents(), 0)));
  reference::tensor lse(p.lse_extents());
  for (index_t h = 0; h < 4; ++h)
    for (index_t i = 0; i < p.n_q; ++i)
      lse(0, h, i, 0) = static_cast<double>(sinks[static_cast<std::size_t>(h)]);
  CHECK(compare_within(x.lse.values(), lse, 1e-6 * 40));
}

TEST_CASE("A sink of +inf or NaN: rows with keys are NaN, rows without are 0") {
  const std::vector<float> sink(
      2, GENERATE(std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()));
  const index_t n_q = GENERATE(values<index_t>({3, 53}));
  const dense_problem p{.n_heads = 2, .n_kv_heads = 2, .n_q = n_q, .n_kv = 5};
  dense_operands<float> x(p);
  attend(x, attn::causal_mask{.offset = -1}, {.sinks = sink});
  for (index_t h = 0; h < 2; ++h)
    for (index_t c = 0; c < p.d_v; ++c) {
      CHECK(x.out.view()(0, h, 0, c) == 0);
      CHECK(std::isnan(x.out.view()(0, h, 1, c)));
    }
}

TEST_CASE("Sinks of any size") {
  const dense_problem p{.n_heads = 2, .n_kv_heads = 2, .n_q = GENERATE(1, 53), .n_kv = 140};
  SECTION("−inf is no sink") {
    const std::vector<float> none(2, -std::numeric_limits<float>::infinity());
    dense_operands<float> with(p), without(p);
    attend(with, attn::causal_mask{.offset = -5}, {.sinks = none});
    attend(without, attn::causal_mask{.offset = -5});
    CHECK(same_bits_out(with, without));
  }
  SECTION("1e30 takes all") {
    const std::vector<float> all(2, 1e30f);
    dense_operands<float> x(p);
    attend(x, attn::no_mask{}, {.sinks = all});
    CHECK(compare_within(x.out.values(), reference::tensor(p.out_extents(), 0), 0));
    CHECK(compare_within(x.lse.values(), reference::tensor(p.lse_extents(), 1e30), 1e24));
  }
  SECTION("−1e30 takes nothing") {
    const std::vector<float> little(2, -1e30f);
    CHECK(check_dense<float>(p, attn::no_mask{}, {}, {.sinks = little}));
  }
}

TEST_CASE("Every precision_mode that is not reduced keeps the float bound") {
  const auto precision = GENERATE(attn::precision_mode::automatic, attn::precision_mode::strict);
  for (const dense_problem& p : problems) {
    INFO(p);
    CHECK(check_dense<float>(p, attn::no_mask{}, {}, {.precision = precision}));
    CHECK(check_dense<double>(p, attn::no_mask{}, {}, {.precision = precision}));
  }
}
