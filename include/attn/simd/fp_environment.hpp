// SPDX-License-Identifier: MIT
#pragma once

#include <attn/simd/batch.hpp>

namespace attn::simd {

/// While it lives, subnormal numbers are read and written as 0 on x86; the caller's mode comes back
/// on every way out.
///
/// Without it vscalefps takes about 200 cycles where a weight underflows, and sharp scores run at
/// 4 instead of 135 GFLOP/s. Always inlined: a function of its own would be one symbol with code
/// that depends on the -m flags.
class flush_subnormals {
 public:
#if defined(__SSE2__)
  ATTN_INLINE flush_subnormals() noexcept : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040u); }
  ATTN_INLINE ~flush_subnormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;

 public:
#else
  ATTN_INLINE flush_subnormals() noexcept {}
  ATTN_INLINE ~flush_subnormals() {}
#endif
  flush_subnormals(const flush_subnormals&) = delete;
  flush_subnormals& operator=(const flush_subnormals&) = delete;
};

}  // namespace attn::simd
