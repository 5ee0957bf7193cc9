// SPDX-License-Identifier: MIT
//
// Blockwise attention and its gradients against the dense oracle under the block-diagonal mask.
#include "support/backward_call.hpp"
#include "support/catch.hpp"
#include "support/rule_operands.hpp"

#include <attn/blockwise_attention.hpp>

#include <utility>
#include <vector>

using namespace attn_test;
using attn::blockwise_options;

#define ELEMENT_TYPES float, double, Eigen::half, Eigen::bfloat16

namespace {

reference::score_rule same_block(index_t block) {
  return reference::score_rule_fn([block](double s, index_t, index_t, index_t i, index_t j) {
    return i / block == j / block ? s : reference::forbidden;
  });
}

template <class T, class Rule>
void attend_blockwise(dense_operands<T>& x, const Rule& rule, const blockwise_options& options,
                      attn::context& ctx = attn::default_context()) {
  attn::blockwise_attention(std::as_const(x.q).view(), std::as_const(x.k).view(),
                            std::as_const(x.v).view(), x.out.view(), x.lse.view(), rule, options,
                            ctx);
}

/// Forward and backward against the oracle.
template <class T, class Rule = attn::no_mask>
comparison check_blockwise(const dense_problem& p, const blockwise_options& options,
                           const Rule& rule = {}, const reference::score_rule& meaning = {}) {
  backward_operands<T> y(p);
  const reference::score_rule whole = same_block(options.block) & meaning;
  attend_blockwise(y.x, rule, options);
  const comparison forward = y.x.matches(y.x.expected(whole, meaning_of(options.dense())));
  if (!forward) return forward;
  attn::blockwise_attention_backward(std::as_const(y.x.q).view(), std::as_const(y.x.k).view(),
                                     std::as_const(y.x.v).view(), std::as_const(y.x.out).view(),
                                     std::as_const(y.x.lse).view(), std::as_const(y.d_out).view(),
                                     y.d_q.view(), y.d_k.view(), y.d_v.view(), rule, options);
  return y.matches(whole, meaning_of(options.dense()));
}

}  // namespace

TEMPLATE_TEST_CASE("Blocks of any length, a short last one", "", float, double) {
  for (const index_t n : {1, 2, 17, 48, 100, 130}) {
    for (const index_t block : {1, 2, 3, 15, 16, 17, 47, 48, 49, 64, 100, 128, 129, 512}) {
      const dense_problem p{.n_q = n, .n_kv = n, .d_qk = 5, .d_v = 6};
      INFO(p);
      CAPTURE(block);
      CHECK(check_blockwise<TestType>(p, {.block = block}));
    }
  }
}

TEMPLATE_TEST_CASE("Every element type, grouped heads, batches, layouts", "", ELEMENT_TYPES) {
  for (const layout l : plain_layouts) {
    const dense_problem p{.n_batch = 2,
                          .n_heads = 4,
                          .n_kv_heads = 2,
                          .n_q = 75,
                          .n_kv = 75,
                          .d_qk = 9,
                          .d_v = 7,
                          .inputs = l,
                          .outputs = l};
    INFO(p);
    CHECK(check_blockwise<TestType>(p, {.block = 20}));
  }
}

TEST_CASE("Rules see positions in the whole sequence") {
  const dense_problem p{
      .n_batch = 2, .n_heads = 2, .n_kv_heads = 2, .n_q = 150, .n_kv = 150, .d_qk = 6, .d_v = 5};
  const index_t block = GENERATE(32, 50, 64);
  const blockwise_options options{.block = block};
  CAPTURE(block);
  CHECK(check_blockwise<float>(p, options, attn::causal_mask{}, reference::causal_mask()));
  CHECK(check_blockwise<float>(p, options, attn::window_mask{.left = 9, .right = 3},
                               reference::window_mask(9, 3)));
  const std::vector<index_t> lengths{70, 150};
  CHECK(check_blockwise<float>(p, options, attn::key_lengths{lengths},
                               reference::key_lengths(lengths)));
  const rule_operand<bool> mask(coin_tensor(p.score_extents(), 5));
  CHECK(check_blockwise<float>(p, options, attn::boolean_mask{mask.view()},
                               reference::boolean_mask(mask.values)));
  const rule_operand<float> bias(normal_tensor(p.score_extents(), 6));
  CHECK(check_blockwise<float>(p, options, attn::additive_bias{bias.view()},
                               reference::additive_bias(bias.values)));
  const std::vector<float> slopes{0.5f, 0.25f};
  CHECK(check_blockwise<float>(p, options, attn::causal_mask{} & attn::alibi_bias{slopes, 3},
                               reference::causal_mask() & reference::alibi_bias({0.5, 0.25}, 3)));
  const auto f = [](double s, index_t b, index_t h, index_t i, index_t j) {
    return s + static_cast<double>((i + 2 * j + b + h) % 3);
  };
  CHECK(check_blockwise<float>(p, options, attn::score_rule_fn(f), reference::score_rule_fn(f)));
}

