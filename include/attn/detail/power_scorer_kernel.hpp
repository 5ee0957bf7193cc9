// SPDX-License-Identifier: MIT
//
// Column sums of attention weights, from the lse, a tile of queries and a block of keys at a time.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>

#include <attn/context.hpp>
#include <attn/detail/backward_products.hpp>
#include <attn/detail/dense_attention_kernel.hpp>
#include <attn/detail/head_access.hpp>
#include <attn/detail/packing.hpp>
#include <attn/detail/score_bias.hpp>
#include <attn/detail/tile_ranges.hpp>
#include <attn/score_rule.hpp>
#include <attn/simd/fp_environment.hpp>
#include <attn/simd/math.hpp>
#include <attn/view.hpp>

namespace attn::detail {

template <class T>
struct power_problem {
  index_t n_batch, n_heads, n_heads_kv, n_heads_scores, n_q, n_kv, d_qk;
  T scale, softcap;
  bool without_diagonal;
  head_source<T> q, k;
  tensor_view<const T> lse;

  [[nodiscard]] index_t group() const noexcept { return n_heads / n_heads_scores; }
};

template <class T, class Arch, score_rule Rule>
class power_worker {
  using size = tile_size<T, Arch>;
  using B = simd::batch<T, Arch>;
  static constexpr int W = size::width, MR = size::keys, QS = size::max_rows;
  static constexpr bool has_bias = Rule::kind == rule_kind::bias;
  static constexpr T infinity = std::numeric_limits<T>::infinity();

 public:
  static constexpr index_t item_keys = 4 * key_block;

  power_worker(const power_problem<T>& problem, const Rule& rule, scratch_carver memory) noexcept
      : c_(problem), rule_(rule) {
    carve(memory);
  }
  [[nodiscard]] static std::size_t scratch_bytes(const power_problem<T>& problem,
                                                 const Rule& rule) noexcept {
    scratch_carver memory;
    power_worker counter(problem, rule, scratch_carver());
    counter.carve(memory);
    return memory.used();
  }

  /// Mean over the query heads of group g of Σ_i weight_ij, for keys [first, last): one item, so
  /// that a sum has one order.
  const double* run(index_t b, index_t g, index_t first, index_t last) noexcept {
    first_ = first;
    std::fill_n(sum_, last - first, 0.0);
    for (index_t h = g * c_.group(); h < (g + 1) * c_.group(); ++h) {
      b_ = b, h_ = h;
      const row_source<T> k = c_.k(b, h / (c_.n_heads / c_.n_heads_kv));
      for (index_t row = 0; row < c_.n_q; row += QS) {
        load_tile(row, first, last);
        for (index_t k0 = first; k0 < last; k0 += key_block) {
          fold(k, k0, std::min(k0 + key_block, last));
        }
      }
    }
    for (index_t j = 0; j < last - first; ++j) sum_[j] /= static_cast<double>(c_.group());
    return sum_;
  }

 private:
  void carve(scratch_carver& memory) noexcept {
    qt_ = memory.take<T>(c_.d_qk * QS);
    rows_ = memory.take<T>(QS * c_.d_qk);
    keys_ = memory.take<T>(key_block * c_.d_qk);
    padded_ = memory.take<T>(MR * c_.d_qk);
    p_ = memory.take<T>((key_block + MR) * QS);
    if (has_bias) {
      bias_ = memory.take<T>((key_block + MR) * QS);
      staging_ = memory.take<T>(QS * bias_tile<T>::staging_stride);
    }
    sum_ = memory.take<double>(item_keys);
  }

  // 1. Scaled and transposed queries, −lse, ranges of keys.
  void load_tile(index_t row, index_t first, index_t last) noexcept {
    row0_ = row;
    n_rows_ = std::min<index_t>(QS, c_.n_q - row);
    const int vectors = static_cast<int>((n_rows_ + W - 1) / W);
    ranges_.assign(rule_, b_, h_, row, n_rows_, vectors, c_.n_kv,
                   [&](index_t r) { return c_.lse(b_, h_, row + r, 0) == -infinity; });
    if (ranges_.any.begin >= last || ranges_.any.end <= first) return;  // fold() will see it too
    c_.q(b_, h_).read(row, n_rows_, c_.d_qk, rows_, c_.d_qk);
    transpose_in<T, Arch>(rows_, c_.d_qk, n_rows_, c_.d_qk, c_.scale, qt_, QS);
    neg_lse_.fill(T(0));
    for (index_t r = 0; r < n_rows_; ++r) {
      neg_lse_[static_cast<std::size_t>(r)] = -c_.lse(b_, h_, row + r, 0);
    }
  }

