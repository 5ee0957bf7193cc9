// SPDX-License-Identifier: MIT
#include "support/method.hpp"

namespace attn::bench {

template <class T>
std::vector<method<T>> all_methods() {
  return {plain_eigen_method<T>(), blocked_eigen_method<T>(), dense_method<T>(),
          blockwise_method<T>("blockwise-128", 128), blockwise_method<T>("blockwise-512", 512)};
}

template std::vector<method<float>> all_methods();
template std::vector<method<double>> all_methods();
template std::vector<method<Eigen::half>> all_methods();
template std::vector<method<Eigen::bfloat16>> all_methods();

}  // namespace attn::bench
