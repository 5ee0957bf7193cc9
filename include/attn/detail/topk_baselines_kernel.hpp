// SPDX-License-Identifier: MIT
//
// Hard top-k, the iterative soft top-k of Goyal et al., and nCCS: one row of each.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include <Eigen/Core>

#include <attn/detail/rank_sort.hpp>
#include <attn/detail/soft_topk_kernel.hpp>
#include <attn/simd/convert.hpp>
#include <attn/simd/exp.hpp>
#include <attn/soft_topk_options.hpp>
#include <attn/view.hpp>

namespace attn::detail {

// The k best of scores [n], `stride` apart, come first in rank [n].
template <class Arch, class V>
void select_best(const V* scores, index_t stride, index_t n, index_t k, topk_order order,
                 ranked* rank) noexcept {
  for (index_t i = 0; i < n; ++i) {
    rank[i] = {rank_key(static_cast<double>(scores[i * stride])), i};
  }
  const auto better = [](const ranked& a, const ranked& b) {
    return a.key != b.key ? a.key < b.key : a.node < b.node;
  };
  if (k < n) std::nth_element(rank, rank + k, rank + n, better);
  if (order == topk_order::by_rank) {
    std::sort(rank, rank + k, better);
  } else {
    std::sort(rank, rank + k, [](const ranked& a, const ranked& b) { return a.node < b.node; });
  }
}

template <class T>
void copy_row(const T* from, index_t from_step, T* to, index_t to_step, index_t d) noexcept {
  if (from_step == 1 && to_step == 1) {
    std::copy_n(from, d, to);
  } else {
    for (index_t c = 0; c < d; ++c) to[c * to_step] = from[c * from_step];
  }
}

// Memory of one row of iterative top-k.
template <class S>
struct iterative_scratch {
  double* score;   // [n + W] NaN once it was a slot's maximum
  double* weight;  // [n + W]
  S* sums;         // [d]

  iterative_scratch(scratch_carver& memory, index_t n, index_t d) noexcept
      : score(memory.take<double>(n + widest)), weight(memory.take<double>(n + widest)),
        sums(memory.take<S>(d)) {}

 private:
  static constexpr index_t widest = 8;  // doubles of a vector
};

// weight [n] = exp(−alpha (score − m)²), 0 for those that were a maximum before; returns their sum.
template <class Arch>
[[nodiscard]] double peaked_weights(const double* score, double* weight, index_t n, double m,
                                    double alpha) noexcept {
  using B = simd::batch<double, Arch>;
  B sum(0.0);
  for (index_t i = 0; i < n; i += simd::width<double, Arch>) {
    const B v = simd::load<double, Arch>(score + i);
    const B gap = v - B(m);
    B w = simd::exp(B(-alpha) * gap * gap);
    w = xsimd::select(v == B(m), B(1.0), w);  // also where both are infinite
    w = xsimd::select(simd::is_nan(v), B(0.0), w);
    w.store_aligned(weight + i);
    sum += w;
  }
  return simd::sum(sum);
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
    for (int g = 0; g < G; ++g) sum = simd::multiply_add(w[g], static_cast<S>(x[g][c]), sum);
    out[c] = sum;
  }
}

// pooled [d] (through `sums` where it is not contiguous floats) = Σ weight · x over n rows.
template <class Arch, class S, class T>
void weighted_mean(const double* weight, double scale, index_t n, const matrix_pointer<const T>& x,
                   S* sums, index_t d) noexcept {
  if (x.step != 1) {
    for (index_t c = 0; c < d; ++c) {
      S sum = 0;
      for (index_t i = 0; i < n; ++i) {
        const S w = payload_weight<S>(weight[i] * scale);
        if (w != S(0)) sum = simd::multiply_add(w, static_cast<S>(x.row(i)[c * x.step]), sum);
      }
      sums[c] = sum;
    }
    return;
  }
  const T* rows[4];
  S w[4];
  int g = 0;
  bool first = true;
  for (index_t i = 0; i < n; ++i) {
    rows[g] = x.row(i);
    w[g] = payload_weight<S>(weight[i] * scale);
    if (w[g] == S(0) || ++g < 4) continue;
    add_rows<Arch, 4>(rows, w, sums, d, first);
    first = false;
    g = 0;
  }
  for (int rest = 0; rest < g; ++rest) {
    add_rows<Arch, 1>(rows + rest, w + rest, sums, d, first);
    first = false;
  }
}

