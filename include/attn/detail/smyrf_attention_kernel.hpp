// SPDX-License-Identifier: MIT
//
// SMYRF attention: the dense micro-kernels inside clusters, and the merge of rounds.
//
// For one round and one cluster of one key/value head:
//   1. gather the rows of K and V of the cluster
//   2. per query head, in tiles of up to 3 vectors: gather and transpose queries, fold the keys
//   3. merge the tile into the running (lse, out) of its rows
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include <attn/detail/backward_tile.hpp>
#include <attn/detail/query_tile.hpp>
#include <attn/detail/scratch_carver.hpp>
#include <attn/detail/smyrf_far_field.hpp>
#include <attn/detail/smyrf_gather.hpp>
#include <attn/detail/smyrf_plan.hpp>
#include <attn/detail/smyrf_rule.hpp>
#include <attn/detail/tile_output.hpp>
#include <attn/detail/tile_ranges.hpp>
#include <attn/score_rule.hpp>
#include <attn/simd/math.hpp>

namespace attn::detail {

/// A call behind its checks.
template <class T>
struct smyrf_problem {
  const smyrf_plan* plan;
  index_t n_batch, n_heads, n_heads_kv, n_q, n_kv, d_qk, d_v;
  T scale, softcap;
  bool removes_duplicates;  // and there are some to remove
  bool attend_self;
  bool far_field;
  head_source<T> q, k, v;
  head_sink<T> out;
  tensor_view<T> lse;  // data null: not wanted
};

/// The running result of one query head: rows of T and their lse.
template <class T>
struct smyrf_result {
  T* out;
  index_t stride;
  T* lse;  // [n_q]
};

/// Clusters of a call, one at a time. Without `Pairs` there is no tile of numbers to add.
template <class T, class Arch, rule_kind Kind, bool Pairs>
class smyrf_worker {
  using size = tile_size<T, Arch>;
  using B = simd::batch<T, Arch>;
  static constexpr int W = size::width, MR = size::keys;
  static constexpr T infinity = std::numeric_limits<T>::infinity();
  using local_rule = cluster_rule<T, Kind>;
  using lanes = std::array<bool, static_cast<std::size_t>(size::max_rows)>;
  static_assert(Pairs || Kind == rule_kind::range);

 public:
  smyrf_worker(const smyrf_problem<T>& problem, const smyrf_rule<T>& rule,
               scratch_carver memory) noexcept
      : c_(problem), plan_(*problem.plan), rule_(rule) {
    carve(memory);
  }

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
    round_ = r;
    const index_t k_first = plan_.begin(k_length_, c),
                  n_keys = plan_.begin(k_length_, c + 1) - k_first;
    keys_ = plan_.keys(b, g, r) + k_first;
    n_keys_ = n_keys;
    gather_cluster();
    n_far_ = c_.far_field ? far.take(plan_, k_length_, c, far_k_, far_v_, far_log_count_) : 0;

    const index_t q_first = plan_.begin(q_length_, c),
                  n_queries = plan_.begin(q_length_, c + 1) - q_first;
    for (index_t h = g * plan_.group(); h < (g + 1) * plan_.group(); ++h) {
      h_ = h;
      q_ = c_.q(b, h);
      const index_t* queries = plan_.queries(b, h, r) + q_first;
      for (index_t i = 0; i < n_queries;) {
        const index_t vectors = (n_queries - i + W - 1) / W;
        // 2 + 2 rather than 3 + 1 at the end.
        const int nr = vectors == 4 ? 2 : static_cast<int>(std::min<index_t>(vectors, 3));
        const index_t rows = std::min<index_t>(nr * W, n_queries - i);
        gather_queries(queries + i, rows, nr);
        prefetch_results(queries + i, rows, result(h));
        fold(queries + i);
        merge(queries + i, result(h), overwrite);
        i += rows;
      }
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
    q_ = c_.q(b, h);
    for (index_t i = 0; i < q_length_; ++i) {
      T* out = result.out + i * result.stride;
      T score = -infinity;
      if (i < k_length_ && !plan_.meet(b, h, i, i)) score = self_score(b, h, i);
      result.lse[i] = score + (score == -infinity ? T(0) : score - score);  // +inf: a row of NaN
      if (score == -infinity)
        std::fill_n(out, c_.d_v, T(0));
      else
        v_.read(i, 1, c_.d_v, out, c_.d_v);
    }
  }

