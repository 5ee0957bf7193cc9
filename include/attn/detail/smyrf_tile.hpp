// SPDX-License-Identifier: MIT
//
// A tile of queries of one cluster meets the keys of that cluster.
#pragma once

#include <algorithm>
#include <array>
#include <limits>

#include <attn/detail/query_tile.hpp>
#include <attn/detail/row_lookahead.hpp>
#include <attn/detail/score_bias.hpp>
#include <attn/detail/scratch_carver.hpp>
#include <attn/detail/smyrf_gather.hpp>
#include <attn/detail/smyrf_keys.hpp>
#include <attn/detail/smyrf_past.hpp>
#include <attn/detail/smyrf_problem.hpp>
#include <attn/detail/smyrf_rule.hpp>
#include <attn/detail/tile_fold.hpp>
#include <attn/detail/tile_ranges.hpp>
#include <attn/score_rule.hpp>
#include <attn/simd/math.hpp>

namespace attn::detail {

/// The state of the tile and its fold over a cluster. Without `Pairs` there is no tile of numbers
/// to add to scores: no bias rule, no removed duplicates, no far field.
template <class T, class Arch, rule_kind Kind, bool Pairs>
class smyrf_tile {
  using size = tile_size<T, Arch>;
  using B = simd::batch<T, Arch>;
  static constexpr int W = size::width, MR = size::keys;
  static constexpr T infinity = std::numeric_limits<T>::infinity();
  using local_rule = cluster_rule<T, Kind>;
  static_assert(Pairs || Kind == rule_kind::range);

 public:
  smyrf_tile(const smyrf_problem<T>& problem, const smyrf_rule<T>& rule,
             smyrf_keys<T, Arch>& keys) noexcept
      : c_(problem), rule_(rule), keys_(keys) {}

  void carve(scratch_carver& memory) noexcept {
    scratch_.template carve<Arch>(memory, c_.d_qk, c_.d_v);
    scratch_.bias = memory.take<T>(Pairs ? tile_scratch<T>::template block_size<Arch>() : 0);
    past_.carve(memory, *c_.plan, c_.removes_duplicates);
    state_.template carve<Arch>(memory, c_.d_qk, c_.d_v, 0);  // clusters are short
  }

  /// The keys are those of a cluster of key/value head g in this round.
  void enter_cluster(index_t b, index_t g, index_t round) noexcept {
    b_ = b;
    past_.enter_cluster(b, g, round, keys_.list, keys_.n);
  }

  /// Queries list[0, n_rows) of head h as nr vectors, scaled and transposed. `rows`: scratch of
  /// [max_rows][d_qk].
  void load(index_t h, const row_source<T>& q, const index_t* list, index_t n_rows, int nr,
            T* rows) noexcept {
    const index_t qs = nr * W;
    h_ = h, queries_ = list;
    state_.n_vectors = nr, state_.first_row = 0, state_.n_rows = n_rows;
    gather_rows<T, Arch>(q, list, n_rows, c_.d_qk, rows, c_.d_qk);
    transpose_in<T, Arch>(rows, c_.d_qk, n_rows, c_.d_qk, c_.scale, state_.qt, qs);
    past_.enter_tile(b_, h, list, n_rows, qs);
  }

  /// From an empty state over the cluster's keys; `ahead` is what to prefetch, or null. With
  /// `true_maximum` no weight is above 1, but it takes longer.
  void fold(bool true_maximum, row_lookahead* ahead) noexcept {
    ahead_ = ahead;
    switch (state_.n_vectors) {
    case 3:
      return fold_keys<3>(true_maximum);
    case 2:
      return fold_keys<2>(true_maximum);
    default:
      return fold_keys<1>(true_maximum);
    }
  }

  [[nodiscard]] const query_tile<T>& state() const noexcept { return state_; }

