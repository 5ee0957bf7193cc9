// SPDX-License-Identifier: MIT
//
// Tournament, its application and its gradients against the oracle; special scores; memory.
#include "reference/soft_topk.hpp"
#include "support/allocation_counter.hpp"
#include "support/catch.hpp"
#include "support/compare.hpp"
#include "support/element.hpp"
#include "support/guarded_memory.hpp"
#include "support/random.hpp"
#include "support/tensor_buffer.hpp"

#include <attn/soft_topk.hpp>

#include <cmath>
#include <limits>
#include <vector>

using namespace attn_test;
using attn::context;
using attn::soft_topk_options;
using attn::tournament;
using reference::tensor;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
// d = B^v_i − B^v_j of up to 20 has an error of a few ulp of 20, which all rounds add up.
constexpr double weight_bound = 1e-13;
constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();

reference::soft_topk_options to_reference(const soft_topk_options& o) {
  return {static_cast<reference::topk_boost>(o.boost),
          o.strength,
          static_cast<reference::topk_sort>(o.sort),
          static_cast<reference::topk_order>(o.order),
          {o.lengths.begin(), o.lengths.end()}};
}

/// [B, H, k, n] from slots and weights.
tensor weights_of(const tournament& t) {
  tensor w({t.n_batch(), t.n_heads(), t.n_slots(), t.n_sources()});
  for (index_t b = 0; b < t.n_batch(); ++b)
    for (index_t h = 0; h < t.n_heads(); ++h)
      for (index_t i = 0; i < t.n_sources(); ++i)
        if (t.slot(b, h, i) >= 0) w(b, h, t.slot(b, h, i), i) = t.weight(b, h, i);
  return w;
}

template <class View>
tensor values_of(const View& x) {
  tensor t(x.extents());
  for (index_t b = 0; b < x.extent(0); ++b)
    for (index_t h = 0; h < x.extent(1); ++h)
      for (index_t i = 0; i < x.extent(2); ++i)
        for (index_t c = 0; c < x.extent(3); ++c) t(b, h, i, c) = to_double(x(b, h, i, c));
  return t;
}

/// The operands of one call; everything around them is the canary.
template <class T>
struct operands {
  tensor_buffer<T> x, pooled;
  tensor_buffer<arithmetic_t<T>> scores, pooled_scores;

  operands(index_t n_batch, index_t n_heads, index_t n, index_t k, index_t d, layout l,
           double canary = nan_value, std::uint64_t seed = 7)
      : x({n_batch, n_heads, n, d}, l, from_double<T>(canary)),
        pooled({n_batch, n_heads, k, d}, l, from_double<T>(canary)),
        scores({n_batch, n_heads, n, 1}, l, from_double<arithmetic_t<T>>(canary)),
        pooled_scores({n_batch, n_heads, k, 1}, l, from_double<arithmetic_t<T>>(canary)) {
    x.assign(normal_tensor({n_batch, n_heads, n, d}, seed));
    scores.assign(uniform_tensor({n_batch, n_heads, n, 1}, seed + 1, 0, 1));
  }

  /// Both ways to pool against the oracle.
  void check(const soft_topk_options& options, context& ctx = attn::default_context()) {
    const index_t k = pooled.view().extent(2);
    const reference::soft_topk_result expected =
        reference::soft_topk(x.values(), scores.values(), k, to_reference(options));
    double largest = 1;
    for (const double e : expected.pooled.elements()) largest = std::max(largest, std::abs(e));
    const double bound =
        (16 * arithmetic_epsilon<T> + storage_rounding<T>() + weight_bound) * largest;

    const tournament t(scores.view(), k, options, ctx);
    CHECK(compare_within(weights_of(t), expected.weights, weight_bound));
    CHECK(compare_within(values_of(t.scores()), expected.pooled_scores, weight_bound));
    attn::soft_topk(t, x.view(), pooled.view(), ctx);
    CHECK(compare_within(pooled.values(), expected.pooled, bound));
    CHECK(pooled.canaries_alive());

    const tensor two_steps = pooled.values();
    pooled.assign(tensor(pooled.view().extents(), nan_value));
    attn::soft_topk(x.view(), scores.view(), pooled.view(), pooled_scores.view(), options, ctx);
    CHECK(compare_bits(pooled.values(), two_steps));
    CHECK(
        compare_within(pooled_scores.values(), expected.pooled_scores, 4 * arithmetic_epsilon<T>));
    CHECK(pooled.canaries_alive());
    CHECK(pooled_scores.canaries_alive());
  }
};

