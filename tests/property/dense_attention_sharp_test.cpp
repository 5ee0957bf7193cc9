// SPDX-License-Identifier: MIT
//
// Scores that are no easy bell curve: sharp, one-hot, growing for ever, far from 0, parallel; and
// values whose size would overflow if a weight ever were above 1.
#include "support/catch.hpp"
#include "support/dense_call.hpp"
#include "support/rule_operands.hpp"

#include <cmath>
#include <limits>
#include <vector>

using namespace attn_test;

namespace {

/// Scores f(i, j), made of d_qk = 2 channels that do not cancel: q = (a_i, 1), k = (b_j, c_j).
template <class T>
struct score_table {
  dense_operands<T> x;

  template <class A, class B, class C>
  score_table(index_t n_q, index_t n_kv, A a, B b, C c)
      : x({.n_q = n_q, .n_kv = n_kv, .d_qk = 2, .d_v = 7}) {
    reference::tensor q({1, 1, n_q, 2}, 1), k({1, 1, n_kv, 2});
    for (index_t i = 0; i < n_q; ++i) q(0, 0, i, 0) = a(static_cast<double>(i));
    for (index_t j = 0; j < n_kv; ++j) {
      k(0, 0, j, 0) = b(static_cast<double>(j));
      k(0, 0, j, 1) = c(static_cast<double>(j));
    }
    x.q.assign(q);
    x.k.assign(k);
  }
};

const std::vector<std::pair<index_t, index_t>> shapes = {{1, 7}, {1, 700}, {3, 300}, {60, 700}};

double zero(double) { return 0; }

}  // namespace

TEMPLATE_TEST_CASE("Random scores from flat to one-hot", "", float, double, Eigen::bfloat16) {
  const double deviation = GENERATE(0.0, 0.01, 5.0, 60.0, 1e3, 1e5);
  CAPTURE(deviation);
  for (const auto& [n_q, n_kv] : shapes)
    for (const index_t d : {3, 64}) {
      const dense_problem p{.n_q = n_q, .n_kv = n_kv, .d_qk = d, .d_v = 9, .deviation = deviation};
      INFO(p);
      CHECK(check_dense<TestType>(p));
      CHECK(check_dense<TestType>(p, attn::causal_mask{.offset = n_kv - n_q},
                                  reference::causal_mask(n_kv - n_q)));
    }
}

TEMPLATE_TEST_CASE("Scores that grow, fall, or jump along the keys, steeper row by row", "", float,
                   double) {
  for (const auto& [n_q, n_kv] : shapes)
    for (const double slope : {0.01, 0.3, 3.0, 100.0, -0.3, -3.0, -100.0}) {
      CAPTURE(n_q, n_kv, slope);
      const auto row = [](double i) { return 1 + i / 16; };
      score_table<TestType> line(
          n_q, n_kv, row, [=](double j) { return slope * j; }, zero);
      CHECK(check_dense(line.x));
      score_table<TestType> step(
          n_q, n_kv, row, [=](double j) { return j < 130 ? 0 : 20 * slope; }, zero);
      CHECK(check_dense(step.x));
      score_table<TestType> saw(
          n_q, n_kv, row, [=](double j) { return slope * std::fmod(7 * j, 150); }, zero);
      CHECK(check_dense(saw.x));
    }
}

TEMPLATE_TEST_CASE("All scores far from 0", "", float, double) {
  for (const auto& [n_q, n_kv] : shapes)
    for (const double level : {-2e4, -200.0, -88.0, 88.0, 200.0, 2e4, -1e30, 1e30}) {
      CAPTURE(n_q, n_kv, level);
      score_table<TestType> flat(n_q, n_kv, zero, zero, [=](double) { return level; });
      CHECK(check_dense(flat.x));
      CHECK(check_dense(flat.x, attn::causal_mask{.offset = -1}, reference::causal_mask(-1)));
    }
}

TEMPLATE_TEST_CASE("Scores that grow for ever but stay below 0, and end within a group of keys", "",
                   float, double) {
  // A key that does not exist must not come in with a score of 0 when a block is redone.
  for (const auto& [n_q, n_kv] : shapes)
    for (const double slope : {0.5, 3.0}) {
      CAPTURE(n_q, n_kv, slope);
      const double end = static_cast<double>(n_kv) + 40;
      score_table<TestType> line(n_q, n_kv, zero, zero,
                                 [=](double j) { return slope * (j - end); });
      CHECK(check_dense(line.x));
      for (const index_t offset : {-1, 2, 61, 126, 300})
        CHECK(check_dense(line.x, attn::causal_mask{.offset = offset},
                          reference::causal_mask(offset)));
      for (const index_t length : {n_kv - 1, n_kv - 3, n_kv / 2}) {
        const std::vector<index_t> lengths = {length};
        CHECK(check_dense(line.x, attn::key_lengths{lengths}, reference::key_lengths(lengths)));
      }
    }
}