 private:
  void carve(scratch_carver& memory) noexcept {
    const index_t most_keys = (c_.n_kv + plan_.clusters - 1) / plan_.clusters;
    const index_t most_far = c_.far_field ? smyrf_most_far : 0;
    k_packed_ = memory.take<T>(most_keys * c_.d_qk);
    v_packed_ = memory.take<T>(most_keys * c_.d_v);
    far_k_ = memory.take<T>(most_far * c_.d_qk);
    far_v_ = memory.take<T>(most_far * c_.d_v);
    far_log_count_ = memory.take<T>(most_far);
    scratch_.p = memory.take<T>(tile_scratch<T>::template block_size<Arch>());
    scratch_.s = memory.take<T>(tile_scratch<T>::template block_size<Arch>());
    scratch_.bias = memory.take<T>(tile_scratch<T>::template block_size<Arch>());
    scratch_.k_padded = memory.take<T>(MR * c_.d_qk);
    rows_ = memory.take<T>(size::max_rows * std::max(c_.d_qk, c_.d_v));
    past_ = {plan_, memory.take<T>(c_.removes_duplicates ? plan_.rounds * size::max_rows : 0)};
    tile_.qt = memory.take<T>(size::max_rows * c_.d_qk);
    tile_.ot = memory.take<T>(size::max_rows * c_.d_v);
    for (T** lane :
         {&tile_.negm, &tile_.l, &tile_.l_before, &tile_.waiting, &tile_.lo, &tile_.hi}) {
      *lane = memory.take<T>(size::max_rows);
    }
  }

  void enter_head(index_t b, index_t g) noexcept {
    if (b == b_ && g == g_) return;
    b_ = b, g_ = g;
    k_ = c_.k(b, g);
    v_ = c_.v(b, g);
    q_length_ = plan_.q_length(b), k_length_ = plan_.k_length(b);
  }

  void gather_cluster() noexcept {
    gather_rows<T, Arch>(k_, keys_, n_keys_, c_.d_qk, k_packed_, c_.d_qk);
    gather_rows<T, Arch>(v_, keys_, n_keys_, c_.d_v, v_packed_, c_.d_v);
    v_checked_ = false;
  }

  // Queries scaled and transposed.
  void gather_queries(const index_t* queries, index_t n_rows, int nr) noexcept {
    const index_t qs = nr * W;
    tile_.n_vectors = nr, tile_.first_row = 0, tile_.n_rows = n_rows;
    gather_rows<T, Arch>(q_, queries, n_rows, c_.d_qk, rows_, c_.d_qk);
    transpose_in<T, Arch>(rows_, c_.d_qk, n_rows, c_.d_qk, c_.scale, tile_.qt, qs);
    if (drops_pairs()) past_.load(b_, h_, round_, queries, n_rows, qs);
  }

  // The rows that the tile will be merged into.
  void prefetch_results(const index_t* queries, index_t n_rows,
                        const smyrf_result<T>& result) const noexcept {
    for (index_t r = 0; r < n_rows; ++r) {
      prefetch_row(result.out + queries[r] * result.stride, c_.d_v);
    }
  }

  // The tile, from an empty state, meets the cluster's keys.
  void fold(const index_t* queries) noexcept {
    switch (tile_.n_vectors) {
    case 3:
      return fold_keys<3>(queries);
    case 2:
      return fold_keys<2>(queries);
    default:
      return fold_keys<1>(queries);
    }
  }

