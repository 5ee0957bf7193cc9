// SPDX-License-Identifier: MIT
//
// A layer of multi-head attention of width 512, 8 heads: `of_peak`, and `kernel`, the share of the
// time that dense attention takes, the rest being the four projections.
#include <benchmark/benchmark.h>

#include <cmath>
#include <string>
#include <vector>

#include <Eigen/Core>

#include <attn/dense_attention.hpp>
#include <attn/multi_head.hpp>

#include "support/normal_noise.hpp"
#include "support/peak_clock.hpp"
#include "support/run_benchmarks.hpp"

namespace {

using namespace attn;
using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

constexpr index_t width = 512, heads = 8;

void layer(benchmark::State& state, index_t n) {
  bench::normal_noise noise(1);
  const auto random = [&](index_t rows, double size) {
    return matrix(matrix::NullaryExpr(rows, width, [&](Eigen::Index, Eigen::Index) {
      return static_cast<float>(size * noise());
    }));
  };
  const double size = 1 / std::sqrt(static_cast<double>(width));
  const matrix x = random(n, 1), w_q = random(width, size), w_k = random(width, size),
               w_v = random(width, size), w_o = random(width, size);
  matrix y(n, width);
  multi_head_attention<float> attention(
      {.w_q = view(w_q), .w_k = view(w_k), .w_v = view(w_v), .w_o = view(w_o)}, {.n_heads = heads});
  double kernel = 0, all = 0;
  const auto call = [&] {
    const double begin = bench::thread_seconds();
    attention.self_attention(x, y, [&](auto q, auto k, auto v, auto out) {
      const double start = bench::thread_seconds();
      dense_attention(q, k, v, out);
      kernel += bench::thread_seconds() - start;
    });
    all += bench::thread_seconds() - begin;
  };
  call();
  bench::peak_clock<float> clock(all);
  kernel = all = 0;
  for (auto _ : state) state.SetIterationTime(clock.time(call));
  const auto length = static_cast<double>(n), d = static_cast<double>(width);
  state.counters["of_peak"] = clock.of_peak(8 * length * d * d + 4 * length * length * d);
  state.counters["kernel"] = kernel / all;
}

}  // namespace

int main(int argc, char** argv) {
  for (const index_t n : {16, 128, 512, 2048}) {
    benchmark::RegisterBenchmark(("multi_head/n:" + std::to_string(n)).c_str(),
                                 [=](benchmark::State& state) { layer(state, n); })
        ->UseManualTime()
        ->Unit(benchmark::kMicrosecond);
  }
  return attn::bench::run_benchmarks(argc, argv);
}
