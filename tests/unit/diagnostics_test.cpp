// SPDX-License-Identifier: MIT
//
// diagnose_attention against sums over the oracle's weights, and by hand.
#include "reference/dense_attention.hpp"
#include "support/catch.hpp"
#include "support/compare.hpp"
#include "support/dense_problem.hpp"
#include "support/element.hpp"
#include "support/random.hpp"

#include <attn/attention_weights.hpp>
#include <attn/diagnostics.hpp>

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

namespace {

/// The numbers of one head from the weights of the oracle, row by row.
struct expected_head {
  index_t n_rows = 0, n_empty_rows = 0, n_nan_rows = 0, n_pairs = 0;
  double entropy = 0, flatness = 0, largest = 0, largest_of_all = 0, sink = 0;
  double below_0_01 = 0, below_uniform = 0, correlation = 0;
  std::vector<double> row_entropy, mass;
};

expected_head expect(const reference::tensor& k, const reference::tensor& weights,
                     const reference::tensor& allowed, index_t b, index_t h) {
  const index_t n_q = weights.extent(2), n_kv = weights.extent(3);
  const index_t g = h / (weights.extent(1) / k.extent(1));
  expected_head x;
  x.mass.resize(static_cast<std::size_t>(n_kv));
  std::vector<bool> seen(static_cast<std::size_t>(n_kv));
  index_t n_flat = 0;
  for (index_t i = 0; i < n_q; ++i) {
    double sum = 0, largest = 0;
    index_t n_keys = 0;
    for (index_t j = 0; j < n_kv; ++j) {
      if (allowed(b, h, i, j) == 0) continue;
      ++n_keys;
      seen[static_cast<std::size_t>(j)] = true;
      sum += weights(b, h, i, j);
      largest = std::max(largest, weights(b, h, i, j));
    }
    x.row_entropy.push_back(std::nan(""));
    if (n_keys == 0) {
      ++x.n_empty_rows;
      continue;
    }
    if (std::isnan(sum)) {
      ++x.n_nan_rows;
      continue;
    }
    double entropy = 0;
    for (index_t j = 0; j < n_kv; ++j) {
      const double p = weights(b, h, i, j);
      if (allowed(b, h, i, j) == 0) continue;
      if (p > 0) entropy -= p / sum * std::log(p / sum);
      x.mass[static_cast<std::size_t>(j)] += p;
      x.below_0_01 += p < 0.01;
      x.below_uniform += p < 1 / static_cast<double>(n_kv);
    }
    x.row_entropy.back() = entropy;
    x.entropy += entropy;
    if (n_keys > 1) x.flatness += entropy / std::log(static_cast<double>(n_keys)), ++n_flat;
    x.largest += largest;
    x.largest_of_all = std::max(x.largest_of_all, largest);
    x.sink += 1 - sum;
    x.n_pairs += n_keys;
    ++x.n_rows;
  }
  x.entropy /= static_cast<double>(x.n_rows);
  x.flatness /= static_cast<double>(n_flat);
  x.largest /= static_cast<double>(x.n_rows);
  x.sink /= static_cast<double>(x.n_rows);
  x.below_0_01 /= static_cast<double>(x.n_pairs);
  x.below_uniform /= static_cast<double>(x.n_pairs);

  // Each key that is seen: (mass, norm), then the correlation of the two.
  std::vector<std::array<double, 2>> points;
  std::array<double, 2> mean{0, 0};
  for (index_t j = 0; j < n_kv; ++j) {
    if (!seen[static_cast<std::size_t>(j)]) continue;
    double square = 0;
    for (index_t c = 0; c < k.extent(3); ++c) square += k(b, g, j, c) * k(b, g, j, c);
    points.push_back({x.mass[static_cast<std::size_t>(j)], std::sqrt(square)});
    for (std::size_t e = 0; e < 2; ++e) mean[e] += points.back()[e];
  }
  double mm = 0, rr = 0, mr = 0;
  for (const auto& [mass, norm] : points) {
    const double m = mass - mean[0] / static_cast<double>(points.size());
    const double r = norm - mean[1] / static_cast<double>(points.size());
    mm += m * m, rr += r * r, mr += m * r;
  }
  x.correlation = mr / std::sqrt(mm * rr);
  return x;
}

bool near(double got, double want, double bound) {
  return std::isnan(want) ? std::isnan(got) : std::abs(got - want) <= bound;
}

/// All heads of a call against the oracle. A weight within rounding of a threshold may fall on
/// either side: `slack` pairs may.
template <class T, class Rule = attn::no_mask>
void check(const dense_operands<T>& x, const Rule& rule = {},
           const reference::score_rule& oracle_rule = {}, const attn::dense_options& options = {}) {
  const dense_problem& p = x.problem;
  CAPTURE(p);
  reference::dense_options oracle_options{.scale = options.scale, .softcap = options.softcap};
  for (const float s : options.sinks) oracle_options.sinks.push_back(s);
  const reference::tensor weights = x.expected(oracle_rule, oracle_options).weights;
  reference::tensor allowed(p.score_extents());
  for (index_t b = 0; b < p.n_batch; ++b)
    for (index_t h = 0; h < p.n_heads; ++h)
      for (index_t i = 0; i < p.n_q; ++i)
        for (index_t j = 0; j < p.n_kv; ++j)
          allowed(b, h, i, j) = oracle_rule.apply(0, b, h, i, j) != reference::forbidden;

  const attn::attention_diagnostics d =
      attn::diagnose_attention(x.q.view(), x.k.view(), rule, options);
  REQUIRE(d.heads.size() == static_cast<std::size_t>(p.n_batch * p.n_heads));
  const double bound = 1e3 * attn_test::arithmetic_epsilon<T>;
  for (index_t b = 0; b < p.n_batch; ++b) {
    for (index_t h = 0; h < p.n_heads; ++h) {
      CAPTURE(b, h);
      const expected_head e = expect(x.k.values(), weights, allowed, b, h);
      const attn::head_diagnostics& got = d(b, h);
      CHECK(got.batch == b);
      CHECK(got.head == h);
      CHECK(got.n_rows == e.n_rows);
      CHECK(got.n_empty_rows == e.n_empty_rows);
      CHECK(got.n_nan_rows == e.n_nan_rows);
      CHECK(got.n_pairs == e.n_pairs);
      CHECK(near(got.mean_entropy, e.entropy, bound));
      CHECK(near(got.mean_flatness, e.flatness, bound));
      CHECK(near(got.mean_largest_weight, e.largest, bound));
      CHECK(near(got.mean_sink_weight, e.sink, bound));
      CHECK(near(got.mass_norm_correlation, e.correlation, bound));
      if (e.n_rows > 0) CHECK(near(got.largest_weight, e.largest_of_all, bound));
      const double slack = 3 / static_cast<double>(e.n_pairs);
      CHECK(near(got.share_below_0_01, e.below_0_01, slack));
      CHECK(near(got.share_below_uniform, e.below_uniform, slack));
      for (index_t i = 0; i < p.n_q; ++i) {
        CHECK(near(d.per_row(d.row_entropy)(b, h, i, 0), e.row_entropy[static_cast<std::size_t>(i)],
                   bound));
      }
      for (index_t j = 0; j < p.n_kv; ++j) {
        CHECK(near(d.per_key(d.key_mass)(b, h, j, 0), e.mass[static_cast<std::size_t>(j)],
                   bound * static_cast<double>(p.n_q)));
      }
    }
  }
}

}  // namespace

