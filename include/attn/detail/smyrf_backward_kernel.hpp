// SPDX-License-Identifier: MIT
//
// The backward pass of SMYRF attention inside one cluster.
//
// With the lse and the output of all rounds together, every round is the dense backward pass of its
// clusters (dense_attention_backward_kernel.hpp): the merge needs no gradient of its own.
//
//   P_ij = exp(s_ij − lse_i)      G_ij = P_ij (dO_i·v_j − D_i) · slope      D_i = dO_i·O_i
//
// A mean of the far field is a key and a value like others. What it gets is spread evenly over the
// keys that it stands for.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include <attn/detail/backward_fold.hpp>
#include <attn/detail/backward_scores.hpp>
#include <attn/detail/scratch_carver.hpp>
#include <attn/detail/smyrf_far_field.hpp>
#include <attn/detail/smyrf_gather.hpp>
#include <attn/detail/smyrf_keys.hpp>
#include <attn/detail/smyrf_past.hpp>
#include <attn/detail/smyrf_plan.hpp>
#include <attn/detail/smyrf_problem.hpp>
#include <attn/detail/smyrf_rule.hpp>

namespace attn::detail {

/// A call behind its checks.
template <class T>
struct smyrf_backward_problem {
  const smyrf_plan* plan;
  index_t n_batch, n_heads, n_heads_kv, n_q, n_kv, d_qk, d_v;
  T scale, softcap;
  bool removes_duplicates, attend_self, far_field;
  head_source<T> q, k, v, out, d_out;
  tensor_view<const T> lse;
  head_sink<T> dq, dk, dv;
};

/// Rows of gradients that rounds add to.
template <class T>
struct smyrf_sums {
  T* rows;
  index_t stride;
  [[nodiscard]] T* operator()(index_t i) const noexcept { return rows + i * stride; }
};

template <class T, class Arch, rule_kind Kind>
class smyrf_backward_worker {
  using size = tile_size<T, Arch>;
  using B = simd::batch<T, Arch>;
  using local_rule = cluster_rule<T, Kind>;
  static constexpr int W = size::width, MR = size::keys, QS = size::max_rows;
  static constexpr T infinity = std::numeric_limits<T>::infinity();

 public:
  smyrf_backward_worker(const smyrf_backward_problem<T>& problem, const smyrf_rule<T>& rule,
                        scratch_carver memory) noexcept
      : c_(problem), plan_(*problem.plan), rule_(rule) {
    carve(memory);
  }

  [[nodiscard]] static std::size_t scratch_bytes(const smyrf_backward_problem<T>& problem,
                                                 const smyrf_rule<T>& rule) noexcept {
    smyrf_backward_worker counter(problem, rule, scratch_carver());
    scratch_carver memory;
    counter.carve(memory);
    return memory.used();
  }

  /// Cluster `c` of round r, all query heads of key/value head g. `dq(h)`, `dk` and `dv` are where
  /// gradients go; the first round overwrites.
  template <class DQ>
  void run(index_t b, index_t g, index_t r, index_t c, const smyrf_far_sums<T>& far, const DQ& dq,
           const smyrf_sums<T>& dk, const smyrf_sums<T>& dv) noexcept {
    enter_head(b, g);
    round_ = r;
    keys_.gather(plan_, b, g, r, c, k_, v_, far);
    past_.enter_cluster(b, g, r, keys_.list, keys_.n);
    std::fill_n(sum_k_, keys_.n * ld_qk_, T(0));
    std::fill_n(sum_v_, keys_.n * ld_v_, T(0));
    std::fill_n(far_sum_k_, keys_.n_far * ld_qk_, T(0));
    std::fill_n(far_sum_v_, keys_.n_far * ld_v_, T(0));

    const index_t first = plan_.begin(q_length_, c), end = plan_.begin(q_length_, c + 1);
    for (index_t h = g * plan_.group(); h < (g + 1) * plan_.group(); ++h) {
      h_ = h;
      const index_t* queries = plan_.queries(b, h, r) + first;
      smyrf_for_tiles<W>(end - first, [&](index_t i, index_t rows, int nr) {
        load_tile(queries + i, rows, nr);
        for (index_t k0 = 0; k0 < keys_.n; k0 += key_block) {
          fold_block(queries + i, k0, std::min<index_t>(key_block, keys_.n - k0));
        }
        if (keys_.n_far > 0) fold_far();
        store_d_q(queries + i, dq(h));
      });
    }
    for (index_t j = 0; j < keys_.n; ++j) {
      store(dk(keys_.list[j]), sum_k_ + j * ld_qk_, c_.d_qk);
      store(dv(keys_.list[j]), sum_v_ + j * ld_v_, c_.d_v);
    }
    if (keys_.n_far > 0) far.give(plan_, k_length_, c, far_sum_k_, ld_qk_, far_sum_v_, ld_v_);
  }