  template <int NR>
  void fold_keys(const index_t* queries) noexcept {
    const local_rule rule{rule_, queries, keys_, c_.n_kv};
    const index_t n_rows = tile_.n_rows;
    ranges_.assign(rule, b_, h_, 0, n_rows, NR, n_keys_, [](index_t) { return false; });
    std::fill_n(tile_.l, NR * W, T(0));
    std::fill_n(tile_.negm, NR * W, T(0));
    tile_.has_output = false;
    tile_.any_waiting = false;
    for (index_t r = 0; r < NR * W; ++r) {
      const key_range keys = ranges_.lane[static_cast<std::size_t>(r)];
      const bool waits = r < n_rows && (keys.begin < keys.end || n_far_ > 0);
      tile_.waiting[r] = waits ? T(1) : T(0);
      tile_.any_waiting |= waits;
    }
    for (index_t k0 = ranges_.any.begin / key_block * key_block; k0 < ranges_.any.end;
         k0 += key_block) {
      fold_block<NR>(rule, k0, std::min<index_t>(key_block, n_keys_ - k0));
    }
    if constexpr (Pairs) {
      if (n_far_ > 0) fold_far<NR>();
    }
  }

  /// Whether earlier rounds had some pairs that must not count again.
  [[nodiscard]] bool drops_pairs() const noexcept {
    return Pairs && c_.removes_duplicates && round_ > 0;
  }

  // Keys [k0, k0 + n) of the cluster.
  template <int NR>
  void fold_block(const local_rule& rule, index_t k0, index_t n) noexcept {
    const bool per_pair = Kind != rule_kind::range || drops_pairs();
    const bool plain = !per_pair && ranges_.all_see(k0, k0 + n);
    const T* k = k_packed_ + k0 * c_.d_qk;
    const key_value_block<T> block{k, c_.d_qk, v_packed_ + k0 * c_.d_v, c_.d_v,
                                   n, nullptr, plain || values_finite()};
    tile_fold<T, Arch, NR, Pairs> fold(tile_, block, scratch_, c_.d_qk, c_.d_v);

    bias_tile<T> pairs{scratch_.bias, nullptr, NR * W, b_, h_, 0, tile_.n_rows, k0, n};
    if constexpr (Pairs) {
      if (per_pair) write_pairs(rule.queries, pairs);
      if (!plain || n % MR != 0) ranges_.complete(pairs);
    }
    if (c_.softcap != T(0) || Kind == rule_kind::function || true_maximum_) {
      return fold.fold_mapped([&](T* s) { map_scores(rule, pairs, s, plain); });
    }
    if constexpr (!Pairs) ranges_.bounds(k0, tile_.lo, tile_.hi);
    // Whole groups that all rows see need no mask.
    std::array<key_run, 3> runs;
    int n_runs = 0;
    const auto add = [&](index_t first, index_t last, bool masked) {
      if (first < last) runs[static_cast<std::size_t>(n_runs++)] = {first, last, 0, NR, masked};
    };
    const key_range seen = ranges_.seen_of(k0, k0 + n);
    index_t begin = seen.end, end = seen.end;
    if (!per_pair) {
      begin = std::clamp(round_up(ranges_.all.begin - k0, MR), seen.begin, seen.end);
      if (begin < seen.end) {
        end = std::clamp((ranges_.all.end - k0) / MR * MR, begin, seen.end / MR * MR);
      }
    }
    add(seen.begin, begin, true);
    add(begin, end, false);
    add(end, seen.end, true);
    fold.fold(runs.data(), n_runs);
  }

  // What the rule adds at the original positions, and −inf for pairs that an earlier round had.
  void write_pairs(const index_t* queries, bias_tile<T>& t) const noexcept {
    const index_t* keys = keys_ + t.j0;
    std::fill_n(t.value, t.n_keys * t.ld, T(0));
    if constexpr (Kind == rule_kind::bias) {
      rule_.add({b_, h_, queries, t.n_rows, keys, t.n_keys}, t.value, t.ld);
    }
    if (drops_pairs()) past_.mark_pairs(keys, t.n_keys, -infinity, t.value);
    t.written = true;
  }

  void cap_scores(T* s, index_t n) const noexcept {
    if (c_.softcap == T(0)) return;
    const B cap(c_.softcap), inverse(T(1) / c_.softcap);
    for (index_t x = 0; x < n; x += W) {
      (cap * simd::tanh<T, Arch>(simd::load<T, Arch>(s + x) * inverse)).store_aligned(s + x);
    }
  }