tournament play(const std::vector<double>& scores, index_t k, const soft_topk_options& o = {}) {
  return {
      attn::tensor_view<const double>(scores.data(), 1, 1, static_cast<index_t>(scores.size()), 1),
      k, o};
}

}  // namespace

TEMPLATE_TEST_CASE("Every size, boost, sort and order", "", float, double) {
  const auto boost = GENERATE(attn::topk_boost::exponential, attn::topk_boost::scaled);
  const auto sort =
      GENERATE(attn::topk_sort::every_round, attn::topk_sort::once, attn::topk_sort::never);
  const auto order = GENERATE(attn::topk_order::by_position, attn::topk_order::by_rank);
  for (const index_t n : {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100}) {
    for (const index_t k : {1, 2, 3, 7, 8, 15, 16, 31, 64, 99, 100}) {
      if (k > n) continue;
      CAPTURE(n, k);
      operands<TestType>(1, 1, n, k, 3, layout::contiguous)
          .check({.boost = boost, .strength = 20, .sort = sort, .order = order});
    }
  }
}

TEMPLATE_TEST_CASE("Every layout, dim and element type", "", float, double, Eigen::half,
                   Eigen::bfloat16) {
  const layout l = plain_layouts[static_cast<std::size_t>(GENERATE(0, 1, 2, 3, 4, 5, 6))];
  const double canary = GENERATE(nan_value, 1e30);
  for (const index_t d : {1, 3, 7, 8, 9, 15, 16, 17, 64, 72, 200}) {
    CAPTURE(l, d, canary);
    operands<TestType>(2, 3, 37, 5, d, l, canary).check({});
  }
}

TEST_CASE("Long rows: sorted by radix, over several tasks") {
  const index_t n = GENERATE(255, 256, 257, 1000, 4096);
  const index_t k = GENERATE(2, 100, 250);
  const auto boost = GENERATE(attn::topk_boost::exponential, attn::topk_boost::scaled);
  operands<float>(1, 2, n, k, 5, layout::contiguous).check({.boost = boost});
}

TEST_CASE("Inputs that are broadcast") {
  const layout l = GENERATE(layout::broadcast_batch, layout::broadcast_heads);
  operands<float> o(2, 3, 20, 4, 6, layout::contiguous);
  tensor_buffer<float> x({2, 3, 20, 6}, l, quiet_nan<float>());
  x.assign(o.x.values());
  const tournament t(o.scores.view(), 4);
  attn::soft_topk(t, x.view(), o.pooled.view());
  const auto expected = reference::soft_topk(x.values(), o.scores.values(), 4);
  CHECK(compare_within(o.pooled.values(), expected.pooled, 1e-5));
}

TEST_CASE("Lengths: what is past them takes no part and is not read") {
  const std::vector<index_t> lengths{5, 9, 17};
  operands<float> o(3, 2, 17, 4, 6, layout::contiguous);
  tensor x = o.x.values(), scores = o.scores.values();
  for (index_t b = 0; b < 3; ++b)
    for (index_t h = 0; h < 2; ++h)
      for (index_t i = lengths[static_cast<std::size_t>(b)]; i < 17; ++i) {
        scores(b, h, i, 0) = GENERATE(nan_value, infinity);
        for (index_t c = 0; c < 6; ++c) x(b, h, i, c) = nan_value;
      }
  o.x.assign(x);
  o.scores.assign(scores);
  o.check({.lengths = lengths});
  const tournament t(o.scores.view(), 4, {.lengths = lengths});
  CHECK(t.slot(0, 1, 4) >= 0);
  CHECK(t.slot(0, 1, 5) == -1);
  CHECK(t.weight(0, 1, 5) == 0);
  CHECK(t.slot(1, 0, 8) >= 0);
  CHECK(t.slot(1, 0, 9) == -1);
  CHECK(t.slot(2, 0, 16) >= 0);
}

