// SPDX-License-Identifier: MIT
//
// Key lengths and prefixes; what lies past a length does not exist.
#include "support/catch.hpp"
#include "support/dense_call.hpp"
#include "support/guarded_memory.hpp"

#include <vector>

using namespace attn_test;

#define ELEMENT_TYPES float, double, Eigen::half, Eigen::bfloat16

namespace {

const std::vector<std::vector<index_t>> all_lengths = {
    {0, 140}, {1, 0}, {3, 7}, {8, 16}, {9, 17}, {127, 128}, {129, 139}, {140, 140}};

/// Fills the rows of k and v past their batch's length.
template <class T>
void poison_past(dense_operands<T>& x, const std::vector<index_t>& lengths, double poison) {
  reference::tensor k = x.k.values(), v = x.v.values();
  for (index_t b = 0; b < k.extent(0); ++b)
    for (index_t h = 0; h < k.extent(1); ++h)
      for (index_t j = lengths[static_cast<std::size_t>(b)]; j < k.extent(2); ++j) {
        for (index_t c = 0; c < k.extent(3); ++c) k(b, h, j, c) = poison;
        for (index_t c = 0; c < v.extent(3); ++c) v(b, h, j, c) = poison;
      }
  x.k.assign(k);
  x.v.assign(v);
}

}  // namespace

TEMPLATE_TEST_CASE("key_lengths: one per batch, NaN past it", "", ELEMENT_TYPES) {
  for (const auto& lengths : all_lengths)
    for (const index_t n_q : {1, 2, 51})
      for (const layout l : {layout::contiguous, layout::column_major}) {
        const dense_problem p{.n_batch = 2,
                              .n_heads = 2,
                              .n_kv_heads = 1,
                              .n_q = n_q,
                              .n_kv = 140,
                              .d_qk = 19,
                              .d_v = 12,
                              .inputs = l};
        INFO(p);
        CAPTURE(lengths);
        dense_operands<TestType> x(p);
        poison_past(x, lengths, std::nan(""));
        CHECK(check_dense(x, attn::key_lengths{lengths}, reference::key_lengths(lengths)));
      }
}

TEMPLATE_TEST_CASE("Rows past a length are never read", "", ELEMENT_TYPES) {
  // Heads interleaved, and the memory ends behind the last row that counts.
  const index_t length = GENERATE(values<index_t>({1, 7, 8, 9, 16, 100, 127, 128, 129, 200}));
  const index_t n_q = GENERATE(values<index_t>({1, 3, 70}));
  const index_t n_kv = 260, heads = 2, d = 21;
  CAPTURE(length, n_q);
  dense_operands<TestType> expected(
      {.n_heads = heads, .n_kv_heads = heads, .n_q = n_q, .n_kv = length, .d_qk = d, .d_v = d});
  const auto interleaved = [&](const reference::tensor& t) {
    reference::tensor memory({1, length, heads, d});
    for (index_t h = 0; h < heads; ++h)
      for (index_t j = 0; j < length; ++j)
        for (index_t c = 0; c < d; ++c) memory(0, j, h, c) = t(0, h, j, c);
    return memory;
  };
  const guarded_tensor<TestType> k(interleaved(expected.k.values())),
      v(interleaved(expected.v.values()));
  const auto longer = [&](const guarded_tensor<TestType>& x) {
    return attn::blhd<const TestType>(x.view().data_handle(), 1, n_kv, heads, d);
  };
  const std::vector<index_t> lengths = {length};
  attn::dense_attention(std::as_const(expected.q).view(), longer(k), longer(v), expected.out.view(),
                        expected.lse.view(), attn::key_lengths{lengths});
  CHECK(expected.matches(expected.expected()));
}

TEMPLATE_TEST_CASE("prefix_mask: all see the prefix, the rest is causal", "", float, double) {
  for (const auto& prefix :
       std::vector<std::vector<index_t>>{{0, 5}, {8, 100}, {139, 140}, {1000, 0}})
    for (const index_t n_q : {1, 51, 150})
      for (const index_t offset : {0, -20, 100}) {
        const dense_problem p{.n_batch = 2, .n_heads = 2, .n_kv_heads = 2, .n_q = n_q, .n_kv = 140};
        INFO(p);
        CAPTURE(prefix, offset);
        CHECK(check_dense<TestType>(p, attn::prefix_mask{prefix, offset},
                                    reference::prefix_mask(prefix, offset)));
      }
}

TEST_CASE("Lengths and causality together: a batch of caches of different fill") {
  // The queries of a batch are the last ones of its keys.
  const std::vector<index_t> lengths = {3, 4};
  dense_operands<float> x({.n_batch = 2, .n_q = 2, .n_kv = 4, .d_qk = 1, .d_v = 1});
  x.q.assign(reference::tensor({2, 1, 2, 1}));
  reference::tensor v({2, 1, 4, 1});
  for (index_t b = 0; b < 2; ++b)
    for (index_t j = 0; j < 4; ++j) v(b, 0, j, 0) = static_cast<double>(j);
  x.v.assign(v);
  attend(x, attn::key_lengths{lengths} & attn::causal_mask{.offset = 1});
  CHECK(x.out.view()(0, 0, 0, 0) == 0.5f);
  CHECK(x.out.view()(0, 0, 1, 0) == 1);
  CHECK(x.out.view()(1, 0, 1, 0) == 1);
}
