// SPDX-License-Identifier: MIT
//
// The backward pass of dense attention: hand values, the oracle's gradients, finite differences.
#include "support/backward_call.hpp"
#include "support/catch.hpp"
#include "support/sizes.hpp"

#include <Eigen/Core>

#include <array>
#include <cmath>
#include <limits>

using namespace attn_test;

#define ELEMENT_TYPES float, double, Eigen::half, Eigen::bfloat16

namespace {

template <class T>
comparison full_and_causal(const dense_problem& p) {
  const comparison full = check_backward<T>(p);
  if (!full) return full;
  return check_backward<T>(p, attn::causal_mask::bottom_right(p.n_q, p.n_kv),
                           reference::causal_mask(p.n_kv - p.n_q));
}

}  // namespace

TEMPLATE_TEST_CASE("Two keys of equal weight", "", ELEMENT_TYPES) {
  // q = 1, k = (2, 2), v = (0, 1), d_out = 8, scale 1/2: p = 1/2, D = 4, g = ½ (∓4) ½ = ∓1.
  using T = TestType;
  const std::array<T, 1> q{T(1)}, d_out{T(8)};
  const std::array<T, 2> k{T(2), T(2)}, v{T(0), T(1)};
  std::array<T, 1> out{}, d_q{};
  std::array<T, 2> d_k{}, d_v{};
  std::array<arithmetic_t<T>, 1> lse{};
  const auto one = [](auto& x) { return attn::bhld(x.data(), 1, 1, 1, 1); };
  const auto two = [](auto& x) { return attn::bhld(x.data(), 1, 1, 2, 1); };
  attn::dense_attention(one(q), two(k), two(v), one(out), one(lse), attn::no_mask{}, {.scale = .5});
  attn::dense_attention_backward(one(q), two(k), two(v), one(out), one(lse), one(d_out), one(d_q),
                                 two(d_k), two(d_v), attn::no_mask{}, {.scale = .5});
  const double tiny = 8 * arithmetic_epsilon<T> + 2 * storage_rounding<T>();
  CHECK(std::abs(to_double(d_k[0]) + 1) <= 4 * tiny);
  CHECK(std::abs(to_double(d_k[1]) - 1) <= 4 * tiny);
  CHECK(std::abs(to_double(d_q[0])) <= 8 * tiny);
  CHECK(std::abs(to_double(d_v[0]) - 4) <= 4 * tiny);
  CHECK(std::abs(to_double(d_v[1]) - 4) <= 4 * tiny);
}

TEMPLATE_TEST_CASE("Any number of queries", "", ELEMENT_TYPES) {
  for (const index_t n_q : query_counts<TestType>())
    for (const index_t n_kv : {1, 17, 130}) {
      const dense_problem p{.n_q = n_q, .n_kv = n_kv, .d_qk = 5, .d_v = 6};
      INFO(p);
      CHECK(full_and_causal<TestType>(p));
    }
}

TEMPLATE_TEST_CASE("Any number of keys", "", ELEMENT_TYPES) {
  for (const index_t n_kv : key_counts())
    for (const index_t n_q : {index_t{1}, index_t{2}, 3 * lanes<TestType> + 1}) {
      const dense_problem p{.n_q = n_q, .n_kv = n_kv, .d_qk = 6, .d_v = 5};
      INFO(p);
      CHECK(full_and_causal<TestType>(p));
    }
}

TEMPLATE_TEST_CASE("Any head dimension, d_v other than d_qk", "", float, double) {
  for (const index_t d : head_dimensions<TestType>()) {
    const dense_problem p{.n_q = 3 * lanes<TestType> + 1, .n_kv = 21, .d_qk = d, .d_v = d};
    INFO(p);
    CHECK(full_and_causal<TestType>(p));
  }
  for (const auto& [d_qk, d_v] :
       {std::pair{3, 5}, {5, 3}, {192, 128}, {1, 64}, {64, 1}, {16, 200}}) {
    const dense_problem p{
        .n_heads = 2, .n_kv_heads = 1, .n_q = 19, .n_kv = 140, .d_qk = d_qk, .d_v = d_v};
    INFO(p);
    CHECK(full_and_causal<TestType>(p));
  }
}

TEMPLATE_TEST_CASE("Query heads that share a key/value head add up in its gradients", "",
                   ELEMENT_TYPES) {
  for (const index_t group : {1, 2, 3}) {
    const dense_problem p{.n_batch = 2,
                          .n_heads = 2 * group,
                          .n_kv_heads = 2,
                          .n_q = 37,
                          .n_kv = 150,
                          .d_qk = 9,
                          .d_v = 17};
    INFO(p);
    CHECK(full_and_causal<TestType>(p));
  }
}

