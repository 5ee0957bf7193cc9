// SPDX-License-Identifier: MIT
//
// SMYRF attention: the dense micro-kernels inside clusters, and the merge of rounds.
//
// For one round and one cluster of one key/value head:
//   1. gather the rows of K and V of the cluster
//   2. per query head, in tiles of up to 3 vectors: gather and transpose queries, fold the keys
//   3. merge the tile into the running (lse, out) of its rows
// Rounds follow each other; clusters of a round touch different rows and run in any order.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>
#include <type_traits>
#include <vector>

#include <attn/context.hpp>
#include <attn/detail/backward_tile.hpp>
#include <attn/detail/dense_attention_kernel.hpp>
#include <attn/detail/query_tile.hpp>
#include <attn/detail/smyrf_far_field.hpp>
#include <attn/detail/smyrf_plan.hpp>
#include <attn/detail/tile_ranges.hpp>
#include <attn/score_rule.hpp>
#include <attn/simd/fp_environment.hpp>
#include <attn/simd/math.hpp>
#include <attn/smyrf_options.hpp>

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

/// A rule seen from inside a cluster: query i and key j are places in its lists of positions, both
/// ascending, so that what was a range of keys is one again. With `Pairs` it has a tile of numbers
/// to add even where the rule itself has none.
template <score_rule Rule, bool Pairs>
struct clustered_rule {
  static constexpr rule_kind kind =
      Pairs && Rule::kind == rule_kind::range ? rule_kind::bias : Rule::kind;
  const Rule& rule;
  const index_t* queries;
  const index_t* list;
  index_t n_kv;

  template <class S>
  [[nodiscard]] S operator()(S score, index_t b, index_t h, index_t i, index_t j) const {
    return static_cast<S>(rule(score, b, h, queries[i], list[j]));
  }
  [[nodiscard]] key_range keys(index_t b, index_t h, index_t i, index_t n) const noexcept {
    if constexpr (std::is_same_v<Rule, no_mask>) return {0, n};
    const key_range positions = rule.keys(b, h, queries[i], n_kv);
    const auto place = [&](index_t position) {
      return std::lower_bound(list, list + n, position) - list;
    };
    return {positions.begin <= 0 ? 0 : place(positions.begin),
            positions.end >= n_kv ? n : place(positions.end)};
  }
  void check(std::string_view, const attention_shape&) const noexcept {}
};

template <class T, class Arch, score_rule Rule, bool Pairs>
class smyrf_worker {
  using size = tile_size<T, Arch>;
  using B = simd::batch<T, Arch>;
  static constexpr int W = size::width, MR = size::keys;
  static constexpr T infinity = std::numeric_limits<T>::infinity();
  using local_rule = clustered_rule<Rule, Pairs>;
  static_assert(Pairs || Rule::kind == rule_kind::range);

 public:
  smyrf_worker(const smyrf_problem<T>& problem, const Rule& rule, scratch_carver memory) noexcept
      : c_(problem), plan_(*problem.plan), rule_(rule) {
    carve(memory);
  }

