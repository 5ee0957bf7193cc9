// SPDX-License-Identifier: MIT
//
// Clusters by repeated halving along directions found from the data.
//
// A node of the tree is a set of queries and a set of keys. It is halved by two directions: queries
// by a·q, keys by b·k, at the ranks where the clusters of its left half end. They come from two
// alternations on a sample of the node, starting from the difference of two random keys:
//
//     a = k_i − k_j         queries are ranked by which of two keys they prefer
//     b = mean(upper half of the queries) − mean(lower half)      keys by which half prefers them
//     a = mean(upper half of the keys) − mean(lower half),  then b once more
//
// which is 2-means of the bipartite graph of scores, with halves of equal size. On trained
// attention (bench/data) a second alternation captures 1.05 to 1.4 times the mass of one, a third
// nothing more; 64 samples nearly what all rows do.
#pragma once

#include <algorithm>
#include <array>
#include <limits>

#include <attn/context.hpp>
#include <attn/detail/scratch_carver.hpp>
#include <attn/detail/smyrf_cut.hpp>
#include <attn/detail/smyrf_directions.hpp>
#include <attn/detail/smyrf_plan.hpp>
#include <attn/lsh.hpp>

namespace attn::detail {

/// One (batch, key/value head, round) at a time.
template <class Arch>
class smyrf_bisector {
 public:
  smyrf_bisector(smyrf_plan& plan, const smyrf_operands& x, std::uint64_t seed,
                 scratch_carver memory) noexcept
      : plan_(plan), x_(x), seed_(seed) {
    carve(memory);
  }

  [[nodiscard]] static std::size_t scratch_bytes(smyrf_plan& plan, const smyrf_operands& x) {
    smyrf_bisector counter(plan, x, 0, scratch_carver());
    scratch_carver memory;
    counter.carve(memory);
    return memory.used();
  }

  void run(index_t b, index_t g, index_t round) noexcept {
    enter(b, g);
    round_ = round;
    for (index_t h = first_head(); h < last_head(); ++h) iota(plan_.queries(b, h, round), n_q_);
    iota(plan_.keys(b, g, round), n_kv_);
    if (n_q_ > 0 || n_kv_ > 0) halve(0, plan_.clusters, 1);
  }

 private:
  struct rows {
    const float* data;
    index_t stride;
    [[nodiscard]] const float* operator()(index_t i) const noexcept { return data + i * stride; }
  };

  void carve(scratch_carver& memory) noexcept {
    const index_t d = plan_.d_qk, n = std::max(plan_.n_q, plan_.n_kv);
    cut_ = smyrf_cut_scratch::carve(memory, n, 2);
    hash_ = memory.take<double>(smyrf_padded<Arch>(n));
    list_ = memory.take<index_t>(n);
    if (n > 0 && plan_.n_batch > 0 && plan_.n_heads > 0) {
      copies_q_ = x_.q(0, 0).direct == nullptr;
      copies_k_ = x_.k(0, 0).direct == nullptr;
    }
    if (copies_q_) q_copy_ = memory.take<float>(plan_.group() * plan_.n_q * d);
    if (copies_k_) k_copy_ = memory.take<float>(plan_.n_kv * d);
    q_sample_ = memory.take<float>(smyrf_largest_sample * d);
    k_sample_ = memory.take<float>(smyrf_largest_sample * d);
    a_ = memory.take<double>(d);
    b_dir_ = memory.take<double>(d);
    q_ = memory.take<rows>(plan_.n_heads > 0 ? plan_.group() : 0);
  }

  [[nodiscard]] index_t first_head() const noexcept { return g_ * plan_.group(); }
  [[nodiscard]] index_t last_head() const noexcept { return (g_ + 1) * plan_.group(); }

  // Rows of the heads of a group as float.
  void enter(index_t b, index_t g) noexcept {
    if (b == at_b_ && g == g_) return;
    at_b_ = b, g_ = g;
    n_q_ = plan_.q_length(b), n_kv_ = plan_.k_length(b);
    const index_t d = plan_.d_qk;
    const row_source<float> k = x_.k(b, g);
    if (copies_k_) k.read(0, n_kv_, d, k_copy_, d);
    k_ = copies_k_ ? rows{k_copy_, d} : rows{k.direct, k.row_stride};
    for (index_t h = first_head(); h < last_head(); ++h) {
      const row_source<float> q = x_.q(b, h);
      const index_t i = h - first_head();
      float* copy = q_copy_ + i * (copies_q_ ? plan_.n_q * d : 0);
      if (copies_q_) q.read(0, n_q_, d, copy, d);
      q_[i] = copies_q_ ? rows{copy, d} : rows{q.direct, q.row_stride};
    }
  }

  static void iota(index_t* list, index_t n) noexcept {
    for (index_t i = 0; i < n; ++i) list[i] = i;
  }

  // Clusters [c0, c1); `node` numbers the tree, the root is 1.
  void halve(index_t c0, index_t c1, std::uint64_t node) noexcept {
    if (c1 - c0 < 2) return;
    const index_t mid = c0 + (c1 - c0) / 2;
    find_directions(c0, c1, node);
    for (index_t h = first_head(); h < last_head(); ++h) {
      split(q_[h - first_head()], plan_.queries(at_b_, h, round_), a_, n_q_, c0, mid, c1);
    }
    split(k_, plan_.keys(at_b_, g_, round_), b_dir_, n_kv_, c0, mid, c1);
    halve(c0, mid, 2 * node);
    halve(mid, c1, 2 * node + 1);
  }

