// SPDX-License-Identifier: MIT
//
// Sums over the weights of one head, a tile of rows at a time.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include <attn/detail/attention_weights_kernel.hpp>

namespace attn::detail {

/// Sums from which the diagnostics of a head, or of several, are made.
struct head_sums {
  index_t n_rows = 0, n_empty_rows = 0, n_nan_rows = 0;
  index_t n_flat_rows = 0;  // rows of at least two keys: the others have no flatness
  index_t n_pairs = 0, n_at_least_0_01 = 0, n_at_least_uniform = 0;
  double entropy = 0, flatness = 0, largest_weight = 0, sink_weight = 0;
  double largest_of_all = 0;
  double correlation = 0;  // sum over n_correlations heads
  index_t n_correlations = 0;
};

// A template like all arithmetic that a compiler may put into vectors, and no plain function.
template <class Arch>
void add_sums(head_sums& sum, const head_sums& x) noexcept {
  sum.n_rows += x.n_rows, sum.n_empty_rows += x.n_empty_rows, sum.n_nan_rows += x.n_nan_rows;
  sum.n_flat_rows += x.n_flat_rows, sum.n_pairs += x.n_pairs;
  sum.n_at_least_0_01 += x.n_at_least_0_01, sum.n_at_least_uniform += x.n_at_least_uniform;
  sum.entropy += x.entropy, sum.flatness += x.flatness;
  sum.largest_weight += x.largest_weight, sum.sink_weight += x.sink_weight;
  sum.largest_of_all = std::max(sum.largest_of_all, x.largest_of_all);
  sum.correlation += x.correlation, sum.n_correlations += x.n_correlations;
}

/// Where the numbers of single rows and keys of a head go.
struct head_details {
  double *entropy, *flatness, *largest_weight;  // [n_q]
  double* mass;                                 // [n_kv], 0 at the start
};

// Entropy, flatness and largest weight of each row of a tile.
template <class T, class Arch>
void add_rows(const tile_of_weights<T, Arch>& t, head_sums& sums,
              const head_details& out) noexcept {
  constexpr double undefined = std::numeric_limits<double>::quiet_NaN();
  for (index_t r = 0; r < t.n_rows; ++r) {
    const row_of_weights& row = t.row[static_cast<std::size_t>(r)];
    const index_t i = t.row0 + r;
    out.entropy[i] = out.flatness[i] = out.largest_weight[i] = undefined;
    if (row.n_keys == 0 || std::isnan(row.z)) {
      ++(row.n_keys == 0 ? sums.n_empty_rows : sums.n_nan_rows);
      continue;
    }
    // −Σ p ln p with p = e / z and ln e = s − m. Rounding must not make it negative.
    const double entropy = std::max(0.0, std::log(row.z) - row.log_moment / row.z);
    const double largest = 1 / row.z_and_sink;  // the largest e is 1
    out.entropy[i] = entropy;
    out.largest_weight[i] = largest;
    if (row.n_keys > 1) {
      out.flatness[i] = std::min(1.0, entropy / std::log(static_cast<double>(row.n_keys)));
      sums.flatness += out.flatness[i];
      ++sums.n_flat_rows;
    }
    ++sums.n_rows;
    sums.n_pairs += row.n_keys;
    sums.entropy += entropy;
    sums.largest_weight += largest;
    sums.largest_of_all = std::max(sums.largest_of_all, largest);
    sums.sink_weight += 1 - row.z * largest;
  }
}

// Mass of each key and the counts of weights. NaN rows add nothing: NaN is no number and at least
// nothing.
template <class T, class Arch>
void add_keys(const tile_of_weights<T, Arch>& t, index_t n_kv, head_sums& sums,
              const head_details& out) noexcept {
  using B = simd::batch<T, Arch>;
  constexpr int W = simd::width<T, Arch>, QS = tile_of_weights<T, Arch>::rows;
  const B one_percent(T(0.01)), uniform(static_cast<T>(1 / static_cast<double>(n_kv)));
  const B zero(T(0)), one(T(1));
  for (index_t j = 0; j < t.n_keys; ++j) {
    B mass = zero, n_one_percent = zero, n_uniform = zero;
    for (int lane = 0; lane < QS; lane += W) {
      const B p =
          simd::load<T, Arch>(t.e + j * QS + lane) * simd::load<T, Arch>(t.factor.data() + lane);
      mass = mass + xsimd::select(p == p, p, zero);
      n_one_percent = n_one_percent + xsimd::select(p >= one_percent, one, zero);
      n_uniform = n_uniform + xsimd::select(p >= uniform, one, zero);
    }
    out.mass[t.first_key + j] += static_cast<double>(simd::sum(mass));
    sums.n_at_least_0_01 += static_cast<index_t>(simd::sum(n_one_percent));
    sums.n_at_least_uniform += static_cast<index_t>(simd::sum(n_uniform));
  }
}

// Pearson's correlation of mass[j] and norm[j] over the keys with seen[j]; NaN where either does
// not vary or a norm is not finite.
template <class Arch>
[[nodiscard]] double correlation(const double* mass, const double* norm, const bool* seen,
                                 index_t n) noexcept {
  double count = 0, mean_mass = 0, mean_norm = 0;
  for (index_t j = 0; j < n; ++j) {
    if (seen[j]) count += 1, mean_mass += mass[j], mean_norm += norm[j];
  }
  mean_mass /= count, mean_norm /= count;
  double mm = 0, nn = 0, mn = 0;
  for (index_t j = 0; j < n; ++j) {
    if (!seen[j]) continue;
    const double dm = mass[j] - mean_mass, dn = norm[j] - mean_norm;
    mm += dm * dm, nn += dn * dn, mn += dm * dn;
  }
  return mn / std::sqrt(mm * nn);
}

/// Scratch of one head next to the worker's own.
template <class T>
struct head_scratch {
  bool* seen;    // [n_kv]
  double* norm;  // [n_kv]
  T* key;        // [d_qk]