TEST_CASE("Ties go by the lower index, NaN ranks last") {
  // Two slots by rank: the first two of the equal ones win.
  const tournament ties = play({1, 1, 1, 1}, 2, {.order = attn::topk_order::by_rank});
  CHECK(ties.champion(0, 0, 0) == 0);
  CHECK(ties.champion(0, 0, 1) == 1);
  CHECK(ties.slot(0, 0, 3) == 0);  // the best meets the worst
  CHECK(ties.slot(0, 0, 2) == 1);
  CHECK(ties.weight(0, 0, 3) == 0.5);

  const tournament zeros = play({-0.0, 0.0}, 1);
  CHECK(zeros.champion(0, 0, 0) == 0);

  const tournament t =
      play({nan_value, infinity, -infinity, 3, infinity}, 5, {.order = attn::topk_order::by_rank});
  const std::vector<index_t> order{1, 4, 3, 2, 0};
  for (index_t r = 0; r < 5; ++r) CHECK(t.champion(0, 0, r) == order[static_cast<std::size_t>(r)]);
}

TEST_CASE("The order of equal, special and close scores is that of a stable sort") {
  const index_t n = GENERATE(1, 24, 63, 64, 65, 127, 129, 300, 1023, 1025, 5000, 500000);
  random_source random(static_cast<std::uint64_t>(n));
  const int kind = GENERATE(0, 1, 2, 3);
  std::vector<double> scores;
  for (index_t i = 0; i < n; ++i) {
    const double special[] = {nan_value, infinity, -infinity, 0.0, -0.0, 1, -1};
    scores.push_back(kind == 0   ? std::floor(random.uniform(0, 10))
                     : kind == 1 ? special[random.integer(0, 6)]
                     : kind == 2 ? 1 + 1e-13 * random.uniform()  // equal in the upper 33 bits
                                 : random.normal());
  }
  std::vector<index_t> expected(static_cast<std::size_t>(n));
  for (index_t i = 0; i < n; ++i) expected[static_cast<std::size_t>(i)] = i;
  std::stable_sort(expected.begin(), expected.end(), [&](index_t a, index_t b) {
    const double x = scores[static_cast<std::size_t>(a)], y = scores[static_cast<std::size_t>(b)];
    return std::isnan(y) ? !std::isnan(x) : x > y;
  });
  const tournament t = play(scores, n, {.order = attn::topk_order::by_rank});
  index_t wrong = 0;
  for (index_t r = 0; r < n; ++r)
    wrong += t.champion(0, 0, r) != expected[static_cast<std::size_t>(r)];
  CHECK(wrong == 0);
}

TEST_CASE("Finite scores of any size give the exact limit") {
  const tournament large = play({30, 1, 2, 3}, 2);
  CHECK(large.weight(0, 0, 0) == 1);
  CHECK(large.weight(0, 0, 1) == 0);
  CHECK(large.weight(0, 0, 3) == 1);
  CHECK(large.weight(0, 0, 2) == 0);  // sigmoid(400 − 8000)
  CHECK(large.scores()(0, 0, 0, 0) == 30);

  // 20^v overflows from v = 237 on.
  for (const double v : {300.0, 1e5, 1e300}) {
    CAPTURE(v);
    const tournament t = play({v, std::nextafter(v, 0)}, 1);
    CHECK(t.weight(0, 0, 0) == 1);
    CHECK(t.weight(0, 0, 1) == 0);
    const tournament equal = play({v, v}, 1);
    CHECK(equal.weight(0, 0, 0) == 0.5);
    CHECK(equal.scores()(0, 0, 0, 0) == v);
    const tournament far = play({v, -v}, 1);
    CHECK(far.weight(0, 0, 0) == 1);
  }
  // 20^v is 0 for both: sigmoid(0).
  CHECK(play({-1e300, -1e301}, 1).weight(0, 0, 0) == 0.5);
  // A difference of large powers: 20^8 − 20^(8 − 1e-12) = 20^8 (1 − e^(−1e-12 ln 20)) = 0.077.
  const double a = 8, b = 8 - 1e-12;
  const double difference = -std::pow(20, a) * std::expm1((b - a) * std::log(20));
  const double expected = 1 / (1 + std::exp(-difference));
  CHECK(std::abs(play({a, b}, 1).weight(0, 0, 0) - expected) < 1e-13);
  CHECK(std::abs(expected - 0.519) < 1e-3);
  // The other boost.
  const soft_topk_options scaled{.boost = attn::topk_boost::scaled, .strength = 1e300};
  CHECK(play({1e300, -1e300}, 1, scaled).weight(0, 0, 0) == 1);
  CHECK(play({1e-300, -1e-300}, 1, scaled).weight(0, 0, 0) ==
        Approx(1 / (1 + std::exp(-2.0))).epsilon(1e-14));
}

