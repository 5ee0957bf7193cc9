// SPDX-License-Identifier: MIT
//
// Laws of pooled attention.
#include "support/catch.hpp"
#include "support/random.hpp"

#include <attn/pooled_attention.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

using namespace attn_test;
using attn::index_t;
using attn::pooled_options;
using attn::tensor_view;

namespace {

constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

/// One random problem, [1, heads, ...] in double, every key/value head its own.
struct problem {
  index_t heads, n_q, n, k, d_qk, d_v;
  std::vector<double> q, keys, v, scores, out, lse;

  explicit problem(random_source& random)
      : heads(random.integer(1, 3)), n_q(random.integer(1, 20)), n(random.integer(1, 90)),
        k(random.integer(1, n)), d_qk(random.integer(1, 20)), d_v(random.integer(1, 20)),
        q(size(n_q, d_qk)), keys(size(n, d_qk)), v(size(n, d_v)), scores(size(n, 1)),
        out(size(n_q, d_v)), lse(size(n_q, 1)) {
    for (auto* x : {&q, &keys, &v}) {
      for (double& e : *x) e = random.normal();
    }
    for (double& e : scores) e = random.uniform(0, 1);
  }
  [[nodiscard]] std::size_t size(index_t length, index_t dim) const {
    return static_cast<std::size_t>(heads * length * dim);
  }
  [[nodiscard]] static double& at(std::vector<double>& x, index_t e) {
    return x[static_cast<std::size_t>(e)];
  }
  void attend(const pooled_options& o, attn::context& ctx = attn::default_context()) {
    attn::pooled_attention(
        attn::bhld(q.data(), 1, heads, n_q, d_qk), attn::bhld(keys.data(), 1, heads, n, d_qk),
        attn::bhld(v.data(), 1, heads, n, d_v), attn::bhld(scores.data(), 1, heads, n, 1),
        attn::bhld(out.data(), 1, heads, n_q, d_v), attn::bhld(lse.data(), 1, heads, n_q, 1), o,
        ctx);
  }
  [[nodiscard]] pooled_options random_options(random_source& random) const {
    pooled_options o{.k = k};
    if (random.coin()) o.boost = attn::topk_boost::scaled;
    o.strength = random.uniform(1.5, 50);
    o.sort = static_cast<attn::topk_sort>(random.integer(0, 2));
    return o;
  }
};

double largest_gap(const std::vector<double>& a, const std::vector<double>& b) {
  double gap = 0;
  for (std::size_t e = 0; e < a.size(); ++e) {
    if (!(a[e] == b[e]))
      gap = std::max(gap, std::isnan(a[e] - b[e]) ? infinity : std::abs(a[e] - b[e]));
  }
  return gap;
}

}  // namespace

TEST_CASE("It is dense attention to keys and values pooled before, whatever the threads") {
  random_source random(1);
  attn::context serial(1), threaded(3);
  for (int round = 0; round < 100; ++round) {
    problem p(random);
    CAPTURE(round, p.heads, p.n_q, p.n, p.k, p.d_qk, p.d_v);
    pooled_options o = p.random_options(random);
    const std::vector<index_t> lengths{random.integer(p.k, p.n)};
    if (random.coin()) o.lengths = lengths;
    p.attend(o, serial);
    const std::vector<double> out = p.out, lse = p.lse;

    const attn::tournament t(attn::bhld(p.scores.data(), 1, p.heads, p.n, 1), p.k, o.pooling());
    std::vector<double> k_pooled(p.size(p.k, p.d_qk)), v_pooled(p.size(p.k, p.d_v));
    const auto kp = attn::bhld(k_pooled.data(), 1, p.heads, p.k, p.d_qk);
    const auto vp = attn::bhld(v_pooled.data(), 1, p.heads, p.k, p.d_v);
    attn::soft_topk(t, attn::bhld(p.keys.data(), 1, p.heads, p.n, p.d_qk), kp);
    attn::soft_topk(t, attn::bhld(p.v.data(), 1, p.heads, p.n, p.d_v), vp);
    attn::dense_attention(attn::bhld(p.q.data(), 1, p.heads, p.n_q, p.d_qk), kp, vp,
                          attn::bhld(p.out.data(), 1, p.heads, p.n_q, p.d_v),
                          attn::bhld(p.lse.data(), 1, p.heads, p.n_q, 1));
    CHECK(out == p.out);
    CHECK(lse == p.lse);
    p.attend(o, threaded);
    CHECK(out == p.out);
    CHECK(lse == p.lse);
  }
}

