// SPDX-License-Identifier: MIT
//
// The plan of SMYRF: ranks against an oracle, bisection against its laws, both against fixed
// numbers, lengths, threads, rows that are not finite.
#include "support/catch.hpp"
#include "support/smyrf.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

using namespace attn_test;
using attn::smyrf_clustering;
using attn::smyrf_clusters;
using attn::smyrf_options;

#define ELEMENT_TYPES float, double, Eigen::half, Eigen::bfloat16

namespace {

template <class T>
smyrf_clusters plan(dense_operands<T>& x, const smyrf_options& options,
                    attn::context& ctx = attn::default_context()) {
  return smyrf_clusters(x.q.view(), x.k.view(), options, ctx);
}

/// Rows [0, length) of one head as float has them.
reference::vectors rows_of(const reference::tensor& t, index_t b, index_t h, index_t length) {
  reference::vectors rows;
  for (index_t i = 0; i < length; ++i) {
    rows.emplace_back();
    for (index_t c = 0; c < t.extent(3); ++c) {
      rows.back().push_back(static_cast<double>(static_cast<float>(t(b, h, i, c))));
    }
  }
  return rows;
}

double to_float(double x) { return static_cast<double>(static_cast<float>(x)); }

/// Hashes of transformed vectors of d + appended coordinates: the definition, coordinate by
/// coordinate, with the roundings that it names.
std::vector<double> hashes(const reference::vectors& rows, const reference::vectors& points,
                           const std::function<double(index_t)>& a) {
  std::vector<double> h;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto d = static_cast<index_t>(rows[i].size());
    double product = 0;
    for (index_t c = 0; c < d; ++c) product += rows[i][static_cast<std::size_t>(c)] * a(c);
    // The factor, from the coordinate that tells it best.
    const auto large =
        std::max_element(rows[i].begin(), rows[i].end(),
                         [](double x, double y) { return std::abs(x) < std::abs(y); }) -
        rows[i].begin();
    const double factor =
        rows[i][static_cast<std::size_t>(large)] == 0
            ? 0
            : points[i][static_cast<std::size_t>(large)] / rows[i][static_cast<std::size_t>(large)];
    double sum = to_float(factor) * to_float(product);
    for (auto c = static_cast<std::size_t>(d); c < points[i].size(); ++c) {
      sum += a(static_cast<index_t>(c)) * to_float(points[i][c]);
    }
    h.push_back(sum);
  }
  return h;
}

struct named_transform {
  reference::lsh_transform meaning;
  attn::lsh_transform transform;
};
const std::vector<named_transform> all_transforms = {
    {reference::lsh_transform::smyrf, attn::smyrf_transform{}},
    {reference::lsh_transform::xbox, attn::xbox_transform{}},
    {reference::lsh_transform::l2_alsh, attn::l2_alsh_transform{}},
    {reference::lsh_transform::simple_lsh, attn::simple_lsh_transform{}},
    {reference::lsh_transform::none, attn::no_transform{}},
};

}  // namespace

