// SPDX-License-Identifier: MIT
//
// The transforms' identities, the generator, the definition of the hash.
#include "support/catch.hpp"
#include "support/random.hpp"

#include <attn/lsh.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

using attn::index_t;
using attn::lsh_lift;
using attn::lsh_norms;
using attn_test::random_source;

namespace {

using vector = std::vector<double>;

double dot(const vector& x, const vector& y) {
  double sum = 0;
  for (std::size_t c = 0; c < x.size(); ++c) sum += x[c] * y[c];
  return sum;
}

double squared_distance(const vector& x, const vector& y) {
  double sum = 0;
  for (std::size_t c = 0; c < x.size(); ++c) sum += (x[c] - y[c]) * (x[c] - y[c]);
  return sum;
}

/// The transformed vector, all of it.
vector point(const vector& x, const lsh_lift& lift, index_t dims) {
  vector u;
  for (const double e : x) u.push_back(lift.factor * e);
  u.insert(u.end(), lift.tail.begin(), lift.tail.begin() + dims);
  return u;
}

struct sample {
  std::vector<vector> q, k;
  lsh_norms norms;

  sample(std::uint64_t seed, index_t n, index_t d, double deviation_q, double deviation_k) {
    random_source random(seed);
    for (index_t i = 0; i < n; ++i) {
      // Norms over three orders of magnitude.
      const double wide = std::pow(10.0, random.uniform(-2, 1));
      vector x, y;
      for (index_t c = 0; c < d; ++c) {
        x.push_back(deviation_q * wide * random.normal());
        y.push_back(deviation_k * random.normal());
      }
      norms.query2 = std::max(norms.query2, dot(x, x));
      norms.key2 = std::max(norms.key2, dot(y, y));
      q.push_back(x), k.push_back(y);
    }
  }
};

/// The largest |‖F(q) − G(k)‖² − expected(q, k)| over all pairs.
template <class Transform, class Expected>
double worst(const sample& s, const Transform& t, const Expected& expected) {
  double error = 0;
  for (const vector& q : s.q)
    for (const vector& k : s.k) {
      const vector f = point(q, t.query(dot(q, q), s.norms), t.dims());
      const vector g = point(k, t.key(dot(k, k), s.norms), t.dims());
      error = std::max(error, std::abs(squared_distance(f, g) - expected(q, k)));
    }
  return error;
}

constexpr double eps = std::numeric_limits<double>::epsilon();

}  // namespace

TEST_CASE("smyrf_transform: distances are 2 (M_Q² + M_K² − q·k), all norms are R") {
  for (const double scale_k : {1.0, 1e-3, 1e3}) {
    const sample s(1, 40, 24, 1, scale_k);
    const double r2 = s.norms.query2 + s.norms.key2;
    const double error = worst(s, attn::smyrf_transform{}, [&](const vector& q, const vector& k) {
      return 2 * (r2 - dot(q, k));
    });
    CHECK(error <= 40 * eps * r2);
    for (const vector& q : s.q) {
      const vector f = point(q, attn::smyrf_transform::query(dot(q, q), s.norms), 2);
      CHECK(std::abs(dot(f, f) - r2) <= 40 * eps * r2);
    }
    for (const vector& k : s.k) {
      const vector g = point(k, attn::smyrf_transform::key(dot(k, k), s.norms), 2);
      CHECK(std::abs(dot(g, g) - r2) <= 40 * eps * r2);
    }
  }
}

TEST_CASE("xbox_transform: distances are ‖q‖² + M_K² − 2 q·k") {
  const sample s(2, 40, 24, 1, 2);
  const double error = worst(s, attn::xbox_transform{}, [&](const vector& q, const vector& k) {
    return dot(q, q) + s.norms.key2 - 2 * dot(q, k);
  });
  CHECK(error <= 100 * eps * (s.norms.query2 + s.norms.key2));
}

TEST_CASE("l2_alsh_transform: distances are 1 + terms/4 − 2 x·q/‖q‖ + ‖x‖^(2^(terms + 1))") {
  const sample s(3, 40, 24, 1, 2);
  for (int terms = 1; terms <= 8; ++terms) {
    const attn::l2_alsh_transform t{.terms = terms, .shrink = 0.9};
    const double error = worst(s, t, [&](const vector& q, const vector& k) {
      const double x = 0.9 / std::sqrt(s.norms.key2);
      const double norm2 = x * x * dot(k, k);
      return 1 + terms / 4.0 - 2 * x * dot(q, k) / std::sqrt(dot(q, q)) +
             std::pow(norm2, std::pow(2.0, terms));
    });
    CHECK(error <= 200 * eps);
  }
}

TEST_CASE("simple_lsh_transform: all on the unit sphere, cosines are q·k / (‖q‖ M_K)") {
  const sample s(4, 40, 24, 1, 2);
  const attn::simple_lsh_transform t;
  for (const vector& q : s.q)
    for (const vector& k : s.k) {
      const vector f = point(q, t.query(dot(q, q), s.norms), 1);
      const vector g = point(k, t.key(dot(k, k), s.norms), 1);
      CHECK(std::abs(dot(f, f) - 1) <= 20 * eps);
      CHECK(std::abs(dot(g, g) - 1) <= 20 * eps);
      const double cosine = dot(q, k) / std::sqrt(dot(q, q) * s.norms.key2);
      CHECK(std::abs(dot(f, g) - cosine) <= 20 * eps);
    }
}

