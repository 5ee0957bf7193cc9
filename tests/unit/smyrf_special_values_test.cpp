// SPDX-License-Identifier: MIT
//
// NaN, infinities and huge scores in SMYRF attention.
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

TEMPLATE_TEST_CASE("smyrf_attention: NaN stays with the rows that meet it", "", float) {
  const index_t n = 96;
  const dense_problem p{.n_q = n, .n_kv = n, .d_qk = 8};
  for (const smyrf_options& kind : smyrf_kinds) {
    smyrf_options options = kind;
    options.clusters = 6;
    dense_operands<TestType> clean(p);
    const smyrf_clusters c(clean.q.view(), clean.k.view(), options);  // of the clean tensors
    attn::smyrf_attention(clean.q.view(), clean.k.view(), clean.v.view(), clean.out.view(),
                          clean.lse.view(), c);
    const reference::tensor m = meetings_of(c, p), out = clean.out.values();
    for (const char* where : {"q", "k", "v"}) {
      dense_operands<TestType> x(p);
      reference::tensor poisoned =
          *where == 'q' ? x.q.values() : (*where == 'k' ? x.k.values() : x.v.values());
      poisoned(0, 0, 40, 3) = std::nan("");
      (*where == 'q' ? x.q : (*where == 'k' ? x.k : x.v)).assign(poisoned);
      attn::smyrf_attention(x.q.view(), x.k.view(), x.v.view(), x.out.view(), x.lse.view(), c);
      const reference::tensor got = x.out.values();
      for (index_t i = 0; i < n; ++i) {
        const bool hit = *where == 'q' ? i == 40 : m(0, 0, i, 40) > 0;
        for (index_t e = 0; e < 8; ++e) {
          if (!hit)
            CHECK(got(0, 0, i, e) == out(0, 0, i, e));
          else if (*where != 'v' || e == 3)
            CHECK(std::isnan(got(0, 0, i, e)));
        }
      }
      // Forbidden, it reaches nobody.
      if (*where == 'q') continue;
      const auto not_40 = [](auto s, index_t, index_t, index_t, index_t j) {
        return j == 40 ? -std::numeric_limits<decltype(s)>::infinity() : s;
      };
      attn::smyrf_attention(x.q.view(), x.k.view(), x.v.view(), x.out.view(), x.lse.view(), c,
                            attn::score_rule_fn(not_40));
      const reference::tensor without = x.out.values();
      for (const double e : without.elements()) CHECK(std::isfinite(e));
      attn::smyrf_attention(x.q.view(), x.k.view(), x.v.view(), x.out.view(), x.lse.view(), c,
                            attn::window_mask{.right = 39, .offset = -1000});
      const reference::tensor nothing = x.out.values();
      for (const double e : nothing.elements()) CHECK(e == 0);
      const attn::causal_mask causal{};
      attn::smyrf_attention(x.q.view(), x.k.view(), x.v.view(), x.out.view(), x.lse.view(), c,
                            causal);
      const reference::tensor before = x.out.values();
      for (index_t i = 0; i < 40; ++i)
        for (index_t e = 0; e < 8; ++e) CHECK(std::isfinite(before(0, 0, i, e)));
    }
  }
}

TEST_CASE("smyrf_attention: huge scores, infinite scores") {
  dense_operands<float> x({.n_q = 50, .n_kv = 64, .d_qk = 8, .deviation = 1e4});
  for (smyrf_options options : smyrf_kinds) {
    options.clusters = 4;
    CHECK(check_smyrf(x, options));
  }
  // Each round has its own maximum, hundreds apart: exact all the same.
  dense_operands<float> y({.n_q = 40, .n_kv = 64, .d_qk = 1, .deviation = 100});
  CHECK(check_smyrf(y, {.clusters = 8, .rounds = 4}));
  const auto infinite = [](auto s, index_t, index_t, index_t i, index_t j) {
    return i == 3 && j < 32 ? std::numeric_limits<decltype(s)>::infinity() : s;
  };
  attn::smyrf_attention(y.q.view(), y.k.view(), y.v.view(), y.out.view(), y.lse.view(),
                        smyrf_options{.clusters = 1}, attn::score_rule_fn(infinite));
  CHECK(std::isnan(y.out.values()(0, 0, 3, 0)));
  CHECK(std::isfinite(y.out.values()(0, 0, 4, 0)));
}

TEST_CASE("smyrf_attention: huge values") {
  // Values near the largest float, scores that grow along the keys: weights against an early
  // maximum would be far above 1.
  const index_t n = 200;
  dense_operands<float> x({.n_q = n, .n_kv = n, .d_qk = 1, .d_v = 5});
  reference::tensor q({1, 1, n, 1}, 1), k({1, 1, n, 1}), v({1, 1, n, 5});
  for (index_t j = 0; j < n; ++j) {
    k(0, 0, j, 0) = 0.09 * static_cast<double>(j);
    for (index_t c = 0; c < 5; ++c) v(0, 0, j, c) = (j + c) % 3 == 0 ? -1e36 : 1e36;
  }
  x.q.assign(q), x.k.assign(k), x.v.assign(v);
  for (smyrf_options options : smyrf_kinds) {
    options.clusters = 2;
    CHECK(check_smyrf(x, options));
    options.clusters = 1;
    CHECK(check_smyrf(x, options, attn::causal_mask{}, reference::causal_mask()));
  }
}
