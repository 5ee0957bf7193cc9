// SPDX-License-Identifier: MIT
//
// Memory that will be needed soon, asked for between the products that hide the wait.
#pragma once

#include <algorithm>
#include <array>

#include <attn/simd/batch.hpp>
#include <attn/view.hpp>

namespace attn::detail {

inline constexpr index_t line_bytes = 64;

/// Consecutive lines of memory, asked for one by one.
struct line_run {
  const char* at = reinterpret_cast<const char*>(&line_bytes);  // a line that does no harm
  const char* last = at;

  ATTN_INLINE void ask() noexcept {
    __builtin_prefetch(at, 0, 2);
    at = at < last ? at + line_bytes : last;
  }
};

/// Rows of a few arrays to bring into L2 while groups of keys are computed.
///
/// A burst of prefetches holds up the loads behind it: it cost 2 to 3 points at the start of a
/// tile, and 2 at the start of each group of keys. So a group asks line by line, inside the
/// product; only what does not fit there comes in a burst. That happens where heads are short,
/// whose operands would otherwise arrive from L3 one miss after the other: 12 to 14% of a call at
/// n = 128 with 96 heads of d = 64, 17 to 26% of a causal one.
class lookahead {
 public:
  void clear() noexcept { *this = {}; }

  /// Rows of n_columns numbers, row_stride numbers apart. Null: nothing.
  template <class T>
  void add(const T* rows, index_t n_columns, index_t row_stride, index_t n_rows) noexcept {
    if (rows == nullptr || n_columns <= 0 || n_rows <= 0) return;
    if (row_stride == n_columns) n_columns *= n_rows, n_rows = 1;
    constexpr auto size = static_cast<index_t>(sizeof(T));
    arrays_[n_arrays_++] = {reinterpret_cast<const char*>(rows), n_columns * size,
                            row_stride * size, n_rows};
    n_lines_ += (n_columns * size + line_bytes - 1) / line_bytes * n_rows;
  }

  void spread_over(index_t n_groups) noexcept {
    per_group_ = n_groups > 0 ? (n_lines_ + n_groups - 1) / n_groups : 0;
  }

  /// The share of one group: asks for what exceeds `most` lines and returns the rest.
  [[nodiscard]] ATTN_INLINE line_run next(index_t most) noexcept {
    // Nearly always; the rest out of line, which took 1.4% of a causal call with AVX2.
    const index_t n = per_group_, bytes = n * line_bytes;
    if (n > 0 && n <= most && end_ - at_ >= bytes) {
      const line_run run{at_, at_ + bytes - line_bytes};
      at_ += bytes;
      return run;
    }
    return next_of_several(most);
  }

  /// What no group has asked for.
  void ask_rest() noexcept { ask(n_lines_); }

 private:
  struct array_of_rows {
    const char* row;
    index_t row_bytes, stride, n_rows;
  };

  __attribute__((noinline)) line_run next_of_several(index_t most) noexcept {
    ask(per_group_ - most);
    const index_t n = std::min(most, per_group_);
    if (n <= 0 || (at_ >= end_ && !next_row())) return {};
    const line_run run{at_, std::min(at_ + (n - 1) * line_bytes, end_ - 1)};
    at_ = run.last + line_bytes;
    return run;
  }

  void ask(index_t n) noexcept {
    for (; n > 0 && (at_ < end_ || next_row()); --n, at_ += line_bytes) {
      __builtin_prefetch(at_, 0, 2);
    }
  }

  bool next_row() noexcept {
    while (array_ < n_arrays_ && arrays_[array_].n_rows == 0) ++array_;
    if (array_ == n_arrays_) return false;
    array_of_rows& a = arrays_[array_];
    at_ = a.row, end_ = a.row + a.row_bytes;
    a.row += a.stride, --a.n_rows;
    return true;
  }

  std::array<array_of_rows, 4> arrays_{};
  std::size_t n_arrays_ = 0, array_ = 0;
  index_t n_lines_ = 0, per_group_ = 0;
  const char *at_ = nullptr, *end_ = nullptr;  // the current row
};

}  // namespace attn::detail
