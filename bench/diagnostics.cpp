// SPDX-License-Identifier: MIT
//
// What looking at the weights costs: attention_weights, diagnose_attention and merge_attention, as
// multiples of the time of dense attention on the same queries and keys (`of_dense`), in calls that
// alternate with it.
#include <benchmark/benchmark.h>

#include <functional>
#include <string>
#include <vector>

#include <attn/attention_state.hpp>
#include <attn/attention_weights.hpp>
#include <attn/dense_attention.hpp>
#include <attn/diagnostics.hpp>

#include "support/normal_noise.hpp"
#include "support/peak_clock.hpp"
#include "support/run_benchmarks.hpp"

namespace {

using namespace attn;

constexpr index_t heads = 4, n = 1024, d = 64;

struct operands {
  std::vector<float> q = std::vector<float>(heads * n * d), k = q, v = q, out = q, other = q;
  std::vector<float> lse = std::vector<float>(heads * n), other_lse = lse;
  std::vector<float> weights = std::vector<float>(heads * n * n);

  operands() {
    bench::normal_noise noise(1);
    for (auto* x : {&q, &k, &v})
      for (float& e : *x) e = static_cast<float>(noise());
    dense();
    other = out, other_lse = lse;
  }
  static tensor_view<float> rows(std::vector<float>& x, index_t width = d) {
    return bhld(x.data(), 1, heads, n, width);
  }
  void dense() { dense_attention(rows(q), rows(k), rows(v), rows(out), rows(lse, 1)); }
};

void add(const std::string& name, const std::function<void(operands&)>& call) {
  benchmark::RegisterBenchmark(name.c_str(),
                               [=](benchmark::State& state) {
                                 operands x;
                                 call(x);
                                 std::vector<double> calls, dense;
                                 for (auto _ : state) {
                                   const double start = bench::thread_seconds();
                                   call(x);
                                   const double middle = bench::thread_seconds();
                                   x.dense();
                                   calls.push_back(middle - start);
                                   dense.push_back(bench::thread_seconds() - middle);
                                   state.SetIterationTime(calls.back());
                                 }
                                 state.counters["of_dense"] =
                                     bench::median(calls) / bench::median(dense);
                               })
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond);
}

}  // namespace

int main(int argc, char** argv) {
  add("attention_weights",
      [](operands& x) { attention_weights(x.rows(x.q), x.rows(x.k), x.rows(x.weights, n)); });
  add("diagnose_attention",
      [](operands& x) { benchmark::DoNotOptimize(diagnose_attention(x.rows(x.q), x.rows(x.k))); });
  add("merge_attention", [](operands& x) {
    merge_attention(x.rows(x.out), x.rows(x.lse, 1), x.rows(x.other), x.rows(x.other_lse, 1),
                    x.rows(x.out), x.rows(x.lse, 1));
  });
  return attn::bench::run_benchmarks(argc, argv);
}
