// SPDX-License-Identifier: MIT
//
// The fold of a block of keys into a tile of queries, which every kernel is made of.
//
// Softmax without a running maximum. A lane takes as m the largest score of the first group of MR
// keys in which it may attend to any (the anchor), and keeps it: sums of exp(s − m) are exact
// enough for any m that is not far below the true maximum. After each block a lane whose l has
// passed 2^32, or is no number, is redone with the true maximum of the block (rescore). That saves
// the maximum, the rescaling of O and a pass over the scores: 87% instead of 77% of the peak.
//
// A lane's bits depend on its own row alone: groups and blocks of keys are aligned to absolute key
// positions, a key that is skipped adds exactly nothing, and anchor and rescore change only the
// lanes that need them.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include <attn/detail/query_tile.hpp>

namespace attn::detail {

/// Where l leaves the range in which m serves as the maximum.
template <class T>
inline constexpr T largest_sum = T(4294967296.0);  // 2^32

/// Lanes with an m beyond it are always redone. A product that starts from −m leaves what rounding
/// takes from a score of that size, up to |m| eps / 2, and exp makes it a factor: equal keys in
/// different groups would get weights that differ by more than 0.1%.
template <class T>
inline constexpr T largest_shift = T(std::int64_t{1} << (std::numeric_limits<T>::digits - 10));

template <class T, class Arch, int NR, bool HasBias, class Ahead = lookahead>
class tile_fold {
  using B = simd::batch<T, Arch>;
  using size = tile_size<T, Arch>;
  static constexpr int W = size::width, MR = size::keys, QS = NR * W;
  static constexpr T infinity = std::numeric_limits<T>::infinity();

 public:
  /// `ahead`: what to prefetch meanwhile, or null.
  tile_fold(query_tile<T>& tile, const key_value_block<T>& block, const tile_scratch<T>& scratch,
            index_t d_qk, index_t d_v, Ahead* ahead = nullptr) noexcept
      : t_(tile), b_(block), w_(scratch), ahead_(ahead), bias_(scratch.bias), d_qk_(d_qk),
        d_v_(d_v) {}

  /// Folds the keys of `runs` into the tile.
  void fold(const key_run* runs, int n_runs) noexcept {
    fold(runs, n_runs, [&] { return w_.bias; });
  }

  /// The same where `bias_again()` says where the bias is, in case its first place was p.
  template <class BiasAgain>
  __attribute__((noinline)) void fold(const key_run* runs, int n_runs,
                                      const BiasAgain& bias_again) noexcept {
    save_sums();
    for (int r = 0; r < n_runs; ++r) weigh(runs[r]);
    if (const bool ok = sums_in_range(); !ok) [[unlikely]] {
      if constexpr (HasBias) bias_ = bias_again();
      all_scores(runs, n_runs);
      rescore(false);
    }
    add_sums();
    accumulate_values(runs, n_runs);
  }

  /// The same where scores pass through `map(s)` first, s: [n_keys][QS], forbidden keys become
  /// −inf: each lane with its true running maximum.
  template <class Map>
  void fold_mapped(const Map& map) noexcept {
    save_sums();
    qk_operands<T> a = operands({0, b_.n_keys, 0, NR, true});
    a.p = w_.s;
    alignas(64) T zero[QS] = {};
    tiles::qk_scores<T, Arch, NR>(a, zero);
    map(w_.s);
    rescore(true);
    add_sums();
    const key_run all{0, b_.n_keys, 0, NR, true};
    accumulate_values(&all, 1);
  }

 private:
  [[nodiscard]] qk_operands<T> operands(const key_run& run) const noexcept {
    const index_t row = run.first * QS + run.v0 * W, lane = run.v0 * W;
    qk_operands<T> a{};
    a.qt = t_.qt + lane;
    a.k = b_.k + run.first * b_.ldk;
    a.ldk = b_.ldk;
    a.d = d_qk_;
    a.n_keys = run.last - run.first;
    a.first_key = run.first;
    a.negm = t_.negm + lane;
    a.l = t_.l + lane;
    a.p = w_.p + row;
    a.lo = t_.lo + lane;
    a.hi = t_.hi + lane;
    if constexpr (HasBias) a.bias = bias_ + row;
    a.k_padded = w_.k_padded;
    return a;
  }

  void save_sums() noexcept {
    for (int j = 0; j < QS; j += W) {
      simd::load<T, Arch>(t_.l + j).store_aligned(t_.l_before + j);
      B(T(0)).store_aligned(t_.l + j);
    }
  }

