// SPDX-License-Identifier: MIT
//
// Dense attention against the limits of the core it runs on: `of_peak` is the share of its
// multiply-add peak, measured by a probe between the calls (support/peak_clock.hpp), over the pairs
// that the rule leaves; decode, which is bound by memory, reports `of_read`, the share of the speed
// at which a loop reads K and V.
//
//     dense_attention --benchmark_filter=causal
#include <benchmark/benchmark.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <attn/dense_attention.hpp>

#include "support/normal_noise.hpp"
#include "support/peak_clock.hpp"
#include "support/read_probe.hpp"
#include "support/run_benchmarks.hpp"

namespace {

using namespace attn;
using namespace attn::bench;

struct shape {
  index_t batch, heads, heads_kv, n_q, n_kv, d;

  [[nodiscard]] double pairs() const {
    return static_cast<double>(batch * heads) * static_cast<double>(n_q) *
           static_cast<double>(n_kv);
  }
};

[[nodiscard]] shape square(index_t heads, index_t n, index_t d) {
  return {1, heads, heads, n, n, d};
}

enum class layout { bhld, blhd, column_major };

// Operands with N(0, 1) entries; queries times `sharpness`.
template <class T>
struct operands {
  operands(const shape& s, layout l, double sharpness = 1)
      : q_(size(s, s.heads, s.n_q)), k_(size(s, s.heads_kv, s.n_kv)), v_(k_.size()),
        out_(q_.size()), q(at(q_, s, s.heads, s.n_q, l)), k(at(k_, s, s.heads_kv, s.n_kv, l)),
        v(at(v_, s, s.heads_kv, s.n_kv, l)), out(at(out_, s, s.heads, s.n_q, l)) {
    normal_noise noise(1);
    for (T& x : q_) x = static_cast<T>(static_cast<float>(sharpness * noise()));
    for (T& x : k_) x = static_cast<T>(static_cast<float>(noise()));
    for (T& x : v_) x = static_cast<T>(static_cast<float>(noise()));
  }

 private:
  static std::size_t size(const shape& s, index_t heads, index_t n) {
    return static_cast<std::size_t>(s.batch * heads * n * s.d);
  }
  static tensor_view<T> at(std::vector<T>& x, const shape& s, index_t heads, index_t n, layout l) {
    if (l == layout::bhld) return bhld(x.data(), s.batch, heads, n, s.d);
    if (l == layout::blhd) return blhd(x.data(), s.batch, n, heads, s.d);
    return {x.data(), {s.batch, heads, n, s.d}, {heads * n * s.d, n * s.d, 1, n}};
  }
  std::vector<T> q_, k_, v_, out_;

 public:
  tensor_view<T> q, k, v, out;
};

// Times `call` and reports its speed over `pairs` scores.
template <class T>
void report(benchmark::State& state, const shape& s, double pairs, int threads,
            const std::function<void()>& call) {
  using C = simd::compute_t<T>;
  const double flops = 4 * pairs * static_cast<double>(s.d);
  call();
  peak_clock<C> clock(std::max(1e-7, flops / 100e9 / threads));
  for (auto _ : state) state.SetIterationTime(clock.time(call));
  state.counters["of_peak"] = clock.of_peak(flops, threads);
  state.counters["GFLOP/s"] = flops / clock.median_seconds() * 1e-9;
  state.counters["median_us"] = clock.median_seconds() * 1e6;
}

template <class T>
struct settings {
  layout order = layout::bhld;
  double sharpness = 1;
  int threads = 1;
  dense_options options = {};
  std::function<void(operands<T>&)> change = {};
};

template <class T, score_rule Rule>
void add(const std::string& name, const shape& s, const Rule& rule, double share_of_pairs,
         const settings<T>& set = {}) {
  benchmark::RegisterBenchmark(
      name.c_str(),
      [=](benchmark::State& state) {
        auto data = std::make_shared<operands<T>>(s, set.order, set.sharpness);
        if (set.change) set.change(*data);
        context ctx(set.threads);
        report<T>(state, s, s.pairs() * share_of_pairs, set.threads, [&] {
          dense_attention(data->q, data->k, data->v, data->out, rule, set.options, ctx);
        });
      })
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond);
}

