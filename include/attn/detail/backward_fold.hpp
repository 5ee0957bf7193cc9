// SPDX-License-Identifier: MIT
//
// What a run of keys means to a tile of queries in the backward pass: the five products.
#pragma once

#include <algorithm>

#include <attn/detail/backward_products.hpp>
#include <attn/detail/backward_tile.hpp>

namespace attn::detail {

/// A block of keys and values and the sums of their gradients.
template <class T>
struct backward_block {
  const T* k;
  index_t ldk;
  const T* v;
  index_t ldv;
  T* d_k;         // [n_keys][ld_qk]
  T* d_v;         // [n_keys][ld_v]
  bool k_finite;  // only looked at where runs are masked
};

/// Scratch that the tiles of a thread share. A block is [key_block + MR][QS].
template <class T>
struct backward_scratch {
  T* p;
  T* g;
  T* slope;   // null where scores reach the softmax as they are but for numbers added
  T* bias;    // null without a bias rule
  T* padded;  // [MR][max(d_qk, d_v)]
};

/// Which gradients a walk over keys adds to.
struct backward_wants {
  bool d_q, d_kv;
};

/// The products of a tile and a block.
template <class T, class Arch>
class backward_fold {
  static constexpr int W = tile_size<T, Arch>::width, QS = tile_size<T, Arch>::max_rows;

 public:
  backward_fold(backward_tile<T, Arch>& tile, backward_block<T>& block,
                const backward_scratch<T>& scratch, index_t d_qk, index_t d_v,
                backward_wants wants) noexcept
      : t_(tile), b_(block), w_(scratch), d_qk_(d_qk), d_v_(d_v), wants_(wants) {}

  /// Weights from ranges of keys alone, or with a bias tile.
  template <masking M>
  void fold(const key_run& run) noexcept {
    on_vectors(run.v1 - run.v0, [&]<int N>() {
      const index_t lane = run.v0 * W, at = run.first * QS + lane;
      const tiles::lane_product<T> qk = scores_of(run, t_.neg_lse + lane);
      const tiles::lane_mask<T> mask{t_.lo + lane, t_.hi + lane, run.first,
                                     M == masking::bias ? w_.bias + at : nullptr};
      if (run.masked)
        tiles::weights<T, Arch, N, QS, M>(qk, mask, w_.p + at);
      else
        tiles::weights<T, Arch, N, QS, masking::none>(qk, mask, w_.p + at);
      accumulate<N>(run, nullptr);
    });
  }

  /// Weights from scores that pass through `map(run)` in w.p, all forbidden pairs to −0; it leaves
  /// d(mapped score)/d(score) in w.slope.
  template <class Map>
  void fold_mapped(const key_run& run, const Map& map) noexcept {
    alignas(64) T zero[QS] = {};
    on_vectors(run.v1 - run.v0, [&]<int N>() {
      tiles::scores<T, Arch, N, QS>(scores_of(run, zero), w_.p + run.first * QS);
      map(run);
      accumulate<N>(run, w_.slope + run.first * QS);
    });
  }

 private:
  [[nodiscard]] tiles::lane_product<T> scores_of(const key_run& run,
                                                 const T* start) const noexcept {
    return {
        t_.qt + run.v0 * W, b_.k + run.first * b_.ldk, b_.ldk, d_qk_, run.last - run.first, start,
        w_.padded};
  }

  // From weights to all gradients.
  template <int N>
  void accumulate(const key_run& run, const T* slope) noexcept {
    const index_t lane = run.v0 * W, at = run.first * QS + lane, n_keys = run.last - run.first;
    const T* p = w_.p + at;
    T* g = w_.g + at;
    // 1. G = P ∘ (dOT·V − D), times the slope of what came between score and softmax.
    const tiles::lane_product<T> dov{t_.dot + lane, b_.v + run.first * b_.ldv, b_.ldv,   d_v_,
                                     n_keys,        t_.neg_d + lane,           w_.padded};
    if (run.masked)
      tiles::score_gradients<T, Arch, N, QS, true>(dov, p, slope, g);
    else
      tiles::score_gradients<T, Arch, N, QS, false>(dov, p, nullptr, g);
    // 2. dQT += K^T G
    if (wants_.d_q) {
      const bool whole = run.v0 == 0 && N == t_.ranges.n_vectors;
      if (!t_.has_d_q && !whole) std::fill_n(t_.dqt, d_qk_ * QS, T(0));
      const tiles::pv_operands<T> kg{g,
                                     b_.k + run.first * b_.ldk,
                                     b_.ldk,
                                     n_keys,
                                     d_qk_,
                                     t_.dqt + lane,
                                     !t_.has_d_q && whole ? tiles::sums_are::stored
                                                          : tiles::sums_are::continued};
      t_.has_d_q = true;
      if (run.masked && !b_.k_finite)
        tiles::pv_selective<T, Arch, QS>(kg, N);
      else
        tiles::pv<T, Arch, N, QS>(kg);
    }
    // 3. dV += P dO, dK += G Q
    if (wants_.d_kv) {
      const index_t ld_qk = round_up(d_qk_, W), ld_v = round_up(d_v_, W);
      const index_t n_rows = std::min<index_t>(N * W, t_.n_rows - lane);
      const tiles::column_product<T> dv{
          p, t_.d_out + lane * ld_v, ld_v, b_.d_v + run.first * ld_v, ld_v, n_keys, n_rows, ld_v};
      const tiles::column_product<T> dk{
          g, t_.q + lane * ld_qk, ld_qk, b_.d_k + run.first * ld_qk, ld_qk, n_keys, n_rows, ld_qk};
      if (run.masked && !t_.rows_finite) {
        tiles::columns_selective<T, Arch, QS>(dv);
        tiles::columns_selective<T, Arch, QS>(dk);
      } else {
        tiles::columns<T, Arch, QS>(dv);
        tiles::columns<T, Arch, QS>(dk);
      }
    }
  }

  template <class F>
  static void on_vectors(int n, const F& f) noexcept {
    if (n == 3) return f.template operator()<3>();
    if (n == 2) return f.template operator()<2>();
    f.template operator()<1>();
  }

  backward_tile<T, Arch>& t_;
  backward_block<T>& b_;
  const backward_scratch<T>& w_;
  index_t d_qk_, d_v_;
  backward_wants wants_;
};

}  // namespace attn::detail
