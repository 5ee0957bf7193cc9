// SPDX-License-Identifier: MIT
//
// Merging rounds: a folded tile of queries into the running results of its rows.
#pragma once

#include <algorithm>
#include <array>
#include <limits>

#include <attn/detail/packing.hpp>
#include <attn/detail/query_tile.hpp>
#include <attn/detail/smyrf_gather.hpp>
#include <attn/simd/math.hpp>
#include <attn/view.hpp>

namespace attn::detail {

/// The running result of one query head: rows of T and their lse.
template <class T>
struct smyrf_result {
  T* out;
  index_t stride;
  T* lse;  // [n_q]
};

/// Flags of the lanes of a tile.
template <class T, class Arch>
using tile_lanes = std::array<bool, static_cast<std::size_t>(tile_size<T, Arch>::max_rows)>;

/// The state of a tile into rows list[0, n_rows) of a result; with `overwrite` whatever these hold.
///
///     lse = ln(e^lse_row + e^lse_tile)
///     out = e^(lse_row − lse) out_row + e^(lse_tile − lse) o/l
///
/// Only lanes that are marked as `which`; all if `marked` is null. Uses tile.l_before and `rows`,
/// [max_rows][d_v], as scratch.
template <class T, class Arch>
void smyrf_merge(const query_tile<T>& tile, index_t d_v, const index_t* list, bool overwrite,
                 const tile_lanes<T, Arch>* marked, bool which, T* rows,
                 const smyrf_result<T>& result) noexcept {
  using B = simd::batch<T, Arch>;
  constexpr int W = simd::width<T, Arch>;
  constexpr T infinity = std::numeric_limits<T>::infinity();
  constexpr auto most = static_cast<std::size_t>(tile_size<T, Arch>::max_rows);
  const index_t qs = tile.n_vectors * W, n_rows = tile.n_rows;
  if (!tile.has_output) std::fill_n(tile.ot, d_v * qs, T(0));
  // 1. Factors of both sides, and the new lse.
  alignas(64) std::array<T, most> row_lse, lse, row_factor;
  T* tile_factor = tile.l_before;
  for (index_t r = 0; r < qs; ++r) {
    const bool has_row = r < n_rows && !overwrite;
    row_lse[static_cast<std::size_t>(r)] = has_row ? result.lse[list[r]] : -infinity;
  }
  for (index_t j = 0; j < qs; j += W) {
    const B l = simd::load<T, Arch>(tile.l + j), m = -simd::load<T, Arch>(tile.negm + j);
    const auto empty = l == B(T(0));
    const B a = simd::load<T, Arch>(row_lse.data() + j);
    const B t = xsimd::select(empty, B(-infinity), m + simd::log<T, Arch>(l));
    B top = xsimd::select(a > t, a, t);  // a NaN on either side reaches the sum below
    top = xsimd::select(top == B(-infinity), B(T(0)), top);
    const B share_a = simd::exp<T, Arch>(a - top), share_t = simd::exp<T, Arch>(t - top);
    const B sum = share_a + share_t;
    const auto nothing = sum == B(T(0));
    const B safe = xsimd::select(nothing, B(T(1)), sum);
    (share_a / safe).store_aligned(row_factor.data() + j);
    xsimd::select(empty, B(T(0)), share_t / (safe * l)).store_aligned(tile_factor + j);
    xsimd::select(nothing, B(-infinity), top + simd::log<T, Arch>(safe))
        .store_aligned(lse.data() + j);
  }
  // 2. Rows.
  transpose_out<T, Arch>(tile.ot, qs, n_rows, d_v, tile_factor, rows, d_v);
  for (index_t r = 0; r < n_rows; ++r) {
    const auto lane = static_cast<std::size_t>(r);
    if (marked != nullptr && (*marked)[lane] != which) continue;
    T* out = result.out + list[r] * result.stride;
    const T* add = rows + r * d_v;
    result.lse[list[r]] = lse[lane];
    if (overwrite)
      copy_row<T, Arch>(add, d_v, out);
    else
      add_to_row<T, Arch>(out, row_factor[lane], add, d_v);
  }
}

}  // namespace attn::detail
