// SPDX-License-Identifier: MIT
//
// tensor_view: what every kernel reads and writes.
#pragma once

#include <array>
#include <cstddef>
#include <type_traits>

#include <attn/error.hpp>

namespace attn {

/// Every extent, stride and index. Never 32 bits: a cache of keys easily passes 2^31 elements.
using index_t = std::ptrdiff_t;

/// A non-owning view of a rank-4 tensor [batch, heads, length, dim] with any strides.
///
/// Trivially copyable; constness of the elements is in `T` (`tensor_view<const float>`).
/// Strides count elements. Stride 0 broadcasts (inputs only); negative strides are refused by the
/// kernels. A stride of 1 along dim is the fast case, others are packed tile by tile.
///
/// **Example** examples/views.cpp
template <class T>
class tensor_view {
 public:
  using element_type = T;
  using value_type = std::remove_cv_t<T>;

  constexpr tensor_view() noexcept = default;

  /// Contiguous in the order [batch, heads, length, dim].
  constexpr tensor_view(T* data, index_t batch, index_t heads, index_t length, index_t dim) noexcept
      : tensor_view(data, {batch, heads, length, dim},
                    {wrapping_product(heads, wrapping_product(length, dim)),
                     wrapping_product(length, dim), dim, 1}) {}

  constexpr tensor_view(T* data, std::array<index_t, 4> extents,
                        std::array<index_t, 4> strides) noexcept
      : data_(data), extents_(extents), strides_(strides) {}

  /// A view of mutable elements is also one of const elements.
  template <class U>
  requires(std::is_same_v<const U, T>) constexpr tensor_view(const tensor_view<U>& other) noexcept
      : data_(other.data_handle()), extents_(other.extents()), strides_(other.strides()) {}

  [[nodiscard]] constexpr index_t extent(int r) const noexcept {
    return extents_[static_cast<std::size_t>(r)];
  }
  [[nodiscard]] constexpr index_t stride(int r) const noexcept {
    return strides_[static_cast<std::size_t>(r)];
  }
  [[nodiscard]] constexpr const std::array<index_t, 4>& extents() const noexcept {
    return extents_;
  }
  [[nodiscard]] constexpr const std::array<index_t, 4>& strides() const noexcept {
    return strides_;
  }
  [[nodiscard]] constexpr T* data_handle() const noexcept { return data_; }

  /// Number of elements seen (a broadcast element counts each time).
  [[nodiscard]] constexpr index_t size() const noexcept {
    return extents_[0] * extents_[1] * extents_[2] * extents_[3];
  }

  /// Element (b, h, i, c); unchecked.
  [[nodiscard]] constexpr T& operator()(index_t b, index_t h, index_t i, index_t c) const noexcept {
    return data_[b * strides_[0] + h * strides_[1] + i * strides_[2] + c * strides_[3]];
  }

 private:
  // Extents are checked by the kernels, which name the argument; here they must only not be
  // undefined behaviour.
  static constexpr index_t wrapping_product(index_t a, index_t b) noexcept {
    return static_cast<index_t>(static_cast<std::size_t>(a) * static_cast<std::size_t>(b));
  }

  T* data_ = nullptr;
  std::array<index_t, 4> extents_{0, 0, 0, 0};
  std::array<index_t, 4> strides_{0, 0, 0, 1};
};

/// Memory in the order [batch, heads, length, dim].
template <class T>
[[nodiscard]] constexpr tensor_view<T> bhld(T* data, index_t batch, index_t heads, index_t length,
                                            index_t dim) noexcept {
  return {data, batch, heads, length, dim};
}

/// Memory in the order [batch, length, heads, dim] (heads interleaved), seen as [B, H, L, D].
template <class T>
[[nodiscard]] constexpr tensor_view<T> blhd(T* data, index_t batch, index_t length, index_t heads,
                                            index_t dim) noexcept {
  const tensor_view<T> memory(data, batch, length, heads, dim);
  return {data,
          {batch, heads, length, dim},
          {memory.stride(0), memory.stride(2), memory.stride(1), memory.stride(3)}};
}

/// A view is its own view; the overloads for Eigen objects are in eigen.hpp.
template <class T>
[[nodiscard]] constexpr tensor_view<T> view(const tensor_view<T>& x) noexcept {
  return x;
}

}  // namespace attn
