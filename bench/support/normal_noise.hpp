// SPDX-License-Identifier: MIT
//
// Made-up operands.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace attn::bench {

/// Numbers with mean 0 and variance 1 that depend on the seed alone.
///
/// splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014) and the
/// transform of Box and Muller, in double: not std::normal_distribution, which differs between
/// standard libraries.
class normal_noise {
 public:
  explicit normal_noise(std::uint64_t seed) : state_(seed) {}

  [[nodiscard]] double operator()() {
    if (has_spare_) {
      has_spare_ = false;
      return spare_;
    }
    const double radius = std::sqrt(-2 * std::log(1 - uniform()));  // 1 − u is never 0
    const double angle = 2 * std::numbers::pi * uniform();
    spare_ = radius * std::sin(angle);
    has_spare_ = true;
    return radius * std::cos(angle);
  }

 private:
  [[nodiscard]] double uniform() {  // in [0, 1)
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53;
  }

  std::uint64_t state_;
  double spare_ = 0;
  bool has_spare_ = false;
};

}  // namespace attn::bench
