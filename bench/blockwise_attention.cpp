// SPDX-License-Identifier: MIT
//
// Blockwise attention against dense attention of the same number of scores: the chunks as a batch
// of their own. `of_dense` is the speed per score, of calls that alternate.
//
//     blockwise_attention --benchmark_filter=block:512
#include <benchmark/benchmark.h>

#include <algorithm>
#include <string>
#include <vector>

#include <attn/blockwise_attention.hpp>

#include "support/normal_noise.hpp"
#include "support/run_benchmarks.hpp"
#include "support/thread_clock.hpp"

namespace {

using namespace attn;
using attn::bench::thread_seconds;

constexpr index_t heads = 2, n = 4096, d = 64;

[[nodiscard]] double scores_in(index_t block, index_t length) {
  double sum = 0;
  for (index_t first = 0; first < length; first += block) {
    const auto chunk = static_cast<double>(std::min(block, length - first));
    sum += chunk * chunk;
  }
  return sum;
}

void compare(benchmark::State& state, index_t block) {
  std::vector<float> q(heads * n * d), k(q.size()), v(q.size()), out(q.size());
  attn::bench::normal_noise noise(1);
  for (auto* x : {&q, &k, &v}) {
    for (float& e : *x) e = static_cast<float>(noise());
  }
  const auto whole = [](std::vector<float>& x) { return bhld(x.data(), 1, heads, n, d); };
  const index_t chunks = n / block;  // whole ones
  const auto as_batch = [&](std::vector<float>& x) {
    return tensor_view<float>(x.data(), {chunks, heads, block, d}, {block * d, n * d, d, 1});
  };
  const auto seconds_of = [](const auto& call) {
    const double start = thread_seconds();
    call();
    return thread_seconds() - start;
  };
  double best = 1e30, best_dense = 1e30;
  for (auto _ : state) {
    const double seconds = seconds_of([&] {
      blockwise_attention(whole(q), whole(k), whole(v), whole(out), no_mask{},
                          blockwise_options{.block = block});
    });
    best = std::min(best, seconds);
    best_dense = std::min(best_dense, seconds_of([&] {
                            dense_attention(as_batch(q), as_batch(k), as_batch(v), as_batch(out));
                          }));
    state.SetIterationTime(seconds);
  }
  const double scores = scores_in(block, n);
  state.counters["of_dense"] = best_dense / scores_in(block, chunks * block) / (best / scores);
  state.counters["GFLOP/s"] = 4 * heads * scores * d / best * 1e-9;
}

}  // namespace

int main(int argc, char** argv) {
  for (const index_t block : {32, 48, 64, 100, 128, 256, 512, 1024}) {
    benchmark::RegisterBenchmark(("blockwise/block:" + std::to_string(block)).c_str(), compare,
                                 block)
        ->UseManualTime()
        ->Unit(benchmark::kMicrosecond);
  }
  return attn::bench::run_benchmarks(argc, argv);
}
