// SPDX-License-Identifier: MIT
//
// Dense attention on AMX tiles: the same fold as dense_attention_kernel.hpp, with the products of
// amx_products.hpp. docs/amx.md has the picture.
//
// An item is 8 tiles of 32 queries of one head; a block is 4 chunks of 32 keys. The chunks of all
// tiles and blocks of an item form one pipeline: while the scores of one chunk are multiplied, the
// chunk before gets its softmax, and when the last chunk of a block has got it, the block's values
// are added. Softmax without a running maximum, as in tile_fold.hpp: a row takes its first
// chunk's, and a block after which l has passed 2^24 is done again with the true one.
//
// Chunks and blocks lie at absolute key positions and a key that is skipped or forbidden adds
// exactly 0, so that a row's bits depend on its own query, keys, values, rule and options alone.
#pragma once

#include <attn/detail/amx_packed_head.hpp>
#include <attn/detail/amx_redo.hpp>
#include <attn/detail/amx_score_tile.hpp>
#include <attn/detail/dense_attention_kernel.hpp>

#if defined(ATTN_HAS_AMX)

namespace attn::detail::amx {

inline constexpr int tiles_per_item = 8;
inline constexpr index_t item_rows = tiles_per_item * tile_rows;
/// Where l leaves the range in which m serves as the maximum.
inline constexpr float largest_sum = 0x1p24f;
static_assert(block_keys <= key_block, "bias tiles hold a block of the FMA kernel");
/// Keys after which the output is set aside and summed anew, as in the FMA kernel. Weights of three
/// parts are for float quality: with 2048 the error of flat softmaxes over 4096 keys is up to 1.4
/// times that of the FMA kernel.
[[nodiscard]] inline index_t bank_keys(const engine& e) noexcept {
  return e.parts_p == 3 ? 4 * block_keys : query_tile<float>::bank_keys;
}

/// What one thread needs to fold items of a call.
template <class Arch, score_rule Rule>
class worker {
  static constexpr bool has_bias = Rule::kind == rule_kind::bias;
  static constexpr float infinity = std::numeric_limits<float>::infinity();

 public:
  worker(const dense_problem<float>& problem, const Rule& rule, const engine& e,
         scratch_carver memory) noexcept
      : c_(problem), rule_(rule), e_(e), redo_(problem, rule, carve_redo(problem, rule, memory)),
        head_(problem, e) {
    carve(memory);
    std::fill_n(idle_scores_, sums_size, 0.0f);
    std::fill_n(idle_lanes_, 2 * tile_rows, 0.0f);
    chunk_ = idle();
    pending_ = idle_scores_ + late_sums;
  }

  [[nodiscard]] static std::size_t scratch_bytes(const dense_problem<float>& problem,
                                                 const Rule& rule, const engine& e) noexcept {
    scratch_carver memory;
    const auto redo_memory = carve_redo(problem, rule, memory);
    worker counter(problem, rule, e, redo_memory, memory);
    return counter.used_;
  }

  [[nodiscard]] static index_t items_per_head(index_t n_q) noexcept {
    return (n_q + item_rows - 1) / item_rows;
  }

  /// Item `item` of head h, batch b.
  void run(index_t b, index_t h, index_t item) noexcept {
    enter_head(b, h);
    // 1. Queries into tiles.
    const index_t row0 = item * item_rows, row_end = std::min(c_.n_q, row0 + item_rows);
    int n_tiles = 0;
    key_range seen{c_.n_kv, 0};
    for (index_t row = row0; row < row_end; row += tile_rows, ++n_tiles) {
      const query_block& t = begin(n_tiles, row, std::min(tile_rows, row_end - row));
      seen = {std::min(seen.begin, t.any.begin), std::max(seen.end, t.any.end)};
    }
    seen_end_ = seen.end;
    // 2. Blocks of keys, each for all tiles while it is in the caches.
    for (index_t k0 = seen.begin / block_keys * block_keys; k0 < seen.end; k0 += block_keys) {
      for (int i = 0; i < n_tiles; ++i) fold(tiles_[static_cast<std::size_t>(i)], k0);
    }
    // 3. The chunk that is left in the pipeline.
    flush();
    e_.weights(chunk_.scores);
    finish_chunk();
    flush();
    chunk_ = idle();
    // 4. Normalise and write; rows that this kernel must not compute come from the other.
    bool any_redo = false;
    for (int i = 0; i < n_tiles; ++i) {
      query_block& t = tiles_[static_cast<std::size_t>(i)];
      finish(t);
      any_redo |= (t.redo | t.patch) != 0;
    }
    if (!any_redo) return;
    redo_.run(b, h, row0, row_end, tiles_.data());
  }