TEST_CASE("The options of dense attention") {
  const dense_problem p{
      .n_heads = 2, .n_kv_heads = 2, .n_q = 90, .n_kv = 90, .d_qk = 6, .d_v = 5, .deviation = 3};
  const std::vector<float> sinks{0.5f, -1.0f};
  CHECK(check_blockwise<double>(p, {.block = 40, .scale = 0.9, .softcap = 4, .sinks = sinks}));
  CHECK(check_blockwise<double>(p, {.block = 40, .precision = attn::precision_mode::strict}));
}

TEST_CASE("More queries than keys: rows of a chunk without keys are empty") {
  const dense_problem p{.n_q = 70, .n_kv = 45, .d_qk = 4, .d_v = 4};
  CHECK(check_blockwise<float>(p, {.block = 20}));
  dense_operands<float> x(p);
  attend_blockwise(x, attn::no_mask{}, {.block = 20});
  CHECK(x.out.view()(0, 0, 60, 0) == 0);
  CHECK(x.lse.view()(0, 0, 60, 0) == -std::numeric_limits<float>::infinity());
  const dense_problem more_keys{.n_q = 45, .n_kv = 70, .d_qk = 4, .d_v = 4};
  CHECK(check_blockwise<float>(more_keys, {.block = 20}));
}

TEST_CASE("NaN in one chunk stays there") {
  const dense_problem p{.n_q = 96, .n_kv = 96, .d_qk = 8, .d_v = 8};
  dense_operands<float> clean(p), bad(p);
  reference::tensor k = bad.k.values(), v = bad.v.values();
  k(0, 0, 40, 0) = std::nan("");
  v(0, 0, 41, 3) = HUGE_VAL;
  bad.k.assign(k);
  bad.v.assign(v);
  attend_blockwise(clean, attn::no_mask{}, {.block = 32});
  attend_blockwise(bad, attn::no_mask{}, {.block = 32});
  const reference::tensor a = clean.out.values(), z = bad.out.values();
  for (index_t i = 0; i < 96; ++i) {
    const bool touched = i / 32 == 1;
    CAPTURE(i);
    CHECK(std::isnan(z(0, 0, i, 3)) == touched);
    if (!touched) CHECK(a(0, 0, i, 3) == z(0, 0, i, 3));
  }
}

TEST_CASE("Threads change no bit; without lse the out is the same") {
  const dense_problem p{
      .n_batch = 2, .n_heads = 3, .n_kv_heads = 3, .n_q = 300, .n_kv = 300, .d_qk = 16, .d_v = 16};
  dense_operands<float> x(p), y(p);
  attn::context ctx(3);
  attend_blockwise(x, attn::causal_mask{}, {.block = 70});
  attend_blockwise(y, attn::causal_mask{}, {.block = 70}, ctx);
  CHECK(same_bits_out(x, y));
  const reference::tensor out = x.out.values();
  attn::blockwise_attention(x.q.view(), x.k.view(), x.v.view(), x.out.view(), attn::causal_mask{},
                            blockwise_options{.block = 70});
  CHECK(compare_bits(out, x.out.values()));
}

TEST_CASE("A block as long as the sequence: dense attention, bit for bit") {
  const dense_problem p{.n_heads = 2, .n_kv_heads = 2, .n_q = 130, .n_kv = 130};
  dense_operands<float> x(p), y(p);
  attend(x);
  attend_blockwise(y, attn::no_mask{}, {});
  CHECK(same_bits_out(x, y));
}

TEST_CASE("What is refused") {
  dense_operands<float> x({.n_q = 4, .n_kv = 4});
  const auto message = [&](index_t block) -> std::string {
    try {
      attend_blockwise(x, attn::no_mask{}, {.block = block});
    } catch (const attn::option_error& e) {
      return e.what();
    }
    return "accepted";
  };
  CHECK(message(0) == "blockwise_attention: block is 0, expected at least 1");
  CHECK(message(-5) == "blockwise_attention: block is -5, expected at least 1");
  CHECK(x.out.untouched());
  CHECK(message(1) == "accepted");
}