// One row: k times the mean around the largest score that is left, which then leaves.
template <class Arch, class S, class T, class V, class P, class D>
void iterative_row(const V* scores, index_t score_stride, index_t n, index_t k, double alpha,
                   const matrix_pointer<const T>& x, const matrix_pointer<P>& pooled, index_t d,
                   D* pooled_scores, index_t pooled_score_stride,
                   const iterative_scratch<S>& s) noexcept {
  constexpr index_t W = simd::width<double, Arch>;
  constexpr double taken = std::numeric_limits<double>::quiet_NaN();
  constexpr double absent = -std::numeric_limits<double>::infinity();
  for (index_t i = 0; i < n; ++i) {
    const double v = static_cast<double>(scores[i * score_stride]);
    s.score[i] = v != v ? absent : v;
  }
  const index_t whole = (n + W - 1) / W * W;
  std::fill(s.score + n, s.score + whole, taken);
  for (index_t r = 0; r < k; ++r) {
    double m = absent;
    for (index_t i = 0; i < n; ++i) m = s.score[i] > m ? s.score[i] : m;
    const double sum = peaked_weights<Arch>(s.score, s.weight, n, m, alpha);
    weighted_mean<Arch, S, T>(s.weight, 1 / sum, n, x, s.sums, d);
    for (index_t c = 0; c < d; ++c) pooled.row(r)[c * pooled.step] = static_cast<P>(s.sums[c]);
    double score = 0;
    for (index_t i = 0; i < n; ++i) {
      if (s.weight[i] != 0) score += s.weight[i] * s.score[i];
    }
    pooled_scores[r * pooled_score_stride] = static_cast<D>(score / sum);
    *std::find(s.score, s.score + n, m) = taken;
  }
}

// Rows of x [n, d] divided by their length, contiguous; 0 stays 0.
template <class Arch, class S, class T>
void normalise_rows(const matrix_pointer<const T>& x, index_t n, index_t d, S* out) noexcept {
  for (index_t i = 0; i < n; ++i) {
    S largest = 0;  // divided out first, so that no square overflows or vanishes
    for (index_t c = 0; c < d; ++c) {
      const S a = std::abs(static_cast<S>(x.row(i)[c * x.step]));
      largest = a > largest || a != a ? a : largest;
    }
    S squares = 0;
    for (index_t c = 0; c < d; ++c) {
      out[i * d + c] = largest == S(0) ? S(0) : static_cast<S>(x.row(i)[c * x.step]) / largest;
      squares += out[i * d + c] * out[i * d + c];
    }
    const S scale = squares == S(0) ? S(0) : 1 / std::sqrt(squares);
    for (index_t c = 0; c < d; ++c) out[i * d + c] *= scale;
  }
}

// 1/k Σ_i max_j cos(y_i, z_j), with y [k, d] and z [m, d] normalised; best [k] is scratch.
template <class Arch, class S>
[[nodiscard]] double mean_best_cosine(const S* y, index_t k, const S* z, index_t m, index_t d,
                                      S* best) noexcept {
  constexpr int tile = 32;
  using matrix = Eigen::Matrix<S, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  using rows = Eigen::Map<const matrix>;
  Eigen::Matrix<S, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor, tile, tile> cosines;
  std::fill_n(best, k, -std::numeric_limits<S>::infinity());
  for (index_t i = 0; i < k; i += tile) {
    const index_t n_i = std::min<index_t>(tile, k - i);
    for (index_t j = 0; j < m; j += tile) {
      const index_t n_j = std::min<index_t>(tile, m - j);
      cosines.noalias() = rows(y + i * d, n_i, d) * rows(z + j * d, n_j, d).transpose();
      for (index_t a = 0; a < n_i; ++a) {
        S& top = best[i + a];
        for (index_t b = 0; b < n_j; ++b) {
          const S c = cosines(a, b);
          top = c > top || c != c ? c : top;
        }
      }
    }
  }
  double sum = 0;
  for (index_t i = 0; i < k; ++i) sum += static_cast<double>(best[i]);
  return sum / static_cast<double>(k);
}

}  // namespace attn::detail
