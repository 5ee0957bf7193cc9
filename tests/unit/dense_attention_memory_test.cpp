// SPDX-License-Identifier: MIT
//
// Allocations, scratch, the floating-point mode, and strides past 2^31 elements.
#include "support/allocation_counter.hpp"
#include "support/catch.hpp"
#include "support/dense_call.hpp"
#include "support/float_environment.hpp"
#include "support/guarded_memory.hpp"
#include "support/rule_operands.hpp"
#include "support/watchdog.hpp"

#include <attn/context.hpp>

#include <cmath>
#include <vector>

using namespace attn_test;

namespace {

/// Calls whose kinds of scratch differ.
const std::vector<dense_problem> problems = in_both_precisions({
    {.n_heads = 8, .n_kv_heads = 2, .n_q = 1, .n_kv = 3000, .d_qk = 64, .d_v = 64},
    {.n_heads = 2, .n_kv_heads = 2, .n_q = 100, .n_kv = 200, .d_qk = 40, .d_v = 64},
    {.n_heads = 2, .n_kv_heads = 2, .n_q = 100, .n_kv = 200, .inputs = layout::heads_interleaved},
    {.n_heads = 2,
     .n_kv_heads = 2,
     .n_q = 9,
     .n_kv = 200,
     .inputs = layout::column_major,
     .outputs = layout::column_major},
});

}  // namespace

TEMPLATE_TEST_CASE("A repeated call allocates nothing", "", float, double, Eigen::half) {
  const watchdog guard("repeated calls", std::chrono::seconds(120));
  const int n_threads = GENERATE(1, 3);
  const std::vector<index_t> lengths = {150};
  const rule_operand<bool> mask(coin_tensor({1, 1, 1, 200}, 3));
  for (const dense_problem& p : problems) {
    INFO(p);
    CAPTURE(n_threads);
    attn::context ctx(n_threads);
    dense_operands<TestType> x(p);
    const auto calls = [&] {
      attend(x, attn::no_mask{}, {}, ctx);
      attend(x, attn::causal_mask{.offset = 50} & attn::key_lengths{lengths}, {}, ctx);
      if (p.n_kv == 200) attend(x, attn::boolean_mask{mask.view()}, {}, ctx);
    };
    calls();
    const std::size_t held = ctx.scratch_bytes();
    const allocation_counter allocations;
    for (int repeat = 0; repeat < 3; ++repeat) calls();
    const std::size_t counted = allocations.count();
    CHECK(counted == 0);
    CHECK(ctx.scratch_bytes() == held);
  }
}

TEST_CASE("The counter counts") {
  const allocation_counter allocations;
  const std::vector<float> vector(1000);
  CHECK(allocations.count() >= 1);
}

TEST_CASE("Scratch does not grow with the number of keys or queries, but for one packed head") {
  constexpr index_t d = 64;
  const auto scratch = [](index_t n_q, index_t n_kv, layout l, attn::precision_mode precision) {
    attn::context ctx;
    dense_operands<float> x({.n_heads = 2,
                             .n_kv_heads = 2,
                             .n_q = n_q,
                             .n_kv = n_kv,
                             .d_qk = d,
                             .d_v = d,
                             .inputs = l,
                             .precision = precision});
    attend(x, attn::no_mask{}, {}, ctx);
    return ctx.scratch_bytes();
  };
  constexpr auto strict = attn::precision_mode::strict, automatic = attn::precision_mode::automatic;
  const std::size_t tile = scratch(1000, 300, layout::contiguous, strict);
  CHECK(scratch(1000, 900, layout::contiguous, strict) == tile);
  CHECK(scratch(2000, 300, layout::contiguous, strict) == tile);
  // K and V of one head as floats, where rows are strided.
  CHECK(scratch(1000, 900, layout::heads_interleaved, strict) <=
        tile + 2 * 900 * d * sizeof(float) + 4096);
  // On matrix units K and V of one head in three bfloat16 parts.
  const auto growth = scratch(1000, 900, layout::contiguous, automatic) -
                      scratch(1000, 300, layout::contiguous, automatic);
  CHECK(growth <= 2 * 700 * d * 3 * 2 + 64 * 1024);
}

