// SPDX-License-Identifier: MIT
//
// The backward pass of dense attention: scores are computed again, tile by tile, from the lse.
//
//   D_i  = dO_i·O_i                       P_ij = exp(s_ij − lse_i)
//   G_ij = P_ij (dO_i·v_j − D_i) · d s_ij / d(scale q_i·k_j)
//   dV_j = Σ_i P_ij dO_i      dK_j = Σ_i scale G_ij q_i      dQ_i = Σ_j scale G_ij k_j
//
// A walk takes 4 query tiles of one head over blocks of keys and adds to dQ, or to dK and dV, or to
// all three. As long as there are enough key/value heads for the threads, an item of work is one of
// them: all walks of its query heads, 5 products. Otherwise items are pieces of a head: blocks of
// keys with all queries (dK and dV, 4 products), and query tiles with all keys (dQ, 3). Either way
// each element of dQ is summed over keys in order, and each of dK and dV over query heads and
// queries in order: the same bits.
#pragma once

#include <array>
#include <cmath>
#include <limits>

#include <attn/context.hpp>
#include <attn/detail/backward_fold.hpp>
#include <attn/detail/backward_scores.hpp>
#include <attn/detail/dense_attention_kernel.hpp>
#include <attn/detail/head_access.hpp>
#include <attn/simd/fp_environment.hpp>

namespace attn::detail {

/// A call behind its checks.
template <class T>
struct dense_backward_problem {
  index_t n_batch, n_heads, n_heads_kv, n_q, n_kv, d_qk, d_v;
  T scale, softcap;
  head_source<T> q, k, v, out, d_out;
  tensor_view<const T> lse;
  head_sink<T> dq, dk, dv;

  [[nodiscard]] index_t group() const noexcept { return n_heads / n_heads_kv; }
};

/// Query tiles of one walk, which share each block of keys; 8 are no faster.
inline constexpr int walk_tiles = 4;

template <class T, class Arch, score_rule Rule>
class dense_backward_worker {
  using size = tile_size<T, Arch>;
  using B = simd::batch<T, Arch>;
  static constexpr int W = size::width, MR = size::keys, QS = size::max_rows;
  static constexpr bool has_bias = Rule::kind == rule_kind::bias;
  static constexpr bool has_function = Rule::kind == rule_kind::function;
  static constexpr T infinity = std::numeric_limits<T>::infinity();

 public:
  /// Rows per walk.
  static constexpr index_t walk_rows = walk_tiles * QS;
  /// Keys per item of dK and dV, where a head is cut.
  static constexpr index_t item_keys = 2 * key_block;

  /// `n_sums`: keys whose dK and dV are summed at the same time.
  dense_backward_worker(const dense_backward_problem<T>& problem, const Rule& rule, index_t n_sums,
                        scratch_carver memory) noexcept
      : c_(problem), rule_(rule) {
    carve(memory, n_sums);
  }

  [[nodiscard]] static std::size_t scratch_bytes(const dense_backward_problem<T>& problem,
                                                 const Rule& rule, index_t n_sums) noexcept {
    dense_backward_worker counter(problem, rule);
    scratch_carver memory;
    counter.carve(memory, n_sums);
    return memory.used();
  }

  [[nodiscard]] static index_t walks_per_head(index_t n_q) noexcept {
    return (n_q + walk_rows - 1) / walk_rows;
  }

  /// Gradients of the keys [keys.begin, keys.end) of key/value head g, and with `with_d_q` (all
  /// keys) those of the query heads that read it.
  void run_keys(index_t b, index_t g, key_range keys, bool with_d_q) noexcept {
    const index_t n_keys = keys.end - keys.begin;
    first_key_ = keys.begin;
    std::fill_n(sum_k_, n_keys * ld_qk_, T(0));
    std::fill_n(sum_v_, n_keys * ld_v_, T(0));
    for (index_t h = g * c_.group(); h < (g + 1) * c_.group(); ++h) {
      for (index_t walk = 0; walk < walks_per_head(c_.n_q); ++walk) {
        run_walk(b, h, walk, keys, {with_d_q, true});
      }
    }
    c_.dk(b, g).write(sum_k_, ld_qk_, keys.begin, n_keys, c_.d_qk);
    c_.dv(b, g).write(sum_v_, ld_v_, keys.begin, n_keys, c_.d_v);
  }

  /// Gradients of the queries of one walk.
  void run_queries(index_t b, index_t h, index_t walk) noexcept {
    run_walk(b, h, walk, {0, c_.n_kv}, {true, false});
  }

 private:
  dense_backward_worker(const dense_backward_problem<T>& problem, const Rule& rule) noexcept
      : c_(problem), rule_(rule) {}