 private:
  template <int NR>
  void fold_keys(bool true_maximum) noexcept {
    const local_rule rule{rule_, queries_, keys_.list, c_.n_kv};
    true_maximum_ = true_maximum;
    const index_t n_rows = state_.n_rows;
    ranges_.assign(rule, b_, h_, 0, n_rows, NR, keys_.n, [](index_t) { return false; });
    state_.clear(NR * W);
    state_.any_waiting = false;
    for (index_t r = 0; r < NR * W; ++r) {
      const key_range keys = ranges_.lane[static_cast<std::size_t>(r)];
      const bool waits = r < n_rows && (keys.begin < keys.end || keys_.n_far > 0);
      state_.waiting[r] = waits ? T(1) : T(0);
      state_.any_waiting |= waits;
    }
    for (index_t k0 = ranges_.any.begin / key_block * key_block; k0 < ranges_.any.end;
         k0 += key_block) {
      fold_block<NR>(rule, k0, std::min<index_t>(key_block, keys_.n - k0));
    }
    if constexpr (Pairs) {
      if (keys_.n_far > 0) fold_far<NR>();
    }
  }

  /// Whether earlier rounds had some pairs that must not count again.
  [[nodiscard]] bool drops_pairs() const noexcept { return Pairs && past_.any(); }

  // Keys [k0, k0 + n) of the cluster.
  template <int NR>
  void fold_block(const local_rule& rule, index_t k0, index_t n) noexcept {
    const bool per_pair = Kind != rule_kind::range || drops_pairs();
    const bool plain = !per_pair && ranges_.all_see(k0, k0 + n);
    const T* k = keys_.k + k0 * c_.d_qk;
    const key_value_block<T> block{k,      c_.d_qk, keys_.v + k0 * c_.d_v,
                                   c_.d_v, n,       plain || keys_.values_finite()};
    tile_fold<T, Arch, NR, Pairs, row_lookahead> fold(state_, block, scratch_, c_.d_qk, c_.d_v,
                                                      ahead_);

    bias_tile<T> pairs{scratch_.bias, nullptr, NR * W, b_, h_, 0, state_.n_rows, k0, n};
    if constexpr (Pairs) {
      if (per_pair) write_pairs(pairs);
      if (!plain || n % MR != 0) ranges_.complete(pairs);
    }
    if (c_.softcap != T(0) || Kind == rule_kind::function || true_maximum_) {
      return fold.fold_mapped([&](T* s) { map_scores(rule, pairs, s, plain); });
    }
    if constexpr (!Pairs) ranges_.bounds(k0, state_.lo, state_.hi);
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
  void write_pairs(bias_tile<T>& t) const noexcept {
    std::fill_n(t.value, t.n_keys * t.ld, T(0));
    if constexpr (Kind == rule_kind::bias) {
      rule_.add({b_, h_, queries_, t.n_rows, keys_.list + t.j0, t.n_keys}, t.value, t.ld);
    }
    if (drops_pairs()) past_.mark_pairs(t.j0, t.n_keys, -infinity, t.value);
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
    if constexpr (Kind == rule_kind::function) apply_rule(rule, t, s, keys_.n);
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
    for (index_t f = 0; f < keys_.n_far; ++f) {
      std::fill_n(scratch_.bias + f * qs, qs, keys_.far_log_count[f]);
    }
    std::fill_n(scratch_.bias + keys_.n_far * qs, MR * qs, -infinity);
    const key_value_block<T> block{keys_.far_k, c_.d_qk, keys_.far_v, c_.d_v, keys_.n_far, true};
    tile_fold<T, Arch, NR, Pairs, row_lookahead> fold(state_, block, scratch_, c_.d_qk, c_.d_v);
    if (c_.softcap != T(0) || true_maximum_) {
      return fold.fold_mapped([&](T* s) {
        cap_scores(s, keys_.n_far * qs);
        for (index_t x = 0; x < keys_.n_far * qs; x += W) {
          (simd::load<T, Arch>(s + x) + simd::load<T, Arch>(scratch_.bias + x))
              .store_aligned(s + x);
        }
      });
    }
    const key_run run{0, keys_.n_far, 0, NR, true};
    fold.fold(&run, 1);
  }

  const smyrf_problem<T>& c_;
  const smyrf_rule<T>& rule_;
  smyrf_keys<T, Arch>& keys_;
  index_t b_ = 0, h_ = 0;
  const index_t* queries_ = nullptr;
  bool true_maximum_ = false;
  row_lookahead* ahead_ = nullptr;
  smyrf_past<T, Arch> past_;
  tile_ranges<T, Arch> ranges_;
  query_tile<T> state_{};
  tile_scratch<T> scratch_{};
};

}  // namespace attn::detail
