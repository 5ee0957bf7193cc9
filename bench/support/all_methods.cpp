// SPDX-License-Identifier: MIT
#include "support/method.hpp"

namespace attn::bench {

template <class T>
std::vector<method<T>> all_methods(const method_options& options) {
  std::vector<method<T>> methods{plain_eigen_method<T>(), blocked_eigen_method<T>()};
  const auto add_dense = [&](const char* name, std::string_view summary, precision_mode precision) {
    methods.push_back(dense_method<T>(name, summary, precision));
  };
  add_dense("dense", "attn::dense_attention: exact, tiled, the scores are never stored",
            precision_mode::automatic);
  if (std::is_same_v<arithmetic_t<T>, float> && has_tiles()) {
    add_dense("dense-strict", "the same in float multiply-adds", precision_mode::strict);
    add_dense("dense-bf16x3", "the same on AMX with 16 bits per operand", precision_mode::bf16x3);
    add_dense("dense-bf16", "the same on AMX with 8 bits per operand", precision_mode::bf16);
  }
  for (const index_t block : options.blocks) {
    methods.push_back(blockwise_method<T>("blockwise-" + std::to_string(block), block));
  }
  for (const index_t kept : options.kept) {
    methods.push_back(pooled_method<T>("pooled-" + std::to_string(kept), kept));
  }
  for (const smyrf_size& size : options.smyrf) {
    using enum smyrf_clustering;
    const auto add = [&](std::string name, std::string_view summary, const smyrf_options& how) {
      name += "-" + std::to_string(size.rounds) + "x" + std::to_string(size.keys);
      methods.push_back(smyrf_method<T>(name, summary, how, size));
    };
    add("smyrf", "attn::smyrf_attention: rounds x keys per cluster, clusters by ranks of a hash",
        {.clustering = ranks});
    add("bisection", "the same with clusters by bisection", {.clustering = bisection});
    add("bisection-removed", "by bisection, and a key met in several rounds counts once",
        {.duplicates = smyrf_duplicates::removed, .clustering = bisection});
    add("bisection-far", "by bisection, and means stand for the keys that a query does not meet",
        {.clustering = bisection, .far_field = smyrf_far_field::means});
  }
  return methods;
}

template std::vector<method<float>> all_methods(const method_options&);
template std::vector<method<double>> all_methods(const method_options&);
template std::vector<method<Eigen::half>> all_methods(const method_options&);
template std::vector<method<Eigen::bfloat16>> all_methods(const method_options&);

}  // namespace attn::bench
