// SPDX-License-Identifier: MIT
//
// Options of a tournament, shared by everything that pools by one.
#pragma once

#include <span>

#include <attn/view.hpp>

namespace attn {

/// How two scores of a match become two weights that sum to 1.
enum class topk_boost {
  /// w_i = sigmoid(B^v_i − B^v_j), B = strength > 1: sharper where scores are high. For scores in a
  /// bounded range: what a model makes goes through `squash_scores` (scorers.hpp) first.
  exponential,
  scaled,  ///< w_i = sigmoid(C (v_i − v_j)), C = strength > 0: the same for any offset
};

/// When survivors are ranked by score.
enum class topk_sort {
  every_round,  ///< by their interpolated scores
  once,         ///< before the first round; later a survivor has the rank of its champion
  never,        ///< the position is the rank
};

/// How slots are numbered.
enum class topk_order {
  by_position,  ///< survivors keep the order of their champions in the sequence
  by_rank,      ///< by the champions' rank in the last round, best first
};

/// Options of a tournament: designated initialisers, as in
/// `soft_topk_options{.boost = topk_boost::scaled, .strength = 100}`.
struct soft_topk_options {
  topk_boost boost = topk_boost::exponential;

  /// B or C of the boost. Larger is nearer to a hard top-k: docs/kernels/soft_topk.md.
  double strength = 20;

  topk_sort sort = topk_sort::every_round;
  topk_order order = topk_order::by_position;

  /// One per batch, or none: positions at or past it take no part, in any head.
  std::span<const index_t> lengths = {};
};

}  // namespace attn
