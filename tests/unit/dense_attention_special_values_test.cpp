// SPDX-License-Identifier: MIT
//
// NaN and infinities: where they reach, and where they must not.
#include "support/catch.hpp"
#include "support/dense_call.hpp"
#include "support/rule_operands.hpp"

#include <cmath>
#include <limits>
#include <vector>

using namespace attn_test;

#define ELEMENT_TYPES float, double, Eigen::half, Eigen::bfloat16

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

/// Row i of every head of a and b has the same bits, for all rows that `same` names; in the
/// others every element of b is NaN.
template <class T, class Same>
comparison rows_kept_or_nan(const dense_operands<T>& a, const dense_operands<T>& b, Same same) {
  reference::tensor out = a.out.values(), lse = a.lse.values();
  reference::tensor got_lse = b.lse.values();
  for (index_t n = 0; n < out.extent(0); ++n)
    for (index_t h = 0; h < out.extent(1); ++h)
      for (index_t i = 0; i < out.extent(2); ++i) {
        if (same(n, h, i)) continue;
        for (index_t c = 0; c < out.extent(3); ++c) out(n, h, i, c) = std::nan("");
        // The lse of a NaN row is no finite number; which one is open.
        if (std::isfinite(got_lse(n, h, i, 0))) return {false, "the lse of a NaN row is finite"};
        lse(n, h, i, 0) = got_lse(n, h, i, 0);
      }
  const comparison by_out = compare_bits(b.out.values(), out);
  return by_out ? compare_bits(got_lse, lse) : by_out;
}

const std::vector<dense_problem> problems = {
    {.n_batch = 2, .n_heads = 4, .n_kv_heads = 2, .n_q = 1, .n_kv = 150, .d_qk = 9, .d_v = 17},
    {.n_batch = 2, .n_heads = 4, .n_kv_heads = 2, .n_q = 70, .n_kv = 150, .d_qk = 9, .d_v = 17},
    // Wide and long enough for AMX tiles.
    {.n_batch = 2, .n_heads = 4, .n_kv_heads = 2, .n_q = 140, .n_kv = 150, .d_qk = 20, .d_v = 48},
};

}  // namespace

TEMPLATE_TEST_CASE("NaN or an infinity in a query makes its row NaN, no other", "", ELEMENT_TYPES) {
  const double poison = GENERATE(std::nan(""), infinity, -infinity);
  for (const dense_problem& p : problems)
    for (const index_t row : {index_t{0}, p.n_q / 2, p.n_q - 1}) {
      INFO(p);
      CAPTURE(poison, row);
      dense_operands<TestType> clean(p), poisoned(p);
      reference::tensor q = clean.q.values();
      q(1, 2, row, 4) = poison;
      poisoned.q.assign(q);
      attend(clean);
      attend(poisoned);
      CHECK(rows_kept_or_nan(clean, poisoned, [=](index_t b, index_t h, index_t i) {
        return !(b == 1 && h == 2 && i == row);
      }));
    }
}

TEMPLATE_TEST_CASE("NaN in a key or value reaches the rows that may attend to it, no other", "",
                   ELEMENT_TYPES) {
  const bool in_value = GENERATE(false, true);
  for (const dense_problem& p : problems)
    for (const index_t key : {0, 7, 8, 100, 127, 128, 149})
      for (const index_t offset : {0, 80}) {
        INFO(p);
        CAPTURE(in_value, key, offset);
        dense_operands<TestType> clean(p), poisoned(p);
        reference::tensor t = in_value ? clean.v.values() : clean.k.values();
        // In a key: all channels. In a value: one, and only that one must be NaN.
        for (index_t c = 0; c < t.extent(3); ++c)
          if (!in_value || c == 5) t(0, 1, key, c) = std::nan("");
        (in_value ? poisoned.v : poisoned.k).assign(t);
        const attn::causal_mask causal{.offset = offset};
        attend(clean, causal);
        attend(poisoned, causal);
        reference::tensor out = clean.out.values(), got = poisoned.out.values();
        for (index_t h = 2; h < 4; ++h)
          for (index_t i = 0; i < p.n_q; ++i)
            for (index_t c = 0; c < p.d_v; ++c)
              if (key <= i + offset && (!in_value || c == 5)) out(0, h, i, c) = std::nan("");
        CHECK(compare_bits(got, out));
        if (in_value) CHECK(compare_bits(poisoned.lse.values(), clean.lse.values()));
      }
}

TEMPLATE_TEST_CASE("A forbidden key or value may hold anything", "", ELEMENT_TYPES) {
  const double poison =
      GENERATE_COPY(std::nan(""), infinity, -infinity, to_double(huge_value<TestType>()));
  for (const dense_problem& p : problems) {
    INFO(p);
    CAPTURE(poison);
    // Each row has its own mask; a key that no row of a batch's head sees is poisoned, and so is
    // one that only some rows do not see, for these alone.
    reference::tensor allowed = coin_tensor({1, 1, p.n_q, p.n_kv}, 9, 0.7);
    const std::vector<index_t> hidden = {0, 3, 8, 64, 127, 128, 140, 149};
    for (index_t i = 0; i < p.n_q; ++i)
      for (const index_t j : hidden) allowed(0, 0, i, j) = 0;
    const rule_operand<bool> mask(allowed);
    dense_operands<TestType> clean(p), poisoned(p);
    reference::tensor k = clean.k.values(), v = clean.v.values();
    for (const index_t j : hidden)
      for (index_t c = 0; c < 9; ++c) k(1, 1, j, c) = v(1, 1, j, c) = poison;
    poisoned.k.assign(k);
    poisoned.v.assign(v);
    attend(clean, attn::boolean_mask{mask.view()});
    attend(poisoned, attn::boolean_mask{mask.view()});
    CHECK(same_bits_out(clean, poisoned));
  }
}