  // Softcap, masks and the rule on scores s: [n_keys][QS].
  void map_scores(const local_rule& rule, const bias_tile<T>& t, T* s, bool plain) const noexcept {
    const index_t end = t.n_keys * t.ld;
    cap_scores(s, end);
    if (plain) return;
    if constexpr (Pairs) {
      for (index_t x = 0; x < end; x += W) {
        const B bias = simd::load<T, Arch>(t.value + x);
        xsimd::select(bias == B(-infinity), bias, simd::load<T, Arch>(s + x) + bias)
            .store_aligned(s + x);
      }
    }
    if constexpr (!Pairs) forbid_out_of_range(t, s);
    if constexpr (Kind == rule_kind::function) apply_rule(rule, t, s, n_keys_);
  }

  void forbid_out_of_range(const bias_tile<T>& t, T* s) const noexcept {
    for (index_t key = 0; key < t.n_keys; ++key) {
      for (index_t r = 0; r < t.n_rows; ++r) {
        const key_range keys = ranges_.lane[static_cast<std::size_t>(r)];
        if (t.j0 + key < keys.begin || t.j0 + key >= keys.end) s[key * t.ld + r] = -infinity;
      }
    }
  }

  // The means of the far field: their scores count as often as they have keys.
  template <int NR>
  void fold_far() noexcept {
    constexpr index_t qs = NR * W;
    for (index_t f = 0; f < n_far_; ++f) {
      std::fill_n(scratch_.bias + f * qs, qs, far_log_count_[f]);
    }
    std::fill_n(scratch_.bias + n_far_ * qs, MR * qs, -infinity);
    const key_value_block<T> block{far_k_, c_.d_qk, far_v_, c_.d_v, n_far_, nullptr, true};
    tile_fold<T, Arch, NR, Pairs> fold(tile_, block, scratch_, c_.d_qk, c_.d_v);
    if (c_.softcap != T(0) || true_maximum_) {
      return fold.fold_mapped([&](T* s) {
        cap_scores(s, n_far_ * qs);
        for (index_t x = 0; x < n_far_ * qs; x += W) {
          (simd::load<T, Arch>(s + x) + simd::load<T, Arch>(scratch_.bias + x))
              .store_aligned(s + x);
        }
      });
    }
    const key_run run{0, n_far_, 0, NR, true};
    fold.fold(&run, 1);
  }

  // Whether the values of the cluster have neither inf nor NaN: asked for where pairs are masked.
  [[nodiscard]] bool values_finite() noexcept {
    if (!v_checked_) v_finite_ = all_finite<T, Arch>(v_packed_, c_.d_v, n_keys_, c_.d_v);
    v_checked_ = true;
    return v_finite_;
  }

  // The tile's (lse, out) into the rows' own.
  void merge(const index_t* queries, const smyrf_result<T>& result, bool overwrite) noexcept {
    // Weights may reach 2^32 (query_tile.hpp), so huge values overflow where their average does
    // not. Such lanes are done again with their true maximum: no weight is then above 1.
    lanes overflow;
    normalise<T, Arch>(tile_, -infinity, tile_.l_before, nullptr);
    const bool any = find_overflow<T, Arch>(tile_, tile_.l_before, c_.d_v, overflow);
    merge_lanes(queries, result, overwrite, any ? &overflow : nullptr, false);
    if (!any) return;
    true_maximum_ = true;
    fold(queries);
    true_maximum_ = false;
    merge_lanes(queries, result, overwrite, &overflow, true);
  }

