// SPDX-License-Identifier: MIT
//
// Dense attention by hand values, in every element type, and its ways of being called.
#include "support/catch.hpp"
#include "support/dense_call.hpp"

#include <attn/dense_attention.hpp>

#include <Eigen/Core>

#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

using namespace attn_test;

#define ELEMENT_TYPES float, double, Eigen::half, Eigen::bfloat16

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

/// One head: n_q queries of q, logits[j] as key j, values[j] as value j; scale 1. So the scores
/// of every row are q · logits.
template <class T>
struct logit_problem {
  dense_operands<T> x;

  logit_problem(std::vector<double> logits, std::vector<double> values, index_t n_q = 1,
                double q = 1)
      : x({.n_q = n_q, .n_kv = static_cast<index_t>(logits.size()), .d_qk = 1, .d_v = 1}) {
    const auto n = static_cast<index_t>(logits.size());
    reference::tensor k({1, 1, n, 1}), v({1, 1, n, 1});
    k.elements() = logits;
    v.elements() = values;
    x.q.assign(reference::tensor({1, 1, n_q, 1}, q));
    x.k.assign(k);
    x.v.assign(v);
  }

  logit_problem& attend(double scale = 1) {
    attn_test::attend(x, attn::no_mask{}, {.scale = scale});
    return *this;
  }
  double out() { return to_double(x.out.view()(0, 0, 0, 0)); }
  double lse() { return static_cast<double>(x.lse.view()(0, 0, 0, 0)); }
};

std::vector<double> counting(std::size_t n) {
  std::vector<double> x(n);
  std::iota(x.begin(), x.end(), 0.0);
  return x;
}

/// Rounding of one result of the given size in T.
template <class T>
double rounding(double size) {
  return size * (8 * arithmetic_epsilon<T> + storage_rounding<T>());
}

}  // namespace

TEMPLATE_TEST_CASE("Zero logits give the mean of the values", "", ELEMENT_TYPES) {
  const std::size_t n = GENERATE(values<std::size_t>({1, 2, 5, 16, 127, 128, 129, 1025}));
  CAPTURE(n);
  // Values of at most 1: 1025 is no number of the half types.
  std::vector<double> v = counting(n);
  for (double& e : v) e = to_double(from_double<TestType>(e / 1024));
  const double mean = std::accumulate(v.begin(), v.end(), 0.0) / static_cast<double>(n);
  logit_problem<TestType> p(std::vector<double>(n, 0), v);
  p.attend();
  CHECK(std::abs(p.out() - mean) <= 2 * rounding<TestType>(1));
  const double lse = std::log(static_cast<double>(n));
  CHECK(std::abs(p.lse() - lse) <= 8 * arithmetic_epsilon<TestType> * (1 + lse));
}

TEMPLATE_TEST_CASE("Sums do not saturate in the storage type", "", ELEMENT_TYPES) {
  const auto half = [](std::size_t n) {
    std::vector<double> v(n, 0);
    std::fill(v.begin() + static_cast<std::ptrdiff_t>(n / 2), v.end(), 1);
    return v;
  };
  const index_t n_q = GENERATE(values<index_t>({1, 2, 5, 70}));
  logit_problem<TestType> a(std::vector<double>(512, 0.5), half(512), n_q);
  logit_problem<TestType> b(std::vector<double>(4096, 0.5), std::vector<double>(4096, 1), n_q);
  CHECK(std::abs(a.attend().out() - 0.5) <= rounding<TestType>(0.5));
  CHECK(std::abs(b.attend().out() - 1) <= rounding<TestType>(1));
}

