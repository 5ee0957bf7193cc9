// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <cstddef>
#include <vector>

/// The oracles of the test suite: double arithmetic, plain loops, no Eigen, no SIMD, and none of
/// the library's own code, so that a fault in the library cannot be a fault here too.
namespace reference {

using index_t = std::ptrdiff_t;

/// A dense [batch, heads, length, dim] array of double that owns its elements.
class tensor {
 public:
  tensor() = default;
  explicit tensor(std::array<index_t, 4> extents, double value = 0)
      : extents_(extents),
        elements_(static_cast<std::size_t>(extents[0] * extents[1] * extents[2] * extents[3]),
                  value) {}

  index_t extent(std::size_t rank) const { return extents_[rank]; }
  const std::array<index_t, 4>& extents() const { return extents_; }
  std::vector<double>& elements() { return elements_; }
  const std::vector<double>& elements() const { return elements_; }

  double& operator()(index_t b, index_t h, index_t i, index_t c) {
    return elements_[offset(b, h, i, c)];
  }
  double operator()(index_t b, index_t h, index_t i, index_t c) const {
    return elements_[offset(b, h, i, c)];
  }

 private:
  std::size_t offset(index_t b, index_t h, index_t i, index_t c) const {
    return static_cast<std::size_t>(((b * extents_[1] + h) * extents_[2] + i) * extents_[3] + c);
  }

  std::array<index_t, 4> extents_ = {0, 0, 0, 0};
  std::vector<double> elements_;
};

}  // namespace reference
