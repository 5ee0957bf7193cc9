// SPDX-License-Identifier: MIT
//
// The keys and values of one head, block by block: as they lie, or packed.
#pragma once

#include <algorithm>
#include <cstddef>

#include <attn/detail/dense_problem.hpp>
#include <attn/detail/lookahead.hpp>
#include <attn/detail/packing.hpp>
#include <attn/detail/query_tile.hpp>
#include <attn/detail/scratch_carver.hpp>
#include <attn/score_rule.hpp>

namespace attn::detail {

template <class T>
class key_value_head {
 public:
  explicit key_value_head(const dense_problem<T>& problem) noexcept : c_(problem) {}

  /// Rows that can't be read as they lie are packed: block by block where one pass over the keys is
  /// all there is, else once per head (2 n_kv d numbers; at [B, L, H, D] 81-84% of the peak instead
  /// of 64-75% in place and 74% packed per item). Strided rows only for `many_queries`.
  void carve(scratch_carver& memory, bool one_pass, bool many_queries) noexcept {
    const row_source<T> k = c_.k(0, 0), v = c_.v(0, 0);
    packed_rows_ = one_pass ? std::min<index_t>(c_.n_kv, key_block) : c_.n_kv;
    pack_k_ = k.direct == nullptr || (k.row_stride != c_.d_qk && many_queries);
    pack_v_ = v.direct == nullptr || (v.row_stride != c_.d_v && many_queries);
    if (pack_k_) packed_k_ = memory.take<T>(packed_rows_ * c_.d_qk);
    if (pack_v_) packed_v_ = memory.take<T>(packed_rows_ * c_.d_v);
  }

  void enter(index_t b, index_t kv_head) noexcept {
    k_ = c_.k(b, kv_head);
    v_ = c_.v(b, kv_head);
    packed_ = {0, 0};
  }

  /// Keys [k0, k0 + key_block). Rows from `end` on are not read here.
  [[nodiscard]] key_value_block<T> block(index_t k0, index_t end) noexcept {
    const index_t n_keys = std::min<index_t>(key_block, c_.n_kv - k0);
    if (pack_k_ || pack_v_) pack(k0, std::min(k0 + n_keys, end));
    const index_t at = packed_rows_ == c_.n_kv ? k0 : 0;
    key_value_block<T> block{};
    block.n_keys = n_keys;
    if (pack_k_)
      block.k = packed_k_ + at * c_.d_qk, block.ldk = c_.d_qk;
    else
      block.k = k_.direct + k0 * k_.row_stride, block.ldk = k_.row_stride;
    if (pack_v_)
      block.v = packed_v_ + at * c_.d_v, block.ldv = c_.d_v;
    else
      block.v = v_.direct + k0 * v_.row_stride, block.ldv = v_.row_stride;
    return block;
  }

  /// Asks for the keys [k0, end) of this head, at most one block.
  void expect(index_t k0, index_t end, lookahead& ahead) const noexcept {
    const index_t n = std::min<index_t>(key_block, end - k0);
    const bool ready = packed_rows_ == c_.n_kv && k0 + n <= packed_.end;
    expect_rows(k_, pack_k_ && ready ? packed_k_ : nullptr, c_.d_qk, k0, n, ahead);
    expect_rows(v_, pack_v_ && ready ? packed_v_ : nullptr, c_.d_v, k0, n, ahead);
  }

  /// Asks for the first block of another head.
  void expect_head(index_t b, index_t kv_head, lookahead& ahead) const noexcept {
    const index_t n = std::min<index_t>(key_block, c_.n_kv);
    expect_rows(c_.k(b, kv_head), nullptr, c_.d_qk, 0, n, ahead);
    expect_rows(c_.v(b, kv_head), nullptr, c_.d_v, 0, n, ahead);
  }

 private:
  static void expect_rows(const row_source<T>& rows, const T* packed, index_t d, index_t k0,
                          index_t n, lookahead& ahead) noexcept {
    if (packed != nullptr)
      ahead.add(packed + k0 * d, d, d, n);
    else if (rows.direct != nullptr)
      ahead.add(rows.direct + k0 * rows.row_stride, d, rows.row_stride, n);
  }

  // Rows [first, last) of K and V into the packed head (or block), as far as they are not there.
  void pack(index_t first, index_t last) noexcept {
    const bool whole_head = packed_rows_ == c_.n_kv;
    if (first < packed_.begin || first > packed_.end || (!whole_head && first != packed_.begin)) {
      packed_ = {first, first};
    }
    if (last <= packed_.end) return;
    const index_t from = packed_.end, at = whole_head ? from : from - first;
    if (pack_k_) k_.read(from, last - from, c_.d_qk, packed_k_ + at * c_.d_qk, c_.d_qk);
    if (pack_v_) v_.read(from, last - from, c_.d_v, packed_v_ + at * c_.d_v, c_.d_v);
    packed_.end = last;
  }

  const dense_problem<T>& c_;
  row_source<T> k_{}, v_{};
  bool pack_k_ = false, pack_v_ = false;
  index_t packed_rows_ = 0;
  key_range packed_{0, 0};
  T *packed_k_ = nullptr, *packed_v_ = nullptr;
};

}  // namespace attn::detail
