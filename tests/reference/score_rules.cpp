// SPDX-License-Identifier: MIT
#include "reference/score_rules.hpp"

#include <cstdlib>
#include <utility>

namespace reference {
namespace {

/// The rule that leaves the score of an allowed pair as it is.
template <class Allowed>
score_rule mask(Allowed allowed) {
  return {[allowed](double score, index_t b, index_t h, index_t i, index_t j) {
            return allowed(b, h, i, j) ? score : forbidden;
          },
          score_rule{}.slope};
}

double broadcast_at(const tensor& t, index_t b, index_t h, index_t i, index_t j) {
  return t(t.extent(0) == 1 ? 0 : b, t.extent(1) == 1 ? 0 : h, t.extent(2) == 1 ? 0 : i,
           t.extent(3) == 1 ? 0 : j);
}

std::size_t at(index_t index) { return static_cast<std::size_t>(index); }

}  // namespace

score_rule no_mask() { return {}; }

score_rule causal_mask(index_t offset) {
  return mask([=](index_t, index_t, index_t i, index_t j) { return j <= i + offset; });
}

score_rule window_mask(index_t left, index_t right, index_t offset) {
  return mask([=](index_t, index_t, index_t i, index_t j) {
    const bool after_left = left == unlimited || j >= i + offset - left;
    const bool before_right = right == unlimited || j <= i + offset + right;
    return after_left && before_right;
  });
}

score_rule key_lengths(std::vector<index_t> lengths) {
  return mask([lengths = std::move(lengths)](index_t b, index_t, index_t, index_t j) {
    return j < lengths[at(b)];
  });
}

score_rule boolean_mask(tensor allowed) {
  return mask([allowed = std::move(allowed)](index_t b, index_t h, index_t i, index_t j) {
    return broadcast_at(allowed, b, h, i, j) != 0;
  });
}

score_rule segment_mask(tensor q_ids, tensor k_ids) {
  return mask([q_ids = std::move(q_ids), k_ids = std::move(k_ids)](index_t b, index_t, index_t i,
                                                                   index_t j) {
    return q_ids(b, 0, i, 0) == k_ids(b, 0, j, 0);
  });
}

score_rule prefix_mask(std::vector<index_t> prefix, index_t offset) {
  return mask([prefix = std::move(prefix), offset](index_t b, index_t, index_t i, index_t j) {
    return j < prefix[at(b)] || j <= i + offset;
  });
}

score_rule additive_bias(tensor bias) {
  return score_rule_fn(
      [bias = std::move(bias)](double score, index_t b, index_t h, index_t i, index_t j) {
        const double addend = broadcast_at(bias, b, h, i, j);
        return addend == forbidden ? forbidden : score + addend;
      });
}

score_rule alibi_bias(std::vector<double> slopes, index_t offset) {
  return score_rule_fn(
      [slopes = std::move(slopes), offset](double score, index_t, index_t h, index_t i, index_t j) {
        return score - slopes[at(h)] * static_cast<double>(std::abs(i + offset - j));
      });
}

score_rule score_rule_fn(score_function f, score_function slope) {
  return {std::move(f), std::move(slope)};
}

score_rule operator&(score_rule a, score_rule b) {
  score_rule both;
  both.apply = [a, b](double score, index_t batch, index_t h, index_t i, index_t j) {
    const double first = a.apply(score, batch, h, i, j);
    return first == forbidden ? forbidden : b.apply(first, batch, h, i, j);
  };
  both.slope = [a, b](double score, index_t batch, index_t h, index_t i, index_t j) {
    const double first = a.apply(score, batch, h, i, j);
    if (first == forbidden) return 0.0;
    return a.slope(score, batch, h, i, j) * b.slope(first, batch, h, i, j);
  };
  return both;
}

}  // namespace reference
