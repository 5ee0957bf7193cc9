// SPDX-License-Identifier: MIT
#include "support/method.hpp"

namespace attn::bench {

template <class T>
std::vector<method<T>> all_methods(const method_options& options) {
  std::vector<method<T>> methods{plain_eigen_method<T>(), blocked_eigen_method<T>(),
                                 dense_method<T>()};
  for (const index_t block : options.blocks) {
    methods.push_back(blockwise_method<T>("blockwise-" + std::to_string(block), block));
  }
  for (const index_t kept : options.kept) {
    methods.push_back(pooled_method<T>("pooled-" + std::to_string(kept), kept));
  }
  return methods;
}

template std::vector<method<float>> all_methods(const method_options&);
template std::vector<method<double>> all_methods(const method_options&);
template std::vector<method<Eigen::half>> all_methods(const method_options&);
template std::vector<method<Eigen::bfloat16>> all_methods(const method_options&);

}  // namespace attn::bench
