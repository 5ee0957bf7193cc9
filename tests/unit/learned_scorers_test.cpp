// SPDX-License-Identifier: MIT
//
// Linear and nonlinear scorers against their definition, within bounds from the data.
#include "reference/scorers.hpp"
#include "support/allocation_counter.hpp"
#include "support/catch.hpp"
#include "support/dense_call.hpp"
#include "support/random.hpp"
#include "support/tensor_buffer.hpp"

#include <attn/scorers.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

using namespace attn_test;
using reference::tensor;

#define ELEMENT_TYPES float, double, Eigen::half, Eigen::bfloat16

namespace {

constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();

layout plain_layout(int i) { return plain_layouts[static_cast<std::size_t>(i)]; }
std::size_t at(index_t i) { return static_cast<std::size_t>(i); }

template <class T>
std::vector<T> rounded(const tensor& t) {
  std::vector<T> x;
  for (const double e : t.elements()) x.push_back(static_cast<T>(e));
  return x;
}
template <class T>
std::vector<double> widened(const std::vector<T>& x) {
  return {x.begin(), x.end()};
}

/// The largest error in units of its element; NaN if there is one.
double in_units(const std::vector<double>& got, const std::vector<double>& expected,
                const std::vector<double>& unit) {
  REQUIRE(got.size() == expected.size());
  REQUIRE(got.size() == unit.size());
  double largest = 0;
  for (std::size_t e = 0; e < got.size(); ++e) {
    const double error = std::abs(got[e] - expected[e]);
    if (error != error) return error;
    if (error > 0) largest = std::max(largest, error / unit[e]);
  }
  return largest;
}

// Roundings are independent, so that errors of n terms add up to their root mean square times √n,
// and adding n terms of magnitude S in order costs some 0.25 eps S (partial sums grow like the root
// of their length). Units are eps S, and sums of errors over √n. Measured are up to 1.5 of them, in
// double, where the oracle rounds as well.

/// What rounding does to a number: eps of the type that computes, half the distance of neighbours
/// (relative; of subnormal numbers absolute) in the type it is stored in.
struct precision {
  double eps, storage, floor;

  template <class T>
  static precision of() {
    return {arithmetic_epsilon<T>, storage_rounding<T>(),
            std::is_same_v<T, Eigen::half> ? 0x1p-25 : 0};
  }
};

/// Sums in double over n terms of magnitude `sum` in all, rounded once.
double double_sum(double e, double sum, index_t n, double eps) {
  return eps / 2 * std::abs(e) + static_cast<double>(n) * 0x1p-52 * sum;
}

struct linear_units {
  std::vector<double> scores, d_x, d_w;
  double d_b = 0;

  linear_units(const tensor& x, const std::vector<double>& w, double b0, const tensor& g,
               const reference::linear_score_gradients& e, precision p)
      : d_w(w.size()) {
    const index_t d = x.extent(3), n = x.extent(0) * x.extent(1) * x.extent(2);
    std::vector<double> sum_w(w.size());
    double sum_b = 0;
    for (index_t row = 0; row < n; ++row) {
      const double* in = x.elements().data() + row * d;
      const double up = std::abs(g.elements()[at(row)]);
      double size = std::abs(b0);
      for (index_t c = 0; c < d; ++c) {
        size += std::abs(in[c] * w[at(c)]);
        d_x.push_back((p.eps / 2 + p.storage) * (1 + p.eps) * up * std::abs(w[at(c)]) + p.floor);
        sum_w[at(c)] += up * std::abs(in[c]);
      }
      sum_b += up;
      scores.push_back(p.eps * size);
    }
    for (index_t c = 0; c < d; ++c) d_w[at(c)] = double_sum(e.d_w[at(c)], sum_w[at(c)], n, p.eps);
    d_b = double_sum(e.d_b, sum_b, n, p.eps);
  }
};

/// With P = Σ|x w1| + |b1| and t' = 1 − t², to first order:
///   δt = eps (t' P + |t|)        u = g w2 t',  δu = |g w2| (eps t' + 2|t| δt)
struct nonlinear_units {
  std::vector<double> scores, d_x, d_w1, d_b1, d_w2;
  double d_b2 = 0;

