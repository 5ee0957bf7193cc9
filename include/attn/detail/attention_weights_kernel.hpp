// SPDX-License-Identifier: MIT
//
// The weights themselves, a tile of queries at a time, for those who want to look at them: unlike
// the kernels of attention this keeps the scores of a tile against all its keys.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <span>

#include <attn/context.hpp>
#include <attn/detail/dense_attention_kernel.hpp>
#include <attn/detail/packing.hpp>
#include <attn/detail/score_bias.hpp>
#include <attn/detail/tile_products.hpp>
#include <attn/score_rule.hpp>
#include <attn/simd/exp.hpp>
#include <attn/simd/fp_environment.hpp>
#include <attn/simd/math.hpp>

namespace attn::detail {

/// Queries and keys of a call behind its checks, storage types erased as in dense_problem.
template <class T>
struct weights_problem {
  index_t n_batch, n_heads, n_heads_kv, n_q, n_kv, d_qk;
  T scale, softcap;
  std::span<const float> sinks;
  head_source<T> q, k;

  [[nodiscard]] index_t kv_head(index_t h) const noexcept { return h / (n_heads / n_heads_kv); }
};

/// What became of one row: of its weights exp(s_j − m) / (z + sink) with z = Σ_j exp(s_j − m).
struct row_of_weights {
  index_t n_keys;     ///< keys the row may attend to
  double z;           ///< at least 1, 0 where there is no key, NaN where the row is
  double z_and_sink;  ///< z + exp(sink − m)
  double log_moment;  ///< Σ_j exp(s_j − m) (s_j − m), which gives the entropy
};

/// Rows [row0, row0 + n_rows) of (b, h) against keys [first_key, first_key + n_keys).
template <class T, class Arch>
struct tile_of_weights {
  static constexpr int rows = tile_size<T, Arch>::max_rows;

  index_t b, h, row0, n_rows, first_key, n_keys;
  T* e;        ///< [n_keys][rows] exp(s − m); +0 where forbidden, NaN in a NaN row
  bool* seen;  ///< [n_keys] whether some row may attend to the key
  alignas(64) std::array<T, rows> factor;  ///< weight = factor · e, for every row
  std::array<row_of_weights, rows> row;
};

template <class T, class Arch, score_rule Rule>
class weights_worker {
  using size = tile_size<T, Arch>;
  using B = simd::batch<T, Arch>;
  static constexpr int W = size::width, MR = size::keys, NR = size::max_vectors;
  static constexpr T infinity = std::numeric_limits<T>::infinity();

 public:
  static constexpr int QS = size::max_rows;  // rows per tile

  weights_worker(const weights_problem<T>& problem, const Rule& rule,
                 scratch_carver memory) noexcept
      : c_(problem), rule_(rule) {
    carve(memory);
  }

  [[nodiscard]] static std::size_t scratch_bytes(const weights_problem<T>& problem,
                                                 const Rule& rule) noexcept {
    scratch_carver memory;
    weights_worker counter(problem, rule, scratch_carver());
    counter.carve(memory);
    return memory.used();
  }

  /// The weights of rows [row0, row0 + QS), as far as there are such rows. They stay until the
  /// next call.
  const tile_of_weights<T, Arch>& weigh(index_t b, index_t h, index_t row0) noexcept {
    t_.b = b, t_.h = h, t_.row0 = row0;
    t_.n_rows = std::min<index_t>(QS, c_.n_q - row0);
    set_ranges();
    load_queries();
    k_ = c_.k(b, c_.kv_head(h));
    // Blocks of keys at absolute positions: which keys are summed in which order does not depend
    // on the other rows of the tile.
    const index_t end = t_.first_key + t_.n_keys;
    m_.fill(-infinity);
    for (index_t j0 = t_.first_key; j0 < end;) {
      const index_t j1 = std::min(end, j0 / key_block * key_block + key_block);
      score(j0, j1);
      j0 = j1;
    }
    add_sink_to_maximum();
    for (index_t j0 = t_.first_key; j0 < end;) {
      const index_t j1 = std::min(end, j0 / key_block * key_block + key_block);
      exponentiate(j0, j1);
      j0 = j1;
    }
    normalise();
    return t_;
  }

