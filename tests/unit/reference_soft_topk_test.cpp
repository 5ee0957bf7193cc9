// SPDX-License-Identifier: MIT
//
// The oracle of soft top-k against values worked out by hand, and its gradients against finite
// differences.
#include "reference/soft_topk.hpp"
#include "support/catch.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"

#include <cmath>
#include <initializer_list>

using namespace reference;
using attn_test::compare_within;
using attn_test::normal_tensor;
using attn_test::uniform_tensor;

namespace {

tensor column(std::initializer_list<double> values) {
  tensor t({1, 1, static_cast<index_t>(values.size()), 1});
  t.elements().assign(values);
  return t;
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

}  // namespace

TEST_CASE("Shares of a match, published for the authors' code") {
  const auto share = [](double v, double other) {
    return static_cast<double>(topk_share(v, other, topk_boost::exponential, 20));
  };
  // Facts of the released operator, three digits.
  CHECK(std::abs(share(0.75, 0.25) - 0.9994) < 5e-5);
  CHECK(std::abs(share(0.60, 0.40) - 0.938) < 5e-4);
  CHECK(std::abs(share(0.55, 0.45) - 0.793) < 5e-4);
  CHECK(std::abs(share(1.00, 0.90) - 0.994) < 5e-4);
  // softmax(C x, C y), C = 20.
  const auto scaled = [](double v, double other) {
    return static_cast<double>(topk_share(v, other, topk_boost::scaled, 20));
  };
  CHECK(std::abs(scaled(0.60, 0.40) - 0.982) < 5e-4);
  CHECK(std::abs(scaled(0.55, 0.45) - 0.881) < 5e-4);
}

TEST_CASE("Four sources, two slots: the best meets the worst") {
  // Ranks: position 2 (.9), 0 (.7), 3 (.4), 1 (.1). Matches 2-1 and 0-3; by position 0-3 comes
  // first.
  const soft_topk_result r = soft_topk(column({1, 2, 3, 4}), column({0.7, 0.1, 0.9, 0.4}), 2);
  const double a = sigmoid(std::pow(20, 0.7) - std::pow(20, 0.4));
  const double b = sigmoid(std::pow(20, 0.9) - std::pow(20, 0.1));
  CHECK(compare_within(r.champions, column({0, 2}), 0));
  CHECK(compare_within(r.pooled, column({a * 1 + (1 - a) * 4, b * 3 + (1 - b) * 2}), 1e-14));
  CHECK(compare_within(r.pooled_scores, column({a * 0.7 + (1 - a) * 0.4, b * 0.9 + (1 - b) * 0.1}),
                       1e-14));
  tensor weights({1, 1, 2, 4});
  weights.elements() = {a, 0, 0, 1 - a, 0, 1 - b, b, 0};
  CHECK(compare_within(r.weights, weights, 1e-14));

  const soft_topk_result by_rank = soft_topk(column({1, 2, 3, 4}), column({0.7, 0.1, 0.9, 0.4}), 2,
                                             {.order = topk_order::by_rank});
  CHECK(compare_within(by_rank.champions, column({2, 0}), 0));
}

TEST_CASE("Byes: of five sources for three slots, the best goes through") {
  // m = 5, m' = 3: one bye, matches rank 2 - rank 5 and rank 3 - rank 4.
  const soft_topk_result r = soft_topk(column({1, 2, 3, 4, 5}), column({0.1, 0.2, 0.3, 0.4, 0.5}),
                                       3, {.boost = topk_boost::scaled, .strength = 1});
  CHECK(compare_within(r.champions, column({2, 3, 4}), 0));
  const double a = sigmoid(0.3 - 0.2), b = sigmoid(0.4 - 0.1);
  CHECK(compare_within(r.pooled, column({a * 3 + (1 - a) * 2, b * 4 + (1 - b) * 1, 5}), 1e-14));
}

TEST_CASE("Without sorting the position is the rank") {
  const soft_topk_result r =
      soft_topk(column({1, 2, 3, 4}), column({0, 1, 0, 1}), 2,
                {.boost = topk_boost::scaled, .strength = 2, .sort = topk_sort::never});
  CHECK(compare_within(r.champions, column({0, 1}), 0));
  CHECK(compare_within(r.pooled,
                       column({sigmoid(-2) * 1 + sigmoid(2) * 4, sigmoid(2) * 2 + sigmoid(-2) * 3}),
                       1e-14));
}

TEST_CASE("The oracle's gradients agree with finite differences") {
  const index_t n = GENERATE(4, 7, 12, 16);
  const auto boost = GENERATE(topk_boost::exponential, topk_boost::scaled);
  const auto sort = GENERATE(topk_sort::every_round, topk_sort::once, topk_sort::never);
  const index_t k = 2, d = 3;
  const soft_topk_options options{.boost = boost, .strength = 5, .sort = sort};
  const tensor x = normal_tensor({1, 1, n, d}, 1), scores = uniform_tensor({1, 1, n, 1}, 2, 0, 1);
  const tensor g = normal_tensor({1, 1, k, d}, 3), gs = normal_tensor({1, 1, k, 1}, 4);
  const auto loss = [&](const tensor& at, const tensor& v) {
    const soft_topk_result r = soft_topk(at, v, k, options);
    double sum = 0;
    for (std::size_t e = 0; e < g.elements().size(); ++e)
      sum += g.elements()[e] * r.pooled.elements()[e];
    for (std::size_t e = 0; e < gs.elements().size(); ++e)
      sum += gs.elements()[e] * r.pooled_scores.elements()[e];
    return sum;
  };
  const soft_topk_gradients exact = soft_topk_backward(x, scores, k, g, gs, options);
  const double step = 1e-5;
  for (std::size_t e = 0; e < x.elements().size(); ++e) {
    tensor up = x, down = x;
    up.elements()[e] += step, down.elements()[e] -= step;
    const double numeric = (loss(up, scores) - loss(down, scores)) / (2 * step);
    CHECK(std::abs(numeric - exact.d_x.elements()[e]) < 1e-8);
  }
  for (std::size_t e = 0; e < scores.elements().size(); ++e) {
    tensor up = scores, down = scores;
    up.elements()[e] += step, down.elements()[e] -= step;
    const double numeric = (loss(x, up) - loss(x, down)) / (2 * step);
    CHECK(std::abs(numeric - exact.d_scores.elements()[e]) < 1e-7);
  }
}
