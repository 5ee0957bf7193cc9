// SPDX-License-Identifier: MIT
//
// Boolean masks and segments: broadcasting, polarity, rows that see nothing.
#include "support/catch.hpp"
#include "support/dense_call.hpp"
#include "support/rule_operands.hpp"

#include <limits>
#include <vector>

using namespace attn_test;

#define ELEMENT_TYPES float, double, Eigen::half, Eigen::bfloat16

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

}  // namespace

TEMPLATE_TEST_CASE("boolean_mask: every extent is the call's or 1", "", float, double) {
  for (const index_t n_q : {1, 2, 53})
    for (const index_t n_kv : {1, 15, 140}) {
      const dense_problem p{.n_batch = 2, .n_heads = 4, .n_kv_heads = 2, .n_q = n_q, .n_kv = n_kv};
      for (const index_t b : {index_t{1}, p.n_batch})
        for (const index_t h : {index_t{1}, p.n_heads})
          for (const index_t q : {index_t{1}, n_q})
            for (const index_t k : {index_t{1}, n_kv})
              for (const double density : {0.03, 0.5, 0.97}) {
                INFO(p);
                CAPTURE(b, h, q, k, density);
                const rule_operand<bool> mask(coin_tensor({b, h, q, k}, 7, density));
                CHECK(check_dense<TestType>(p, attn::boolean_mask{mask.view()},
                                            reference::boolean_mask(mask.values)));
              }
    }
}

TEST_CASE("boolean_mask of any layout") {
  const dense_problem p{.n_batch = 2, .n_heads = 2, .n_kv_heads = 1, .n_q = 53, .n_kv = 140};
  for (const layout l : plain_layouts) {
    CAPTURE(l);
    const rule_operand<bool> mask(coin_tensor(p.score_extents(), 8), l);
    CHECK(check_dense<float>(p, attn::boolean_mask{mask.view()},
                             reference::boolean_mask(mask.values)));
  }
}

TEST_CASE("true means: may attend") {
  dense_operands<float> x({.n_kv = 2, .d_qk = 1, .d_v = 1});
  x.q.assign(reference::tensor({1, 1, 1, 1}));
  reference::tensor v({1, 1, 2, 1});
  v(0, 0, 1, 0) = 1;
  x.v.assign(v);
  const bool first_only[2] = {true, false};
  attend(x, attn::boolean_mask{attn::tensor_view<const bool>(first_only, 1, 1, 1, 2)});
  CHECK(x.out.view()(0, 0, 0, 0) == 0);
}

TEST_CASE("An all-true mask has the bits of none; whole tiles of false are no trouble") {
  const dense_problem p{.n_heads = 2, .n_kv_heads = 2, .n_q = GENERATE(1, 53), .n_kv = 300};
  dense_operands<float> none(p), all(p);
  const rule_operand<bool> mask(reference::tensor({1, 1, 1, p.n_kv}, 1));
  attend(none);
  attend(all, attn::boolean_mask{mask.view()});
  CHECK(same_bits_out(none, all));

  reference::tensor some({1, 1, p.n_q, p.n_kv});
  const index_t first = GENERATE(0, 128, 130, 299);
  for (index_t i = 0; i < p.n_q; ++i) some(0, 0, i, first) = 1;
  const rule_operand<bool> one(some);
  CHECK(check_dense<float>(p, attn::boolean_mask{one.view()}, reference::boolean_mask(some)));
}

TEMPLATE_TEST_CASE("A first block that is masked leaves no trace", "", ELEMENT_TYPES) {
  // Values 1 in the masked block, 0 in the other, equal logits; and logits far below any sentinel.
  const double logit = to_double(from_double<TestType>(GENERATE(0.0, -200.0, -20000.0)));
  const index_t n_q = GENERATE(values<index_t>({1, 60}));
  dense_operands<TestType> x({.n_q = n_q, .n_kv = 256, .d_qk = 1, .d_v = 1});
  x.q.assign(reference::tensor({1, 1, n_q, 1}, 1));
  x.k.assign(reference::tensor({1, 1, 256, 1}, logit));
  reference::tensor v({1, 1, 256, 1}), allowed({1, 1, 1, 256});
  for (index_t j = 0; j < 256; ++j) {
    v(0, 0, j, 0) = j < 128;
    allowed(0, 0, 0, j) = j >= 128;
  }
  x.v.assign(v);
  const rule_operand<bool> mask(allowed);
  attend(x, attn::boolean_mask{mask.view()});
  CHECK(compare_bits(x.out.values(), reference::tensor({1, 1, n_q, 1}, 0)));
  const double lse = logit + std::log(128);
  CHECK(compare_within(x.lse.values(), reference::tensor({1, 1, n_q, 1}, lse),
                       4 * arithmetic_epsilon<TestType> * (5 + std::abs(lse))));
}

