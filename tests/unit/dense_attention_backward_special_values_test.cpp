// SPDX-License-Identifier: MIT
//
// Gradients of rows that see nothing, NaN and infinities, memory that may not be read, extremes.
#include "support/backward_call.hpp"
#include "support/catch.hpp"
#include "support/float_environment.hpp"
#include "support/guarded_memory.hpp"
#include "support/rule_operands.hpp"

#include <cmath>
#include <limits>
#include <vector>

using namespace attn_test;

#define ELEMENT_TYPES float, double, Eigen::half, Eigen::bfloat16

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

const dense_problem base{
    .n_batch = 2, .n_heads = 4, .n_kv_heads = 2, .n_q = 70, .n_kv = 150, .d_qk = 9, .d_v = 17};

void poison_row(reference::tensor& t, index_t b, index_t h, index_t i, double x) {
  for (index_t c = 0; c < t.extent(3); ++c) t(b, h, i, c) = x;
}

template <class T>
bool row_is_zero(const tensor_buffer<T>& x, index_t b, index_t h, index_t i) {
  const reference::tensor t = x.values();
  for (index_t c = 0; c < t.extent(3); ++c)
    if (t(b, h, i, c) != 0) return false;
  return true;
}

}  // namespace

TEMPLATE_TEST_CASE("A row that sees nothing has no gradient, whatever its d_out", "",
                   ELEMENT_TYPES) {
  for (const index_t n_q : {1, 6, 53, 200})
    for (const index_t empty : {index_t{0}, n_q / 2, n_q - 1}) {
      dense_problem p = base;
      p.n_q = n_q;
      INFO(p);
      CAPTURE(empty);
      reference::tensor allowed = coin_tensor({1, 1, n_q, p.n_kv}, 9);
      for (index_t j = 0; j < p.n_kv; ++j) allowed(0, 0, empty, j) = 0;
      const rule_operand<bool> mask(allowed);
      backward_operands<TestType> y(p), poisoned(p);
      CHECK(check_backward(y, attn::boolean_mask{mask.view()}, reference::boolean_mask(allowed)));
      CHECK(row_is_zero(y.d_q, 1, 3, empty));
      // 0 · NaN never happens.
      reference::tensor d_out = poisoned.d_out.values(), q = poisoned.x.q.values();
      poison_row(d_out, 1, 3, empty, std::nan(""));
      poison_row(q, 1, 3, empty, infinity);
      poisoned.d_out.assign(d_out), poisoned.x.q.assign(q);
      attend_and_differentiate(poisoned, attn::boolean_mask{mask.view()});
      CHECK(compare_bits(poisoned.gradients(), y.gradients()));
    }
}

TEMPLATE_TEST_CASE("More queries than keys, aligned at the end: the first rows see nothing", "",
                   float, double) {
  // Lengths 76, 34, 146 against 1, 1, 1: only the last query of each sees the key.
  for (const index_t n_q : {76, 34, 146}) {
    const dense_problem p{.n_q = n_q, .n_kv = 1, .d_qk = 64, .d_v = 64};
    backward_operands<TestType> y(p);
    CHECK(check_backward(y, attn::causal_mask::bottom_right(n_q, 1),
                         reference::causal_mask(1 - n_q)));
    for (index_t i = 0; i + 1 < n_q; ++i) CHECK(row_is_zero(y.d_q, 0, 0, i));
  }
}

TEMPLATE_TEST_CASE("A forbidden key or value may hold anything", "", ELEMENT_TYPES) {
  const double poison = GENERATE(std::nan(""), infinity, -infinity);
  const int kind = GENERATE(0, 1, 2);  // a range, a bias, a function
  CAPTURE(poison, kind);
  // Keys from 100 on are seen by the queries from 60 on alone.
  const auto allowed = [](index_t i, index_t j) { return j < 100 || i >= 60; };
  reference::tensor values({1, 1, base.n_q, base.n_kv});
  for (index_t i = 0; i < base.n_q; ++i)
    for (index_t j = 0; j < base.n_kv; ++j) values(0, 0, i, j) = allowed(i, j);
  const rule_operand<bool> mask(values);
  backward_operands<TestType> clean(base), poisoned(base);
  reference::tensor k = clean.x.k.values(), v = clean.x.v.values();
  for (const index_t j : {101, 127, 128, 149}) poison_row(k, 1, 1, j, poison);
  for (const index_t j : {102, 126, 140}) poison_row(v, 1, 1, j, poison);
  poisoned.x.k.assign(k), poisoned.x.v.assign(v);
  const auto run = [&](backward_operands<TestType>& y) {
    if (kind == 0) {
      const std::vector<index_t> prefix(2, 100);
      attend_and_differentiate(y, attn::prefix_mask{prefix, 90});  // row i sees j ≤ i + 90
    } else if (kind == 1) {
      attend_and_differentiate(y, attn::boolean_mask{mask.view()});
    } else {
      attend_and_differentiate(
          y, attn::score_rule_fn([=](auto s, index_t, index_t, index_t i, index_t j) {
            return allowed(i, j) ? s : -std::numeric_limits<decltype(s)>::infinity();
          }));
    }
  };
  run(clean), run(poisoned);
  // Queries that see no poisoned key have the same bits.
  const index_t seeing = kind == 0 ? 11 : 60;
  const reference::tensor a = clean.d_q.values(), b = poisoned.d_q.values();
  for (index_t h = 0; h < 4; ++h)
    for (index_t i = 0; i < seeing; ++i)
      for (index_t c = 0; c < base.d_qk; ++c) {
        if (h < 2 || i < seeing) CHECK(same_bits(a(1, h, i, c), b(1, h, i, c)));
      }
  // So have the other head and the other batch, keys and all; where it is allowed NaN spreads.
  const reference::tensor dk = poisoned.d_k.values(), clean_dk = clean.d_k.values();
  for (index_t j = 0; j < base.n_kv; ++j) CHECK(same_bits(dk(1, 0, j, 0), clean_dk(1, 0, j, 0)));
  CHECK(std::isnan(b(1, 2, base.n_q - 1, 0)));
}

