// SPDX-License-Identifier: MIT
//
// precision_mode::strict: one order of summation for every number of queries, so that a prompt in
// chunks, or token by token, has the bits of one call.
#include "support/catch.hpp"
#include "support/dense_call.hpp"

#include <attn/context.hpp>

#include <vector>

using namespace attn_test;

namespace {

/// Queries [begin, end) of a prompt over the keys up to `end`, as in a call of its own.
template <class T>
dense_operands<T> chunk_of(const dense_operands<T>& whole, index_t begin, index_t end,
                           index_t n_kv) {
  dense_problem p = whole.problem;
  p.n_q = end - begin;
  p.n_kv = n_kv;
  dense_operands<T> chunk(p);
  const auto rows = [&](const reference::tensor& from, index_t first, auto& to) {
    reference::tensor t = to.values();
    for (index_t b = 0; b < t.extent(0); ++b)
      for (index_t h = 0; h < t.extent(1); ++h)
        for (index_t i = 0; i < t.extent(2); ++i)
          for (index_t c = 0; c < t.extent(3); ++c) t(b, h, i, c) = from(b, h, first + i, c);
    to.assign(t);
  };
  rows(whole.q.values(), begin, chunk.q);
  rows(whole.k.values(), 0, chunk.k);
  rows(whole.v.values(), 0, chunk.v);
  return chunk;
}

template <class T>
index_t different_rows(const dense_operands<T>& whole, index_t begin,
                       const dense_operands<T>& chunk) {
  index_t wrong = 0;
  const auto x = whole.out.view(), y = chunk.out.view();
  for (index_t b = 0; b < y.extent(0); ++b)
    for (index_t h = 0; h < y.extent(1); ++h)
      for (index_t i = 0; i < y.extent(2); ++i) {
        bool same = same_bits(whole.lse.view()(b, h, begin + i, 0), chunk.lse.view()(b, h, i, 0));
        for (index_t c = 0; c < y.extent(3); ++c)
          same = same && same_bits(x(b, h, begin + i, c), y(b, h, i, c));
        wrong += !same;
      }
  return wrong;
}

const attn::dense_options strict{.precision = attn::precision_mode::strict};

}  // namespace

TEMPLATE_TEST_CASE("A causal prompt in chunks of any size has the bits of one call", "", float,
                   double, Eigen::bfloat16) {
  const index_t n = 150;
  for (const double deviation : {1.0, 30.0}) {
    const dense_problem p{.n_batch = 2,
                          .n_heads = 4,
                          .n_kv_heads = 2,
                          .n_q = n,
                          .n_kv = n,
                          .d_qk = 20,
                          .d_v = 12,
                          .deviation = deviation};
    dense_operands<TestType> whole(p);
    attend(whole, attn::causal_mask{}, strict);
    for (const index_t size : {1, 2, 7, 16, 48, 64, 149}) {
      CAPTURE(deviation, size);
      index_t wrong = 0;
      for (index_t begin = 0; begin < n; begin += size) {
        const index_t end = std::min(n, begin + size);
        dense_operands<TestType> chunk = chunk_of(whole, begin, end, end);
        attend(chunk, attn::causal_mask{.offset = begin}, strict);
        wrong += different_rows(whole, begin, chunk);
      }
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("Rows one by one over the same keys, long enough to be split over threads") {
  const dense_problem p{
      .n_heads = 2, .n_kv_heads = 1, .n_q = 20, .n_kv = 3000, .d_qk = 64, .d_v = 64};
  dense_operands<float> whole(p);
  attend(whole, attn::no_mask{}, strict);
  attn::context ctx(GENERATE(1, 3));
  index_t wrong = 0;
  for (index_t i = 0; i < p.n_q; ++i) {
    dense_operands<float> row = chunk_of(whole, i, i + 1, p.n_kv);
    attend(row, attn::no_mask{}, strict, ctx);
    wrong += different_rows(whole, i, row);
  }
  CHECK(wrong == 0);
}