  // l of the block to l of all, with what earlier additions lost (Kahan): a chain of many equal
  // sums rounds the same way each time.
  void add_sums() noexcept {
    for (int j = 0; j < QS; j += W) {
      const B before = simd::load<T, Arch>(t_.l_before + j);
      const B more = simd::load<T, Arch>(t_.l + j) - simd::load<T, Arch>(t_.l_lost + j);
      const B l = before + more;
      l.store_aligned(t_.l + j);
      ((l - before) - more).store_aligned(t_.l_lost + j);
    }
  }

  // Weights of a run into P, sums into l.
  void weigh(key_run run) noexcept {
    while (t_.any_waiting && run.first < run.last) {
      anchor(run);
      run.first += MR;
    }
    if (run.first >= run.last) return;
    const qk_operands<T> a = operands(run);
    on_vectors(run.v1 - run.v0, [&]<int N>() {
      if (!run.masked)
        tiles::qk_softmax<T, Arch, N, QS, masking::none>(a, ahead_);
      else if constexpr (HasBias)
        tiles::qk_softmax<T, Arch, N, QS, masking::bias>(a, ahead_);
      else
        tiles::qk_softmax<T, Arch, N, QS, masking::range>(a, ahead_);
    });
  }

  // Keys [first, first + MR) of a run while some lane waits for its first key: a waiting lane that
  // sees one of them takes its m. For the others it is qk_softmax_tile to the bit.
  __attribute__((noinline)) void anchor(const key_run& run) noexcept {
    qk_operands<T> a = operands({run.first, std::min(run.last, run.first + MR), 0, NR, run.masked});
    a.p = w_.s + run.first * QS;
    tiles::qk_scores<T, Arch, NR>(a, t_.negm);

    B still_waiting(T(0));
    for (int v = 0; v < NR; ++v) {
      const int j = v * W;
      B wait = simd::load<T, Arch>(t_.waiting + j);
      if (v >= run.v0 && v < run.v1) {
        // 1. Masks; the group's maximum per lane.
        B x[MR];
        B allowed[MR];  // 0 or −inf
        B m(-infinity);
        for (int r = 0; r < MR; ++r) {
          x[r] = simd::load<T, Arch>(w_.s + (run.first + r) * QS + j);
          allowed[r] = run.masked ? permission(run.first + r, j) : B(T(0));
          if constexpr (HasBias) {
            if (run.masked) x[r] = x[r] + bias(run.first + r, j);
          }
          m = xsimd::max(m, xsimd::select(allowed[r] == B(T(0)), x[r], B(-infinity)));
        }
        // 2. Waiting lanes that saw a key take m; the others subtracted theirs in the product.
        const auto takes = (wait == B(T(1))) & (m > B(-infinity));
        const B shift = xsimd::select(takes, m, B(T(0)));
        wait = xsimd::select(takes, B(T(0)), wait);
        const B negm = simd::load<T, Arch>(t_.negm + j) - shift;
        negm.store_aligned(t_.negm + j);
        wait.store_aligned(t_.waiting + j);
        // 3. Weights and sums, in the order of qk_softmax_tile.
        B sum[2];
        for (int r = 0; r < MR; ++r) {
          const B e =
              xsimd::select(allowed[r] == B(T(0)), simd::exp<T, Arch>(x[r] - shift), B(T(-0.0)));
          e.store_aligned(w_.p + (run.first + r) * QS + j);
          sum[r & 1] = r < 2 ? e : sum[r & 1] + e;
        }
        (simd::load<T, Arch>(t_.l + j) + (sum[0] + sum[1])).store_aligned(t_.l + j);
      }
      still_waiting = still_waiting + wait;
    }
    t_.any_waiting = !xsimd::all(still_waiting == B(T(0)));
  }

  // 0 where the lanes of vector j may see the key, −inf where not.
  [[nodiscard]] B permission(index_t key, int j) const noexcept {
    if constexpr (HasBias) {
      return xsimd::select(bias(key, j) == B(-infinity), B(-infinity), B(T(0)));
    } else {
      const B at(static_cast<T>(key));
      const auto allowed =
          (simd::load<T, Arch>(t_.lo + j) <= at) & (at < simd::load<T, Arch>(t_.hi + j));
      return xsimd::select(allowed, B(T(0)), B(-infinity));
    }
  }
  [[nodiscard]] B bias(index_t key, int j) const noexcept {
    return simd::load<T, Arch>(bias_ + key * QS + j);
  }

