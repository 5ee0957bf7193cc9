// SPDX-License-Identifier: MIT
//
// Gradients of a soft top-k: of the payload, and through the weights and scores of all matches.
#pragma once

#include <cmath>
#include <limits>

#include <attn/detail/soft_topk_kernel.hpp>
#include <attn/simd/convert.hpp>
#include <attn/view.hpp>

namespace attn::detail {

// d_x [length, d] = weight · d_pooled[slot], and gain[i] += d_pooled[slot] · x[i].
//
// The gain of a source is how much the loss grows per unit of weight it has in its slot.
template <class Arch, class S, class T, class G, class D>
void pool_backward(const tournament_row& row, const matrix_pointer<const T>& x,
                   const matrix_pointer<const G>& d_pooled, const matrix_pointer<D>& d_x, index_t d,
                   index_t length, double* gain) noexcept {
  using B = simd::batch<S, Arch>;
  constexpr index_t W = simd::width<S, Arch>;
  const bool contiguous = x.step == 1 && d_pooled.step == 1 && d_x.step == 1;
  for (index_t i = 0; i < length; ++i) {
    const S w = i < row.n ? payload_weight<S>(row.share[i].weight) : S(0);
    D* out = d_x.row(i);
    if (w == S(0)) {
      for (index_t c = 0; c < d; ++c) out[c * d_x.step] = D(0);
      continue;
    }
    const T* in = x.row(i);
    const G* d_out = d_pooled.row(row.share[i].slot);
    S dot = 0;
    index_t c = 0;
    if (contiguous) {
      B sum(S(0));
      for (; c + W <= d; c += W) {
        const B g = simd::load_as<S, Arch>(d_out + c);
        sum = simd::multiply_add(g, simd::load_as<S, Arch>(in + c), sum);
        simd::store_as<S, Arch>(out + c, B(w) * g);
      }
      dot = simd::sum(sum);
    } else {
      // The same sums, so that no bit depends on the layout.
      alignas(64) S lane[W] = {};
      for (; c + W <= d; c += W) {
        for (index_t e = c; e < c + W; ++e) {
          const S g = static_cast<S>(d_out[e * d_pooled.step]);
          lane[e - c] = simd::multiply_add(g, static_cast<S>(in[e * x.step]), lane[e - c]);
          out[e * d_x.step] = static_cast<D>(w * g);
        }
      }
      dot = simd::sum(simd::load<S, Arch>(lane));
    }
    for (; c < d; ++c) {
      const S g = static_cast<S>(d_out[c * d_pooled.step]);
      dot = simd::multiply_add(g, static_cast<S>(in[c * x.step]), dot);
      out[c * d_x.step] = static_cast<D>(w * g);
    }
    gain[i] += static_cast<double>(dot);
  }
}

// d loser_weight / d score of the winner and of the loser. 0 where the weight is a step: at
// infinite scores, and where B^v is beyond double.
struct weight_slopes {
  double winner, loser;
};
template <class Arch>
[[nodiscard]] weight_slopes slopes_of(double winner, double loser, double loser_weight,
                                      topk_boost boost, double rate) noexcept {
  const double steepness = loser_weight * (1 - loser_weight);
  if (steepness == 0 || !std::isfinite(winner) || !std::isfinite(loser)) return {0, 0};
  if (boost == topk_boost::scaled) return {-rate * steepness, rate * steepness};
  const auto slope = [&](double v) {
    const double power = std::exp(rate * v);
    return std::isfinite(power) ? steepness * rate * power : 0.0;
  };
  return {-slope(winner), slope(loser)};
}

// Memory of scores_backward, for one row of n sources.
struct scores_backward_scratch {
  double* gain;       // [n] of the sources
  double* d_slot;     // [k] gradient of the slots' scores
  double* seat_gain;  // [seats]
  double* d_seat;     // [seats] gradient of the players' scores
  double* weight;     // [seats] of the players in their slots