TEMPLATE_TEST_CASE("Diagnostics are sums over the weights", "", float, double, Eigen::half,
                   Eigen::bfloat16) {
  const index_t n_q = GENERATE(1, 23, 49, 100);
  const index_t n_kv = GENERATE(2, 40, 129, 260);
  check(dense_operands<TestType>({.n_batch = 2,
                                  .n_heads = 4,
                                  .n_kv_heads = 2,
                                  .n_q = n_q,
                                  .n_kv = n_kv,
                                  .d_qk = 12,
                                  .d_v = 1,
                                  .deviation = 2}));
}

TEMPLATE_TEST_CASE("Diagnostics under rules, softcap and sinks", "", float, double) {
  const layout in = GENERATE(layout::contiguous, layout::column_major, layout::heads_interleaved);
  const dense_operands<TestType> x({.n_batch = 2,
                                    .n_heads = 2,
                                    .n_kv_heads = 2,
                                    .n_q = 60,
                                    .n_kv = 150,
                                    .d_qk = 12,
                                    .d_v = 1,
                                    .inputs = in,
                                    .deviation = 2});
  const std::vector<index_t> lengths{0, 133};
  check(x, attn::causal_mask{.offset = -5}, reference::causal_mask(-5));
  check(x, attn::key_lengths{lengths}, reference::key_lengths(lengths));
  check(x, attn::window_mask{.left = 0, .right = 0}, reference::window_mask(0, 0));
  const auto odd = [](auto s, index_t, index_t, index_t, index_t j) {
    return j % 2 == 0 ? -std::numeric_limits<decltype(s)>::infinity() : s;
  };
  check(x, attn::score_rule_fn(odd), reference::score_rule_fn(odd));
  const std::array<float, 2> sinks{2, -1};
  check(x, attn::no_mask{}, {}, {.scale = 0.5, .softcap = 3, .sinks = sinks});
}

