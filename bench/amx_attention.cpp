// SPDX-License-Identifier: MIT
//
// Dense attention in every precision against `strict`, which is called between, by thread CPU time:
// `of_strict` is how many times as fast. Where there is no AMX, all precisions are one kernel.
//
//     amx_attention --benchmark_filter=2048
#include <benchmark/benchmark.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include <attn/dense_attention.hpp>

#include "support/normal_noise.hpp"
#include "support/peak_clock.hpp"
#include "support/run_benchmarks.hpp"

namespace {

using namespace attn;

struct shape {
  index_t batch, heads, n_q, n_kv, d;
  bool causal = false;
};

[[nodiscard]] double seconds(const std::function<void()>& call) {
  const double start = bench::thread_seconds();
  call();
  return bench::thread_seconds() - start;
}

template <class T>
void measure(benchmark::State& state, const shape& s, precision_mode mode) {
  const index_t outer = s.batch * s.heads * s.d;
  std::vector<T> q(static_cast<std::size_t>(outer * s.n_q)),
      k(static_cast<std::size_t>(outer * s.n_kv)), v(k.size()), out(q.size());
  bench::normal_noise noise(1);
  for (auto* x : {&q, &k, &v})
    for (T& e : *x) e = static_cast<T>(static_cast<float>(noise()));
  const auto attend = [&](precision_mode precision) {
    const auto at = [&](std::vector<T>& x, index_t n) {
      return bhld(x.data(), s.batch, s.heads, n, s.d);
    };
    const dense_options options{.precision = precision};
    if (s.causal)
      dense_attention(at(q, s.n_q), at(k, s.n_kv), at(v, s.n_kv), at(out, s.n_q), causal_mask{},
                      options);
    else
      dense_attention(at(q, s.n_q), at(k, s.n_kv), at(v, s.n_kv), at(out, s.n_q), no_mask{},
                      options);
  };
  std::vector<double> strict, other;
  attend(mode);
  for (auto _ : state) {
    strict.push_back(seconds([&] { attend(precision_mode::strict); }));
    other.push_back(seconds([&] { attend(mode); }));
    state.SetIterationTime(other.back());
  }
  const double time = bench::median(other);
  const double pairs = static_cast<double>(s.n_q) * static_cast<double>(s.n_kv);
  state.counters["GFLOP/s"] =
      4e-9 * static_cast<double>(outer) * pairs * (s.causal ? 0.5 : 1) / time;
  state.counters["of_strict"] = bench::median(strict) / time;
}

void add(const std::string& name, const shape& s) {
  const auto one = [&](const std::string& precision, auto run) {
    benchmark::RegisterBenchmark((name + "/" + precision).c_str(), run)->UseManualTime();
  };
  one("automatic", [=](benchmark::State& x) { measure<float>(x, s, precision_mode::automatic); });
  one("bf16x3", [=](benchmark::State& x) { measure<float>(x, s, precision_mode::bf16x3); });
  one("bf16", [=](benchmark::State& x) { measure<float>(x, s, precision_mode::bf16); });
  one("bfloat16/automatic",
      [=](benchmark::State& x) { measure<Eigen::bfloat16>(x, s, precision_mode::automatic); });
  one("bfloat16/bf16",
      [=](benchmark::State& x) { measure<Eigen::bfloat16>(x, s, precision_mode::bf16); });
}

}  // namespace

int main(int argc, char** argv) {
  for (const index_t d : {64, 128}) {
    const std::string by_d = "/d" + std::to_string(d);
    add("n512" + by_d, {1, 1, 512, 512, d});
    add("n2048" + by_d, {1, 1, 2048, 2048, d});
    add("n2048_causal" + by_d, {1, 1, 2048, 2048, d, true});
  }
  add("n8192/d64", {1, 1, 8192, 8192, 64});
  add("batch8_heads12_n128/d64", {8, 12, 128, 128, 64});
  add("n1000/d72", {1, 1, 1000, 1000, 72});
  add("n4096_by_1024/d64", {1, 1, 4096, 1024, 64});
  return attn::bench::run_benchmarks(argc, argv);
}
