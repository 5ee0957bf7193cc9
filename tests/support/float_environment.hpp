// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>

#if defined(__SSE__) || defined(_M_X64)
#include <xmmintrin.h>
#endif

namespace attn_test {

/// The control bits of the floating-point unit (rounding, masks, FTZ and DAZ; no sticky flags),
/// or 0 where we cannot read them.
inline std::uint64_t float_control() {
#if defined(__SSE__) || defined(_M_X64)
  return _mm_getcsr() & ~0x3fu;
#elif defined(__aarch64__)
  std::uint64_t fpcr;
  asm volatile("mrs %0, fpcr" : "=r"(fpcr));
  return fpcr;
#else
  return 0;
#endif
}

/// Sets flush-to-zero and denormals-are-zero for a scope (x86; elsewhere nothing), to test that a
/// caller who runs with them keeps them.
class flush_subnormals {
 public:
  flush_subnormals() {
#if defined(__SSE__) || defined(_M_X64)
    saved_ = _mm_getcsr();
    _mm_setcsr(saved_ | 0x8040u);
#endif
  }
  ~flush_subnormals() {
#if defined(__SSE__) || defined(_M_X64)
    _mm_setcsr(saved_);
#endif
  }
  flush_subnormals(const flush_subnormals&) = delete;
  flush_subnormals& operator=(const flush_subnormals&) = delete;

 private:
  unsigned saved_ = 0;
};

}  // namespace attn_test
