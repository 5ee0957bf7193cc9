// SPDX-License-Identifier: MIT
#pragma once

#include <span>

#include <attn/detail/packing.hpp>
#include <attn/view.hpp>

namespace attn::detail {

/// A dense attention call behind its checks. One head is described by functions of (b, h), so that
/// storage types stay out of the kernel's type.
template <class T>
struct dense_problem {
  index_t n_batch, n_heads, n_heads_kv, n_q, n_kv, d_qk, d_v;
  T scale;
  T softcap;
  std::span<const float> sinks;
  // Operand views and their readers, type-erased.
  const void *q, *k, *v, *out;
  row_source<T> (*q_rows)(const void*, index_t b, index_t h) noexcept;
  row_source<T> (*k_rows)(const void*, index_t b, index_t h) noexcept;
  row_source<T> (*v_rows)(const void*, index_t b, index_t h) noexcept;
  row_sink<T> (*out_rows)(const void*, index_t b, index_t h) noexcept;
  tensor_view<T> lse;  // data null: not wanted

  [[nodiscard]] index_t kv_head(index_t h) const noexcept { return h / (n_heads / n_heads_kv); }
};

}  // namespace attn::detail
