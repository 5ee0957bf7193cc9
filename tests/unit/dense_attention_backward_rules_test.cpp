// SPDX-License-Identifier: MIT
//
// Gradients under every score rule and option, against the oracle and finite differences.
#include "support/backward_call.hpp"
#include "support/catch.hpp"
#include "support/rule_operands.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

using namespace attn_test;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

const std::vector<dense_problem> problems = {
    {.n_batch = 2, .n_heads = 4, .n_kv_heads = 2, .n_q = 1, .n_kv = 150, .d_qk = 9, .d_v = 17},
    {.n_batch = 2, .n_heads = 4, .n_kv_heads = 2, .n_q = 70, .n_kv = 150, .d_qk = 9, .d_v = 17},
    {.n_batch = 2, .n_heads = 2, .n_kv_heads = 2, .n_q = 210, .n_kv = 300, .d_qk = 16, .d_v = 16},
};

template <class T, class Rule>
void check_all(const Rule& rule, const reference::score_rule& meaning,
               const attn::dense_options& options = {}) {
  for (const dense_problem& p : problems) {
    INFO(p);
    CHECK(check_backward<T>(p, rule, meaning, options));
  }
}

/// s ↦ s + s²/50, and its derivative.
struct bent {
  template <class S>
  S operator()(S s, index_t, index_t, index_t, index_t) const {
    return s + s * s / 50;
  }
  template <class S>
  S slope(S s, index_t, index_t, index_t, index_t) const {
    return 1 + s / 25;
  }
};

reference::score_rule bent_meaning() {
  return reference::score_rule_fn(
      [](double s, index_t, index_t, index_t, index_t) { return s + s * s / 50; },
      [](double s, index_t, index_t, index_t, index_t) { return 1 + s / 25; });
}

}  // namespace

TEMPLATE_TEST_CASE("Masks that are ranges of keys", "", float, double) {
  using T = TestType;
  for (const index_t offset : {-30, 0, 80}) {
    CAPTURE(offset);
    check_all<T>(attn::causal_mask{offset}, reference::causal_mask(offset));
    check_all<T>(attn::window_mask{5, 3, offset}, reference::window_mask(5, 3, offset));
    check_all<T>(attn::window_mask{attn::unlimited, 40, offset},
                 reference::window_mask(reference::unlimited, 40, offset));
    const std::vector<index_t> prefix{20, 130};
    check_all<T>(attn::prefix_mask{prefix, offset}, reference::prefix_mask(prefix, offset));
  }
  const std::vector<index_t> lengths{0, 133};
  check_all<T>(attn::key_lengths{lengths}, reference::key_lengths(lengths));
  check_all<T>(attn::key_lengths{lengths} & attn::causal_mask{40},
               reference::key_lengths(lengths) & reference::causal_mask(40));
}

TEMPLATE_TEST_CASE("boolean_mask and additive_bias, whole and broadcast", "", float, double) {
  for (const dense_problem& p : problems)
    for (const bool broadcast : {false, true}) {
      INFO(p);
      CAPTURE(broadcast);
      std::array<index_t, 4> extents = p.score_extents();
      if (broadcast) extents = {1, p.n_heads, 1, p.n_kv};
      const rule_operand<bool> mask(coin_tensor(extents, 5, 0.6));
      CHECK(check_backward<TestType>(p, attn::boolean_mask{mask.view()},
                                     reference::boolean_mask(mask.values)));
      reference::tensor bias = normal_tensor(extents, 6);
      const reference::tensor holes = coin_tensor(extents, 7, 0.2);
      for (std::size_t n = 0; n < bias.elements().size(); ++n)
        bias.elements()[n] = holes.elements()[n] != 0
                                 ? -infinity
                                 : to_double(static_cast<TestType>(bias.elements()[n]));
      const rule_operand<TestType> added(bias);
      CHECK(check_backward<TestType>(p, attn::additive_bias{added.view()},
                                     reference::additive_bias(bias)));
      CHECK(check_backward<TestType>(p, attn::additive_bias{added.view()} & attn::causal_mask{50},
                                     reference::additive_bias(bias) & reference::causal_mask(50)));
      CHECK(check_backward<TestType>(p, attn::additive_bias{added.view()},
                                     reference::additive_bias(bias), {.softcap = 1.5}));
    }
}

