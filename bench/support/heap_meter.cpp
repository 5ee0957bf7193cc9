// SPDX-License-Identifier: MIT
#include "support/heap_meter.hpp"

#include <atomic>
#include <cerrno>
#include <cstdlib>

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) ||                         \
    __has_feature(memory_sanitizer)
#define ATTN_BENCH_SANITIZED 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define ATTN_BENCH_SANITIZED 1
#endif

#if defined(__GLIBC__) && !defined(ATTN_BENCH_SANITIZED)
#define ATTN_BENCH_COUNTS_HEAP 1
#include <malloc.h>
#endif

namespace attn::bench {
namespace {

std::atomic<bool> counting{false};
std::atomic<std::ptrdiff_t> held{0};  // less than 0 where older blocks are freed
std::atomic<std::ptrdiff_t> peak{0};

#if defined(ATTN_BENCH_COUNTS_HEAP)
void* gained(void* block) {
  if (block != nullptr && counting.load(std::memory_order_relaxed)) {
    const auto bytes = static_cast<std::ptrdiff_t>(malloc_usable_size(block));
    const std::ptrdiff_t now = held.fetch_add(bytes, std::memory_order_relaxed) + bytes;
    std::ptrdiff_t most = peak.load(std::memory_order_relaxed);
    while (now > most && !peak.compare_exchange_weak(most, now, std::memory_order_relaxed)) {
    }
  }
  return block;
}

void* lost(void* block) {
  if (block != nullptr && counting.load(std::memory_order_relaxed)) {
    held.fetch_sub(static_cast<std::ptrdiff_t>(malloc_usable_size(block)),
                   std::memory_order_relaxed);
  }
  return block;
}
#endif

}  // namespace

heap_meter::heap_meter() {
  held = 0;
  peak = 0;
  counting = true;
}

heap_meter::~heap_meter() { counting = false; }

std::optional<std::size_t> heap_meter::peak_bytes() const {
#if defined(ATTN_BENCH_COUNTS_HEAP)
  return static_cast<std::size_t>(peak.load());
#else
  return std::nullopt;
#endif
}

}  // namespace attn::bench

// A program's own definitions of these stand before those of the C library.
#if defined(ATTN_BENCH_COUNTS_HEAP)
extern "C" {
void* __libc_malloc(std::size_t bytes);
void* __libc_calloc(std::size_t n, std::size_t bytes);
void* __libc_realloc(void* block, std::size_t bytes);
void* __libc_memalign(std::size_t alignment, std::size_t bytes);
void __libc_free(void* block);

void* malloc(std::size_t bytes) noexcept { return attn::bench::gained(__libc_malloc(bytes)); }
void* calloc(std::size_t n, std::size_t bytes) noexcept {
  return attn::bench::gained(__libc_calloc(n, bytes));
}
void* realloc(void* block, std::size_t bytes) noexcept {
  // Where it fails the old block lives on, counted no longer: a number too low in a program that
  // has no memory left.
  return attn::bench::gained(__libc_realloc(attn::bench::lost(block), bytes));
}
void* memalign(std::size_t alignment, std::size_t bytes) noexcept {
  return attn::bench::gained(__libc_memalign(alignment, bytes));
}
void* aligned_alloc(std::size_t alignment, std::size_t bytes) noexcept {
  return memalign(alignment, bytes);
}
int posix_memalign(void** block, std::size_t alignment, std::size_t bytes) noexcept {
  const bool power_of_two = alignment != 0 && (alignment & (alignment - 1)) == 0;
  if (!power_of_two || alignment % sizeof(void*) != 0) return EINVAL;
  void* const p = memalign(alignment, bytes);
  if (p == nullptr) return ENOMEM;
  *block = p;
  return 0;
}
void free(void* block) noexcept { __libc_free(attn::bench::lost(block)); }
}
#endif
