// SPDX-License-Identifier: MIT
#pragma once

#include "reference/tensor.hpp"
#include "support/element.hpp"

#include <attn/view.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <ostream>
#include <vector>

namespace attn_test {

using reference::index_t;

/// Where the elements of a [B, H, L, D] tensor lie.
enum class layout {
  contiguous,         // row stride D, heads and batches without gaps
  padded_by_one,      // row stride D + 1: rows are never aligned
  padded_wide,        // row stride D + 19: a whole vector of padding and then some
  offset_by_one,      // contiguous, from one element past an aligned address
  heads_interleaved,  // [B, L, H, D] in memory
  column_major,       // dim is the slow rank: stride 1 along length, as in Eigen's default
  strided_dim,        // dim stride 2, the gaps hold canaries
  broadcast_batch,    // batch stride 0   (inputs only)
  broadcast_heads,    // head stride 0    (inputs only)
  broadcast_rows,     // length stride 0  (inputs only)
};

std::ostream& operator<<(std::ostream& out, layout l);

/// Layouts that an output may have too.
inline constexpr std::array plain_layouts = {
    layout::contiguous,        layout::padded_by_one, layout::padded_wide, layout::offset_by_one,
    layout::heads_interleaved, layout::column_major,  layout::strided_dim};

/// The strides of a layout and the number of elements from the first to one past the last.
struct placement {
  std::array<index_t, 4> extents;
  std::array<index_t, 4> strides;
  index_t begin;  // elements before the first one of the tensor
  index_t span;   // elements from the first one to one past the last one

  placement(std::array<index_t, 4> extents, layout l);
};

/// Elements of a tensor in a layout, in storage that is a canary wherever the tensor is not.
template <class T>
class tensor_buffer {
 public:
  tensor_buffer(std::array<index_t, 4> extents, layout l, T canary)
      : where_(extents, l), canary_(canary),
        storage_(static_cast<std::size_t>(margin + where_.begin + where_.span + margin), canary) {}

  /// Takes the values over, rounded to T; where a stride is 0 the last one written stays.
  tensor_buffer& assign(const reference::tensor& values) {
    for_each([&](T& x, index_t b, index_t h, index_t i, index_t c) {
      x = from_double<T>(values(b, h, i, c));
    });
    return *this;
  }

  attn::tensor_view<T> view() { return {first(), where_.extents, where_.strides}; }
  attn::tensor_view<const T> view() const {
    return {const_cast<tensor_buffer*>(this)->first(), where_.extents, where_.strides};
  }

  reference::tensor values() const {
    reference::tensor t(where_.extents);
    const_cast<tensor_buffer*>(this)->for_each(
        [&](T& x, index_t b, index_t h, index_t i, index_t c) { t(b, h, i, c) = to_double(x); });
    return t;
  }

  /// Whether everything outside the tensor still has the bits of the canary.
  bool canaries_alive() const {
    std::vector<T> without_tensor = storage_;
    auto* self = const_cast<tensor_buffer*>(this);
    const T* begin = storage_.data();
    self->for_each([&](T& x, index_t, index_t, index_t, index_t) {
      without_tensor[static_cast<std::size_t>(&x - begin)] = canary_;
    });
    return std::all_of(without_tensor.begin(), without_tensor.end(),
                       [&](const T& x) { return same_bits(x, canary_); });
  }

  /// Whether every element of the tensor still has the bits of the canary: nothing was written.
  bool untouched() const {
    return std::all_of(storage_.begin(), storage_.end(),
                       [&](const T& x) { return same_bits(x, canary_); });
  }

 private:
  static constexpr index_t margin = 64;  // canaries before and after, wider than any vector

  T* first() { return storage_.data() + margin + where_.begin; }

  template <class F>
  void for_each(F f) {
    const auto x = view();
    for (index_t b = 0; b < where_.extents[0]; ++b)
      for (index_t h = 0; h < where_.extents[1]; ++h)
        for (index_t i = 0; i < where_.extents[2]; ++i)
          for (index_t c = 0; c < where_.extents[3]; ++c) f(x(b, h, i, c), b, h, i, c);
  }

  placement where_;
  T canary_;
  std::vector<T> storage_;
};

}  // namespace attn_test