 private:
  using redo_rows = row_redoer<Arch, Rule>;

  // Only counts.
  worker(const dense_problem<float>& problem, const Rule& rule, const engine& e,
         typename redo_rows::memory redo_memory, scratch_carver memory) noexcept
      : c_(problem), rule_(rule), e_(e), redo_(problem, rule, redo_memory), head_(problem, e) {
    carve(memory);
    used_ = memory.used();
  }

  static typename redo_rows::memory carve_redo(const dense_problem<float>& problem,
                                               const Rule& rule, scratch_carver& memory) noexcept {
    return redo_rows::carve(problem, rule, memory);
  }

  void carve(scratch_carver& memory) noexcept {
    steps_ = head_.steps(), panels_ = head_.panels();
    head_.carve(memory);
    for (query_block& t : tiles_) {
      t.q = memory.take<std::uint16_t>(steps_ * e_.parts_q * part_size);
      t.o = memory.take<float>(panels_ * sums_size);
      if (c_.n_kv > bank_keys(e_)) t.banked = memory.take<float>(panels_ * sums_size);
      for (float** lanes : {&t.negm, &t.l, &t.l_before, &t.l_lost, &t.factor})
        *lanes = memory.take<float>(tile_rows);
    }
    for (float*& s : scores_) s = memory.take<float>(sums_size);
    block_scores_ = memory.take<float>(block_chunks * sums_size);
    idle_scores_ = memory.take<float>(sums_size);
    idle_lanes_ = memory.take<float>(2 * tile_rows);
    weights_ = memory.take<std::uint16_t>(block_chunks * e_.parts_p * part_size);
    if (has_bias) {
      for (float*& bias : bias_) bias = memory.take<float>(key_block * tile_rows);
      staging_ = memory.take<float>(tile_rows * bias_tile<float>::staging_stride);
    }
    rows_ = memory.take<float>(tile_rows * std::max(c_.d_qk, c_.d_v));
  }

  void enter_head(index_t b, index_t h) noexcept {
    if (b == b_ && h == h_) return;
    if (b != b_ || c_.kv_head(h) != c_.kv_head(h_)) {
      head_.enter(c_.k(b, c_.kv_head(h)), c_.v(b, c_.kv_head(h)));
    }
    b_ = b, h_ = h;
    q_ = c_.q(b, h);
    out_ = c_.out(b, h);
  }

  query_block& begin(int i, index_t row0, index_t n) noexcept {
    query_block& t = tiles_[static_cast<std::size_t>(i)];
    t.first_row = row0, t.n_rows = n;
    t.redo = t.patch = t.waiting = 0;
    // 1. Queries, scaled so that scores come in units of ln 2.
    const float factor = e_.scale_late ? 1.0f : c_.scale * log2e;
    e_.pack_queries(read_rows<Arch>(q_, row0, n, c_.d_qk, factor, rows_, t.redo), t.q);
    // 2. Ranges of keys. Padding lanes see what there is, so that they never mask a chunk.
    t.any = {c_.n_kv, 0};
    t.all = {0, c_.n_kv};
    for (index_t r = 0; r < tile_rows; ++r) {
      key_range keys{0, c_.n_kv};
      if (r < n) keys = rule_.keys(b_, h_, row0 + r, c_.n_kv);
      keys.begin = std::max<index_t>(keys.begin, 0);
      keys.end = std::min(keys.end, c_.n_kv);
      if (keys.begin >= keys.end) keys = {0, 0};
      t.lane[static_cast<std::size_t>(r)] = keys;
      t.all = {std::max(t.all.begin, keys.begin), std::min(t.all.end, keys.end)};
      if (r >= n || keys.end == 0) continue;
      t.any = {std::min(t.any.begin, keys.begin), std::max(t.any.end, keys.end)};
      t.waiting |= 1u << r;
    }
    // 3. Empty state.
    std::fill_n(t.o, panels_ * sums_size, 0.0f);
    for (float* lanes : {t.negm, t.l, t.l_before, t.l_lost}) std::fill_n(lanes, tile_rows, 0.0f);
    t.has_banked = false;
    return t;
  }