 private:
  void carve(scratch_carver& memory) noexcept {
    qt_ = memory.take<T>(c_.d_qk * QS);
    rows_ = memory.take<T>(QS * c_.d_qk);
    keys_ = memory.take<T>(key_block * c_.d_qk);
    k_padded_ = memory.take<T>(MR * c_.d_qk);
    t_.e = memory.take<T>((c_.n_kv + MR) * QS);
    t_.seen = memory.take<bool>(c_.n_kv);
  }

  // 1. Which keys each row may see, and the span of them all.
  void set_ranges() noexcept {
    index_t begin = c_.n_kv, end = 0;
    for (index_t r = 0; r < QS; ++r) {
      key_range keys{0, 0};
      if (r < t_.n_rows) keys = rule_.keys(t_.b, t_.h, t_.row0 + r, c_.n_kv);
      keys = {std::max<index_t>(0, keys.begin), std::min(c_.n_kv, keys.end)};
      if (keys.begin >= keys.end) keys = {0, 0};
      range_[static_cast<std::size_t>(r)] = keys;
      if (keys.begin == keys.end) continue;
      begin = std::min(begin, keys.begin);
      end = std::max(end, keys.end);
    }
    t_.first_key = std::min(begin, end);
    t_.n_keys = end - t_.first_key;
    std::fill_n(t_.seen, t_.n_keys, false);
    t_.row.fill({0, 0, 0, 0});
  }

  // 2. Queries, scaled and transposed: qt [d_qk][QS].
  void load_queries() noexcept {
    const row_source<T> q = c_.q(t_.b, t_.h);
    q.read(t_.row0, t_.n_rows, c_.d_qk, rows_, c_.d_qk);
    transpose_in<T, Arch>(rows_, c_.d_qk, t_.n_rows, c_.d_qk, c_.scale, qt_, QS);
  }

  // 3. Scores of keys [j0, j1) into e, through softcap and rule; their maximum into m, NaN where a
  //    score is NaN or +inf.
  void score(index_t j0, index_t j1) noexcept {
    const index_t n = j1 - j0;
    T* s = t_.e + (j0 - t_.first_key) * QS;
    qk_operands<T> a{};
    a.qt = qt_;
    a.d = c_.d_qk;
    a.n_keys = n;
    a.p = s;
    a.k_padded = k_padded_;
    if (k_.direct != nullptr) {
      a.k = k_.direct + j0 * k_.row_stride, a.ldk = k_.row_stride;
    } else {
      k_.read(j0, n, c_.d_qk, keys_, c_.d_qk);
      a.k = keys_, a.ldk = c_.d_qk;
    }
    alignas(64) T zero[QS] = {};
    tiles::qk_scores<T, Arch, NR>(a, zero);

    if (c_.softcap != T(0)) {
      const B cap(c_.softcap), inverse(T(1) / c_.softcap);
      for (index_t x = 0; x < n * QS; x += W) {
        (cap * simd::tanh<T, Arch>(simd::load<T, Arch>(s + x) * inverse)).store_aligned(s + x);
      }
    }
    forbid(s, j0, n);

    for (int lane = 0; lane < QS; lane += W) {
      B m = simd::load<T, Arch>(m_.data() + lane);
      for (index_t j = 0; j < n; ++j) {
        const B x = simd::load<T, Arch>(s + j * QS + lane);
        t_.seen[j0 - t_.first_key + j] |= !xsimd::all(x == B(-infinity));
        // A NaN in m stays: neither comparison holds for it.
        m = xsimd::select(m < x, x, m);
        m = xsimd::select(x < B(infinity), m, B(std::numeric_limits<T>::quiet_NaN()));
      }
      m.store_aligned(m_.data() + lane);
    }
  }