  nonlinear_units(const tensor& x, const tensor& w1, const std::vector<double>& b1,
                  const std::vector<double>& w2, double b2, const tensor& g,
                  const reference::nonlinear_score_gradients& e, precision p)
      : d_w1(w1.elements().size()), d_b1(b1.size()), d_w2(w2.size()) {
    const index_t d = x.extent(3), n_hidden = w1.extent(3);
    const index_t n = x.extent(0) * x.extent(1) * x.extent(2);
    const double root_n = std::sqrt(static_cast<double>(n));
    const double root_hidden = std::sqrt(static_cast<double>(n_hidden));
    double sum_b = 0;
    for (index_t row = 0; row < n; ++row) {
      const double* in = x.elements().data() + row * d;
      const double up = std::abs(g.elements()[at(row)]);
      double of_s = p.eps * std::abs(b2);
      std::vector<double> of_x(at(d));
      for (index_t h = 0; h < n_hidden; ++h) {
        double a = b1[at(h)], size = std::abs(a);
        for (index_t c = 0; c < d; ++c) {
          a += in[c] * w1(0, 0, c, h), size += std::abs(in[c] * w1(0, 0, c, h));
        }
        const double t = std::abs(std::tanh(a)), slope = 1 - t * t, v = std::abs(w2[at(h)]);
        const double of_t = p.eps * (slope * size + t), u = up * v * slope;
        const double of_u = p.eps * u + 2 * up * v * t * of_t;
        of_s += v * (p.eps * t + of_t / root_hidden);
        d_w2[at(h)] += up * of_t / root_n;
        d_b1[at(h)] += of_u / root_n;
        for (index_t c = 0; c < d; ++c) {
          of_x[at(c)] += std::abs(w1(0, 0, c, h)) * (p.eps * u + of_u / root_hidden);
          d_w1[at(c * n_hidden + h)] += std::abs(in[c]) * (p.eps * u + of_u / root_n);
        }
      }
      sum_b += up;
      scores.push_back(of_s);
      for (index_t c = 0; c < d; ++c) {
        d_x.push_back(of_x[at(c)] + p.storage * std::abs(e.d_x.elements()[at(row * d + c)]) +
                      p.floor);
      }
    }
    for (std::size_t h = 0; h < b1.size(); ++h) {  // summed in double
      d_b1[h] += p.eps * std::abs(e.d_b1[h]);
      d_w2[h] += p.eps * std::abs(e.d_w2[h]);
    }
    d_b2 = double_sum(e.d_b2, sum_b, n, p.eps);
  }
};

}  // namespace

TEMPLATE_TEST_CASE("linear_scorer and its gradients", "", ELEMENT_TYPES) {
  using T = arithmetic_t<TestType>;
  const layout l = plain_layout(GENERATE(0, 1, 2, 3, 4, 5, 6));
  for (const index_t d : {1, 7, 16, 33, 130, 260}) {
    CAPTURE(l, d);
    const std::array<index_t, 4> shape{2, 3, 70, d};
    tensor_buffer<TestType> x(shape, l, quiet_nan<TestType>());
    x.assign(normal_tensor(shape, 1));
    const std::vector<T> w = rounded<T>(normal_tensor({1, 1, 1, d}, 2));
    const attn::linear_scorer<T> scorer{w, T(0.25)};
    tensor_buffer<T> scores({2, 3, 70, 1}, l, quiet_nan<T>());
    scorer(std::as_const(x).view(), scores.view());
    CHECK(scores.canaries_alive());

    tensor_buffer<T> d_scores({2, 3, 70, 1}, l, quiet_nan<T>());
    d_scores.assign(normal_tensor({2, 3, 70, 1}, 3));
    tensor_buffer<TestType> d_x(shape, l, quiet_nan<TestType>());
    std::vector<T> d_w(w.size(), T(nan_value));
    T d_b = T(nan_value);
    scorer.backward(std::as_const(x).view(), std::as_const(d_scores).view(), d_x.view(),
                    std::span<T>(d_w), d_b);
    const auto expected =
        reference::linear_scores_backward(x.values(), widened(w), d_scores.values());
    const linear_units unit(x.values(), widened(w), 0.25, d_scores.values(), expected,
                            precision::of<TestType>());
    CHECK(in_units(scores.values().elements(),
                   reference::linear_scores(x.values(), widened(w), 0.25).elements(),
                   unit.scores) < 2);
    CHECK(in_units(d_x.values().elements(), expected.d_x.elements(), unit.d_x) <= 1);
    CHECK(in_units(widened(d_w), expected.d_w, unit.d_w) <= 1);
    CHECK(in_units({static_cast<double>(d_b)}, {expected.d_b}, {unit.d_b}) <= 1);
    CHECK(d_x.canaries_alive());
  }
}

