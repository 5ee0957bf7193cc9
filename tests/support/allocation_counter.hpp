// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>

namespace attn_test {

/// Counts the allocations of the whole process, from any thread, while it lives.
///
/// A program that uses it gets the C library's allocator wrapped (glibc), the sanitizer's hook
/// (AddressSanitizer, ThreadSanitizer), or else the global operator new replaced.
class allocation_counter {
 public:
  allocation_counter();
  std::size_t count() const;

 private:
  std::size_t before_;
};

}  // namespace attn_test
