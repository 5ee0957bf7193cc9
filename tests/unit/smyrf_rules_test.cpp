// SPDX-License-Identifier: MIT
//
// Score rules in SMYRF attention: at the original positions; a key of one's own.
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

TEMPLATE_TEST_CASE("smyrf_attention: rules at the original positions", "", float) {
  const index_t n_q = 120, n_kv = 150;
  const dense_problem p{
      .n_batch = 2, .n_heads = 2, .n_kv_heads = 2, .n_q = n_q, .n_kv = n_kv, .d_qk = 12, .d_v = 10};
  dense_operands<TestType> x(p);
  const std::vector<index_t> lengths = {150, 40}, prefix = {0, 70};
  const auto mask_values = coin_tensor({2, 1, n_q, n_kv}, 5, 0.4);
  std::vector<char> mask_bytes;
  for (const double e : mask_values.elements()) mask_bytes.push_back(e != 0);
  const auto* mask_data = reinterpret_cast<const bool*>(mask_bytes.data());
  const attn::boolean_mask mask{attn::tensor_view<const bool>(mask_data, 2, 1, n_q, n_kv)};
  const auto bias_values = normal_tensor({1, 2, n_q, n_kv}, 6);
  tensor_buffer<TestType> bias({1, 2, n_q, n_kv}, layout::contiguous, TestType(0));
  bias.assign(bias_values);
  const attn::additive_bias add{std::as_const(bias).view()};
  const std::vector<float> slopes = {0.1f, 0.02f};
  const auto twice = [](auto s, index_t, index_t, index_t i, index_t j) {
    return (i + j) % 5 == 0 ? -std::numeric_limits<decltype(s)>::infinity() : s * 2;
  };
  const reference::score_rule meaning_twice = reference::score_rule_fn(
      [&](double s, index_t b, index_t h, index_t i, index_t j) { return twice(s, b, h, i, j); });

  for (smyrf_options options : smyrf_kinds)
    for (const double softcap : {0.0, 4.0})
      for (const index_t clusters : {1, 4, 9}) {
        options.clusters = clusters, options.softcap = softcap;
        CAPTURE(clusters, options.rounds, softcap, static_cast<int>(options.duplicates));
        CHECK(check_smyrf(x, options, attn::causal_mask{}, reference::causal_mask()));
        CHECK(check_smyrf(x, options, attn::causal_mask::bottom_right(n_q, n_kv),
                          reference::causal_mask(30)));
        CHECK(check_smyrf(x, options, attn::window_mask{.left = 20, .right = 30, .offset = 15},
                          reference::window_mask(20, 30, 15)));
        CHECK(check_smyrf(x, options, attn::key_lengths{lengths}, reference::key_lengths(lengths)));
        CHECK(check_smyrf(x, options, attn::prefix_mask{prefix}, reference::prefix_mask(prefix)));
        CHECK(check_smyrf(x, options, mask, reference::boolean_mask(mask_values)));
        CHECK(check_smyrf(x, options, add, reference::additive_bias(bias.values())));
        CHECK(check_smyrf(x, options, attn::alibi_bias{slopes},
                          reference::alibi_bias({slopes[0], slopes[1]})));
        CHECK(check_smyrf(x, options, attn::score_rule_fn(twice), meaning_twice));
        CHECK(check_smyrf(x, options, attn::causal_mask{} & mask,
                          reference::causal_mask() & reference::boolean_mask(mask_values)));
      }
}

TEMPLATE_TEST_CASE("smyrf_attention: attend_self gives every causal row a key", "", float) {
  const index_t n = 130;
  const dense_problem p{
      .n_batch = 2, .n_heads = 4, .n_kv_heads = 2, .n_q = n, .n_kv = n, .d_qk = 16, .d_v = 12};
  dense_operands<TestType> x(p);
  const std::vector<index_t> lengths = {n, 71};
  for (smyrf_options options : smyrf_kinds)
    for (const bool self : {false, true}) {
      options.clusters = 13, options.attend_self = self;
      options.query_lengths = options.key_lengths = lengths;
      CAPTURE(options.rounds, self);
      CHECK(check_smyrf(x, options));
      CHECK(check_smyrf(x, options, attn::causal_mask{}, reference::causal_mask()));
      const reference::tensor lse = x.lse.values();
      index_t empty = 0;
      for (index_t b = 0; b < 2; ++b)
        for (index_t h = 0; h < 4; ++h)
          for (index_t i = 0; i < lengths[static_cast<std::size_t>(b)]; ++i)
            empty += lse(b, h, i, 0) == -HUGE_VAL;
      if (self) CHECK(empty == 0);
      if (!self && !options.local_round) CHECK(empty > 0);
      // A rule that forbids it is obeyed.
      const auto others = [](auto s, index_t, index_t, index_t i, index_t j) {
        return i == j ? -std::numeric_limits<decltype(s)>::infinity() : s;
      };
      CHECK(
          check_smyrf(x, options, attn::score_rule_fn(others),
                      reference::score_rule_fn([&](double s, index_t b, index_t h, index_t i,
                                                   index_t j) { return others(s, b, h, i, j); })));
    }
}
