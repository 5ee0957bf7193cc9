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
  ranked* rank;          // [n] for sorting
  ranked* other;         // [n]
  double* score;         // [n + W] of the survivors, by rank
  index_t* node;         // [n] of the survivors, by rank
  double* loser;         // [n/2 + W] scores of one round
  double* loser_weight;  // [n/2 + W]
  topk_share* share;     // [n − k] of the matches
  index_t* place;        // [2k] where the next part of a slot goes
};

[[nodiscard]] inline tournament_scratch cut_scratch(memory_cutter& memory, index_t n,
                                                    index_t k) noexcept {
  constexpr index_t widest = 8;  // doubles of a vector
  tournament_scratch s{};
  s.rank = memory.cut<ranked>(n);
  s.other = memory.cut<ranked>(n);
  s.score = memory.cut<double>(n + widest);
  s.node = memory.cut<index_t>(n);
  s.loser = memory.cut<double>(n / 2 + widest);
  s.loser_weight = memory.cut<double>(n / 2 + widest);
  s.share = memory.cut<topk_share>(n - k);
  s.place = memory.cut<index_t>(2 * k);
  return s;
}

// Matches of one round: weights of the losers, and results in place of the winners' scores. Whole
// vectors are read and written, so up to W − 1 scores behind the winners are lost.
//
// With hi >= lo the two scores of a match, the weight of lo is 1 / (1 + e^d), where
//   exponential  d = B^hi − B^lo = −B^hi (B^(lo − hi) − 1): B^hi may overflow to inf, and does so
//   to
//                the right limit, since the second factor is no 0 unless the scores are equal,
//   scaled       d = C (hi − lo).
// Equal scores, infinite ones too, share alike; against anything else −inf has weight 0.
template <class Arch>
void play_matches(double* score, const double* loser, double* loser_weight, index_t count,
                  topk_boost boost, double rate) noexcept {
  using B = simd::batch<double, Arch>;
  const B one(1.0), half(0.5), absent(-std::numeric_limits<double>::infinity());
  for (index_t t = 0; t < count; t += simd::width<double, Arch>) {
    const B a = simd::load_unaligned<double, Arch>(score + t);
    const B z = simd::load<double, Arch>(loser + t);
    const auto winner_is_lower = a < z;
    const B hi = xsimd::select(winner_is_lower, z, a), lo = xsimd::select(winner_is_lower, a, z);
    B d = B(rate) * (hi - lo);
    if (boost == topk_boost::exponential) d = simd::exp(B(rate) * hi) * -simd::expm1(-d);
    B lo_weight = one / (one + simd::exp(d));
    lo_weight = xsimd::select(lo == absent, B(0.0), lo_weight);
    lo_weight = xsimd::select(a == z, half, lo_weight);
    // 1 − w is exact here: w <= 1/2 is either at least 2^-53 or lost against 1.
    const B hi_weight = one - lo_weight;
    const B mixed = xsimd::select(a == z, a, hi_weight * hi + lo_weight * lo);
    xsimd::select(winner_is_lower, hi_weight, lo_weight).store_aligned(loser_weight + t);
    xsimd::select(lo_weight == B(0.0), hi, mixed).store_unaligned(score + t);
  }
}

