// SPDX-License-Identifier: MIT
//
// A program built without AMX: every precision is the FMA kernel.
#define ATTN_NO_AMX

#include "support/catch.hpp"
#include "support/random.hpp"

#include <attn/dense_attention.hpp>

#include <vector>

#if defined(ATTN_HAS_AMX)
#error "ATTN_NO_AMX leaves AMX out"
#endif

using namespace attn_test;

TEST_CASE("Without AMX the precisions have the bits of strict") {
  constexpr attn::index_t n = 100, d = 64;
  std::vector<float> q, k, v;
  random_source random(1);
  for (auto* x : {&q, &k, &v})
    for (attn::index_t e = 0; e < n * d; ++e) x->push_back(static_cast<float>(random.normal()));
  const auto attend = [&](attn::precision_mode mode) {
    std::vector<float> out(n * d);
    attn::dense_attention(attn::bhld(q.data(), 1, 1, n, d), attn::bhld(k.data(), 1, 1, n, d),
                          attn::bhld(v.data(), 1, 1, n, d), attn::bhld(out.data(), 1, 1, n, d),
                          attn::no_mask{}, attn::dense_options{.precision = mode});
    return out;
  };
  const std::vector<float> strict = attend(attn::precision_mode::strict);
  CHECK(strict == attend(attn::precision_mode::automatic));
  CHECK(strict == attend(attn::precision_mode::bf16x3));
  CHECK(strict == attend(attn::precision_mode::bf16));
}