TEMPLATE_TEST_CASE("Large and far-apart logits", "", ELEMENT_TYPES) {
  const index_t n_q = GENERATE(values<index_t>({1, 40}));
  const auto out = [&](std::vector<double> logits, std::vector<double> v) {
    return logit_problem<TestType>(std::move(logits), std::move(v), n_q).attend().out();
  };
  const double tiny = rounding<TestType>(1);
  CHECK(std::abs(out({100, 0}, {1, 0}) - 1) <= tiny);
  CHECK(std::abs(out({0, 100}, {1, 0}) - 0) <= 1e-40);
  CHECK(out({0, 100}, {1, 0}) >= 0);
  CHECK(std::abs(out({200, 0, 100}, {1, 0, 0}) - 1) <= tiny);
  // 1000 and 1004 are numbers of every type.
  CHECK(std::abs(out({1000, 1004}, {1, 0}) - 1 / (1 + std::exp(4))) <= tiny);

  logit_problem<TestType> low(std::vector<double>(5, -200), {0, 1, 2, 3, 4}, n_q);
  low.attend();
  CHECK(std::abs(low.out() - 2) <= rounding<TestType>(2));
  CHECK(std::abs(low.lse() - (-200 + std::log(5))) <= 200 * 4 * arithmetic_epsilon<TestType>);
}

TEST_CASE("Logits of 2e18 are one-hot") {
  const index_t n_q = GENERATE(values<index_t>({1, 40}));
  const index_t d = 64;
  dense_operands<float> x({.n_q = n_q, .n_kv = 2, .d_qk = d, .d_v = 1});
  x.q.assign(reference::tensor({1, 1, n_q, d}, 5e8));
  reference::tensor k({1, 1, 2, d}, 5e8);
  for (index_t c = 0; c < d; ++c) k(0, 0, 1, c) = -5e8;
  x.k.assign(k);
  reference::tensor v({1, 1, 2, 1});
  v(0, 0, 0, 0) = 3, v(0, 0, 1, 0) = 7;
  x.v.assign(v);
  attend(x);
  CHECK(compare_bits(x.out.values(), reference::tensor({1, 1, n_q, 1}, 3)));
  CHECK(std::abs(x.lse.view()(0, 0, 0, 0) / 2e18f - 1) < 1e-5f);
}

TEMPLATE_TEST_CASE("A scale of 0 and a negative one", "", float, double) {
  logit_problem<TestType> flat({5, 900, 7}, {1, 2, 4});
  CHECK(std::abs(flat.attend(0).out() - 7. / 3) <= rounding<TestType>(4));
  logit_problem<TestType> reversed({0, 500}, {1, 0});
  CHECK(std::abs(reversed.attend(-1).out() - 1) <= rounding<TestType>(1));
  CHECK(std::abs(reversed.lse()) <= 1e-30);
}

TEMPLATE_TEST_CASE("The scale comes from d_qk, not from d_v", "", ELEMENT_TYPES) {
  const dense_problem p{.n_q = 7, .n_kv = 9, .d_qk = 16, .d_v = 4};
  dense_operands<TestType> standard(p), given(p);
  attend(standard);
  attend(given, attn::no_mask{}, {.scale = 0.25});
  CHECK(same_bits_out(standard, given));
}

TEMPLATE_TEST_CASE("The river bank", "", float, double) {
  using matrix = Eigen::Matrix<TestType, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  matrix x(4, 2), w_q(2, 2), w_k(2, 2), expected(4, 2);
  x << TestType(0.1), TestType(0.1), 1, 0, TestType(0.5), TestType(0.5), TestType(0.8),
      TestType(0.2);
  w_q << 1, TestType(0.5), TestType(0.5), 1;
  w_k << 2, 0, 0, 1;
  expected << TestType(0.622183), TestType(0.200267), TestType(0.733165), TestType(0.180468),
      TestType(0.697708), TestType(0.196592), TestType(0.719235), TestType(0.186958);
  const matrix q = x * w_q, k = x * w_k;

  const matrix out = attn::dense_attention(q, k, x);
  CHECK((out - expected).cwiseAbs().maxCoeff() < 6e-7);

  const std::array<bool, 4> not_flooded = {true, true, true, false};
  matrix masked(4, 2);
  attn::dense_attention(
      q, k, x, masked,
      attn::boolean_mask{attn::tensor_view<const bool>(not_flooded.data(), 1, 1, 1, 4)});
  CHECK(std::abs(masked(2, 0) - TestType(0.655372)) < 6e-7);
  CHECK(std::abs(masked(2, 1) - TestType(0.195182)) < 6e-7);
}