TEMPLATE_TEST_CASE("By selection, not by multiplying with 0: two rows of arange", "", float,
                   double) {
  const double in_key = GENERATE(1e10, std::nan(""), infinity);
  dense_operands<TestType> x({.n_q = 2, .n_kv = 2, .d_qk = 4, .d_v = 4});
  reference::tensor t({1, 1, 2, 4});
  for (index_t e = 0; e < 8; ++e)
    t.elements()[static_cast<std::size_t>(e)] = static_cast<double>(e);
  x.q.assign(t);
  reference::tensor k = t, v = t;
  k(0, 0, 1, 0) = in_key;
  for (index_t c = 0; c < 4; ++c) v(0, 0, 1, c) = std::nan("");
  x.k.assign(k);
  x.v.assign(v);
  const bool first_only[2] = {true, false};
  attend(x, attn::boolean_mask{attn::tensor_view<const bool>(first_only, 1, 1, 1, 2)});
  for (index_t i = 0; i < 2; ++i)
    for (index_t c = 0; c < 4; ++c) CHECK(x.out.view()(0, 0, i, c) == static_cast<TestType>(c));
}

TEMPLATE_TEST_CASE("Logits of ±inf", "", float, double) {
  // One row per query value: q = 1 sees the logits as they are, q = 0.5 in the tile beside it too.
  const index_t n_q = GENERATE(values<index_t>({1, 20}));
  const auto attend_to = [&](double a, double b) {
    auto x = std::make_unique<dense_operands<TestType>>(
        dense_problem{.n_q = n_q, .n_kv = 2, .d_qk = 1, .d_v = 1});
    reference::tensor k({1, 1, 2, 1}), v({1, 1, 2, 1});
    k(0, 0, 0, 0) = a, k(0, 0, 1, 0) = b;
    v(0, 0, 0, 0) = 3, v(0, 0, 1, 0) = 5;
    x->q.assign(reference::tensor({1, 1, n_q, 1}, 1));
    x->k.assign(k);
    x->v.assign(v);
    attend(*x, attn::no_mask{}, {.scale = 1.0});
    return x;
  };
  CHECK(std::isnan(attend_to(infinity, 1)->out.view()(0, 0, 0, 0)));
  CHECK(std::isnan(attend_to(1, infinity)->out.view()(0, 0, 0, 0)));
  CHECK(std::isnan(attend_to(infinity, infinity)->out.view()(0, 0, 0, 0)));
  CHECK(attend_to(-infinity, 1)->out.view()(0, 0, 0, 0) == 5);
  CHECK(attend_to(1, -infinity)->out.view()(0, 0, 0, 0) == 3);
}

TEST_CASE("A score that overflows makes its row NaN and leaves the others clean") {
  for (dense_problem p : problems) {
    p.d_qk = 64;
    INFO(p);
    dense_operands<float> clean(p), poisoned(p);
    reference::tensor q = clean.q.values(), k = clean.k.values();
    // Every score of one row is +inf or −inf in float.
    for (index_t c = 0; c < 64; ++c) {
      q(0, 0, 0, c) = 1e30;
      for (index_t j = 0; j < p.n_kv; ++j) k(0, 0, j, c) = std::abs(k(0, 0, j, c)) + 1;
    }
    for (double& x : k.elements()) x *= 1e10;
    for (index_t b = 0; b < p.n_batch; ++b)
      for (index_t h = 0; h < p.n_heads; ++h)
        for (index_t i = 0; i < p.n_q; ++i)
          for (index_t c = 0; c < 64; ++c)
            if (!(b == 0 && h == 0 && i == 0)) q(b, h, i, c) *= 1e-10;
    poisoned.q.assign(q);
    poisoned.k.assign(k);
    for (index_t c = 0; c < 64; ++c) q(0, 0, 0, c) = 1e-10;
    clean.q.assign(q);
    clean.k.assign(k);
    attend(clean);
    attend(poisoned);
    CHECK(rows_kept_or_nan(clean, poisoned, [](index_t b, index_t h, index_t i) {
      return !(b == 0 && h == 0 && i == 0);
    }));
  }
}

TEMPLATE_TEST_CASE("Results below the smallest normal number may be 0, nothing worse", "", float,
                   double) {
  constexpr double least = std::numeric_limits<TestType>::min();
  dense_operands<TestType> x({.n_q = GENERATE(1, 20), .n_kv = 50});
  SECTION("subnormal values") {
    reference::tensor v = x.v.values();
    for (double& e : v.elements()) e *= least / 8;
    x.v.assign(v);
  }
  SECTION("subnormal queries: all scores 0") {
    reference::tensor q = x.q.values();
    for (double& e : q.elements()) e *= least / 8;
    x.q.assign(q);
  }
  attend(x);
  const auto expected = x.expected();
  CHECK(compare_within(x.out.values(), expected.out,
                       least + 1e-6 * expected.value_bound(0, 0, 0, 0)));
  CHECK(compare_within(x.lse.values(), expected.lse, 1e-5));
}