TEMPLATE_TEST_CASE("smyrf_clusters: ranks of every transform are the oracle's", "", float, double,
                   Eigen::half) {
  for (const named_transform& t : all_transforms)
    for (const layout l : {layout::contiguous, layout::heads_interleaved, layout::column_major}) {
      const dense_problem p{.n_batch = 2,
                            .n_heads = 4,
                            .n_kv_heads = 2,
                            .n_q = 131,
                            .n_kv = 70,
                            .d_qk = 19,
                            .inputs = l,
                            .deviation = 3};
      CAPTURE(p, static_cast<int>(t.meaning));
      dense_operands<TestType> x(p);
      const std::vector<index_t> q_lengths = {131, 100}, k_lengths = {33, 70};
      const smyrf_options options{.clusters = 7,
                                  .rounds = 3,
                                  .seed = 5,
                                  .query_lengths = q_lengths,
                                  .key_lengths = k_lengths,
                                  .transform = t.transform};
      const smyrf_clusters c = plan(x, options);
      CHECK(fault_of(c, p) == "");

      const reference::tensor q = x.q.values(), k = x.k.values();
      for (index_t b = 0; b < 2; ++b)
        for (index_t g = 0; g < 2; ++g) {
          const auto keys = rows_of(k, b, g, k_lengths[static_cast<std::size_t>(b)]);
          std::vector<reference::vectors> queries;
          double norm2_q = 0;
          for (index_t h = 2 * g; h < 2 * g + 2; ++h) {
            queries.push_back(rows_of(q, b, h, q_lengths[static_cast<std::size_t>(b)]));
            norm2_q = std::max(norm2_q, reference::largest_norm2(queries.back()));
          }
          const double norm2_k = reference::largest_norm2(keys);
          const auto key_points = reference::transformed(keys, false, t.meaning, norm2_q, norm2_k);
          for (index_t r = 0; r < 3; ++r) {
            const auto a = [&](index_t c0) {
              return static_cast<double>(attn::random_projection::coefficient(5, r, c0));
            };
            const auto of_key = reference::rank_clusters(hashes(keys, key_points, a), 7);
            for (index_t i = 0; i < 2; ++i) {
              const index_t h = 2 * g + i;
              const auto& rows = queries[static_cast<std::size_t>(i)];
              const auto points = reference::transformed(rows, true, t.meaning, norm2_q, norm2_k);
              const auto of_query = reference::rank_clusters(hashes(rows, points, a), 7);
              auto round = rounds_of(c, b, h, 131, 70)[static_cast<std::size_t>(r)];
              round.of_query.resize(rows.size());
              round.of_key.resize(keys.size());
              CHECK(round.of_query == of_query);
              CHECK(round.of_key == of_key);
            }
          }
        }
    }
}

TEST_CASE("smyrf_clusters: cross-polytope buckets are the oracle's") {
  for (const index_t buckets : {0, 2, 10, 64})
    for (const named_transform& t : all_transforms) {
      const dense_problem p{.n_q = 150, .n_kv = 90, .d_qk = 16, .deviation = 2};
      dense_operands<float> x(p);
      const smyrf_clusters c = plan(x, {.clusters = 9,
                                        .rounds = 2,
                                        .seed = 3,
                                        .transform = t.transform,
                                        .hash = attn::cross_polytope{.buckets = buckets}});
      CAPTURE(buckets, static_cast<int>(t.meaning));
      CHECK(fault_of(c, p) == "");
      const auto queries = rows_of(x.q.values(), 0, 0, 150), keys = rows_of(x.k.values(), 0, 0, 90);
      const double norm2_q = reference::largest_norm2(queries);
      const double norm2_k = reference::largest_norm2(keys);
      const index_t columns = buckets == 0 ? 5 : buckets / 2;
      for (index_t r = 0; r < 2; ++r) {
        const auto bucket_clusters = [&](const reference::vectors& rows, bool is_query) {
          const auto points = reference::transformed(rows, is_query, t.meaning, norm2_q, norm2_k);
          std::vector<double> best(rows.size(), -HUGE_VAL), bucket(rows.size());
          for (int sign : {1, -1})
            for (index_t column = 0; column < columns; ++column) {
              const auto h = hashes(rows, points, [&](index_t c0) {
                return static_cast<double>(attn::cross_polytope::coefficient(3, r, c0, column));
              });
              for (std::size_t i = 0; i < rows.size(); ++i) {
                if (sign * h[i] <= best[i]) continue;
                best[i] = sign * h[i];
                bucket[i] = static_cast<double>(column + (sign == 1 ? 0 : columns));
              }
            }
          return reference::rank_clusters(bucket, 9);
        };
        const auto round = rounds_of(c, 0, 0, 150, 90)[static_cast<std::size_t>(r)];
        CHECK(round.of_query == bucket_clusters(queries, true));
        CHECK(round.of_key == bucket_clusters(keys, false));
      }
    }
}