TEMPLATE_TEST_CASE("nonlinear_scorer and its gradients", "", ELEMENT_TYPES) {
  using T = arithmetic_t<TestType>;
  const layout l = plain_layout(GENERATE(0, 2, 4, 5));
  const bool transposed = GENERATE(false, true);
  for (const auto& [d, d_hidden] : {std::pair{1, 1}, {7, 5}, {33, 140}, {64, 128}}) {
    CAPTURE(l, d, d_hidden, transposed);
    const std::array<index_t, 4> shape{2, 2, 67, d};
    tensor_buffer<TestType> x(shape, l, quiet_nan<TestType>());
    x.assign(normal_tensor(shape, 1));
    tensor_buffer<T> w1({1, 1, d, d_hidden},
                        transposed ? layout::column_major : layout::padded_by_one, quiet_nan<T>());
    const double size = 1 / std::sqrt(static_cast<double>(d));
    w1.assign(normal_tensor({1, 1, d, d_hidden}, 2, size));
    const std::vector<T> b1 = rounded<T>(normal_tensor({1, 1, 1, d_hidden}, 3, 0.3));
    const std::vector<T> w2 = rounded<T>(normal_tensor({1, 1, 1, d_hidden}, 4, 0.3));
    const attn::nonlinear_scorer<T> scorer{std::as_const(w1).view(), b1, w2, T(-0.5)};
    tensor_buffer<T> scores({2, 2, 67, 1}, l, quiet_nan<T>());
    scorer(std::as_const(x).view(), scores.view());
    CHECK(scores.canaries_alive());

    tensor_buffer<T> d_scores({2, 2, 67, 1}, l, quiet_nan<T>());
    d_scores.assign(normal_tensor({2, 2, 67, 1}, 5));
    tensor_buffer<TestType> d_x(shape, l, quiet_nan<TestType>());
    tensor_buffer<T> d_w1({1, 1, d, d_hidden}, layout::padded_by_one, quiet_nan<T>());
    std::vector<T> d_b1(b1.size()), d_w2(w2.size());
    T d_b2 = T(nan_value);
    scorer.backward(std::as_const(x).view(), std::as_const(d_scores).view(), d_x.view(),
                    d_w1.view(), std::span<T>(d_b1), std::span<T>(d_w2), d_b2);
    const auto expected = reference::nonlinear_scores_backward(x.values(), w1.values(), widened(b1),
                                                               widened(w2), d_scores.values());
    const nonlinear_units unit(x.values(), w1.values(), widened(b1), widened(w2), -0.5,
                               d_scores.values(), expected, precision::of<TestType>());
    const tensor expected_scores =
        reference::nonlinear_scores(x.values(), w1.values(), widened(b1), widened(w2), -0.5);
    CHECK(in_units(scores.values().elements(), expected_scores.elements(), unit.scores) < 2);
    CHECK(in_units(d_x.values().elements(), expected.d_x.elements(), unit.d_x) < 2);
    CHECK(in_units(d_w1.values().elements(), expected.d_w1.elements(), unit.d_w1) < 2);
    CHECK(in_units(widened(d_b1), expected.d_b1, unit.d_b1) < 2);
    CHECK(in_units(widened(d_w2), expected.d_w2, unit.d_w2) < 2);
    CHECK(in_units({static_cast<double>(d_b2)}, {expected.d_b2}, {unit.d_b2}) <= 1);
    CHECK(d_x.canaries_alive());
    CHECK(d_w1.canaries_alive());
  }
}