TEMPLATE_TEST_CASE("Equal scores share equally, however large they are", "", float, double) {
  // The bound of the tolerance says nothing here: eps · 1e30 is no small number. But a softmax
  // that subtracts the largest score from equal ones is exact.
  for (const auto& [n_q, n_kv] : shapes)
    for (const double level : {-1e30, -3e18, -7e6, 7e6, 2e18, 1e30}) {
      CAPTURE(n_q, n_kv, level);
      score_table<TestType> flat(n_q, n_kv, zero, zero, [=](double) { return level; });
      auto expected = flat.x.expected();
      attend(flat.x);
      CHECK(compare_within(flat.x.out.values(), expected.out, 0.01));
    }
}

TEMPLATE_TEST_CASE("One key towers over the others, wherever it is", "", float, double) {
  for (const auto& [n_q, n_kv] : shapes)
    for (const index_t at : {index_t{0}, index_t{6}, n_kv / 2, n_kv - 1})
      for (const double height : {50.0, 1000.0, 1e18, 1e37}) {
        CAPTURE(n_q, n_kv, at, height);
        score_table<TestType> x(
            n_q, n_kv, [](double) { return 1; },
            [&](double j) { return j == static_cast<double>(at) ? height : 0; }, zero);
        CHECK(check_dense(x.x));
      }
}

TEST_CASE("Weights down to nothing: −50 to −110 in steps, and far beyond") {
  // Key 0 has score 0 and value 0, key 1 the score in question and value 1: out is its weight.
  const index_t n_q = GENERATE(values<index_t>({1, 40}));
  double before = 1;
  index_t wrong = 0;
  for (double s = -50; s > -110; s -= 0.25) {
    dense_operands<float> x({.n_q = n_q, .n_kv = 2, .d_qk = 1, .d_v = 1});
    reference::tensor k({1, 1, 2, 1}), v({1, 1, 2, 1});
    k(0, 0, 1, 0) = s;
    v(0, 0, 1, 0) = 1;
    x.q.assign(reference::tensor({1, 1, n_q, 1}, 1));
    x.k.assign(k);
    x.v.assign(v);
    attend(x, attn::no_mask{}, {.scale = 1.0});
    const double w = x.out.view()(0, 0, n_q - 1, 0);
    const double exact = std::exp(static_cast<double>(static_cast<float>(s)));
    wrong += !(w >= 0 && w <= before && std::abs(w - exact) <= 1e-4 * exact + 1.2e-38);
    before = w;
  }
  CHECK(wrong == 0);
}

TEMPLATE_TEST_CASE("Huge values stay finite, tiny ones stay: no weight is ever above 1", "", float,
                   double) {
  // The mean of values of one size has that size, whatever the scores do on the way.
  const double size = GENERATE(1e30, 1e-30);
  const double slope = GENERATE(0.0, 0.05, 0.1, 0.3, 1.0, -0.3);
  for (const auto& [n_q, n_kv] : shapes) {
    CAPTURE(size, slope, n_q, n_kv);
    score_table<TestType> line(
        n_q, n_kv, [](double i) { return 1 + i / 64; }, [=](double j) { return slope * j; }, zero);
    line.x.v.assign(uniform_tensor(line.x.problem.v_extents(), 4, 0.5 * size, size));
    CHECK(check_dense(line.x));

    // Rows whose first keys are masked, all others at −30: no sentinel stands in for a maximum.
    score_table<TestType> low(n_q, n_kv, zero, zero, [](double) { return -30; });
    low.x.v.assign(uniform_tensor(low.x.problem.v_extents(), 5, 0.5 * size, size));
    CHECK(check_dense(low.x, attn::window_mask{.left = 0, .offset = 5},
                      reference::window_mask(0, reference::unlimited, 5)));
  }
}

TEMPLATE_TEST_CASE("Parallel queries and keys: rounding that does not average out", "", float,
                   double) {
  // Σ|q||k| is the score itself; its rounding grows with d instead of √d.
  for (const index_t d : {64, 256, 1024})
    for (const auto& [n_q, n_kv] : shapes) {
      CAPTURE(d, n_q, n_kv);
      dense_operands<TestType> x({.n_q = n_q, .n_kv = n_kv, .d_qk = d, .d_v = 5});
      x.q.assign(uniform_tensor(x.problem.q_extents(), 1, 0.5, 1));
      x.k.assign(uniform_tensor(x.problem.k_extents(), 2, 0.5, 1));
      CHECK(check_dense(x));
    }
}
