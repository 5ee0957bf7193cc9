// SPDX-License-Identifier: MIT
//
// view() of Eigen objects: no copy, any storage order.
#pragma once

#include <array>
#include <type_traits>
#include <utility>

#include <Eigen/Core>

#include <attn/view.hpp>

namespace attn {

namespace detail {

// Dense expressions with memory behind them: Matrix, Array, Map, Block, Ref, Transpose of these.
template <class X>
concept eigen_matrix = std::is_base_of_v<Eigen::DenseBase<X>, X> && requires(const X& x) {
  {x.data()};
  {x.rowStride()};
  {x.colStride()};
} &&(static_cast<unsigned>(X::Flags) & Eigen::DirectAccessBit) != 0;

// Eigen::Tensor, TensorFixedSize and TensorMap by what they offer, so that the unsupported Tensor
// headers (2 s of compile time) are only included by those who use them.
template <class X>
concept eigen_tensor = requires(const X& x) {
  {x.dimension(0)};
  {x.data()};
  {X::NumDimensions};
  {X::Layout};
}
&&!eigen_matrix<X>;

// dimension() takes std::size_t in Eigen::Tensor and a signed index in TensorMap.
struct axis_number {
  int value;
  template <class I>
  constexpr operator I() const noexcept {
    return static_cast<I>(value);
  }
};

}  // namespace detail

/// An Eigen Matrix, Array, Map, Block, Ref or transpose of one, of either storage order, as
/// [1, 1, rows, cols]. A column vector is [1, 1, n, 1].
///
/// The constness of the view is that of the object: pass an lvalue that is not const, or a
/// temporary Map or Block, to write through it. The view must not outlive the memory.
template <class X>
requires detail::eigen_matrix<std::remove_cvref_t<X>>
[[nodiscard]] auto view(X&& x) noexcept {
  using element = std::remove_reference_t<decltype(*x.data())>;
  const index_t rows = x.rows(), cols = x.cols();
  const index_t row_stride = x.rowStride(), col_stride = x.colStride();
  return tensor_view<element>(x.data(), {1, 1, rows, cols},
                              {rows * row_stride, rows * row_stride, row_stride, col_stride});
}

/// An Eigen::Tensor, TensorFixedSize or TensorMap of rank 2, 3 or 4 and either storage order.
///
/// Ranks below 4 are aligned to the right: [length, dim] and [heads, length, dim].
template <class X>
requires detail::eigen_tensor<std::remove_cvref_t<X>>
[[nodiscard]] auto view(X&& x) noexcept {
  using tensor = std::remove_cvref_t<X>;
  using element = std::remove_reference_t<decltype(*x.data())>;
  constexpr int rank = static_cast<int>(tensor::NumDimensions);
  static_assert(rank >= 2 && rank <= 4, "attn::view takes Eigen tensors of rank 2, 3 or 4");
  constexpr bool row_major = static_cast<int>(tensor::Layout) == static_cast<int>(Eigen::RowMajor);

  std::array<index_t, 4> extents{1, 1, 1, 1};
  std::array<index_t, 4> strides{0, 0, 0, 0};
  index_t stride = 1;
  for (int step = 0; step < rank; ++step) {
    const int axis = row_major ? rank - 1 - step : step;
    const auto r = static_cast<std::size_t>(4 - rank + axis);
    extents[r] = static_cast<index_t>(x.dimension(detail::axis_number{axis}));
    strides[r] = stride;
    stride *= extents[r];
  }
  for (int r = 0; r < 4 - rank; ++r) strides[static_cast<std::size_t>(r)] = stride;
  return tensor_view<element>(x.data(), extents, strides);
}

/// Whatever a kernel takes as an operand: `view(x)` gives a tensor_view.
template <class X>
concept viewable = requires(X&& x) {
  {view(std::forward<X>(x)).data_handle()};
  {view(std::forward<X>(x)).extents()};
};

/// The element type that `view(x)` shows, const or not.
template <viewable X>
using element_t = typename decltype(view(std::declval<X>()))::element_type;

}  // namespace attn