TEMPLATE_TEST_CASE("smyrf_clusters: balanced, each position once, for any sizes", "",
                   ELEMENT_TYPES) {
  for (const auto clustering : {smyrf_clustering::ranks, smyrf_clustering::bisection})
    for (const index_t n_q : {1, 2, 7, 15, 16, 17, 100, 127, 129, 700})
      for (const index_t n_kv : {1, 5, 8, 33, 128, 260})
        for (const index_t clusters : {1, 2, 3, 5, 7, 32}) {
          if (clusters > std::min(n_q, n_kv)) continue;
          const dense_problem p{
              .n_batch = 1, .n_heads = 2, .n_kv_heads = 1, .n_q = n_q, .n_kv = n_kv, .d_qk = 9};
          CAPTURE(p, clusters, static_cast<int>(clustering));
          dense_operands<TestType> x(p);
          const auto c = plan(x, {.clusters = clusters, .rounds = 2, .clustering = clustering});
          CHECK(fault_of(c, p) == "");
        }
}

TEST_CASE("smyrf_clusters: the same on every platform, for any number of threads") {
  const dense_problem p{.n_batch = 2,
                        .n_heads = 6,
                        .n_kv_heads = 3,
                        .n_q = 1003,
                        .n_kv = 517,
                        .d_qk = 37,
                        .deviation = 2};
  dense_operands<float> x(p);
  const auto sum = [&](smyrf_options options, int n_threads) {
    options.clusters = 13, options.rounds = 3, options.seed = 11;
    attn::context ctx(n_threads);
    return checksum(plan(x, options, ctx), p);
  };
  // Known numbers: what one platform gave, all must.
  const std::vector<std::pair<smyrf_options, std::uint64_t>> known = {
      {{}, 0xcc38b227afc79988u},
      {{.transform = attn::xbox_transform{}}, 0x511f8204a02ae766u},
      {{.transform = attn::l2_alsh_transform{}}, 0xcc9295d3d37997c0u},
      {{.transform = attn::simple_lsh_transform{}}, 0x6656ee9eda011a90u},
      {{.transform = attn::no_transform{}}, 0x476e6d41e4e81bc9u},
      {{.hash = attn::cross_polytope{.buckets = 24}}, 0x367fc9f369186459u},
      {{.clustering = smyrf_clustering::bisection}, 0x37087b172968a2e5u},
      {{.local_round = true}, 0x431014ba70c78b1bu},
  };
  for (const auto& [options, expected] : known) {
    for (const int n_threads : {1, 2, 3, 7}) CHECK(sum(options, n_threads) == expected);
  }
  // Doubles are taken as floats; halves are their own values.
  dense_operands<double> y(p);
  reference::tensor q = x.q.values(), k = x.k.values();
  y.q.assign(q), y.k.assign(k);
  CHECK(checksum(plan(y, {.clusters = 13, .rounds = 3, .seed = 11}), p) == known[0].second);
}

TEST_CASE("smyrf_clusters: another seed, another plan; the same seed, the same plan") {
  const dense_problem p{.n_q = 300, .n_kv = 300, .d_qk = 16};
  dense_operands<float> x(p);
  for (const auto clustering : {smyrf_clustering::ranks, smyrf_clustering::bisection}) {
    const auto of = [&](std::uint64_t seed) {
      return plan(x, {.clusters = 6, .rounds = 2, .seed = seed, .clustering = clustering});
    };
    CHECK(checksum(of(1), p) == checksum(of(1), p));
    CHECK(checksum(of(1), p) != checksum(of(2), p));
    // Rounds differ from each other too.
    const auto rounds = rounds_of(of(1), 0, 0, 300, 300);
    CHECK(rounds[0].of_query != rounds[1].of_query);
  }
}

