// SPDX-License-Identifier: MIT
//
// Additive biases and ALiBi.
#include "support/catch.hpp"
#include "support/dense_call.hpp"
#include "support/rule_operands.hpp"

#include <attn/attention_weights.hpp>

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

using namespace attn_test;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double float_max = std::numeric_limits<float>::max();

/// Normal numbers, and −inf in about one of four places.
reference::tensor random_bias(std::array<index_t, 4> extents, std::uint64_t seed) {
  reference::tensor bias = normal_tensor(extents, seed, 2);
  random_source random(seed + 1);
  for (double& x : bias.elements()) {
    x = to_double(static_cast<float>(x));
    if (random.coin(0.25)) x = -infinity;
  }
  return bias;
}

}  // namespace

TEMPLATE_TEST_CASE("additive_bias: every extent is the call's or 1", "", float, double) {
  for (const index_t n_q : {1, 53})
    for (const index_t n_kv : {15, 77, 140}) {
      const dense_problem p{.n_batch = 2, .n_heads = 4, .n_kv_heads = 2, .n_q = n_q, .n_kv = n_kv};
      for (const index_t b : {index_t{1}, p.n_batch})
        for (const index_t h : {index_t{1}, p.n_heads})
          for (const index_t q : {index_t{1}, n_q})
            for (const index_t k : {index_t{1}, n_kv}) {
              INFO(p);
              CAPTURE(b, h, q, k);
              const rule_operand<float> bias(random_bias({b, h, q, k}, 5));
              CHECK(check_dense<TestType>(p, attn::additive_bias{bias.view()},
                                          reference::additive_bias(bias.values)));
            }
    }
}

TEST_CASE("additive_bias of any layout") {
  const dense_problem p{.n_batch = 2, .n_heads = 2, .n_kv_heads = 1, .n_q = 53, .n_kv = 77};
  for (const layout l : plain_layouts) {
    CAPTURE(l);
    const rule_operand<float> bias(random_bias(p.score_extents(), 8), l);
    CHECK(check_dense<float>(p, attn::additive_bias{bias.view()},
                             reference::additive_bias(bias.values)));
  }
}

TEMPLATE_TEST_CASE("A bias of another element type than the call", "", float, Eigen::half,
                   Eigen::bfloat16) {
  const dense_problem p{.n_heads = 2, .n_kv_heads = 1, .n_q = 53, .n_kv = 77};
  SECTION("float") {
    const rule_operand<float> bias(random_bias(p.score_extents(), 9));
    CHECK(check_dense<TestType>(p, attn::additive_bias{bias.view()},
                                reference::additive_bias(bias.values)));
  }
  SECTION("double, some of it below any float: forbidden") {
    reference::tensor values = random_bias(p.score_extents(), 10), meaning = values;
    for (std::size_t e = 0; e < values.elements().size(); e += 5) {
      values.elements()[e] = -1.7e308;
      meaning.elements()[e] = -infinity;
    }
    for (index_t j = 0; j < p.n_kv; ++j) {  // a row of nothing else
      values(0, 1, 7, j) = -1.7e308;
      meaning(0, 1, 7, j) = -infinity;
    }
    const rule_operand<double> bias(values);
    CHECK(check_dense<TestType>(p, attn::additive_bias{bias.view()},
                                reference::additive_bias(meaning)));
  }
}

TEST_CASE("−inf in a bias has the bits of false in a mask") {
  const dense_problem p{.n_heads = 2, .n_kv_heads = 2, .n_q = GENERATE(1, 53), .n_kv = 200};
  reference::tensor allowed = coin_tensor({1, 1, p.n_q, p.n_kv}, 12), bias = allowed;
  for (double& x : bias.elements()) x = x != 0 ? 0 : -infinity;
  const rule_operand<bool> mask(allowed);
  const rule_operand<float> addend(bias);
  dense_operands<float> by_mask(p), by_bias(p);
  attend(by_mask, attn::boolean_mask{mask.view()});
  attend(by_bias, attn::additive_bias{addend.view()});
  CHECK(same_bits_out(by_mask, by_bias));
}

TEST_CASE("A score of −inf: +inf or NaN on top of it is NaN, whichever kernel adds it") {
  const index_t n_q = GENERATE(values<index_t>({1, 53}));
  const dense_problem p{.n_q = n_q, .n_kv = 40, .d_qk = 1};
  dense_operands<float> x(p);
  reference::tensor k = x.k.values();
  k(0, 0, 17, 0) = -infinity;
  x.q.assign(reference::tensor({1, 1, n_q, 1}, 1));
  x.k.assign(k);
  reference::tensor values({1, 1, n_q, p.n_kv}, 0.5);
  values(0, 0, n_q - 1, 17) = GENERATE(infinity, std::nan(""), -infinity, 2.0);
  const rule_operand<float> bias(values);
  const attn::additive_bias rule{bias.view()};
  CHECK(check_dense(x, rule, reference::additive_bias(values)));
  CHECK(check_dense(x, attn::no_mask{} & rule, reference::additive_bias(values)));
  tensor_buffer<float> weights(p.score_extents(), p.outputs, 0);
  attn::attention_weights(std::as_const(x.q).view(), std::as_const(x.k).view(), weights.view(),
                          rule);
  CHECK(std::isnan(weights.view()(0, 0, n_q - 1, 0)) == std::isnan(x.out.view()(0, 0, n_q - 1, 0)));
}

