// SPDX-License-Identifier: MIT
//
// Laws of SMYRF attention, over many random plans: it is dense attention with one cluster, and
// under the mask of all meetings.
#include "support/catch.hpp"
#include "support/dense_call.hpp"
#include "support/random.hpp"
#include "support/smyrf_call.hpp"

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

using namespace attn_test;
using attn::smyrf_clustering;
using attn::smyrf_clusters;
using attn::smyrf_duplicates;
using attn::smyrf_options;

namespace {

dense_problem random_problem(random_source& random, std::uint64_t seed) {
  const index_t heads_kv = random.integer(1, 2);
  return {.n_batch = random.integer(1, 2),
          .n_heads = heads_kv * random.integer(1, 3),
          .n_kv_heads = heads_kv,
          .n_q = random.integer(1, 150),
          .n_kv = random.integer(1, 150),
          .d_qk = random.integer(1, 40),
          .d_v = random.integer(1, 40),
          .deviation = random.uniform(0.3, 4),
          .seed = seed};
}

smyrf_options random_options(random_source& random, const dense_problem& p) {
  smyrf_options o;
  o.clusters = random.integer(1, std::min({p.n_q, p.n_kv, index_t{12}}));
  o.rounds = random.integer(1, 5);
  o.seed = random.bits();
  o.clustering = random.coin() ? smyrf_clustering::ranks : smyrf_clustering::bisection;
  o.local_round = random.coin(0.3);
  if (random.coin(0.3)) o.softcap = random.uniform(1, 5);
  if (random.coin(0.3)) o.scale = random.uniform(-1, 1);
  return o;
}

template <class T>
void attend_clusters(dense_operands<T>& x, const smyrf_clusters& c) {
  attn::smyrf_attention(x.q.view(), x.k.view(), x.v.view(), x.out.view(), x.lse.view(), c);
}

}  // namespace

TEMPLATE_TEST_CASE("One cluster is dense attention, whatever the clustering", "", float, double) {
  random_source random(1);
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    const dense_problem p = random_problem(random, seed);
    smyrf_options options = random_options(random, p);
    options.clusters = 1;
    CAPTURE(p, options.rounds);
    dense_operands<TestType> x(p), dense(p);
    attend(dense, attn::no_mask{}, {.scale = options.scale, .softcap = options.softcap});
    // One round: the dense kernel's own sums, the same bits for as many queries as it tiles.
    options.rounds = 1;
    attend_clusters(x, smyrf_clusters(x.q.view(), x.k.view(), options));
    const auto expected =
        x.expected({}, {.scale = options.scale, .softcap = options.softcap, .sinks = {}});
    CHECK(x.matches(expected));
    // Rounds that all see everything: duplicates removed change nothing, weighted add ln rounds.
    options.rounds = 3, options.duplicates = smyrf_duplicates::removed;
    attend_clusters(x, smyrf_clusters(x.q.view(), x.k.view(), options));
    CHECK(x.matches(expected, {.constant = 20}));
    options.duplicates = smyrf_duplicates::weighted;
    attend_clusters(x, smyrf_clusters(x.q.view(), x.k.view(), options));
    CHECK(compare_out<TestType>(x.out.values(), expected, {.constant = 24}));
    const reference::tensor lse = x.lse.values(), dense_lse = dense.lse.values();
    for (std::size_t i = 0; i < lse.elements().size(); ++i) {
      const double bound = 500 * arithmetic_epsilon<TestType> * (20 + std::abs(lse.elements()[i]));
      CHECK(std::abs(lse.elements()[i] - std::log(3.0) - dense_lse.elements()[i]) <= bound);
    }
  }
}

