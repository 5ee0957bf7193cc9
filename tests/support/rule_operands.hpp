// SPDX-License-Identifier: MIT
#pragma once

#include "support/tensor_buffer.hpp"

#include <attn/view.hpp>

#include <memory>
#include <type_traits>

namespace attn_test {

/// A mask, bias or ids for a score rule: the oracle's values, and the same as T in memory.
template <class T>
class rule_operand {
 public:
  reference::tensor values;

  explicit rule_operand(reference::tensor t, layout l = layout::contiguous)
      : values(std::move(t)), where_(values.extents(), l),
        memory_(std::make_unique<T[]>(static_cast<std::size_t>(where_.begin + where_.span))) {
    const attn::tensor_view<T> x(memory_.get() + where_.begin, where_.extents, where_.strides);
    for (index_t b = 0; b < where_.extents[0]; ++b)
      for (index_t h = 0; h < where_.extents[1]; ++h)
        for (index_t i = 0; i < where_.extents[2]; ++i)
          for (index_t c = 0; c < where_.extents[3]; ++c) x(b, h, i, c) = to(values(b, h, i, c));
  }

  attn::tensor_view<const T> view() const {
    return {memory_.get() + where_.begin, where_.extents, where_.strides};
  }

 private:
  static T to(double x) {
    if constexpr (std::is_integral_v<T>) return static_cast<T>(x);
    if constexpr (!std::is_integral_v<T>) return from_double<T>(x);
  }

  placement where_;
  std::unique_ptr<T[]> memory_;
};

}  // namespace attn_test