TEMPLATE_TEST_CASE("segment_mask and alibi_bias", "", float, double) {
  const std::vector<float> slopes{0.5f, 0.25f, 0.125f, 1};
  for (const dense_problem& p : problems) {
    INFO(p);
    reference::tensor q_ids({2, 1, p.n_q, 1}), k_ids({2, 1, p.n_kv, 1});
    for (index_t b = 0; b < 2; ++b) {
      for (index_t i = 0; i < p.n_q; ++i) q_ids(b, 0, i, 0) = static_cast<double>((i + b) / 40);
      for (index_t j = 0; j < p.n_kv; ++j) k_ids(b, 0, j, 0) = static_cast<double>(j / 45);
    }
    const rule_operand<index_t> q(q_ids), k(k_ids);
    CHECK(check_backward<TestType>(p, attn::segment_mask{q.view(), k.view()},
                                   reference::segment_mask(q_ids, k_ids)));
    const std::span<const float> used(slopes.data(), static_cast<std::size_t>(p.n_heads));
    CHECK(check_backward<TestType>(p, attn::alibi_bias{used, 80},
                                   reference::alibi_bias({used.begin(), used.end()}, 80)));
  }
}

TEMPLATE_TEST_CASE("Scale, softcap and sinks", "", float, double) {
  using T = TestType;
  const attn::causal_mask causal{60};
  const reference::score_rule meaning = reference::causal_mask(60);
  check_all<T>(causal, meaning, {.scale = 0.0});
  check_all<T>(causal, meaning, {.scale = -0.7});
  check_all<T>(causal, meaning, {.softcap = 0.8});
  check_all<T>(causal, meaning, {.softcap = 30});
  for (const double sink : {-infinity, -3.0, 2.0, 40.0}) {
    CAPTURE(sink);
    const std::vector<float> sinks(4, static_cast<float>(sink));
    for (const dense_problem& p : problems) {
      INFO(p);
      const std::span<const float> used(sinks.data(), static_cast<std::size_t>(p.n_heads));
      CHECK(check_backward<T>(p, causal, meaning, {.sinks = used}));
    }
  }
}

TEMPLATE_TEST_CASE("A softcap at the size of the scores: p = 0.88", "", float, double) {
  // cap = 2, logits 0 and 10: capped 2 tanh 5, whose slope is 1 − tanh² 5 = 1.8e-4.
  backward_operands<TestType> y({.n_kv = 2, .d_qk = 1, .d_v = 1});
  reference::tensor k({1, 1, 2, 1}), v({1, 1, 2, 1});
  k(0, 0, 1, 0) = 10, v(0, 0, 1, 0) = 1;
  const reference::tensor one({1, 1, 1, 1}, 1);
  y.x.q.assign(one), y.x.k.assign(k), y.x.v.assign(v), y.d_out.assign(one);
  CHECK(check_backward(y, attn::no_mask{}, {}, {.scale = 1.0, .softcap = 2}));
  const double p = 1 / (1 + std::exp(-2 * std::tanh(5.0)));
  const double slope = 1 - std::tanh(5.0) * std::tanh(5.0);
  CHECK(std::abs(to_double(y.d_q.view()(0, 0, 0, 0)) - 10 * p * (1 - p) * slope) <
        100 * arithmetic_epsilon<TestType>);
}

