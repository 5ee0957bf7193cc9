// SPDX-License-Identifier: MIT
//
// One row of a Successive Halving tournament: from n scores to the slot and weight of each source.
//
// Nodes are what plays: node i < n is source i, node n + t is the result of match t. A match comes
// after those that made its players, so one pass over the matches carries anything from the sources
// to the slots, and one pass in reverse carries it back.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <utility>

#include <attn/detail/rank_sort.hpp>
#include <attn/simd/expm1.hpp>
#include <attn/soft_topk_options.hpp>
#include <attn/view.hpp>

namespace attn::detail {

// score = (1 − loser_weight) · score[winner] + loser_weight · score[loser]
struct topk_match {
  index_t winner, loser;  // nodes; the winner is the better-ranked one
  double loser_weight;
};

// Where a node ends and with what weight in that slot.
struct topk_share {
  index_t slot;
  double weight;
};

// What a slot is made of.
struct topk_part {
  index_t source;
  double weight;
};

// The plan of one row: n sources, k slots.
struct tournament_row {
  index_t n, k;
  topk_part* part;     // [n] slot by slot, in each by position
  index_t* begin;      // [k + 1] of each slot in `part`
  topk_share* share;   // [n] of the sources
  double* score;       // [2n − k] of the nodes
  topk_match* match;   // [n − k]
  double* slot_score;  // [k]
  index_t* slot_node;  // [k]

  // The source that won all matches of a node.
  [[nodiscard]] index_t champion(index_t node) const noexcept {
    while (node >= n) node = match[node - n].winner;
    return node;
  }
};

// Hands out parts of one block of memory, aligned to 64 bytes. With a null block it only counts.
class memory_cutter {
 public:
  explicit memory_cutter(std::byte* block) noexcept : block_(block) {}

