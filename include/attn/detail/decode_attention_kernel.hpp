// SPDX-License-Identifier: MIT
//
// Dense attention of few queries: lanes run along the head dimension.
//
// With one query per head there is nothing to fill the lanes of a query tile with; the time goes
// into reading K and V once. All query heads that share a key/value head, and all their queries,
// are rows that meet a block of 32 keys while it is in L1, 4 rows x 4 keys at a time.
//
// Keys are cut into chunks of 1024 at fixed positions, which are merged in order: threads may share
// a head, and the result has the same bits for any number of them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include <attn/context.hpp>
#include <attn/detail/decode_products.hpp>
#include <attn/detail/dense_problem.hpp>
#include <attn/detail/score_bias.hpp>
#include <attn/detail/scratch_carver.hpp>
#include <attn/score_rule.hpp>
#include <attn/simd/fp_environment.hpp>
#include <attn/simd/math.hpp>
#include <attn/simd/reduce.hpp>

namespace attn::detail {

/// Up to this many queries decode is faster than query tiles, of which they would fill a part.
template <class T, class Arch>
inline constexpr index_t decode_max_queries = 3 * simd::width<T, Arch> / 4;

template <class T, class Arch, score_rule Rule>
class decode_worker {
  using B = simd::batch<T, Arch>;
  static constexpr int W = simd::width<T, Arch>;
  static constexpr int block_keys = decode::block_keys;
  static constexpr T infinity = std::numeric_limits<T>::infinity();

 public:
  static constexpr index_t chunk_keys = 1024;

  decode_worker(const dense_problem<T>& problem, const Rule& rule, std::byte* scratch,
                std::byte* shared) noexcept
      : c_(problem), rule_(rule) {
    scratch_carver own(scratch);
    carve(own);
    scratch_carver common(shared);
    carve_shared(common);
  }

  [[nodiscard]] static std::size_t scratch_bytes(const dense_problem<T>& c, const Rule& rule) {
    decode_worker counter(c, rule);
    scratch_carver memory;
    counter.carve(memory);
    return memory.used();
  }
  [[nodiscard]] static std::size_t shared_bytes(const dense_problem<T>& c, const Rule& rule) {
    decode_worker counter(c, rule);
    scratch_carver memory;
    counter.carve_shared(memory);
    return memory.used();
  }

  [[nodiscard]] static index_t chunks(const dense_problem<T>& c) noexcept {
    return std::max<index_t>(1, (c.n_kv + chunk_keys - 1) / chunk_keys);
  }

  /// Chunk `chunk` of keys for all rows of key/value head `head` = b Hkv + h_kv.
  void run(index_t head, index_t chunk) noexcept {
    enter_head(head);
    const index_t item = head * chunks(c_) + chunk;
    state_ = {sums_ + item * n_rows_ * 2, outputs_ + item * n_rows_ * ld_out_};
    for (index_t r = 0; r < n_rows_; ++r) state_.m(r) = -infinity;
    // Shared memory is zeroed: l = 0, o = 0.
    const index_t begin = std::max(seen_.begin, chunk * chunk_keys);
    const index_t end = std::min(seen_.end, (chunk + 1) * chunk_keys);
    for (index_t k0 = begin / block_keys * block_keys; k0 < end; k0 += block_keys) {
      fold_block(k0, std::max(k0, begin), std::min(k0 + block_keys, end));
    }
    // Whoever ends the last chunk of a head merges them all.
    const index_t before = finished_[head].fetch_add(1, std::memory_order_acq_rel);
    if (before + 1 == chunks(c_)) finish(head);
  }

 private:
  decode_worker(const dense_problem<T>& problem, const Rule& rule) noexcept
      : c_(problem), rule_(rule) {}

  // m, l and the output, not normalised, of all rows over one chunk.
  struct chunk_state {
    T* sums;
    T* output;
    [[nodiscard]] T& m(index_t r) const noexcept { return sums[2 * r]; }
    [[nodiscard]] T& l(index_t r) const noexcept { return sums[2 * r + 1]; }
  };

  void carve(scratch_carver& memory) noexcept {
    n_rows_ = c_.n_heads / c_.n_heads_kv * c_.n_q;
    ld_q_ = (c_.d_qk + W - 1) / W * W;
    ld_out_ = (c_.d_v + W - 1) / W * W;
    q_ = memory.take<T>(n_rows_ * ld_q_);
    s_ = memory.take<T>(decode::tile_rows * block_keys);
    k_copy_ = memory.take<T>(block_keys * c_.d_qk);
    v_copy_ = memory.take<T>(block_keys * c_.d_v);
    ranges_ = memory.take<key_range>(n_rows_);
  }
  void carve_shared(scratch_carver& memory) noexcept {
    n_rows_ = c_.n_heads / c_.n_heads_kv * c_.n_q;
    ld_out_ = (c_.d_v + W - 1) / W * W;
    const index_t heads = c_.n_batch * c_.n_heads_kv;
    finished_ = memory.take<std::atomic<index_t>>(heads);
    sums_ = memory.take<T>(heads * chunks(c_) * n_rows_ * 2);
    outputs_ = memory.take<T>(heads * chunks(c_) * n_rows_ * ld_out_);
  }

