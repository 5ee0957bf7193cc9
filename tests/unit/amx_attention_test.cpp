// SPDX-License-Identifier: MIT
//
// Dense attention at sizes that go to AMX tiles where there are any: the same meaning as elsewhere.
#include "support/catch.hpp"
#include "support/dense_call.hpp"

#include <attn/simd/amx.hpp>

#include <cmath>
#include <limits>
#include <vector>

using namespace attn_test;
using attn::precision_mode;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

/// What the rounding of the operands adds to the tolerance of float: operands of 8 or 16 bits
/// instead of 24, and as their errors average out, a factor of 4 instead of 16.
tolerance allowed(precision_mode mode) {
  switch (mode) {
  case precision_mode::bf16x3:
    return {.constant = 4 * 0x1p-17 / arithmetic_epsilon<float>};
  case precision_mode::bf16:
    return {.constant = 4 * 0x1p-9 / arithmetic_epsilon<float>};
  default:
    return {};
  }
}

reference::tensor row(const reference::tensor& t, index_t h, index_t i) {
  reference::tensor x({1, 1, 1, t.extent(3)});
  for (index_t c = 0; c < t.extent(3); ++c) x(0, 0, 0, c) = t(0, h, i, c);
  return x;
}

/// The rows of head h that `kept` names have the same bits in a and b.
template <class Kept>
comparison same_rows(const dense_operands<float>& a, const dense_operands<float>& b, index_t h,
                     Kept kept) {
  const reference::tensor out_a = a.out.values(), out_b = b.out.values();
  const reference::tensor lse_a = a.lse.values(), lse_b = b.lse.values();
  for (index_t i = 0; i < a.problem.n_q; ++i) {
    if (!kept(i)) continue;
    const comparison out = compare_bits(row(out_a, h, i), row(out_b, h, i));
    if (!out) return out;
    const comparison lse = compare_bits(row(lse_a, h, i), row(lse_b, h, i));
    if (!lse) return lse;
  }
  return {};
}

}  // namespace

TEST_CASE("Sizes around the edges of tiles, in every precision") {
  const auto mode = GENERATE(precision_mode::automatic, precision_mode::bf16x3,
                             precision_mode::bf16, precision_mode::strict);
  for (const dense_problem& p :
       std::vector<dense_problem>{{.n_q = 32, .n_kv = 32, .d_qk = 16, .d_v = 16},
                                  {.n_q = 257, .n_kv = 223, .d_qk = 31, .d_v = 33},
                                  {.n_q = 128, .n_kv = 128, .d_qk = 32, .d_v = 64},
                                  {.n_q = 129, .n_kv = 161, .d_qk = 33, .d_v = 32},
                                  {.n_q = 95, .n_kv = 513, .d_qk = 64, .d_v = 64},
                                  {.n_q = 96, .n_kv = 300, .d_qk = 72, .d_v = 80},
                                  {.n_q = 255, .n_kv = 129, .d_qk = 96, .d_v = 17},
                                  {.n_q = 256, .n_kv = 257, .d_qk = 128, .d_v = 128},
                                  {.n_q = 290, .n_kv = 290, .d_qk = 160, .d_v = 200}}) {
    INFO(p);
    CAPTURE(static_cast<int>(mode));
    CHECK(check_dense<float>(p, attn::no_mask{}, {}, {.precision = mode}, allowed(mode)));
  }
}

TEST_CASE("Every layout, read and written on tiles") {
  for (const layout l : plain_layouts) {
    const dense_problem p{.n_batch = 2,
                          .n_heads = 4,
                          .n_kv_heads = 2,
                          .n_q = 130,
                          .n_kv = 150,
                          .d_qk = 40,
                          .d_v = 48,
                          .inputs = l,
                          .outputs = l};
    INFO(p);
    CHECK(check_dense<float>(p));
  }
}