  // 2. Scores of keys [k0, k1) to weights, summed over the rows.
  void fold(const row_source<T>& k, index_t k0, index_t k1) noexcept {
    const key_range seen = ranges_.seen_of(k0, k1);
    if (seen.begin >= seen.end) return;
    bias_tile<T> pairs{bias_, staging_, QS, b_, h_, row0_, n_rows_, k0, seen.end};
    if constexpr (has_bias) {
      if (add_bias<Arch>(rule_, pairs) == tile_effect::none) return;
      ranges_.complete(pairs);
    }
    const index_t n = seen.end - seen.begin;
    k.read(k0 + seen.begin, n, c_.d_qk, keys_, c_.d_qk);
    alignas(64) const std::array<T, QS> zero{};
    const tiles::lane_product<T> qk{qt_, keys_, c_.d_qk, c_.d_qk, n, zero.data(), padded_};
    T* s = p_ + seen.begin * QS;
    switch (ranges_.n_vectors) {
    case 1:
      tiles::scores<T, Arch, 1, QS>(qk, s);
      break;
    case 2:
      tiles::scores<T, Arch, 2, QS>(qk, s);
      break;
    default:
      tiles::scores<T, Arch, 3, QS>(qk, s);
    }
    if (c_.softcap != T(0)) {
      const B cap(c_.softcap), inverse(T(1) / c_.softcap);
      for (index_t x = 0; x < n * QS; x += W) {
        (cap * simd::tanh<T, Arch>(simd::load<T, Arch>(s + x) * inverse)).store_aligned(s + x);
      }
    }
    if constexpr (Rule::kind == rule_kind::function) apply_rule(rule_, pairs, p_, c_.n_kv);
    add_weights(k0, seen);
  }

  void add_weights(index_t k0, key_range seen) noexcept {
    alignas(64) std::array<T, QS> lo, hi;
    ranges_.bounds(k0, lo.data(), hi.data());
    for (auto r = static_cast<std::size_t>(n_rows_); r < QS; ++r) lo[r] = hi[r] = T(0);
    const int lanes = ranges_.n_vectors * W;
    for (index_t key = seen.begin; key < seen.end; ++key) {
      const B at(static_cast<T>(key));
      // The lane of the query at the key's own position, or none.
      const index_t diagonal = k0 + key - row0_;
      const bool meets = c_.without_diagonal && diagonal >= 0 && diagonal < lanes;
      const B own(static_cast<T>(meets ? diagonal : -1));
      B sum(T(0));
      for (int lane = 0; lane < lanes; lane += W) {
        const auto l = static_cast<std::size_t>(lane);
        B x = simd::load<T, Arch>(p_ + key * QS + lane);
        B bias(T(0));
        if constexpr (has_bias) bias = simd::load<T, Arch>(bias_ + key * QS + lane);
        const B row = simd::iota<T, Arch>() + B(static_cast<T>(lane));
        // Not x != −inf: xsimd 8.1 says no to that where x is NaN.
        const auto left_out = (bias == B(-infinity)) | (x == B(-infinity)) | (row == own);
        const auto counts =
            (simd::load<T, Arch>(&lo[l]) <= at) & (at < simd::load<T, Arch>(&hi[l])) & !left_out;
        x = tiles::weight<T, Arch>(x + bias + simd::load<T, Arch>(&neg_lse_[l]));
        sum = sum + xsimd::select(counts, x, B(T(0)));
      }
      sum_[k0 - first_ + key] += static_cast<double>(simd::sum(sum));
    }
  }

  const power_problem<T>& c_;
  const Rule& rule_;
  index_t b_ = 0, h_ = 0, first_ = 0, row0_ = 0, n_rows_ = 0;
  tile_ranges<T, Arch> ranges_{};
  T *qt_ = nullptr, *rows_ = nullptr, *keys_ = nullptr, *padded_ = nullptr, *p_ = nullptr;
  T *bias_ = nullptr, *staging_ = nullptr;
  double* sum_ = nullptr;
  alignas(64) std::array<T, QS> neg_lse_;
};

template <class T, class Arch, score_rule Rule, class D>
void power_scores(const power_problem<T>& c, const Rule& rule, const tensor_view<D>& scores,
                  context& ctx) {
  using worker = power_worker<T, Arch, Rule>;
  const index_t per_head = (c.n_kv + worker::item_keys - 1) / worker::item_keys;
  ctx.run(c.n_batch * c.n_heads_scores * per_head, 1, worker::scratch_bytes(c, rule),
          [&](std::byte* scratch, work_queue& queue) noexcept {
            const simd::flush_subnormals mode;
            worker w(c, rule, scratch_carver(scratch));
            for (index_t item, last; queue.next(item, last);) {
              const index_t b = item / per_head / c.n_heads_scores;
              const index_t g = item / per_head % c.n_heads_scores;
              const index_t begin = item % per_head * worker::item_keys;
              const index_t end = std::min(begin + worker::item_keys, c.n_kv);
              const double* sums = w.run(b, g, begin, end);
              for (index_t j = begin; j < end; ++j) {
                scores(b, g, j, 0) = static_cast<D>(sums[j - begin]);
              }
            }
          });
}

}  // namespace attn::detail
