// SPDX-License-Identifier: MIT
#pragma once

#include <attn/detail/head_access.hpp>
#include <attn/detail/smyrf_plan.hpp>
#include <attn/view.hpp>

namespace attn::detail {

/// A forward call behind its checks.
template <class T>
struct smyrf_problem {
  const smyrf_plan* plan;
  index_t n_batch, n_heads, n_heads_kv, n_q, n_kv, d_qk, d_v;
  T scale, softcap;
  bool removes_duplicates;  // and there are some to remove
  bool attend_self;
  bool far_field;
  head_source<T> q, k, v;
  head_sink<T> out;
  tensor_view<T> lse;  // data null: not wanted
};

/// Calls body(first, rows, vectors) for tiles of n queries: 3 vectors each, but 2 + 2 rather than
/// 3 + 1 at the end.
template <int Width, class Body>
void smyrf_for_tiles(index_t n, const Body& body) {
  for (index_t i = 0; i < n;) {
    const index_t vectors = (n - i + Width - 1) / Width;
    const int nr = vectors == 4 ? 2 : static_cast<int>(vectors < 3 ? vectors : 3);
    const index_t room = index_t{nr} * Width, rows = room < n - i ? room : n - i;
    body(i, rows, nr);
    i += rows;
  }
}

}  // namespace attn::detail