TEMPLATE_TEST_CASE("Duplicates removed: dense attention under the mask of all meetings", "", float,
                   double) {
  random_source random(2);
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    const dense_problem p = random_problem(random, seed);
    smyrf_options options = random_options(random, p);
    options.duplicates = smyrf_duplicates::removed;
    CAPTURE(p, options.clusters, options.rounds);
    dense_operands<TestType> x(p), dense(p);
    const smyrf_clusters c(x.q.view(), x.k.view(), options);
    attend_clusters(x, c);
    const reference::tensor m = meetings_of(c, p);
    const auto allowed = std::make_unique<bool[]>(m.elements().size());
    for (std::size_t i = 0; i < m.elements().size(); ++i) allowed[i] = m.elements()[i] > 0;
    const attn::tensor_view<const bool> mask(allowed.get(), p.n_batch, p.n_heads, p.n_q, p.n_kv);
    attend(dense, attn::boolean_mask{mask}, {.scale = options.scale, .softcap = options.softcap});
    // Both within the bound of the oracle.
    const auto expected = reference::dense_attention(
        x.q.values(), x.k.values(), x.v.values(), reference::boolean_mask(m),
        {.scale = options.scale, .softcap = options.softcap, .sinks = {}});
    CHECK(x.matches(expected, {.constant = 24}));
    CHECK(dense.matches(expected));
  }
}

TEMPLATE_TEST_CASE("More rounds never lose mass, and none has more than all", "", double) {
  random_source random(3);
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    const dense_problem p = random_problem(random, seed);
    smyrf_options options = random_options(random, p);
    options.duplicates = smyrf_duplicates::removed, options.softcap = 0;
    dense_operands<TestType> x(p), dense(p);
    attend(dense, attn::no_mask{}, {.scale = options.scale});
    const reference::tensor most = dense.lse.values();
    reference::tensor before(p.lse_extents(), -std::numeric_limits<double>::infinity());
    for (index_t rounds = 1; rounds <= 4; ++rounds) {
      options.rounds = rounds;  // the same seed: the same first rounds
      attend_clusters(x, smyrf_clusters(x.q.view(), x.k.view(), options));
      const reference::tensor lse = x.lse.values();
      for (std::size_t i = 0; i < lse.elements().size(); ++i) {
        CHECK(lse.elements()[i] >= before.elements()[i] - 1e-11);
        CHECK(lse.elements()[i] <= most.elements()[i] + 1e-11);
      }
      before = lse;
    }
  }
}

TEST_CASE("The far field never overestimates: a mean has no more weight than what it stands for") {
  random_source random(4);
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    const dense_problem p = random_problem(random, seed);
    smyrf_options options = random_options(random, p);
    options.rounds = 1, options.softcap = 0, options.far_field = attn::smyrf_far_field::means;
    dense_operands<double> x(p), dense(p);
    attend(dense, attn::no_mask{}, {.scale = options.scale});
    attend_clusters(x, smyrf_clusters(x.q.view(), x.k.view(), options));
    const reference::tensor far = x.lse.values(), most = dense.lse.values();
    options.far_field = attn::smyrf_far_field::none;
    attend_clusters(x, smyrf_clusters(x.q.view(), x.k.view(), options));
    const reference::tensor near = x.lse.values();
    for (std::size_t i = 0; i < most.elements().size(); ++i) {
      CHECK(far.elements()[i] <= most.elements()[i] + 1e-11);  // Jensen
      CHECK(far.elements()[i] >= near.elements()[i] - 1e-11);
    }
  }
}

TEST_CASE("A row's bits do not depend on the other rows of its plan's clusters") {
  // The same plan, other values in half of the queries.
  const dense_problem p{.n_q = 150, .n_kv = 120, .d_qk = 24};
  dense_operands<float> x(p), y(p);
  for (const auto duplicates : {smyrf_duplicates::weighted, smyrf_duplicates::removed}) {
    const smyrf_clusters c(x.q.view(), x.k.view(),
                           {.clusters = 5, .rounds = 3, .duplicates = duplicates});
    attend_clusters(x, c);
    reference::tensor q = x.q.values();
    for (index_t i = 1; i < 150; i += 2)
      for (index_t e = 0; e < 24; ++e) q(0, 0, i, e) = i % 4 == 1 ? 1e4 : std::nan("");
    y.q.assign(q);
    attend_clusters(y, c);
    const reference::tensor a = x.out.values(), b = y.out.values();
    const reference::tensor la = x.lse.values(), lb = y.lse.values();
    for (index_t i = 0; i < 150; i += 2) {
      CHECK(la(0, 0, i, 0) == lb(0, 0, i, 0));
      for (index_t e = 0; e < 8; ++e) CHECK(a(0, 0, i, e) == b(0, 0, i, e));
    }
  }
}