TEMPLATE_TEST_CASE("NaN or an infinity in a query or its d_out stays with the keys it may see", "",
                   ELEMENT_TYPES) {
  const double poison = GENERATE(std::nan(""), infinity, -infinity);
  const bool in_q = GENERATE(false, true);
  const index_t row = GENERATE(values<index_t>({0, 15, 16, 47, 48, 69}));
  CAPTURE(poison, in_q, row);
  backward_operands<TestType> clean(base), poisoned(base);
  reference::tensor t = in_q ? clean.x.q.values() : clean.d_out.values();
  poison_row(t, 0, 1, row, poison);
  (in_q ? poisoned.x.q : poisoned.d_out).assign(t);
  const attn::causal_mask causal{.offset = 20};
  attend_and_differentiate(clean, causal);
  attend_and_differentiate(poisoned, causal);
  reference::dense_gradients expected = clean.gradients();
  const reference::dense_gradients got = poisoned.gradients();
  poison_row(expected.d_q, 0, 1, row, std::nan(""));
  CHECK(compare_bits(got.d_q, expected.d_q));
  // Keys past the row's last keep their bits; those it sees are no finite numbers.
  for (index_t j = 0; j < base.n_kv; ++j)
    for (index_t c = 0; c < base.d_qk; ++c) {
      if (j > row + 20)
        CHECK(same_bits(got.d_k(0, 0, j, c), expected.d_k(0, 0, j, c)));
      else
        CHECK(std::isnan(got.d_k(0, 0, j, c)));
    }
  for (index_t j = row + 21; j < base.n_kv; ++j)
    for (index_t c = 0; c < base.d_v; ++c)
      CHECK(same_bits(got.d_v(0, 0, j, c), expected.d_v(0, 0, j, c)));
  CHECK(!std::isfinite(got.d_v(0, 0, row + 20, 0)));
}

TEMPLATE_TEST_CASE("NaN passes through a softcap, a bias and a function", "", float, double) {
  backward_operands<TestType> y(base);
  reference::tensor k = y.x.k.values(), q = y.x.q.values();
  poison_row(k, 0, 1, 90, std::nan(""));  // seen by rows from 50 on, heads 2 and 3
  poison_row(q, 0, 0, 30, std::nan(""));
  y.x.k.assign(k), y.x.q.assign(q);
  const auto check = [&](const auto& rule, const attn::dense_options& options) {
    attend_and_differentiate(y, attn::causal_mask{.offset = 40} & rule, options);
    const reference::tensor d_q = y.d_q.values(), d_k = y.d_k.values();
    for (index_t h = 0; h < 4; ++h)
      for (index_t i = 0; i < base.n_q; ++i) {
        const bool poisoned = h >= 2 ? i >= 50 : h == 0 && i == 30;
        CHECK(std::isnan(d_q(0, h, i, 2)) == poisoned);
      }
    CHECK(std::isnan(d_k(0, 1, 90, 0)));
    CHECK(std::isnan(d_k(0, 0, 70, 0)));
    CHECK(!std::isnan(d_k(0, 0, 71, 0)));
  };
  const std::vector<float> slopes(4, 0.25f);
  check(attn::no_mask{}, {});
  check(attn::no_mask{}, {.softcap = 2});
  check(attn::alibi_bias{slopes}, {});
  check(attn::alibi_bias{slopes}, {.softcap = 2});
  check(attn::score_rule_fn([](auto s, auto...) { return s; }), {});
}

