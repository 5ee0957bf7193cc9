// SPDX-License-Identifier: MIT
//
// What SMYRF refuses, in its words, and that nothing was written before.
#include "support/catch.hpp"
#include "support/dense_problem.hpp"
#include "support/refusal.hpp"

#include <attn/smyrf_attention.hpp>

#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

using namespace attn_test;
using attn::smyrf_clusters;
using attn::smyrf_options;

namespace {

std::string plan(const smyrf_options& options, const dense_problem& p = {.n_q = 8, .n_kv = 6}) {
  dense_operands<float> x(p);
  return refusal([&] { smyrf_clusters(x.q.view(), x.k.view(), options); });
}

}  // namespace

TEST_CASE("smyrf_clusters: options outside their range") {
  CHECK(plan({}) == "option_error: smyrf_clusters: clusters is 0, expected 1 to 6 (length of k)");
  CHECK(plan({.clusters = -2}) ==
        "option_error: smyrf_clusters: clusters is -2, expected 1 to 6 (length of k)");
  CHECK(plan({.clusters = 7}) ==
        "option_error: smyrf_clusters: clusters is 7, expected 1 to 6 (length of k)");
  CHECK(plan({.clusters = 5}, {.n_q = 4, .n_kv = 6}) ==
        "option_error: smyrf_clusters: clusters is 5, expected 1 to 4 (length of q)");
  CHECK(plan({.clusters = 0}, {.n_q = 0, .n_kv = 0}) ==
        "option_error: smyrf_clusters: clusters is 0, expected 1 to 16777216 (length of q)");
  CHECK(plan({.clusters = 6}) == "accepted");
  CHECK(plan({.clusters = 2, .rounds = 0}) ==
        "option_error: smyrf_clusters: rounds is 0, expected 1 to 65536");
  CHECK(plan({.clusters = 2, .rounds = -1}) ==
        "option_error: smyrf_clusters: rounds is -1, expected 1 to 65536");
  // So many that the size of the plan would not fit an index.
  CHECK(plan({.clusters = 2,
              .rounds = index_t{1} << 61,
              .clustering = attn::smyrf_clustering::bisection}) ==
        "option_error: smyrf_clusters: rounds is 2305843009213693952, expected 1 to 65536");
  CHECK(plan({.clusters = 2, .scale = std::numeric_limits<double>::infinity()}) ==
        "option_error: smyrf_clusters: scale is inf, expected a finite number");
  CHECK(plan({.clusters = 2, .softcap = -1}) ==
        "option_error: smyrf_clusters: softcap is -1, expected 0 (off) or a positive number");
}

TEST_CASE("smyrf_clusters: lengths") {
  const std::vector<index_t> two = {1, 2}, negative = {-1}, nine = {9}, seven = {7};
  CHECK(plan({.clusters = 2, .query_lengths = two}) ==
        "shape_error: smyrf_clusters: query_lengths has 2 elements, expected 1 (batch of q)");
  CHECK(plan({.clusters = 2, .key_lengths = two}) ==
        "shape_error: smyrf_clusters: key_lengths has 2 elements, expected 1 (batch of q)");
  CHECK(plan({.clusters = 2, .query_lengths = negative}) ==
        "option_error: smyrf_clusters: query_lengths[0] is -1, expected 0 to 8 (length of q)");
  CHECK(plan({.clusters = 2, .query_lengths = nine}) ==
        "option_error: smyrf_clusters: query_lengths[0] is 9, expected 0 to 8 (length of q)");
  CHECK(plan({.clusters = 2, .key_lengths = seven}) ==
        "option_error: smyrf_clusters: key_lengths[0] is 7, expected 0 to 6 (length of k)");
}

TEST_CASE("smyrf_clusters: transform, hash, self, far field") {
  CHECK(plan({.clusters = 2, .transform = attn::l2_alsh_transform{.terms = 0}}) ==
        "option_error: smyrf_clusters: l2_alsh_transform.terms is 0, expected 1 to 8");
  CHECK(plan({.clusters = 2, .transform = attn::l2_alsh_transform{.terms = 9}}) ==
        "option_error: smyrf_clusters: l2_alsh_transform.terms is 9, expected 1 to 8");
  CHECK(plan({.clusters = 2, .transform = attn::l2_alsh_transform{.shrink = 1}}) ==
        "option_error: smyrf_clusters: l2_alsh_transform.shrink is 1, expected a number above 0 "
        "and below 1");
  CHECK(plan({.clusters = 2, .transform = attn::l2_alsh_transform{.shrink = std::nan("")}}) ==
        "option_error: smyrf_clusters: l2_alsh_transform.shrink is nan, expected a number above 0 "
        "and below 1");
  CHECK(plan({.clusters = 2, .hash = attn::cross_polytope{.buckets = 7}}) ==
        "option_error: smyrf_clusters: cross_polytope.buckets is 7, expected an even number, 0 "
        "(one per cluster) to 16777216");
  CHECK(plan({.clusters = 2, .attend_self = true}) ==
        "shape_error: smyrf_clusters: k is [1, 1, 6, 8], expected length 8 (length of q, since "
        "attend_self is on)");
  CHECK(plan({.clusters = 2,
              .duplicates = attn::smyrf_duplicates::removed,
              .far_field = attn::smyrf_far_field::means}) ==
        "option_error: smyrf_clusters: far_field is means with duplicates removed, expected "
        "duplicates weighted or rounds 1");
  CHECK(plan({.clusters = 2,
              .rounds = 1,
              .duplicates = attn::smyrf_duplicates::removed,
              .far_field = attn::smyrf_far_field::means}) == "accepted");
}

