// SPDX-License-Identifier: MIT
//
// How far an output is from what attention means.
#pragma once

#include <vector>

#include <attn/view.hpp>

#include "support/problem.hpp"

namespace attn::bench {

struct output_error {
  double largest;   ///< max |o − reference|
  double relative;  ///< ‖o − reference‖ / ‖reference‖ over all elements compared
};

/// The output of a problem in double, by the plain loops of tests/reference.
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

 private:
  problem_shape shape_;
  std::vector<index_t> rows_;   // queries that are compared
  std::vector<double> output_;  // [batch, heads, rows, d_v]
};

}  // namespace attn::bench
