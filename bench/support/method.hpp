// SPDX-License-Identifier: MIT
//
// What attn_compare compares: one entry per method.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include <Eigen/Core>

#include <attn/dense_options.hpp>
#include <attn/view.hpp>

#include "support/problem.hpp"

namespace attn::bench {

/// What a method computes in: the half types are storage.
template <class T>
using arithmetic_t =
    std::conditional_t<std::is_same_v<T, double> || std::is_same_v<T, float>, T, float>;

/// Something that makes an attention output [B, H, n_q, d_v] of a problem.
template <class T>
struct method {
  std::string name;          ///< for --method and the table
  std::string_view summary;  ///< a line for --list

  /// A call that may be made again and again. Its first run takes what memory it needs, none
  /// before: that is how the memory is measured.
  std::function<std::function<void()>(const problem<T>&, tensor_view<T> out, int threads)> prepare;

  /// Floating-point operations that the method itself does.
  std::function<double(const problem_shape&)> flops = [](const problem_shape& s) {
    return s.flops();
  };

  /// Why this shape is left out; empty where it is not.
  std::function<std::string(const problem_shape&)> obstacle = [](const problem_shape&) {
    return std::string();
  };
};

// One function per method or family; the list below is the order of the table.
template <class T>
[[nodiscard]] method<T> plain_eigen_method();
template <class T>
[[nodiscard]] method<T> blocked_eigen_method();
template <class T>
[[nodiscard]] method<T> dense_method(std::string name, std::string_view summary,
                                     precision_mode precision);
template <class T>
[[nodiscard]] method<T> blockwise_method(std::string name, index_t block);
template <class T>
[[nodiscard]] method<T> pooled_method(std::string name, index_t kept);

/// Whether precisions differ on this machine.
[[nodiscard]] bool has_tiles();

/// Which members of the families are in the list.
struct method_options {
  std::vector<index_t> blocks = {128, 512};  ///< lengths of blocks, one row each
  std::vector<index_t> kept = {128, 512};    ///< keys that pooling leaves, one row each
};

template <class T>
[[nodiscard]] std::vector<method<T>> all_methods(const method_options& options = {});

}  // namespace attn::bench
