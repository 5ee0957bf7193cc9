// SPDX-License-Identifier: MIT
#pragma once

#include <ctime>

namespace attn::bench {

/// Processor time of the calling thread in seconds: what other programs take is not in it, other
/// than through caches and memory.
[[nodiscard]] inline double thread_seconds() {
  std::timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

}  // namespace attn::bench
