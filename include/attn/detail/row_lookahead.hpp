// SPDX-License-Identifier: MIT
//
// Scattered rows that will be needed soon, asked for between the products that hide the wait.
#pragma once

#include <algorithm>

#include <attn/detail/lookahead.hpp>
#include <attn/detail/scratch_carver.hpp>
#include <attn/simd/batch.hpp>
#include <attn/view.hpp>

namespace attn::detail {

/// What lookahead (lookahead.hpp) is for arrays, for a list of rows anywhere in memory. In SMYRF,
/// where every row of a cluster lies elsewhere, gathering fell from 26% of a call (4096 rows of 64)
/// to 9% and merging from 10% to 4%, some of it by operands that begin at a cache line.
class row_lookahead {
 public:
  /// Rows one after the other, a few at a time.
  struct run {
    const char* const* row = nullptr;
    const char* const* end = nullptr;
    index_t bytes = 0, per_step = 0;

    ATTN_INLINE void ask() noexcept {
      for (index_t n = per_step; n > 0 && row != end; --n, ++row) {
        for (index_t x = 0; x < bytes; x += line_bytes) __builtin_prefetch(*row + x, 0, 2);
      }
    }
  };

  /// Room for `most` rows.
  void carve(scratch_carver& memory, index_t most) noexcept {
    first_ = memory.take<const char*>(most);
    clear(0);
  }

  /// No rows; those to come have `bytes` bytes.
  void clear(index_t bytes) noexcept { next_ = end_ = first_, bytes_ = bytes; }

  /// Rows list[0, n) of an array, row_stride numbers apart. Null: nothing.
  template <class T>
  void add(const T* rows, index_t row_stride, const index_t* list, index_t n) noexcept {
    if (rows == nullptr) return;
    for (index_t i = 0; i < n; ++i) {
      *end_++ = reinterpret_cast<const char*>(rows + list[i] * row_stride);
    }
  }

  void spread_over(index_t n_groups) noexcept {
    per_group_ = n_groups > 0 ? (end_ - next_ + n_groups - 1) / n_groups : 0;
  }

  /// The share of one group of keys, for `steps` calls of ask().
  [[nodiscard]] run next(index_t steps) noexcept {
    const index_t n = std::min<index_t>(per_group_, end_ - next_);
    if (n <= 0 || steps <= 0) return {};
    const run rows{next_, next_ + n, bytes_, (n + steps - 1) / steps};
    next_ += n;
    return rows;
  }

 private:
  const char** first_ = nullptr;
  const char** end_ = nullptr;
  const char** next_ = nullptr;
  index_t bytes_ = 0, per_group_ = 0;
};

}  // namespace attn::detail
