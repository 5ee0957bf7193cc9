// SPDX-License-Identifier: MIT
//
// SMYRF attention: the dense micro-kernels inside clusters, and the merge of rounds.
//
// For one round and one cluster of one key/value head:
//   1. gather the rows of K and V of the cluster               smyrf_keys.hpp
//   2. per query head, in tiles of up to 3 vectors: gather and
//      transpose queries, fold the keys                        smyrf_tile.hpp
//   3. merge the tile into the running (lse, out) of its rows  smyrf_merge.hpp
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include <attn/detail/row_lookahead.hpp>
#include <attn/detail/scratch_carver.hpp>
#include <attn/detail/smyrf_far_field.hpp>
#include <attn/detail/smyrf_gather.hpp>
#include <attn/detail/smyrf_keys.hpp>
#include <attn/detail/smyrf_merge.hpp>
#include <attn/detail/smyrf_plan.hpp>
#include <attn/detail/smyrf_problem.hpp>
#include <attn/detail/smyrf_rule.hpp>
#include <attn/detail/smyrf_tile.hpp>
#include <attn/detail/tile_output.hpp>
#include <attn/score_rule.hpp>

namespace attn::detail {

/// Clusters of a call, one at a time.
template <class T, class Arch, rule_kind Kind, bool Pairs>
class smyrf_worker {
  using size = tile_size<T, Arch>;
  static constexpr T infinity = std::numeric_limits<T>::infinity();

 public:
  smyrf_worker(const smyrf_problem<T>& problem, const smyrf_rule<T>& rule,
               scratch_carver memory) noexcept
      : c_(problem), plan_(*problem.plan), rule_(rule), tile_(problem, rule, keys_) {
    carve(memory);
  }
  smyrf_worker(const smyrf_worker&) = delete;
  smyrf_worker& operator=(const smyrf_worker&) = delete;

  [[nodiscard]] static std::size_t scratch_bytes(const smyrf_problem<T>& problem,
                                                 const smyrf_rule<T>& rule) noexcept {
    smyrf_worker counter(problem, rule, scratch_carver());
    scratch_carver memory;
    counter.carve(memory);
    return memory.used();
  }

  /// Cluster `c` of round r, all query heads of key/value head g. `result(h)` is where they go;
  /// the first visit of a row overwrites it.
  template <class Result>
  void run(index_t b, index_t g, index_t r, index_t c, const smyrf_far_sums<T>& far,
           const Result& result, bool overwrite) noexcept {
    enter_head(b, g);
    keys_.gather(plan_, b, g, r, c, k_, v_, far);
    tile_.enter_cluster(b, g, r);
    look_ahead(b, g, r, c, result);
    const index_t first = plan_.begin(q_length_, c), end = plan_.begin(q_length_, c + 1);
    for (index_t h = g * plan_.group(); h < (g + 1) * plan_.group(); ++h) {
      const row_source<T> q = c_.q(b, h);
      const index_t* queries = plan_.queries(b, h, r) + first;
      smyrf_for_tiles<size::width>(end - first, [&](index_t i, index_t rows, int nr) {
        tile_.load(h, q, queries + i, rows, nr, rows_);
        tile_.fold(false, &ahead_);
        merge(queries + i, result(h), overwrite);
      });
    }
  }

  /// Σ of keys and values, for the far field of round r.
  void add_up(index_t b, index_t g, index_t r, const smyrf_far_sums<T>& far) noexcept {
    enter_head(b, g);
    far.template add_up<Arch>(plan_, k_, v_, plan_.keys(b, g, r), k_length_, rows_);
  }

  /// Rows whose own key is in none of their clusters start with it, the others with nothing.
  void attend_self(index_t b, index_t h, const smyrf_result<T>& result) noexcept {
    const index_t g = h / plan_.group();
    enter_head(b, g);
    const row_source<T> q = c_.q(b, h);
    for (index_t i = 0; i < q_length_; ++i) {
      T* out = result.out + i * result.stride;
      T score = -infinity;
      if (i < k_length_ && !plan_.meet(b, h, i, i)) score = self_score(b, h, i, q);
      result.lse[i] = score + (score == -infinity ? T(0) : score - score);  // +inf: a row of NaN
      if (score == -infinity)
        std::fill_n(out, c_.d_v, T(0));
      else
        v_.read(i, 1, c_.d_v, out, c_.d_v);
    }
  }

 private:
  void carve(scratch_carver& memory) noexcept {
    keys_.carve(memory, plan_, c_.d_qk, c_.d_v, c_.far_field);
    tile_.carve(memory);
    rows_ = memory.take<T>(size::max_rows * std::max(c_.d_qk, c_.d_v));
    const index_t most_queries = (c_.n_q + plan_.clusters - 1) / plan_.clusters;
    ahead_.carve(memory,
                 2 * (plan_.group() * most_queries + smyrf_keys<T, Arch>::most_keys(plan_)));
  }

