// SPDX-License-Identifier: MIT
//
// What a Successive Halving tournament leaves: its rounds, and the slot and weight of each source.
#pragma once

#include <algorithm>
#include <cstdint>

#include <attn/detail/scratch_carver.hpp>
#include <attn/view.hpp>

namespace attn::detail {

// A round takes m players to `next`. By rank, the best `byes` pass, of the others the best meets
// the worst: player byes + t meets player m − 1 − t, and the result takes the winner's place.
struct tournament_round {
  index_t m, next, byes, matches;
};

// The rounds from n players to k. Players of each, and the survivors behind them, have seats.
struct tournament_rounds {
  tournament_round round[64];  // they halve
  int count = 0;
  index_t seats = 0;

  tournament_rounds(index_t n, index_t k) noexcept {
    for (index_t m = n; m > k; m = round[count++].next) {
      const index_t next = std::max(k, (m + 1) / 2);
      round[count] = {m, next, 2 * next - m, m - next};
      seats += m;
    }
    seats += k;
  }
};

// Where a source ends and with what weight in that slot.
struct topk_share {
  index_t slot;
  double weight;
};

// What a slot is made of.
struct topk_part {
  index_t source;
  double weight;
};

// The plan of one row: n sources, k slots. Players have seats, round after round and in each by
// rank; the survivors' come last.
struct tournament_row {
  index_t n, k;
  topk_share* share;     // [n] of the sources
  topk_part* part;       // [n] slot by slot, in each by position
  index_t* begin;        // [k + 1] of each slot in `part`
  double* score;         // [seats]
  std::uint32_t* from;   // [seats] rank in the round before of the winner; first the source itself
  double* loser_weight;  // [n − k + W] match after match
  std::uint32_t* last;   // [k] rank of each slot's survivor
  double* slot_score;    // [k]

  // The source that won all matches of the player of some rank in round i; i = rounds.count is what
  // the survivors have. The seats of that round begin at `seat`.
  [[nodiscard]] index_t champion(const tournament_rounds& rounds, int i, index_t seat,
                                 index_t rank) const noexcept {
    for (; i > 0; --i) {
      rank = from[seat + rank];
      seat -= rounds.round[i - 1].m;
    }
    return from[rank];
  }
};

inline constexpr index_t widest_doubles = 8;  // of a vector

[[nodiscard]] inline tournament_row cut_row(scratch_carver& memory, index_t n, index_t k) noexcept {
  const index_t seats = tournament_rounds(n, k).seats;
  tournament_row row{n, k, {}, {}, {}, {}, {}, {}, {}, {}};
  row.share = memory.take<topk_share>(n);
  row.part = memory.take<topk_part>(n);
  row.begin = memory.take<index_t>(k + 1);
  row.score = memory.take<double>(seats + widest_doubles);
  row.from = memory.take<std::uint32_t>(seats);
  row.loser_weight = memory.take<double>(n - k + widest_doubles);
  row.last = memory.take<std::uint32_t>(k);
  row.slot_score = memory.take<double>(k);
  return row;
}

}  // namespace attn::detail
