// SPDX-License-Identifier: MIT
#pragma once

#include <span>

#include <attn/detail/head_access.hpp>
#include <attn/view.hpp>

namespace attn::detail {

/// A dense attention call behind its checks. Storage types stay out of the kernel's type.
template <class T>
struct dense_problem {
  index_t n_batch, n_heads, n_heads_kv, n_q, n_kv, d_qk, d_v;
  T scale;
  T softcap;
  std::span<const float> sinks;
  head_source<T> q, k, v;
  head_sink<T> out;
  tensor_view<T> lse;  // data null: not wanted

  [[nodiscard]] index_t kv_head(index_t h) const noexcept { return h / (n_heads / n_heads_kv); }
};

}  // namespace attn::detail
