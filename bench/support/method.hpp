// SPDX-License-Identifier: MIT
//
// What attn_compare compares: one entry per method.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include <Eigen/Core>

#include <attn/dense_options.hpp>
#include <attn/smyrf_options.hpp>
#include <attn/view.hpp>

#include "support/oracle.hpp"
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

  /// The share of the attention on the keys that their query sees; none where what it sees are not
  /// keys of the problem.
  std::function<std::optional<double>(const problem<T>&, const oracle&)> captured =
      [](const problem<T>&, const oracle&) { return 1.0; };

  /// Why this shape is left out; empty where it is not.
  std::function<std::string(const problem_shape&)> obstacle = [](const problem_shape&) {
    return std::string();
  };
};

/// Rounds and keys per cluster, as in the paper's tables.
struct smyrf_size {
  index_t rounds, keys;
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
template <class T>
[[nodiscard]] method<T> smyrf_method(std::string name, std::string_view summary,
                                     const smyrf_options& how, const smyrf_size& size);

/// oracle::captured of attend(out, lse); the output is thrown away.
template <class T, class Attend>
[[nodiscard]] double captured_by(const problem<T>& p, const oracle& reference,
                                 const Attend& attend) {
  using L = arithmetic_t<T>;
  const problem_shape& s = p.shape;
  const auto rows = static_cast<std::size_t>(s.n_batch * s.n_heads * s.n_q);
  std::vector<T> out(rows * static_cast<std::size_t>(s.d_v));
  std::vector<L> lse(rows);
  const auto log_sums = bhld(lse.data(), s.n_batch, s.n_heads, s.n_q, 1);
  attend(bhld(out.data(), s.n_batch, s.n_heads, s.n_q, s.d_v), log_sums);
  return reference.captured<L>(log_sums);
}

/// Whether precisions differ on this machine.
[[nodiscard]] bool has_tiles();

/// Which members of the families are in the list.
struct method_options {
  std::vector<index_t> blocks = {128, 512};  ///< lengths of blocks, one row each
  std::vector<index_t> kept = {128, 512};    ///< keys that pooling leaves, one row each
  /// Of SMYRF, four rows each: a query meets up to rounds · keys.
  std::vector<smyrf_size> smyrf = {{4, 32}, {4, 128}};
};

template <class T>
[[nodiscard]] std::vector<method<T>> all_methods(const method_options& options = {});

}  // namespace attn::bench
