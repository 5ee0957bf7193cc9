// SPDX-License-Identifier: MIT
//
// Successive Halving tournaments: from n scores to the slot and weight of each source.
//
// Players stand by rank, so that winners, losers and results of a round are arrays in order. What
// a rank was in the round before is the only link between rounds; it is followed upwards for
// champions and downwards for the sources' shares.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <type_traits>
#include <utility>

#include <attn/detail/rank_sort.hpp>
#include <attn/detail/tournament_match.hpp>
#include <attn/detail/tournament_plan.hpp>
#include <attn/simd/convert.hpp>
#include <attn/soft_topk_options.hpp>
#include <attn/view.hpp>

namespace attn::detail {

// Rows that are played together. A match is some 200 cycles from end to end, but a vector has room
// for W and the next ones need not wait: a short row alone would leave most of that unused.
inline constexpr index_t most_rows_together = 8;
[[nodiscard]] inline index_t rows_together(index_t n) noexcept {
  return std::clamp<index_t>(1024 / std::max<index_t>(n, 1), 1, most_rows_together);
}
// The same for `rows` rows in all, of which each thread is to have some.
[[nodiscard]] inline index_t rows_together(index_t n, index_t rows, int n_threads) noexcept {
  return std::clamp<index_t>(rows / n_threads, 1, rows_together(n));
}

// What rows need while they are made: for one row of n at a time, and for the matches of rows
// that are played together.
struct tournament_scratch {
  double* source_score;  // [n + W] in double or float
  double* winner;        // [matches + W] scores of one round
  double* loser;         // [matches + W]
  double* loser_weight;  // [matches + W]
  double* unsorted;      // [n + W]
  topk_share* share;     // [n] of players of one round, by rank
  topk_share* other;     // [n]
  index_t* place;        // [2k] where the next part of a slot goes
  rank_scratch rank;
};

[[nodiscard]] inline tournament_scratch cut_scratch(scratch_carver& memory, index_t n,
                                                    index_t k) noexcept {
  const index_t matches = rows_together(n) * (n / 2) + widest_doubles;
  tournament_scratch s{};
  s.source_score = memory.take<double>(n + widest_doubles);
  s.winner = memory.take<double>(matches);
  s.loser = memory.take<double>(matches);
  s.loser_weight = memory.take<double>(matches);
  s.unsorted = memory.take<double>(n + widest_doubles);
  s.share = memory.take<topk_share>(n);
  s.other = memory.take<topk_share>(n);
  s.place = memory.take<index_t>(2 * k);
  s.rank = {memory.take<std::uint64_t>(n), memory.take<std::uint64_t>(n),
            memory.take<std::uint32_t>(rank_scratch::digits << rank_scratch::most_bits)};
  return s;
}

// The sources by rank, or by position: the seats of the first round. Takes in the scores [n],
// `stride` apart.
template <class Arch, class S>
void seat_sources(const S* scores, index_t stride, const tournament_row& row, topk_sort sort,
                  const tournament_scratch& s) noexcept {
  using F = simd::compute_t<S>;
  const index_t n = row.n;
  F* copy = reinterpret_cast<F*>(s.source_score);
  const F* score = copy;
  const bool few = n <= most_counted<F, Arch>;
  if constexpr (std::is_same_v<S, F>) {
    if (stride == 1 && !few) score = scores;
  }
  if (score == copy) {
    for (index_t i = 0; i < n; ++i) copy[i] = static_cast<F>(scores[i * stride]);
  }
  if (sort != topk_sort::never && !(few && rank_by_counting<Arch>(copy, n, row.from))) {
    return rank_scores<Arch>(score, n, row.score, row.from, s.rank);
  }
  if (sort == topk_sort::never) std::iota(row.from, row.from + n, std::uint32_t{0});
  for (index_t r = 0; r < n; ++r) {
    row.score[r] = without_nan(static_cast<double>(score[row.from[r]]));
  }
}

// The players of a round by rank: their scores [m] come in the order of the winners before. Equal
// ones stay in it; returns whether there may be some.
//
// A round leaves them almost in order: a few moves each do, or else a sort from scratch.
template <class Arch>
[[nodiscard]] bool rank_players(double* score, std::uint32_t* from, index_t m,
                                const tournament_scratch& s) noexcept {
  constexpr index_t most = 2 * simd::width<double, Arch>;
  if (m <= most) {
    copy_vectors<Arch>(score, m, s.unsorted);
    if (rank_by_counting<Arch>(s.unsorted, m, from)) {
      for (index_t q = 0; q < m; ++q) score[q] = s.unsorted[from[q]];
      return false;
    }
  }
  std::iota(from, from + m, std::uint32_t{0});
  if (insert_scores<Arch>(score, from, m, 2 * m)) return has_equal_neighbours<Arch>(score, m);
  for (index_t q = 0; q < m; ++q) s.unsorted[from[q]] = score[q];
  rank_scores<Arch>(s.unsorted, m, score, from, s.rank);
  return has_equal_neighbours<Arch>(score, m);
}

// Equal scores in round i go by the champions' positions. Its seats begin at `seat`.
inline void settle_ties(const tournament_row& row, const tournament_rounds& rounds, int i,
                        index_t seat, std::uint64_t* scratch) noexcept {
  const index_t m = rounds.round[i].m;
  const double* score = row.score + seat;
  std::uint32_t* from = row.from + seat;
  for (index_t begin = 0, end; begin < m; begin = end) {
    for (end = begin + 1; end < m && score[end] == score[begin];) ++end;
    if (end == begin + 1) continue;
    for (index_t q = begin; q < end; ++q) {
      const auto champion = static_cast<std::uint64_t>(row.champion(rounds, i, seat, q));
      scratch[q] = champion << 32 | from[q];
    }
    std::sort(scratch + begin, scratch + end);
    for (index_t q = begin; q < end; ++q) {
      from[q] = static_cast<std::uint32_t>(scratch[q] & 0xffffffff);
    }
  }
}

// All rounds of `rows` rows alike in n and k, whose sources are seated.
template <class Arch>
void play_rounds(const tournament_row* row, index_t rows, const tournament_rounds& rounds,
                 topk_boost boost, double rate, topk_sort sort,
                 const tournament_scratch& s) noexcept {
  index_t seat = 0, played = 0;
  for (int i = 0; i < rounds.count; ++i) {
    const tournament_round& round = rounds.round[i];
    const index_t m = round.m, matches = round.matches, next_seat = seat + m;
    for (index_t g = 0; g < rows; ++g) {
      double* score = row[g].score + seat;
      copy_vectors<Arch>(score, round.byes, score + m);
      std::reverse_copy(score + round.next, score + m, s.loser + g * matches);
    }
    if (rows == 1) {
      double* score = row->score + seat;
      play_matches<Arch>(score + round.byes, s.loser, row->loser_weight + played,
                         score + m + round.byes, matches, boost, rate);
    } else {
      for (index_t g = 0; g < rows; ++g) {
        copy_vectors<Arch>(row[g].score + seat + round.byes, matches, s.winner + g * matches);
      }
      play_matches<Arch>(s.winner, s.loser, s.loser_weight, s.winner, rows * matches, boost, rate);
      for (index_t g = 0; g < rows; ++g) {
        copy_vectors<Arch>(s.winner + g * matches, matches, row[g].score + next_seat + round.byes);
        copy_vectors<Arch>(s.loser_weight + g * matches, matches, row[g].loser_weight + played);
      }
    }
    const bool ranked = i + 1 < rounds.count && sort == topk_sort::every_round;
    for (index_t g = 0; g < rows; ++g) {
      std::uint32_t* from = row[g].from + next_seat;
      if (!ranked) {
        std::iota(from, from + round.next, std::uint32_t{0});
      } else if (rank_players<Arch>(row[g].score + next_seat, from, round.next, s)) {
        settle_ties(row[g], rounds, i + 1, next_seat, s.rank.words);
      }
    }
    seat = next_seat, played += matches;
  }
}

// The survivors' slots, by rank or by the position of the champion.
template <class Arch>
void number_slots(const tournament_row& row, const tournament_rounds& rounds, topk_order order,
                  const tournament_scratch& s) noexcept {
  const index_t k = row.k, seat = rounds.seats - k;
  for (index_t r = 0; r < k; ++r) row.last[r] = static_cast<std::uint32_t>(r);
  if (order == topk_order::by_position) {
    double* position = s.source_score;
    for (index_t r = 0; r < k; ++r) {
      position[r] = -static_cast<double>(row.champion(rounds, rounds.count, seat, r));
    }
    constexpr index_t few = 8;
    if (k > few || !insert_scores<Arch>(position, row.last, k, k * k)) {
      rank_scores<Arch>(position, k, s.unsorted, row.last, s.rank);
    }
  }
  for (index_t r = 0; r < k; ++r) row.slot_score[r] = row.score[seat + row.last[r]];
}

// Slots and weights of the sources, from the survivors down.
inline void share_out(const tournament_row& row, const tournament_rounds& rounds,
                      const tournament_scratch& s) noexcept {
  const index_t n = row.n, k = row.k;
  topk_share *now = s.share, *before = s.other;
  for (index_t r = 0; r < k; ++r) now[row.last[r]] = {r, 1.0};
  const std::uint32_t* from = row.from + rounds.seats - k;
  const double* loser_weight = row.loser_weight + (n - k);
  const auto pass = [&](const tournament_round& round, const auto& put) {
    for (index_t q = 0; q < round.next; ++q) {
      const topk_share share = now[q];
      const index_t r = from[q], t = r - round.byes;
      if (t < 0) {
        put(r, share);
      } else {
        const double u = loser_weight[t];
        put(r, {share.slot, share.weight * (1 - u)});
        put(round.m - 1 - t, {share.slot, share.weight * u});
      }
    }
  };
  for (int i = rounds.count - 1; i >= 0; --i) {
    const tournament_round& round = rounds.round[i];
    loser_weight -= round.matches;
    if (i > 0) {
      pass(round, [before](index_t r, topk_share share) { before[r] = share; });
      std::swap(now, before);
    } else {
      pass(round, [&row](index_t r, topk_share share) { row.share[row.from[r]] = share; });
    }
    from -= round.m;
  }
  if (rounds.count > 0) return;
  for (index_t r = 0; r < n; ++r) row.share[row.from[r]] = now[r];
}

// The sources slot by slot: counts, sums, places. Both halves of the sources at a time, for where
// all go to few slots each count waits for the one before.
inline void list_parts(const tournament_row& row, const tournament_scratch& s) noexcept {
  const index_t n = row.n, k = row.k, half = n / 2;
  index_t *place = s.place, *upper_place = s.place + k;
  std::fill_n(s.place, 2 * k, index_t{0});
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

// Plans of `count` rows of scores from row `first` of [B, H] on, but for their parts.
template <class Arch, class S>
void plan_rows(const tensor_view<S>& scores, index_t first, index_t count,
               const tournament_row* row, double rate, const soft_topk_options& options,
               const tournament_scratch& s) noexcept {
  const index_t n_heads = scores.extent(1);
  for (index_t begin = 0, end; begin < count; begin = end) {
    for (end = begin; end < count && row[end].n == row[begin].n; ++end) {
      const index_t b = (first + end) / n_heads, h = (first + end) % n_heads;
      seat_sources<Arch>(&scores(b, h, 0, 0), scores.stride(2), row[end], options.sort, s);
    }
    const tournament_rounds rounds(row[begin].n, row[begin].k);
    play_rounds<Arch>(row + begin, end - begin, rounds, options.boost, rate, options.sort, s);
    for (index_t g = begin; g < end; ++g) {
      number_slots<Arch>(row[g], rounds, options.order, s);
      share_out(row[g], rounds, s);
    }
  }
}

}  // namespace attn::detail
