// SPDX-License-Identifier: MIT
//
// The yardstick of calls that are bound by memory: reading every byte once.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

#include <benchmark/benchmark.h>

#include <attn/simd/batch.hpp>
#include <attn/view.hpp>

namespace attn::bench {

/// Seconds that one thread takes to read `bytes` bytes in order: 8 streams of `or`, which no data
/// (subnormal numbers, NaN) slows down. What is left over of 8 vectors is not read.
template <class Arch = simd::default_arch>
[[nodiscard]] double read_seconds(const void* data, std::size_t bytes) {
  using batch = simd::batch<std::int32_t, Arch>;
  constexpr index_t width = simd::width<std::int32_t, Arch>, streams = 8;
  const auto* p = static_cast<const std::int32_t*>(data);
  const auto n = static_cast<index_t>(bytes / sizeof(std::int32_t));
  batch seen[streams];
  for (index_t s = 0; s < streams; ++s) seen[s] = batch(0);

  const auto begin = std::chrono::steady_clock::now();
  for (index_t i = 0; i + streams * width <= n; i += streams * width) {
#pragma GCC unroll 8
    for (index_t s = 0; s < streams; ++s) {
      seen[s] = seen[s] | simd::load_unaligned<std::int32_t, Arch>(p + i + s * width);
    }
  }
  for (index_t s = 1; s < streams; ++s) seen[0] = seen[0] | seen[s];
  std::int32_t bits[width];
  seen[0].store_unaligned(bits);
  benchmark::DoNotOptimize(bits);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace attn::bench
