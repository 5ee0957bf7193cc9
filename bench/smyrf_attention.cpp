// SPDX-License-Identifier: MIT
//
// SMYRF against the dense kernel of this library: calls that alternate, medians.
//
//     vs_dense       how many times faster than dense attention, finding the clusters included
//     of_ideal       vs_dense as a share of what the number of scores would give
//     prep_of_attn   finding the clusters, as a share of the attention in them
//     bytes_per_row  heap held beyond the operands, per query and head
//
// "4x32" is 4 rounds of clusters of 32 keys, as the paper's tables count. At 1024 = 32·32,
// 4096 = 64·64 and 16384 = 128·128 that is also the number of clusters.
//
//     smyrf_attention --benchmark_filter=^forward
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <time.h>

#include <attn/dense_attention.hpp>
#include <attn/detail/query_tile.hpp>
#include <attn/detail/scratch_carver.hpp>
#include <attn/detail/smyrf_gather.hpp>
#include <attn/detail/smyrf_merge.hpp>
#include <attn/detail/smyrf_problem.hpp>
#include <attn/smyrf_attention.hpp>

#include "support/heap_meter.hpp"
#include "support/normal_noise.hpp"
#include "support/peak_clock.hpp"
#include "support/problem.hpp"
#include "support/run_benchmarks.hpp"

namespace {

using namespace attn;
using namespace attn::bench;

constexpr index_t d = 64;

struct shape {
  index_t heads, n_q, n_kv;
};

// Operands and gradients with N(0, 1) entries, results, [1, heads, n, d].
struct operands {
  aligned_vector<float> memory;
  tensor_view<float> q, k, v, out, lse, d_out, d_q, d_k, d_v;

