// SPDX-License-Identifier: MIT
//
// The yardstick of every speed in bench/: multiply-adds that touch nothing but registers.
#pragma once

#include <benchmark/benchmark.h>

#include <attn/simd/batch.hpp>
#include <attn/view.hpp>

namespace attn::bench {

/// The floating-point peak of one core for T in the instruction set of this build.
///
/// 12 independent chains x ← a x + b. A core that starts two multiply-adds per cycle, each 4
/// cycles long, needs 8 chains to be busy; two that are made of a multiplication and an addition
/// need no more; 12 chains and a and b fit the 16 registers of SSE and AVX. Each step depends on
/// the one before, so that a compiler can move nothing out of the loop.
template <class T, class Arch = simd::default_arch>
class fma_probe {
 public:
  /// Floating-point operations of `run(steps)`.
  [[nodiscard]] static double flops(index_t steps) {
    return 2.0 * chains * simd::width<T, Arch> * static_cast<double>(steps);
  }

  static void run(index_t steps) {
    using batch = simd::batch<T, Arch>;
    // x → 1: no overflow, no subnormal numbers. volatile keeps them in registers: a constant may
    // become an operand in memory of each multiply-add, which cost a third of the speed.
    volatile T factor = T(0.999), summand = T(0.001);
    const batch a(factor), b(summand);
    batch x[chains];
    for (int c = 0; c < chains; ++c) x[c] = batch(static_cast<T>(c));
    for (index_t step = 0; step < steps; ++step) {
#pragma GCC unroll 12
      for (int c = 0; c < chains; ++c) x[c] = simd::multiply_add(x[c], a, b);
    }
    batch total = x[0];
    for (int c = 1; c < chains; ++c) total = total + x[c];
    T sum = simd::sum(total);
    benchmark::DoNotOptimize(sum);
  }

 private:
  static constexpr int chains = 12;
};

}  // namespace attn::bench