TEST_CASE("smyrf_clusters: shapes that do not fit") {
  dense_operands<float> x({.n_batch = 2, .n_heads = 4, .n_kv_heads = 2, .n_q = 8, .n_kv = 6});
  const auto with_k = [&](const dense_problem& p) {
    dense_operands<float> y(p);
    return refusal([&] { smyrf_clusters(x.q.view(), y.k.view(), {.clusters = 2}); });
  };
  CHECK(with_k({.n_batch = 1, .n_kv_heads = 2, .n_kv = 6}) ==
        "shape_error: smyrf_clusters: k is [1, 2, 6, 8], expected batch 2 (batch of q)");
  CHECK(with_k({.n_batch = 2, .n_kv_heads = 2, .n_kv = 6, .d_qk = 7}) ==
        "shape_error: smyrf_clusters: k is [2, 2, 6, 7], expected dim 8 (d_qk of q)");
  CHECK(with_k({.n_batch = 2, .n_kv_heads = 3, .n_kv = 6}) ==
        "shape_error: smyrf_clusters: k is [2, 3, 6, 8], expected heads that divide 4 (heads of "
        "q)");
}

TEST_CASE("smyrf_attention: operands that do not fit the plan or each other") {
  const dense_problem p{.n_batch = 2, .n_heads = 4, .n_kv_heads = 2, .n_q = 8, .n_kv = 6};
  dense_operands<float> x(p);
  const smyrf_clusters c(x.q.view(), x.k.view(), {.clusters = 2});
  const auto with = [&](const dense_problem& other) {
    dense_operands<float> y(other);
    const std::string message = refusal([&] {
      attn::smyrf_attention(y.q.view(), y.k.view(), y.v.view(), y.out.view(), y.lse.view(), c);
    });
    if (message != "accepted") CHECK(y.out.untouched());
    return message;
  };
  CHECK(with(p) == "accepted");
  dense_problem other = p;
  other.d_qk = 5;  // a plan for any head dimension
  CHECK(with(other) == "accepted");
  other = p, other.n_batch = 1;
  CHECK(with(other) == "shape_error: smyrf_attention: q is [1, 4, 8, 8], expected batch 2 (batch "
                       "of the clusters)");
  other = p, other.n_heads = 2;
  CHECK(with(other) == "shape_error: smyrf_attention: q is [2, 2, 8, 8], expected heads 4 (heads "
                       "of the clusters)");
  other = p, other.n_q = 9;
  CHECK(with(other) == "shape_error: smyrf_attention: q is [2, 4, 9, 8], expected length 8 "
                       "(queries of the clusters)");
  other = p, other.n_kv_heads = 4;
  CHECK(with(other) == "shape_error: smyrf_attention: k is [2, 4, 6, 8], expected heads 2 (key "
                       "heads of the clusters)");
  other = p, other.n_kv = 7;
  CHECK(with(other) == "shape_error: smyrf_attention: k is [2, 2, 7, 8], expected length 6 (keys "
                       "of the clusters)");

  const auto call = [&](const auto& v, const auto& out, const auto& lse) {
    return refusal([&] { attn::smyrf_attention(x.q.view(), x.k.view(), v, out, lse, c); });
  };
  dense_operands<float> y(
      {.n_batch = 2, .n_heads = 4, .n_kv_heads = 2, .n_q = 8, .n_kv = 5, .d_v = 3});
  CHECK(call(y.v.view(), x.out.view(), x.lse.view()) ==
        "shape_error: smyrf_attention: v is [2, 2, 5, 3], expected length 6 (length of k)");
  CHECK(call(x.v.view(), y.out.view(), x.lse.view()) ==
        "shape_error: smyrf_attention: out is [2, 4, 8, 3], expected dim 8 (d_v of v)");
  CHECK(call(x.v.view(), x.out.view(), x.out.view()) ==
        "shape_error: smyrf_attention: lse is [2, 4, 8, 8], expected dim 1 (one per query)");
  CHECK(call(x.v.view(), x.q.view(), x.lse.view()) ==
        "shape_error: smyrf_attention: out shares memory with q, expected separate memory");
}