  // Whether no lane has to be redone. One that was NaN before stays as it is.
  [[nodiscard]] bool sums_in_range() const noexcept {
    for (int j = 0; j < QS; j += W) {
      if (!xsimd::all(in_range(j))) return false;
    }
    return true;
  }
  [[nodiscard]] auto in_range(int j) const noexcept {
    const B before = simd::load<T, Arch>(t_.l_before + j);
    const B l = before + simd::load<T, Arch>(t_.l + j);
    const B shift = xsimd::abs(simd::load<T, Arch>(t_.negm + j));
    return ((l <= B(largest_sum<T>)) & (shift <= B(largest_shift<T>))) | simd::is_nan(before);
  }

  // Scores of all runs into S, −inf where forbidden or in no run.
  __attribute__((noinline)) void all_scores(const key_run* runs, int n_runs) noexcept {
    alignas(64) const T zero[QS] = {};
    if (n_runs != 1 || runs[0].last - runs[0].first != b_.n_keys || runs[0].v1 - runs[0].v0 != NR) {
      std::fill_n(w_.s, b_.n_keys * QS, -infinity);
    }
    for (int r = 0; r < n_runs; ++r) {
      const key_run& run = runs[r];
      qk_operands<T> a = operands({run.first, run.last, 0, NR, run.masked});
      a.p = w_.s + run.first * QS;
      tiles::qk_scores<T, Arch, NR>(a, zero);
      // Keys that only fill up the last group have a score of 0.
      const index_t filled = (run.last - run.first + MR - 1) / MR * MR + run.first;
      std::fill(w_.s + run.last * QS, w_.s + filled * QS, -infinity);
      const bool as_they_are = !run.masked && run.v1 - run.v0 == NR;
      for (index_t key = run.first; key < run.last && !as_they_are; ++key) {
        for (int v = 0; v < NR; ++v) {
          const int j = v * W;
          T* s = w_.s + key * QS + j;
          if (v < run.v0 || v >= run.v1) {
            B(-infinity).store_aligned(s);
          } else if (run.masked) {
            B x = simd::load<T, Arch>(s);
            if constexpr (HasBias) x = x + bias(key, j);
            xsimd::select(permission(key, j) == B(T(0)), x, B(-infinity)).store_aligned(s);
          }
        }
      }
    }
  }

  // Weights of the lanes that left the range (or of `every` lane) from the scores in S, with the
  // true running maximum.
  __attribute__((noinline)) void rescore(bool every) noexcept {
    const index_t n = b_.n_keys;
    for (int j = 0; j < QS; j += W) {
      // 1. m: of the block, and of what came before if there was any.
      B m(-infinity);
      for (index_t key = 0; key < n; ++key)
        m = xsimd::max(m, simd::load<T, Arch>(w_.s + key * QS + j));
      const B l_before = simd::load<T, Arch>(t_.l_before + j);
      const B m_before = -simd::load<T, Arch>(t_.negm + j);
      const auto fresh = l_before == B(T(0));
      m = xsimd::select(fresh, m, xsimd::max(m, m_before));
      m = xsimd::select(m == B(-infinity), B(T(0)), m);
      // 2. Weights and their sum.
      const auto keep = every ? B(T(0)) == B(T(1)) : in_range(j);
      B sum(T(0));
      for (index_t key = 0; key < n; ++key) {
        const B x = simd::load<T, Arch>(w_.s + key * QS + j);
        T* p = w_.p + key * QS + j;
        const B e = xsimd::select(x == B(-infinity), B(T(-0.0)), simd::exp<T, Arch>(x - m));
        sum = sum + e;
        xsimd::select(keep, simd::load<T, Arch>(p), e).store_aligned(p);
      }
      // 3. What came before in terms of the new m.
      const B scale = xsimd::select(fresh, B(T(0)), simd::exp<T, Arch>(m_before - m));
      const B l_lost = simd::load<T, Arch>(t_.l_lost + j);
      xsimd::select(keep, simd::load<T, Arch>(t_.l + j), sum).store_aligned(t_.l + j);
      xsimd::select(keep, l_before, l_before * scale).store_aligned(t_.l_before + j);
      xsimd::select(keep, l_lost, l_lost * scale).store_aligned(t_.l_lost + j);
      xsimd::select(keep, -m_before, -m).store_aligned(t_.negm + j);
      const auto unchanged = keep | (m == m_before) | fresh;
      if (!xsimd::all(unchanged)) {
        const B factor = xsimd::select(unchanged, B(T(1)), scale);
        if (t_.has_output) multiply_output(t_.ot + j, factor);
        if (t_.has_banked) multiply_output(t_.banked + j, factor);
      }
    }
  }