TEST_CASE("Gradients of the scorers agree with finite differences") {
  const index_t n = 6, d = 4, d_hidden = 5;
  const tensor x = normal_tensor({1, 1, n, d}, 1), g = normal_tensor({1, 1, n, 1}, 2);
  const tensor w1 = normal_tensor({1, 1, d, d_hidden}, 3);
  const std::vector<double> b1 = rounded<double>(normal_tensor({1, 1, 1, d_hidden}, 4)),
                            w2 = rounded<double>(normal_tensor({1, 1, 1, d_hidden}, 5));
  std::vector<double> flat = rounded<double>(x);
  std::vector<double> scores(n), d_x(flat.size()), d_w1(w1.elements().size()), d_b1(b1.size()),
      d_w2(w2.size());
  double d_b2 = 0;
  const auto rows = [&](std::vector<double>& v) { return attn::bhld(v.data(), 1, 1, n, d); };
  const auto column = [&](std::vector<double>& v) { return attn::bhld(v.data(), 1, 1, n, 1); };
  std::vector<double> weights = rounded<double>(w1), upstream = rounded<double>(g);
  const attn::nonlinear_scorer<double> scorer{attn::bhld(weights.data(), 1, 1, d, d_hidden), b1, w2,
                                              0.1};
  scorer.backward(rows(flat), column(upstream), rows(d_x),
                  attn::bhld(d_w1.data(), 1, 1, d, d_hidden), std::span<double>(d_b1),
                  std::span<double>(d_w2), d_b2);
  const auto loss = [&] {
    scorer(rows(flat), column(scores));
    double sum = 0;
    for (std::size_t i = 0; i < scores.size(); ++i) sum += scores[i] * upstream[i];
    return sum;
  };
  const auto check = [&](double& at, double gradient) {
    const double step = 1e-6, before = at;
    at = before + step;
    const double up = loss();
    at = before - step;
    const double down = loss();
    at = before;
    CHECK(std::abs((up - down) / (2 * step) - gradient) < 1e-8);
  };
  for (std::size_t e = 0; e < flat.size(); ++e) check(flat[e], d_x[e]);
  for (std::size_t e = 0; e < weights.size(); ++e) check(weights[e], d_w1[e]);
}

TEST_CASE("A repeated call of a learned scorer allocates nothing") {
  const index_t n = 150, d = 270, d_hidden = 300;
  const bool transposed = GENERATE(false, true);
  std::vector<double> x(at(n * d), 0.5), g(at(n), 1.0), d_x(x.size()), scores(g.size());
  std::vector<double> w(at(d), 0.1), d_w(w.size()), w1(at(d * d_hidden), 0.1), d_w1(w1.size());
  std::vector<double> b1(at(d_hidden), 0.1), w2(b1), d_b1(b1), d_w2(b1);
  double d_b = 0;
  const auto rows = [&](std::vector<double>& v) { return attn::bhld(v.data(), 1, 1, n, d); };
  const auto column = [&](std::vector<double>& v) { return attn::bhld(v.data(), 1, 1, n, 1); };
  const attn::tensor_view<const double> first(
      w1.data(), {1, 1, d, d_hidden},
      {0, 0, transposed ? 1 : d_hidden, transposed ? d : index_t{1}});
  const attn::linear_scorer<double> linear{w};
  const attn::nonlinear_scorer<double> nonlinear{first, b1, w2};
  const auto call = [&] {
    linear(rows(x), column(scores));
    linear.backward(rows(x), column(g), rows(d_x), std::span<double>(d_w), d_b);
    nonlinear(rows(x), column(scores));
    nonlinear.backward(rows(x), column(g), rows(d_x), attn::bhld(d_w1.data(), 1, 1, d, d_hidden),
                       std::span<double>(d_b1), std::span<double>(d_w2), d_b);
  };
  call();
  const allocation_counter allocations;
  call();
  CHECK(allocations.count() == 0);
}