TEST_CASE("smyrf_clusters: a head's clusters depend on that head alone") {
  const dense_problem p{.n_batch = 3, .n_heads = 4, .n_kv_heads = 2, .n_q = 90, .n_kv = 60};
  dense_operands<float> all(p);
  dense_problem one = p;
  one.n_batch = 1, one.n_heads = 2, one.n_kv_heads = 1;
  for (const auto clustering : {smyrf_clustering::ranks, smyrf_clustering::bisection}) {
    const smyrf_options options{.clusters = 5, .rounds = 2, .clustering = clustering};
    const auto c = plan(all, options);
    for (index_t b = 0; b < 3; ++b)
      for (index_t g = 0; g < 2; ++g) {
        dense_operands<float> x(one);
        reference::tensor q(one.q_extents()), k(one.k_extents());
        const reference::tensor all_q = all.q.values(), all_k = all.k.values();
        for (index_t h = 0; h < 2; ++h)
          for (index_t i = 0; i < 90; ++i)
            for (index_t e = 0; e < p.d_qk; ++e) q(0, h, i, e) = all_q(b, 2 * g + h, i, e);
        for (index_t j = 0; j < 60; ++j)
          for (index_t e = 0; e < p.d_qk; ++e) k(0, 0, j, e) = all_k(b, g, j, e);
        x.q.assign(q), x.k.assign(k);
        const auto alone = plan(x, options);
        for (index_t h = 0; h < 2; ++h)
          for (index_t r = 0; r < 2; ++r) {
            CHECK(std::ranges::equal(alone.query_order(0, h, r), c.query_order(b, 2 * g + h, r)));
            CHECK(std::ranges::equal(alone.key_order(0, h, r), c.key_order(b, 2 * g + h, r)));
          }
      }
  }
}

TEST_CASE("smyrf_clusters: what lies past a length is not read") {
  const dense_problem p{.n_batch = 3, .n_q = 64, .n_kv = 80, .d_qk = 9};
  const std::vector<index_t> q_lengths = {64, 10, 0}, k_lengths = {0, 17, 80};
  for (const auto clustering : {smyrf_clustering::ranks, smyrf_clustering::bisection}) {
    const smyrf_options options{.clusters = 4,
                                .rounds = 2,
                                .query_lengths = q_lengths,
                                .key_lengths = k_lengths,
                                .clustering = clustering};
    std::vector<std::uint64_t> sums;
    for (const double poison : {0.0, std::nan(""), 1e30}) {
      dense_operands<float> x(p);
      reference::tensor q = x.q.values(), k = x.k.values();
      for (index_t b = 0; b < 3; ++b)
        for (index_t c = 0; c < 9; ++c) {
          const auto at = static_cast<std::size_t>(b);
          for (index_t i = q_lengths[at]; i < 64; ++i) q(b, 0, i, c) = poison;
          for (index_t j = k_lengths[at]; j < 80; ++j) k(b, 0, j, c) = poison;
        }
      x.q.assign(q), x.k.assign(k);
      const auto c = plan(x, options);
      CHECK(fault_of(c, p) == "");
      sums.push_back(checksum(c, p));
      CHECK(c.query_begin(1, 4) == 10);
      CHECK(c.key_begin(1, 4) == 17);
      CHECK(c.query_order(2, 0, 0).empty());
      CHECK(c.key_order(0, 0, 0).empty());
    }
    CHECK(sums[0] == sums[1]);
    CHECK(sums[0] == sums[2]);
  }
}

TEST_CASE("smyrf_clusters: equal hashes go by position") {
  const dense_problem p{.n_q = 50, .n_kv = 40, .d_qk = 8};
  for (const auto clustering : {smyrf_clustering::ranks, smyrf_clustering::bisection})
    for (const double value : {0.0, 1.0, -3.5}) {
      dense_operands<float> x(p);
      x.q.assign(reference::tensor(p.q_extents(), value));
      x.k.assign(reference::tensor(p.k_extents(), value));
      const auto c = plan(x, {.clusters = 7, .rounds = 3, .clustering = clustering});
      for (index_t r = 0; r < 3; ++r) {
        const auto q = c.query_order(0, 0, r), k = c.key_order(0, 0, r);
        for (index_t i = 0; i < 50; ++i) CHECK(q[static_cast<std::size_t>(i)] == i);
        for (index_t j = 0; j < 40; ++j) CHECK(k[static_cast<std::size_t>(j)] == j);
      }
    }
}

