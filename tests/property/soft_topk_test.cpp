// SPDX-License-Identifier: MIT
//
// Laws of a tournament, over many random ones.
#include "support/catch.hpp"
#include "support/random.hpp"

#include <attn/soft_topk.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

using attn::index_t;
using attn::soft_topk_options;
using attn::tournament;
using attn_test::random_source;

namespace {

soft_topk_options random_options(random_source& random) {
  soft_topk_options o;
  o.boost = random.coin() ? attn::topk_boost::exponential : attn::topk_boost::scaled;
  o.strength = random.uniform(1.01, 300);
  o.sort = static_cast<attn::topk_sort>(random.integer(0, 2));
  o.order = static_cast<attn::topk_order>(random.integer(0, 1));
  return o;
}

std::vector<double> random_scores(random_source& random, index_t n) {
  const double scale = std::pow(10, random.uniform(-3, 4));
  const bool rounded = random.coin(0.3);  // with ties
  std::vector<double> scores;
  for (index_t i = 0; i < n; ++i) {
    double v = scale * random.normal();
    if (rounded) v = std::round(v);
    if (random.coin(0.02)) v = -std::numeric_limits<double>::infinity();
    if (random.coin(0.02)) v = std::numeric_limits<double>::quiet_NaN();
    scores.push_back(v);
  }
  return scores;
}

attn::tensor_view<const double> as_row(const std::vector<double>& x) {
  return {x.data(), 1, 1, static_cast<index_t>(x.size()), 1};
}

}  // namespace

TEST_CASE("Weights are shares: in [0, 1], of one slot each, and sum to 1 in every slot") {
  random_source random(1);
  for (int round = 0; round < 500; ++round) {
    const index_t n = random.integer(1, 200), k = random.integer(1, n);
    const soft_topk_options options = random_options(random);
    const std::vector<double> scores = random_scores(random, n);
    CAPTURE(round, n, k, options.strength);
    const tournament t(as_row(scores), k, options);
    std::vector<double> sum(static_cast<std::size_t>(k));
    std::vector<index_t> count(static_cast<std::size_t>(k));
    bool in_range = true;
    for (index_t i = 0; i < n; ++i) {
      const index_t r = t.slot(0, 0, i);
      const double w = t.weight(0, 0, i);
      in_range = in_range && r >= 0 && r < k && w >= 0 && w <= 1;
      REQUIRE(in_range);
      sum[static_cast<std::size_t>(r)] += w;
      ++count[static_cast<std::size_t>(r)];
    }
    // No slot gets more sources than 2^rounds, and the champion is one of its own.
    index_t most = 1;
    for (index_t m = n; m > k; m = std::max(k, (m + 1) / 2)) most *= 2;
    for (index_t r = 0; r < k; ++r) {
      const auto at = static_cast<std::size_t>(r);
      CHECK(std::abs(sum[at] - 1) < 1e-14);
      CHECK(count[at] >= 1);
      CHECK(count[at] <= most);
      CHECK(t.slot(0, 0, t.champion(0, 0, r)) == r);
    }
    if (options.order == attn::topk_order::by_position) {
      for (index_t r = 1; r < k; ++r) CHECK(t.champion(0, 0, r - 1) < t.champion(0, 0, r));
    }
  }
}

TEST_CASE("n = k: every source is its own slot") {
  random_source random(2);
  for (int round = 0; round < 50; ++round) {
    const index_t n = random.integer(1, 100);
    soft_topk_options options = random_options(random);
    options.order = attn::topk_order::by_position;
    const tournament t(as_row(random_scores(random, n)), n, options);
    for (index_t i = 0; i < n; ++i) {
      CHECK(t.slot(0, 0, i) == i);
      CHECK(t.weight(0, 0, i) == 1);
    }
  }
}

