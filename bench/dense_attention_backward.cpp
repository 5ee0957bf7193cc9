// SPDX-License-Identifier: MIT
//
// The backward pass of dense attention as a share of the multiply-add peak of the core it runs on
// (`of_peak`, support/peak_clock.hpp): 10 flops per pair and channel, over the pairs that the rule
// leaves.
//
//     dense_attention_backward --benchmark_filter=causal
#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include <attn/dense_attention.hpp>

#include "support/normal_noise.hpp"
#include "support/peak_clock.hpp"
#include "support/run_benchmarks.hpp"

namespace {

using namespace attn;
using namespace attn::bench;

struct shape {
  index_t batch, heads, heads_kv, n, d;
};

// Operands with N(0, 1) entries and the results of a forward call on them.
template <class T>
struct operands {
  using L = simd::compute_t<T>;
  std::vector<T> memory;
  std::vector<L> lse_memory;
  tensor_view<T> q, k, v, out, d_out, d_q, d_k, d_v;
  tensor_view<L> lse;

  operands(const shape& s, bool heads_interleaved) {
    const index_t rows = s.batch * s.heads * s.n, rows_kv = s.batch * s.heads_kv * s.n;
    memory.resize(static_cast<std::size_t>((4 * rows + 4 * rows_kv) * s.d));
    lse_memory.resize(static_cast<std::size_t>(rows));
    T* next = memory.data();
    const auto take = [&](index_t heads) {
      T* p = next;
      next += s.batch * heads * s.n * s.d;
      return heads_interleaved ? blhd(p, s.batch, s.n, heads, s.d)
                               : bhld(p, s.batch, heads, s.n, s.d);
    };
    q = take(s.heads), d_out = take(s.heads), k = take(s.heads_kv), v = take(s.heads_kv);
    normal_noise noise(1);
    std::generate(memory.data(), next, [&] { return T(static_cast<float>(noise())); });
    out = take(s.heads), d_q = take(s.heads), d_k = take(s.heads_kv), d_v = take(s.heads_kv);
    lse = bhld(lse_memory.data(), s.batch, s.heads, s.n, 1);
  }
};

struct settings {
  bool heads_interleaved = false;
  int threads = 1;
  dense_options options = {};
};

template <class T, score_rule Rule>
void add(const std::string& name, const shape& s, const Rule& rule, double share_of_pairs,
         const settings& set = {}) {
  benchmark::RegisterBenchmark(
      name.c_str(),
      [=](benchmark::State& state) {
        operands<T> x(s, set.heads_interleaved);
        context ctx(set.threads);
        dense_attention(x.q, x.k, x.v, x.out, x.lse, rule, set.options, ctx);
        const auto call = [&] {
          dense_attention_backward(x.q, x.k, x.v, x.out, x.lse, x.d_out, x.d_q, x.d_k, x.d_v, rule,
                                   set.options, ctx);
        };
        const double n = static_cast<double>(s.n);
        const double pairs = static_cast<double>(s.batch * s.heads) * n * n * share_of_pairs;
        const double flops = 10 * pairs * static_cast<double>(s.d);
        call();
        peak_clock<simd::compute_t<T>> clock(std::max(1e-7, flops / 100e9 / set.threads));
        for (auto _ : state) state.SetIterationTime(clock.time(call));
        state.counters["of_peak"] = clock.of_peak(flops, set.threads);
        state.counters["GFLOP/s"] = flops / clock.median_seconds() * 1e-9;
        state.counters["median_us"] = clock.median_seconds() * 1e6;
      })
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond);
}

[[nodiscard]] double causal_share(index_t n) {
  return (static_cast<double>(n) + 1) / (2 * static_cast<double>(n));
}

}  // namespace

int main(int argc, char** argv) {
  for (const index_t d : {64, 80, 128}) {
    for (const index_t n : {128, 512, 2048}) {
      const std::string size = "/n:" + std::to_string(n) + "/d:" + std::to_string(d);
      const shape s{1, 8, 8, n, d};
      add<float>("full" + size, s, no_mask{}, 1);
      add<float>("causal" + size, s, causal_mask{}, causal_share(n));
    }
  }
  const shape s{1, 8, 8, 2048, 64};
  add<float>("full/n:8192/d:64", {1, 2, 2, 8192, 64}, no_mask{}, 1);
  add<float>("full/n:1000/d:72", {1, 8, 8, 1000, 72}, no_mask{}, 1);
  add<float>("heads:8_over_2/n:2048/d:64", {1, 8, 2, 2048, 64}, no_mask{}, 1);
  add<float>("heads_interleaved/n:2048/d:64", s, no_mask{}, 1, {.heads_interleaved = true});
  add<float>("softcap/n:2048/d:64", s, no_mask{}, 1, {.options = {.softcap = 30}});
  std::array<bool, 2048> allowed{};
  for (std::size_t j = 0; j < allowed.size(); ++j) allowed[j] = j % 7 != 0;
  add<float>("boolean_mask/n:2048/d:64", s,
             boolean_mask{tensor_view<const bool>(allowed.data(), 1, 1, 1, 2048)}, 1);
  add<double>("double/n:2048/d:64", s, no_mask{}, 1);
  add<Eigen::half>("half/n:2048/d:64", s, no_mask{}, 1);
  add<Eigen::bfloat16>("bfloat16/n:2048/d:64", s, no_mask{}, 1);
  add<float>("threads:2/heads:8/n:2048/d:64", s, no_mask{}, 1, {.threads = 2});
  add<float>("threads:2/heads:1/n:2048/d:64", {1, 1, 1, 2048, 64}, no_mask{}, 1, {.threads = 2});
  return run_benchmarks(argc, argv);
}