  // Scores of a chunk in the pipeline, and what they belong to.
  struct chunk_in_flight {
    waiting_scores scores;
    query_block* tile;    // null: nothing
    index_t first, last;  // chunks of its block
    bool ends_block;
  };
  [[nodiscard]] chunk_in_flight idle() const noexcept {
    return {
        {idle_scores_, weights_, idle_lanes_, idle_lanes_ + tile_rows, 1}, nullptr, 0, 0, false};
  }

  void flush() noexcept {
    store_pending(pending_);
    pending_ = idle_scores_ + late_sums;
  }

  // What the rule adds to a block of scores; false if it forbids them all.
  struct block_rule {
    const float* bias = nullptr;
    index_t n_keys = 0;
  };
  [[nodiscard]] bool apply_rule(const query_block& t, index_t k0, float* bias,
                                block_rule& rule) noexcept {
    if constexpr (has_bias) {
      const index_t n = std::min(k0 + block_keys, t.any.end) - k0;
      bias_tile<float> pairs{bias, staging_, tile_rows, b_, h_, t.first_row, t.n_rows, k0, n};
      const tile_effect effect = add_bias<Arch>(rule_, pairs);
      if (effect == tile_effect::none) return false;
      if (effect == tile_effect::some) rule = {bias, n};
    }
    return true;
  }

  // Tile t meets the block at k0.
  void fold(query_block& t, index_t k0) noexcept {
    if (t.any.begin >= k0 + block_keys || t.any.end <= k0) return;
    block_rule rule;
    bias_turn_ ^= 1;
    if (!apply_rule(t, k0, bias_[bias_turn_], rule)) return;
    const index_t first = std::max(k0, t.any.begin) / chunk_keys;
    const index_t last = (std::min(k0 + block_keys, t.any.end) + chunk_keys - 1) / chunk_keys;
    for (index_t chunk = first; chunk < last; ++chunk) {
      head_.pack(chunk, seen_end_);
      turn_ ^= 1;
      float* s = scores_[turn_];
      multiply_scores(t, chunk, s, chunk_.scores);
      finish_chunk();
      const float scale = settle(t, chunk, s, rule);
      if (t.waiting != 0) {
        flush();
        take_first_maximum<Arch>(s, scale, t);
      }
      chunk_ = {{s, weights_at(chunk), t.negm, t.l, scale}, &t, first, last, chunk + 1 == last};
    }
  }
  [[nodiscard]] std::uint16_t* weights_at(index_t chunk) const noexcept {
    return weights_ + chunk % block_chunks * e_.parts_p * part_size;
  }

  void multiply_scores(const query_block& t, index_t chunk, float* s,
                       const waiting_scores& other) noexcept {
    e_.scores({t.q, head_.keys(chunk), steps_, s, pending_, other,
               prefetch_address(&t - tiles_.data(), chunk)});
    pending_ = s + late_sums;
  }

  // What comes next into L2, a 32nd per chunk of a tile: K and V of the next block or, in the last
  // block, the queries of the next item and the place of the output. A prefetch of an address that
  // is nobody's does nothing.
  [[nodiscard]] const char* prefetch_address(index_t tile, index_t chunk) const noexcept {
    const index_t next = (chunk / block_chunks + 1) * block_chunks;
    using head = packed_head<Arch>;
    const typename head::places next_places =
        next * chunk_keys < seen_end_
            ? head_.block_places(next)
            : typename head::places{
                  head::address(q_.direct, 4 * (tiles_[0].first_row + item_rows) * q_.row_stride),
                  head::address(out_.direct, 4 * tiles_[0].first_row * out_.row_stride),
                  4 * item_rows * c_.d_qk};
    const index_t at = (tile * block_chunks + chunk % block_chunks) * prefetched_bytes(steps_);
    const auto [first, second, first_bytes] = next_places;
    const std::uintptr_t place = at < first_bytes ? first : second;
    return reinterpret_cast<const char*>(
        place + static_cast<std::uintptr_t>(at < first_bytes ? at : at - first_bytes));
  }

