// SPDX-License-Identifier: MIT
#pragma once

#include "reference/tensor.hpp"
#include "support/element.hpp"

#include <attn/view.hpp>

#include <array>
#include <cstddef>

namespace attn_test {

/// Whether this platform can make a page unreadable (POSIX); elsewhere guarded memory is plain.
extern const bool has_guard_pages;

/// Memory between two pages that may not be touched: it ends where the second one begins.
class guarded_memory {
 public:
  explicit guarded_memory(std::size_t bytes);
  ~guarded_memory();
  guarded_memory(const guarded_memory&) = delete;
  guarded_memory& operator=(const guarded_memory&) = delete;

  /// The last `bytes` before the guard.
  std::byte* data() const { return data_; }

 private:
  std::byte* mapping_ = nullptr;
  std::size_t mapped_ = 0;
  std::byte* data_ = nullptr;
};

/// A contiguous tensor whose last element is the last before a page that may not be touched.
template <class T>
class guarded_tensor {
 public:
  explicit guarded_tensor(const reference::tensor& values)
      : extents_(values.extents()), memory_(values.elements().size() * sizeof(T)) {
    T* x = data();
    for (const double value : values.elements()) *x++ = from_double<T>(value);
  }

  attn::tensor_view<T> view() const {
    return {data(), extents_[0], extents_[1], extents_[2], extents_[3]};
  }
  reference::tensor values() const {
    reference::tensor t(extents_);
    const T* x = data();
    for (double& value : t.elements()) value = to_double(*x++);
    return t;
  }

 private:
  T* data() const { return reinterpret_cast<T*>(memory_.data()); }

  std::array<reference::index_t, 4> extents_;
  guarded_memory memory_;
};

/// Address space without memory behind it until it is touched, for strides past 2^31 elements.
/// `data()` is null where the system refuses.
class sparse_memory {
 public:
  explicit sparse_memory(std::size_t bytes);
  ~sparse_memory();
  sparse_memory(const sparse_memory&) = delete;
  sparse_memory& operator=(const sparse_memory&) = delete;

  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace attn_test