[[nodiscard]] double causal_share(index_t n) {
  return (static_cast<double>(n) + 1) / (2 * static_cast<double>(n));
}

// What masks and biases look at; it lives as long as the program.
struct rule_data {
  static constexpr index_t n = 2048, heads = 8;
  std::vector<index_t> lengths{n * 3 / 4};
  std::unique_ptr<bool[]> random{new bool[n * n]}, every{new bool[n * n]};
  std::vector<index_t> segments = std::vector<index_t>(n);
  std::vector<float> slopes = std::vector<float>(heads);
  std::vector<float> bias = std::vector<float>(n * n);

  rule_data() {
    normal_noise noise(2);
    for (index_t x = 0; x < n * n; ++x) {
      random[static_cast<std::size_t>(x)] = noise() < 1;  // 84% allowed
      every[static_cast<std::size_t>(x)] = true;
      bias[static_cast<std::size_t>(x)] = static_cast<float>(noise());
    }
    for (index_t i = 0; i < n; ++i) segments[static_cast<std::size_t>(i)] = i / 512;
    for (index_t h = 0; h < heads; ++h) {
      slopes[static_cast<std::size_t>(h)] = std::exp2(-static_cast<float>(h + 1));
    }
  }
};

void add_shapes() {
  for (const index_t d : {64, 80, 96, 128}) {
    const std::string dim = "/d:" + std::to_string(d);
    add<float>("full/n:2048" + dim, square(8, 2048, d), no_mask{}, 1);
    add<float>("causal/n:2048" + dim, square(8, 2048, d), causal_mask{}, causal_share(2048));
  }
  add<float>("full/n:8192/d:64", square(2, 8192, 64), no_mask{}, 1);
  add<float>("causal/n:8192/d:64", square(2, 8192, 64), causal_mask{}, causal_share(8192));
  for (const index_t d : {64, 128}) {
    const std::string dim = "/d:" + std::to_string(d);
    const shape medium{4, 12, 12, 512, 512, d}, small{8, 12, 12, 128, 128, d};
    add<float>("full/n:512" + dim, medium, no_mask{}, 1);
    add<float>("causal/n:512" + dim, medium, causal_mask{}, causal_share(512));
    add<float>("full/n:128" + dim, small, no_mask{}, 1);
    add<float>("causal/n:128" + dim, small, causal_mask{}, causal_share(128));
  }
  add<float>("full/n:1000/d:72", square(8, 1000, 72), no_mask{}, 1);
  add<float>("causal/n:1000/d:72", square(8, 1000, 72), causal_mask{}, causal_share(1000));
  add<float>("full/n_q:4096/n_kv:1024/d:64", {1, 1, 1, 4096, 1024, 64}, no_mask{}, 1);
  add<float>("call_overhead/n:16/d:64", square(1, 16, 64), no_mask{}, 1);
}

void add_types_and_layouts() {
  const shape s = square(8, 2048, 64);
  add<double>("double/n:2048/d:64", s, no_mask{}, 1);
  add<Eigen::half>("half/n:2048/d:64", s, no_mask{}, 1);
  // Strict: the automatic mode may use bfloat16 products where the machine has them.
  add<Eigen::bfloat16>("bfloat16/n:2048/d:64", s, no_mask{}, 1,
                       {.options = {.precision = precision_mode::strict}});
  add<float>("strict/n:2048/d:64", s, no_mask{}, 1,
             {.options = {.precision = precision_mode::strict}});
  add<float>("heads_interleaved/n:2048/d:64", s, no_mask{}, 1, {.order = layout::blhd});
  add<float>("column_major/n:2048/d:64", s, no_mask{}, 1, {.order = layout::column_major});
  add<float>("threads:2/n:2048/d:64", s, no_mask{}, 1, {.threads = 2});
  add<float>("threads:2/causal/n:512/d:64", {4, 12, 12, 512, 512, 64}, causal_mask{},
             causal_share(512), {.threads = 2});
}

