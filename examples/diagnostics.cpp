// SPDX-License-Identifier: MIT
//
// Where does attention go, and why? Queries of trained models point into one cone; then the keys
// that are longest draw everything, whatever they are about. The diagnostics show it without ever
// storing the n × n weights, and attention_weights shows the weights where they are few.
#include <attn/attention_weights.hpp>
#include <attn/diagnostics.hpp>

#include <Eigen/Core>

#include <cmath>
#include <cstdint>
#include <cstdio>

namespace {

using matrix = Eigen::MatrixXf;

// Noise, uniform in ±1 and the same on every machine.
matrix noise(Eigen::Index rows, Eigen::Index cols) {
  static std::uint32_t state = 1;
  return matrix::NullaryExpr(rows, cols, [&](Eigen::Index, Eigen::Index) {
    state = state * 1664525u + 1013904223u;
    return static_cast<float>(state >> 8) / 8388608.0f - 1.0f;
  });
}

void print(const char* title, const attn::attention_diagnostics& d) {
  std::printf("%s\n%s", title, attn::to_table(d).c_str());
  Eigen::Map<const Eigen::VectorXd> mass(d.key_mass.data(), d.n_kv);
  Eigen::Index most = 0;
  mass.maxCoeff(&most);
  std::printf("key %td receives most: %.1f of %td rows; row 0 has entropy %.3f\n\n",
              static_cast<std::ptrdiff_t>(most), mass(most), d.n_q, d.row_entropy[0]);
}

}  // namespace

int main() {
  constexpr int n = 256, d = 16;
  // 1. A cone of queries around (1, ..., 1), and keys that lean to it and differ in length.
  const matrix q = noise(n, d).array() + 1;
  matrix k = noise(n, d).array() + 1;
  for (int j = 0; j < n; ++j) k.row(j) *= 0.25f + 2.0f * static_cast<float>(j % 16) / 16.0f;
  const attn::attention_diagnostics lengths = attn::diagnose_attention(q, k);
  print("keys of different length", lengths);

  // 2. The same directions, all of one length: what is left is what the keys are about.
  const matrix unit = k.rowwise().normalized() * k.norm() / std::sqrt(static_cast<float>(n));
  const attn::attention_diagnostics directions = attn::diagnose_attention(q, unit);
  print("the same keys at one length", directions);

  // 3. A mask is diagnosed like everything else, here the first 6 × 6 weights of a causal one.
  matrix weights(6, 6);
  attn::attention_weights(q.topRows(6), k.topRows(6), weights, attn::causal_mask{});
  for (int i = 0; i < 6; ++i) {
    for (int j = 0; j < 6; ++j) std::printf(" %.3f", weights(i, j));
    std::printf("\n");
  }

  const bool rows_sum_to_1 = (weights.rowwise().sum().array() - 1).abs().maxCoeff() < 1e-6f;
  const bool long_keys_draw = lengths.total.mass_norm_correlation > 0.5 &&
                              std::abs(directions.total.mass_norm_correlation) < 0.2;
  const bool then_flatter = directions.total.mean_entropy > lengths.total.mean_entropy;
  return rows_sum_to_1 && weights(0, 0) == 1 && long_keys_draw && then_flatter ? 0 : 1;
}
