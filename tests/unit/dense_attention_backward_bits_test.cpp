// SPDX-License-Identifier: MIT
//
// The same bits for any number of threads, any company in the batch, any content of scratch memory
// and of the padding around operands; and no allocation in a repeated call.
#include "support/allocation_counter.hpp"
#include "support/backward_call.hpp"
#include "support/catch.hpp"
#include "support/rule_operands.hpp"

#include <vector>

using namespace attn_test;

TEMPLATE_TEST_CASE("Any number of threads gives the same bits", "", float, double) {
  // From fewer heads than threads to more, so that heads are cut and not; keys past one item of
  // 256, queries past one walk.
  for (const dense_problem& p : std::vector<dense_problem>{
           {.n_q = 210, .n_kv = 530, .d_qk = 20, .d_v = 12},
           {.n_heads = 4, .n_kv_heads = 2, .n_q = 400, .n_kv = 260, .d_qk = 16, .d_v = 16},
           {.n_batch = 3, .n_heads = 3, .n_kv_heads = 3, .n_q = 50, .n_kv = 70},
           {.n_batch = 5, .n_q = 1, .n_kv = 300},
       }) {
    INFO(p);
    const rule_operand<bool> mask(coin_tensor({1, 1, p.n_q, p.n_kv}, 9, 0.7));
    const attn::boolean_mask some{mask.view()};
    const attn::causal_mask causal{.offset = 50};
    backward_operands<TestType> serial(p), serial_causal(p), serial_mask(p), serial_cap(p);
    attend_and_differentiate(serial);
    attend_and_differentiate(serial_causal, causal);
    attend_and_differentiate(serial_mask, some);
    attend_and_differentiate(serial_cap, causal, {.softcap = 2});
    for (const int threads : {2, 3, 4, 7}) {
      CAPTURE(threads);
      attn::context ctx(threads);
      backward_operands<TestType> y(p);
      attend_and_differentiate(y, attn::no_mask{}, {}, ctx);
      CHECK(compare_bits(y.gradients(), serial.gradients()));
      attend_and_differentiate(y, causal, {}, ctx);
      CHECK(compare_bits(y.gradients(), serial_causal.gradients()));
      attend_and_differentiate(y, some, {}, ctx);
      CHECK(compare_bits(y.gradients(), serial_mask.gradients()));
      attend_and_differentiate(y, causal, {.softcap = 2}, ctx);
      CHECK(compare_bits(y.gradients(), serial_cap.gradients()));
    }
  }
}

TEMPLATE_TEST_CASE("Heads and batches do not see one another", "", float, Eigen::bfloat16) {
  const dense_problem p{
      .n_batch = 2, .n_heads = 4, .n_kv_heads = 2, .n_q = 70, .n_kv = 150, .d_qk = 9, .d_v = 17};
  backward_operands<TestType> all(p);
  attend_and_differentiate(all);
  // Head pair 1 of batch 1 by itself: views into the same memory.
  const auto part = [](const auto& x, index_t b, index_t h, index_t heads) {
    return decltype(x.view())(&x.view()(b, h, 0, 0),
                              {1, heads, x.view().extent(2), x.view().extent(3)},
                              x.view().strides());
  };
  backward_operands<TestType> alone(
      {.n_heads = 2, .n_kv_heads = 1, .n_q = 70, .n_kv = 150, .d_qk = 9, .d_v = 17});
  attn::dense_attention_backward(
      part(std::as_const(all.x.q), 1, 2, 2), part(std::as_const(all.x.k), 1, 1, 1),
      part(std::as_const(all.x.v), 1, 1, 1), part(std::as_const(all.x.out), 1, 2, 2),
      part(std::as_const(all.x.lse), 1, 2, 2), part(std::as_const(all.d_out), 1, 2, 2),
      alone.d_q.view(), alone.d_k.view(), alone.d_v.view());
  const reference::dense_gradients a = all.gradients(), b = alone.gradients();
  for (index_t i = 0; i < 70; ++i)
    for (index_t c = 0; c < 9; ++c) CHECK(same_bits(a.d_q(1, 3, i, c), b.d_q(0, 1, i, c)));
  for (index_t j = 0; j < 150; ++j) {
    CHECK(same_bits(a.d_k(1, 1, j, 3), b.d_k(0, 0, j, 3)));
    CHECK(same_bits(a.d_v(1, 1, j, 16), b.d_v(0, 0, j, 16)));
  }
}