  // The members of clusters [c0, mid) before those of [mid, c1), both by position.
  void split(const rows& x, index_t* order, const double* direction, index_t length, index_t c0,
             index_t mid, index_t c1) noexcept {
    const index_t first = plan_.begin(length, c0), n = plan_.begin(length, c1) - first;
    const index_t left = plan_.begin(length, mid) - first;
    if (left == 0 || left == n) return;
    index_t* list = order + first;
    smyrf_project<Arch>([&](index_t i) { return x(list[i]); }, n, direction, plan_.d_qk, hash_);
    for (index_t i = 0; i < n; ++i) {  // infinities come from rows that have them
      if (hash_[i] - hash_[i] != 0) hash_[i] = std::numeric_limits<double>::quiet_NaN();
    }
    std::copy_n(list, n, list_);
    const std::array<index_t, 3> begin{0, left, n};
    smyrf_cut<Arch>(hash_, n, 2, begin.data(), cut_,
                    [&](index_t i, index_t slot) { list[slot] = list_[i]; });
  }

  void find_directions(index_t c0, index_t c1, std::uint64_t node) noexcept {
    const index_t d = plan_.d_qk;
    // 1. Samples, evenly spaced over the positions; rows that are not finite are left out.
    index_t n_k = 0, n_q = 0;
    const index_t k_first = plan_.begin(n_kv_, c0), k_last = plan_.begin(n_kv_, c1);
    take_sample(k_, plan_.keys(at_b_, g_, round_) + k_first, k_last - k_first,
                sample_size(k_last - k_first), k_sample_, n_k);
    const index_t q_first = plan_.begin(n_q_, c0), q_last = plan_.begin(n_q_, c1);
    const index_t total = sample_size(q_last - q_first), heads = plan_.group();
    for (index_t i = 0; i < heads; ++i) {
      take_sample(q_[i], plan_.queries(at_b_, first_head() + i, round_) + q_first, q_last - q_first,
                  total * (i + 1) / heads - total * i / heads, q_sample_, n_q);
    }
    // 2. From the difference of two random keys, two alternations.
    std::fill_n(a_, d, 0.0);
    std::fill_n(b_dir_, d, 0.0);
    if (n_k < 2) return;
    const auto stream = static_cast<std::uint64_t>(round_);
    const auto random = [&](std::uint64_t word, index_t n) {
      return static_cast<index_t>(lsh_bits(seed_, stream, node, word) %
                                  static_cast<std::uint64_t>(n));
    };
    const index_t i = random(0, n_k), j = (i + 1 + random(1, n_k - 1)) % n_k;
    for (index_t c = 0; c < d; ++c) {
      const double x = static_cast<double>(k_sample_[i * d + c]);
      const double y = static_cast<double>(k_sample_[j * d + c]);
      a_[c] = static_cast<double>(static_cast<float>(x - y));
    }
    if (n_q < 2) return std::copy_n(a_, d, b_dir_), void();
    smyrf_difference_of_halves<Arch>(q_sample_, n_q, d, a_, b_dir_);
    smyrf_difference_of_halves<Arch>(k_sample_, n_k, d, b_dir_, a_);
    smyrf_difference_of_halves<Arch>(q_sample_, n_q, d, a_, b_dir_);
  }

  [[nodiscard]] static index_t sample_size(index_t n) noexcept {
    return std::min(n, std::clamp<index_t>(n / 4, 32, smyrf_largest_sample));
  }

  void take_sample(const rows& x, const index_t* list, index_t n, index_t wanted, float* sample,
                   index_t& taken) const noexcept {
    const index_t d = plan_.d_qk;
    for (index_t s = 0; s < wanted; ++s) {
      float* out = sample + taken * d;
      std::copy_n(x(list[s * n / wanted]), d, out);
      if (smyrf_finite<Arch>(out, d)) ++taken;
    }
  }

  smyrf_plan& plan_;
  const smyrf_operands& x_;
  std::uint64_t seed_;
  index_t at_b_ = -1, g_ = -1, round_ = 0, n_q_ = 0, n_kv_ = 0;
  bool copies_q_ = false, copies_k_ = false;
  smyrf_cut_scratch cut_{};
  double* hash_ = nullptr;
  float *q_copy_ = nullptr, *k_copy_ = nullptr;
  float *q_sample_ = nullptr, *k_sample_ = nullptr;
  index_t* list_ = nullptr;
  double *a_ = nullptr, *b_dir_ = nullptr;
  rows k_{};
  rows* q_ = nullptr;
};

template <class Arch>
void smyrf_bisect(smyrf_plan& plan, const smyrf_operands& x, std::uint64_t seed,
                  index_t first_round, context& ctx) {
  const index_t rounds = plan.rounds - first_round;
  ctx.run(plan.n_batch * plan.n_heads_kv * rounds, 1, smyrf_bisector<Arch>::scratch_bytes(plan, x),
          [&](std::byte* memory, work_queue& queue) noexcept {
            smyrf_bisector<Arch> bisector(plan, x, seed, scratch_carver(memory));
            for (index_t first, last; queue.next(first, last);) {
              const index_t head = first / rounds;
              bisector.run(head / plan.n_heads_kv, head % plan.n_heads_kv,
                           first_round + first % rounds);
            }
          });
}

}  // namespace attn::detail