TEST_CASE("A row whose only key has a score of −20000") {
  dense_operands<float> x({.n_q = 2, .n_kv = 2, .d_qk = 1, .d_v = 1});
  const auto assign = [](auto& buffer, double a, double b) {
    reference::tensor t({1, 1, 2, 1});
    t(0, 0, 0, 0) = a, t(0, 0, 1, 0) = b;
    buffer.assign(t);
  };
  assign(x.q, -20000, 0);
  assign(x.k, 1, 0);
  assign(x.v, 1, 100);
  const bool first_only[2] = {true, false};
  attend(x, attn::boolean_mask{attn::tensor_view<const bool>(first_only, 1, 1, 1, 2)});
  CHECK(x.out.view()(0, 0, 0, 0) == 1);
  CHECK(x.lse.view()(0, 0, 0, 0) == -20000);
}

TEMPLATE_TEST_CASE("Rows that see nothing: out 0, lse −inf, the others as ever", "",
                   ELEMENT_TYPES) {
  const index_t batches = GENERATE(values<index_t>({1, 2}));
  for (const index_t n_q : {1, 6, 53})
    for (const index_t empty : {index_t{0}, n_q / 2, n_q - 1}) {
      const dense_problem p{
          .n_batch = batches, .n_heads = 2, .n_kv_heads = 2, .n_q = n_q, .n_kv = 140};
      INFO(p);
      CAPTURE(empty);
      reference::tensor allowed = coin_tensor({1, 1, n_q, 140}, 9);
      for (index_t j = 0; j < 140; ++j) allowed(0, 0, empty, j) = 0;
      const rule_operand<bool> mask(allowed);
      dense_operands<TestType> x(p);
      CHECK(check_dense(x, attn::boolean_mask{mask.view()}, reference::boolean_mask(allowed)));
      for (index_t b = 0; b < batches; ++b) {
        CHECK(to_double(x.out.view()(b, 1, empty, 3)) == 0);
        CHECK(static_cast<double>(x.lse.view()(b, 1, empty, 0)) == -infinity);
      }
    }
}

TEST_CASE("A mask of nothing but false") {
  const dense_problem p{.n_q = GENERATE(1, 3, 60), .n_kv = GENERATE(4, 200), .d_v = 4};
  const rule_operand<bool> mask(reference::tensor({1, 1, p.n_q, p.n_kv}, 0));
  dense_operands<float> x(p);
  attend(x, attn::boolean_mask{mask.view()});
  CHECK(compare_bits(x.out.values(), reference::tensor(p.out_extents(), 0)));
  CHECK(compare_bits(x.lse.values(), reference::tensor(p.lse_extents(), -infinity)));
}

TEMPLATE_TEST_CASE("segment_mask: sorted and scattered ids, per batch or shared", "", float,
                   double) {
  const bool sorted = GENERATE(false, true);
  const index_t id_batches = GENERATE(values<index_t>({1, 2}));
  const index_t n_q = GENERATE(values<index_t>({1, 53}));
  const dense_problem p{.n_batch = 2, .n_heads = 2, .n_kv_heads = 1, .n_q = n_q, .n_kv = 140};
  INFO(p);
  CAPTURE(sorted, id_batches);
  reference::tensor q_values({id_batches, 1, n_q, 1}), k_values({id_batches, 1, p.n_kv, 1});
  random_source random(11);
  const auto fill = [&](reference::tensor& ids) {
    for (index_t b = 0; b < id_batches; ++b) {
      double id = -1;
      for (index_t i = 0; i < ids.extent(2); ++i) {
        if (sorted && random.coin(0.1)) ++id;
        ids(b, 0, i, 0) = sorted ? id : static_cast<double>(random.integer(-2, 3));
      }
    }
  };
  fill(q_values), fill(k_values);
  const rule_operand<index_t> q_ids(q_values), k_ids(k_values);
  // The oracle has no broadcast of ids: repeat them.
  reference::tensor q_all({2, 1, n_q, 1}), k_all({2, 1, p.n_kv, 1});
  for (index_t b = 0; b < 2; ++b) {
    for (index_t i = 0; i < n_q; ++i)
      q_all(b, 0, i, 0) = q_values(id_batches == 1 ? 0 : b, 0, i, 0);
    for (index_t j = 0; j < p.n_kv; ++j)
      k_all(b, 0, j, 0) = k_values(id_batches == 1 ? 0 : b, 0, j, 0);
  }
  CHECK(check_dense<TestType>(p, attn::segment_mask{q_ids.view(), k_ids.view()},
                              reference::segment_mask(q_all, k_all)));
}