TEST_CASE("−inf is not there: weight 0, and its payload is not read") {
  const auto absent = GENERATE(-infinity, nan_value);
  const auto boost = GENERATE(attn::topk_boost::exponential, attn::topk_boost::scaled);
  std::vector<double> scores{-3, absent, 0.5, -7};
  std::vector<float> x{1, quiet_nan<float>(), 3, 4}, pooled(3), d_x(4);
  std::vector<double> d_scores(4), d_pooled_scores(3, 1.0);
  std::vector<float> d_pooled(3, 1.0f);
  const tournament t = play(scores, 3, {.boost = boost});
  attn::soft_topk(t, attn::bhld(x.data(), 1, 1, 4, 1), attn::bhld(pooled.data(), 1, 1, 3, 1));
  CHECK(pooled == std::vector<float>{1, 3, 4});
  CHECK(t.weight(0, 0, 1) == 0);
  CHECK(t.weight(0, 0, 3) == 1);
  attn::soft_topk_backward(
      t, attn::bhld(x.data(), 1, 1, 4, 1), attn::bhld(d_pooled.data(), 1, 1, 3, 1),
      attn::bhld(d_pooled_scores.data(), 1, 1, 3, 1), attn::bhld(d_x.data(), 1, 1, 4, 1),
      attn::bhld(d_scores.data(), 1, 1, 4, 1));
  CHECK(d_x == std::vector<float>{1, 0, 1, 1});
  CHECK(d_scores == std::vector<double>{1, 0, 1, 1});
}

TEST_CASE("Nothing but −inf and NaN: finite weights, finite output") {
  const auto value = GENERATE(-infinity, nan_value, infinity);
  const index_t n = GENERATE(2, 5, 8, 33);
  const index_t k = GENERATE(1, 2);
  const auto sort =
      GENERATE(attn::topk_sort::every_round, attn::topk_sort::once, attn::topk_sort::never);
  operands<float> o(1, 1, n, k, 3, layout::contiguous);
  o.scores.assign(tensor({1, 1, n, 1}, value));
  o.check({.sort = sort});
  const tournament t(o.scores.view(), k, {.sort = sort});
  CHECK(t.scores()(0, 0, 0, 0) == (value == infinity ? infinity : -infinity));
  // Gradients are finite; those of scores that are not there 0.
  tensor_buffer<float> d_x({1, 1, n, 3}, layout::contiguous, quiet_nan<float>());
  tensor_buffer<float> d_scores({1, 1, n, 1}, layout::contiguous, quiet_nan<float>());
  tensor_buffer<float> ones({1, 1, k, 1}, layout::contiguous, 1.0f);
  attn::soft_topk_backward(t, o.x.view(), o.pooled.view(), ones.view(), d_x.view(),
                           d_scores.view());
  const tensor x_gradient = d_x.values(), score_gradient = d_scores.values();
  for (const double g : x_gradient.elements()) CHECK(std::isfinite(g));
  for (const double g : score_gradient.elements()) {
    CHECK(std::isfinite(g));
    if (value != infinity) CHECK(g == 0);
  }
}