  void carve(scratch_carver& memory, index_t n_sums) noexcept {
    ld_qk_ = round_up(c_.d_qk, W), ld_v_ = round_up(c_.d_v, W);
    constexpr index_t block = (key_block + MR) * QS;
    sum_k_ = memory.take<T>(n_sums * ld_qk_);
    sum_v_ = memory.take<T>(n_sums * ld_v_);
    packed_k_ = memory.take<T>(key_block * c_.d_qk);
    packed_v_ = memory.take<T>(key_block * c_.d_v);
    w_.p = memory.take<T>(block);
    w_.g = memory.take<T>(block);
    if (is_mapped()) w_.slope = memory.take<T>(block);
    if (has_bias) {
      w_.bias = memory.take<T>(block);
      staging_ = memory.take<T>(QS * bias_tile<T>::staging_stride);
    }
    w_.padded = memory.take<T>(MR * std::max(c_.d_qk, c_.d_v));
    rows_ = memory.take<T>(QS * std::max(c_.d_qk, c_.d_v));
    one_ = memory.take<T>(QS);
    if (one_ != nullptr) std::fill_n(one_, QS, T(1));
    const index_t wanted = std::min<index_t>(walk_tiles, (c_.n_q + W - 1) / W);
    for (index_t i = 0; i < wanted; ++i) {
      backward_tile<T, Arch>& t = tiles_[static_cast<std::size_t>(i)];
      t.qt = memory.take<T>(c_.d_qk * QS);
      t.dot = memory.take<T>(c_.d_v * QS);
      t.dqt = memory.take<T>(c_.d_qk * QS);
      t.q = memory.take<T>(QS * ld_qk_);
      t.d_out = memory.take<T>(QS * ld_v_);
      for (T** lane : {&t.neg_lse, &t.neg_d, &t.lo, &t.hi}) *lane = memory.take<T>(QS);
    }
  }

  [[nodiscard]] bool is_mapped() const noexcept { return has_function || c_.softcap != T(0); }

  // Queries of walk `walk` of head h meet `keys`.
  void run_walk(index_t b, index_t h, index_t walk, key_range keys, backward_wants wants) noexcept {
    b_ = b, h_ = h;
    k_ = c_.k(b, h / c_.group()), v_ = c_.v(b, h / c_.group());
    // 1. Cut the rows into tiles: 3 vectors each, but 2 + 2 rather than 3 + 1 at the end.
    const index_t row0 = walk * walk_rows, row_end = std::min(c_.n_q, row0 + walk_rows);
    std::size_t n_tiles = 0;
    key_range seen{c_.n_kv, 0};
    for (index_t row = row0; row < row_end; ++n_tiles) {
      const index_t vectors = (row_end - row + W - 1) / W;
      const int nr = vectors == 4 ? 2 : static_cast<int>(std::min<index_t>(vectors, 3));
      backward_tile<T, Arch>& t = tiles_[n_tiles];
      t.first_row = row, t.n_rows = std::min<index_t>(nr * W, row_end - row);
      t.ranges.assign(rule_, b, h, row, t.n_rows, nr, c_.n_kv, [&](index_t r) {
        return c_.lse(b, h, row + r, 0) == -infinity;  // a row without keys: gradients 0
      });
      const key_range any = t.ranges.any;
      seen = {std::min(seen.begin, any.begin), std::max(seen.end, any.end)};
      row += t.n_rows;
    }
    seen = {std::max(seen.begin, keys.begin), std::min(seen.end, keys.end)};
    if (seen.begin >= seen.end && !wants.d_q) return;
    const row_source<T> q = c_.q(b, h), d_out = c_.d_out(b, h), out = c_.out(b, h);
    for (std::size_t i = 0; i < n_tiles; ++i) {
      backward_tile<T, Arch>& t = tiles_[i];
      t.load(q, d_out, out, c_.scale, c_.d_qk, c_.d_v, rows_);
      for (index_t r = 0; r < t.n_rows; ++r) t.neg_lse[r] = -c_.lse(b, h, t.first_row + r, 0);
    }
    // 2. Blocks of keys; first_key_ is a multiple of key_block.
    for (index_t k0 = seen.begin / key_block * key_block; k0 < seen.end; k0 += key_block) {
      const index_t k1 = std::min(k0 + key_block, seen.end);
      load_block(k0, k1, wants.d_kv);
      for (std::size_t i = 0; i < n_tiles; ++i) fold(tiles_[i], k0, k1, wants);
    }
    // 3. dQ.
    if (!wants.d_q) return;
    const row_sink<T> dq = c_.dq(b, h);
    for (std::size_t i = 0; i < n_tiles; ++i) tiles_[i].store_d_q(dq, c_.d_qk, one_, rows_);
  }

  // Keys [k0, k1): as they lie where rows are dense, else packed.
  void load_block(index_t k0, index_t k1, bool with_sums) noexcept {
    const auto load = [&](const row_source<T>& x, index_t d, T* packed, const T*& rows,
                          index_t& ld) {
      rows = packed, ld = d;
      if (x.direct != nullptr && x.row_stride == d)
        rows = x.direct + k0 * d;
      else
        x.read(k0, k1 - k0, d, packed, d);
    };
    load(k_, c_.d_qk, packed_k_, block_.k, block_.ldk);
    load(v_, c_.d_v, packed_v_, block_.v, block_.ldv);
    if (with_sums) {
      block_.d_k = sum_k_ + (k0 - first_key_) * ld_qk_;
      block_.d_v = sum_v_ + (k0 - first_key_) * ld_v_;
    }
    block_checked_ = false;
  }