  [[nodiscard]] index_t head_of(index_t r) const noexcept {
    return h_kv_ * (c_.n_heads / c_.n_heads_kv) + r / c_.n_q;
  }

  // Scaled queries and key ranges of all rows of a key/value head.
  void enter_head(index_t head) noexcept {
    if (head == head_) return;
    head_ = head;
    b_ = head / c_.n_heads_kv, h_kv_ = head % c_.n_heads_kv;
    k_ = c_.k(b_, h_kv_);
    v_ = c_.v(b_, h_kv_);
    seen_ = {c_.n_kv, 0};
    std::fill_n(q_, n_rows_ * ld_q_, T(0));
    for (index_t r = 0; r < n_rows_; ++r) {
      const index_t h = head_of(r), i = r % c_.n_q;
      T* q = q_ + r * ld_q_;
      c_.q(b_, h).read(i, 1, c_.d_qk, q, ld_q_);
      for (index_t c = 0; c < ld_q_; c += W) {
        (simd::load<T, Arch>(q + c) * B(c_.scale)).store_aligned(q + c);
      }
      key_range keys = rule_.keys(b_, h, i, c_.n_kv);
      keys = {std::max<index_t>(0, keys.begin), std::min(c_.n_kv, keys.end)};
      ranges_[r] = keys;
      if (keys.begin < keys.end) {
        seen_ = {std::min(seen_.begin, keys.begin), std::max(seen_.end, keys.end)};
      }
    }
  }

  // Keys [first, last) of the block at k0 for all rows.
  void fold_block(index_t k0, index_t first, index_t last) noexcept {
    // 1. K and V as they lie, or converted.
    const index_t n = last - first;
    const T *k = k_copy_, *v = v_copy_;
    index_t ldk = c_.d_qk, ldv = c_.d_v;
    if (k_.direct != nullptr)
      k = k_.direct + first * k_.row_stride, ldk = k_.row_stride;
    else
      k_.read(first, n, c_.d_qk, k_copy_, ldk);
    if (v_.direct != nullptr)
      v = v_.direct + first * v_.row_stride, ldv = v_.row_stride;
    else
      v_.read(first, n, c_.d_v, v_copy_, ldv);
    v_state_ = finiteness::unknown;
    // 2. Row tile by row tile.
    for (index_t r = 0; r < n_rows_; r += decode::tile_rows) {
      const index_t rows = std::min<index_t>(decode::tile_rows, n_rows_ - r);
      decode::operands<T> a{q_ + r * ld_q_,
                            ld_q_,
                            k,
                            ldk,
                            c_.d_qk,
                            v,
                            ldv,
                            c_.d_v,
                            n,
                            s_ + (first - k0),
                            state_.output + r * ld_out_,
                            ld_out_,
                            r == 0};
      decode::on_rows(rows, [&]<int R>() { decode::scores<T, Arch, R>(a); });
      bool forbids = false;
      for (index_t x = 0; x < rows; ++x)
        forbids |= weigh(r + x, s_ + x * block_keys, k0, first, last);
      if (forbids && !values_finite(a)) {
        decode::selective_values<T, Arch>(a, static_cast<int>(rows));
      } else {
        decode::on_rows(rows, [&]<int R>() { decode::values<T, Arch, R>(a); });
      }
    }
  }

  // Scores s of a row and the keys [first, last) of the block at k0 to weights; true if some key of
  // the block is forbidden.
  bool weigh(index_t row, T* s, index_t k0, index_t first, index_t last) noexcept {
    const index_t h = head_of(row), i = row % c_.n_q;
    // 1. Softcap, rule, range; what is outside of the block's valid keys is forbidden too.
    if (c_.softcap != T(0)) {
      const B cap(c_.softcap), inverse(T(1) / c_.softcap);
      for (int j = 0; j < block_keys; j += W) {
        (cap * simd::tanh<T, Arch>(simd::load<T, Arch>(s + j) * inverse)).store_aligned(s + j);
      }
    }
    const index_t lo = std::max(first, ranges_[row].begin) - k0;
    const index_t hi = std::max(lo, std::min(last, ranges_[row].end) - k0);
    std::fill(s, s + std::min<index_t>(lo, block_keys), -infinity);
    if (hi < block_keys) std::fill(s + hi, s + block_keys, -infinity);
    if constexpr (Rule::kind != rule_kind::range) {
      for (index_t j = lo; j < hi; ++j) {
        s[j] = ruled_score(rule_, s[j], b_, h, i, k0 + j);
      }
    }
    // 2. The running maximum; what came before in terms of it.
    B top(-infinity);
    for (int j = 0; j < block_keys; j += W) top = xsimd::max(top, simd::load<T, Arch>(s + j));
    const T m_before = state_.m(row), l_before = state_.l(row);
    T m = std::max(m_before, simd::max(top));
    state_.m(row) = m;
    if (m == -infinity) m = 0;
    if (m != m_before && l_before != T(0)) {
      const T scale = std::exp(m_before - m);
      state_.l(row) = l_before * scale;
      T* o = state_.output + row * ld_out_;
      for (index_t c = 0; c < ld_out_; c += W) {
        (simd::load<T, Arch>(o + c) * B(scale)).store_aligned(o + c);
      }
    }
    // 3. Weights, −0 where forbidden, and their sum.
    bool forbids = false;
    B sum(T(0));
    for (int j = 0; j < block_keys; j += W) {
      const B x = simd::load<T, Arch>(s + j);
      const auto forbidden = x == B(-infinity);
      forbids |= xsimd::any(forbidden);
      const B e = xsimd::select(forbidden, B(T(-0.0)), simd::exp<T, Arch>(x - B(m)));
      e.store_aligned(s + j);
      sum = sum + e;
    }
    state_.l(row) += simd::sum(sum);
    return forbids;
  }