TEMPLATE_TEST_CASE("Query head h reads key/value head h / (H / Hkv)", "", ELEMENT_TYPES) {
  dense_operands<TestType> x({.n_heads = 6, .n_kv_heads = 2, .n_q = GENERATE(1, 5), .n_kv = 3});
  reference::tensor v(x.problem.v_extents());
  for (index_t j = 0; j < 3; ++j)
    for (index_t c = 0; c < 8; ++c) v(0, 1, j, c) = 1;
  x.v.assign(v);
  attend(x);
  for (index_t h = 0; h < 6; ++h)
    CHECK(std::abs(to_double(x.out.view()(0, h, 0, 0)) - (h < 3 ? 0 : 1)) <= rounding<TestType>(1));
}

TEMPLATE_TEST_CASE("Extents of zero are legal", "", ELEMENT_TYPES) {
  SECTION("no keys: out 0, lse −inf") {
    dense_operands<TestType> x(
        {.n_batch = 2, .n_heads = 2, .n_kv_heads = 2, .n_q = GENERATE(1, 60), .n_kv = 0});
    attend(x);
    CHECK(compare_bits(x.out.values(), reference::tensor(x.problem.out_extents(), 0)));
    CHECK(compare_bits(x.lse.values(), reference::tensor(x.problem.lse_extents(), -infinity)));
  }
  SECTION("d_qk of 0: all scores are 0") {
    dense_operands<TestType> x({.n_q = GENERATE(1, 60), .n_kv = 5, .d_qk = 0, .d_v = 3});
    attend(x, attn::no_mask{}, {.scale = 1.0});
    CHECK(x.matches(x.expected({}, {.scale = 1.0})));
  }
  SECTION("d_v of 0: lse alone") {
    dense_operands<TestType> x({.n_q = GENERATE(1, 60), .n_kv = 5, .d_v = 0});
    attend(x);
    CHECK(x.matches(x.expected()));
  }
  SECTION("no queries, no heads, no batches: nothing to write") {
    for (const dense_problem& p : {dense_problem{.n_q = 0, .n_kv = 5},
                                   {.n_heads = 0, .n_kv_heads = 1, .n_q = 3, .n_kv = 5},
                                   {.n_batch = 0, .n_q = 3, .n_kv = 5}}) {
      INFO(p);
      dense_operands<TestType> x(p);
      CHECK_NOTHROW(attend(x));
      CHECK(x.out.canaries_alive());
    }
  }
}

TEST_CASE("out without lse has the bits of out with it") {
  const dense_problem p{.n_heads = 2, .n_kv_heads = 2, .n_q = GENERATE(1, 3, 60), .n_kv = 200};
  dense_operands<float> with(p), without(p);
  attend(with);
  attn::dense_attention(without.q.view(), without.k.view(), without.v.view(), without.out.view());
  CHECK(compare_bits(with.out.values(), without.out.values()));
  CHECK(without.lse.untouched());
}

TEST_CASE("Operands of different storage types: what counts is what they hold") {
  const dense_problem p{.n_heads = 2, .n_kv_heads = 1, .n_q = GENERATE(1, 40), .n_kv = 150};
  INFO(p);
  const dense_operands<float> in_float(p);
  const dense_operands<Eigen::half> in_half(p);
  const dense_operands<Eigen::bfloat16> in_bfloat16(p);
  dense_operands<float> same_numbers(p), mixed(p);
  same_numbers.k.assign(in_half.k.values());
  same_numbers.v.assign(in_bfloat16.v.values());
  attend(same_numbers);
  attn::dense_attention(in_float.q.view(), in_half.k.view(), in_bfloat16.v.view(), mixed.out.view(),
                        mixed.lse.view());
  CHECK(same_bits_out(mixed, same_numbers));
}
