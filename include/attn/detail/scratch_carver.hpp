// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>

#include <attn/view.hpp>

namespace attn::detail {

/// Takes memory for arrays from a block of scratch; with no block it only counts.
class scratch_carver {
 public:
  explicit scratch_carver(std::byte* base = nullptr) noexcept : base_(base) {}

  template <class T>
  [[nodiscard]] T* take(index_t n) noexcept {
    T* p = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (static_cast<std::size_t>(n) * sizeof(T) + 63) / 64 * 64;
    return p;
  }
  [[nodiscard]] std::size_t used() const noexcept { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

}  // namespace attn::detail
