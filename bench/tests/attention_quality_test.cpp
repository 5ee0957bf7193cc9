// SPDX-License-Identifier: MIT
//
// What smyrf_quality reports, where it is known beforehand.
#include "support/attention_families.hpp"
#include "support/attention_quality.hpp"
#include "support/catch.hpp"

#include <cmath>
#include <string>

using namespace attn::bench;

namespace {

problem<float> small(attn::index_t n_kv = 128) {
  return random_problem<float>({1, 2, 2, 256, n_kv, 16, 16, false}, 1);
}

}  // namespace

TEST_CASE("sparse_ways: all scores are dense attention") {
  const dense_results dense(small());
  for (const sparse_way& way : sparse_ways()) {
    const attn::index_t rounds = way.applies(1) ? 1 : 2;
    CAPTURE(way.name);
    const attention_quality q = way.run(dense, 1, rounds);
    CHECK(std::abs(q.mass - 1) < 1e-5);
    CHECK(q.error < 1e-5);
    CHECK(std::abs(q.cosine - 1) < 1e-5);
  }
}

TEST_CASE(
    "sparse_ways: mass is at most that of the best keys, that of random clusters is a share") {
  const dense_results dense(small());
  double best = 0;
  for (const sparse_way& way : sparse_ways()) {
    if (!way.applies(1)) continue;
    CAPTURE(way.name);
    const attention_quality q = way.run(dense, 4, 1);
    if (way.name == "best keys")
      best = q.mass;
    else
      CHECK(q.mass < best);
    if (way.name == "random") CHECK(std::abs(q.mass - 0.25) < 0.02);
    CHECK(q.mass > 0.2);
    CHECK(q.error > 0.1);
  }
  CHECK(best < 1);
}

TEST_CASE("sparse_ways: rounds that a way is for") {
  const auto named = [](const std::string& name) {
    for (const sparse_way& way : sparse_ways()) {
      if (way.name == name) return way;
    }
    return sparse_way{};
  };
  CHECK(named("blockwise").applies(1));
  CHECK_FALSE(named("blockwise").applies(2));
  CHECK_FALSE(named("SMYRF + local").applies(1));
  CHECK(named("SMYRF").applies(1));
  CHECK(named("SMYRF").applies(8));
  CHECK(named("SMYRF + far").means(32) == 5);
  CHECK(named("SMYRF").means(32) == 0);
}

TEST_CASE("attention_families: what is made up is finite and always the same") {
  for (const attention_family& family : attention_families({})) {
    if (family.name.starts_with("minilm")) continue;  // a file
    CAPTURE(family.name);
    const problem<float> p = family.make();
    const auto finite = [](const auto& x) {
      double sum = 0;
      for (const float e : x) sum += static_cast<double>(e) * static_cast<double>(e);
      return std::isfinite(sum) && sum > 0;
    };
    CHECK(finite(p.q_elements));
    CHECK(finite(p.k_elements));
    CHECK(finite(p.v_elements));
    CHECK(p.q().extent(2) == p.shape.n_q);
    CHECK(p.q_elements == family.make().q_elements);
  }
}
