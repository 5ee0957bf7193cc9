// SPDX-License-Identifier: MIT
#include "reference/topk_baselines.hpp"
#include "support/allocation_counter.hpp"
#include "support/catch.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"
#include "support/tensor_buffer.hpp"

#include <attn/topk_baselines.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

using namespace attn_test;
using attn::context;
using reference::tensor;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();

tensor column(std::vector<double> values) {
  tensor t({1, 1, static_cast<index_t>(values.size()), 1});
  t.elements() = std::move(values);
  return t;
}

/// Operands surrounded by canaries.
template <class T>
struct operands {
  tensor_buffer<T> x, pooled;
  tensor_buffer<double> scores, pooled_scores;

  operands(index_t n_batch, index_t n_heads, index_t n, index_t k, index_t d, layout l)
      : x({n_batch, n_heads, n, d}, l, quiet_nan<T>()),
        pooled({n_batch, n_heads, k, d}, l, quiet_nan<T>()),
        scores({n_batch, n_heads, n, 1}, l, nan_value),
        pooled_scores({n_batch, n_heads, k, 1}, l, nan_value) {
    x.assign(normal_tensor({n_batch, n_heads, n, d}, 1));
    scores.assign(uniform_tensor({n_batch, n_heads, n, 1}, 2, 0, 1));
  }
  bool canaries_alive() const { return pooled.canaries_alive() && pooled_scores.canaries_alive(); }
};

layout plain_layout(int i) { return plain_layouts[static_cast<std::size_t>(i)]; }

}  // namespace

TEST_CASE("hard_topk: indices of special scores") {
  const std::vector<double> scores{nan_value, infinity, infinity, 3, infinity};
  const auto call = [&](index_t k, attn::topk_order order) {
    std::vector<index_t> indices(static_cast<std::size_t>(k));
    attn::hard_topk(attn::bhld(scores.data(), 1, 1, 5, 1), attn::bhld(indices.data(), 1, 1, k, 1),
                    {.order = order});
    return indices;
  };
  CHECK(call(1, attn::topk_order::by_rank) == std::vector<index_t>{1});
  CHECK(call(4, attn::topk_order::by_rank) == std::vector<index_t>{1, 2, 4, 3});
  CHECK(call(4, attn::topk_order::by_position) == std::vector<index_t>{1, 2, 3, 4});
  CHECK(call(5, attn::topk_order::by_rank) == std::vector<index_t>{1, 2, 4, 3, 0});
}

TEST_CASE("hard_topk is a stable sort at every size") {
  const index_t n = GENERATE(1, 2, 15, 16, 17, 64, 1000, 20000, 500000);
  random_source random(static_cast<std::uint64_t>(n));
  tensor scores({1, 1, n, 1});
  const bool ties = GENERATE(false, true);
  for (double& v : scores.elements()) {
    v = ties ? static_cast<double>(random.integer(0, 5)) : random.normal();
    if (random.coin(0.05)) v = nan_value;
  }
  tensor_buffer<double> buffer(scores.extents(), layout::padded_by_one, nan_value);
  buffer.assign(scores);
  for (const index_t k : {index_t{1}, (n + 1) / 2, n}) {
    CAPTURE(n, k);
    std::vector<index_t> indices(static_cast<std::size_t>(k));
    attn::hard_topk(buffer.view(), attn::bhld(indices.data(), 1, 1, k, 1),
                    {.order = attn::topk_order::by_rank});
    const tensor expected = reference::hard_topk_ranks(scores, k);
    index_t wrong = 0;
    for (std::size_t r = 0; r < indices.size(); ++r)
      wrong += static_cast<double>(indices[r]) != expected.elements()[r];
    CHECK(wrong == 0);
  }
}

TEST_CASE("hard_topk of many rows: indices are in range, all different, each row its own") {
  const index_t rows = 24, n = 64, k = GENERATE(1, 33, 64);
  const tensor scores = uniform_tensor({4, rows / 4, n, 1}, 5, 0, 1);
  std::vector<index_t> indices(static_cast<std::size_t>(rows * k));
  attn::hard_topk(attn::bhld(scores.elements().data(), 4, rows / 4, n, 1),
                  attn::bhld(indices.data(), 4, rows / 4, k, 1));
  for (index_t r = 0; r < rows; ++r) {
    const auto row = indices.begin() + r * k;
    CHECK(std::adjacent_find(row, row + k, std::greater_equal<>()) == row + k);
    CHECK(*row >= 0);
    CHECK(row[k - 1] < n);
    std::vector<index_t> alone(static_cast<std::size_t>(k));
    attn::hard_topk(attn::bhld(scores.elements().data() + r * n, 1, 1, n, 1),
                    attn::bhld(alone.data(), 1, 1, k, 1));
    CHECK(std::equal(alone.begin(), alone.end(), row));
  }
}

TEMPLATE_TEST_CASE("hard_topk copies rows in their order", "", float, double, Eigen::half,
                   Eigen::bfloat16) {
  const layout l = plain_layout(GENERATE(0, 1, 2, 3, 4, 5, 6));
  const std::vector<index_t> lengths{6, 13};
  operands<TestType> o(2, 3, 13, 5, 7, l);
  attn::hard_topk(o.x.view(), o.scores.view(), o.pooled.view(), o.pooled_scores.view(),
                  {.lengths = lengths});
  const auto expected = reference::hard_topk(o.x.values(), o.scores.values(), 5, lengths);
  CHECK(compare_bits(o.pooled.values(), expected.pooled));
  CHECK(compare_bits(o.pooled_scores.values(), expected.pooled_scores));
  CHECK(o.canaries_alive());
}

