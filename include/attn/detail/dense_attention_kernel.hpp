// SPDX-License-Identifier: MIT
//
// Dense attention: which tiles meet which blocks of keys.
//
// Work is cut into items of up to 4 query tiles of one head. A thread takes an item and walks over
// the blocks of keys that any of its rows may see; every block serves all tiles of the item while
// it is in L1/L2 (4 tiles instead of 1: 79% instead of 73.5% of the peak at d = 128, n = 2048).
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include <attn/context.hpp>
#include <attn/dense_options.hpp>
#include <attn/detail/dense_problem.hpp>
#include <attn/detail/key_value_head.hpp>
#include <attn/detail/lookahead.hpp>
#include <attn/detail/packing.hpp>
#include <attn/detail/query_tile.hpp>
#include <attn/detail/score_bias.hpp>
#include <attn/detail/scratch_carver.hpp>
#include <attn/detail/tile_fold.hpp>
#include <attn/detail/tile_output.hpp>
#include <attn/detail/tile_ranges.hpp>
#include <attn/score_rule.hpp>
#include <attn/simd/fp_environment.hpp>
#include <attn/simd/math.hpp>
#include <attn/simd/reduce.hpp>

namespace attn::detail {

/// Query tiles that share each block of keys.
inline constexpr int tiles_per_item = 4;

/// What one thread needs to fold items of a call: scratch and the packed head.
template <class T, class Arch, score_rule Rule>
class dense_worker {
  using size = tile_size<T, Arch>;
  using B = simd::batch<T, Arch>;
  static constexpr int W = size::width, MR = size::keys;
  static constexpr bool has_bias = Rule::kind == rule_kind::bias;
  static constexpr T infinity = std::numeric_limits<T>::infinity();

 public:
  dense_worker(const dense_problem<T>& problem, const Rule& rule, scratch_carver memory) noexcept
      : c_(problem), rule_(rule), head_(problem) {
    carve(memory);
  }

  [[nodiscard]] static std::size_t scratch_bytes(const dense_problem<T>& problem,
                                                 const Rule& rule) noexcept {
    dense_worker counter(problem, rule);
    scratch_carver memory;
    counter.carve(memory);
    return memory.used();
  }

  /// Rows per item.
  static constexpr index_t item_rows = tiles_per_item * size::max_rows;

  [[nodiscard]] static index_t items_per_head(index_t n_q) noexcept {
    return (n_q + item_rows - 1) / item_rows;
  }

  /// Item `item` of head h, batch b.
  void run(index_t b, index_t h, index_t item) noexcept {
    enter_head(b, h);
    // 1. Cut the rows into tiles: 3 vectors each, but 2 + 2 rather than 3 + 1 at the end.
    const index_t row0 = item * item_rows, row_end = std::min(c_.n_q, row0 + item_rows);
    int n_tiles = 0;
    key_range seen{c_.n_kv, 0};
    for (index_t row = row0; row < row_end; ++n_tiles) {
      const index_t vectors = (row_end - row + W - 1) / W;
      const int nr = vectors == 4 ? 2 : static_cast<int>(std::min<index_t>(vectors, 3));
      const index_t rows = std::min<index_t>(nr * W, row_end - row);
      begin(n_tiles, row, rows, nr);
      const key_range any = ranges_[static_cast<std::size_t>(n_tiles)].any;
      seen = {std::min(seen.begin, any.begin), std::max(seen.end, any.end)};
      row += rows;
    }
    seen_end_ = seen.end;
    // 2. Fold the blocks of keys, normalise and write.
    fold_blocks(0, n_tiles, seen);
    for (int i = 0; i < n_tiles; ++i) finish(i);
    // 3. Rows that came out infinite or NaN though their sum of weights is a number.
    for (int i = 0; i < n_tiles; ++i) {
      if (again_[static_cast<std::size_t>(i)]) do_again(i);
    }
  }

 private:
  dense_worker(const dense_problem<T>& problem, const Rule& rule) noexcept
      : c_(problem), rule_(rule), head_(problem) {}