TEST_CASE("One key left: every query gets the same mixture of all values") {
  random_source random(2);
  for (int round = 0; round < 50; ++round) {
    problem p(random);
    p.k = 1;
    const pooled_options o = p.random_options(random);
    p.attend(o);
    const attn::tournament t(attn::bhld(p.scores.data(), 1, p.heads, p.n, 1), 1, o.pooling());
    std::vector<double> v_pooled(p.size(1, p.d_v));
    attn::soft_topk(t, attn::bhld(p.v.data(), 1, p.heads, p.n, p.d_v),
                    attn::bhld(v_pooled.data(), 1, p.heads, 1, p.d_v));
    std::vector<double> expected;
    for (index_t h = 0; h < p.heads; ++h) {
      for (index_t i = 0; i < p.n_q; ++i) {
        for (index_t c = 0; c < p.d_v; ++c)
          expected.push_back(problem::at(v_pooled, h * p.d_v + c));
      }
    }
    CHECK(largest_gap(p.out, expected) < 1e-15);
  }
}

TEST_CASE("The order of keys does not matter, where no scores are equal") {
  random_source random(3);
  for (int round = 0; round < 50; ++round) {
    problem p(random), moved = p;
    pooled_options o = p.random_options(random);
    if (o.sort == attn::topk_sort::never) o.sort = attn::topk_sort::once;
    std::vector<index_t> place(static_cast<std::size_t>(p.n));
    std::iota(place.begin(), place.end(), index_t{0});
    for (std::size_t i = place.size() - 1; i > 0; --i) {
      std::swap(place[i],
                place[static_cast<std::size_t>(random.integer(0, static_cast<index_t>(i)))]);
    }
    const auto move_rows = [&](std::vector<double>& from, std::vector<double>& to, index_t d) {
      for (index_t h = 0; h < p.heads; ++h) {
        for (index_t i = 0; i < p.n; ++i) {
          const index_t j = place[static_cast<std::size_t>(i)];
          for (index_t c = 0; c < d; ++c) {
            problem::at(to, (h * p.n + j) * d + c) = problem::at(from, (h * p.n + i) * d + c);
          }
        }
      }
    };
    move_rows(p.keys, moved.keys, p.d_qk);
    move_rows(p.v, moved.v, p.d_v);
    move_rows(p.scores, moved.scores, 1);
    p.attend(o);
    moved.attend(o);
    CHECK(largest_gap(p.out, moved.out) < 1e-13);
    CHECK(largest_gap(p.lse, moved.lse) < 1e-13);
  }
}

TEST_CASE("A key whose score is −inf or NaN is not there, if others are") {
  random_source random(4);
  for (int round = 0; round < 50; ++round) {
    problem p(random);
    const index_t gone = random.integer(0, p.n - 1);
    // Enough others that it meets one of them.
    if (p.n < 3) continue;
    p.k = random.integer(1, (p.n - 1) / 2);
    pooled_options o = p.random_options(random);
    if (o.sort == attn::topk_sort::never)
      o.sort = attn::topk_sort::once;  // it could have byes only
    const auto absent_by = [&](double score) {
      problem x = p;
      for (index_t h = 0; h < x.heads; ++h) {
        problem::at(x.scores, h * x.n + gone) = score;
        for (index_t c = 0; c < x.d_qk; ++c)
          problem::at(x.keys, (h * x.n + gone) * x.d_qk + c) = nan_value;
        for (index_t c = 0; c < x.d_v; ++c)
          problem::at(x.v, (h * x.n + gone) * x.d_v + c) = infinity;
      }
      x.attend(o);
      return x;
    };
    const problem a = absent_by(-infinity), b = absent_by(nan_value);
    for (const double e : a.out) REQUIRE(std::isfinite(e));
    for (const double e : a.lse) REQUIRE(std::isfinite(e));
    CHECK(a.out == b.out);
    CHECK(a.lse == b.lse);
  }
}

TEST_CASE("A NaN in a key or a value reaches all queries of its head, and no other head") {
  random_source random(5);
  for (int round = 0; round < 50; ++round) {
    problem p(random);
    const pooled_options o = p.random_options(random);
    p.attend(o);
    problem bad = p;
    const index_t h = random.integer(0, p.heads - 1), j = random.integer(0, p.n - 1);
    problem::at(bad.v, (h * p.n + j) * p.d_v) = nan_value;
    bad.attend(o);
    for (index_t g = 0; g < p.heads; ++g) {
      for (index_t i = 0; i < p.n_q; ++i) {
        for (index_t c = 0; c < p.d_v; ++c) {
          const index_t e = (g * p.n_q + i) * p.d_v + c;
          const double got = problem::at(bad.out, e);
          if (g == h && c == 0) {
            REQUIRE(std::isnan(got));
          } else {
            REQUIRE(got == problem::at(p.out, e));
          }
        }
      }
    }
    CHECK(bad.lse == p.lse);
  }
}
