// SPDX-License-Identifier: MIT
#pragma once

#include "reference/dense_attention.hpp"
#include "reference/tensor.hpp"
#include "support/element.hpp"
#include "support/tensor_buffer.hpp"

#include <ostream>
#include <string>

namespace attn_test {

/// The verdict of a comparison: true, or false with the first and the worst offence in words.
struct comparison {
  bool ok = true;
  std::string message;

  explicit operator bool() const { return ok; }
  friend std::ostream& operator<<(std::ostream& out, const comparison& c) {
    return out << (c.ok ? "as expected" : c.message);
  }
};

/// The largest deviation that rounding explains, element by element or row by row.
struct tolerance {
  /// |Δo| ≤ constant · eps · (1 + score_bound) · value_bound, and |Δlse| ≤ constant · eps ·
  /// (1 + score_bound + |lse|). docs/numerics.md says where the constant comes from.
  double constant = 16;
};

/// `out` and `lse` against the oracle's. NaN and infinities must be where the oracle has them.
template <class T>
comparison compare_dense(const reference::tensor& out, const reference::tensor& lse,
                         const reference::dense_result& expected, tolerance t = {});

/// `out` alone.
template <class T>
comparison compare_out(const reference::tensor& out, const reference::dense_result& expected,
                       tolerance t = {});

/// The same values in every element (NaN equals NaN, 0 does not equal −0).
comparison compare_bits(const reference::tensor& a, const reference::tensor& b);

/// |a − b| ≤ bound in every element.
comparison compare_within(const reference::tensor& a, const reference::tensor& b, double bound);

}  // namespace attn_test
