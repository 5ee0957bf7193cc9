// SPDX-License-Identifier: MIT
//
// One tile of queries in the backward pass: its operands and its dQ.
#pragma once

#include <algorithm>

#include <attn/detail/packing.hpp>
#include <attn/detail/tile_ranges.hpp>

namespace attn::detail {

[[nodiscard]] constexpr index_t round_up(index_t n, index_t multiple) noexcept {
  return (n + multiple - 1) / multiple * multiple;
}

/// Whether no element is inf or NaN.
template <class T, class Arch>
[[nodiscard]] bool all_finite(const T* x, index_t ld, index_t rows, index_t columns) noexcept {
  using B = simd::batch<T, Arch>;
  constexpr int W = simd::width<T, Arch>;
  B sum(T(0));
  T tail(0);
  for (index_t r = 0; r < rows; ++r, x += ld) {
    index_t c = 0;
    for (; c + W <= columns; c += W) {
      sum = simd::multiply_add(simd::load_unaligned<T, Arch>(x + c), B(T(0)), sum);
    }
    for (; c < columns; ++c) tail += x[c] * T(0);
  }
  return xsimd::all(sum == B(T(0))) && tail == T(0);
}

template <class T, class Arch>
[[nodiscard]] T dot_product(const T* x, const T* y, index_t n) noexcept {
  using B = simd::batch<T, Arch>;
  constexpr int W = simd::width<T, Arch>;
  B sum(T(0));
  index_t c = 0;
  for (; c + W <= n; c += W) {
    sum = simd::multiply_add(simd::load_unaligned<T, Arch>(x + c),
                             simd::load_unaligned<T, Arch>(y + c), sum);
  }
  T total = simd::sum(sum);
  for (; c < n; ++c) total += x[c] * y[c];
  return total;
}

/// Up to 3 vectors of queries, in scratch memory. Transposed for products over keys, row by row for
/// products over queries; rows are ld = d rounded up to whole vectors apart.
template <class T, class Arch>
struct backward_tile {
  index_t first_row, n_rows;
  T* qt;       // [d_qk][QS]  scale · q
  T* dot;      // [d_v ][QS]  scale · d_out
  T* dqt;      // [d_qk][QS]  d_q
  T* q;        // [n_rows][ld_qk]
  T* d_out;    // [n_rows][ld_v]
  T* neg_lse;  // [QS]  −lse
  T* neg_d;    // [QS]  −scale · D
  T *lo, *hi;  // [QS]  allowed keys of each lane, from the start of the block
  tile_ranges<T, Arch> ranges;
  bool rows_checked, rows_finite;  // q and d_out hold neither inf nor NaN
  bool has_d_q;                    // dqt has been written

  static constexpr int W = tile_size<T, Arch>::width, QS = tile_size<T, Arch>::max_rows;

  /// All but the lse and the ranges. `staging` [QS][d_v].
  void load(const row_source<T>& q_rows, const row_source<T>& d_out_rows,
            const row_source<T>& out_rows, T scale, index_t d_qk, index_t d_v,
            T* staging) noexcept {
    const index_t ld_qk = round_up(d_qk, W), ld_v = round_up(d_v, W);
    // 1. Rows as they are, and transposed and scaled.
    read(q_rows, d_qk, q, ld_qk);
    read(d_out_rows, d_v, d_out, ld_v);
    transpose_in<T, Arch>(q, ld_qk, n_rows, d_qk, scale, qt, QS);
    transpose_in<T, Arch>(d_out, ld_v, n_rows, d_v, scale, dot, QS);
    // 2. D.
    const T* out = staging;
    index_t ld_out = d_v;
    if (out_rows.direct != nullptr)
      out = out_rows.direct + first_row * out_rows.row_stride, ld_out = out_rows.row_stride;
    else
      out_rows.read(first_row, n_rows, d_v, staging, d_v);
    for (index_t r = 0; r < n_rows; ++r) {
      neg_d[r] = -scale * dot_product<T, Arch>(d_out + r * ld_v, out + r * ld_out, d_v);
    }
    // 3. Padding lanes and empty state.
    std::fill(neg_d + n_rows, neg_d + QS, T(0));
    std::fill(neg_lse + n_rows, neg_lse + QS, T(0));
    rows_checked = false;
    has_d_q = false;
  }

  /// Sets rows_finite.
  void look_for_non_finite(index_t d_qk, index_t d_v) noexcept {
    if (rows_checked) return;
    rows_finite = all_finite<T, Arch>(q, round_up(d_qk, W), n_rows, d_qk) &&
                  all_finite<T, Arch>(d_out, round_up(d_v, W), n_rows, d_v);
    rows_checked = true;
  }

  /// `one` [QS] of ones, `staging` [QS][d_qk].
  void store_d_q(const row_sink<T>& rows, index_t d_qk, const T* one, T* staging) noexcept {
    if (!has_d_q) std::fill_n(dqt, d_qk * QS, T(0));
    if (rows.direct != nullptr) {
      transpose_out<T, Arch>(dqt, QS, n_rows, d_qk, one, rows.direct + first_row * rows.row_stride,
                             rows.row_stride);
    } else {
      transpose_out<T, Arch>(dqt, QS, n_rows, d_qk, one, staging, d_qk);
      rows.write(staging, d_qk, first_row, n_rows, d_qk);
    }
  }

 private:
  // Rows whose columns past the last are 0.
  void read(const row_source<T>& rows, index_t columns, T* dst, index_t ld) const noexcept {
    rows.read(first_row, n_rows, columns, dst, ld);
    for (index_t r = 0; r < n_rows && columns < ld; ++r) {
      std::fill(dst + r * ld + columns, dst + (r + 1) * ld, T(0));
    }
  }
};

}  // namespace attn::detail