TEST_CASE("Gradients agree with the oracle and with finite differences") {
  const index_t n = GENERATE(3, 8, 21, 64);
  const index_t k = GENERATE(1, 2, 5);
  const auto boost = GENERATE(attn::topk_boost::exponential, attn::topk_boost::scaled);
  const auto sort =
      GENERATE(attn::topk_sort::every_round, attn::topk_sort::once, attn::topk_sort::never);
  const auto order = GENERATE(attn::topk_order::by_position, attn::topk_order::by_rank);
  if (k > n) return;
  const soft_topk_options options{.boost = boost, .strength = 6, .sort = sort, .order = order};
  const index_t d = 5;
  operands<double> o(2, 2, n, k, d, layout::padded_by_one);
  const tensor g = normal_tensor({2, 2, k, d}, 3), gs = normal_tensor({2, 2, k, 1}, 4);
  tensor_buffer<double> d_pooled(g.extents(), layout::padded_wide, nan_value);
  tensor_buffer<double> d_pooled_scores(gs.extents(), layout::padded_by_one, nan_value);
  tensor_buffer<double> d_x({2, 2, n, d}, layout::padded_wide, nan_value);
  tensor_buffer<double> d_scores({2, 2, n, 1}, layout::padded_by_one, nan_value);
  d_pooled.assign(g);
  d_pooled_scores.assign(gs);
  const tournament t(o.scores.view(), k, options);
  attn::soft_topk_backward(t, o.x.view(), d_pooled.view(), d_pooled_scores.view(), d_x.view(),
                           d_scores.view());
  CHECK(d_x.canaries_alive());
  CHECK(d_scores.canaries_alive());

  const reference::soft_topk_gradients expected = reference::soft_topk_backward(
      o.x.values(), o.scores.values(), k, g, gs, to_reference(options));
  CHECK(compare_within(d_x.values(), expected.d_x, 1e-12));
  CHECK(compare_within(d_scores.values(), expected.d_scores, 1e-10));

  // Central differences of the library itself; scores are 1e-3 apart on average, ranks do not swap
  // within 2e-6 (they do between rounds).
  const auto loss = [&](const tensor& x, const tensor& v) {
    o.x.assign(x);
    o.scores.assign(v);
    attn::soft_topk(o.x.view(), o.scores.view(), o.pooled.view(), o.pooled_scores.view(), options);
    double sum = 0;
    const tensor p = o.pooled.values(), ps = o.pooled_scores.values();
    for (std::size_t e = 0; e < g.elements().size(); ++e) sum += g.elements()[e] * p.elements()[e];
    for (std::size_t e = 0; e < gs.elements().size(); ++e)
      sum += gs.elements()[e] * ps.elements()[e];
    return sum;
  };
  const tensor x = o.x.values(), scores = o.scores.values();
  double largest = 0;
  for (const double e : expected.d_scores.elements()) largest = std::max(largest, std::abs(e));
  const double step = 1e-6;
  for (std::size_t e = 0; e < scores.elements().size(); e += 3) {
    tensor up = scores, down = scores;
    up.elements()[e] += step, down.elements()[e] -= step;
    const double numeric = (loss(x, up) - loss(x, down)) / (2 * step);
    CAPTURE(e);
    CHECK(std::abs(numeric - expected.d_scores.elements()[e]) < 1e-6 * std::max(1.0, largest));
  }
}

TEMPLATE_TEST_CASE("Gradients of stored types and layouts", "", float, double, Eigen::half,
                   Eigen::bfloat16) {
  const layout l = plain_layouts[static_cast<std::size_t>(GENERATE(0, 1, 2, 3, 4, 5, 6))];
  const index_t d = GENERATE(1, 8, 33);
  const std::vector<index_t> lengths{11, 19};
  operands<TestType> o(2, 2, 19, 4, d, l);
  const tensor gs = normal_tensor({2, 2, 4, 1}, 4);
  tensor_buffer<TestType> d_pooled({2, 2, 4, d}, l, quiet_nan<TestType>());
  d_pooled.assign(normal_tensor({2, 2, 4, d}, 3));
  tensor_buffer<float> d_pooled_scores(gs.extents(), layout::contiguous, nan_value);
  d_pooled_scores.assign(gs);
  tensor_buffer<TestType> d_x({2, 2, 19, d}, l, quiet_nan<TestType>());
  tensor_buffer<float> d_scores({2, 2, 19, 1}, l, nan_value);
  const soft_topk_options options{.strength = 5, .lengths = lengths};
  const tournament t(o.scores.view(), 4, options);
  attn::soft_topk_backward(t, o.x.view(), d_pooled.view(), d_pooled_scores.view(), d_x.view(),
                           d_scores.view());
  const reference::soft_topk_gradients expected =
      reference::soft_topk_backward(o.x.values(), o.scores.values(), 4, d_pooled.values(),
                                    d_pooled_scores.values(), to_reference(options));
  CHECK(compare_within(d_x.values(), expected.d_x,
                       5 * (arithmetic_epsilon<TestType> + storage_rounding<TestType>())));
  CHECK(compare_within(d_scores.values(), expected.d_scores, 1e-4));
  CHECK(d_x.canaries_alive());
  CHECK(d_scores.canaries_alive());
}