  [[nodiscard]] static std::size_t scratch_bytes(const smyrf_problem<T>& problem,
                                                 const Rule& rule) noexcept {
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
    gather_cluster(k_length_ - k_first);
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
        load_tile(queries + i, rows, nr, q_length_ - q_first - i);
        prefetch_rows(queries + i, rows, result(h));
        switch (nr) {
        case 3:
          fold<3>(queries + i);
          break;
        case 2:
          fold<2>(queries + i);
          break;
        default:
          fold<1>(queries + i);
        }
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
    q_cluster_ = memory.take<T>(c_.removes_duplicates ? plan_.rounds * size::max_rows : 0);
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

  // Rows of a list, densely. The rows that come `ahead` places later in the list, if `n_ahead` says
  // that there are that many more, are asked for: they lie anywhere in the head, and without it a
  // quarter of the time goes into waiting for them (n = 4096, 64 x 64).
  static void gather(const row_source<T>& source, const index_t* list, index_t n, index_t ahead,
                     index_t n_ahead, index_t d, T* to) noexcept {
    constexpr index_t line = 64 / static_cast<index_t>(sizeof(T));
    if (source.direct == nullptr) {
      for (index_t i = 0; i < n; ++i) source.read(list[i], 1, d, to + i * d, d);
      return;
    }
    for (index_t i = 0; i < n; ++i) {
      const T* x = source.direct + list[i] * source.row_stride;
      if (i + ahead < n_ahead) {
        const T* next = source.direct + list[i + ahead] * source.row_stride;
        for (index_t c = 0; c < d; c += line) __builtin_prefetch(next + c, 0, 2);
      }
      T* out = to + i * d;
      index_t c = 0;
      for (; c + W <= d; c += W) simd::load_unaligned<T, Arch>(x + c).store_unaligned(out + c);
      for (; c < d; ++c) out[c] = x[c];
    }
  }

  // `left`: keys from the first one of the cluster to the last one of the round.
  void gather_cluster(index_t left) noexcept {
    gather(k_, keys_, n_keys_, n_keys_, left, c_.d_qk, k_packed_);
    gather(v_, keys_, n_keys_, n_keys_, left, c_.d_v, v_packed_);
    v_checked_ = false;
  }

  // Queries scaled and transposed, and an empty state. `left` as for keys.
  void load_tile(const index_t* queries, index_t n_rows, int nr, index_t left) noexcept {
    const index_t qs = nr * W;
    tile_.n_vectors = nr, tile_.first_row = 0, tile_.n_rows = n_rows;
    gather(q_, queries, n_rows, n_rows, left, c_.d_qk, rows_);
    transpose_in<T, Arch>(rows_, c_.d_qk, n_rows, c_.d_qk, c_.scale, tile_.qt, qs);
    std::fill_n(tile_.l, qs, T(0));
    std::fill_n(tile_.negm, qs, T(0));
    tile_.has_output = false;
    if (drops_pairs()) load_query_clusters(queries, n_rows, qs);
  }

  // The rows that the tile will be merged into.
  void prefetch_rows(const index_t* queries, index_t n_rows,
                     const smyrf_result<T>& result) const noexcept {
    constexpr index_t line = 64 / static_cast<index_t>(sizeof(T));
    for (index_t r = 0; r < n_rows; ++r) {
      const T* out = result.out + queries[r] * result.stride;
      for (index_t c = 0; c < c_.d_v; c += line) __builtin_prefetch(out + c, 1, 2);
    }
  }

  // The tile meets the cluster's keys, in blocks.
  template <int NR>
  void fold(const index_t* queries) noexcept {
    const local_rule rule{rule_, queries, keys_, c_.n_kv};
    const index_t n_rows = tile_.n_rows;
    ranges_.assign(rule, b_, h_, 0, n_rows, NR, n_keys_, [](index_t) { return false; });
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

  // The clusters in which the queries of the tile were in earlier rounds, as numbers of T.
  void load_query_clusters(const index_t* queries, index_t n_rows, index_t qs) noexcept {
    for (index_t past = 0; past < round_; ++past) {
      const std::int32_t* cluster = plan_.query_clusters(b_, h_, past);
      for (index_t r = 0; r < qs; ++r) {
        q_cluster_[past * qs + r] = r < n_rows ? static_cast<T>(cluster[queries[r]]) : T(-1);
      }
    }
  }

  // Keys [k0, k0 + n) of the cluster.
  template <int NR>
  void fold_block(const local_rule& rule, index_t k0, index_t n) noexcept {
    const bool per_pair = Rule::kind != rule_kind::range || drops_pairs();
    const bool plain = !per_pair && ranges_.all_see(k0, k0 + n);
    const T* k = k_packed_ + k0 * c_.d_qk;
    const key_value_block<T> block{k, c_.d_qk, v_packed_ + k0 * c_.d_v, c_.d_v, n,
                                   k, 0,       plain || values_finite()};
    tile_fold<T, Arch, NR, Pairs> fold(tile_, block, scratch_, c_.d_qk, c_.d_v);

    bias_tile<T> pairs{scratch_.bias, nullptr, NR * W, b_, h_, 0, tile_.n_rows, k0, n};
    if constexpr (Pairs) {
      if (per_pair) write_pairs(rule, pairs);
      if (!plain || n % MR != 0) ranges_.complete(pairs);
    }
    if (c_.softcap != T(0) || Rule::kind == rule_kind::function) {
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
  void write_pairs(const local_rule& rule, bias_tile<T>& t) const noexcept {
    for (index_t key = 0; key < t.n_keys; ++key) {
      T* out = t.value + key * t.ld;
      const index_t j = t.j0 + key;
      if constexpr (Rule::kind == rule_kind::bias) {
        for (index_t r = 0; r < t.n_rows; ++r) out[r] = rule(T(0), b_, h_, r, j);
        std::fill(out + t.n_rows, out + t.ld, T(0));
      } else {
        std::fill_n(out, t.ld, T(0));
      }
      for (index_t past = 0; drops_pairs() && past < round_; ++past) {
        const B cluster(static_cast<T>(plan_.key_clusters(b_, g_, past)[keys_[j]]));
        for (index_t r = 0; r < t.ld; r += W) {
          const auto met = simd::load<T, Arch>(q_cluster_ + past * t.ld + r) == cluster;
          xsimd::select(met, B(-infinity), simd::load<T, Arch>(out + r)).store_aligned(out + r);
        }
      }
    }
    t.written = true;
  }

  // Softcap, masks and the rule on scores s: [n_keys][QS].
  void map_scores(const local_rule& rule, const bias_tile<T>& t, T* s, bool plain) const noexcept {
    const index_t end = t.n_keys * t.ld;
    if (c_.softcap != T(0)) {
      const B cap(c_.softcap), inverse(T(1) / c_.softcap);
      for (index_t x = 0; x < end; x += W) {
        (cap * simd::tanh<T, Arch>(simd::load<T, Arch>(s + x) * inverse)).store_aligned(s + x);
      }
    }
    if (plain) return;
    if constexpr (Pairs) {
      for (index_t x = 0; x < end; x += W) {
        const B bias = simd::load<T, Arch>(t.value + x);
        xsimd::select(bias == B(-infinity), bias, simd::load<T, Arch>(s + x) + bias)
            .store_aligned(s + x);
      }
    }
    if constexpr (!Pairs || Rule::kind == rule_kind::function) apply_rule(rule, t, s, n_keys_);
  }

  // The means of the far field: their scores count as often as they have keys.
  template <int NR>
  void fold_far() noexcept {
    constexpr index_t qs = NR * W;
    for (index_t f = 0; f < n_far_; ++f) {
      std::fill_n(scratch_.bias + f * qs, qs, far_log_count_[f]);
    }
    std::fill_n(scratch_.bias + n_far_ * qs, MR * qs, -infinity);
    const key_value_block<T> block{far_k_, c_.d_qk, far_v_, c_.d_v, n_far_, far_k_, 0, true};
    tile_fold<T, Arch, NR, Pairs> fold(tile_, block, scratch_, c_.d_qk, c_.d_v);
    if (c_.softcap != T(0)) {
      fold.fold_mapped([&](T* s) {
        const B cap(c_.softcap), inverse(T(1) / c_.softcap);
        for (index_t x = 0; x < n_far_ * qs; x += W) {
          const B score = cap * simd::tanh<T, Arch>(simd::load<T, Arch>(s + x) * inverse);
          (score + simd::load<T, Arch>(scratch_.bias + x)).store_aligned(s + x);
        }
      });
      return;
    }
    const key_run run{0, n_far_, 0, NR, true};
    fold.fold(&run, 1);
  }

  // Whether the values of the cluster have neither inf nor NaN: asked for where pairs are masked.
  [[nodiscard]] bool values_finite() noexcept {
    if (v_checked_) return v_finite_;
    v_checked_ = true;
    B bad[4] = {B(T(0)), B(T(0)), B(T(0)), B(T(0))};
    T bad_tail = T(0);
    const index_t n = n_keys_ * c_.d_v;
    index_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W) {
      for (int j = 0; j < 4; ++j) {
        bad[j] = simd::multiply_add(simd::load<T, Arch>(v_packed_ + i + j * W), B(T(0)), bad[j]);
      }
    }
    for (; i < n; ++i) bad_tail += v_packed_[i] * T(0);
    const B sum = (bad[0] + bad[1]) + (bad[2] + bad[3]);
    v_finite_ = xsimd::all(sum == B(T(0))) && bad_tail == T(0);
    return v_finite_;
  }

  // The tile's (lse, out) into the rows' own.
  //
  //     lse = ln(e^lse_row + e^lse_tile)     out = e^(lse_row − lse) out_row + e^(lse_tile − lse)
  //     o/l
  void merge(const index_t* queries, const smyrf_result<T>& result, bool overwrite) noexcept {
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
      T* out = result.out + queries[r] * result.stride;
      const T* add = rows_ + r * c_.d_v;
      result.lse[queries[r]] = lse[static_cast<std::size_t>(r)];
      if (overwrite) {
        std::copy_n(add, c_.d_v, out);
        continue;
      }
      const T factor = row_factor[static_cast<std::size_t>(r)];
      const B f(factor);
      index_t x = 0;
      for (; x + W <= c_.d_v; x += W) {
        const B sum = simd::multiply_add(f, simd::load_unaligned<T, Arch>(out + x),
                                         simd::load_unaligned<T, Arch>(add + x));
        sum.store_unaligned(out + x);
      }
      for (; x < c_.d_v; ++x) out[x] = factor * out[x] + add[x];
    }
  }

  [[nodiscard]] T self_score(index_t b, index_t h, index_t i) noexcept {
    const key_range keys = rule_.keys(b, h, i, c_.n_kv);
    if (i < keys.begin || i >= keys.end) return -infinity;
    T* k = k_packed_;  // no cluster is in use yet
    q_.read(i, 1, c_.d_qk, rows_, c_.d_qk);
    k_.read(i, 1, c_.d_qk, k, c_.d_qk);
    B sum(T(0));
    index_t c = 0;
    for (; c + W <= c_.d_qk; c += W) {
      const B q = simd::load_unaligned<T, Arch>(rows_ + c) * B(c_.scale);
      sum = simd::multiply_add(q, simd::load_unaligned<T, Arch>(k + c), sum);
    }
    T score = simd::sum(sum);
    for (; c < c_.d_qk; ++c) score += rows_[c] * c_.scale * k[c];
    if (c_.softcap != T(0)) score = c_.softcap * std::tanh(score / c_.softcap);
    return static_cast<T>(rule_(score, b, h, i, i));
  }

  const smyrf_problem<T>& c_;
  const smyrf_plan& plan_;
  const Rule& rule_;
  index_t b_ = -1, g_ = -1, h_ = 0, round_ = 0;
  index_t q_length_ = 0, k_length_ = 0;
  row_source<T> q_{}, k_{}, v_{};
  const index_t* keys_ = nullptr;  // of the cluster, ascending
  index_t n_keys_ = 0, n_far_ = 0;
  bool v_checked_ = false, v_finite_ = false;
  T *k_packed_ = nullptr, *v_packed_ = nullptr;
  T *far_k_ = nullptr, *far_v_ = nullptr, *far_log_count_ = nullptr;
  T *rows_ = nullptr, *q_cluster_ = nullptr;
  tile_ranges<T, Arch> ranges_;
  query_tile<T> tile_{};
  tile_scratch<T> scratch_{};
};

/// What the heads of one key/value head share while they are computed: running results, and the
/// sums of the far field.
template <class T>
class smyrf_group {
 public:
  smyrf_group(const smyrf_problem<T>& problem, scratch_carver& memory) noexcept : c_(problem) {
    const index_t heads = c_.plan->group();
    lse_ = memory.take<T>(heads * c_.n_q);
    // Rows of T in the output itself are summed up where they are.
    is_direct_ = c_.out(0, 0).direct != nullptr;
    if (!is_direct_) out_ = memory.take<T>(heads * c_.n_q * c_.d_v);
    zero_ = memory.take<T>(c_.d_v);
    if (c_.far_field) {
      far_ = smyrf_far_sums<T>::carve(memory, c_.plan->clusters, c_.d_qk, c_.d_v);
    }
  }

  [[nodiscard]] const smyrf_far_sums<T>& far() const noexcept { return far_; }

  [[nodiscard]] smyrf_result<T> result(index_t b, index_t h) const noexcept {
    const index_t i = h % c_.plan->group();
    if (!is_direct_) return {out_ + i * c_.n_q * c_.d_v, c_.d_v, lse_ + i * c_.n_q};
    const row_sink<T> out = c_.out(b, h);
    return {out.direct, out.row_stride, lse_ + i * c_.n_q};
  }

  /// Results to the outputs; rows past the length are 0 and −inf.
  void finish(index_t b, index_t h) const noexcept {
    const index_t length = c_.plan->q_length(b);
    const smyrf_result<T> rows = result(b, h);
    const row_sink<T> out = c_.out(b, h);
    if (!is_direct_) out.write(rows.out, c_.d_v, 0, length, c_.d_v);
    std::fill_n(zero_, c_.d_v, T(0));
    out.write(zero_, 0, length, c_.n_q - length, c_.d_v);
    if (c_.lse.data_handle() == nullptr) return;
    for (index_t i = 0; i < c_.n_q; ++i) {
      c_.lse(b, h, i, 0) = i < length ? rows.lse[i] : -std::numeric_limits<T>::infinity();
    }
  }

 private:
  const smyrf_problem<T>& c_;
  smyrf_far_sums<T> far_{};
  T *lse_ = nullptr, *out_ = nullptr, *zero_ = nullptr;
  bool is_direct_ = false;
};

/// Runs the call over the threads of `ctx`.
template <class T, class Arch, bool Pairs, score_rule Rule>
void smyrf_attention_run(const smyrf_problem<T>& c, const Rule& rule, context& ctx) {
  using worker = smyrf_worker<T, Arch, Rule, Pairs>;
  const smyrf_plan& plan = *c.plan;
  const index_t groups = c.n_batch * c.n_heads_kv;
  if (groups == 0 || c.n_q == 0) return;
  scratch_carver group_bytes;
  smyrf_group<T>(c, group_bytes);
  const std::size_t worker_bytes = worker::scratch_bytes(c, rule);
  const auto heads = [&](index_t g) { return key_range{g * plan.group(), (g + 1) * plan.group()}; };
  const auto cluster = [&](worker& w, const smyrf_group<T>& group, index_t b, index_t g, index_t r,
                           index_t c0) {
    w.run(
        b, g, r, c0, group.far(), [&](index_t h) { return group.result(b, h); },
        r == 0 && !c.attend_self);
  };

  // 1. Enough heads for the threads: an item is a key/value head with all its rounds.
  if (ctx.n_threads() == 1 || groups >= 2 * ctx.n_threads()) {
    ctx.run(groups, 1, group_bytes.used() + worker_bytes,
            [&](std::byte* scratch, work_queue& queue) noexcept {
              const simd::flush_subnormals mode;
              scratch_carver memory(scratch);
              smyrf_group<T> group(c, memory);
              worker w(c, rule, scratch_carver(scratch + memory.used()));
              for (index_t item, end; queue.next(item, end);) {
                const index_t b = item / c.n_heads_kv, g = item % c.n_heads_kv;
                for (index_t h = heads(g).begin; h < heads(g).end && c.attend_self; ++h) {
                  w.attend_self(b, h, group.result(b, h));
                }
                for (index_t r = 0; r < plan.rounds; ++r) {
                  if (c.far_field) w.add_up(b, g, r, group.far());
                  for (index_t i = 0; i < plan.clusters; ++i) cluster(w, group, b, g, r, i);
                }
                for (index_t h = heads(g).begin; h < heads(g).end; ++h) group.finish(b, h);
              }
            });
    return;
  }

  // 2. Otherwise one round after the other, an item is a cluster, and results are shared.
  scratch_buffer shared;
  scratch_carver memory(shared.reserve(group_bytes.used() * static_cast<std::size_t>(groups)));
  std::vector<smyrf_group<T>> all;
  for (index_t i = 0; i < groups; ++i) all.emplace_back(c, memory);
  const auto run = [&](index_t items_per_group, const auto& body) {
    ctx.run(groups * items_per_group, 1, worker_bytes,
            [&](std::byte* scratch, work_queue& queue) noexcept {
              const simd::flush_subnormals mode;
              worker w(c, rule, scratch_carver(scratch));
              for (index_t item, end; queue.next(item, end);) {
                const index_t i = item / items_per_group;
                body(w, all[static_cast<std::size_t>(i)], i / c.n_heads_kv, i % c.n_heads_kv,
                     item % items_per_group);
              }
            });
  };
  using group_t = const smyrf_group<T>&;
  if (c.attend_self) {
    run(plan.group(), [&](worker& w, group_t group, index_t b, index_t g, index_t i) {
      w.attend_self(b, heads(g).begin + i, group.result(b, heads(g).begin + i));
    });
  }
  for (index_t r = 0; r < plan.rounds; ++r) {
    if (c.far_field) {
      run(1, [&](worker& w, group_t group, index_t b, index_t g, index_t) {
        w.add_up(b, g, r, group.far());
      });
    }
    run(plan.clusters, [&](worker& w, group_t group, index_t b, index_t g, index_t i) {
      cluster(w, group, b, g, r, i);
    });
  }
  run(plan.group(), [&](worker&, group_t group, index_t b, index_t g, index_t i) {
    group.finish(b, heads(g).begin + i);
  });
}

/// The same; a tile of numbers to add takes part only where something needs it.
template <class T, class Arch, score_rule Rule>
void smyrf_attention_clustered(const smyrf_problem<T>& c, const Rule& rule, context& ctx) {
  if constexpr (Rule::kind == rule_kind::range) {
    if (!c.removes_duplicates && !c.far_field) {
      return smyrf_attention_run<T, Arch, false>(c, rule, ctx);
    }
  }
  smyrf_attention_run<T, Arch, true>(c, rule, ctx);
}

}  // namespace attn::detail
