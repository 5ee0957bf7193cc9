// SPDX-License-Identifier: MIT
//
// Score rules at sizes that go to AMX tiles where there are any.
#include "support/catch.hpp"
#include "support/dense_call.hpp"
#include "support/rule_operands.hpp"

#include <vector>

using namespace attn_test;

namespace {

const dense_problem problem{
    .n_batch = 2, .n_heads = 4, .n_kv_heads = 2, .n_q = 150, .n_kv = 290, .d_qk = 40, .d_v = 48};

}  // namespace

TEST_CASE("causal_mask on tiles, also with rows that see nothing") {
  for (const index_t offset : {-70, 0, 5, 140}) {
    CAPTURE(offset);
    CHECK(check_dense<float>(problem, attn::causal_mask{.offset = offset},
                             reference::causal_mask(offset)));
  }
}

TEST_CASE("window_mask and key_lengths on tiles") {
  const std::vector<index_t> lengths = {77, 290};
  const attn::window_mask window{.left = 40, .right = 3, .offset = 60};
  CHECK(check_dense<float>(problem, window & attn::key_lengths{lengths},
                           reference::window_mask(40, 3, 60) & reference::key_lengths(lengths)));
}

TEST_CASE("boolean_mask and alibi_bias on tiles, with a softcap") {
  const std::vector<float> slopes = {0.5f, 0.25f, 0.125f, 0.0625f};
  for (const double density : {0.02, 0.6}) {
    CAPTURE(density);
    const rule_operand<bool> mask(coin_tensor({1, 4, problem.n_q, problem.n_kv}, 5, density));
    for (const double softcap : {0.0, 5.0}) {
      CHECK(check_dense<float>(problem,
                               attn::boolean_mask{mask.view()} & attn::alibi_bias{slopes, 20},
                               reference::boolean_mask(mask.values) &
                                   reference::alibi_bias({slopes.begin(), slopes.end()}, 20),
                               {.softcap = softcap}));
    }
  }
}

TEST_CASE("A mask of which most blocks are all true or all false") {
  reference::tensor allowed({1, 1, problem.n_q, problem.n_kv});
  for (index_t i = 0; i < problem.n_q; ++i)
    for (index_t j = 0; j < problem.n_kv; ++j)
      allowed(0, 0, i, j) = (i / 50 == j / 100) || (i % 64 == 3 && j > 130);
  const rule_operand<bool> mask(allowed);
  CHECK(check_dense<float>(problem, attn::boolean_mask{mask.view()},
                           reference::boolean_mask(allowed)));
}
