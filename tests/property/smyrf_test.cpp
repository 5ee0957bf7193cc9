// SPDX-License-Identifier: MIT
//
// Laws of SMYRF attention, over many random plans: it is dense attention with one cluster, and
// under the mask of all meetings.
#include "support/catch.hpp"
#include "support/dense_call.hpp"
#include "support/random.hpp"
#include "support/smyrf_call.hpp"

#include <attn/blockwise_attention.hpp>

#include <algorithm>
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

TEST_CASE("One local round is blockwise attention, where the clusters are chunks") {
  random_source random(8);
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    dense_problem p = random_problem(random, seed);
    const index_t block = random.integer(1, 40), clusters = random.integer(1, 8);
    p.n_q = p.n_kv = block * clusters;
    CAPTURE(p, block);
    dense_operands<double> x(p), chunks(p);
    // No chunk sees another: large values in the last one stay there.
    reference::tensor v = x.v.values();
    for (index_t b = 0; b < p.n_batch; ++b)
      for (index_t h = 0; h < p.n_kv_heads; ++h)
        for (index_t c = 0; c < p.d_v; ++c) v(b, h, p.n_kv - 1, c) = 1000;
    x.v.assign(v), chunks.v.assign(v);
    attend_clusters(x, smyrf_clusters(x.q.view(), x.k.view(),
                                      {.clusters = clusters, .rounds = 1, .local_round = true}));
    attn::blockwise_attention(chunks.q.view(), chunks.k.view(), chunks.v.view(), chunks.out.view(),
                              chunks.lse.view(), attn::no_mask{}, {.block = block});
    const auto expected = reference::dense_attention(
        x.q.values(), x.k.values(), x.v.values(),
        reference::score_rule_fn([&](double score, index_t, index_t, index_t i, index_t j) {
          return i / block == j / block ? score : -HUGE_VAL;
        }));
    CHECK(x.matches(expected));
    CHECK(chunks.matches(expected));
    CHECK(compare_within(x.out.values(), chunks.out.values(), 1e-9));
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

TEST_CASE("A plan does not depend on the unit of queries and keys") {
  random_source random(5);
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    const dense_problem p = random_problem(random, seed);
    const smyrf_options options = random_options(random, p);
    CAPTURE(p, options.clusters, static_cast<int>(options.clustering));
    dense_operands<float> x(p);
    const smyrf_clusters c(x.q.view(), x.k.view(), options);
    for (const double unit : {0x1p-20, 0x1p20}) {  // exact: a power of 2
      dense_operands<float> y(p);
      reference::tensor q = x.q.values(), k = x.k.values();
      for (double& e : q.elements()) e *= unit;
      for (double& e : k.elements()) e *= unit;
      y.q.assign(q), y.k.assign(k);
      CHECK(checksum(smyrf_clusters(y.q.view(), y.k.view(), options), p) == checksum(c, p));
    }
  }
}

TEST_CASE("Ranks go with the rows: another order of the sequence, the same clusters") {
  random_source random(6);
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    dense_problem p = random_problem(random, seed);
    p.n_batch = p.n_heads = p.n_kv_heads = 1;
    smyrf_options options = random_options(random, p);
    options.clustering = smyrf_clustering::ranks, options.local_round = false;
    CAPTURE(p, options.clusters);
    dense_operands<float> x(p), y(p);
    const auto reversed = [](const reference::tensor& t) {
      reference::tensor r = t;
      for (index_t i = 0; i < t.extent(2); ++i)
        for (index_t e = 0; e < t.extent(3); ++e) r(0, 0, i, e) = t(0, 0, t.extent(2) - 1 - i, e);
      return r;
    };
    y.q.assign(reversed(x.q.values())), y.k.assign(reversed(x.k.values()));
    const auto a = rounds_of(smyrf_clusters(x.q.view(), x.k.view(), options), 0, 0, p.n_q, p.n_kv);
    auto b = rounds_of(smyrf_clusters(y.q.view(), y.k.view(), options), 0, 0, p.n_q, p.n_kv);
    for (std::size_t r = 0; r < a.size(); ++r) {
      std::ranges::reverse(b[r].of_query), std::ranges::reverse(b[r].of_key);
      CHECK(a[r].of_query == b[r].of_query);
      CHECK(a[r].of_key == b[r].of_key);
    }
  }
}

TEST_CASE("The first rounds of a plan are those of a plan with fewer") {
  random_source random(7);
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    const dense_problem p = random_problem(random, seed);
    smyrf_options options = random_options(random, p);
    dense_operands<float> x(p);
    const smyrf_clusters fewer(x.q.view(), x.k.view(), options);
    options.rounds += 2;
    const smyrf_clusters more(x.q.view(), x.k.view(), options);
    for (index_t b = 0; b < p.n_batch; ++b)
      for (index_t h = 0; h < p.n_heads; ++h)
        for (index_t r = 0; r < fewer.rounds(); ++r) {
          CHECK(std::ranges::equal(fewer.query_order(b, h, r), more.query_order(b, h, r)));
          CHECK(std::ranges::equal(fewer.key_order(b, h, r), more.key_order(b, h, r)));
        }
  }
}

TEST_CASE(
    "Keys of one length up to rounding: no transform gives NaN, each position is there once") {
  // Each key a rotation of one vector: the sums of the same squares in other orders.
  const dense_problem p{.n_q = 100, .n_kv = 100, .d_qk = 37};
  dense_operands<float> x(p);
  reference::tensor k = x.k.values();
  for (index_t j = 1; j < 100; ++j)
    for (index_t e = 0; e < 37; ++e) k(0, 0, j, e) = k(0, 0, 0, (e + j) % 37);
  x.k.assign(k);
  for (const attn::lsh_transform& transform :
       {attn::lsh_transform(attn::smyrf_transform{}), attn::lsh_transform(attn::xbox_transform{}),
        attn::lsh_transform(attn::l2_alsh_transform{}),
        attn::lsh_transform(attn::simple_lsh_transform{}),
        attn::lsh_transform(attn::no_transform{})}) {
    // 37 and 74 keys later it is the same key: a NaN among the hashes would part them, for ties
    // go by position, and three of a kind lie within one cluster or at a cut.
    const smyrf_clusters c(x.q.view(), x.k.view(),
                           {.clusters = 32, .rounds = 2, .transform = transform});
    CHECK(fault_of(c, p) == "");
    for (const auto& round : rounds_of(c, 0, 0, 100, 100)) {
      for (std::size_t j = 0; j + 37 < 100; ++j) {
        CHECK(std::abs(round.of_key[j + 37] - round.of_key[j]) <= 1);
      }
    }
  }
}