  /// Σ of keys and values for the far field of round r.
  void add_up(index_t b, index_t g, index_t r, const smyrf_far_sums<T>& far) noexcept {
    enter_head(b, g);
    far.template add_up<Arch>(plan_, k_, v_, plan_.keys(b, g, r), k_length_, rows_);
  }

  /// What the means of round r got, to the keys they stand for.
  void spread(index_t b, index_t g, index_t r, const smyrf_far_sums<T>& far,
              const smyrf_sums<T>& dk, const smyrf_sums<T>& dv) const noexcept {
    far.spread(plan_, plan_.keys(b, g, r), plan_.k_length(b), dk, dv);
  }

  /// Pairs of a query and the key of the same position that no round had.
  void attend_self(index_t b, index_t h, const smyrf_sums<T>& dq, const smyrf_sums<T>& dk,
                   const smyrf_sums<T>& dv) noexcept {
    enter_head(b, h / plan_.group());
    const index_t n = std::min(q_length_, k_length_);
    for (index_t i = 0; i < n; ++i) {
      const T lse = c_.lse(b, h, i, 0);
      const key_range keys = rule_.keys(b, h, i, c_.n_kv);
      if (plan_.meet(b, h, i, i) || lse == -infinity || i < keys.begin || i >= keys.end) continue;
      // 1. Score and slope.
      T *q = rows_, *k = keys_.k, *v = keys_.v, *d_out = sum_v_, *out = tile_.d_out;
      c_.q(b, h).read(i, 1, c_.d_qk, q, c_.d_qk);
      k_.read(i, 1, c_.d_qk, k, c_.d_qk);
      v_.read(i, 1, c_.d_v, v, c_.d_v);
      c_.d_out(b, h).read(i, 1, c_.d_v, d_out, c_.d_v);
      c_.out(b, h).read(i, 1, c_.d_v, out, c_.d_v);
      T score = c_.scale * dot_product<T, Arch>(q, k, c_.d_qk), slope = c_.scale;
      if (c_.softcap != T(0)) {
        const T y = std::tanh(score / c_.softcap);
        score = c_.softcap * y, slope *= (1 - y) * (1 + y);
      }
      slope *= rule_.slope(score, b, h, i, i);
      score = rule_(score, b, h, i, i);
      if (score == -infinity) continue;
      // 2. Gradients.
      const T p = std::exp(std::min(score - lse, T(0)));
      const T d = dot_product<T, Arch>(d_out, out, c_.d_v);
      const T gradient = p * (dot_product<T, Arch>(d_out, v, c_.d_v) - d) * slope;
      add_scaled(dq(i), gradient, k, c_.d_qk);
      add_scaled(dk(i), gradient, q, c_.d_qk);
      add_scaled(dv(i), p, d_out, c_.d_v);
    }
  }

 private:
  void carve(scratch_carver& memory) noexcept {
    ld_qk_ = round_up(c_.d_qk, W), ld_v_ = round_up(c_.d_v, W);
    const index_t most_keys = smyrf_keys<T, Arch>::most_keys(plan_);
    const index_t most_far = c_.far_field ? smyrf_most_far : 0;
    constexpr index_t block = (key_block + MR) * QS;
    keys_.carve(memory, plan_, c_.d_qk, c_.d_v, c_.far_field);
    sum_k_ = memory.take<T>(most_keys * ld_qk_);
    sum_v_ = memory.take<T>(most_keys * ld_v_);
    far_sum_k_ = memory.take<T>(most_far * ld_qk_);
    far_sum_v_ = memory.take<T>(most_far * ld_v_);
    w_.p = memory.take<T>(block);
    w_.g = memory.take<T>(block);
    w_.slope = memory.take<T>(is_mapped() ? block : 0);
    w_.bias = memory.take<T>(has_bias() || c_.far_field ? block : 0);
    w_.padded = memory.take<T>(MR * std::max(c_.d_qk, c_.d_v));
    past_.carve(memory, plan_, c_.removes_duplicates);
    rows_ = memory.take<T>(QS * std::max(c_.d_qk, c_.d_v));
    one_ = memory.take<T>(QS);
    if (one_ != nullptr) std::fill_n(one_, QS, T(1));
    q_rows_ = memory.take<T>(QS * c_.d_qk);
    d_out_rows_ = memory.take<T>(QS * c_.d_v);
    out_rows_ = memory.take<T>(QS * c_.d_v);
    tile_.qt = memory.take<T>(c_.d_qk * QS);
    tile_.dot = memory.take<T>(c_.d_v * QS);
    tile_.dqt = memory.take<T>(c_.d_qk * QS);
    tile_.q = memory.take<T>(QS * ld_qk_);
    tile_.d_out = memory.take<T>(QS * ld_v_);
    for (T** lane : {&tile_.neg_lse, &tile_.neg_d, &tile_.lo, &tile_.hi}) {
      *lane = memory.take<T>(QS);
    }
  }

