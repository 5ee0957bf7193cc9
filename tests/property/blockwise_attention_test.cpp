// SPDX-License-Identifier: MIT
//
// Laws of blockwise attention.
#include "support/catch.hpp"
#include "support/dense_call.hpp"
#include "support/random.hpp"

#include <attn/blockwise_attention.hpp>

#include <algorithm>
#include <utility>

using namespace attn_test;
using attn::blockwise_options;
using attn::tensor_view;

namespace {

tensor_view<const float> chunk(const tensor_view<const float>& x, index_t first, index_t n) {
  return {&x(0, 0, first, 0), {x.extent(0), x.extent(1), n, x.extent(3)}, x.strides()};
}

}  // namespace

TEST_CASE("A chunk is dense attention to itself, whatever the other chunks hold") {
  random_source random(1);
  for (int round = 0; round < 60; ++round) {
    const index_t n = random.integer(1, 200), block = random.integer(1, 130);
    const dense_problem p{.n_batch = random.integer(1, 2),
                          .n_heads = 2,
                          .n_kv_heads = random.integer(1, 2),
                          .n_q = n,
                          .n_kv = n,
                          .d_qk = random.integer(1, 20),
                          .d_v = random.integer(1, 20),
                          .seed = static_cast<std::uint64_t>(round + 1)};
    INFO(p);
    CAPTURE(block);
    dense_operands<float> whole(p);
    attn::blockwise_attention(std::as_const(whole.q).view(), std::as_const(whole.k).view(),
                              std::as_const(whole.v).view(), whole.out.view(), whole.lse.view(),
                              attn::no_mask{}, blockwise_options{.block = block});
    const index_t first = random.integer(0, (n - 1) / block) * block;
    const index_t length = std::min(block, n - first);
    dense_operands<float> one(
        {.n_batch = p.n_batch, .n_heads = 2, .n_q = length, .n_kv = length, .d_v = p.d_v});
    attn::dense_attention(chunk(std::as_const(whole.q).view(), first, length),
                          chunk(std::as_const(whole.k).view(), first, length),
                          chunk(std::as_const(whole.v).view(), first, length), one.out.view(),
                          one.lse.view());
    // Another tile, another kernel for few rows: not the same bits, but the same numbers.
    for (index_t b = 0; b < p.n_batch; ++b)
      for (index_t h = 0; h < 2; ++h)
        for (index_t i = 0; i < length; ++i) {
          REQUIRE(std::abs(whole.lse.view()(b, h, first + i, 0) - one.lse.view()(b, h, i, 0)) <
                  1e-4f);
          for (index_t c = 0; c < p.d_v; ++c)
            REQUIRE(std::abs(whole.out.view()(b, h, first + i, c) - one.out.view()(b, h, i, c)) <
                    1e-4f);
        }
  }
}

TEST_CASE("What is appended in whole chunks changes nothing before it") {
  const index_t block = GENERATE(16, 50);
  const dense_problem shorter{.n_heads = 2, .n_kv_heads = 2, .n_q = 4 * block, .n_kv = 4 * block};
  dense_problem longer = shorter;
  longer.n_q = longer.n_kv = 7 * block;
  dense_operands<float> a(longer), z(longer);
  const blockwise_options options{.block = block, .precision = attn::precision_mode::strict};
  const auto q = std::as_const(a.q).view(), k = std::as_const(a.k).view(),
             v = std::as_const(a.v).view();
  attn::blockwise_attention(q, k, v, a.out.view(), a.lse.view(), attn::no_mask{}, options);
  const tensor_view<float> out(z.out.view().data_handle(), {1, 2, 4 * block, 8},
                               z.out.view().strides());
  attn::blockwise_attention(chunk(q, 0, 4 * block), chunk(k, 0, 4 * block), chunk(v, 0, 4 * block),
                            out, attn::no_mask{}, options);
  index_t wrong = 0;
  for (index_t h = 0; h < 2; ++h)
    for (index_t i = 0; i < 4 * block; ++i)
      for (index_t c = 0; c < 8; ++c) wrong += out(0, h, i, c) != a.out.view()(0, h, i, c);
  CHECK(wrong == 0);
}