  // Softcap, rule and the like on a chunk of scores, if there is anything; returns the factor that
  // they still need.
  [[nodiscard]] float settle(query_block& t, index_t chunk, float* s,
                             const block_rule& rule) noexcept {
    const index_t k0 = chunk * chunk_keys, in_block = k0 % block_keys;
    score_changes x;
    x.scale = e_.scale_late ? c_.scale * log2e : 1.0f;
    x.softcap = c_.softcap;
    x.masked = t.all.begin > k0 || t.all.end < k0 + chunk_keys;
    x.unsplittable = head_.unsplittable(chunk);
    x.holes = head_.holes(chunk);
    if (rule.bias != nullptr) {
      x.bias = rule.bias + in_block * tile_rows;
      x.n_bias = rule.n_keys - in_block;
    }
    if (x.softcap == 0 && !x.masked && (x.unsplittable | x.holes) == 0 && x.bias == nullptr)
      return x.scale;
    flush();
    change_scores<Arch>(s, k0, t, x);
    return 1;
  }

  // The chunk in flight has got its softmax: if it ends a block, the values of that are due.
  void finish_chunk() noexcept {
    if (chunk_.tile == nullptr || !chunk_.ends_block) return;
    query_block& t = *chunk_.tile;
    if (!sums_in_range(t)) [[unlikely]]
      rescore(t);
    pending_ =
        e_.values({weights_at(chunk_.first), head_.values(chunk_.first), chunk_.last - chunk_.first,
                   panels_, head_.panel_stride(), t.o, pending_});
    add_sums(t);
    const index_t end = (chunk_.first / block_chunks + 1) * block_keys;
    if (end % bank_keys(e_) == 0 && end < c_.n_kv) bank(t);
  }

  // l of the block to l of all, with what earlier additions lost (Kahan).
  static void add_sums(query_block& t) noexcept {
    for (index_t r = 0; r < tile_rows; ++r) {
      const float before = t.l_before[r], more = t.l[r] - t.l_lost[r];
      t.l_before[r] = before + more;
      t.l_lost[r] = (t.l_before[r] - before) - more;
      t.l[r] = 0;
    }
  }

  void bank(query_block& t) noexcept {
    flush();
    if (t.has_banked)
      add_banked(t.o, t.banked);
    else
      std::swap(t.o, t.banked);
    t.has_banked = true;
    std::fill_n(t.o, panels_ * sums_size, 0.0f);
  }
  void add_banked(const float* o, float* banked) const noexcept {
    for (index_t x = 0; x < panels_ * sums_size; ++x) banked[x] += o[x];
  }

  // Whether no row has to be done again. One that was NaN before stays as it is.
  [[nodiscard]] static bool in_range(const query_block& t, index_t r) noexcept {
    return t.l_before[r] + t.l[r] <= largest_sum || t.l_before[r] != t.l_before[r];
  }
  [[nodiscard]] static bool sums_in_range(const query_block& t) noexcept {
    bool good = true;
    for (index_t r = 0; r < t.n_rows; ++r) good &= in_range(t, r);
    return good;
  }

