// SPDX-License-Identifier: MIT
//
// What a user of attn writes. "bank" attends to "the river bank flooded": a value known by hand.
#include <cmath>
#include <cstdio>

#include <Eigen/Core>

#include <attn/attn.hpp>

int main() {
  using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  matrix v(4, 2), q(4, 2), k(4, 2);
  v << 0.1f, 0.1f, 1, 0, 0.5f, 0.5f, 0.8f, 0.2f;
  q << v.col(0) + v.col(1) / 2, v.col(0) / 2 + v.col(1);
  k << v.col(0) * 2, v.col(1);

  const auto out = attn::dense_attention(q, k, v);

  const bool right =
      std::abs(out(2, 0) - 0.697708f) < 1e-5f && std::abs(out(2, 1) - 0.196592f) < 1e-5f;
  std::printf("attn %d.%d.%d: bank (%.6f, %.6f)\n", attn::version_major, attn::version_minor,
              attn::version_patch, static_cast<double>(out(2, 0)), static_cast<double>(out(2, 1)));
  return right ? 0 : 1;
}