TEST_CASE("smyrf_attention: a rule where there is a far field; its own checks") {
  dense_operands<float> x({.n_q = 8, .n_kv = 6});
  const auto call = [&](const smyrf_options& options, const auto& rule) {
    const std::string message = refusal([&] {
      attn::smyrf_attention(x.q.view(), x.k.view(), x.v.view(), x.out.view(), x.lse.view(), options,
                            rule);
    });
    CHECK(x.out.untouched());
    CHECK(x.lse.untouched());
    return message;
  };
  CHECK(call({.clusters = 2, .far_field = attn::smyrf_far_field::means}, attn::causal_mask{}) ==
        "option_error: smyrf_attention: far_field is means with a score rule, expected no_mask or "
        "smyrf_far_field::none");
  const std::vector<index_t> two = {1, 2};
  CHECK(call({.clusters = 2}, attn::key_lengths{two}) ==
        "shape_error: smyrf_attention: key_lengths has 2 elements, expected 1 (batch of q)");
  CHECK(call({.clusters = 9}, attn::no_mask{}) ==
        "option_error: smyrf_clusters: clusters is 9, expected 1 to 6 (length of k)");
}

TEST_CASE("smyrf_attention_backward: operands that do not fit") {
  const dense_problem p{.n_batch = 2, .n_heads = 4, .n_kv_heads = 2, .n_q = 8, .n_kv = 6, .d_v = 5};
  dense_operands<float> x(p);
  const smyrf_clusters c(x.q.view(), x.k.view(), {.clusters = 2});
  const smyrf_clusters far(x.q.view(), x.k.view(),
                           {.clusters = 2, .far_field = attn::smyrf_far_field::means});
  const auto fresh = [](std::array<index_t, 4> extents) {
    return tensor_buffer<float>(extents, layout::contiguous, std::nanf(""));
  };
  auto d_q = fresh(p.q_extents()), d_k = fresh(p.k_extents()), d_v = fresh(p.v_extents());
  auto d_out = fresh(p.out_extents()), wrong = fresh({2, 4, 8, 7});
  const auto call = [&](const smyrf_clusters& plan, auto d_out_view, auto d_q_view, auto d_k_view,
                        const auto& rule) {
    const std::string message = refusal([&] {
      attn::smyrf_attention_backward(x.q.view(), x.k.view(), x.v.view(), x.out.view(), x.lse.view(),
                                     d_out_view, plan, d_q_view, d_k_view, d_v.view(), rule);
    });
    CHECK(d_q.untouched());
    CHECK(d_k.untouched());
    CHECK(d_v.untouched());
    return message;
  };
  CHECK(call(c, wrong.view(), d_q.view(), d_k.view(), attn::no_mask{}) ==
        "shape_error: smyrf_attention_backward: d_out is [2, 4, 8, 7], expected dim 5 (d_v of v)");
  CHECK(call(c, d_out.view(), wrong.view(), d_k.view(), attn::no_mask{}) ==
        "shape_error: smyrf_attention_backward: d_q is [2, 4, 8, 7], expected dim 8 (d_qk of q)");
  CHECK(call(c, d_out.view(), d_q.view(), x.k.view(), attn::no_mask{}) ==
        "shape_error: smyrf_attention_backward: d_k shares memory with k, expected separate "
        "memory");
  CHECK(call(far, d_out.view(), d_q.view(), d_k.view(), attn::causal_mask{}) ==
        "option_error: smyrf_attention_backward: far_field is means with a score rule, expected "
        "no_mask or smyrf_far_field::none");
  dense_operands<float> y({.n_batch = 2, .n_heads = 4, .n_kv_heads = 2, .n_q = 9, .n_kv = 6});
  const smyrf_clusters other(y.q.view(), y.k.view(), {.clusters = 2});
  CHECK(call(other, d_out.view(), d_q.view(), d_k.view(), attn::no_mask{}) ==
        "shape_error: smyrf_attention_backward: q is [2, 4, 8, 8], expected length 9 (queries of "
        "the clusters)");
}

TEST_CASE("Clusters that there is no memory for are none") {
  dense_operands<float> x(dense_problem{.n_q = 8, .n_kv = 6});
  smyrf_clusters c(x.q.view(), x.k.view(), {.clusters = 2, .rounds = 3});
  auto extents = x.q.view().extents();
  extents[2] = index_t{1} << 45;
  const attn::tensor_view<const float> many(x.q.view().data_handle(), extents, {0, 0, 0, 1});
  CHECK_THROWS_AS(c.assign(many, x.k.view(), {.clusters = 2, .rounds = 65536}), std::length_error);
  CHECK(refusal([&] {
          attn::smyrf_attention(x.q.view(), x.k.view(), x.v.view(), x.out.view(), c);
        }).ends_with("expected batch 0 (batch of the clusters)"));
  c.assign(x.q.view(), x.k.view(), {.clusters = 2});
  CHECK(c.rounds() == 4);
}