// ln B or C: the factor of the scores in the boost.
[[nodiscard]] inline double boost_rate(topk_boost boost, double strength) noexcept {
  return boost == topk_boost::exponential ? std::log(strength) : strength;
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

// Survivors [m] of a round by rank again: best score first, equal ones by the champions' positions.
// A round leaves them almost sorted, so a few moves each do, or else a sort from scratch.
template <class Arch>
void rank_survivors(const tournament_row& row, const tournament_scratch& s, index_t m) noexcept {
  index_t budget = 2 * m;
  for (index_t i = 1; i < m && budget >= 0; ++i) {
    const double v = s.score[i];
    const index_t node = s.node[i];
    index_t j = i;
    for (; j > 0 && v >= s.score[j - 1]; --j) {
      if (v == s.score[j - 1] && row.champion(node) > row.champion(s.node[j - 1])) break;
      s.score[j] = s.score[j - 1];
      s.node[j] = s.node[j - 1];
    }
    s.score[j] = v;
    s.node[j] = node;
    budget -= i - j;
  }
  if (budget >= 0) return;
  for (index_t i = 0; i < m; ++i) s.rank[i] = {rank_key(s.score[i]), s.node[i]};
  rank_sort<Arch>(s.rank, s.other, m, [&row](const ranked& a, const ranked& b) {
    return a.key != b.key ? a.key < b.key : row.champion(a.node) < row.champion(b.node);
  });
  for (index_t i = 0; i < m; ++i) {
    s.score[i] = ranked_score(s.rank[i].key);
    s.node[i] = s.rank[i].node;
  }
}

// Makes the plan from what read_scores left.
template <class Arch>
void play_tournament(const tournament_row& row, const tournament_scratch& s,
                     const soft_topk_options& options) noexcept {
  const index_t n = row.n, k = row.k;
  const double rate = boost_rate(options.boost, options.strength);

  // 1. Sources by rank.
  if (options.sort != topk_sort::never) {
    rank_sort<Arch>(s.rank, s.other, n, [](const ranked& a, const ranked& b) {
      return a.key != b.key ? a.key < b.key : a.node < b.node;
    });
  }
  for (index_t i = 0; i < n; ++i) {
    s.score[i] = ranked_score(s.rank[i].key);
    s.node[i] = s.rank[i].node;
  }

  // 2. Rounds: m survivors become max(k, ⌈m/2⌉). The best have a bye, of the others the best meets
  //    the worst, and the result takes the winner's rank.
  index_t played = 0;
  for (index_t m = n; m > k;) {
    const index_t next = std::max(k, (m + 1) / 2), byes = 2 * next - m, matches = m - next;
    double* score = s.score + byes;
    index_t* node = s.node + byes;
    const index_t* loser = s.node + m - 1;  // backwards
    for (index_t t = 0; t < matches; ++t) s.loser[t] = s.score[m - 1 - t];
    play_matches<Arch>(score, s.loser, s.loser_weight, matches, options.boost, rate);
    for (index_t t = 0; t < matches; ++t, ++played) {
      row.match[played] = {node[t], loser[-t], s.loser_weight[t]};
      row.score[n + played] = score[t];
      node[t] = n + played;
    }
    m = next;
    if (m > k && options.sort == topk_sort::every_round) rank_survivors<Arch>(row, s, m);
  }

  // 3. Slots, by rank or by the position of the champion.
  for (index_t r = 0; r < k; ++r) row.slot_node[r] = s.node[r];
  if (options.order == topk_order::by_position) {
    for (index_t r = 0; r < k; ++r) {
      s.rank[r] = {static_cast<std::uint64_t>(row.champion(s.node[r])), s.node[r]};
    }
    rank_sort<Arch>(s.rank, s.other, k,
                    [](const ranked& a, const ranked& b) { return a.key < b.key; });
    for (index_t r = 0; r < k; ++r) row.slot_node[r] = s.rank[r].node;
  }

  // 4. Shares, from the slots back to the sources.
  const auto share_of = [&](index_t i) noexcept -> topk_share& {
    return i < n ? row.share[i] : s.share[i - n];
  };
  for (index_t r = 0; r < k; ++r) {
    row.slot_score[r] = row.score[row.slot_node[r]];
    share_of(row.slot_node[r]) = {r, 1.0};
  }
  for (index_t t = played - 1; t >= 0; --t) {
    const topk_match& match = row.match[t];
    const topk_share share = s.share[t];
    share_of(match.winner) = {share.slot, share.weight * (1 - match.loser_weight)};
    share_of(match.loser) = {share.slot, share.weight * match.loser_weight};
  }

  // 5. Parts slot by slot: counts, sums, places. Both halves of the sources at a time, for where
  // all
  //    go to few slots each count waits for the one before.
  index_t* place = s.place;
  index_t* upper_place = s.place + k;
  std::fill_n(s.place, 2 * k, index_t{0});
  const index_t half = n / 2;
  for (index_t i = 0; i < half; ++i) {
    ++place[row.share[i].slot];
    ++upper_place[row.share[half + i].slot];
  }
  if (n % 2 != 0) ++upper_place[row.share[n - 1].slot];
  index_t sum = 0;
  for (index_t r = 0; r < k; ++r) {
    const index_t lower = place[r], upper = upper_place[r];
    row.begin[r] = place[r] = sum;
    upper_place[r] = sum + lower;
    sum += lower + upper;
  }
  row.begin[k] = n;
  const auto put = [&row](index_t& at, index_t i) { row.part[at++] = {i, row.share[i].weight}; };
  for (index_t i = 0; i < half; ++i) {
    put(place[row.share[i].slot], i);
    put(upper_place[row.share[half + i].slot], half + i);
  }
  if (n % 2 != 0) put(upper_place[row.share[n - 1].slot], n - 1);
}

}  // namespace attn::detail