  void carve(scratch_carver& memory) noexcept {
    head_.carve(memory, items_per_head(c_.n_q) <= 1, c_.n_q >= 2 * size::max_rows);
    scratch_.template carve<Arch>(memory, c_.d_qk, c_.d_v);
    if (has_bias) {
      scratch_.bias = scratch_.p;
      spare_bias_ = memory.take<T>(tile_scratch<T>::template block_size<Arch>());
    }
    if (Rule::kind != rule_kind::range) {
      staging_ = memory.take<T>(size::max_rows * bias_tile<T>::staging_stride);
    }
    rows_ = memory.take<T>(size::max_rows * std::max(c_.d_qk, c_.d_v));
    const index_t wanted = std::min<index_t>(tiles_per_item, (c_.n_q + W - 1) / W);
    for (index_t i = 0; i < wanted; ++i) {
      tiles_[static_cast<std::size_t>(i)].template carve<Arch>(memory, c_.d_qk, c_.d_v, c_.n_kv);
    }
  }

  // Blocks of keys in `seen` meet tiles [first, last).
  void fold_blocks(int first, int last, key_range seen) noexcept {
    for (index_t k0 = seen.begin / key_block * key_block; k0 < seen.end; k0 += key_block) {
      look_ahead(k0, first, last);
      block_ = head_.block(k0, seen_end_);
      if (k0 % query_tile<T>::bank_keys == 0) {
        for (int i = first; i < last; ++i) {
          tiles_[static_cast<std::size_t>(i)].template bank<Arch>(c_.d_v);
        }
      }
      for (int i = first; i < last; ++i) {
        const key_range any = ranges_[static_cast<std::size_t>(i)].any;
        if (any.begin >= k0 + key_block || any.end <= k0) continue;
        block_.v_finite = !selective_ || survey(k0).finite;
        switch (tiles_[static_cast<std::size_t>(i)].n_vectors) {
        case 3:
          fold<3>(i, k0);
          break;
        case 2:
          fold<2>(i, k0);
          break;
        default:
          fold<1>(i, k0);
        }
      }
      if (k0 + key_block >= seen.end) ahead_.ask_rest();
    }
  }

  // A tile some of whose rows came out infinite or NaN. Looking at V first would cost 3% of a
  // causal call at n = 128, so it is looked at now.
  void do_again(int i) noexcept {
    const key_range seen = ranges_[static_cast<std::size_t>(i)].any;
    value_survey v;
    for (index_t k0 = seen.begin / key_block * key_block; k0 < seen.end; k0 += key_block) {
      block_ = head_.block(k0, seen_end_);
      const value_survey block = survey(k0);
      v = {v.finite && block.finite, v.huge || block.huge};
    }
    // An infinity or NaN in V met weights of 0 in rows that may not see it: leave those out.
    if (!v.finite) again_with(i, seen, selective_);
    // Weights may reach 2^32 (tile_fold.hpp), so huge values overflow where their average does
    // not: with the true maximum no weight is above 1.
    if (v.huge && again_[static_cast<std::size_t>(i)]) {
      selective_ = true;
      again_with(i, seen, true_maximum_);
      selective_ = false;
    }
  }

  void again_with(int i, key_range seen, bool& how) noexcept {
    const query_tile<T>& t = tiles_[static_cast<std::size_t>(i)];
    how = true;
    begin(i, t.first_row, t.n_rows, t.n_vectors);
    fold_blocks(i, i + 1, seen);
    finish(i);
    how = false;
  }

  void enter_head(index_t b, index_t h) noexcept {
    if (b == b_ && h == h_) return;
    if (b != b_ || c_.kv_head(h) != c_.kv_head(h_)) head_.enter(b, c_.kv_head(h));
    b_ = b, h_ = h;
    q_ = c_.q(b, h);
    out_ = c_.out(b, h);
  }

