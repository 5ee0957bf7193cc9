// SPDX-License-Identifier: MIT
//
// Dense attention against the oracle over shapes and layouts; one test program per element type.
#pragma once

#include "support/catch.hpp"
#include "support/dense_call.hpp"
#include "support/sizes.hpp"

namespace attn_test {

template <class T>
void check_full_and_causal(const dense_problem& p) {
  INFO(p);
  CHECK(check_dense<T>(p));
  const attn::causal_mask causal = attn::causal_mask::bottom_right(p.n_q, p.n_kv);
  CHECK(check_dense<T>(p, causal, reference::causal_mask(p.n_kv - p.n_q)));
}

template <class T>
void sweep_queries() {
  for (const index_t n_q : query_counts<T>())
    for (const index_t n_kv : {1, 17, 130})
      check_full_and_causal<T>({.n_q = n_q, .n_kv = n_kv, .d_qk = 5, .d_v = 6});
}

template <class T>
void sweep_keys() {
  for (const index_t n_kv : key_counts())
    for (const index_t n_q : {index_t{1}, index_t{2}, 3 * lanes<T> + 1})
      check_full_and_causal<T>({.n_q = n_q, .n_kv = n_kv, .d_qk = 6, .d_v = 5});
}

template <class T>
void sweep_small_shapes() {
  for (index_t n_q = 1; n_q <= 5; ++n_q)
    for (index_t n_kv = 1; n_kv <= 5; ++n_kv)
      check_full_and_causal<T>({.n_q = n_q, .n_kv = n_kv, .d_qk = 4, .d_v = 4});
}

template <class T>
void sweep_dimensions() {
  for (const index_t d : head_dimensions<T>()) {
    for (const index_t n_q : {index_t{1}, 3 * lanes<T> + 1})
      check_full_and_causal<T>({.n_q = n_q, .n_kv = 37, .d_qk = d, .d_v = d});
  }
  for (const auto& [d_qk, d_v] : {std::pair{3, 5}, {5, 3}, {192, 128}, {1, 64}, {64, 1}, {16, 200}})
    check_full_and_causal<T>(
        {.n_heads = 2, .n_kv_heads = 1, .n_q = 19, .n_kv = 140, .d_qk = d_qk, .d_v = d_v});
  for (const index_t d : {512, 1000, 1024})
    check_full_and_causal<T>({.n_q = 4, .n_kv = 20, .d_qk = d, .d_v = d});
}

/// Shapes, layouts and spreads drawn at random.
template <class T>
void sweep_random_problems(std::uint64_t count) {
  for (std::uint64_t seed = 1; seed <= count; ++seed) {
    random_source random(seed);
    dense_problem p;
    p.n_batch = random.integer(1, 2);
    p.n_kv_heads = random.integer(1, 3);
    p.n_heads = p.n_kv_heads * random.integer(1, 3);
    p.n_q = random.coin(0.3) ? random.integer(1, 4) : random.integer(1, 130);
    p.n_kv = random.integer(1, 300);
    p.d_qk = random.integer(1, 90);
    p.d_v = random.coin() ? p.d_qk : random.integer(1, 90);
    const auto any_layout = [&] {
      return plain_layouts[static_cast<std::size_t>(random.integer(0, plain_layouts.size() - 1))];
    };
    p.inputs = any_layout();
    p.outputs = any_layout();
    p.deviation = random.coin(0.3) ? 5 : 1;
    p.seed = seed;
    check_full_and_causal<T>(p);
  }
}

}  // namespace attn_test

#define ATTN_TEST_DENSE_SHAPES(T)                                                                  \
  TEST_CASE("Any number of queries: " #T) { attn_test::sweep_queries<T>(); }                       \
  TEST_CASE("Any number of keys: " #T) { attn_test::sweep_keys<T>(); }                             \
  TEST_CASE("Every shape up to 5 x 5: " #T) { attn_test::sweep_small_shapes<T>(); }                \
  TEST_CASE("Any head dimension, d_v other than d_qk: " #T) { attn_test::sweep_dimensions<T>(); }  \
  TEST_CASE("Random problems: " #T) { attn_test::sweep_random_problems<T>(120); }