  // A tile meets keys [k0, k1).
  void fold(backward_tile<T, Arch>& t, index_t k0, index_t k1, backward_wants wants) noexcept {
    const key_range seen = t.ranges.seen_of(k0, k1);
    if (seen.begin >= seen.end) return;
    backward_fold<T, Arch> fold(t, block_, w_, c_.d_qk, c_.d_v, wants);
    bias_tile<T> pairs{w_.bias, staging_, QS, b_, h_, t.first_row, t.n_rows, k0, seen.end};
    tile_effect effect = has_bias || has_function ? tile_effect::some : tile_effect::all;
    if constexpr (has_bias) {
      effect = add_bias<Arch>(rule_, pairs);
      if (effect == tile_effect::none) return;
    }
    const key_run everything{seen.begin, seen.end, 0, t.ranges.n_vectors, true};
    if (is_mapped()) {
      look_for_non_finite(t, k1 - k0);
      if (has_bias) t.ranges.complete(pairs);
      return fold.fold_mapped(everything, [&](const key_run& run) {
        weigh_scores(rule_, c_.softcap, b_, h_, t, k0, run, w_);
      });
    }
    if constexpr (has_bias) {
      if (effect == tile_effect::some) {
        look_for_non_finite(t, k1 - k0);
        t.ranges.complete(pairs);
        return fold.template fold<masking::bias>(everything);
      }
    }
    typename tile_ranges<T, Arch>::run_list runs;
    const int n = t.ranges.runs(k0, k1, runs);
    bool masked = false;
    for (int r = 0; r < n; ++r) masked |= runs[static_cast<std::size_t>(r)].masked;
    if (masked) t.ranges.bounds(k0, t.lo, t.hi), look_for_non_finite(t, k1 - k0);
    for (int r = 0; r < n; ++r) {
      fold.template fold<masking::range>(runs[static_cast<std::size_t>(r)]);
    }
  }

  // Before masked runs: whether forbidden pairs may simply be multiplied by their weight of 0.
  void look_for_non_finite(backward_tile<T, Arch>& t, index_t n_keys) noexcept {
    if (!block_checked_) {
      block_.k_finite = all_finite<T, Arch>(block_.k, block_.ldk, n_keys, c_.d_qk);
      block_checked_ = true;
    }
    t.look_for_non_finite(c_.d_qk, c_.d_v);
  }

  const dense_backward_problem<T>& c_;
  const Rule& rule_;
  index_t b_ = 0, h_ = 0, first_key_ = 0;
  index_t ld_qk_ = 0, ld_v_ = 0;  // d rounded up to whole vectors
  row_source<T> k_{}, v_{};
  T *sum_k_ = nullptr, *sum_v_ = nullptr;  // [n_sums][ld]
  T *packed_k_ = nullptr, *packed_v_ = nullptr;
  T *rows_ = nullptr, *staging_ = nullptr, *one_ = nullptr;
  bool block_checked_ = false;
  backward_block<T> block_{};
  backward_scratch<T> w_{};
  std::array<backward_tile<T, Arch>, walk_tiles> tiles_{};
};

/// Runs the call over the threads of `ctx`.
template <class T, class Arch, score_rule Rule>
void dense_attention_backward_tiled(const dense_backward_problem<T>& c, const Rule& rule,
                                    context& ctx) {
  using worker = dense_backward_worker<T, Arch, Rule>;
  const index_t heads = c.n_batch * c.n_heads_kv, n_threads = ctx.n_threads();
  // Whole heads take 5 products, pieces 7 but in any number.
  const bool whole_heads = 5 * ((heads + n_threads - 1) / n_threads) * n_threads <= 7 * heads;
  const index_t pieces = (c.n_kv + worker::item_keys - 1) / worker::item_keys;
  const index_t key_items = heads * (whole_heads ? 1 : pieces);
  const index_t walks = worker::walks_per_head(c.n_q);
  const index_t query_items = whole_heads ? 0 : c.n_batch * c.n_heads * walks;
  const index_t n_sums = whole_heads ? c.n_kv : std::min(c.n_kv, worker::item_keys);
  ctx.run(key_items + query_items, 1, worker::scratch_bytes(c, rule, n_sums),
          [&](std::byte* scratch, work_queue& queue) noexcept {
            const simd::flush_subnormals mode;
            worker w(c, rule, n_sums, scratch_carver(scratch));
            for (index_t item = 0, end = 0; queue.next(item, end);) {
              if (item >= key_items) {
                const index_t walk = item - key_items, head = walk / walks;
                w.run_queries(head / c.n_heads, head % c.n_heads, walk % walks);
                continue;
              }
              const index_t head = whole_heads ? item : item / pieces;
              const index_t first = whole_heads ? 0 : item % pieces * worker::item_keys;
              const index_t last =
                  whole_heads ? c.n_kv : std::min(c.n_kv, first + worker::item_keys);
              w.run_keys(head / c.n_heads_kv, head % c.n_heads_kv, {first, last}, whole_heads);
            }
          });
}

}  // namespace attn::detail
