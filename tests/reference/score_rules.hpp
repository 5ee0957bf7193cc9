// SPDX-License-Identifier: MIT
#pragma once

#include "reference/tensor.hpp"

#include <functional>
#include <limits>
#include <vector>

namespace reference {

inline constexpr double forbidden = -std::numeric_limits<double>::infinity();
inline constexpr index_t unlimited = std::numeric_limits<index_t>::max();

/// What every rule of the library means, one pair at a time: the score that query i of head h in
/// batch b gives to key j after the rule, or `forbidden`.
using score_function =
    std::function<double(double score, index_t b, index_t h, index_t i, index_t j)>;

/// A rule and its slope d(score after) / d(score before), which is 1 for a mask or a bias.
struct score_rule {
  score_function apply = [](double score, index_t, index_t, index_t, index_t) { return score; };
  score_function slope = [](double, index_t, index_t, index_t, index_t) { return 1.0; };
};

score_rule no_mask();
score_rule causal_mask(index_t offset = 0);
score_rule window_mask(index_t left, index_t right, index_t offset = 0);
score_rule key_lengths(std::vector<index_t> lengths);
/// Non-zero means "may attend"; an extent of 1 stands for every index of that rank.
score_rule boolean_mask(tensor mask);
/// [B, 1, n_q, 1] and [B, 1, n_kv, 1]: pairs with equal ids attend.
score_rule segment_mask(tensor q_ids, tensor k_ids);
score_rule prefix_mask(std::vector<index_t> prefix, index_t offset = 0);
/// −inf forbids; an extent of 1 stands for every index of that rank.
score_rule additive_bias(tensor bias);
score_rule alibi_bias(std::vector<double> slopes, index_t offset = 0);
score_rule score_rule_fn(score_function f, score_function slope = score_rule{}.slope);

/// `a` first, then `b`. What either forbids stays forbidden, whatever the other makes of it.
score_rule operator&(score_rule a, score_rule b);

}  // namespace reference
