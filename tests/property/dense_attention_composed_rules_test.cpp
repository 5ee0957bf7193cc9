// SPDX-License-Identifier: MIT
//
// Score rules composed with &, in several orders, in float (the rules themselves are tested in
// every type alone, and pair by pair in score_rule_test.cpp).
#include "support/catch.hpp"
#include "support/dense_call.hpp"
#include "support/rule_operands.hpp"

#include <vector>

using namespace attn_test;

namespace {

const std::vector<index_t> lengths = {17, 139};
const std::vector<index_t> prefix = {30, 2};
const std::vector<float> slopes = {0.5f, 0.125f, 0.25f, 1.0f};

const auto lengths_meaning = reference::key_lengths({17, 139});
const auto alibi_meaning = reference::alibi_bias({0.5, 0.125, 0.25, 1});

const attn::score_rule_fn halve([](auto s, index_t, index_t, index_t, index_t j) {
  return s / 2 + static_cast<decltype(s)>(j % 3);
});
const auto halve_meaning =
    reference::score_rule_fn([](double s, index_t, index_t, index_t, index_t j) {
      return s / 2 + static_cast<double>(j % 3);
    });

template <class Rule>
void check_all(const Rule& rule, const reference::score_rule& meaning) {
  for (const index_t n_q : {1, 3, 53}) {
    const dense_problem p{.n_batch = 2, .n_heads = 4, .n_kv_heads = 2, .n_q = n_q, .n_kv = 140};
    INFO(p);
    CHECK(check_dense<float>(p, rule, meaning));
  }
}

constexpr attn::causal_mask causal{.offset = 60};
const auto causal_meaning = reference::causal_mask(60);
constexpr attn::window_mask window{.left = 20, .right = 9, .offset = 50};
const auto window_meaning = reference::window_mask(20, 9, 50);

}  // namespace

TEST_CASE("Ranges: causal & lengths, window & prefix") {
  check_all(causal & attn::key_lengths{lengths}, causal_meaning & lengths_meaning);
  check_all(window & attn::prefix_mask{prefix, 80},
            window_meaning & reference::prefix_mask(prefix, 80));
}

TEST_CASE("A range and a bias, in both orders") {
  const rule_operand<bool> mask(coin_tensor({1, 4, 1, 140}, 4, 0.8));
  check_all(causal & attn::alibi_bias{slopes, 60},
            causal_meaning & reference::alibi_bias({0.5, 0.125, 0.25, 1}, 60));
  check_all(attn::boolean_mask{mask.view()} & window,
            reference::boolean_mask(mask.values) & window_meaning);
}

TEST_CASE("Two biases and a range") {
  // Wide enough for the longest problem, and cut to each by its view.
  for (const index_t n_q : {1, 53}) {
    const dense_problem p{.n_batch = 2, .n_heads = 4, .n_kv_heads = 2, .n_q = n_q, .n_kv = 140};
    INFO(p);
    const rule_operand<float> bias(normal_tensor({1, 1, n_q, 140}, 5));
    CHECK(check_dense<float>(
        p, attn::alibi_bias{slopes} & attn::additive_bias{bias.view()} & attn::key_lengths{lengths},
        alibi_meaning & reference::additive_bias([&] {
          reference::tensor rounded = bias.values;
          for (double& x : rounded.elements()) x = to_double(static_cast<float>(x));
          return rounded;
        }()) &
            lengths_meaning));
  }
}

TEST_CASE("A function and other rules: the order counts") {
  check_all(halve & attn::alibi_bias{slopes}, halve_meaning & alibi_meaning);
  check_all(attn::alibi_bias{slopes} & halve, alibi_meaning & halve_meaning);
  check_all(halve & causal & halve, halve_meaning & causal_meaning & halve_meaning);
}

TEST_CASE("What one rule forbids no other brings back") {
  const rule_operand<bool> mask(coin_tensor({1, 1, 1, 140}, 6));
  const float value =
      GENERATE(values<float>({std::numeric_limits<float>::infinity(), std::nanf(""), 3.0f}));
  CAPTURE(value);
  // The function gives `value` to every forbidden key, and leaves the others alone.
  const auto poison = [&](auto s, index_t, index_t, index_t, index_t j) {
    return mask.values(0, 0, 0, j) != 0 ? s : static_cast<decltype(s)>(value);
  };
  const attn::score_rule_fn rule(poison);
  const auto meaning = reference::boolean_mask(mask.values);
  check_all(rule & attn::boolean_mask{mask.view()}, meaning);
  check_all(attn::boolean_mask{mask.view()} & rule, meaning);
}