TEST_CASE("A slot's score is that of its sources, mixed") {
  random_source random(3);
  for (int round = 0; round < 100; ++round) {
    const index_t n = random.integer(1, 200), k = random.integer(1, n);
    std::vector<double> scores;
    for (index_t i = 0; i < n; ++i) scores.push_back(random.normal());
    const tournament t(as_row(scores), k, random_options(random));
    std::vector<double> mixed(static_cast<std::size_t>(k));
    attn::soft_topk(t, as_row(scores), attn::bhld(mixed.data(), 1, 1, k, 1));
    for (index_t r = 0; r < k; ++r) {
      CHECK(std::abs(t.scores()(0, 0, r, 0) - mixed[static_cast<std::size_t>(r)]) < 1e-13);
    }
  }
}

TEST_CASE("Moving the sources moves the slots with them, where no scores are equal") {
  random_source random(4);
  for (int round = 0; round < 100; ++round) {
    const index_t n = random.integer(2, 200), k = random.integer(1, n);
    soft_topk_options options = random_options(random);
    options.order = attn::topk_order::by_rank;
    if (options.sort == attn::topk_sort::never) options.sort = attn::topk_sort::once;
    std::vector<double> scores;
    for (index_t i = 0; i < n; ++i) scores.push_back(random.uniform(0, 1));
    std::vector<index_t> place(static_cast<std::size_t>(n));
    std::iota(place.begin(), place.end(), index_t{0});
    for (index_t i = n - 1; i > 0; --i) {
      std::swap(place[static_cast<std::size_t>(i)],
                place[static_cast<std::size_t>(random.integer(0, i))]);
    }
    std::vector<double> moved(scores.size());
    for (std::size_t i = 0; i < scores.size(); ++i) {
      moved[static_cast<std::size_t>(place[i])] = scores[i];
    }
    const tournament a(as_row(scores), k, options), z(as_row(moved), k, options);
    index_t wrong = 0;
    for (index_t i = 0; i < n; ++i) {
      const index_t j = place[static_cast<std::size_t>(i)];
      wrong += a.slot(0, 0, i) != z.slot(0, 0, j) || a.weight(0, 0, i) != z.weight(0, 0, j);
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("The scaled boost does not see a constant added to all scores") {
  random_source random(5);
  for (int round = 0; round < 50; ++round) {
    const index_t n = random.integer(2, 100), k = random.integer(1, n);
    std::vector<double> scores, shifted;
    for (index_t i = 0; i < n; ++i) {
      scores.push_back(static_cast<double>(random.integer(-1000, 1000)));
      shifted.push_back(scores.back() + 4096);
    }
    const soft_topk_options options{.boost = attn::topk_boost::scaled, .strength = 0.01};
    const tournament a(as_row(scores), k, options), z(as_row(shifted), k, options);
    for (index_t i = 0; i < n; ++i) {
      CHECK(std::abs(a.weight(0, 0, i) - z.weight(0, 0, i)) < 1e-9);
    }
  }
}

TEST_CASE("With growing strength the champions' weights go to 1: a hard top-k") {
  // n = k 2^p: in the last round rank i of 2k meets rank 2k − i + 1, so the k best are champions,
  // and with all gaps at least g each of p matches leaves the loser at most 1 / (1 + e^(C g)).
  const index_t k = 4, n = 64, rounds = 4;
  std::vector<double> scores;
  for (index_t i = 0; i < n; ++i) scores.push_back(static_cast<double>(i * 37 % 64) / 64);
  const double gap = 1.0 / 64;
  double before = 1;
  for (const double strength : {1e2, 1e3, 1e4}) {
    const tournament t(as_row(scores), k,
                       {.boost = attn::topk_boost::scaled, .strength = strength});
    double worst = 0;
    for (index_t r = 0; r < k; ++r)
      worst = std::max(worst, 1 - t.weight(0, 0, t.champion(0, 0, r)));
    CAPTURE(strength, worst);
    CHECK(worst <= static_cast<double>(rounds) / (1 + std::exp(strength * gap / 2)));
    CHECK(worst <= before);
    before = worst;
  }
  const tournament hard(as_row(scores), k, {.boost = attn::topk_boost::scaled, .strength = 1e5});
  for (index_t i = 0; i < n; ++i) {
    const bool best = scores[static_cast<std::size_t>(i)] >= 60.0 / 64;
    CHECK(hard.weight(0, 0, i) == (best ? 1.0 : 0.0));
  }
}