TEST_CASE("NaN rows are counted and left out; forbidden keys are not looked at") {
  dense_operands<float> x({.n_q = 60, .n_kv = 70, .d_qk = 5, .d_v = 1});
  x.q.view()(0, 0, 7, 2) = NAN;
  x.k.view()(0, 0, 50, 1) = NAN;
  // Rows from 50 on see key 50; row 7 is NaN itself.
  SECTION("causal") { check(x, attn::causal_mask{}, reference::causal_mask()); }
  SECTION("every row is NaN") {
    const auto d = attn::diagnose_attention(x.q.view(), x.k.view());
    CHECK(d.total.n_nan_rows == 60);
    CHECK(d.total.n_rows == 0);
    CHECK(std::isnan(d.total.mean_entropy));
    CHECK(std::isnan(d.total.mass_norm_correlation));
  }
  SECTION("keys past the length") {
    const std::vector<index_t> lengths{50};
    check(x, attn::key_lengths{lengths}, reference::key_lengths(lengths));
    const auto d = attn::diagnose_attention(x.q.view(), x.k.view(), attn::key_lengths{lengths});
    CHECK(std::isfinite(d.total.mass_norm_correlation));
  }
}

TEST_CASE("Equal scores: entropy ln n, flatness 1, no weight below 1/n") {
  const int n = GENERATE(2, 3, 7, 10, 33, 64, 1025);
  CAPTURE(n);
  const Eigen::MatrixXf q = Eigen::MatrixXf::Zero(5, 3), k = Eigen::MatrixXf::Ones(n, 3);
  const attn::attention_diagnostics d = attn::diagnose_attention(q, k);
  CHECK(std::abs(d.total.mean_entropy - std::log(n)) < 1e-12);
  CHECK(d.total.mean_flatness == 1);
  CHECK(d.total.largest_weight == 1.0 / n);
  CHECK(d.total.share_below_uniform == 0);
  CHECK(d.total.share_below_0_01 == (n > 100 ? 1 : 0));
  for (const double mass : d.key_mass) CHECK(std::abs(mass - 5.0 / n) < 1e-5 / n);
  // Keys of one length: nothing to correlate with.
  CHECK(std::isnan(d.total.mass_norm_correlation));
}

TEST_CASE("One key far above the others: entropy 0, flatness 0") {
  Eigen::MatrixXf q = Eigen::MatrixXf::Ones(3, 1), k = Eigen::MatrixXf::Constant(8, 1, -500);
  k(5, 0) = 500;
  const attn::attention_diagnostics d = attn::diagnose_attention(q, k);
  CHECK(d.total.mean_entropy == 0);
  CHECK(d.total.mean_flatness == 0);
  CHECK(d.total.mean_largest_weight == 1);
  CHECK(d.total.share_below_0_01 == 7.0 / 8);
  CHECK(d.total.share_below_uniform == 7.0 / 8);
  CHECK(d.key_mass == std::vector<double>{0, 0, 0, 0, 0, 3, 0, 0});
}

