// SPDX-License-Identifier: MIT
//
// How much memory a call holds beyond its operands.
#pragma once

#include <cstddef>
#include <optional>

namespace attn::bench {

/// Counts the bytes that all threads have on the heap while it lives. One at a time.
///
/// The program's malloc, free and their kin are replaced by ones that pass on to glibc and count
/// (heap_meter.cpp), so that nothing that a call allocates escapes: operator new, Eigen's buffers,
/// scratch. The stack is not counted. Other C libraries and sanitizer builds have no such hook: no
/// peak there.
class heap_meter {
 public:
  heap_meter();
  ~heap_meter();
  heap_meter(const heap_meter&) = delete;
  heap_meter& operator=(const heap_meter&) = delete;

  /// The most bytes held at one time, over what was held when the meter was made.
  [[nodiscard]] std::optional<std::size_t> peak_bytes() const;
};

}  // namespace attn::bench