TEST_CASE("Options on tiles: scale, softcap, sinks") {
  const std::vector<float> sinks = {0.5f, -3, 20, -std::numeric_limits<float>::infinity()};
  const dense_problem p{
      .n_heads = 4, .n_kv_heads = 1, .n_q = 130, .n_kv = 150, .d_qk = 40, .d_v = 48};
  CHECK(check_dense<float>(p, attn::no_mask{}, {}, {.sinks = sinks}));
  CHECK(check_dense<float>(p, attn::no_mask{}, {}, {.softcap = 2}));
  CHECK(check_dense<float>(p, attn::no_mask{}, {}, {.scale = -0.3, .softcap = 30, .sinks = sinks}));
  CHECK(check_dense<float>(p, attn::no_mask{}, {}, {.scale = 0.0}));
}

TEST_CASE("Scores that outgrow the first maximum, for some rows or all") {
  const auto mode =
      GENERATE(precision_mode::automatic, precision_mode::bf16x3, precision_mode::bf16);
  const bool all_rows = GENERATE(false, true);
  dense_operands<float> x({.n_q = 84, .n_kv = 700, .d_qk = 32, .d_v = 48});
  reference::tensor q = x.q.values(), k = x.k.values();
  for (index_t j = 0; j < 700; ++j) k(0, 0, j, 0) = static_cast<double>(j) / 8;
  for (index_t i = 0; i < 84; ++i) q(0, 0, i, 0) = all_rows || i % 7 == 0 ? 8 : 0.125;
  x.q.assign(q), x.k.assign(k);
  CHECK(check_dense(x, attn::no_mask{}, {}, {.precision = mode}, allowed(mode)));

  // The others don't notice.
  dense_operands<float> calm(x.problem);
  for (index_t i = 0; i < 84; ++i) q(0, 0, i, 0) = 0.125;
  calm.q.assign(q), calm.k.assign(k);
  attend(calm, attn::no_mask{}, {.precision = mode});
  CHECK(same_rows(x, calm, 0, [&](index_t i) { return !all_rows && i % 7 != 0; }));
}

TEST_CASE("A row has the same bits at any place, beside any others, on any number of threads") {
  const auto mode =
      GENERATE(precision_mode::automatic, precision_mode::bf16x3, precision_mode::bf16);
  const index_t shift = GENERATE(values<index_t>({1, 16, 45}));
  const dense_problem p{
      .n_batch = 2, .n_heads = 2, .n_kv_heads = 1, .n_q = 300, .n_kv = 333, .d_qk = 64, .d_v = 96};
  dense_operands<float> straight(p), moved(p);
  const reference::tensor q = straight.q.values();
  reference::tensor r = q;
  for (index_t b = 0; b < 2; ++b)
    for (index_t h = 0; h < 2; ++h)
      for (index_t i = 0; i < 300; ++i)
        for (index_t c = 0; c < 64; ++c) r(b, h, (i + shift) % 300, c) = q(b, h, i, c);
  moved.q.assign(r);
  attend(straight, attn::no_mask{}, {.precision = mode});
  attn::context threads(3);
  attend(moved, attn::no_mask{}, {.precision = mode}, threads);
  const auto there = moved.out.values(), here = straight.out.values();
  index_t wrong = 0;
  for (index_t i = 0; i < 300; ++i)
    wrong += !compare_bits(row(there, 1, (i + shift) % 300), row(here, 1, i));
  CHECK(wrong == 0);
}

