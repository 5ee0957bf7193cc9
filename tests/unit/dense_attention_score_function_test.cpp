// SPDX-License-Identifier: MIT
//
// User functions of the score.
#include "support/catch.hpp"
#include "support/dense_call.hpp"
#include "support/rule_operands.hpp"

#include <atomic>
#include <limits>
#include <type_traits>
#include <vector>

using namespace attn_test;

namespace {

/// A function of everything that a rule may depend on; forbids every seventh pair.
template <class S>
S any_function(S score, index_t b, index_t h, index_t i, index_t j) {
  if ((3 * i + 2 * j + h + b) % 7 == 0) return -std::numeric_limits<S>::infinity();
  return score * S(0.5) + static_cast<S>((b + 2 * h + i + 3 * j) % 5);
}

reference::score_rule any_function_meaning() {
  return reference::score_rule_fn(any_function<double>);
}

}  // namespace

TEMPLATE_TEST_CASE("score_rule_fn sees score, batch, query head, query and key", "", float, double,
                   Eigen::bfloat16) {
  const attn::score_rule_fn rule([](auto score, index_t b, index_t h, index_t i, index_t j) {
    return any_function(score, b, h, i, j);
  });
  for (const index_t n_q : {1, 2, 53})
    for (const index_t n_kv : {1, 15, 16, 17, 31, 33, 127, 129, 300}) {
      const dense_problem p{.n_batch = 2, .n_heads = 4, .n_kv_heads = 2, .n_q = n_q, .n_kv = n_kv};
      INFO(p);
      CHECK(check_dense<TestType>(p, rule, any_function_meaning()));
    }
}

TEMPLATE_TEST_CASE("A positive constant is not given to keys that do not exist", "", float,
                   double) {
  // The scores are replaced, so any padding would count as a key with weight exp(5).
  const attn::score_rule_fn five([](auto, index_t, index_t, index_t, index_t) { return 5; });
  const auto meaning =
      reference::score_rule_fn([](double, index_t, index_t, index_t, index_t) { return 5.0; });
  for (const index_t n_q : {1, 53})
    for (const index_t n_kv : {1, 15, 16, 17, 31, 33, 127, 129, 1000}) {
      const dense_problem p{.n_q = n_q, .n_kv = n_kv};
      INFO(p);
      CHECK(check_dense<TestType>(p, five, meaning));
    }
}

TEMPLATE_TEST_CASE("The score comes in the type that kernels compute in", "", float, double,
                   Eigen::half, Eigen::bfloat16) {
  std::atomic<int> calls{0};
  const attn::score_rule_fn rule([&](auto score, index_t, index_t, index_t, index_t) {
    static_assert(std::is_floating_point_v<decltype(score)>);
    if constexpr (std::is_same_v<decltype(score), arithmetic_t<TestType>>) ++calls;
    return score;
  });
  const dense_problem p{.n_q = 3, .n_kv = 5};
  CHECK(check_dense<TestType>(p, rule));
  CHECK(calls >= 15);
}

TEST_CASE("The function is called with pairs that exist and that the other rules allow") {
  const index_t n_batch = 2, n_heads = 3, n_q = GENERATE(1, 53), n_kv = 140;
  const std::vector<index_t> lengths = {17, 130};
  const rule_operand<bool> mask(coin_tensor({1, n_heads, n_q, n_kv}, 3));
  std::atomic<int> wrong{0}, calls{0};
  const auto allowed = [&](index_t b, index_t h, index_t i, index_t j) {
    const bool exists = b >= 0 && b < n_batch && h >= 0 && h < n_heads && i >= 0 && i < n_q &&
                        j >= 0 && j < lengths[static_cast<std::size_t>(b)];
    return exists && mask.values(0, h, i, j) != 0;
  };
  const attn::score_rule_fn rule([&](auto score, index_t b, index_t h, index_t i, index_t j) {
    ++calls;
    if (!allowed(b, h, i, j)) ++wrong;
    return score;
  });
  const dense_problem p{
      .n_batch = n_batch, .n_heads = n_heads, .n_kv_heads = 1, .n_q = n_q, .n_kv = n_kv};
  CHECK(check_dense<float>(p, attn::key_lengths{lengths} & attn::boolean_mask{mask.view()} & rule,
                           reference::key_lengths(lengths) & reference::boolean_mask(mask.values)));
  CHECK(calls > 0);
  CHECK(wrong == 0);
}

TEST_CASE("−inf forbids, NaN and +inf make the row NaN") {
  dense_operands<float> x({.n_q = 40, .n_kv = 150});
  constexpr float infinity = std::numeric_limits<float>::infinity();
  const float bad =
      GENERATE(values<float>({std::numeric_limits<float>::infinity(), std::nanf("")}));
  const index_t at = GENERATE(values<index_t>({0, 5, 130, 149}));
  CAPTURE(bad, at);
  const attn::score_rule_fn rule([=](float s, index_t, index_t, index_t i, index_t j) {
    if (i == 7 && j == at) return bad;
    return i == 9 ? -infinity : s;
  });
  attend(x, rule);
  const auto meaning =
      reference::score_rule_fn([=](double s, index_t, index_t, index_t i, index_t j) {
        if (i == 7 && j == at) return static_cast<double>(bad);
        return i == 9 ? reference::forbidden : s;
      });
  auto expected = x.expected(meaning);
  for (index_t c = 0; c < 8; ++c) {
    CHECK(std::isnan(x.out.view()(0, 0, 7, c)));
    CHECK(x.out.view()(0, 0, 9, c) == 0);
  }
  CHECK(std::isnan(x.lse.view()(0, 0, 7, 0)) == std::isnan(x.out.view()(0, 0, 7, 0)));
  // The other rows are as ever.
  reference::tensor out = x.out.values(), lse = x.lse.values();
  for (index_t c = 0; c < 8; ++c) out(0, 0, 7, c) = expected.out(0, 0, 7, c) = 0;
  lse(0, 0, 7, 0) = expected.lse(0, 0, 7, 0) = 0;
  expected.score_bound(0, 0, 7, 0) = 0;
  CHECK(compare_dense<float>(out, lse, expected));
}
