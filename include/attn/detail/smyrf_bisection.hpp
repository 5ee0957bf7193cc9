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
#include <cstdint>

#include <attn/context.hpp>
#include <attn/detail/scratch_carver.hpp>
#include <attn/detail/smyrf_coarse_rows.hpp>
#include <attn/detail/smyrf_directions.hpp>
#include <attn/detail/smyrf_halves.hpp>
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
  void carve(scratch_carver& memory) noexcept {
    const index_t d = plan_.d_qk;
    halving_.carve(memory, std::max(plan_.n_q, plan_.n_kv));
    directions_.carve(memory, d);
    const index_t heads = plan_.n_heads > 0 ? plan_.group() : 0;
    q_ = memory.take<smyrf_coarse_rows>(heads);
    for (index_t i = 0; i < heads; ++i) {
      smyrf_coarse_rows rows;
      rows.carve(memory, plan_.n_q, d);
      if (q_ != nullptr) q_[i] = rows;
    }
    k_.carve(memory, plan_.n_kv, d);
    a_ = memory.take<std::int16_t>(smyrf_coarse_stride(d));
    b_dir_ = memory.take<std::int16_t>(smyrf_coarse_stride(d));
  }

  [[nodiscard]] index_t first_head() const noexcept { return g_ * plan_.group(); }
  [[nodiscard]] index_t last_head() const noexcept { return (g_ + 1) * plan_.group(); }

  // Rows of the heads of a group.
  void enter(index_t b, index_t g) noexcept {
    if (b == at_b_ && g == g_) return;
    at_b_ = b, g_ = g;
    n_q_ = plan_.q_length(b), n_kv_ = plan_.k_length(b);
    k_.set_units(n_kv_, k_.template load<Arch>(x_.k(b, g), n_kv_));
    int highest = 2 * smyrf_smallest_exponent;
    for (index_t h = first_head(); h < last_head(); ++h) {
      highest = std::max(highest, q_[h - first_head()].template load<Arch>(x_.q(b, h), n_q_));
    }
    for (index_t i = 0; i < plan_.group(); ++i) q_[i].set_units(n_q_, highest);
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
  void split(const smyrf_coarse_rows& x, index_t* order, const std::int16_t* direction,
             index_t length, index_t c0, index_t mid, index_t c1) noexcept {
    const index_t first = plan_.begin(length, c0), n = plan_.begin(length, c1) - first;
    const index_t left = plan_.begin(length, mid) - first;
    if (left == 0 || left == n) return;
    const index_t stride = smyrf_coarse_stride(plan_.d_qk);
    index_t* list = order + first;
    smyrf_project<Arch>(
        [&](index_t i) {
          const std::int16_t* ahead = x(list[std::min(i + 16, n - 1)]);
          for (index_t c = 0; c < stride; c += 32) __builtin_prefetch(ahead + c, 0, 3);
          return x(list[i]);
        },
        [&](index_t i) { return x.unit(list[i]); }, n, direction, stride, halving_.hash);
    halving_.split(list, n, halving_.template find<Arch>(n, left));
  }

  void find_directions(index_t c0, index_t c1, std::uint64_t node) noexcept {
    const index_t stride = smyrf_coarse_stride(plan_.d_qk);
    // 1. Samples, evenly spaced over the positions; rows that are not finite are left out.
    const index_t k_first = plan_.begin(n_kv_, c0), k_last = plan_.begin(n_kv_, c1);
    k_sample_.n = q_sample_.n = 0;
    take_sample(k_, plan_.keys(at_b_, g_, round_) + k_first, k_last - k_first,
                sample_size(k_last - k_first), k_sample_);
    const index_t q_first = plan_.begin(n_q_, c0), q_last = plan_.begin(n_q_, c1);
    const index_t total = sample_size(q_last - q_first), heads = plan_.group();
    for (index_t i = 0; i < heads; ++i) {
      take_sample(q_[i], plan_.queries(at_b_, first_head() + i, round_) + q_first, q_last - q_first,
                  total * (i + 1) / heads - total * i / heads, q_sample_);
    }
    // 2. From the difference of two random keys, two alternations.
    std::fill_n(a_, stride, std::int16_t{0});
    std::fill_n(b_dir_, stride, std::int16_t{0});
    const index_t n_k = k_sample_.n;
    if (n_k < 2) return;
    const auto stream = static_cast<std::uint64_t>(round_);
    const auto random = [&](std::uint64_t word, index_t n) {
      return static_cast<index_t>(lsh_bits(seed_, stream, node, word) %
                                  static_cast<std::uint64_t>(n));
    };
    const index_t i = random(0, n_k), j = (i + 1 + random(1, n_k - 1)) % n_k;
    directions_.difference(k_sample_, i, j, a_);
    if (q_sample_.n < 2) return std::copy_n(a_, stride, b_dir_), void();
    directions_.difference_of_halves(q_sample_, a_, b_dir_);
    directions_.difference_of_halves(k_sample_, b_dir_, a_);
    directions_.difference_of_halves(q_sample_, a_, b_dir_);
  }

  [[nodiscard]] static index_t sample_size(index_t n) noexcept {
    return std::min(n, std::clamp<index_t>(n / 4, 32, smyrf_sample::most));
  }

  static void take_sample(const smyrf_coarse_rows& x, const index_t* list, index_t n,
                          index_t wanted, smyrf_sample& sample) noexcept {
    if (wanted == 0) return;
    // Places s · n / wanted, without a division for each.
    const index_t step = n / wanted, rest = n % wanted;
    for (index_t s = 0, place = 0, part = 0; s < wanted; ++s) {
      const index_t i = list[place];
      if (x.is_finite(i)) sample.add(x(i), x.unit(i));
      place += step, part += rest;
      if (part >= wanted) ++place, part -= wanted;
    }
  }

  smyrf_plan& plan_;
  const smyrf_operands& x_;
  std::uint64_t seed_;
  index_t at_b_ = -1, g_ = -1, round_ = 0, n_q_ = 0, n_kv_ = 0;
  smyrf_halving halving_;
  smyrf_directions<Arch> directions_;
  smyrf_sample q_sample_, k_sample_;
  smyrf_coarse_rows* q_ = nullptr;  // of the heads of a group
  smyrf_coarse_rows k_;
  std::int16_t *a_ = nullptr, *b_dir_ = nullptr;
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