  explicit operands(const shape& s) {
    memory.resize(static_cast<std::size_t>(s.heads * ((4 * s.n_q + 4 * s.n_kv) * d + s.n_q)));
    float* next = memory.data();
    const auto take = [&](index_t n, index_t dim) {
      float* p = next;
      next += s.heads * n * dim;
      return bhld(p, 1, s.heads, n, dim);
    };
    q = take(s.n_q, d), d_out = take(s.n_q, d), k = take(s.n_kv, d), v = take(s.n_kv, d);
    normal_noise noise(1);
    for (float* x = memory.data(); x != next; ++x) *x = static_cast<float>(noise());
    out = take(s.n_q, d), d_q = take(s.n_q, d), d_k = take(s.n_kv, d), d_v = take(s.n_kv, d);
    lse = take(s.n_q, 1);
  }
};

[[nodiscard]] double seconds(clockid_t id) {
  timespec t{};
  clock_gettime(id, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

// Times of calls that take turns: one row per iteration, one column per call. With one thread it is
// the time that the thread ran, which other programs take nothing from.
class turns {
 public:
  turns(int threads, std::vector<std::function<void()>> calls)
      : clock_(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC), calls_(std::move(calls)),
        seconds_(calls_.size()) {}

  /// Runs each call once more; returns what they took together.
  double take() {
    double sum = 0;
    for (std::size_t i = 0; i < calls_.size(); ++i) {
      const double begin = seconds(clock_);
      calls_[i]();
      seconds_[i].push_back(seconds(clock_) - begin);
      sum += seconds_[i].back();
    }
    return sum;
  }
  [[nodiscard]] double median_of(std::size_t call) const { return median(seconds_[call]); }

 private:
  clockid_t clock_;
  std::vector<std::function<void()>> calls_;
  std::vector<std::vector<double>> seconds_;
};

struct setting {
  shape s;
  smyrf_options options;
  int threads = 1;
  /// Length at which dense attention is timed; its time is scaled by the number of scores.
  index_t n_dense = 0;
};

[[nodiscard]] double scores(const shape& s) {
  return static_cast<double>(s.heads) * static_cast<double>(s.n_q) * static_cast<double>(s.n_kv);
}

// Clusters and attention, both again in every call.
void forward(benchmark::State& state, const setting& x) {
  const operands data(x.s);
  const shape s_dense = x.n_dense > 0 ? shape{1, x.n_dense, x.n_dense} : x.s;
  const operands dense_data(s_dense);
  context ctx(x.threads);
  smyrf_clusters clusters;
  const auto prepare = [&] { clusters.assign(data.q, data.k, x.options, ctx); };
  const auto attend = [&] {
    smyrf_attention(data.q, data.k, data.v, data.out, clusters, no_mask{}, ctx);
  };
  std::size_t bytes = 0;
  {
    const heap_meter meter;
    prepare();
    attend();
    bytes = meter.peak_bytes().value_or(0);
  }
  const auto dense = [&] {
    dense_attention(dense_data.q, dense_data.k, dense_data.v, dense_data.out, no_mask{}, {}, ctx);
  };
  turns t(x.threads, {prepare, attend, dense});
  for (auto _ : state) state.SetIterationTime(t.take());
  const double dense_seconds = t.median_of(2) * scores(x.s) / scores(s_dense);
  const double seconds = t.median_of(0) + t.median_of(1);
  const double share =
      static_cast<double>(x.options.rounds) / static_cast<double>(x.options.clusters);
  state.counters["vs_dense"] = dense_seconds / seconds;
  state.counters["prep_of_attn"] = t.median_of(0) / t.median_of(1);
  state.counters["of_ideal"] = dense_seconds / seconds * share;
  state.counters["ms"] = seconds * 1e3;
  state.counters["ns_per_row"] = seconds * 1e9 / static_cast<double>(x.s.heads * x.s.n_q);
  state.counters["bytes_per_row"] =
      static_cast<double>(bytes) / static_cast<double>(x.s.heads * x.s.n_q);
}

// A training step: clusters, attention and gradients, against the same of dense attention.
void training(benchmark::State& state, const setting& x) {
  const operands data(x.s);
  context ctx(x.threads);
  smyrf_clusters clusters;
  turns t(x.threads,
          {[&] {
             clusters.assign(data.q, data.k, x.options, ctx);
             smyrf_attention(data.q, data.k, data.v, data.out, data.lse, clusters, no_mask{}, ctx);
           },
           [&] {
             smyrf_attention_backward(data.q, data.k, data.v, data.out, data.lse, data.d_out,
                                      clusters, data.d_q, data.d_k, data.d_v, no_mask{}, ctx);
           },
           [&] { dense_attention(data.q, data.k, data.v, data.out, data.lse, no_mask{}, {}, ctx); },
           [&] {
             dense_attention_backward(data.q, data.k, data.v, data.out, data.lse, data.d_out,
                                      data.d_q, data.d_k, data.d_v, no_mask{}, {}, ctx);
           }});
  for (auto _ : state) state.SetIterationTime(t.take());
  state.counters["vs_dense"] =
      (t.median_of(2) + t.median_of(3)) / (t.median_of(0) + t.median_of(1));
  state.counters["backward_vs_dense"] = t.median_of(3) / t.median_of(1);
  state.counters["ms"] = (t.median_of(0) + t.median_of(1)) * 1e3;
}

// Where the time of a call goes. Rows are gathered into a buffer of one cluster and merged from a
// tile by the kernel's own functions, without the attention in between, which in a call hides most
// of their cache misses: so both are upper bounds, and attention, what remains, a lower one.
class parts {
 public:
  using arch = simd::default_arch;
  static constexpr int width = detail::tile_size<float, arch>::width;
  static constexpr index_t most = detail::tile_size<float, arch>::max_rows;

  parts(const operands& x, const shape& s, const smyrf_clusters& clusters)
      : x_(x), s_(s), clusters_(clusters),
        buffer_(static_cast<std::size_t>(std::max(s.n_q, s.n_kv) * d)) {
    detail::scratch_carver bytes;
    tile_.carve<arch>(bytes, 0, d, 0);
    memory_.resize(bytes.used());
    detail::scratch_carver memory(memory_.data());
    tile_.carve<arch>(memory, 0, d, 0);
    std::fill_n(tile_.l, most, 1.0f);
    tile_.has_output = true;
  }

  void gather() {
    each([&](index_t h, index_t, const index_t* q, index_t n_q, const index_t* k, index_t n_kv) {
      rows(x_.q, h, q, n_q), rows(x_.k, h, k, n_kv), rows(x_.v, h, k, n_kv);
    });
  }

  void merge() {
    each([&](index_t h, index_t r, const index_t* q, index_t n_q, const index_t*, index_t) {
      const detail::smyrf_result<float> result{&x_.out(0, h, 0, 0), d, &x_.lse(0, h, 0, 0)};
      detail::smyrf_for_tiles<width>(n_q, [&](index_t i, index_t n, int vectors) {
        tile_.n_vectors = vectors, tile_.n_rows = n;
        detail::smyrf_merge<float, arch>(tile_, d, q + i, r == 0, nullptr, false, rows_.data(),
                                         result);
      });
    });
  }

 private:
  template <class Body>
  void each(const Body& body) {
    for (index_t h = 0; h < s_.heads; ++h) {
      for (index_t r = 0; r < clusters_.rounds(); ++r) {
        for (index_t c = 0; c < clusters_.clusters(); ++c) {
          const index_t q = clusters_.query_begin(0, c), k = clusters_.key_begin(0, c);
          body(h, r, clusters_.query_order(0, h, r).data() + q, clusters_.query_begin(0, c + 1) - q,
               clusters_.key_order(0, h, r).data() + k, clusters_.key_begin(0, c + 1) - k);
        }
      }
    }
  }
  void rows(const tensor_view<float>& x, index_t h, const index_t* list, index_t n) {
    const auto source = detail::make_row_source<float, arch>(tensor_view<const float>(x), 0, h);
    detail::gather_rows<float, arch>(source, list, n, d, buffer_.data(), d);
    benchmark::DoNotOptimize(buffer_.data());
    benchmark::ClobberMemory();
  }

  const operands& x_;
  shape s_;
  const smyrf_clusters& clusters_;
  aligned_vector<float> buffer_;
  aligned_vector<float> rows_ = aligned_vector<float>(most * d);
  aligned_vector<std::byte> memory_;
  detail::query_tile<float> tile_{};
};

void split(benchmark::State& state, const setting& x) {
  const operands data(x.s);
  context ctx(1);
  smyrf_clusters clusters(data.q, data.k, x.options, ctx);
  parts part(data, x.s, clusters);
  turns t(1, {[&] { clusters.assign(data.q, data.k, x.options, ctx); },
              [&] { smyrf_attention(data.q, data.k, data.v, data.out, clusters, no_mask{}, ctx); },
              [&] { part.gather(); }, [&] { part.merge(); }});
  for (auto _ : state) state.SetIterationTime(t.take());
  const double prepare = t.median_of(0), attend = t.median_of(1), gather = t.median_of(2),
               merge = t.median_of(3), all = prepare + attend;
  state.counters["hash_and_rank"] = prepare / all;
  state.counters["gather"] = gather / all;
  state.counters["merge"] = merge / all;
  state.counters["attention"] = (attend - gather - merge) / all;
  state.counters["prep+gather_of_rest"] = (prepare + gather) / (attend - gather);
  state.counters["ms"] = all * 1e3;
}

void add(const std::string& name, void (*run)(benchmark::State&, const setting&),
         const setting& x) {
  const smyrf_options& o = x.options;
  std::string full = name + "/n:" + std::to_string(x.s.n_q);
  if (x.s.n_kv != x.s.n_q) full += "/n_kv:" + std::to_string(x.s.n_kv);
  full += "/" + std::to_string(o.rounds) + "x" + std::to_string(x.s.n_kv / o.clusters);
  if (o.clustering == smyrf_clustering::bisection) full += "/bisection";
  if (o.duplicates == smyrf_duplicates::removed) full += "/removed";
  if (x.threads > 1) full += "/threads:" + std::to_string(x.threads);
  benchmark::RegisterBenchmark(full.c_str(), run, x)
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond);
}

}  // namespace

int main(int argc, char** argv) {
  const auto square = [](index_t heads, index_t n) { return shape{heads, n, n}; };
  for (const int threads : {1, 2}) {
    for (const auto clustering : {smyrf_clustering::ranks, smyrf_clustering::bisection}) {
      for (const auto duplicates : {smyrf_duplicates::weighted, smyrf_duplicates::removed}) {
        const auto options = [&](index_t clusters) {
          return smyrf_options{
              .clusters = clusters, .duplicates = duplicates, .clustering = clustering};
        };
        add("forward", forward, {square(8, 1024), options(32), threads});
        add("forward", forward, {square(4, 4096), options(64), threads});
        add("forward", forward, {square(1, 16384), options(128), threads});
        add("forward", forward, {square(1, 65536), options(512), threads, 16384});
      }
    }
  }
  for (const auto clustering : {smyrf_clustering::ranks, smyrf_clustering::bisection}) {
    const auto options = [&](index_t clusters) {
      return smyrf_options{.clusters = clusters, .clustering = clustering};
    };
    add("training", training, {square(8, 1024), options(32)});
    add("training", training, {square(4, 4096), options(64)});
    add("training", training, {square(1, 16384), options(128)});
    add("split", split, {square(8, 1024), options(32)});
    add("split", split, {square(4, 4096), options(64)});
    add("split", split, {square(1, 16384), options(128)});
    add("split", split, {square(1, 65536), options(512)});
  }
  // Self-attention of BigGAN at 64 x 64 with keys pooled 2 x 2: 50% to 1.6% of the scores.
  for (const index_t clusters : {8, 16, 32, 64, 128, 256}) {
    add("biggan", forward, {{1, 4096, 1024}, {.clusters = clusters}});
  }
  add("biggan", forward, {{1, 4096, 1024}, {.clusters = 64, .rounds = 1}});
  // The configurations of the paper's table of speeds, heads as in BERT.
  for (const index_t n : {1024, 2048, 4096}) {
    for (const index_t rounds : {1, 2, 4}) {
      for (const index_t size : {16, 32, 64, 128}) {
        add("table", forward, {square(12, n), {.clusters = n / size, .rounds = rounds}});
      }
    }
  }
  return run_benchmarks(argc, argv);
}