TEST_CASE("Threads change nothing; a repeated call does not allocate") {
  const int n_threads = GENERATE(1, 2, 3);
  const index_t n = 700, k = 300, d = 24;
  context ctx(n_threads);
  operands<float> o(1, 3, n, k, d, layout::contiguous);
  tournament t(o.scores.view(), k, {}, ctx);
  attn::soft_topk(t, o.x.view(), o.pooled.view(), ctx);
  const tensor threaded = o.pooled.values();
  const tensor threaded_scores = values_of(t.scores());
  attn::soft_topk(o.x.view(), o.scores.view(), o.pooled.view(), o.pooled_scores.view(), {}, ctx);
  {
    const allocation_counter allocations;
    t.assign(o.scores.view(), k, {}, ctx);
    t.assign(o.scores.view(), k + 1, {}, ctx);
    t.assign(o.scores.view(), k, {}, ctx);
    attn::soft_topk(t, o.x.view(), o.pooled.view(), ctx);
    attn::soft_topk(o.x.view(), o.scores.view(), o.pooled.view(), o.pooled_scores.view(), {}, ctx);
    if (n_threads == 1) CHECK(allocations.count() == 0);
  }
  context serial(1);
  const tournament alone(o.scores.view(), k, {}, serial);
  attn::soft_topk(alone, o.x.view(), o.pooled.view(), serial);
  CHECK(compare_bits(threaded, o.pooled.values()));
  CHECK(compare_bits(threaded_scores, values_of(alone.scores())));
}

TEST_CASE("Nothing past the last element is read") {
  if (!has_guard_pages) return;
  const index_t n = GENERATE(5, 16, 21);
  const index_t d = GENERATE(1, 7, 16, 19);
  const guarded_tensor<float> x(normal_tensor({1, 1, n, d}, 1));
  const guarded_tensor<float> scores(uniform_tensor({1, 1, n, 1}, 2, 0, 1));
  const guarded_tensor<float> pooled(tensor({1, 1, 3, d})), pooled_scores(tensor({1, 1, 3, 1}));
  attn::soft_topk(x.view(), scores.view(), pooled.view(), pooled_scores.view());
  const auto expected = reference::soft_topk(x.values(), scores.values(), 3);
  CHECK(compare_within(pooled.values(), expected.pooled, 1e-5));
}

TEST_CASE("Eigen objects, scores of one type and a payload of another") {
  Eigen::MatrixXf x(6, 3);
  for (index_t i = 0; i < 6; ++i)
    for (index_t c = 0; c < 3; ++c) x(i, c) = static_cast<float>(3 * i + c);
  Eigen::VectorXd scores(6);
  scores << 0.1, 0.9, 0.3, 0.7, 0.2, 0.8;
  Eigen::MatrixXf pooled(2, 3);
  Eigen::VectorXf pooled_scores(2);
  attn::soft_topk(x, scores, pooled, pooled_scores);
  const auto expected =
      reference::soft_topk(values_of(attn::view(x)), values_of(attn::view(scores)), 2);
  CHECK(compare_within(values_of(attn::view(pooled)), expected.pooled, 1e-4));
}

TEST_CASE("An empty batch, an empty dim") {
  std::vector<float> none, scores(8, 1.0f), pooled_scores(2);
  const tournament t(attn::bhld(none.data(), 0, 2, 4, 1), 2);
  CHECK(t.n_batch() == 0);
  attn::soft_topk(t, attn::bhld(none.data(), 0, 2, 4, 3), attn::bhld(none.data(), 0, 2, 2, 3));
  CHECK(t.scores().size() == 0);
  attn::soft_topk(attn::bhld(none.data(), 1, 1, 8, 0), attn::bhld(scores.data(), 1, 1, 8, 1),
                  attn::bhld(none.data(), 1, 1, 2, 0),
                  attn::bhld(pooled_scores.data(), 1, 1, 2, 1));
  CHECK(pooled_scores == std::vector<float>{1, 1});
}
