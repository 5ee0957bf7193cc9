// SPDX-License-Identifier: MIT
//
// The end of main in a Google Benchmark program.
#pragma once

#include <benchmark/benchmark.h>

namespace attn::bench {

/// Runs the registered benchmarks, those that the options --benchmark_* choose; returns the exit
/// code of main. Google Benchmark alone would ignore what it does not know: here that is an error.
[[nodiscard]] inline int run_benchmarks(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}

}  // namespace attn::bench