TEST_CASE("no_transform appends nothing") {
  CHECK(attn::no_transform::dims() == 0);
  CHECK(attn::no_transform::query(2, {3, 4}).factor == 1);
  CHECK(attn::no_transform::key(2, {3, 4}).factor == 1);
}

TEST_CASE("No radicand is negative: equal norms, zeros, the longest vector") {
  // Squared norms that differ from the bound by rounding alone.
  for (const double norm2 : {0.0, 1e-300, 0.1 + 0.2, 3.0, 1e300}) {
    const lsh_norms norms{norm2, norm2};
    for (const double x : {norm2, norm2 * (1 + eps), norm2 * (1 - eps)}) {
      const auto finite = [](const lsh_lift& lift) {
        return std::isfinite(lift.factor) &&
               std::all_of(lift.tail.begin(), lift.tail.end(),
                           [](double t) { return std::isfinite(t) && t >= 0; });
      };
      CHECK(finite(attn::smyrf_transform::query(x, norms)));
      CHECK(finite(attn::smyrf_transform::key(x, norms)));
      CHECK(finite(attn::xbox_transform::key(x, norms)));
      CHECK(finite(attn::simple_lsh_transform::query(x, norms)));
      CHECK(finite(attn::simple_lsh_transform::key(x, norms)));
      CHECK(finite(attn::l2_alsh_transform{}.query(x, norms)));
      CHECK(finite(attn::l2_alsh_transform{}.key(x, norms)));
    }
  }
}

TEST_CASE("lsh_gaussian: the same numbers everywhere, 20 bits, mean 0, variance 1") {
  // Known numbers: what one platform gave, all must.
  CHECK(attn::lsh_bits(0, 0, 0, 0) == 2391539541053276776u);
  CHECK(attn::lsh_bits(1, 2, 3, 4) == 15374388949593934587u);
  CHECK(attn::lsh_gaussian(0, 0, 0) == -1.99176025f);
  CHECK(attn::lsh_gaussian(1, 2, 3) == 0.100875854f);

  constexpr int n = 40000;
  double sum = 0, sum2 = 0, sum3 = 0, sum4 = 0;
  int below[3] = {0, 0, 0};
  for (std::uint64_t i = 0; i < n; ++i) {
    const double x = static_cast<double>(attn::lsh_gaussian(7, i % 5, i));
    CHECK(x * 65536 == std::floor(x * 65536));
    sum += x, sum2 += x * x, sum3 += x * x * x, sum4 += x * x * x * x;
    below[0] += x < -1, below[1] += x < 0.5, below[2] += x < 2;
  }
  CHECK(std::abs(sum / n) < 0.02);
  CHECK(std::abs(sum2 / n - 1) < 0.03);
  CHECK(std::abs(sum3 / n) < 0.06);
  CHECK(std::abs(sum4 / n - 2.9) < 0.15);  // 3 − 6/(5·12) for the sum of 12
  CHECK(std::abs(below[0] / double{n} - 0.15866) < 0.01);
  CHECK(std::abs(below[1] / double{n} - 0.69146) < 0.01);
  CHECK(std::abs(below[2] / double{n} - 0.97725) < 0.01);
}

TEST_CASE("Rounds, seeds and coordinates have numbers of their own") {
  std::vector<float> seen;
  for (std::uint64_t seed = 0; seed < 4; ++seed)
    for (index_t round = 0; round < 4; ++round)
      for (index_t c = 0; c < 64; ++c) {
        seen.push_back(attn::random_projection::coefficient(seed, round, c));
        seen.push_back(attn::cross_polytope::coefficient(seed, round, c, 0));
        seen.push_back(attn::cross_polytope::coefficient(seed, round, c, 1));
      }
  std::sort(seen.begin(), seen.end());
  const auto distinct = std::unique(seen.begin(), seen.end()) - seen.begin();
  CHECK(distinct > 3000);  // of 3072, 20 bits each
}

TEST_CASE("The hash of a transformed vector is factor · product + its appended terms") {
  const lsh_lift lift{2, {0.5, 0, 3}};
  const std::vector<float> a = {4, 100, -1};
  CHECK(attn::random_projection::finish(1.5f, lift, a) == 2 * 1.5 + 4 * 0.5 - 3);
  CHECK(attn::random_projection::finish(1.5f, lift, {}) == 3);
  CHECK(std::isnan(attn::random_projection::finish(std::nanf(""), lift, a)));
  CHECK(attn::random_projection::narrow(1e300) == std::numeric_limits<float>::max());
  CHECK(attn::random_projection::narrow(-1e300) == std::numeric_limits<float>::lowest());
  CHECK(std::isnan(attn::random_projection::narrow(std::nan(""))));
  CHECK(std::isnan(attn::random_projection::narrow_product(-HUGE_VAL)));
  CHECK(attn::random_projection::narrow_product(0.25) == 0.25f);
}
