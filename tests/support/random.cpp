// SPDX-License-Identifier: MIT
#include "support/random.hpp"

namespace attn_test {
namespace {

template <class Draw>
reference::tensor drawn(std::array<index_t, 4> extents, std::uint64_t seed, Draw draw) {
  random_source random(seed);
  reference::tensor t(extents);
  for (double& x : t.elements()) x = draw(random);
  return t;
}

}  // namespace

std::uint64_t random_source::bits() {
  std::uint64_t z = (state_ += 0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

double random_source::uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

double random_source::normal() {
  double sum = -6;
  for (int i = 0; i < 12; ++i) sum += uniform();
  return sum;
}

index_t random_source::integer(index_t low, index_t high) {
  const auto count = static_cast<std::uint64_t>(high - low) + 1;
  return low + static_cast<index_t>(bits() % count);
}

reference::tensor normal_tensor(std::array<index_t, 4> extents, std::uint64_t seed,
                                double deviation) {
  return drawn(extents, seed, [=](random_source& r) { return deviation * r.normal(); });
}

reference::tensor uniform_tensor(std::array<index_t, 4> extents, std::uint64_t seed, double low,
                                 double high) {
  return drawn(extents, seed, [=](random_source& r) { return r.uniform(low, high); });
}

reference::tensor coin_tensor(std::array<index_t, 4> extents, std::uint64_t seed,
                              double probability) {
  return drawn(extents, seed, [=](random_source& r) { return r.coin(probability) ? 1.0 : 0.0; });
}

}  // namespace attn_test
