// SPDX-License-Identifier: MIT
//
// How far an output is from what attention means, and how much of the attention it is made of.
#pragma once

#include <vector>

#include <attn/view.hpp>

#include "support/problem.hpp"

namespace attn::bench {

struct output_error {
  double largest;   ///< max |o − reference|
  double relative;  ///< ‖o − reference‖ / ‖reference‖ over all elements compared
};

/// The output of a problem in double and its log-sum-exp, by the plain loops of tests/reference.
///
/// Those are slow, so of a large problem only some rows are computed: the same ones of each head,
/// evenly spread, the first and the last among them.
class oracle {
 public:
  template <class T>
  explicit oracle(const problem<T>& p);

  /// Rows compared of each head.
  [[nodiscard]] index_t rows() const { return static_cast<index_t>(rows_.size()); }

  template <class T>
  [[nodiscard]] output_error compare(tensor_view<const T> out) const;

  /// The share of the attention that goes to the keys a method lets its queries see, from the
  /// log-sum-exp of their scores [B, H, n_q, 1]: the mean over the rows of exp(lse − reference).
  /// Rows without keys do not count.
  template <class L>
  [[nodiscard]] double captured(tensor_view<const L> lse) const;

 private:
  problem_shape shape_;
  std::vector<index_t> rows_;   // queries that are compared
  std::vector<double> output_;  // [batch, heads, rows, d_v]
  std::vector<double> lse_;     // [batch, heads, rows]
};

}  // namespace attn::bench