TEMPLATE_TEST_CASE("Keys past key_lengths are never read; their gradients are 0", "",
                   ELEMENT_TYPES) {
  // The tensors end after the last key that exists, at a page that may not be touched.
  const index_t length = GENERATE(values<index_t>({1, 7, 8, 127, 128, 130}));
  const index_t n_kv = 300, n_q = 70, d = 12;
  CAPTURE(length);
  const guarded_tensor<TestType> k(normal_tensor({1, 1, length, d}, 1));
  const guarded_tensor<TestType> v(normal_tensor({1, 1, length, d}, 2));
  const attn::tensor_view<const TestType> all_k(k.view().data_handle(), 1, 1, n_kv, d);
  const attn::tensor_view<const TestType> all_v(v.view().data_handle(), 1, 1, n_kv, d);
  backward_operands<TestType> y({.n_q = n_q, .n_kv = n_kv, .d_qk = d, .d_v = d});
  const std::vector<index_t> lengths{length};
  const attn::key_lengths rule{lengths};
  attn::dense_attention(y.x.q.view(), all_k, all_v, y.x.out.view(), y.x.lse.view(), rule);
  attn::dense_attention_backward(y.x.q.view(), all_k, all_v, y.x.out.view(), y.x.lse.view(),
                                 y.d_out.view(), y.d_q.view(), y.d_k.view(), y.d_v.view(), rule);
  CHECK(y.canaries_alive());
  const reference::tensor d_k = y.d_k.values(), d_v = y.d_v.values();
  bool some = false;
  for (index_t j = 0; j < n_kv; ++j)
    for (index_t c = 0; c < d; ++c) {
      if (j < length) some |= d_v(0, 0, j, c) != 0;
      if (j >= length) CHECK((d_k(0, 0, j, c) == 0 && d_v(0, 0, j, c) == 0));
    }
  CHECK(some);
}

TEST_CASE("No operand is read past its last element") {
  const dense_problem p{.n_q = GENERATE(1, 17, 49),
                        .n_kv = GENERATE(1, 13, 131),
                        .d_qk = GENERATE(1, 5, 64),
                        .d_v = 7};
  INFO(p);
  backward_operands<float> y(p);
  attend_and_differentiate(y);
  const guarded_tensor<float> q(y.x.q.values()), k(y.x.k.values()), v(y.x.v.values());
  const guarded_tensor<float> out(y.x.out.values()), lse(y.x.lse.values());
  const guarded_tensor<float> d_out(y.d_out.values());
  const guarded_tensor<float> d_q{reference::tensor(p.q_extents())};
  const guarded_tensor<float> d_k{reference::tensor(p.k_extents())};
  const guarded_tensor<float> d_v{reference::tensor(p.v_extents())};
  attn::dense_attention_backward(q.view(), k.view(), v.view(), out.view(), lse.view(), d_out.view(),
                                 d_q.view(), d_k.view(), d_v.view());
  CHECK(compare_bits({d_q.values(), d_k.values(), d_v.values()}, y.gradients()));
}

TEST_CASE("Logits of −200: weights that a sentinel would lose") {
  for (const index_t n : {31, 33, 64, 192, 320, 704}) {
    const index_t d = GENERATE(32, 64);
    CAPTURE(n, d);
    backward_operands<float> y({.n_q = n, .n_kv = n, .d_qk = d, .d_v = d});
    y.x.q.assign(reference::tensor({1, 1, n, d}, 1));
    y.x.k.assign(reference::tensor({1, 1, n, d}, -200.0 / static_cast<double>(d)));
    CHECK(check_backward(y, attn::no_mask{}, {}, {.scale = 1.0}));
  }
}

TEST_CASE("Logits of 2e18 are one-hot: gradients stay finite") {
  const index_t n_q = GENERATE(1, 40), d = 64;
  backward_operands<float> y({.n_q = n_q, .n_kv = 2, .d_qk = d, .d_v = 1});
  y.x.q.assign(reference::tensor({1, 1, n_q, d}, 5e8));
  reference::tensor k({1, 1, 2, d}, 5e8);
  for (index_t c = 0; c < d; ++c) k(0, 0, 1, c) = -5e8;
  y.x.k.assign(k);
  attend_and_differentiate(y);
  const reference::dense_gradients got = y.gradients();
  for (const reference::tensor* t : {&got.d_q, &got.d_k, &got.d_v})
    for (const double x : t->elements()) CHECK(std::isfinite(x));
  CHECK(row_is_zero(y.d_v, 0, 0, 1));
}

TEST_CASE("A score that overflows makes its row NaN and leaves the others") {
  backward_operands<float> clean(base), poisoned(base);
  reference::tensor q = clean.x.q.values(), k = clean.x.k.values();
  poison_row(k, 0, 0, 3, 1e20);
  clean.x.k.assign(k), poisoned.x.k.assign(k);
  poison_row(q, 0, 0, 5, 1e20);
  poisoned.x.q.assign(q);
  attend_and_differentiate(clean);
  attend_and_differentiate(poisoned);
  reference::tensor expected = clean.d_q.values();
  poison_row(expected, 0, 0, 5, std::nan(""));
  CHECK(compare_bits(poisoned.d_q.values(), expected));
}

TEST_CASE("The caller's floating-point mode is kept") {
  backward_operands<float> y(base);
  const auto before = float_control();
  attend_and_differentiate(y);
  CHECK(float_control() == before);
  const flush_subnormals mode;
  const auto flushing = float_control();
  differentiate(y);
  CHECK(float_control() == flushing);
}
