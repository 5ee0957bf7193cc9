// SPDX-License-Identifier: MIT
//
// Which keys a tile of queries may see, as far as ranges say, and the runs of a block that follow.
#pragma once

#include <algorithm>
#include <array>

#include <attn/detail/query_tile.hpp>
#include <attn/detail/score_bias.hpp>
#include <attn/detail/tile_products.hpp>
#include <attn/score_rule.hpp>

namespace attn::detail {

template <class T, class Arch>
struct tile_ranges {
  static constexpr int W = tile_size<T, Arch>::width, MR = tile_size<T, Arch>::keys;
  static constexpr int QS = tile_size<T, Arch>::max_rows;

  int n_vectors;
  key_range any;  // no row sees a key outside of it
  key_range all;  // every row sees the keys in it
  std::array<key_range, 3> vector_any, vector_all;
  std::array<key_range, static_cast<std::size_t>(QS)> lane;

  /// Runs of one block, at most one per group of keys.
  using run_list = std::array<key_run, key_block / MR>;

  /// Rows [row0, row0 + rows) as `vectors` vectors; rows for which `is_empty(r)` see nothing.
  /// Padding lanes see what there is, so that they never mask a block.
  template <score_rule Rule, class IsEmpty>
  void assign(const Rule& rule, index_t b, index_t h, index_t row0, index_t rows, int vectors,
              index_t n_kv, const IsEmpty& is_empty) noexcept {
    n_vectors = vectors;
    any = {n_kv, 0};
    all = {0, n_kv};
    for (int v = 0; v < vectors; ++v) {
      key_range v_any{n_kv, 0}, v_all{0, n_kv};
      for (int r = v * W; r < (v + 1) * W; ++r) {
        key_range keys{0, n_kv};
        if (r < rows) {
          keys = is_empty(r) ? key_range{0, 0} : rule.keys(b, h, row0 + r, n_kv);
          keys = {std::max<index_t>(keys.begin, 0), std::min(keys.end, n_kv)};
          if (keys.begin >= keys.end) keys = {0, 0};
          if (keys.begin < keys.end) v_any = hull(v_any, keys);
          v_all = {std::max(v_all.begin, keys.begin), std::min(v_all.end, keys.end)};
        }
        lane[static_cast<std::size_t>(r)] = keys;
      }
      vector_any[static_cast<std::size_t>(v)] = v_any;
      vector_all[static_cast<std::size_t>(v)] = v_all;
      any = hull(any, v_any);
      all = {std::max(all.begin, v_all.begin), std::min(all.end, v_all.end)};
    }
  }

  /// Keys of the block [k0, k1) that some row may see, from the start of the block; `begin` is a
  /// multiple of MR.
  [[nodiscard]] key_range seen_of(index_t k0, index_t k1) const noexcept {
    const index_t begin = std::max<index_t>(0, any.begin - k0) / MR * MR;
    return {begin, std::max(begin, std::min(k1, any.end) - k0)};
  }

  [[nodiscard]] bool all_see(index_t first, index_t last) const noexcept {
    return all.begin <= first && last <= all.end;
  }

  /// The groups of keys of the block [k0, k1) that some vector sees, and whether all lanes do;
  /// equal neighbours are one run.
  [[nodiscard]] int runs(index_t k0, index_t k1, run_list& list) const noexcept {
    const key_range seen = seen_of(k0, k1);
    if (all_see(k0 + seen.begin, k0 + seen.end)) {
      list[0] = {seen.begin, seen.end, 0, n_vectors, false};
      return seen.begin < seen.end ? 1 : 0;
    }
    int n = 0;
    for (index_t g = seen.begin; g < seen.end; g += MR) {
      const index_t end = std::min(g + MR, seen.end), first = k0 + g, last = k0 + end;
      key_run run{g, end, 0, n_vectors, false};
      const auto blind = [&](int v) {
        const key_range keys = vector_any[static_cast<std::size_t>(v)];
        return keys.begin >= last || keys.end <= first;
      };
      while (run.v0 < run.v1 && blind(run.v0)) ++run.v0;
      while (run.v1 > run.v0 && blind(run.v1 - 1)) --run.v1;
      if (run.v0 == run.v1) continue;
      for (int v = run.v0; v < run.v1; ++v) {
        const key_range keys = vector_all[static_cast<std::size_t>(v)];
        run.masked |= keys.begin > first || keys.end < last;
      }
      key_run* previous = n > 0 ? &list[static_cast<std::size_t>(n - 1)] : nullptr;
      if (previous != nullptr && previous->last == g && previous->v0 == run.v0 &&
          previous->v1 == run.v1 && previous->masked == run.masked)
        previous->last = end;
      else
        list[static_cast<std::size_t>(n++)] = run;
    }
    return n;
  }

  /// Ranges of the lanes from the start of the block at k0, as numbers that T holds exactly.
  void bounds(index_t k0, T* lo, T* hi) const noexcept {
    for (int r = 0; r < n_vectors * W; ++r) {
      const key_range keys = lane[static_cast<std::size_t>(r)];
      lo[r] = static_cast<T>(std::clamp<index_t>(keys.begin - k0, 0, key_block));
      hi[r] = static_cast<T>(std::clamp<index_t>(keys.end - k0, 0, key_block));
    }
  }

  /// Completes a bias tile: 0 where nothing was written, −inf outside the range of a lane and in
  /// the keys up to the next multiple of MR.
  void complete(bias_tile<T>& t) const noexcept {
    using B = simd::batch<T, Arch>;
    constexpr T infinity = std::numeric_limits<T>::infinity();
    if (!t.written) std::fill_n(t.value, t.n_keys * t.ld, T(0));
    t.written = true;
    std::fill_n(t.value + t.n_keys * t.ld, MR * t.ld, -infinity);
    if (all_see(t.j0, t.j0 + t.n_keys)) return;
    alignas(64) T lo[QS], hi[QS];
    bounds(t.j0, lo, hi);
    for (index_t key = 0; key < t.n_keys; ++key) {
      const B at(static_cast<T>(key));
      for (int r = 0; r < n_vectors * W; r += W) {
        const auto allowed =
            (simd::load<T, Arch>(lo + r) <= at) & (at < simd::load<T, Arch>(hi + r));
        T* x = t.value + key * t.ld + r;
        xsimd::select(allowed, simd::load<T, Arch>(x), B(-infinity)).store_aligned(x);
      }
    }
  }

 private:
  static key_range hull(key_range a, key_range b) noexcept {
    return {std::min(a.begin, b.begin), std::max(a.end, b.end)};
  }
};

}  // namespace attn::detail
