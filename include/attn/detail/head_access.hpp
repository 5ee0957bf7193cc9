// SPDX-License-Identifier: MIT
//
// The heads of an operand of any storage type and strides, behind one function pointer.
#pragma once

#include <attn/detail/packing.hpp>
#include <attn/view.hpp>

namespace attn::detail {

/// The rows of any head of an operand, its storage type hidden.
template <class T>
struct head_source {
  const void* x;
  row_source<T> (*rows)(const void*, index_t b, index_t h) noexcept;
  [[nodiscard]] row_source<T> operator()(index_t b, index_t h) const noexcept {
    return rows(x, b, h);
  }
};
template <class T>
struct head_sink {
  const void* x;
  row_sink<T> (*rows)(const void*, index_t b, index_t h) noexcept;
  [[nodiscard]] row_sink<T> operator()(index_t b, index_t h) const noexcept {
    return rows(x, b, h);
  }
};

template <class T, class Arch, class X>
[[nodiscard]] head_source<T> make_head_source(const tensor_view<X>& x) noexcept {
  return {&x, [](const void* p, index_t b, index_t h) noexcept {
            return make_row_source<T, Arch>(*static_cast<const tensor_view<X>*>(p), b, h);
          }};
}
template <class T, class Arch, class X>
[[nodiscard]] head_sink<T> make_head_sink(const tensor_view<X>& x) noexcept {
  return {&x, [](const void* p, index_t b, index_t h) noexcept {
            return make_row_sink<T, Arch>(*static_cast<const tensor_view<X>*>(p), b, h);
          }};
}

}  // namespace attn::detail
