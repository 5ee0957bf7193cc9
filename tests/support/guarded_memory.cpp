// SPDX-License-Identifier: MIT
#include "support/guarded_memory.hpp"

#include <cstdlib>
#include <new>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#include <unistd.h>
#define ATTN_TEST_POSIX
#endif

namespace attn_test {

#if defined(ATTN_TEST_POSIX)

const bool has_guard_pages = true;

guarded_memory::guarded_memory(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t inside = (bytes + page - 1) / page * page;
  mapped_ = page + inside + page;
  void* p = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<std::byte*>(p);
  if (inside > 0 && mprotect(mapping_ + page, inside, PROT_READ | PROT_WRITE) != 0)
    throw std::bad_alloc();
  data_ = mapping_ + page + inside - bytes;
}

guarded_memory::~guarded_memory() { munmap(mapping_, mapped_); }

sparse_memory::sparse_memory(std::size_t bytes) : bytes_(bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p != MAP_FAILED) data_ = p;
}

sparse_memory::~sparse_memory() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

#else

const bool has_guard_pages = false;

guarded_memory::guarded_memory(std::size_t bytes)
    : mapping_(static_cast<std::byte*>(std::malloc(bytes + 1))), mapped_(bytes), data_(mapping_) {
  if (mapping_ == nullptr) throw std::bad_alloc();
}
guarded_memory::~guarded_memory() { std::free(mapping_); }

sparse_memory::sparse_memory(std::size_t) {}
sparse_memory::~sparse_memory() = default;

#endif

}  // namespace attn_test
