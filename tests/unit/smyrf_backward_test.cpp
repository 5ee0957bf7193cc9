// SPDX-License-Identifier: MIT
//
// The backward pass of SMYRF: the oracle's gradients, finite differences, threads, lengths.
#include "support/backward_call.hpp"
#include "support/catch.hpp"
#include "support/smyrf_call.hpp"

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

using namespace attn_test;
using attn::smyrf_clustering;
using attn::smyrf_clusters;
using attn::smyrf_options;

#define ELEMENT_TYPES float, double, Eigen::half, Eigen::bfloat16

namespace {

/// Forward and backward on the operands of y.
template <class T, class Rule = attn::no_mask>
smyrf_clusters run(backward_operands<T>& y, const smyrf_options& options, const Rule& rule = {},
                   attn::context& ctx = attn::default_context()) {
  const smyrf_clusters c(y.x.q.view(), y.x.k.view(), options, ctx);
  attn::smyrf_attention(y.x.q.view(), y.x.k.view(), y.x.v.view(), y.x.out.view(), y.x.lse.view(), c,
                        rule, ctx);
  attn::smyrf_attention_backward(std::as_const(y.x.q).view(), std::as_const(y.x.k).view(),
                                 std::as_const(y.x.v).view(), std::as_const(y.x.out).view(),
                                 std::as_const(y.x.lse).view(), std::as_const(y.d_out).view(), c,
                                 y.d_q.view(), y.d_k.view(), y.d_v.view(), rule, ctx);
  return c;
}

template <class T, class Rule = attn::no_mask>
comparison check(backward_operands<T>& y, const smyrf_options& options, const Rule& rule = {},
                 const reference::score_rule& meaning = {}) {
  const smyrf_clusters c = run(y, options, rule);
  const double constant = 16 + 2 * static_cast<double>(options.rounds);
  return y.matches(meaning & reference::counted(meetings_of(c, y.x.problem)),
                   {.scale = options.scale, .softcap = options.softcap, .sinks = {}},
                   {.constant = constant});
}

}  // namespace

TEMPLATE_TEST_CASE("smyrf_attention_backward: the oracle's gradients", "", ELEMENT_TYPES) {
  for (smyrf_options options : smyrf_kinds)
    for (const auto& [n_q, n_kv, clusters] : std::vector<std::array<index_t, 3>>{
             {1, 1, 1}, {5, 3, 2}, {33, 70, 4}, {100, 200, 3}, {203, 97, 6}, {150, 150, 1}})
      for (const double softcap : {0.0, 3.0}) {
        options.clusters = clusters, options.softcap = softcap;
        const dense_problem p{.n_batch = 2,
                              .n_heads = 2,
                              .n_kv_heads = 1,
                              .n_q = n_q,
                              .n_kv = n_kv,
                              .d_qk = 19,
                              .d_v = 21};
        CAPTURE(p, clusters, options.rounds, static_cast<int>(options.duplicates), softcap);
        backward_operands<TestType> y(p);
        CHECK(check(y, options));
      }
}

TEMPLATE_TEST_CASE("smyrf_attention_backward: layouts", "", float, Eigen::bfloat16) {
  for (const layout inputs : {layout::contiguous, layout::offset_by_one, layout::heads_interleaved,
                              layout::column_major, layout::broadcast_heads})
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
      backward_operands<TestType> y(p);
      CHECK(check(y, {.clusters = 3, .rounds = 2}));
    }
}

TEST_CASE("smyrf_attention_backward: rules, self, lengths") {
  const index_t n = 120;
  const dense_problem p{
      .n_batch = 2, .n_heads = 4, .n_kv_heads = 2, .n_q = n, .n_kv = n, .d_qk = 12, .d_v = 10};
  backward_operands<float> y(p);
  const std::vector<index_t> lengths = {n, 71};
  const auto mask_values = coin_tensor({2, 1, n, n}, 5, 0.4);
  std::vector<char> mask_bytes;
  for (const double e : mask_values.elements()) mask_bytes.push_back(e != 0);
  const attn::boolean_mask mask{
      attn::tensor_view<const bool>(reinterpret_cast<const bool*>(mask_bytes.data()), 2, 1, n, n)};
  const attn::score_rule_fn half([](auto s, index_t, index_t, index_t i, index_t j) {
    return (i + j) % 5 == 0 ? -std::numeric_limits<decltype(s)>::infinity() : s + decltype(s)(0.5);
  });
  const reference::score_rule meaning_half =
      reference::score_rule_fn([](double s, index_t, index_t, index_t i, index_t j) {
        return (i + j) % 5 == 0 ? -HUGE_VAL : s + 0.5;
      });
  for (smyrf_options options : smyrf_kinds)
    for (const bool self : {false, true})
      for (const double softcap : {0.0, 4.0}) {
        options.clusters = 9, options.attend_self = self, options.softcap = softcap;
        CAPTURE(options.rounds, self, softcap, static_cast<int>(options.duplicates));
        CHECK(check(y, options, attn::causal_mask{}, reference::causal_mask()));
        CHECK(check(y, options, mask, reference::boolean_mask(mask_values)));
        CHECK(check(y, options, half, meaning_half));
        options.query_lengths = options.key_lengths = lengths;
        CHECK(check(y, options));
        CHECK(check(y, options, attn::causal_mask{} & mask,
                    reference::causal_mask() & reference::boolean_mask(mask_values)));
        options.query_lengths = options.key_lengths = {};
      }
}