  [[nodiscard]] bool is_mapped() const noexcept {
    return Kind == rule_kind::function || c_.softcap != T(0);
  }
  [[nodiscard]] bool has_bias() const noexcept {
    return Kind == rule_kind::bias || c_.removes_duplicates;
  }

  void enter_head(index_t b, index_t g) noexcept {
    b_ = b, g_ = g;
    k_ = c_.k(b, g), v_ = c_.v(b, g);
    q_length_ = plan_.q_length(b), k_length_ = plan_.k_length(b);
  }

  void load_tile(const index_t* queries, index_t n_rows, int nr) noexcept {
    const auto gathered = [&](const head_source<T>& x, index_t d, T* to) {
      gather_rows<T, Arch>(x(b_, h_), queries, n_rows, d, to, d);
      return make_row_source<T, Arch>(tensor_view<const T>(to, 1, 1, n_rows, d), 0, 0);
    };
    tile_.first_row = 0, tile_.n_rows = n_rows;
    tile_.load(gathered(c_.q, c_.d_qk, q_rows_), gathered(c_.d_out, c_.d_v, d_out_rows_),
               gathered(c_.out, c_.d_v, out_rows_), c_.scale, c_.d_qk, c_.d_v, rows_);
    for (index_t r = 0; r < n_rows; ++r) tile_.neg_lse[r] = -c_.lse(b_, h_, queries[r], 0);
    const local_rule rule{rule_, queries, keys_.list, c_.n_kv};
    tile_.ranges.assign(rule, b_, h_, 0, n_rows, nr, keys_.n, [&](index_t r) {
      return tile_.neg_lse[r] == infinity;  // a row without keys: gradients 0
    });
    past_.enter_tile(b_, h_, queries, n_rows, QS);
  }

  // The tile meets keys [k0, k0 + n) of the cluster.
  void fold_block(const index_t* queries, index_t k0, index_t n) noexcept {
    const key_range seen = tile_.ranges.seen_of(k0, k0 + n);
    if (seen.begin >= seen.end) return;
    backward_block<T> block{
        keys_.k + k0 * c_.d_qk, c_.d_qk, keys_.v + k0 * c_.d_v, c_.d_v, sum_k_ + k0 * ld_qk_,
        sum_v_ + k0 * ld_v_,    true};
    const local_rule rule{rule_, queries, keys_.list, c_.n_kv};
    bias_tile<T> pairs{w_.bias, nullptr, QS, b_, h_, 0, tile_.n_rows, k0, seen.end};
    backward_fold<T, Arch> fold(tile_, block, w_, c_.d_qk, c_.d_v, {true, true});
    const key_run everything{seen.begin, seen.end, 0, tile_.ranges.n_vectors, true};
    const bool per_pair = Kind == rule_kind::bias || past_.any();
    if (per_pair || is_mapped()) {
      block.k_finite = keys_.keys_finite();
      tile_.look_for_non_finite(c_.d_qk, c_.d_v);
    }
    if (per_pair && has_bias()) {
      std::fill_n(pairs.value, pairs.n_keys * pairs.ld, T(0));
      if constexpr (Kind == rule_kind::bias) {
        rule_.add({b_, h_, queries, tile_.n_rows, keys_.list + k0, pairs.n_keys}, pairs.value,
                  pairs.ld);
      }
      if (past_.any()) past_.mark_pairs(k0, pairs.n_keys, -infinity, pairs.value);
      pairs.written = true;
      tile_.ranges.complete(pairs);
    }
    if (is_mapped()) {
      return fold.fold_mapped(everything, [&](const key_run& run) {
        weigh_scores(rule, c_.softcap, b_, h_, tile_, k0, run, w_);
        // Only rules of kind bias look at the tile of numbers.
        if (past_.any()) past_.mark_pairs(k0, seen.end, T(-0.0), w_.p);
      });
    }
    if (per_pair) return fold.template fold<masking::bias>(everything);
    typename tile_ranges<T, Arch>::run_list runs;
    const int n_runs = tile_.ranges.runs(k0, k0 + n, runs);
    for (int i = 0; i < n_runs; ++i) {
      if (!runs[static_cast<std::size_t>(i)].masked) continue;
      tile_.ranges.bounds(k0, tile_.lo, tile_.hi);
      block.k_finite = keys_.keys_finite();
      tile_.look_for_non_finite(c_.d_qk, c_.d_v);
    }
    for (int i = 0; i < n_runs; ++i) {
      fold.template fold<masking::range>(runs[static_cast<std::size_t>(i)]);
    }
  }