TEST_CASE("Queries, keys and values that no three parts of bfloat16 can hold") {
  const double extreme = GENERATE(3.35e38, -3.35e38, 1e-33, infinity, std::nan(""));
  CAPTURE(extreme);
  const dense_problem p{
      .n_heads = 2, .n_kv_heads = 2, .n_q = 130, .n_kv = 150, .d_qk = 32, .d_v = 40};
  dense_operands<float> clean(p);
  attend(clean);
  SECTION("a query") {
    dense_operands<float> x(p);
    reference::tensor q = x.q.values();
    q(0, 1, 40, 3) = extreme;
    x.q.assign(q);
    attend(x);
    CHECK(same_rows(clean, x, 0, [](index_t) { return true; }));
    CHECK(same_rows(clean, x, 1, [](index_t i) { return i != 40; }));
    if (std::abs(extreme) < 1) CHECK(x.matches(x.expected()));
    if (!std::isfinite(extreme)) CHECK(std::isnan(x.out.view()(0, 1, 40, 0)));
  }
  SECTION("a key or value in sight of some rows") {
    const attn::causal_mask causal{.offset = 60};
    dense_operands<float> x(p);
    const bool in_value = GENERATE(false, true);
    auto& operand = in_value ? x.v : x.k;
    reference::tensor t = operand.values();
    t(0, 1, 100, 3) = extreme;
    operand.assign(t);
    attend(clean, causal);
    attend(x, causal);
    CHECK(same_rows(clean, x, 0, [](index_t) { return true; }));
    CHECK(same_rows(clean, x, 1, [](index_t i) { return i < 40; }));
    if (std::abs(extreme) < 1) CHECK(x.matches(x.expected(reference::causal_mask(60))));
    if (in_value && !std::isfinite(extreme)) {
      // One channel of the value: that one, and no other.
      for (index_t i = 40; i < 130; ++i) {
        for (index_t c = 0; c < 40; ++c) {
          const float got = x.out.view()(0, 1, i, c);
          const bool good = c == 3 ? !std::isfinite(got) : got == clean.out.view()(0, 1, i, c);
          CHECK(good);
        }
      }
      CHECK(compare_bits(clean.lse.values(), x.lse.values()));
    }
  }
  SECTION("all values") {
    if (std::abs(extreme) < 1) {
      dense_operands<float> x(p);
      reference::tensor v = x.v.values();
      for (double& e : v.elements()) e *= extreme;
      x.v.assign(v);
      CHECK(check_dense(x));
    }
  }
}

TEST_CASE("Values that overflow with weights above 1, but not on average") {
  const auto mode =
      GENERATE(precision_mode::automatic, precision_mode::bf16x3, precision_mode::bf16);
  const double huge = GENERATE(1e33, 3e38);
  dense_problem p{.n_q = 130, .n_kv = 260, .d_qk = 24, .d_v = 40, .deviation = 5};
  p.precision = mode;
  INFO(p);
  CAPTURE(huge);
  dense_operands<float> x(p);
  reference::tensor v = x.v.values();
  v(0, 0, 100, 3) = huge;
  v(0, 0, 200, 17) = -huge;
  if (GENERATE(false, true)) v(0, 0, 50, 0) = infinity;
  x.v.assign(v);
  attend(x);
  const reference::tensor out = x.out.values(), e = x.expected().out;
  for (index_t i = 0; i < p.n_q; ++i) {
    for (index_t c = 1; c < p.d_v; ++c) {
      const double error = std::abs(out(0, 0, i, c) - e(0, 0, i, c));
      CHECK(error <= 0.3 * std::abs(e(0, 0, i, c)) + 0.5);
    }
  }
}

TEST_CASE("bfloat16 operands: as exact as float, or with weights of 8 bits") {
  const dense_problem p{
      .n_heads = 2, .n_kv_heads = 1, .n_q = 100, .n_kv = 300, .d_qk = 64, .d_v = 64};
  CHECK(check_dense<Eigen::bfloat16>(p));
  CHECK(check_dense<Eigen::bfloat16>(p, attn::no_mask{}, {}, {.precision = precision_mode::bf16},
                                     allowed(precision_mode::bf16)));
}

#if defined(ATTN_HAS_AMX)
TEST_CASE("Tiles are what the precisions choose") {
  if (!attn::simd::amx::available()) return;
  const dense_problem p{.n_q = 100, .n_kv = 300, .d_qk = 64, .d_v = 64};
  dense_operands<float> strict(p), rounded(p);
  attend(strict, attn::no_mask{}, {.precision = precision_mode::strict});
  attend(rounded, attn::no_mask{}, {.precision = precision_mode::bf16});
  CHECK(!same_bits_out(strict, rounded));
}
#endif