TEMPLATE_TEST_CASE("Every layout of operands and gradients", "", ELEMENT_TYPES) {
  for (const layout inputs :
       {layout::contiguous, layout::padded_by_one, layout::padded_wide, layout::offset_by_one,
        layout::heads_interleaved, layout::column_major, layout::strided_dim,
        layout::broadcast_batch, layout::broadcast_heads, layout::broadcast_rows})
    for (const layout outputs : plain_layouts) {
      const dense_problem p{.n_batch = 2,
                            .n_heads = 2,
                            .n_kv_heads = 1,
                            .n_q = 2 * lanes<TestType> + 1,
                            .n_kv = 137,
                            .d_qk = 20,
                            .d_v = 12,
                            .inputs = inputs,
                            .outputs = outputs};
      INFO(p);
      CHECK(full_and_causal<TestType>(p));
    }
}

TEST_CASE("Eigen matrices of both orders, one head") {
  const dense_problem p{.n_q = 21, .n_kv = 33, .d_qk = 10, .d_v = 7};
  backward_operands<double> y(p);
  attend_and_differentiate(y);
  const auto fill = [](auto& m, const reference::tensor& t) {
    for (Eigen::Index i = 0; i < m.rows(); ++i)
      for (Eigen::Index c = 0; c < m.cols(); ++c) m(i, c) = t(0, 0, i, c);
  };
  Eigen::MatrixXd q(21, 10), k(33, 10), v(33, 7), d_out(21, 7), out(21, 7), d_q(21, 10), d_v(33, 7);
  Eigen::Matrix<double, -1, -1, Eigen::RowMajor> d_k(33, 10);
  Eigen::VectorXd lse(21);
  fill(q, y.x.q.values()), fill(k, y.x.k.values()), fill(v, y.x.v.values());
  fill(d_out, y.d_out.values());
  attn::dense_attention(q, k, v, out, lse);
  attn::dense_attention_backward(q, k, v, out, lse, d_out, d_q, d_k, d_v);
  const reference::dense_gradients expected = y.gradients();
  for (index_t i = 0; i < 21; ++i)
    for (index_t c = 0; c < 10; ++c) CHECK(d_q(i, c) == expected.d_q(0, 0, i, c));
  for (index_t j = 0; j < 33; ++j) {
    for (index_t c = 0; c < 10; ++c) CHECK(d_k(j, c) == expected.d_k(0, 0, j, c));
    for (index_t c = 0; c < 7; ++c) CHECK(d_v(j, c) == expected.d_v(0, 0, j, c));
  }
}

TEST_CASE("Storage types may differ from operand to operand") {
  const dense_problem p{.n_q = 21, .n_kv = 33};
  backward_operands<float> y(p);
  dense_operands<Eigen::bfloat16> rounded(p);
  y.x.q.assign(rounded.q.values()), y.x.k.assign(rounded.k.values());
  y.x.v.assign(rounded.v.values());
  attend_and_differentiate(y);
  backward_operands<float> mixed(p);
  attn::dense_attention_backward(rounded.q.view(), y.x.k.view(), rounded.v.view(), y.x.out.view(),
                                 y.x.lse.view(), y.d_out.view(), mixed.d_q.view(), mixed.d_k.view(),
                                 mixed.d_v.view());
  CHECK(compare_bits(mixed.gradients(), y.gradients()));
}

TEMPLATE_TEST_CASE("Extents of zero are legal", "", ELEMENT_TYPES) {
  const auto all_zero = [](const reference::tensor& t) {
    return compare_bits(t, reference::tensor(t.extents(), 0));
  };
  attn::context ctx(GENERATE(1, 3));
  SECTION("no keys: d_q 0") {
    backward_operands<TestType> y(
        {.n_batch = 2, .n_heads = 2, .n_kv_heads = 1, .n_q = GENERATE(1, 60), .n_kv = 0});
    attend_and_differentiate(y, attn::no_mask{}, {}, ctx);
    CHECK(all_zero(y.d_q.values()));
  }
  SECTION("no queries: d_k and d_v 0") {
    backward_operands<TestType> y(
        {.n_batch = 2, .n_heads = 2, .n_kv_heads = 1, .n_q = 0, .n_kv = GENERATE(1, 300)});
    attend_and_differentiate(y, attn::no_mask{}, {}, ctx);
    CHECK(all_zero(y.d_k.values()));
    CHECK(all_zero(y.d_v.values()));
  }
  SECTION("no query heads: d_k and d_v 0") {
    backward_operands<TestType> y({.n_heads = 0, .n_kv_heads = 2, .n_q = 3, .n_kv = 5});
    attend_and_differentiate(y, attn::no_mask{}, {}, ctx);
    CHECK(all_zero(y.d_k.values()));
    CHECK(all_zero(y.d_v.values()));
  }
  SECTION("no channels") {
    backward_operands<TestType> no_scores({.n_q = 40, .n_kv = 5, .d_qk = 0, .d_v = 3});
    CHECK(check_backward(no_scores, attn::no_mask{}, {}, {.scale = 1.0}));
    backward_operands<TestType> no_values({.n_q = 40, .n_kv = 5, .d_v = 0});
    CHECK(check_backward(no_values));
  }
  SECTION("no batches") {
    backward_operands<TestType> y({.n_batch = 0, .n_q = 3, .n_kv = 5});
    CHECK_NOTHROW(attend_and_differentiate(y, attn::no_mask{}, {}, ctx));
  }
}
