// SPDX-License-Identifier: MIT
//
// Ways to attend to a part of the keys, and what each of them keeps of dense attention.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "problem.hpp"

namespace attn::bench {

/// A problem with its dense attention.
struct dense_results {
  problem<float> p;
  std::vector<float> out, lse;

  explicit dense_results(problem<float> x);
};

struct attention_quality {
  double mass = 0;    ///< of the dense weights, on keys that the query meets
  double error = 0;   ///< ‖out − dense‖ / ‖dense‖
  double cosine = 0;  ///< of a row with its dense row, mean
};

/// A way to choose, for each query, n_kv · rounds / clusters keys.
struct sparse_way {
  std::string name;
  std::function<attention_quality(const dense_results&, index_t clusters, index_t rounds)> run;
  enum class needs { any, one_round, several_rounds } rounds = needs::any;
  /// Means of far keys that a query has a score with, in each round of so many clusters.
  std::function<double(index_t clusters)> means = [](index_t) { return 0.0; };

  [[nodiscard]] bool applies(index_t n_rounds) const {
    return rounds == needs::any || (rounds == needs::one_round) == (n_rounds == 1);
  }
};

/// SMYRF with its options, other hashes, and what needs no hash: random clusters, stretches of the
/// sequence, the best keys. All with duplicates removed unless the name says otherwise.
[[nodiscard]] std::vector<sparse_way> sparse_ways();

}  // namespace attn::bench