TEMPLATE_TEST_CASE("The caller's floating-point mode is as before, on every way out", "", float,
                   double) {
  const watchdog guard("floating-point mode", std::chrono::seconds(60));
  const auto check = [](std::uint64_t before) {
    for (const dense_problem& p : problems) {
      dense_operands<TestType> x(p);
      attend(x);
      CHECK(float_control() == before);
      attend(x, attn::causal_mask{}, {.softcap = 3});
      CHECK(float_control() == before);
      attend(x, attn::score_rule_fn([](auto s, index_t, index_t, index_t, index_t) { return s; }));
      CHECK(float_control() == before);
      CHECK_THROWS(attend(x, attn::no_mask{}, {.softcap = -1}));
      CHECK(float_control() == before);
      attn::context ctx(2);
      attend(x, attn::no_mask{}, {}, ctx);
      CHECK(float_control() == before);
    }
  };
  SECTION("subnormals on") { check(float_control()); }
  SECTION("subnormals flushed by the caller") {
    const flush_subnormals mode;
    check(float_control());
  }
}

TEST_CASE("Results do not depend on the caller's floating-point mode") {
  for (const dense_problem& p : problems) {
    INFO(p);
    dense_operands<float> plain(p), flushed(p);
    attend(plain);
    {
      const flush_subnormals mode;
      attend(flushed);
    }
    CHECK(same_bits_out(plain, flushed));
  }
}

TEST_CASE("33000 keys: the sum of the weights is exact enough") {
  const index_t n = 33000;
  dense_operands<float> x({.n_q = GENERATE(1, 3), .n_kv = n, .d_qk = 1, .d_v = 1});
  x.k.assign(reference::tensor({1, 1, n, 1}, 0));
  x.v.assign(reference::tensor({1, 1, n, 1}, 1));
  attend(x);
  CHECK(std::abs(x.out.view()(0, 0, 0, 0) - 1) < 2e-6f);
  CHECK(std::abs(x.lse.view()(0, 0, 0, 0) - std::log(33000.0f)) < 1e-5f);
}

namespace {

/// The tensor in memory where the given rank's stride is 2^30 floats: 4 GiB apart.
struct far_tensor {
  sparse_memory memory;
  attn::tensor_view<float> view;

  far_tensor(const reference::tensor& values, int rank)
      : memory(static_cast<std::size_t>(values.extent(static_cast<std::size_t>(rank))) << 32) {
    std::array<index_t, 4> strides = {100000, 10000, 100, 1};
    strides[static_cast<std::size_t>(rank)] = index_t{1} << 30;
    view = {static_cast<float*>(memory.data()), values.extents(), strides};
    if (memory.data() == nullptr) return;
    for (index_t b = 0; b < values.extent(0); ++b)
      for (index_t h = 0; h < values.extent(1); ++h)
        for (index_t i = 0; i < values.extent(2); ++i)
          for (index_t c = 0; c < values.extent(3); ++c)
            view(b, h, i, c) = static_cast<float>(values(b, h, i, c));
  }
  reference::tensor values() const {
    reference::tensor t(view.extents());
    for (index_t b = 0; b < t.extent(0); ++b)
      for (index_t h = 0; h < t.extent(1); ++h)
        for (index_t i = 0; i < t.extent(2); ++i)
          for (index_t c = 0; c < t.extent(3); ++c)
            t(b, h, i, c) = static_cast<double>(view(b, h, i, c));
    return t;
  }
};

}  // namespace

TEST_CASE("Strides of 4 GiB along every rank") {
  const int rank = GENERATE(0, 1, 2, 3);
  CAPTURE(rank);
  const dense_problem p{
      .n_batch = 3, .n_heads = 3, .n_kv_heads = 3, .n_q = 3, .n_kv = 3, .d_qk = 3, .d_v = 3};
  dense_operands<float> near(p);
  attend(near);
  const far_tensor q(near.q.values(), rank), k(near.k.values(), rank), v(near.v.values(), rank),
      out(reference::tensor(p.out_extents()), rank);
  for (const far_tensor* t : {&q, &k, &v, &out})
    if (t->memory.data() == nullptr) {
      WARN("the system refuses 12 GiB of address space");
      return;
    }
  attn::dense_attention(q.view, k.view, v.view, out.view);
  CHECK(compare_bits(out.values(), near.out.values()));
}