TEST_CASE("d_q of a row depends on that row alone") {
  // Rows 3 to 40 as a call of their own: other tiles, other lanes.
  const dense_problem p{.n_q = 70, .n_kv = 150, .d_qk = 9, .d_v = 17};
  backward_operands<float> all(p), some({.n_q = 38, .n_kv = 150, .d_qk = 9, .d_v = 17});
  const attn::causal_mask causal{.offset = 60};
  attend_and_differentiate(all, causal);
  const auto rows = [](const auto& x) {
    return decltype(x.view())(&x.view()(0, 0, 3, 0), {1, 1, 38, x.view().extent(3)},
                              x.view().strides());
  };
  attn::dense_attention_backward(rows(std::as_const(all.x.q)), std::as_const(all.x.k).view(),
                                 std::as_const(all.x.v).view(), rows(std::as_const(all.x.out)),
                                 rows(std::as_const(all.x.lse)), rows(std::as_const(all.d_out)),
                                 some.d_q.view(), some.d_k.view(), some.d_v.view(),
                                 attn::causal_mask{.offset = 63});
  const reference::tensor a = all.d_q.values(), b = some.d_q.values();
  for (index_t i = 0; i < 38; ++i)
    for (index_t c = 0; c < 9; ++c) CHECK(same_bits(a(0, 0, i + 3, c), b(0, 0, i, c)));
}

TEMPLATE_TEST_CASE("What lies around operands, outputs and in scratch does not matter", "", float,
                   Eigen::half) {
  attn::context ctx(1);
  for (const index_t d : {5, 72, 104, 136})
    for (const layout l : {layout::padded_by_one, layout::padded_wide, layout::strided_dim}) {
      const dense_problem p{.n_batch = 2,
                            .n_heads = 3,
                            .n_kv_heads = 1,
                            .n_q = 37,
                            .n_kv = 140,
                            .d_qk = d,
                            .d_v = d + 2,
                            .inputs = l,
                            .outputs = l};
      INFO(p);
      const attn::causal_mask causal{.offset = 60};
      backward_operands<TestType> with_nan(p);
      backward_operands<TestType> with_huge(p, to_double(huge_value<TestType>()));
      attend_and_differentiate(with_nan, causal, {}, ctx);
      // Scratch full of NaN and infinities: a call on such operands.
      backward_operands<TestType> dirty(p);
      dirty.x.k.assign(reference::tensor(p.k_extents(), std::nan("")));
      dirty.x.q.assign(reference::tensor(p.q_extents(), HUGE_VAL));
      attend_and_differentiate(dirty, causal, {.softcap = 1}, ctx);
      attend_and_differentiate(with_huge, causal, {}, ctx);
      CHECK(with_nan.canaries_alive());
      CHECK(with_huge.canaries_alive());
      CHECK(compare_bits(with_nan.gradients(), with_huge.gradients()));
    }
}

TEST_CASE("A repeated call does not allocate") {
  const dense_problem p{.n_heads = 2, .n_kv_heads = 1, .n_q = 210, .n_kv = 300};
  backward_operands<float> y(p);
  attn::context ctx(1);
  attend_and_differentiate(y, attn::no_mask{}, {}, ctx);
  const auto q = y.x.q.view(), k = y.x.k.view(), v = y.x.v.view(), out = y.x.out.view();
  const auto d_out = y.d_out.view(), d_q = y.d_q.view(), d_k = y.d_k.view(), d_v = y.d_v.view();
  const auto lse = y.x.lse.view();
  const allocation_counter counter;
  attn::dense_attention_backward(q, k, v, out, lse, d_out, d_q, d_k, d_v, attn::no_mask{}, {}, ctx);
  CHECK(counter.count() == 0);
}

TEMPLATE_TEST_CASE("d_out as a broadcast scalar and as a transposed view", "", float, double) {
  const dense_problem p{.n_batch = 1, .n_heads = 3, .n_kv_heads = 3, .n_q = 37, .n_kv = 50};
  backward_operands<TestType> y(p), z(p);
  y.d_out.assign(reference::tensor(p.out_extents(), 1));
  attend_and_differentiate(y);
  attend(z.x);
  const TestType one = 1;
  const attn::tensor_view<const TestType> ones(&one, p.out_extents(), {0, 0, 0, 0});
  attn::dense_attention_backward(z.x.q.view(), z.x.k.view(), z.x.v.view(), z.x.out.view(),
                                 z.x.lse.view(), ones, z.d_q.view(), z.d_k.view(), z.d_v.view());
  CHECK(compare_bits(z.gradients(), y.gradients()));
}

TEMPLATE_TEST_CASE("Equal values: no gradient of the scores; d_k adds up to nothing", "", float,
                   double) {
  const dense_problem p{.n_heads = 2, .n_kv_heads = 1, .n_q = 37, .n_kv = 150, .d_qk = 6};
  backward_operands<TestType> y(p);
  y.x.v.assign(reference::tensor(p.v_extents(), 2));
  attend_and_differentiate(y);
  const double tiny = 400 * arithmetic_epsilon<TestType>;
  CHECK(compare_within(y.d_q.values(), reference::tensor(p.q_extents()), tiny));
  CHECK(compare_within(y.d_k.values(), reference::tensor(p.k_extents()), 10 * tiny));
  // Σ_j g_ij = 0 for any values: a vector added to all keys changes no weight.
  backward_operands<TestType> z(p);
  attend_and_differentiate(z);
  const reference::tensor d_k = z.d_k.values();
  for (index_t c = 0; c < p.d_qk; ++c) {
    double sum = 0;
    for (index_t j = 0; j < p.n_kv; ++j) sum += d_k(0, 0, j, c);
    CHECK(std::abs(sum) <= 10 * tiny);
  }
}
