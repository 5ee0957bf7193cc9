// SPDX-License-Identifier: MIT
//
// The projections around the heads: rows of any view times a weight matrix, by Eigen's GEMM.
#pragma once

#include <algorithm>
#include <span>

#include <Eigen/Core>

#include <attn/context.hpp>
#include <attn/detail/packing.hpp>
#include <attn/view.hpp>

namespace attn::detail {

// One GEMM call multiplies [rows][depth] by [depth][columns] of this size. Eigen packs both into
// buffers on the stack as long as each is at most 128 KB, and calls malloc above that; against one
// call for everything these tiles run at 0.9 to 1.3 times the speed (width 512).
template <class T>
struct projection_tile {
  static constexpr index_t rows = 128;
  static constexpr index_t depth = 128;
  static constexpr index_t columns = 128 * 1024 / (depth * static_cast<index_t>(sizeof(T)));
};

template <class T, int Order>
using matrix_map =
    Eigen::Map<Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Order>, 0, Eigen::OuterStride<>>;
template <class T, int Order>
using const_matrix_map = Eigen::Map<const Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Order>,
                                    0, Eigen::OuterStride<>>;

// W [in, out] and b [out] or nothing.
template <class T>
struct projection {
  tensor_view<const T> w;
  std::span<const T> b;

  [[nodiscard]] index_t n_in() const noexcept { return w.extent(2); }
  [[nodiscard]] index_t n_out() const noexcept { return w.extent(3); }
  [[nodiscard]] bool is_row_major() const noexcept { return w.stride(3) == 1 || n_out() == 1; }
};

// c [rows][n_out] = a [rows][n_in] W + b, with W in one of Eigen's two orders.
template <class Arch, int Order, class T>
void multiply(const T* a, index_t rows, const projection<T>& p, T* c) {
  using tile = projection_tile<T>;
  const const_matrix_map<T, Eigen::RowMajor> A(a, rows, p.n_in(), Eigen::OuterStride<>(p.n_in()));
  const const_matrix_map<T, Order> W(
      p.w.data_handle(), p.n_in(), p.n_out(),
      Eigen::OuterStride<>(Order == Eigen::RowMajor ? p.w.stride(2) : p.w.stride(3)));
  matrix_map<T, Eigen::RowMajor> C(c, rows, p.n_out(), Eigen::OuterStride<>(p.n_out()));
  for (index_t column = 0; column < p.n_out(); column += tile::columns) {
    const index_t n_columns = std::min(tile::columns, p.n_out() - column);
    auto block = C.middleCols(column, n_columns);
    for (index_t r = 0; r < rows; ++r) {
      if (p.b.empty())
        std::fill_n(&block(r, 0), n_columns, T(0));
      else
        std::copy_n(p.b.data() + column, n_columns, &block(r, 0));
    }
    for (index_t d = 0; d < p.n_in(); d += tile::depth) {
      const index_t depth = std::min(tile::depth, p.n_in() - d);
      block.noalias() += A.middleCols(d, depth) * W.block(d, column, depth, n_columns);
    }
  }
}

template <class Arch, class T>
void project(const T* a, index_t rows, const projection<T>& p, T* c) {
  if (p.is_row_major())
    multiply<Arch, Eigen::RowMajor>(a, rows, p, c);
  else
    multiply<Arch, Eigen::ColMajor>(a, rows, p, c);
}

// Sequences [S, n, width] as S·n rows. Calls f(sequence b, h, first row i, rows, rows done before).
template <class X, class F>
void for_each_stretch(const X& x, index_t first, index_t last, const F& f) {
  const index_t n_heads = x.extent(1), n = x.extent(2);
  for (index_t row = first; row < last;) {
    const index_t sequence = row / n, i = row % n, rows = std::min(last - row, n - i);
    f(sequence / n_heads, sequence % n_heads, i, rows, row - first);
    row += rows;
  }
}

// c_p [S n][n_out] = x [S, n, n_in] W_p + b_p for each projection p: a tile of x is read once.
template <class Arch, class T, class X>
void project_in(const tensor_view<X>& x, std::span<const projection<T>> projections,
                std::span<T* const> c, context& ctx) {
  const index_t n_rows = x.extent(0) * x.extent(1) * x.extent(2), n_in = x.extent(3);
  const auto bytes =
      static_cast<std::size_t>(std::min(n_rows, projection_tile<T>::rows) * n_in) * sizeof(T);
  ctx.run(n_rows, projection_tile<T>::rows, bytes, [&](std::byte* scratch, work_queue& queue) {
    T* a = reinterpret_cast<T*>(scratch);
    for (index_t first, last; queue.next(first, last);) {
      for_each_stretch(
          x, first, last, [&](index_t b, index_t h, index_t i, index_t rows, index_t before) {
            make_row_source<T, Arch>(x, b, h).read(i, rows, n_in, a + before * n_in, n_in);
          });
      for (std::size_t p = 0; p < projections.size(); ++p) {
        project<Arch>(a, last - first, projections[p], c[p] + first * projections[p].n_out());
      }
    }
  });
}

// y [S, n, n_out] = a [S n][n_in] W + b.
template <class Arch, class T, class Y>
void project_out(const T* a, const projection<T>& p, const tensor_view<Y>& y, context& ctx) {
  const index_t n_rows = y.extent(0) * y.extent(1) * y.extent(2), n_out = p.n_out();
  const auto bytes =
      static_cast<std::size_t>(std::min(n_rows, projection_tile<T>::rows) * n_out) * sizeof(T);
  ctx.run(n_rows, projection_tile<T>::rows, bytes, [&](std::byte* scratch, work_queue& queue) {
    T* c = reinterpret_cast<T*>(scratch);
    for (index_t first, last; queue.next(first, last);) {
      project<Arch>(a + first * p.n_in(), last - first, p, c);
      for_each_stretch(
          y, first, last, [&](index_t b, index_t h, index_t i, index_t rows, index_t before) {
            make_row_sink<T, Arch>(y, b, h).write(c + before * n_out, n_out, i, rows, n_out);
          });
    }
  });
}

}  // namespace attn::detail