TEST_CASE("A long key draws every query") {
  // Queries that share a direction, keys along it of lengths 1 to 20: mass grows with the norm.
  attn_test::random_source random(3);
  Eigen::MatrixXf q(50, 4), k(20, 4);
  for (float& e : q.reshaped()) e = static_cast<float>(1 + 0.1 * random.normal());
  for (int j = 0; j < 20; ++j) k.row(j).setConstant(0.05f * static_cast<float>(j + 1));
  CHECK(attn::diagnose_attention(q, k).total.mass_norm_correlation > 0.95);
  // The same lengths, directions against the queries: mass falls with the norm.
  const Eigen::MatrixXf away = -k;
  CHECK(attn::diagnose_attention(q, away).total.mass_norm_correlation < -0.95);
}

TEST_CASE("The total is over all rows and pairs") {
  const dense_operands<float> x({.n_batch = 2,
                                 .n_heads = 2,
                                 .n_kv_heads = 1,
                                 .n_q = 30,
                                 .n_kv = 40,
                                 .d_qk = 6,
                                 .d_v = 1,
                                 .deviation = 3});
  const std::vector<index_t> lengths{10, 40};
  const auto d = attn::diagnose_attention(x.q.view(), x.k.view(), attn::key_lengths{lengths});
  double entropy = 0, below = 0, correlation = 0;
  for (const attn::head_diagnostics& head : d.heads) {
    entropy += head.mean_entropy / 4;
    below += head.share_below_0_01 * static_cast<double>(head.n_pairs);
    correlation += head.mass_norm_correlation / 4;
  }
  CHECK(d.total.head == -1);
  CHECK(d.total.n_rows == 120);
  CHECK(d.total.n_pairs == 2 * 30 * 10 + 2 * 30 * 40);
  CHECK(std::abs(d.total.mean_entropy - entropy) < 1e-12);
  CHECK(std::abs(d.total.share_below_0_01 - below / static_cast<double>(d.total.n_pairs)) < 1e-12);
  CHECK(std::abs(d.total.mass_norm_correlation - correlation) < 1e-12);
}

TEST_CASE("The number of threads changes nothing") {
  const dense_operands<float> x(
      {.n_batch = 3, .n_heads = 3, .n_kv_heads = 3, .n_q = 70, .n_kv = 90, .d_qk = 8, .d_v = 1});
  const auto one = attn::diagnose_attention(x.q.view(), x.k.view(), attn::causal_mask{});
  attn::context ctx(4);
  const auto four = attn::diagnose_attention(x.q.view(), x.k.view(), attn::causal_mask{}, {}, ctx);
  CHECK(one.key_mass == four.key_mass);
  CHECK(one.row_entropy == four.row_entropy);
  CHECK(one.total.mean_entropy == four.total.mean_entropy);
}

TEST_CASE("Zero lengths") {
  const Eigen::MatrixXf q = Eigen::MatrixXf::Ones(3, 2), none(0, 2);
  const auto no_keys = attn::diagnose_attention(q, none);
  CHECK(no_keys.total.n_empty_rows == 3);
  CHECK(std::isnan(no_keys.total.mean_entropy));
  const auto no_rows = attn::diagnose_attention(none, q);
  CHECK(no_rows.total.n_rows == 0);
  CHECK(no_rows.key_mass == std::vector<double>(3));
}

TEST_CASE("The table has a line per head and one for all") {
  const Eigen::MatrixXf q = Eigen::MatrixXf::Zero(5, 3), k = Eigen::MatrixXf::Ones(4, 3);
  CHECK(attn::to_table(attn::diagnose_attention(q, k)) ==
        "batch head   rows  entropy flatness  largest corr(mass, |k|)  < 0.01   < 1/n\n"
        "    0    0      5   1.3863   1.0000   0.2500               -  0.0000  0.0000\n"
        " all heads      5   1.3863   1.0000   0.2500               -  0.0000  0.0000\n");
}

TEST_CASE("Shapes that do not fit") {
  const Eigen::MatrixXf q = Eigen::MatrixXf::Ones(3, 2), k = Eigen::MatrixXf::Ones(3, 4);
  std::string message;
  try {
    (void)attn::diagnose_attention(q, k);
  } catch (const attn::shape_error& e) {
    message = e.what();
  }
  CHECK(message == "diagnose_attention: k is [1, 1, 3, 4], expected dim 2 (d_qk of q)");
}
