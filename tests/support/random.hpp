// SPDX-License-Identifier: MIT
#pragma once

#include "reference/tensor.hpp"

#include <array>
#include <cstdint>

namespace attn_test {

using reference::index_t;

/// Numbers that depend on the seed alone: the distributions of <random> differ between standard
/// libraries, these do not (splitmix64; only exact operations and additions in a fixed order).
class random_source {
 public:
  explicit random_source(std::uint64_t seed) : state_(seed) {}

  std::uint64_t bits();
  /// In [0, 1).
  double uniform();
  double uniform(double low, double high) { return low + (high - low) * uniform(); }
  /// Mean 0, variance 1, within ±6: the sum of 12 uniform numbers less 6.
  double normal();
  /// In [low, high].
  index_t integer(index_t low, index_t high);
  bool coin(double probability = 0.5) { return uniform() < probability; }

 private:
  std::uint64_t state_;
};

reference::tensor normal_tensor(std::array<index_t, 4> extents, std::uint64_t seed,
                                double deviation = 1);
reference::tensor uniform_tensor(std::array<index_t, 4> extents, std::uint64_t seed, double low,
                                 double high);
/// 1 with the given probability, else 0: a boolean mask.
reference::tensor coin_tensor(std::array<index_t, 4> extents, std::uint64_t seed,
                              double probability = 0.5);

}  // namespace attn_test