TEST_CASE("smyrf_clusters: rows that are not finite rank last and leave the others as they are") {
  const index_t n = 60;
  const dense_problem p{.n_q = n, .n_kv = n, .d_qk = 8};
  const std::vector<index_t> bad = {3, 17, 18, 44};
  for (const auto clustering : {smyrf_clustering::ranks, smyrf_clustering::bisection})
    for (const double poison : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
      CAPTURE(static_cast<int>(clustering), poison);
      dense_operands<float> x(p);
      reference::tensor q = x.q.values(), k = x.k.values();
      for (const index_t i : bad) q(0, 0, i, i % 8) = poison, k(0, 0, i, (i + 3) % 8) = poison;
      x.q.assign(q), x.k.assign(k);
      const auto c = plan(x, {.clusters = 6, .rounds = 3, .clustering = clustering});
      CHECK(fault_of(c, p) == "");
      for (index_t r = 0; r < 3; ++r) {
        // Six clusters of ten: the four are in the last one.
        for (const auto order : {c.query_order(0, 0, r), c.key_order(0, 0, r)}) {
          for (const index_t i : bad) {
            CHECK(std::find(order.begin() + 50, order.end(), i) != order.end());
          }
        }
      }
      if (clustering == smyrf_clustering::bisection) continue;
      // Ranks of the other rows are those they have among themselves.
      dense_problem fewer = p;
      fewer.n_q = fewer.n_kv = n - 4;
      dense_operands<float> y(fewer);
      reference::tensor q2(fewer.q_extents()), k2(fewer.k_extents());
      std::vector<index_t> old;
      for (index_t i = 0; i < n; ++i) {
        if (std::find(bad.begin(), bad.end(), i) == bad.end()) old.push_back(i);
      }
      for (index_t i = 0; i < n - 4; ++i)
        for (index_t e = 0; e < 8; ++e) {
          q2(0, 0, i, e) = q(0, 0, old[static_cast<std::size_t>(i)], e);
          k2(0, 0, i, e) = k(0, 0, old[static_cast<std::size_t>(i)], e);
        }
      y.q.assign(q2), y.k.assign(k2);
      // Cut after each rank: 56 clusters give the ranking itself, 60 that of the first call.
      const auto ranking = plan(y, {.clusters = n - 4, .rounds = 3});
      const auto first = plan(x, {.clusters = n, .rounds = 3});
      for (index_t r = 0; r < 3; ++r)
        for (index_t rank = 0; rank < n - 4; ++rank) {
          const auto at = static_cast<std::size_t>(rank);
          CHECK(first.query_order(0, 0, r)[at] ==
                old[static_cast<std::size_t>(ranking.query_order(0, 0, r)[at])]);
          CHECK(first.key_order(0, 0, r)[at] ==
                old[static_cast<std::size_t>(ranking.key_order(0, 0, r)[at])]);
        }
    }
}

TEST_CASE("smyrf_clusters: numbers at the ends of float") {
  const dense_problem p{.n_q = 40, .n_kv = 40, .d_qk = 4};
  for (const double scale : {1e38, 3e-39, 1e-45}) {
    dense_operands<float> x(p);
    reference::tensor q = x.q.values(), k = x.k.values();
    for (double& e : q.elements()) e *= scale;
    for (double& e : k.elements()) e *= scale;
    x.q.assign(q), x.k.assign(k);
    for (const auto clustering : {smyrf_clustering::ranks, smyrf_clustering::bisection}) {
      const auto c = plan(x, {.clusters = 5, .rounds = 2, .clustering = clustering});
      CHECK(fault_of(c, p) == "");
    }
  }
}

