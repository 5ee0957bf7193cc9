// SPDX-License-Identifier: MIT
//
// SMYRF attention against the oracle: multiplicities, dimensions, layouts, lengths, calls.
#include "support/catch.hpp"
#include "support/smyrf_call.hpp"

#include <array>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

using namespace attn_test;
using attn::smyrf_clustering;
using attn::smyrf_clusters;
using attn::smyrf_duplicates;
using attn::smyrf_options;

#define ELEMENT_TYPES float, double, Eigen::half, Eigen::bfloat16

TEMPLATE_TEST_CASE("smyrf_attention: every key counts as often as it is met", "", ELEMENT_TYPES) {
  for (smyrf_options options : smyrf_kinds)
    for (const auto& [n_q, n_kv, clusters] : std::vector<std::array<index_t, 3>>{{1, 1, 1},
                                                                                 {5, 3, 2},
                                                                                 {33, 70, 4},
                                                                                 {64, 64, 8},
                                                                                 {100, 260, 3},
                                                                                 {203, 97, 6},
                                                                                 {300, 300, 2}})
      for (const double softcap : {0.0, 3.0}) {
        const dense_problem p{.n_batch = 2,
                              .n_heads = 2,
                              .n_kv_heads = 1,
                              .n_q = n_q,
                              .n_kv = n_kv,
                              .d_qk = 19,
                              .d_v = 21,
                              .deviation = 2};
        options.clusters = clusters, options.softcap = softcap;
        CAPTURE(p, clusters, options.rounds, static_cast<int>(options.duplicates), softcap);
        dense_operands<TestType> x(p);
        CHECK(check_smyrf(x, options));
      }
}

TEMPLATE_TEST_CASE("smyrf_attention: head dimensions", "", float, double) {
  for (const index_t d_qk : {1, 3, 8, 16, 17, 64, 80, 128})
    for (const index_t d_v : {1, 7, 16, 33, 64, 200}) {
      const dense_problem p{.n_q = 70, .n_kv = 90, .d_qk = d_qk, .d_v = d_v};
      CAPTURE(p);
      dense_operands<TestType> x(p);
      CHECK(check_smyrf(x, {.clusters = 3, .rounds = 2}));
      CHECK(check_smyrf(
          x, {.clusters = 3, .rounds = 2, .duplicates = smyrf_duplicates::removed, .scale = 0.3}));
    }
}

TEMPLATE_TEST_CASE("smyrf_attention: layouts", "", ELEMENT_TYPES) {
  for (const layout inputs :
       {layout::contiguous, layout::padded_by_one, layout::offset_by_one, layout::heads_interleaved,
        layout::column_major, layout::strided_dim, layout::broadcast_heads, layout::broadcast_rows})
    for (const layout outputs : plain_layouts) {
      const dense_problem p{.n_batch = 2,
                            .n_heads = 4,
                            .n_kv_heads = 2,
                            .n_q = 45,
                            .n_kv = 37,
                            .d_qk = 9,
                            .d_v = 18,
                            .inputs = inputs,
                            .outputs = outputs};
      CAPTURE(p);
      dense_operands<TestType> x(p);
      CHECK(
          check_smyrf(x, {.clusters = 3, .rounds = 2, .clustering = smyrf_clustering::bisection}));
    }
}

TEMPLATE_TEST_CASE("smyrf_attention: rows past a length are 0 and −inf, and are not read", "",
                   ELEMENT_TYPES) {
  const std::vector<index_t> q_lengths = {40, 7, 0, 40}, k_lengths = {50, 0, 9, 3};
  const dense_problem p{.n_batch = 4, .n_heads = 2, .n_kv_heads = 1, .n_q = 40, .n_kv = 50};
  for (const double poison : {std::nan(""), 1e30}) {
    dense_operands<TestType> x(p);
    reference::tensor q = x.q.values(), k = x.k.values(), v = x.v.values();
    for (index_t b = 0; b < 4; ++b)
      for (index_t c = 0; c < 8; ++c) {
        const auto at = static_cast<std::size_t>(b);
        for (index_t h = 0; h < 2; ++h)
          for (index_t i = q_lengths[at]; i < 40; ++i) q(b, h, i, c) = poison;
        for (index_t j = k_lengths[at]; j < 50; ++j) k(b, 0, j, c) = v(b, 0, j, c) = poison;
      }
    x.q.assign(q), x.k.assign(k), x.v.assign(v);
    for (smyrf_options options : smyrf_kinds) {
      options.clusters = 6;
      options.query_lengths = q_lengths, options.key_lengths = k_lengths;
      CHECK(check_smyrf(x, options));
      CHECK(check_smyrf(x, options, attn::causal_mask{}, reference::causal_mask()));
    }
  }
}

TEST_CASE("smyrf_attention: all calls, Eigen objects") {
  using row_matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const dense_problem p{.n_q = 40, .n_kv = 30, .d_qk = 6, .d_v = 5};
  dense_operands<float> x(p);
  const smyrf_options options{.clusters = 3, .rounds = 2};
  CHECK(check_smyrf(x, options));
  const auto matrix = [](const reference::tensor& t) {
    Eigen::MatrixXf m(t.extent(2), t.extent(3));
    for (index_t i = 0; i < m.rows(); ++i)
      for (index_t c = 0; c < m.cols(); ++c) m(i, c) = static_cast<float>(t(0, 0, i, c));
    return m;
  };
  const Eigen::MatrixXf q = matrix(x.q.values()), k = matrix(x.k.values()),
                        v = matrix(x.v.values());
  const Eigen::MatrixXf expected = matrix(x.out.values()), expected_lse = matrix(x.lse.values());
  row_matrix out(40, 5);
  Eigen::VectorXf lse(40);
  attn::context ctx;
  const smyrf_clusters c(q, k, options);
  attn::smyrf_attention(q, k, v, out, lse, c, attn::no_mask{}, ctx);
  CHECK(out == expected);
  CHECK(lse == expected_lse.col(0));
  out.setZero();
  attn::smyrf_attention(q, k, v, out, c);
  CHECK(out == expected);
  out.setZero(), lse.setZero();
  attn::smyrf_attention(q, k, v, out, lse, options);
  CHECK(out == expected);
  CHECK(lse == expected_lse.col(0));
  out.setZero();
  attn::smyrf_attention(q, k, v, out, options, attn::no_mask{}, ctx);
  CHECK(out == expected);
}

TEST_CASE("smyrf_attention: tensors without rows, keys, dimensions or heads") {
  for (const auto& p :
       {dense_problem{.n_q = 0, .n_kv = 4}, dense_problem{.n_q = 4, .n_kv = 0},
        dense_problem{.n_q = 4, .n_kv = 4, .d_qk = 0}, dense_problem{.n_q = 4, .n_kv = 4, .d_v = 0},
        dense_problem{.n_batch = 0, .n_q = 4, .n_kv = 4},
        dense_problem{.n_heads = 0, .n_kv_heads = 0, .n_q = 4, .n_kv = 4}}) {
    CAPTURE(p);
    dense_operands<float> x(p);
    CHECK(check_smyrf(x, {.clusters = 2, .rounds = 2, .scale = 1}));
    CHECK(check_smyrf(x, {.clusters = 2, .scale = 1, .clustering = smyrf_clustering::bisection}));
    attn::context ctx(3);
    CHECK(check_smyrf(x, {.clusters = 2, .rounds = 2, .scale = 1}, attn::no_mask{}, {}, ctx));
  }
}