TEST_CASE("−FLT_MAX is a number: a row of it is the mean, beside others it weighs nothing") {
  const index_t n_q = GENERATE(values<index_t>({1, 53}));
  const index_t n_kv = GENERATE(values<index_t>({5, 140, 300}));
  const dense_problem p{.n_q = n_q, .n_kv = n_kv};
  CAPTURE(n_q, n_kv);
  dense_operands<float> x(p);
  const reference::tensor v = x.v.values();
  SECTION("everywhere") {
    const rule_operand<float> bias(reference::tensor({1, 1, 1, 1}, -float_max));
    attend(x, attn::additive_bias{bias.view()});
    for (index_t c = 0; c < p.d_v; ++c) {
      double mean = 0;
      for (index_t j = 0; j < n_kv; ++j) mean += v(0, 0, j, c) / static_cast<double>(n_kv);
      for (index_t i = 0; i < n_q; ++i) CHECK(std::abs(x.out.view()(0, 0, i, c) - mean) < 1e-5);
    }
  }
  SECTION("on all keys but one, early or late") {
    const index_t spared = GENERATE_COPY(values<index_t>({0, n_kv / 2, n_kv - 1}));
    reference::tensor values({1, 1, 1, n_kv}, -float_max);
    values(0, 0, 0, spared) = 1;
    const rule_operand<float> bias(values);
    attend(x, attn::additive_bias{bias.view()});
    reference::tensor expected(p.out_extents());
    for (index_t i = 0; i < n_q; ++i)
      for (index_t c = 0; c < p.d_v; ++c) expected(0, 0, i, c) = v(0, 0, spared, c);
    CHECK(compare_within(x.out.values(), expected, 1e-6));
  }
}

TEMPLATE_TEST_CASE("Large finite biases", "", float, double) {
  const double size = GENERATE(100.0, 1e4, -1e4);
  const dense_problem p{.n_q = GENERATE(1, 53), .n_kv = 200};
  CAPTURE(size);
  SECTION("the same on every key: nothing changes but lse") {
    const rule_operand<float> bias(reference::tensor({1, 1, 1, 1}, size));
    CHECK(check_dense<TestType>(p, attn::additive_bias{bias.view()},
                                reference::additive_bias(bias.values)));
  }
  SECTION("growing over the keys") {
    reference::tensor values({1, 1, 1, p.n_kv});
    for (index_t j = 0; j < p.n_kv; ++j)
      values(0, 0, 0, j) = to_double(static_cast<float>(size * static_cast<double>(j) / 200));
    const rule_operand<float> bias(values);
    CHECK(check_dense<TestType>(p, attn::additive_bias{bias.view()},
                                reference::additive_bias(bias.values)));
  }
}

TEMPLATE_TEST_CASE("alibi_bias: one slope per query head", "", float, double) {
  const std::vector<float> slopes = {0.5f, 0.0625f, 2.0f, 0.0f};
  for (const index_t n_q : {1, 53, 130})
    for (const index_t n_kv : {1, 140})
      for (const index_t offset : {index_t{0}, n_kv - n_q, index_t{-30}, index_t{400}}) {
        const dense_problem p{.n_heads = 4, .n_kv_heads = 2, .n_q = n_q, .n_kv = n_kv};
        INFO(p);
        CAPTURE(offset);
        CHECK(check_dense<TestType>(p, attn::alibi_bias{slopes, offset},
                                    reference::alibi_bias({0.5, 0.0625, 2, 0}, offset)));
      }
}

TEST_CASE("A bias of 3 columns beside a cache that lost its first 7 keys") {
  // bias[0][j] = j at absolute positions: the view starts at the column of the first key left.
  std::vector<float> bias(10);
  for (std::size_t j = 0; j < 10; ++j) bias[j] = static_cast<float>(j);
  dense_operands<float> x({.n_kv = 3});
  reference::tensor meaning({1, 1, 1, 3});
  for (index_t j = 0; j < 3; ++j) meaning(0, 0, 0, j) = static_cast<double>(j + 7);
  const attn::tensor_view<const float> last_three(bias.data() + 7, {1, 1, 1, 3}, {10, 10, 10, 1});
  CHECK(check_dense(x, attn::additive_bias{last_three}, reference::additive_bias(meaning)));
}