  // The same for lanes that are marked as `which`; all if no marks are given.
  //
  //     lse = ln(e^lse_row + e^lse_tile)     out = e^(lse_row − lse) out_row + e^(lse_tile − lse)
  //     o/l
  void merge_lanes(const index_t* queries, const smyrf_result<T>& result, bool overwrite,
                   const lanes* marked, bool which) noexcept {
    const index_t qs = tile_.n_vectors * W, n_rows = tile_.n_rows;
    if (!tile_.has_output) std::fill_n(tile_.ot, c_.d_v * qs, T(0));
    // 1. Factors of both sides, and the new lse.
    alignas(64) std::array<T, size::max_rows> row_lse, lse, row_factor;
    T* tile_factor = tile_.l_before;
    for (index_t r = 0; r < qs; ++r) {
      const bool has_row = r < n_rows && !overwrite;
      row_lse[static_cast<std::size_t>(r)] = has_row ? result.lse[queries[r]] : -infinity;
    }
    for (index_t j = 0; j < qs; j += W) {
      const B l = simd::load<T, Arch>(tile_.l + j), m = -simd::load<T, Arch>(tile_.negm + j);
      const auto empty = l == B(T(0));
      const B a = simd::load<T, Arch>(row_lse.data() + j);
      const B t = xsimd::select(empty, B(-infinity), m + simd::log<T, Arch>(l));
      B top = xsimd::select(a > t, a, t);  // a NaN on either side reaches the sum below
      top = xsimd::select(top == B(-infinity), B(T(0)), top);
      const B share_a = simd::exp<T, Arch>(a - top), share_t = simd::exp<T, Arch>(t - top);
      const B sum = share_a + share_t;
      const auto nothing = sum == B(T(0));
      const B safe = xsimd::select(nothing, B(T(1)), sum);
      (share_a / safe).store_aligned(row_factor.data() + j);
      xsimd::select(empty, B(T(0)), share_t / (safe * l)).store_aligned(tile_factor + j);
      xsimd::select(nothing, B(-infinity), top + simd::log<T, Arch>(safe))
          .store_aligned(lse.data() + j);
    }
    // 2. Rows.
    transpose_out<T, Arch>(tile_.ot, qs, n_rows, c_.d_v, tile_factor, rows_, c_.d_v);
    for (index_t r = 0; r < n_rows; ++r) {
      const auto lane = static_cast<std::size_t>(r);
      if (marked != nullptr && (*marked)[lane] != which) continue;
      T* out = result.out + queries[r] * result.stride;
      const T* add = rows_ + r * c_.d_v;
      result.lse[queries[r]] = lse[lane];
      if (overwrite)
        copy_row<T, Arch>(add, c_.d_v, out);
      else
        add_to_row<T, Arch>(out, row_factor[lane], add, c_.d_v);
    }
  }

  [[nodiscard]] T self_score(index_t b, index_t h, index_t i) noexcept {
    const key_range keys = rule_.keys(b, h, i, c_.n_kv);
    if (i < keys.begin || i >= keys.end) return -infinity;
    T* k = k_packed_;  // no cluster is in use yet
    q_.read(i, 1, c_.d_qk, rows_, c_.d_qk);
    k_.read(i, 1, c_.d_qk, k, c_.d_qk);
    T score = c_.scale * dot_product<T, Arch>(rows_, k, c_.d_qk);
    if (c_.softcap != T(0)) score = c_.softcap * std::tanh(score / c_.softcap);
    return rule_(score, b, h, i, i);
  }

  const smyrf_problem<T>& c_;
  const smyrf_plan& plan_;
  const smyrf_rule<T>& rule_;
  index_t b_ = -1, g_ = -1, h_ = 0, round_ = 0;
  index_t q_length_ = 0, k_length_ = 0;
  row_source<T> q_{}, k_{}, v_{};
  const index_t* keys_ = nullptr;  // of the cluster, ascending
  index_t n_keys_ = 0, n_far_ = 0;
  bool v_checked_ = false, v_finite_ = false;
  T *k_packed_ = nullptr, *v_packed_ = nullptr;
  T *far_k_ = nullptr, *far_v_ = nullptr, *far_log_count_ = nullptr;
  T* rows_ = nullptr;
  smyrf_past<T, Arch> past_;
  bool true_maximum_ = false;
  tile_ranges<T, Arch> ranges_;
  query_tile<T> tile_{};
  tile_scratch<T> scratch_{};
};

}  // namespace attn::detail
