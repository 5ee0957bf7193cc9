// SPDX-License-Identifier: MIT
//
// A tournament's plan applied to a payload: pooled rows from source rows, and the gradients of
// both.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include <attn/detail/attention_state_kernel.hpp>
#include <attn/detail/tournament_kernel.hpp>
#include <attn/simd/convert.hpp>
#include <attn/view.hpp>

namespace attn::detail {

// Rows [length] of [d] elements with any strides: one head of a view.
template <class T>
struct matrix_pointer {
  T* data;
  index_t row_stride, step;

  [[nodiscard]] T* row(index_t i) const noexcept { return data + i * row_stride; }
};

template <class T>
[[nodiscard]] matrix_pointer<T> matrix_of(const tensor_view<T>& x, index_t b, index_t h) noexcept {
  if (x.size() == 0) return {x.data_handle(), 0, 0};
  return {&x(b, h, 0, 0), x.stride(2), x.extent(3) == 1 ? 1 : x.stride(3)};
}

// Weights below the smallest normal number count as 0: their sources are not read, and none is
// multiplied at the speed of subnormal numbers.
template <class S>
[[nodiscard]] S payload_weight(double weight) noexcept {
  const S w = static_cast<S>(weight);
  return w < std::numeric_limits<S>::min() ? S(0) : w;
}

// Rounds a row to its storage type.
template <class Arch, class S, class T>
void store_row(const S* sums, T* out, index_t d) noexcept {
  constexpr index_t W = simd::width<S, Arch>;
  index_t c = 0;
  for (; c + W <= d; c += W) {
    simd::store_as<S, Arch>(out + c, simd::load_unaligned<S, Arch>(sums + c));
  }
  for (; c < d; ++c) out[c] = static_cast<T>(sums[c]);
}

// out [d] = Σ w[g] x[g] over G rows, added to what is there unless it is the first.
template <class Arch, int G, class S, class T>
ATTN_INLINE void add_rows(const T* const* x, const S* w, S* out, index_t d, bool first) noexcept {
  using B = simd::batch<S, Arch>;
  constexpr index_t W = simd::width<S, Arch>;
  index_t c = 0;
  for (; c + W <= d; c += W) {
    B sum = first ? B(S(0)) : simd::load_unaligned<S, Arch>(out + c);
    for (int g = 0; g < G; ++g) {
      sum = simd::multiply_add(B(w[g]), simd::load_as<S, Arch>(x[g] + c), sum);
    }
    sum.store_unaligned(out + c);
  }
  for (; c < d; ++c) {
    S sum = first ? S(0) : out[c];
    for (int g = 0; g < G; ++g) sum += w[g] * static_cast<S>(x[g][c]);
    out[c] = sum;
  }
}

// out [d] = Σ weight · x[source] over the parts of a slot, rows contiguous, four to a pass.
template <class Arch, class S, class T>
void pool_slot(const tournament_row& row, index_t slot, const matrix_pointer<const T>& x, S* out,
               index_t d) noexcept {
  // Sources are scattered, which the hardware does not foresee: without prefetch short rows come at
  // 0.6, with it at 1.1 of the speed of a copy.
  constexpr index_t ahead = 16;
  const T* rows[4];
  S w[4];
  int g = 0;
  bool first = true;
  for (index_t e = row.begin[slot]; e < row.begin[slot + 1]; ++e) {
    const T* later = x.row(row.part[std::min(e + ahead, row.n - 1)].source);
    __builtin_prefetch(later);
    __builtin_prefetch(later + 64 / sizeof(T));
    rows[g] = x.row(row.part[e].source);
    w[g] = payload_weight<S>(row.part[e].weight);
    if (w[g] == S(0)) continue;
    if (++g < 4) continue;
    add_rows<Arch, 4>(rows, w, out, d, first);
    first = false;
    g = 0;
  }
  switch (g) {
  case 1:
    return add_rows<Arch, 1>(rows, w, out, d, first);
  case 2:
    return add_rows<Arch, 2>(rows, w, out, d, first);
  case 3:
    return add_rows<Arch, 3>(rows, w, out, d, first);
  default:
    return;
  }
}

// Slots [first, last) of pooled. `sums` [d] is a row in S, for pooled rows of a half type.
template <class Arch, class S, class T, class P>
void pool_slots(const tournament_row& row, const matrix_pointer<const T>& x,
                const matrix_pointer<P>& pooled, index_t d, index_t first, index_t last,
                S* sums) noexcept {
  if (x.step == 1 && pooled.step == 1) {
    for (index_t r = first; r < last; ++r) {
      if constexpr (std::is_same_v<S, P>) {
        pool_slot<Arch, S, T>(row, r, x, pooled.row(r), d);
      } else {
        pool_slot<Arch, S, T>(row, r, x, sums, d);
        store_row<Arch>(sums, pooled.row(r), d);
      }
    }
    return;
  }
  // A stride along dim: column by column, for what lies together is a column.
  for (index_t c = 0; c < d; ++c) {
    for (index_t r = first; r < last; ++r) {
      S sum = 0;
      for (index_t e = row.begin[r]; e < row.begin[r + 1]; ++e) {
        const S w = payload_weight<S>(row.part[e].weight);
        if (w != S(0)) sum += w * static_cast<S>(x.row(row.part[e].source)[c * x.step]);
      }
      pooled.row(r)[c * pooled.step] = static_cast<P>(sum);
    }
  }
}

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
    }
    for (; c < d; ++c) {
      const S g = static_cast<S>(d_out[c * d_pooled.step]);
      dot += g * static_cast<S>(in[c * x.step]);
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

// d_node [2n − k] = gradient of the nodes' scores; of the sources' in [0, n). gain [2n − k] holds
// that of the sources on entry; d_node of slot_node[r] is the gradient of the slot's score.
//
//   e = (1 − u) e_winner + u e_loser,  v = (1 − u) v_winner + u v_loser,  u = loser_weight
//   du = weight · (gain_loser − gain_winner) + dv · (v_loser − v_winner)
//   dv_winner = (1 − u) dv + du · ∂u/∂v_winner,  dv_loser = u dv + du · ∂u/∂v_loser
//
// weight [2n − k]: that of the nodes in their slots.
template <class Arch>
void scores_backward(const tournament_row& row, topk_boost boost, double strength, double* gain,
                     double* d_node, double* weight) noexcept {
  const double rate = boost_rate(boost, strength);
  const index_t matches = row.n - row.k;
  // 1. Gains are mixed like what they are gains of.
  for (index_t t = 0; t < matches; ++t) {
    const topk_match& m = row.match[t];
    gain[row.n + t] = (1 - m.loser_weight) * gain[m.winner] + m.loser_weight * gain[m.loser];
  }
  // 2. From the slots to the sources.
  for (index_t r = 0; r < row.k; ++r) weight[row.slot_node[r]] = 1;
  for (index_t t = matches - 1; t >= 0; --t) {
    const topk_match& m = row.match[t];
    const double v_winner = row.score[m.winner], v_loser = row.score[m.loser];
    const double d_v = d_node[row.n + t], u = m.loser_weight;
    const double w = weight[row.n + t];
    const weight_slopes slope = slopes_of<Arch>(v_winner, v_loser, u, boost, rate);
    double through_winner = 0, through_loser = 0;
    if (slope.winner != 0 || slope.loser != 0) {
      const double d_u = w * (gain[m.loser] - gain[m.winner]) + d_v * (v_loser - v_winner);
      through_winner = d_u * slope.winner;
      through_loser = d_u * slope.loser;
    }
    d_node[m.winner] = (1 - u) * d_v + through_winner;
    d_node[m.loser] = u * d_v + through_loser;
    weight[m.winner] = w * (1 - u);
    weight[m.loser] = w * u;
  }
}

// d_scores [length]: 0 past the row's own length, and for scores that are not there.
template <class Arch, class D>
void store_score_gradients(const tournament_row& row, const double* d_node, index_t length,
                           D* d_scores, index_t stride) noexcept {
  for (index_t i = 0; i < length; ++i) {
    const bool there = i < row.n && row.score[i] != -std::numeric_limits<double>::infinity();
    d_scores[i * stride] = static_cast<D>(there ? d_node[i] : 0.0);
  }
}

}  // namespace attn::detail