  // The block in flight once more, with the true maximum for those rows that left the range. The
  // others get the same bits again.
  void rescore(query_block& t) noexcept {
    flush();
    // 1. Scores, and their maximum.
    const index_t k0 = chunk_.first / block_chunks * block_keys;
    block_rule rule;
    (void)apply_rule(t, k0, bias_[bias_turn_ ^ 1], rule);
    std::array<float, block_chunks> scale{};
    alignas(64) std::array<float, tile_rows> top;
    top.fill(-infinity);
    for (index_t chunk = chunk_.first; chunk < chunk_.last; ++chunk) {
      const index_t i = chunk % block_chunks;
      float* s = block_scores_ + i * sums_size;
      multiply_scores(t, chunk, s, idle().scores);
      flush();
      const float f = scale[static_cast<std::size_t>(i)] = settle(t, chunk, s, rule);
      for (index_t key = 0; key < chunk_keys; ++key) {
        for (std::size_t r = 0; r < tile_rows; ++r) {
          top[r] = std::max(top[r], s[key * tile_rows + static_cast<index_t>(r)] * f);
        }
      }
    }
    // 2. What came before in terms of the new maximum.
    for (index_t r = 0; r < t.n_rows; ++r) {
      const float before = t.l_before[r];
      const bool keep = in_range(t, r);
      t.l[r] = 0;
      if (keep) continue;
      float m = top[static_cast<std::size_t>(r)];
      if (before != 0) m = std::max(m, -t.negm[r]);
      const float factor = before == 0 ? 0.0f : std::exp2(-t.negm[r] - m);
      t.negm[r] = -m;
      t.l_before[r] *= factor;
      t.l_lost[r] *= factor;
      for (index_t c = 0; c < panels_ * step_dims; ++c) {
        t.o[c * tile_rows + r] *= factor;
        if (t.has_banked) t.banked[c * tile_rows + r] *= factor;
      }
    }
    // 3. Weights.
    for (index_t chunk = chunk_.first; chunk < chunk_.last; ++chunk) {
      const index_t i = chunk % block_chunks;
      e_.weights({block_scores_ + i * sums_size, weights_at(chunk), t.negm, t.l,
                  scale[static_cast<std::size_t>(i)]});
    }
  }

  // 1/l and the lse, after the sink has joined maximum and denominator; 0 and −inf for a row
  // without keys.
  void finish(query_block& t) noexcept {
    if (t.has_banked) add_banked(t.banked, t.o);
    std::fill_n(t.factor, tile_rows, 0.0f);
    const float sink = c_.sinks.empty() ? -infinity : c_.sinks[static_cast<std::size_t>(h_)];
    for (index_t r = 0; r < t.n_rows; ++r) {
      const float l = t.l_before[r], m = -t.negm[r] * ln2;
      const bool empty = l == 0;
      float top = m, scale = 1, total = l;
      if (sink != -infinity) {
        if (empty || sink > m) top = sink;
        scale = empty ? 0.0f : std::exp(m - top);
        total = l * scale + std::exp(sink - top);
      }
      if (!empty) t.factor[r] = scale / total;
      if (c_.lse.data_handle() != nullptr && (t.redo >> r & 1) == 0) {
        c_.lse(b_, h_, t.first_row + r, 0) = total == 0 ? -infinity : top + std::log(total);
      }
    }
    if (out_.direct != nullptr) {
      write_rows<Arch>(t.o, t.factor, t.n_rows, c_.d_v, out_.direct + t.first_row * out_.row_stride,
                       out_.row_stride);
    } else {
      write_rows<Arch>(t.o, t.factor, t.n_rows, c_.d_v, rows_, c_.d_v);
      out_.write(rows_, c_.d_v, t.first_row, t.n_rows, c_.d_v);
    }
  }

  const dense_problem<float>& c_;
  const Rule& rule_;
  const engine& e_;
  redo_rows redo_;
  index_t b_ = -1, h_ = -1;
  packed_head<Arch> head_;
  row_source<float> q_{};
  row_sink<float> out_{};
  index_t steps_ = 0, panels_ = 0;
  index_t seen_end_ = 0;  // no row of the item sees a key past it
  std::array<query_block, tiles_per_item> tiles_{};
  float *scores_[2] = {}, *bias_[2] = {};
  int turn_ = 0, bias_turn_ = 0;
  float *block_scores_ = nullptr, *idle_scores_ = nullptr, *idle_lanes_ = nullptr;
  std::uint16_t* weights_ = nullptr;
  float *rows_ = nullptr, *staging_ = nullptr;
  float* pending_ = nullptr;  // where sums 2 have to go
  chunk_in_flight chunk_{};
  std::size_t used_ = 0;
};

}  // namespace attn::detail::amx

#endif  // ATTN_HAS_AMX
