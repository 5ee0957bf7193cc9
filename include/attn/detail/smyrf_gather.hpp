// SPDX-License-Identifier: MIT
//
// Rows of a list of positions.
#pragma once

#include <attn/detail/packing.hpp>
#include <attn/simd/batch.hpp>
#include <attn/view.hpp>

namespace attn::detail {

/// out = row
template <class T, class Arch>
ATTN_INLINE void copy_row(const T* row, index_t d, T* out) noexcept {
  constexpr index_t W = simd::width<T, Arch>;
  index_t c = 0;
  for (; c + W <= d; c += W) simd::load_unaligned<T, Arch>(row + c).store_unaligned(out + c);
  for (; c < d; ++c) out[c] = row[c];
}

/// Rows of positions list[0, n) to dense rows `ld` apart. (Asking for rows that come later in the
/// list made it slower: 3.0 against 2.6 ns a row of 256 bytes from L2, 8.4 against 7.9 from L3.)
template <class T, class Arch>
void gather_rows(const row_source<T>& source, const index_t* list, index_t n, index_t d, T* to,
                 index_t ld) noexcept {
  for (index_t i = 0; i < n; ++i) {
    if (source.direct != nullptr)
      copy_row<T, Arch>(source.direct + list[i] * source.row_stride, d, to + i * ld);
    else
      source.read(list[i], 1, d, to + i * ld, ld);
  }
}

/// row = factor · row + add
template <class T, class Arch>
ATTN_INLINE void add_to_row(T* row, T factor, const T* add, index_t d) noexcept {
  using B = simd::batch<T, Arch>;
  constexpr index_t W = simd::width<T, Arch>;
  const B f(factor);
  index_t c = 0;
  for (; c + W <= d; c += W) {
    simd::multiply_add(f, simd::load_unaligned<T, Arch>(row + c),
                       simd::load_unaligned<T, Arch>(add + c))
        .store_unaligned(row + c);
  }
  for (; c < d; ++c) row[c] = factor * row[c] + add[c];
}

}  // namespace attn::detail