  template <class T>
  [[nodiscard]] T* cut(index_t count) noexcept {
    T* part = block_ == nullptr ? nullptr : reinterpret_cast<T*>(block_ + used_);
    used_ += (static_cast<std::size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return part;
  }
  [[nodiscard]] std::size_t used() const noexcept { return used_; }

 private:
  std::byte* block_;
  std::size_t used_ = 0;
};

[[nodiscard]] inline tournament_row cut_row(memory_cutter& memory, index_t n, index_t k) noexcept {
  tournament_row row{n, k, {}, {}, {}, {}, {}, {}, {}};
  row.part = memory.cut<topk_part>(n);
  row.begin = memory.cut<index_t>(k + 1);
  row.share = memory.cut<topk_share>(n);
  row.score = memory.cut<double>(2 * n - k);
  row.match = memory.cut<topk_match>(n - k);
  row.slot_score = memory.cut<double>(k);
  row.slot_node = memory.cut<index_t>(k);
  return row;
}

// What a row needs while it is made.
struct tournament_scratch {
  ranked* rank;          // [n] survivors by rank
  ranked* other;         // [n]
  topk_share* share;     // [n − k] of the matches
  double* winner;        // [n/2 + W] scores of one round's matches
  double* loser;         // [n/2 + W]
  double* loser_weight;  // [n/2 + W]
  double* result;        // [n/2 + W]
};

[[nodiscard]] inline tournament_scratch cut_scratch(memory_cutter& memory, index_t n,
                                                    index_t k) noexcept {
  constexpr index_t widest = 8;  // doubles of a vector
  const index_t half = n / 2 + widest;
  tournament_scratch s{};
  s.rank = memory.cut<ranked>(n);
  s.other = memory.cut<ranked>(n);
  s.share = memory.cut<topk_share>(n - k);
  s.winner = memory.cut<double>(half);
  s.loser = memory.cut<double>(half);
  s.loser_weight = memory.cut<double>(half);
  s.result = memory.cut<double>(half);
  return s;
}

// Weights and results of `count` matches; arrays are padded to a multiple of the vector.
//
// With hi >= lo the two scores of a match, the weight of lo is 1 / (1 + e^d), where
//   exponential  d = B^hi − B^lo = −B^hi (B^(lo − hi) − 1): B^hi may overflow to inf, and does so
//   to
//                the right limit, since the second factor is no 0 unless the scores are equal,
//   scaled       d = C (hi − lo).
// Equal scores, infinite ones too, share alike; against anything else −inf has weight 0.
template <class Arch>
void play_matches(const double* winner, const double* loser, double* loser_weight, double* result,
                  index_t count, topk_boost boost, double strength) noexcept {
  using B = simd::batch<double, Arch>;
  const B one(1.0), half(0.5), absent(-std::numeric_limits<double>::infinity());
  const B rate(boost == topk_boost::exponential ? std::log(strength) : strength);
  for (index_t t = 0; t < count; t += simd::width<double, Arch>) {
    const B a = simd::load<double, Arch>(winner + t), z = simd::load<double, Arch>(loser + t);
    const auto winner_is_lower = a < z;
    const B hi = xsimd::select(winner_is_lower, z, a), lo = xsimd::select(winner_is_lower, a, z);
    B d = rate * (hi - lo);
    if (boost == topk_boost::exponential) d = simd::exp(rate * hi) * -simd::expm1(-d);
    B lo_weight = one / (one + simd::exp(d));
    lo_weight = xsimd::select(lo == absent, B(0.0), lo_weight);
    lo_weight = xsimd::select(a == z, half, lo_weight);
    // 1 − w is exact here: w <= 1/2 is either at least 2^-53 or lost against 1.
    const B hi_weight = one - lo_weight;
    const B mixed = xsimd::select(a == z, a, hi_weight * hi + lo_weight * lo);
    xsimd::select(winner_is_lower, hi_weight, lo_weight).store_aligned(loser_weight + t);
    xsimd::select(lo_weight == B(0.0), hi, mixed).store_aligned(result + t);
  }
}

// Takes in the scores [n], `stride` apart.
template <class Arch, class S>
void read_scores(const S* scores, index_t stride, const tournament_row& row,
                 const tournament_scratch& s) noexcept {
  for (index_t i = 0; i < row.n; ++i) {
    const std::uint64_t key = rank_key(static_cast<double>(scores[i * stride]));
    s.rank[i] = {key, i};
    row.score[i] = ranked_score(key);
  }
}

// Makes the plan from what read_scores left.
template <class Arch>
void play_tournament(const tournament_row& row, const tournament_scratch& s,
                     const soft_topk_options& options) noexcept {
  const index_t n = row.n, k = row.k;
  const auto before = [&row](const ranked& a, const ranked& b) {
    return a.key != b.key ? a.key < b.key : row.champion(a.node) < row.champion(b.node);
  };

  // 1. Rounds: m survivors by rank become max(k, ⌈m/2⌉). The best have a bye, of the others the
  //    best meets the worst, and the result takes the winner's rank. That leaves them almost
  //    sorted.
  if (options.sort != topk_sort::never) rank_sort<Arch>(s.rank, s.other, n, 0, before);
  index_t node = n;
  for (index_t m = n; m > k;) {
    const index_t next = std::max(k, (m + 1) / 2), byes = 2 * next - m, matches = m - next;
    ranked* winners = s.rank + byes;
    const ranked* losers = s.rank + m - 1;  // backwards
    for (index_t t = 0; t < matches; ++t) {
      s.winner[t] = ranked_score(winners[t].key);
      s.loser[t] = ranked_score(losers[-t].key);
    }
    play_matches<Arch>(s.winner, s.loser, s.loser_weight, s.result, matches, options.boost,
                       options.strength);
    for (index_t t = 0; t < matches; ++t, ++node) {
      row.match[node - n] = {winners[t].node, losers[-t].node, s.loser_weight[t]};
      row.score[node] = s.result[t];
      winners[t] = {rank_key(s.result[t]), node};
    }
    m = next;
    if (m > k && options.sort == topk_sort::every_round) {
      rank_sort<Arch>(s.rank, s.other, m, 2 * m, before);
    }
  }

  // 2. Slots, by rank or by the position of the champion. Shares of sources have no use yet.
  for (index_t r = 0; r < k; ++r) row.slot_node[r] = s.rank[r].node;
  if (options.order == topk_order::by_position) {
    for (index_t i = 0; i < n; ++i) row.share[i].slot = -1;
    for (index_t r = 0; r < k; ++r) {
      row.share[row.champion(row.slot_node[r])].slot = row.slot_node[r];
    }
    for (index_t i = 0, r = 0; i < n; ++i) {
      if (row.share[i].slot >= 0) row.slot_node[r++] = row.share[i].slot;
    }
  }

  // 3. Shares, from the slots back to the sources.
  const auto share_of = [&](index_t i) noexcept -> topk_share& {
    return i < n ? row.share[i] : s.share[i - n];
  };
  for (index_t r = 0; r < k; ++r) {
    row.slot_score[r] = row.score[row.slot_node[r]];
    share_of(row.slot_node[r]) = {r, 1.0};
  }
  for (index_t t = n - k - 1; t >= 0; --t) {
    const topk_match& match = row.match[t];
    const topk_share share = s.share[t];
    share_of(match.winner) = {share.slot, share.weight * (1 - match.loser_weight)};
    share_of(match.loser) = {share.slot, share.weight * match.loser_weight};
  }

  // 4. Parts slot by slot: counts, sums, places.
  std::fill(row.begin, row.begin + k + 1, index_t{0});
  for (index_t i = 0; i < n; ++i) ++row.begin[row.share[i].slot];
  for (index_t r = 0, sum = 0; r <= k; ++r) sum += std::exchange(row.begin[r], sum);
  for (index_t i = 0; i < n; ++i) {
    row.part[row.begin[row.share[i].slot]++] = {i, row.share[i].weight};
  }
  std::copy_backward(row.begin, row.begin + k, row.begin + k + 1);
  row.begin[0] = 0;
}

}  // namespace attn::detail