TEST_CASE("smyrf_attention_backward: what lies past a length is not read and gets 0") {
  const std::vector<index_t> q_lengths = {40, 7, 0}, k_lengths = {50, 0, 9};
  const dense_problem p{.n_batch = 3, .n_heads = 2, .n_kv_heads = 1, .n_q = 40, .n_kv = 50};
  std::vector<reference::dense_gradients> all;
  for (const double poison : {0.0, std::nan(""), 1e30}) {
    backward_operands<float> y(p);
    reference::tensor q = y.x.q.values(), k = y.x.k.values(), v = y.x.v.values();
    reference::tensor d_out = y.d_out.values();
    for (index_t b = 0; b < 3; ++b)
      for (index_t c = 0; c < 8; ++c) {
        const auto at = static_cast<std::size_t>(b);
        for (index_t h = 0; h < 2; ++h)
          for (index_t i = q_lengths[at]; i < 40; ++i) {
            q(b, h, i, c) = d_out(b, h, i, c) = poison;
          }
        for (index_t j = k_lengths[at]; j < 50; ++j) k(b, 0, j, c) = v(b, 0, j, c) = poison;
      }
    y.x.q.assign(q), y.x.k.assign(k), y.x.v.assign(v), y.d_out.assign(d_out);
    run(y, {.clusters = 4, .rounds = 3, .query_lengths = q_lengths, .key_lengths = k_lengths},
        attn::causal_mask{});
    all.push_back(y.gradients());
    const reference::tensor dq = y.d_q.values(), dk = y.d_k.values();
    for (index_t i = 7; i < 40; ++i) CHECK(dq(1, 0, i, 0) == 0);
    for (index_t j = 9; j < 50; ++j) CHECK(dk(2, 0, j, 0) == 0);
  }
  CHECK(compare_bits(all[0], all[1]));
  CHECK(compare_bits(all[0], all[2]));
}

TEST_CASE("smyrf_attention_backward: finite differences, with and without far field") {
  for (const bool far : {false, true})
    for (const double softcap : {0.0, 2.0})
      for (const index_t clusters : {1, 3, 4}) {
        const dense_problem p{
            .n_heads = 2, .n_kv_heads = 1, .n_q = 9, .n_kv = 11, .d_qk = 3, .d_v = 2};
        CAPTURE(far, softcap, clusters);
        backward_operands<double> y(p);
        smyrf_options options{.clusters = clusters, .rounds = 2, .softcap = softcap};
        if (far) options.far_field = attn::smyrf_far_field::means;
        const smyrf_clusters c = run(y, options);
        const reference::dense_gradients g = y.gradients();
        const reference::tensor d_out = y.d_out.values();
        // The loss Σ d_out·out with the clusters held fast.
        const auto loss = [&] {
          attn::smyrf_attention(y.x.q.view(), y.x.k.view(), y.x.v.view(), y.x.out.view(), c);
          const reference::tensor out = y.x.out.values();
          double sum = 0;
          for (std::size_t i = 0; i < out.elements().size(); ++i) {
            sum += d_out.elements()[i] * out.elements()[i];
          }
          return sum;
        };
        const auto differences = [&](tensor_buffer<double>& x, const reference::tensor& gradient) {
          const reference::tensor values = x.values();
          double worst = 0;
          for (std::size_t i = 0; i < values.elements().size(); ++i) {
            const double step = 1e-5;
            reference::tensor moved = values;
            moved.elements()[i] += step;
            x.assign(moved);
            const double up = loss();
            moved.elements()[i] -= 2 * step;
            x.assign(moved);
            const double down = loss();
            worst = std::max(worst, std::abs((up - down) / (2 * step) - gradient.elements()[i]));
          }
          x.assign(values);
          return worst;
        };
        CHECK(differences(y.x.q, g.d_q) < 1e-8);
        CHECK(differences(y.x.k, g.d_k) < 1e-8);
        CHECK(differences(y.x.v, g.d_v) < 1e-8);
      }
}

TEST_CASE("smyrf_attention_backward: the same bits for any number of threads") {
  for (const dense_problem& p :
       {dense_problem{.n_q = 300, .n_kv = 300, .d_qk = 16},
        dense_problem{.n_batch = 2, .n_heads = 8, .n_kv_heads = 4, .n_q = 60, .n_kv = 60}})
    for (const bool far : {false, true}) {
      const smyrf_options options{.clusters = 6,
                                  .rounds = 3,
                                  .attend_self = true,
                                  .far_field = far ? attn::smyrf_far_field::means
                                                   : attn::smyrf_far_field::none};
      backward_operands<float> one(p);
      run(one, options);
      for (const int n_threads : {2, 5}) {
        attn::context ctx(n_threads);
        backward_operands<float> y(p);
        run(y, options, attn::no_mask{}, ctx);
        CHECK(compare_bits(y.gradients(), one.gradients()));
      }
    }
}

TEST_CASE("smyrf_attention_backward: tensors without rows, keys or heads") {
  for (const auto& p : {dense_problem{.n_q = 0, .n_kv = 4}, dense_problem{.n_q = 4, .n_kv = 0},
                        dense_problem{.n_batch = 0, .n_q = 4, .n_kv = 4},
                        dense_problem{.n_heads = 0, .n_kv_heads = 0, .n_q = 4, .n_kv = 4}}) {
    CAPTURE(p);
    backward_operands<float> y(p);
    CHECK(check(y, {.clusters = 2, .rounds = 2}));
  }
}