  // What to prefetch while tiles [first, last) meet the block at k0: the next block, or after the
  // last one the rows that are written now and the operands of the next item.
  void look_ahead(index_t k0, int first, int last) noexcept {
    ahead_.clear();
    const index_t next = k0 + key_block;
    if (next < seen_end_) {
      head_.expect(next, c_.n_kv, ahead_);
    } else {
      const index_t row0 = tiles_[0].first_row, row1 = std::min(row0 + item_rows, c_.n_q);
      if (out_.direct != nullptr) {
        ahead_.add(out_.direct + row0 * out_.row_stride, c_.d_v, out_.row_stride, row1 - row0);
      }
      expect_item_after(row1);
    }
    index_t groups = 0;
    for (int i = first; i < last; ++i) {
      const key_range any = ranges_[static_cast<std::size_t>(i)].any;
      groups += std::max<index_t>(0, std::min(any.end, next) - std::max(any.begin, k0)) / MR;
    }
    ahead_.spread_over(groups);
  }

  void expect_item_after(index_t row) noexcept {
    index_t b = b_, h = h_;
    if (row == c_.n_q) {
      row = 0;
      if (++h == c_.n_heads) h = 0, ++b;
    }
    if (b == c_.n_batch) return;
    const row_source<T> q = c_.q(b, h);
    if (q.direct != nullptr) {
      ahead_.add(q.direct + row * q.row_stride, c_.d_qk, q.row_stride,
                 std::min(item_rows, c_.n_q - row));
    }
    if (b == b_ && c_.kv_head(h) == c_.kv_head(h_))
      head_.expect(0, c_.n_kv, ahead_);
    else
      head_.expect_head(b, c_.kv_head(h), ahead_);
  }

  void begin(int i, index_t row0, index_t rows, int nr) noexcept {
    query_tile<T>& t = tiles_[static_cast<std::size_t>(i)];
    tile_ranges<T, Arch>& ranges = ranges_[static_cast<std::size_t>(i)];
    const index_t qs = nr * W;
    t.n_vectors = nr, t.first_row = row0, t.n_rows = rows;
    // 1. Queries, scaled and transposed.
    const T* source = rows_;
    index_t stride = c_.d_qk;
    if (q_.direct != nullptr)
      source = q_.direct + row0 * q_.row_stride, stride = q_.row_stride;
    else
      q_.read(row0, rows, c_.d_qk, rows_, c_.d_qk);
    transpose_in<T, Arch>(source, stride, rows, c_.d_qk, c_.scale, t.qt, qs);
    // 2. Ranges of keys; a lane that sees none has nothing to wait for.
    ranges.assign(rule_, b_, h_, row0, rows, nr, c_.n_kv, [](int) { return false; });
    t.any_waiting = false;
    for (int r = 0; r < qs; ++r) {
      const key_range keys = ranges.lane[static_cast<std::size_t>(r)];
      const bool waits = r < rows && keys.begin < keys.end;
      t.waiting[r] = waits ? T(1) : T(0);
      t.any_waiting |= waits;
    }
    // 3. Empty state.
    t.clear(qs);
  }