  // −inf wherever a row may not attend, the rule's score elsewhere.
  void forbid(T* s, index_t j0, index_t n) noexcept {
    for (index_t lane = t_.n_rows; lane < QS; ++lane) {
      for (index_t j = 0; j < n; ++j) s[j * QS + lane] = -infinity;
    }
    if constexpr (Rule::kind == rule_kind::range) {  // keys() says all
      for (index_t lane = 0; lane < t_.n_rows; ++lane) {
        const key_range keys = range_[static_cast<std::size_t>(lane)];
        const index_t begin = std::clamp<index_t>(keys.begin - j0, 0, n);
        const index_t end = std::clamp<index_t>(keys.end - j0, 0, n);
        for (index_t j = 0; j < begin; ++j) s[j * QS + lane] = -infinity;
        for (index_t j = end; j < n; ++j) s[j * QS + lane] = -infinity;
      }
    } else {
      bias_tile<T> pairs{};
      pairs.ld = QS;
      pairs.b = t_.b, pairs.h = t_.h;
      pairs.i0 = t_.row0, pairs.n_rows = t_.n_rows;
      pairs.j0 = j0, pairs.n_keys = n;
      apply_rule(rule_, pairs, s, c_.n_kv);
    }
  }

  // 4. A sink joins the maximum only to make its row NaN where it is +inf or NaN: the sum below
  //    holds it however large it is.
  void add_sink_to_maximum() noexcept {
    if (c_.sinks.empty() || sink() < std::numeric_limits<double>::infinity()) return;
    m_.fill(std::numeric_limits<T>::quiet_NaN());
  }
  [[nodiscard]] double sink() const noexcept { return c_.sinks[static_cast<std::size_t>(t_.h)]; }

  // 5. e = exp(s − m) of keys [j0, j1) in place, sums of a block in T and of the blocks in double.
  void exponentiate(index_t j0, index_t j1) noexcept {
    T* s = t_.e + (j0 - t_.first_key) * QS;
    for (int lane = 0; lane < QS; lane += W) {
      const B m = simd::load<T, Arch>(m_.data() + lane);
      B count(T(0)), z(T(0)), moment(T(0));
      for (index_t j = 0; j < j1 - j0; ++j) {
        T* at = s + j * QS + lane;
        const B x = simd::load<T, Arch>(at);
        const auto forbidden = x == B(-infinity);
        const B y = x - m;
        const B e = xsimd::select(forbidden, B(T(0)), simd::exp<T, Arch>(y));
        e.store_aligned(at);
        count = count + xsimd::select(forbidden, B(T(0)), B(T(1)));
        z = z + e;
        moment = moment + xsimd::select(forbidden, B(T(0)), e * y);
      }
      alignas(64) T counts[W], zs[W], moments[W];
      count.store_aligned(counts), z.store_aligned(zs), moment.store_aligned(moments);
      for (int r = 0; r < W; ++r) {
        row_of_weights& row = t_.row[static_cast<std::size_t>(lane + r)];
        row.n_keys += static_cast<index_t>(counts[r]);
        row.z += static_cast<double>(zs[r]);
        row.log_moment += static_cast<double>(moments[r]);
      }
    }
  }

  // 6. Factors. A NaN row has NaN in e already where it may attend, and 0 elsewhere: factor 1.
  void normalise() noexcept {
    for (std::size_t r = 0; r < static_cast<std::size_t>(QS); ++r) {
      row_of_weights& row = t_.row[r];
      row.z_and_sink = row.z;
      if (!c_.sinks.empty()) row.z_and_sink += std::exp(sink() - static_cast<double>(m_[r]));
      const bool is_normal = row.n_keys > 0 && !std::isnan(row.z);
      t_.factor[r] = is_normal ? static_cast<T>(1 / row.z_and_sink) : T(1);
    }
  }

  const weights_problem<T>& c_;
  const Rule& rule_;
  tile_of_weights<T, Arch> t_{};
  row_source<T> k_{};
  T *qt_ = nullptr, *rows_ = nullptr, *keys_ = nullptr, *k_padded_ = nullptr;
  alignas(64) std::array<T, QS> m_;
  std::array<key_range, QS> range_;
};

}  // namespace attn::detail