TEMPLATE_TEST_CASE("iterative_topk against the oracle", "", float, double, Eigen::half,
                   Eigen::bfloat16) {
  const layout l = plain_layout(GENERATE(0, 1, 2, 3, 4, 5, 6));
  const double alpha = GENERATE(1.0, 100.0, 1e6);
  const std::vector<index_t> lengths{6, 21};
  for (const index_t d : {1, 5, 16, 33}) {
    CAPTURE(alpha, d);
    operands<TestType> o(2, 2, 21, 6, d, l);
    attn::iterative_topk(o.x.view(), o.scores.view(), o.pooled.view(), o.pooled_scores.view(),
                         {.alpha = alpha, .lengths = lengths});
    const auto expected =
        reference::iterative_topk(o.x.values(), o.scores.values(), 6, alpha, lengths);
    const double bound = 100 * arithmetic_epsilon<TestType> + 4 * storage_rounding<TestType>();
    CHECK(compare_within(o.pooled.values(), expected.pooled, bound));
    CHECK(compare_within(o.pooled_scores.values(), expected.pooled_scores, 1e-12));
    CHECK(o.canaries_alive());
  }
}

TEST_CASE("iterative_topk of scores that are not there") {
  operands<double> o(1, 1, 5, 5, 2, layout::contiguous);
  o.scores.assign(column({-infinity, 2, nan_value, 1, -infinity}));
  attn::iterative_topk(o.x.view(), o.scores.view(), o.pooled.view(), o.pooled_scores.view());
  const auto expected = reference::iterative_topk(o.x.values(), o.scores.values(), 5, 1);
  CHECK(compare_within(o.pooled.values(), expected.pooled, 1e-14));
  CHECK(compare_within(o.pooled_scores.values(), expected.pooled_scores, 1e-14));
  for (const double p : expected.pooled.elements()) CHECK(std::isfinite(p));

  // Rows of weight 0 are not read.
  tensor x = o.x.values();
  for (const index_t i : {0, 2, 4})
    for (index_t c = 0; c < 2; ++c) x(0, 0, i, c) = nan_value;
  o.x.assign(x);
  tensor_buffer<double> pooled({1, 1, 2, 2}, layout::contiguous, nan_value);
  tensor_buffer<double> pooled_scores({1, 1, 2, 1}, layout::contiguous, nan_value);
  attn::iterative_topk(o.x.view(), o.scores.view(), pooled.view(), pooled_scores.view());
  const tensor finite = pooled.values();
  for (const double p : finite.elements()) CHECK(std::isfinite(p));
}

TEST_CASE("With a large alpha iterative_topk is hard top-k by rank") {
  operands<double> o(1, 1, 40, 7, 3, layout::contiguous);
  attn::iterative_topk(o.x.view(), o.scores.view(), o.pooled.view(), o.pooled_scores.view(),
                       {.alpha = 1e12});
  const tensor soft = o.pooled.values();
  attn::hard_topk(o.x.view(), o.scores.view(), o.pooled.view(), o.pooled_scores.view(),
                  {.order = attn::topk_order::by_rank});
  CHECK(compare_within(soft, o.pooled.values(), 1e-12));
}

TEMPLATE_TEST_CASE("chamfer_cosine_similarity against the oracle", "", float, double, Eigen::half) {
  const layout l = plain_layout(GENERATE(0, 2, 5, 6));
  for (const index_t k : {1, 31, 33, 70}) {
    for (const index_t m : {1, 32, 65}) {
      tensor_buffer<TestType> y({2, 3, k, 9}, l, quiet_nan<TestType>());
      tensor_buffer<TestType> z({2, 3, m, 9}, l, quiet_nan<TestType>());
      y.assign(normal_tensor({2, 3, k, 9}, 1));
      z.assign(normal_tensor({2, 3, m, 9}, 2));
      const double expected = reference::chamfer_cosine_similarity(y.values(), z.values());
      const double got = attn::chamfer_cosine_similarity(y.view(), z.view());
      CHECK(std::abs(got - expected) < 32 * arithmetic_epsilon<TestType>);
    }
  }
}

TEST_CASE("nCCS by hand: 1 for a permutation, scale does not matter, zero rows and NaN") {
  const std::vector<double> y{1, 0, 0, 2}, scaled{0, 1e200, 1e-200, 0}, zero(4), diagonal{1, 1};
  const auto rows = [](const std::vector<double>& x) {
    return attn::bhld(x.data(), 1, 1, static_cast<index_t>(x.size()) / 2, 2);
  };
  CHECK(attn::chamfer_cosine_similarity(rows(y), rows(scaled)) == Approx(1).epsilon(1e-14));
  CHECK(attn::chamfer_cosine_similarity(rows(y), rows(zero)) == 0);
  CHECK(attn::chamfer_cosine_similarity(rows(y), rows(diagonal)) ==
        Approx(std::sqrt(0.5)).epsilon(1e-14));
  const std::vector<double> bad{nan_value, 0};
  CHECK(std::isnan(attn::chamfer_cosine_similarity(rows(bad), rows(y))));
}

TEST_CASE("Threads change no bit of the baselines; repeated calls do not allocate") {
  context ctx(GENERATE(1, 3));
  operands<float> o(3, 2, 50, 9, 11, layout::contiguous);
  const auto run = [&](context& c) {
    attn::iterative_topk(o.x.view(), o.scores.view(), o.pooled.view(), o.pooled_scores.view(), {},
                         c);
  };
  run(ctx);
  const tensor threaded = o.pooled.values();
  if (ctx.n_threads() == 1) {
    const allocation_counter allocations;
    run(ctx);
    attn::hard_topk(o.x.view(), o.scores.view(), o.pooled.view(), o.pooled_scores.view(), {}, ctx);
    CHECK(allocations.count() == 0);
  }
  context serial(1);
  run(serial);
  CHECK(compare_bits(threaded, o.pooled.values()));
}