  void multiply_output(T* o, const B& factor) const noexcept {
    for (index_t c = 0; c < d_v_; ++c, o += QS) {
      (simd::load<T, Arch>(o) * factor).store_aligned(o);
    }
  }

  // OT += V^T P, value_chain keys at a time. Chains begin at fixed keys of the block, however it is
  // cut into runs: one that several runs share is summed apart.
  __attribute__((noinline)) void accumulate_values(const key_run* runs, int n_runs) noexcept {
    for (index_t first = 0; first < b_.n_keys; first += tiles::value_chain) {
      // 1. The runs within the chain; neighbours for the same vectors are one.
      std::array<key_run, tiles::value_chain / MR> parts;
      std::size_t n = 0;
      for (int r = 0; r < n_runs; ++r) {
        key_run run = runs[r];
        run.first = std::max(run.first, first);
        run.last = std::min<index_t>(run.last, first + tiles::value_chain);
        if (run.first >= run.last) continue;
        key_run* before = n > 0 ? &parts[n - 1] : nullptr;
        if (before != nullptr && before->last == run.first && before->v0 == run.v0 &&
            before->v1 == run.v1)
          before->last = run.last, before->masked |= run.masked;
        else
          parts[n++] = run;
      }
      if (n == 0) continue;
      // 2. One for the whole tile goes straight to OT.
      const bool to_all = parts[0].v0 == 0 && parts[0].v1 == NR;
      if (n == 1 && to_all) {
        multiply_values(parts[0], t_.ot,
                        t_.has_output ? tiles::sums_are::added : tiles::sums_are::stored);
        t_.has_output = true;
        continue;
      }
      // 3. Several, or for a part of it: into OT if that is empty, else by way of `chain`.
      T* sum = t_.has_output ? w_.chain : t_.ot;
      if (!to_all) std::fill_n(sum, d_v_ * QS, T(0));
      int v0 = NR;
      for (std::size_t r = 0; r < n; ++r) {
        multiply_values(parts[r], sum,
                        r == 0 && to_all ? tiles::sums_are::stored : tiles::sums_are::continued);
        v0 = std::min(v0, parts[r].v0);
      }
      if (t_.has_output) add_chain(v0);
      t_.has_output = true;
    }
  }

  // OT += chain, vectors from v0 on.
  void add_chain(int v0) noexcept {
    T* ot = t_.ot;
    const T* chain = w_.chain;
    for (index_t c = 0; c < d_v_; ++c, ot += QS, chain += QS) {
      for (int j = v0 * W; j < QS; j += W) {
        (simd::load<T, Arch>(ot + j) + simd::load<T, Arch>(chain + j)).store_aligned(ot + j);
      }
    }
  }

  void multiply_values(const key_run& run, T* ot, tiles::sums_are sums) noexcept {
    const tiles::pv_operands<T> a{w_.p + run.first * QS + run.v0 * W,
                                  b_.v + run.first * b_.ldv,
                                  b_.ldv,
                                  run.last - run.first,
                                  d_v_,
                                  ot + run.v0 * W,
                                  sums};
    if (run.masked && !b_.v_finite) return tiles::pv_selective<T, Arch, QS>(a, run.v1 - run.v0);
    on_vectors(run.v1 - run.v0, [&]<int N>() { tiles::pv<T, Arch, N, QS>(a); });
  }

  template <class F>
  static void on_vectors(int n, const F& f) noexcept {
    if (n == NR) return f.template operator()<NR>();
    // With a bias tile runs always span the tile.
    if constexpr (NR > 2 && !HasBias) {
      if (n == 2) return f.template operator()<2>();
    }
    if constexpr (NR > 1 && !HasBias) return f.template operator()<1>();
  }

  query_tile<T>& t_;
  const key_value_block<T>& b_;
  const tile_scratch<T>& w_;
  Ahead* ahead_;
  const T* bias_;
  index_t d_qk_, d_v_;
};

}  // namespace attn::detail
