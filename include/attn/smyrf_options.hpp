// SPDX-License-Identifier: MIT
//
// Options of SMYRF: how queries and keys are clustered, and what attention makes of the clusters.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include <attn/lsh.hpp>
#include <attn/view.hpp>

namespace attn {

/// What a key counts for that a query meets in several rounds.
enum class smyrf_duplicates {
  weighted,  ///< m-fold if met in m rounds: rounds are merged by their log-sum-exp alone
  removed,   ///< once: the softmax over the union of the query's clusters
};

/// How the clusters of a round are found. Costs and quality: docs/kernels/smyrf_attention.md.
enum class smyrf_clustering {
  /// Queries and keys are ranked by one hash each, and equal ranks are paired (the paper's).
  ranks,
  /// Both are halved again and again along directions that the data give: queries by which of two
  /// groups of keys they prefer, keys by which half of the queries prefers them. On trained maps it
  /// captured 1.2 to 9 times the attention of `ranks` at the same number of scores, the more the
  /// fewer they were. Transform and hash play no part.
  bisection,
};

/// What stands for the keys that a query does not meet in a round.
enum class smyrf_far_field {
  none,  ///< nothing: their weight is 0
  /// A few means: the clusters are the leaves of a binary tree, and each subtree that branches off
  /// on the way to a query's cluster counts with its mean key and mean value, as often as it has
  /// keys. For calls without a mask; with `duplicates::weighted` where there are several rounds.
  means,
};

/// Options of SMYRF: designated initialisers, as in
/// `smyrf_options{.clusters = 64, .rounds = 2, .clustering = smyrf_clustering::bisection}`.
///
/// A query has n_kv · rounds / clusters scores computed.
struct smyrf_options {
  /// Clusters per round, 1 to the lengths of q and k; with 1 it is dense attention.
  index_t clusters = 0;
  index_t rounds = 4;  ///< 1 to 65536
  std::uint64_t seed = 0;

  smyrf_duplicates duplicates = smyrf_duplicates::weighted;

  /// Factor of q·k; absent is 1/sqrt(d_qk). Hashes are those of q and k as they are.
  std::optional<double> scale = {};
  /// c > 0 replaces a score s by c·tanh(s/c); 0 is off.
  double softcap = 0;

  /// Key i counts for query i also where they share no cluster (if the rule allows it): with a
  /// causal mask no row is left without a key.
  bool attend_self = false;

  /// One per batch, or none: positions at or past it belong to no cluster. Their keys are never
  /// read; their queries give 0 and an lse of −inf.
  std::span<const index_t> query_lengths = {};
  std::span<const index_t> key_lengths = {};

  lsh_transform transform = smyrf_transform{};
  lsh_hash hash = random_projection{};
  smyrf_clustering clustering = smyrf_clustering::ranks;

  /// The first round cuts the sequence by position instead: for data in which neighbours attend to
  /// each other, as in text.
  bool local_round = false;

  smyrf_far_field far_field = smyrf_far_field::none;
};

}  // namespace attn
