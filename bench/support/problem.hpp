// SPDX-License-Identifier: MIT
//
// Queries, keys and values of one comparison, read from a file or made up.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <new>
#include <string>
#include <vector>

#include <attn/score_rule.hpp>
#include <attn/view.hpp>

namespace attn::bench {

struct problem_shape {
  index_t n_batch, n_heads, n_kv_heads, n_q, n_kv, d_qk, d_v;
  bool causal = false;

  /// The last query sees the last key, as with a key/value cache.
  [[nodiscard]] causal_mask rule() const { return causal_mask::bottom_right(n_q, n_kv); }

  /// Keys that query i may attend to: [0, keys(i)).
  [[nodiscard]] index_t keys(index_t i) const {
    return causal ? std::max<index_t>(0, rule().keys(0, 0, i, n_kv).end) : n_kv;
  }

  /// Pairs of a query and a key that it may attend to, over all heads and batches.
  [[nodiscard]] double pairs() const;

  /// 2 d_qk to score a pair and 2 d_v to add its value; the exponentials are not counted.
  [[nodiscard]] double flops() const { return pairs() * 2 * static_cast<double>(d_qk + d_v); }
};

/// Memory at cache-line alignment, as tensor libraries hand it out.
template <class T>
struct cache_line_allocator {
  using value_type = T;
  static constexpr std::align_val_t alignment{64};

  cache_line_allocator() = default;
  template <class U>
  cache_line_allocator(const cache_line_allocator<U>&) noexcept {}
  [[nodiscard]] T* allocate(std::size_t n) {
    return static_cast<T*>(::operator new(n * sizeof(T), alignment));
  }
  void deallocate(T* p, std::size_t) noexcept { ::operator delete(p, alignment); }
  friend bool operator==(const cache_line_allocator&, const cache_line_allocator&) = default;
};
template <class T>
using aligned_vector = std::vector<T, cache_line_allocator<T>>;

/// Contiguous [batch, heads, length, dim] operands.
template <class T>
struct problem {
  problem_shape shape;
  aligned_vector<T> q_elements, k_elements, v_elements;

  [[nodiscard]] tensor_view<const T> q() const {
    return bhld(q_elements.data(), shape.n_batch, shape.n_heads, shape.n_q, shape.d_qk);
  }
  [[nodiscard]] tensor_view<const T> k() const {
    return bhld(k_elements.data(), shape.n_batch, shape.n_kv_heads, shape.n_kv, shape.d_qk);
  }
  [[nodiscard]] tensor_view<const T> v() const {
    return bhld(v_elements.data(), shape.n_batch, shape.n_kv_heads, shape.n_kv, shape.d_v);
  }
};

/// Normal noise, rounded to T; the same for every T but for that.
template <class T>
[[nodiscard]] problem<T> random_problem(const problem_shape& shape, std::uint64_t seed);

/// Three tensors of a .safetensors file, of rank 4 [batch, heads, length, dim], 3 or 2 (without
/// batch; without heads). `names` holds theirs, or nothing: then q, k, v or query, key, value, in
/// small letters or capitals.
///
/// **Errors** safetensors_error, or shape_error where the three do not fit.
template <class T>
[[nodiscard]] problem<T> load_problem(const std::filesystem::path& path,
                                      const std::vector<std::string>& names, bool causal);

}  // namespace attn::bench