  // The tile meets the means of the far field.
  void fold_far() noexcept {
    backward_block<T> block{keys_.far_k, c_.d_qk,    keys_.far_v, c_.d_v,
                            far_sum_k_,  far_sum_v_, true};
    backward_fold<T, Arch> fold(tile_, block, w_, c_.d_qk, c_.d_v, {true, true});
    const key_run run{0, keys_.n_far, 0, tile_.ranges.n_vectors, true};
    // Every mean is for every row: infinities are multiplied like other numbers.
    tile_.rows_checked = tile_.rows_finite = true;
    for (index_t f = 0; f < keys_.n_far; ++f)
      std::fill_n(w_.bias + f * QS, QS, keys_.far_log_count[f]);
    std::fill_n(w_.bias + keys_.n_far * QS, MR * QS, -infinity);
    if (!is_mapped()) return fold.template fold<masking::bias>(run);
    fold.fold_mapped(run, [&](const key_run&) {
      const B cap(c_.softcap), inverse(T(1) / c_.softcap);
      for (index_t f = 0; f < keys_.n_far; ++f) {
        for (index_t lane = 0; lane < tile_.ranges.n_vectors * W; lane += W) {
          const index_t x = f * QS + lane;
          const B y = simd::tanh<T, Arch>(simd::load<T, Arch>(w_.p + x) * inverse);
          ((B(T(1)) - y) * (B(T(1)) + y)).store_aligned(w_.slope + x);
          const B s = simd::multiply_add(cap, y, simd::load<T, Arch>(w_.bias + x));
          tiles::weight<T, Arch>(s + simd::load<T, Arch>(tile_.neg_lse + lane))
              .store_aligned(w_.p + x);
        }
      }
    });
  }

  void store_d_q(const index_t* queries, const smyrf_sums<T>& dq) noexcept {
    if (!tile_.has_d_q) std::fill_n(tile_.dqt, c_.d_qk * QS, T(0));
    transpose_out<T, Arch>(tile_.dqt, QS, tile_.n_rows, c_.d_qk, one_, rows_, c_.d_qk);
    for (index_t r = 0; r < tile_.n_rows; ++r) {
      store(dq(queries[r]), rows_ + r * c_.d_qk, c_.d_qk);
    }
  }

  // The first round overwrites, later ones add.
  void store(T* row, const T* x, index_t d) const noexcept {
    if (round_ == 0)
      std::copy_n(x, d, row);
    else
      add_to_row<T, Arch>(row, T(1), x, d);
  }

  static void add_scaled(T* row, T factor, const T* x, index_t d) noexcept {
    for (index_t c = 0; c < d; ++c) row[c] += factor * x[c];
  }

  const smyrf_backward_problem<T>& c_;
  const smyrf_plan& plan_;
  const smyrf_rule<T>& rule_;
  index_t b_ = 0, g_ = 0, h_ = 0, round_ = 0, q_length_ = 0, k_length_ = 0;
  index_t ld_qk_ = 0, ld_v_ = 0;  // d rounded up to whole vectors
  row_source<T> k_{}, v_{};
  smyrf_keys<T, Arch> keys_;
  T *sum_k_ = nullptr, *sum_v_ = nullptr, *far_sum_k_ = nullptr, *far_sum_v_ = nullptr;
  T *q_rows_ = nullptr, *d_out_rows_ = nullptr, *out_rows_ = nullptr;
  T *rows_ = nullptr, *one_ = nullptr;
  smyrf_past<T, Arch> past_;
  backward_scratch<T> w_{};
  backward_tile<T, Arch> tile_{};
};

}  // namespace attn::detail