  // Tile i meets the block at k0.
  template <int NR>
  void fold(int i, index_t k0) noexcept {
    query_tile<T>& t = tiles_[static_cast<std::size_t>(i)];
    const tile_ranges<T, Arch>& ranges = ranges_[static_cast<std::size_t>(i)];
    const index_t k1 = k0 + block_.n_keys;
    const bool whole = ranges.all_see(k0, k1) && block_.n_keys % MR == 0;
    tile_fold<T, Arch, NR, has_bias> fold(t, block_, scratch_, c_.d_qk, c_.d_v, &ahead_);

    const bool stores_scores =
        c_.softcap != T(0) || Rule::kind == rule_kind::function || true_maximum_;
    bias_tile<T> pairs{stores_scores ? spare_bias_ : scratch_.bias,
                       staging_,
                       NR * W,
                       b_,
                       h_,
                       t.first_row,
                       t.n_rows,
                       k0,
                       block_.n_keys};
    tile_effect effect = tile_effect::all;
    if constexpr (has_bias) {
      // Nothing is read past the range of the rows, neither keys nor what rules know of them.
      pairs.n_keys = std::min(k1, ranges.any.end) - k0;
      effect = add_bias<Arch>(rule_, pairs);
      if (effect == tile_effect::none) return;
      if (effect == tile_effect::some || !whole) ranges.complete(pairs);
    }
    if (effect == tile_effect::all && whole && !stores_scores) {
      const key_run run{0, block_.n_keys, 0, NR, false};
      return fold.fold(&run, 1);
    }
    if (stores_scores) {
      block_.n_keys = std::min(k1, ranges.any.end) - k0;
      fold.fold_mapped([&](T* s) { map_scores<NR>(s, ranges, pairs, effect, whole); });
      block_.n_keys = k1 - k0;
      return;
    }
    if constexpr (has_bias) {
      const key_range seen = ranges.seen_of(k0, k1);
      const key_run run{seen.begin, seen.end, 0, NR, true};
      fold.fold(&run, 1, [&] {
        pairs.value = spare_bias_, pairs.written = false;
        (void)add_bias<Arch>(rule_, pairs);
        ranges.complete(pairs);
        return spare_bias_;
      });
    } else {
      typename tile_ranges<T, Arch>::run_list runs;
      int n = ranges.runs(k0, k1, runs);
      // Without a mask the products take whole groups: the keys behind the last one are a run.
      if (n > 0) {
        key_run& last = runs[static_cast<std::size_t>(n - 1)];
        const index_t rest = (last.last - last.first) % MR;
        if (!last.masked && rest > 0) {
          const key_run tail{last.last - rest, last.last, last.v0, last.v1, true};
          last.last -= rest;
          if (last.first == last.last)
            last = tail;
          else
            runs[static_cast<std::size_t>(n++)] = tail;
        }
      }
      ranges.bounds(k0, t.lo, t.hi);
      fold.fold(runs.data(), n);
    }
  }

  // Softcap and the rule on scores s: [n_keys][QS].
  template <int NR>
  void map_scores(T* s, const tile_ranges<T, Arch>& ranges, bias_tile<T> pairs, tile_effect effect,
                  bool whole) const noexcept {
    constexpr index_t qs = NR * W;
    pairs.n_keys = block_.n_keys;
    if (c_.softcap != T(0)) {
      const B cap(c_.softcap), inverse(T(1) / c_.softcap);
      for (index_t x = 0; x < block_.n_keys * qs; x += W) {
        (cap * simd::tanh<T, Arch>(simd::load<T, Arch>(s + x) * inverse)).store_aligned(s + x);
      }
    }
    if constexpr (Rule::kind == rule_kind::function) {
      apply_rule(rule_, pairs, s, c_.n_kv);
    } else if constexpr (has_bias) {
      if (effect == tile_effect::all && whole) return;
      for (index_t x = 0; x < block_.n_keys * qs; x += W) {
        const B bias = simd::load<T, Arch>(pairs.value + x);
        xsimd::select(bias == B(-infinity), bias, simd::load<T, Arch>(s + x) + bias)
            .store_aligned(s + x);
      }
    } else if (!whole) {
      for (index_t key = 0; key < block_.n_keys; ++key) {
        for (int r = 0; r < qs; ++r) {
          const key_range keys = ranges.lane[static_cast<std::size_t>(r)];
          const index_t at = pairs.j0 + key;
          if (at < keys.begin || at >= keys.end) s[key * qs + r] = -infinity;
        }
      }
    }
  }

  // The rows of the current block that may be seen.
  [[nodiscard]] value_survey survey(index_t k0) const noexcept {
    const index_t rows = std::min(k0 + block_.n_keys, seen_end_) - k0;
    return survey_values<T, Arch>(block_.v, block_.ldv, rows, c_.d_v,
                                  largest_sum<T> * static_cast<T>(c_.n_kv));
  }