  void enter_head(index_t b, index_t g) noexcept {
    if (b == b_ && g == g_) return;
    b_ = b, g_ = g;
    k_ = c_.k(b, g);
    v_ = c_.v(b, g);
    q_length_ = plan_.q_length(b), k_length_ = plan_.k_length(b);
  }

  // What to prefetch while cluster c is computed: the rows that its tiles are merged into, and the
  // operands of the next cluster, which would otherwise arrive from L3 one miss after the other.
  template <class Result>
  void look_ahead(index_t b, index_t g, index_t r, index_t c, const Result& result) noexcept {
    ahead_.clear(static_cast<index_t>(sizeof(T)) * std::max(c_.d_qk, c_.d_v));
    const bool last_of_round = c + 1 == plan_.clusters;
    const index_t next_c = last_of_round ? 0 : c + 1, next_r = last_of_round ? r + 1 : r;
    const bool has_next = next_r < plan_.rounds;
    const auto add_queries = [&](index_t h, index_t round, index_t cluster, const T* rows,
                                 index_t stride) {
      const index_t first = plan_.begin(q_length_, cluster);
      ahead_.add(rows, stride, plan_.queries(b, h, round) + first,
                 plan_.begin(q_length_, cluster + 1) - first);
    };
    for (index_t h = g * plan_.group(); h < (g + 1) * plan_.group(); ++h) {
      const smyrf_result<T> rows = result(h);
      add_queries(h, r, c, rows.out, rows.stride);
    }
    if (has_next) {
      const index_t first = plan_.begin(k_length_, next_c);
      const index_t n = plan_.begin(k_length_, next_c + 1) - first;
      const index_t* list = plan_.keys(b, g, next_r) + first;
      ahead_.add(k_.direct, k_.row_stride, list, n);
      ahead_.add(v_.direct, v_.row_stride, list, n);
      for (index_t h = g * plan_.group(); h < (g + 1) * plan_.group(); ++h) {
        const row_source<T> q = c_.q(b, h);
        add_queries(h, next_r, next_c, q.direct, q.row_stride);
      }
    }
    // The first group of keys of a tile has a product of its own (tile_fold.hpp, anchor).
    const index_t n_queries = plan_.begin(q_length_, c + 1) - plan_.begin(q_length_, c);
    const index_t n_tiles = (n_queries + size::max_rows - 1) / size::max_rows;
    ahead_.spread_over(plan_.group() * n_tiles * (keys_.n / size::keys - 1));
  }

  // The tile's (lse, out) into the rows' own.
  void merge(const index_t* queries, const smyrf_result<T>& result, bool overwrite) noexcept {
    // Weights may reach 2^32 (tile_fold.hpp), so huge values overflow where their average does
    // not. Such lanes are done again with their true maximum: no weight is then above 1.
    const query_tile<T>& tile = tile_.state();
    tile_lanes<T, Arch> overflow;
    normalise<T, Arch>(tile, -infinity, tile.l_before, nullptr);
    const bool any = find_overflow<T, Arch>(tile, tile.l_before, c_.d_v, overflow);
    const auto into_rows = [&](const tile_lanes<T, Arch>* marked, bool which) {
      smyrf_merge<T, Arch>(tile, c_.d_v, queries, overwrite, marked, which, rows_, result);
    };
    into_rows(any ? &overflow : nullptr, false);
    if (!any) return;
    tile_.fold(true, nullptr);
    into_rows(&overflow, true);
  }

  [[nodiscard]] T self_score(index_t b, index_t h, index_t i, const row_source<T>& q) noexcept {
    const key_range keys = rule_.keys(b, h, i, c_.n_kv);
    if (i < keys.begin || i >= keys.end) return -infinity;
    T* k = keys_.k;  // no cluster is in use yet
    q.read(i, 1, c_.d_qk, rows_, c_.d_qk);
    k_.read(i, 1, c_.d_qk, k, c_.d_qk);
    T score = c_.scale * dot_product<T, Arch>(rows_, k, c_.d_qk);
    if (c_.softcap != T(0)) score = c_.softcap * std::tanh(score / c_.softcap);
    return rule_(score, b, h, i, i);
  }

  const smyrf_problem<T>& c_;
  const smyrf_plan& plan_;
  const smyrf_rule<T>& rule_;
  index_t b_ = -1, g_ = -1;
  index_t q_length_ = 0, k_length_ = 0;
  row_source<T> k_{}, v_{};
  smyrf_keys<T, Arch> keys_;
  smyrf_tile<T, Arch, Kind, Pairs> tile_;
  row_lookahead ahead_;
  T* rows_ = nullptr;
};

}  // namespace attn::detail