TEMPLATE_TEST_CASE("A function that adds or forbids needs no derivative", "", float, double) {
  const auto f = [](auto s, index_t, index_t h, index_t i, index_t j) {
    using S = decltype(s);
    const bool hidden = (i + j + h) % 3 == 0;
    return hidden ? -std::numeric_limits<S>::infinity() : s + static_cast<S>(j % 7) / 4;
  };
  const auto meaning = reference::score_rule_fn(
      [f](double s, index_t b, index_t h, index_t i, index_t j) { return f(s, b, h, i, j); },
      reference::score_rule{}.slope);
  check_all<TestType>(attn::score_rule_fn(f), meaning);
  check_all<TestType>(attn::score_rule_fn(f), meaning, {.softcap = 2});
  const std::vector<index_t> lengths{0, 133};
  check_all<TestType>(attn::key_lengths{lengths} & attn::score_rule_fn(f),
                      reference::key_lengths(lengths) & meaning);
}

TEMPLATE_TEST_CASE("A function tells its derivative by a member `slope`", "", float, double) {
  const attn::score_rule_fn rule{bent{}};
  check_all<TestType>(rule, bent_meaning());
  check_all<TestType>(rule, bent_meaning(), {.softcap = 2});
  // Composed: a chain, also with rules that only add.
  const std::vector<float> slopes(4, 0.125f);
  for (const dense_problem& p : problems) {
    INFO(p);
    const std::span<const float> used(slopes.data(), static_cast<std::size_t>(p.n_heads));
    const reference::score_rule alibi = reference::alibi_bias({used.begin(), used.end()}, 80);
    CHECK(check_backward<TestType>(p, rule & attn::alibi_bias{used, 80} & rule,
                                   bent_meaning() & alibi & bent_meaning()));
    CHECK(check_backward<TestType>(p, attn::alibi_bias{used, 80} & rule & attn::causal_mask{50},
                                   alibi & bent_meaning() & reference::causal_mask(50)));
  }
}

TEST_CASE("Finite differences of the library's own forward pass") {
  const std::vector<float> sinks{0.5f, -1};
  const std::vector<float> slopes{0.1f, 0.2f};
  const dense_problem p{.n_heads = 2, .n_kv_heads = 1, .n_q = 5, .n_kv = 11, .d_qk = 3, .d_v = 4};
  const auto check = [&](const auto& rule, const attn::dense_options& options) {
    backward_operands<double> y(p);
    attend_and_differentiate(y, rule, options);
    const reference::dense_gradients got = y.gradients();
    const reference::tensor d_out = y.d_out.values();
    const auto loss = [&] {
      attend(y.x, rule, options);
      const reference::tensor out = y.x.out.values();
      double sum = 0;
      for (std::size_t n = 0; n < out.elements().size(); ++n)
        sum += out.elements()[n] * d_out.elements()[n];
      return sum;
    };
    constexpr double eps = 1e-5;
    double worst = 0;
    const auto sweep = [&](tensor_buffer<double>& operand, const reference::tensor& gradient) {
      const reference::tensor values = operand.values();
      for (std::size_t n = 0; n < values.elements().size(); ++n) {
        reference::tensor moved = values;
        moved.elements()[n] += eps;
        operand.assign(moved);
        const double above = loss();
        moved.elements()[n] -= 2 * eps;
        operand.assign(moved);
        const double below = loss();
        operand.assign(values);
        worst = std::max(worst, std::abs((above - below) / (2 * eps) - gradient.elements()[n]));
      }
    };
    sweep(y.x.q, got.d_q);
    sweep(y.x.k, got.d_k);
    sweep(y.x.v, got.d_v);
    return worst;
  };
  // The third derivative times eps² / 6, and rounding / eps.
  constexpr double tolerance = 2e-9;
  CHECK(check(attn::no_mask{}, {}) < tolerance);
  CHECK(check(attn::no_mask{}, {.scale = 1.3, .softcap = 0.7, .sinks = sinks}) < tolerance);
  CHECK(check(attn::causal_mask{3} & attn::alibi_bias{slopes, 2}, {.sinks = sinks}) < tolerance);
  CHECK(check(attn::score_rule_fn(bent{}) & attn::window_mask{2, 2, 1}, {}) < tolerance);
}