void add_rules(const rule_data& x) {
  const shape s = square(rule_data::heads, rule_data::n, 64);
  const auto matrix = [](const auto* p) {
    return tensor_view(p, 1, 1, rule_data::n, rule_data::n);
  };
  const tensor_view<const index_t> ids(x.segments.data(), 1, 1, rule_data::n, 1);
  add<float>("key_lengths", s, key_lengths{x.lengths}, 0.75);
  add<float>("boolean_mask/all_true", s, boolean_mask{matrix(x.every.get())}, 1);
  add<float>("boolean_mask/random", s, boolean_mask{matrix(x.random.get())}, 1);
  add<float>("segment_mask", s, segment_mask{ids, ids}, 0.25);
  add<float>("alibi_bias", s, alibi_bias{x.slopes}, 1);
  add<float>("additive_bias", s, additive_bias{matrix(x.bias.data())}, 1);
  add<float>("softcap", s, no_mask{}, 1, {.options = {.softcap = 30}});
  // i sees j in (i − 512, i]: 512 keys, fewer at the start.
  const double n = 8192, window = 512;
  add<float>("window:512/n:8192", square(2, 8192, 64), window_mask{.left = 511, .right = 0},
             (window * n - window * (window - 1) / 2) / (n * n));
}

void add_hard_data() {
  const shape s = square(8, 2048, 64);
  add<float>("sharp/scores_std:60", s, no_mask{}, 1, {.sharpness = 60});
  add<float>("one_hot/scores_std:1000", s, no_mask{}, 1, {.sharpness = 1000});
  add<float>("growing_scores", s, no_mask{}, 1, {.change = [](operands<float>& x) {
               // Key j points along every query, ever further.
               for (index_t h = 0; h < x.q.extent(1); ++h) {
                 for (index_t i = 0; i < x.q.extent(2); ++i) {
                   x.q(0, h, i, 0) = 8;
                   x.k(0, h, i, 0) = static_cast<float>(i);
                 }
               }
             }});
  add<float>("subnormal_values", s, no_mask{}, 1, {.change = [](operands<float>& x) {
               for (index_t h = 0; h < x.v.extent(1); ++h) {
                 for (index_t j = 0; j < x.v.extent(2); ++j) {
                   for (index_t c = 0; c < x.v.extent(3); ++c) x.v(0, h, j, c) *= 1e-40f;
                 }
               }
             }});
}

// Few queries per head: a step of generation with a key/value cache.
void add_decode(index_t n_q, index_t n_kv, int threads) {
  const std::string name = "decode/n_q:" + std::to_string(n_q) + "/n_kv:" + std::to_string(n_kv) +
                           (threads > 1 ? "/threads:" + std::to_string(threads) : "");
  benchmark::RegisterBenchmark(
      name.c_str(),
      [=](benchmark::State& state) {
        const shape s{1, 32, 8, n_q, n_kv, 128};
        operands<float> x(s, layout::bhld);
        context ctx(threads);
        const auto bytes = static_cast<std::size_t>(x.k.size()) * sizeof(float);
        std::vector<double> calls, reads;
        const auto call = [&] { dense_attention(x.q, x.k, x.v, x.out, no_mask{}, {}, ctx); };
        call();
        for (auto _ : state) {
          reads.push_back(read_seconds(x.k.data_handle(), bytes) +
                          read_seconds(x.v.data_handle(), bytes));
          const auto begin = std::chrono::steady_clock::now();
          call();
          calls.push_back(
              std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
          state.SetIterationTime(calls.back());
        }
        const double gigabytes = 2 * static_cast<double>(bytes) * 1e-9;
        state.counters["of_read"] = median(reads) / median(calls);
        state.counters["GB/s"] = gigabytes / median(calls);
        state.counters["us_per_query"] = median(calls) * 1e6 / static_cast<double>(n_q);
      })
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond);
}

}  // namespace

int main(int argc, char** argv) {
  const rule_data rules;
  add_shapes();
  add_types_and_layouts();
  add_rules(rules);
  add_hard_data();
  for (const index_t n_kv : {4096, 8192, 32768}) add_decode(1, n_kv, 1);
  add_decode(1, 8192, 2);
  for (const index_t n_q : {2, 3, 4, 6, 8, 12, 13, 16}) add_decode(n_q, 4096, 1);
  return run_benchmarks(argc, argv);
}
