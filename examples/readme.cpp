// SPDX-License-Identifier: MIT

#include <iostream>

#include <Eigen/Core>
#include <attn/attn.hpp>

int main() {
  Eigen::MatrixXf v(4, 2), q(4, 2), k(4, 2);  // the, river, bank, flooded
  v << 0.1f, 0.1f, 1.0f, 0.0f, 0.5f, 0.5f, 0.8f, 0.2f;
  q << v.col(0) + v.col(1) / 2, v.col(0) / 2 + v.col(1);
  k << v.col(0) * 2, v.col(1);

  std::cout << attn::dense_attention(q, k, v) << "\n\n";  // softmax(q kᵀ / √2) v

  Eigen::MatrixXf out(4, 2);  // no word looks ahead; written where you want it
  attn::dense_attention(q, k, v, out, attn::causal_mask{});
  std::cout << out << '\n';
}