TEST_CASE("smyrf_clusters: the local round is the sequence itself") {
  const dense_problem p{.n_q = 60, .n_kv = 30, .d_qk = 8};
  dense_operands<float> x(p);
  for (const auto clustering : {smyrf_clustering::ranks, smyrf_clustering::bisection}) {
    const auto c =
        plan(x, {.clusters = 4, .rounds = 3, .clustering = clustering, .local_round = true});
    const auto without = plan(x, {.clusters = 4, .rounds = 3, .clustering = clustering});
    CHECK(fault_of(c, p) == "");
    for (index_t i = 0; i < 60; ++i)
      CHECK(c.query_order(0, 0, 0)[static_cast<std::size_t>(i)] == i);
    for (index_t j = 0; j < 30; ++j) CHECK(c.key_order(0, 0, 0)[static_cast<std::size_t>(j)] == j);
    for (index_t r = 1; r < 3; ++r) {
      CHECK(std::ranges::equal(c.query_order(0, 0, r), without.query_order(0, 0, r)));
    }
  }
}

TEST_CASE("smyrf_clusters: bisection finds the groups that are there") {
  // Queries and keys of 16 groups, each group with a direction of its own.
  const index_t n = 512, groups = 16, d = 24;
  const dense_problem p{.n_q = n, .n_kv = n, .d_qk = d};
  dense_operands<float> x(p);
  random_source random(9);
  reference::tensor centre({1, 1, groups, d}), q(p.q_extents()), k(p.k_extents());
  for (double& e : centre.elements()) e = random.normal();
  for (index_t i = 0; i < n; ++i)
    for (index_t c = 0; c < d; ++c) {
      q(0, 0, i, c) = centre(0, 0, i % groups, c) + 0.3 * random.normal();
      k(0, 0, i, c) = centre(0, 0, i * 7 % groups, c) + 0.3 * random.normal();
    }
  x.q.assign(q), x.k.assign(k);
  const auto together = [&](const smyrf_options& options) {
    const auto round = rounds_of(plan(x, options), 0, 0, n, n)[0];
    index_t meet = 0, all = 0;
    for (index_t i = 0; i < n; ++i)
      for (index_t j = 0; j < n; ++j) {
        if (i % groups != j * 7 % groups) continue;
        ++all;
        meet += round.of_query[static_cast<std::size_t>(i)] ==
                round.of_key[static_cast<std::size_t>(j)];
      }
    return static_cast<double>(meet) / static_cast<double>(all);
  };
  const double bisection =
      together({.clusters = groups, .rounds = 1, .clustering = smyrf_clustering::bisection});
  const double ranks = together({.clusters = groups, .rounds = 1});
  CAPTURE(bisection, ranks);
  CHECK(bisection > 0.7);
  CHECK(ranks < 0.4);
  CHECK(ranks > 1.5 / static_cast<double>(groups));
}

TEST_CASE("smyrf_clusters: assign makes the same plan in old memory") {
  dense_operands<float> x({.n_q = 90, .n_kv = 70, .d_qk = 8});
  dense_operands<float> y({.n_batch = 2, .n_heads = 3, .n_kv_heads = 3, .n_q = 31, .n_kv = 33});
  smyrf_clusters c = plan(x, {.clusters = 8});
  const smyrf_options options{.clusters = 5, .rounds = 2, .seed = 4};
  c.assign(y.q.view(), y.k.view(), options);
  CHECK(fault_of(c, y.problem) == "");
  CHECK(checksum(c, y.problem) == checksum(plan(y, options), y.problem));
  const smyrf_clusters copy = c;
  CHECK(checksum(copy, y.problem) == checksum(c, y.problem));
}

TEST_CASE("smyrf_clusters: tensors without rows or heads") {
  for (const auto& [n_q, n_kv] : {std::pair<index_t, index_t>{0, 5}, {5, 0}, {0, 0}})
    for (const auto clustering : {smyrf_clustering::ranks, smyrf_clustering::bisection}) {
      const dense_problem p{.n_q = n_q, .n_kv = n_kv};
      dense_operands<float> x(p);
      const auto c = plan(x, {.clusters = 2, .clustering = clustering});
      CHECK(fault_of(c, p) == "");
    }
  dense_operands<float> none({.n_batch = 0});
  CHECK(plan(none, {.clusters = 1}).rounds() == 4);
}
