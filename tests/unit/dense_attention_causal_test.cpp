// SPDX-License-Identifier: MIT
//
// Causal and window masks against the oracle, over offsets and shapes.
#include "support/catch.hpp"
#include "support/dense_call.hpp"

using namespace attn_test;

namespace {

const std::vector<dense_problem> problems = {
    {.n_heads = 2, .n_kv_heads = 1, .n_q = 1, .n_kv = 70},
    {.n_batch = 2, .n_heads = 2, .n_kv_heads = 1, .n_q = 37, .n_kv = 70, .d_qk = 24, .d_v = 17},
    {.n_q = 130, .n_kv = 41},
    {.n_q = 100, .n_kv = 300, .d_qk = 33, .d_v = 12},
};

}  // namespace

TEMPLATE_TEST_CASE("causal_mask with any offset", "", float, double) {
  for (const dense_problem& p : problems)
    for (const index_t offset : {index_t{0}, p.n_kv - p.n_q, index_t{1}, index_t{-1}, index_t{7},
                                 index_t{-40}, index_t{128}, index_t{-500}, index_t{500}}) {
      INFO(p);
      CAPTURE(offset);
      CHECK(check_dense<TestType>(p, attn::causal_mask{.offset = offset},
                                  reference::causal_mask(offset)));
    }
}

TEMPLATE_TEST_CASE("window_mask with any sides and offset", "", float, double) {
  for (const dense_problem& p : problems)
    for (const auto& [left, right] :
         std::vector<std::pair<index_t, index_t>>{{0, 0},
                                                  {3, 0},
                                                  {0, 5},
                                                  {8, 8},
                                                  {64, 0},
                                                  {attn::unlimited, 2},
                                                  {2, attn::unlimited},
                                                  {attn::unlimited, attn::unlimited}})
      for (const index_t offset : {index_t{0}, p.n_kv - p.n_q, index_t{-90}}) {
        INFO(p);
        CAPTURE(left, right, offset);
        CHECK(check_dense<TestType>(
            p, attn::window_mask{.left = left, .right = right, .offset = offset},
            reference::window_mask(left, right, offset)));
      }
}

TEST_CASE("A causal mask aligns top left by default and bottom right on demand") {
  // Zero logits, v_j = j: the mean index of the keys seen.
  dense_operands<float> x({.n_q = 2, .n_kv = 5, .d_qk = 1, .d_v = 1});
  x.q.assign(reference::tensor({1, 1, 2, 1}));
  reference::tensor v({1, 1, 5, 1});
  for (index_t j = 0; j < 5; ++j) v(0, 0, j, 0) = static_cast<double>(j);
  x.v.assign(v);
  attend(x, attn::causal_mask{});
  CHECK(x.out.view()(0, 0, 0, 0) == 0);
  CHECK(x.out.view()(0, 0, 1, 0) == 0.5f);
  attend(x, attn::causal_mask::bottom_right(2, 5));
  CHECK(x.out.view()(0, 0, 0, 0) == 1.5f);
  CHECK(x.out.view()(0, 0, 1, 0) == 2);
}

TEST_CASE("The ends of 63 bits as offsets and sides") {
  constexpr index_t most = attn::unlimited, least = -most - 1;
  const dense_problem p{.n_q = 40, .n_kv = 50};
  CHECK(check_dense<float>(p, attn::causal_mask{.offset = most}));
  CHECK(check_dense<float>(p, attn::causal_mask{.offset = least}, reference::key_lengths({0})));
  CHECK(check_dense<float>(p, attn::window_mask{.left = most - 1, .right = most - 1}));
  CHECK(check_dense<float>(p, attn::window_mask{.left = 5, .right = 5, .offset = least},
                           reference::key_lengths({0})));
}

TEMPLATE_TEST_CASE("Keys that no row sees and values of unseen keys have no influence", "", float,
                   double) {
  const double poison = GENERATE(std::nan(""), 1e30, HUGE_VAL);
  const index_t offset = GENERATE(values<index_t>({0, -10, 20}));
  const dense_problem p{.n_q = 60, .n_kv = 150, .d_qk = 10, .d_v = 9};
  dense_operands<TestType> clean(p), poisoned(p);
  reference::tensor k = clean.k.values(), v = clean.v.values();
  for (index_t j = std::max<index_t>(0, p.n_q + offset); j < p.n_kv; ++j)
    for (index_t c = 0; c < 9; ++c) k(0, 0, j, c) = v(0, 0, j, c) = poison;
  poisoned.k.assign(k);
  poisoned.v.assign(v);
  attend(clean, attn::causal_mask{.offset = offset});
  attend(poisoned, attn::causal_mask{.offset = offset});
  CHECK(same_bits_out(clean, poisoned));
}