  [[nodiscard]] bool values_finite(const decode::operands<T>& a) noexcept {
    if (v_state_ == finiteness::unknown) {
      T bad = 0;
      for (index_t j = 0; j < a.n_keys; ++j) {
        for (index_t c = 0; c < c_.d_v; ++c) bad += a.v[j * a.ldv + c] * T(0);
      }
      v_state_ = bad == T(0) ? finiteness::finite : finiteness::not_finite;
    }
    return v_state_ == finiteness::finite;
  }

  // Merges the chunks of a head in order and writes its rows.
  void finish(index_t head) noexcept {
    const index_t first = head * chunks(c_);
    for (index_t r = 0; r < n_rows_; ++r) {
      const index_t h = head_of(r), i = r % c_.n_q;
      const auto chunk = [&](index_t c) {
        return chunk_state{sums_ + (first + c) * n_rows_ * 2,
                           outputs_ + (first + c) * n_rows_ * ld_out_};
      };
      // 1. The maximum over chunks, and the sink.
      const T sink =
          c_.sinks.empty() ? -infinity : static_cast<T>(c_.sinks[static_cast<std::size_t>(h)]);
      T m = sink;
      for (index_t c = 0; c < chunks(c_); ++c) m = std::max(m, chunk(c).m(r));
      if (m == -infinity) m = 0;
      // 2. Sums in terms of it.
      T* out = chunk(0).output + r * ld_out_;
      T l = sink == -infinity ? T(0) : std::exp(sink - m);
      bool empty = true;
      for (index_t c = 0; c < chunks(c_); ++c) {
        const chunk_state part = chunk(c);
        const T scale = part.l(r) == T(0) ? T(0) : std::exp(part.m(r) - m);
        l += part.l(r) * scale;
        empty &= part.l(r) == T(0);
        const T* o = part.output + r * ld_out_;
        for (index_t x = 0; x < ld_out_; x += W) {
          const B add = simd::load<T, Arch>(o + x) * B(scale);
          (c == 0 ? add : simd::load<T, Arch>(out + x) + add).store_aligned(out + x);
        }
      }
      // 3. Normalise and write; a row without keys is 0, whatever its sink, / −inf.
      const B inverse(empty ? T(0) : T(1) / l);
      for (index_t x = 0; x < ld_out_; x += W) {
        (simd::load<T, Arch>(out + x) * inverse).store_aligned(out + x);
      }
      c_.out(b_, h).write(out, ld_out_, i, 1, c_.d_v);
      if (c_.lse.data_handle() != nullptr) {
        c_.lse(b_, h, i, 0) = l == T(0) ? -infinity : m + std::log(l);
      }
    }
  }

  enum class finiteness { unknown, finite, not_finite };

  const dense_problem<T>& c_;
  const Rule& rule_;
  index_t head_ = -1, b_ = 0, h_kv_ = 0, n_rows_ = 0, ld_q_ = 0, ld_out_ = 0;
  key_range seen_{};
  row_source<T> k_{}, v_{};
  finiteness v_state_ = finiteness::unknown;
  chunk_state state_{};
  T *q_ = nullptr, *s_ = nullptr, *k_copy_ = nullptr, *v_copy_ = nullptr;
  key_range* ranges_ = nullptr;
  std::atomic<index_t>* finished_ = nullptr;
  T *sums_ = nullptr, *outputs_ = nullptr;
};

/// Runs a call of few queries over the threads of `ctx`.
template <class T, class Arch, score_rule Rule>
void dense_attention_decode(const dense_problem<T>& problem, const Rule& rule, context& ctx) {
  using worker = decode_worker<T, Arch, Rule>;
  const index_t chunks = worker::chunks(problem);
  ctx.run_shared(problem.n_batch * problem.n_heads_kv * chunks, 1,
                 worker::scratch_bytes(problem, rule), worker::shared_bytes(problem, rule),
                 [&](std::byte* scratch, std::byte* shared, work_queue& queue) noexcept {
                   const simd::flush_subnormals mode;
                   worker w(problem, rule, scratch, shared);
                   index_t first = 0, last = 0;
                   while (queue.next(first, last)) {
                     for (index_t item = first; item < last; ++item) {
                       w.run(item / chunks, item % chunks);
                     }
                   }
                 });
}

}  // namespace attn::detail
