// SPDX-License-Identifier: MIT
//
// The far field of SMYRF: means of the keys and values that a cluster of queries does not meet.
//
// Clusters are the leaves of a binary tree (the one that bisection made; for ranks, the tree over
// ranks). On the way from the root to cluster c, at each node the half that c is not in is one far
// group: log2(clusters) groups that hold every other key of the round once. Group sums are
// differences of running sums over the clusters.
#pragma once

#include <algorithm>
#include <cmath>

#include <attn/detail/packing.hpp>
#include <attn/detail/scratch_carver.hpp>
#include <attn/detail/smyrf_plan.hpp>
#include <attn/simd/batch.hpp>
#include <attn/simd/widen.hpp>
#include <attn/view.hpp>

namespace attn::detail {

/// Levels of a tree over at most 2^24 clusters.
inline constexpr index_t smyrf_most_far = 25;

/// Calls group(c0, c1) for the far groups of cluster c, clusters [c0, c1) each, from the root down.
template <class Group>
void for_far_groups(index_t clusters, index_t c, const Group& group) {
  index_t c0 = 0, c1 = clusters;
  while (c1 - c0 > 1) {
    const index_t mid = c0 + (c1 - c0) / 2;
    if (c < mid) {
      group(mid, c1);
      c1 = mid;
    } else {
      group(c0, mid);
      c0 = mid;
    }
  }
}

/// Σ of keys and values over clusters [0, c), for one (batch, key/value head, round).
template <class T>
struct smyrf_far_sums {
  double* k;  // [clusters + 1][d_qk]
  double* v;  // [clusters + 1][d_v]
  index_t d_qk, d_v;
  double *d_k, *d_v_sum;  // the same for gradients, as differences from cluster to cluster

  [[nodiscard]] static smyrf_far_sums carve(scratch_carver& memory, index_t clusters, index_t d_qk,
                                            index_t d_v) noexcept {
    smyrf_far_sums s{};
    s.k = memory.take<double>((clusters + 1) * d_qk);
    s.v = memory.take<double>((clusters + 1) * d_v);
    s.d_qk = d_qk, s.d_v = d_v;
    return s;
  }

  void carve_gradients(scratch_carver& memory, index_t clusters) noexcept {
    d_k = memory.take<double>((clusters + 1) * d_qk);
    d_v_sum = memory.take<double>((clusters + 1) * d_v);
  }

  /// `row` holds max(d_qk, d_v) numbers.
  template <class Arch>
  void add_up(const smyrf_plan& plan, const row_source<T>& k_rows, const row_source<T>& v_rows,
              const index_t* keys, index_t length, T* row) const noexcept {
    add_up_rows<Arch>(plan, k_rows, keys, length, d_qk, row, k);
    add_up_rows<Arch>(plan, v_rows, keys, length, d_v, row, v);
    if (d_k == nullptr) return;
    std::fill_n(d_k, (plan.clusters + 1) * d_qk, 0.0);
    std::fill_n(d_v_sum, (plan.clusters + 1) * d_v, 0.0);
  }

  /// Mean keys, mean values and logarithms of the sizes of the far groups of cluster c; returns
  /// their number. Empty groups are left out.
  [[nodiscard]] index_t take(const smyrf_plan& plan, index_t length, index_t c, T* mean_k,
                             T* mean_v, T* log_count) const noexcept {
    index_t n = 0;
    for_far_groups(plan.clusters, c, [&](index_t c0, index_t c1) {
      const index_t count = plan.begin(length, c1) - plan.begin(length, c0);
      if (count == 0) return;
      mean(k, d_qk, c0, c1, count, mean_k + n * d_qk);
      mean(v, d_v, c0, c1, count, mean_v + n * d_v);
      log_count[n++] = static_cast<T>(std::log(static_cast<double>(count)));
    });
    return n;
  }

  /// Gradients of the means that `take` gave, in its order: each key of a group gets its share.
  void give(const smyrf_plan& plan, index_t length, index_t c, const T* d_mean_k, index_t ld_k,
            const T* d_mean_v, index_t ld_v) const noexcept {
    for_far_groups(plan.clusters, c, [&](index_t c0, index_t c1) {
      const index_t count = plan.begin(length, c1) - plan.begin(length, c0);
      if (count == 0) return;
      const auto share = [&](const T* gradient, index_t d, double* sums) {
        for (index_t x = 0; x < d; ++x) {
          const double each = static_cast<double>(gradient[x]) / static_cast<double>(count);
          sums[c0 * d + x] += each;
          sums[c1 * d + x] -= each;
        }
      };
      share(d_mean_k, d_qk, d_k);
      share(d_mean_v, d_v, d_v_sum);
      d_mean_k += ld_k, d_mean_v += ld_v;
    });
  }

  /// The shares of all clusters to the rows of their keys.
  template <class Sums>
  void spread(const smyrf_plan& plan, const index_t* list, index_t length, const Sums& dk,
              const Sums& dv) const noexcept {
    const auto add = [&](double* sums, index_t d, const Sums& rows) {
      for (index_t c = 0; c < plan.clusters; ++c) {
        double* sum = sums + c * d;
        for (index_t x = 0; x < d && c > 0; ++x) sum[x] += sum[x - d];
        for (index_t i = plan.begin(length, c); i < plan.begin(length, c + 1); ++i) {
          T* row = rows(list[i]);
          for (index_t x = 0; x < d; ++x) row[x] += static_cast<T>(sum[x]);
        }
      }
    };
    add(d_k, d_qk, dk);
    add(d_v_sum, d_v, dv);
  }

 private:
  static void mean(const double* sums, index_t d, index_t c0, index_t c1, index_t count,
                   T* out) noexcept {
    for (index_t c = 0; c < d; ++c) {
      out[c] = static_cast<T>((sums[c1 * d + c] - sums[c0 * d + c]) / static_cast<double>(count));
    }
  }

  template <class Arch>
  static void add_up_rows(const smyrf_plan& plan, const row_source<T>& source, const index_t* list,
                          index_t length, index_t d, T* row, double* sums) noexcept {
    std::fill_n(sums, d, 0.0);
    for (index_t c = 0; c < plan.clusters; ++c) {
      const double* before = sums + c * d;
      double* sum = sums + (c + 1) * d;
      std::copy_n(before, d, sum);
      for (index_t i = plan.begin(length, c); i < plan.begin(length, c + 1); ++i) {
        const T* x = row;
        if (source.direct != nullptr)
          x = source.direct + list[i] * source.row_stride;
        else
          source.read(list[i], 1, d, row, d);
        add_row<Arch>(x, d, sum);
      }
    }
  }

  template <class Arch>
  static void add_row(const T* x, index_t d, double* sum) noexcept {
    constexpr int W = simd::width<double, Arch>;
    index_t c = 0;
    for (; c + W <= d; c += W) {
      simd::batch<double, Arch> row;
      if constexpr (sizeof(T) == 4)
        row = simd::widen<Arch>(x + c);
      else
        row = simd::load_unaligned<double, Arch>(x + c);
      (simd::load_unaligned<double, Arch>(sum + c) + row).store_unaligned(sum + c);
    }
    for (; c < d; ++c) sum[c] += static_cast<double>(x[c]);
  }
};

}  // namespace attn::detail