  void finish(int i) noexcept {
    query_tile<T>& t = tiles_[static_cast<std::size_t>(i)];
    const index_t qs = t.n_vectors * W;
    t.template collect<Arch>(c_.d_v);
    // 1. 1/l and the lse.
    T* factor = t.l_before;
    alignas(64) std::array<T, size::max_rows> lse;
    const T sink =
        c_.sinks.empty() ? -infinity : static_cast<T>(c_.sinks[static_cast<std::size_t>(h_)]);
    const bool done_before = selective_ || true_maximum_;
    const bool wants_lse = c_.lse.data_handle() != nullptr && !done_before;
    normalise<T, Arch>(t, sink, factor, wants_lse ? lse.data() : nullptr);
    if (wants_lse) {
      for (index_t r = 0; r < t.n_rows; ++r) {
        c_.lse(b_, h_, t.first_row + r, 0) = lse[static_cast<std::size_t>(r)];
      }
    }
    // 2. Output rows; when done again, only those that came out infinite or NaN.
    auto& lanes = retried_[static_cast<std::size_t>(i)];
    if (done_before) {
      for (index_t r = 0; r < t.n_rows; ++r) {
        if (!lanes[static_cast<std::size_t>(r)]) continue;
        for (index_t c = 0; c < c_.d_v; ++c) rows_[c] = t.ot[c * qs + r] * factor[r];
        out_.write(rows_, c_.d_v, t.first_row + r, 1, c_.d_v);
      }
    }
    bool finite = false;
    if (!done_before && out_.direct != nullptr) {
      finite = transpose_out<T, Arch>(t.ot, qs, t.n_rows, c_.d_v, factor,
                                      out_.direct + t.first_row * out_.row_stride, out_.row_stride);
    } else if (!done_before) {
      finite = transpose_out<T, Arch>(t.ot, qs, t.n_rows, c_.d_v, factor, rows_, c_.d_v);
      out_.write(rows_, c_.d_v, t.first_row, t.n_rows, c_.d_v);
    }
    again_[static_cast<std::size_t>(i)] =
        !finite && find_overflow<T, Arch>(t, factor, c_.d_v, lanes);
  }

  const dense_problem<T>& c_;
  const Rule& rule_;
  index_t b_ = -1, h_ = -1;
  row_source<T> q_{};
  row_sink<T> out_{};
  key_value_head<T> head_;
  lookahead ahead_;
  index_t seen_end_ = 0;  // no row of the item sees a key past it
  T *rows_ = nullptr, *staging_ = nullptr, *spare_bias_ = nullptr;
  key_value_block<T> block_{};
  tile_scratch<T> scratch_{};
  std::array<query_tile<T>, tiles_per_item> tiles_{};
  std::array<tile_ranges<T, Arch>, tiles_per_item> ranges_{};
  bool selective_ = false, true_maximum_ = false;  // how a tile is done again
  std::array<bool, tiles_per_item> again_{};
  std::array<std::array<bool, size::max_rows>, tiles_per_item> retried_{};
};

/// Runs the call over the threads of `ctx`.
template <class T, class Arch, score_rule Rule>
void dense_attention_tiled(const dense_problem<T>& problem, const Rule& rule, context& ctx) {
  using worker = dense_worker<T, Arch, Rule>;
  const index_t per_head = worker::items_per_head(problem.n_q);
  const index_t heads = problem.n_batch * problem.n_heads;
  // Items of one head together, so that a packed head is packed once, unless threads would idle.
  const index_t grain = heads >= 4 * ctx.n_threads() ? per_head : 1;
  ctx.run(heads * per_head, grain, worker::scratch_bytes(problem, rule),
          [&](std::byte* scratch, work_queue& queue) noexcept {
            const simd::flush_subnormals mode;
            worker w(problem, rule, scratch_carver(scratch));
            index_t first = 0, last = 0;
            while (queue.next(first, last)) {
              for (index_t item = first; item < last; ++item) {
                const index_t head = item / per_head;
                w.run(head / problem.n_heads, head % problem.n_heads, item % per_head);
              }
            }
          });
}

}  // namespace attn::detail