  head_scratch(const weights_problem<T>& c, scratch_carver& memory) noexcept
      : seen(memory.take<bool>(c.n_kv)), norm(memory.take<double>(c.n_kv)),
        key(memory.take<T>(c.d_qk)) {}
};

// ‖k_j‖ of the keys that some row may attend to; no other key is looked at.
template <class Arch, class T>
void key_norms(const weights_problem<T>& c, index_t b, index_t h,
               const head_scratch<T>& s) noexcept {
  const row_source<T> k = c.k(b, c.kv_head(h));
  for (index_t j = 0; j < c.n_kv; ++j) {
    if (!s.seen[j]) continue;
    k.read(j, 1, c.d_qk, s.key, c.d_qk);
    double sum = 0;
    for (index_t d = 0; d < c.d_qk; ++d) {
      sum += static_cast<double>(s.key[d]) * static_cast<double>(s.key[d]);
    }
    s.norm[j] = std::sqrt(sum);
  }
}

/// All of one head.
template <class T, class Arch, score_rule Rule>
head_sums diagnose_head(const weights_problem<T>& c, index_t b, index_t h,
                        weights_worker<T, Arch, Rule>& worker, const head_scratch<T>& scratch,
                        const head_details& out) noexcept {
  head_sums sums;
  std::fill_n(scratch.seen, c.n_kv, false);
  // 1. Rows and keys, a tile at a time.
  for (index_t row0 = 0; row0 < c.n_q; row0 += weights_worker<T, Arch, Rule>::QS) {
    const tile_of_weights<T, Arch>& tile = worker.weigh(b, h, row0);
    add_rows(tile, sums, out);
    add_keys(tile, c.n_kv, sums, out);
    for (index_t j = 0; j < tile.n_keys; ++j) scratch.seen[tile.first_key + j] |= tile.seen[j];
  }
  // 2. What draws the mass.
  key_norms<Arch>(c, b, h, scratch);
  const double r = correlation<Arch>(out.mass, scratch.norm, scratch.seen, c.n_kv);
  if (std::isfinite(r)) sums.correlation = r, sums.n_correlations = 1;
  return sums;
}

}  // namespace attn::detail