  scores_backward_scratch(scratch_carver& memory, index_t n, index_t k) noexcept
      : gain(memory.take<double>(n)), d_slot(memory.take<double>(k)),
        seat_gain(memory.take<double>(tournament_rounds(n, k).seats)),
        d_seat(memory.take<double>(tournament_rounds(n, k).seats)),
        weight(memory.take<double>(tournament_rounds(n, k).seats)) {}
};

// From s.gain and s.d_slot to the gradients of the sources' scores, by rank in s.d_seat [n].
//
//   e = (1 − u) e_winner + u e_loser,  v = (1 − u) v_winner + u v_loser,  u = loser_weight
//   du = weight · (gain_loser − gain_winner) + dv · (v_loser − v_winner)
//   dv_winner = (1 − u) dv + du · ∂u/∂v_winner,  dv_loser = u dv + du · ∂u/∂v_loser
template <class Arch>
void scores_backward(const tournament_row& row, topk_boost boost, double strength,
                     const scores_backward_scratch& s) noexcept {
  const double rate = boost_rate(boost, strength);
  const index_t n = row.n, k = row.k;
  // 1. Gains are mixed like what they are gains of.
  for (index_t r = 0; r < n; ++r) s.seat_gain[r] = s.gain[row.from[r]];
  const tournament_rounds rounds(n, k);
  index_t seat = 0, played = 0;
  for (int i = 0; i < rounds.count; ++i) {
    const tournament_round& round = rounds.round[i];
    const index_t m = round.m;
    const double *gain = s.seat_gain + seat, *loser_weight = row.loser_weight + played;
    seat += m;
    for (index_t q = 0; q < round.next; ++q) {
      const index_t r = row.from[seat + q], t = r - round.byes;
      const double u = t < 0 ? 0 : loser_weight[t];
      const double mixed = t < 0 ? gain[r] : (1 - u) * gain[r] + u * gain[m - 1 - t];
      s.seat_gain[seat + q] = mixed;
    }
    played += round.matches;
  }
  // 2. From the slots to the sources.
  for (index_t r = 0; r < k; ++r) {
    s.d_seat[seat + row.last[r]] = s.d_slot[r];
    s.weight[seat + row.last[r]] = 1;
  }
  for (int i = rounds.count - 1; i >= 0; --i) {
    const tournament_round& round = rounds.round[i];
    const std::uint32_t* from = row.from + seat;
    const double *d_after = s.d_seat + seat, *weight_after = s.weight + seat;
    seat -= round.m, played -= round.matches;
    const double *score = row.score + seat, *gain = s.seat_gain + seat;
    double *d = s.d_seat + seat, *weight = s.weight + seat;
    for (index_t q = 0; q < round.next; ++q) {
      const index_t winner = from[q], t = winner - round.byes, loser = round.m - 1 - t;
      if (t < 0) {
        d[winner] = d_after[q];
        weight[winner] = weight_after[q];
        continue;
      }
      const double u = row.loser_weight[played + t], d_v = d_after[q], w = weight_after[q];
      const weight_slopes slope = slopes_of<Arch>(score[winner], score[loser], u, boost, rate);
      double through_winner = 0, through_loser = 0;
      if (slope.winner != 0 || slope.loser != 0) {
        const double d_u = w * (gain[loser] - gain[winner]) + d_v * (score[loser] - score[winner]);
        through_winner = d_u * slope.winner;
        through_loser = d_u * slope.loser;
      }
      d[winner] = (1 - u) * d_v + through_winner;
      d[loser] = u * d_v + through_loser;
      weight[winner] = w * (1 - u);
      weight[loser] = w * u;
    }
  }
}

// d_scores [length]: 0 past the row's own length, and for scores that are not there.
template <class Arch, class D>
void store_score_gradients(const tournament_row& row, const double* d_by_rank, index_t length,
                           D* d_scores, index_t stride) noexcept {
  for (index_t r = 0; r < row.n; ++r) {
    const bool there = row.score[r] != -std::numeric_limits<double>::infinity();
    d_scores[static_cast<index_t>(row.from[r]) * stride] =
        static_cast<D>(there ? d_by_rank[r] : 0.0);
  }
  for (index_t i = row.n; i < length; ++i) d_scores[i * stride] = D(0);
}

}  // namespace attn::detail
