// SPDX-License-Identifier: MIT
//
// A tournament's plan applied to a payload: pooled rows from source rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include <attn/detail/attention_state_kernel.hpp>
#include <attn/detail/tournament_kernel.hpp>
#include <attn/simd/convert.hpp>
#include <attn/view.hpp>

namespace attn::detail {

// Rows [length] of [d] elements with any strides: one head of a view.
template <class T>
struct matrix_pointer {
  T* data;
  index_t row_stride, step;

  [[nodiscard]] T* row(index_t i) const noexcept { return data + i * row_stride; }
};

// Whether rows of x can be read as they lie, by all threads.
template <class T, class P>
[[nodiscard]] bool can_stream(const tensor_view<T>& x, const tensor_view<P>& pooled,
                              int n_threads) noexcept {
  const auto contiguous = [](const auto& a) { return a.extent(3) == 1 || a.stride(3) == 1; };
  return contiguous(x) && contiguous(pooled) && x.extent(0) * x.extent(1) >= n_threads;
}

template <class T>
[[nodiscard]] matrix_pointer<T> matrix_of(const tensor_view<T>& x, index_t b, index_t h) noexcept {
  if (x.size() == 0) return {x.data_handle(), 0, 0};
  return {&x(b, h, 0, 0), x.stride(2), x.extent(3) == 1 ? 1 : x.stride(3)};
}

// Weights below the smallest normal number count as 0: their sources are not read, and none is
// multiplied at the speed of subnormal numbers.
template <class S>
[[nodiscard]] ATTN_INLINE bool counts(S weight) noexcept {
  return weight >= std::numeric_limits<S>::min();
}
template <class S>
[[nodiscard]] S payload_weight(double weight) noexcept {
  const S w = static_cast<S>(weight);
  return counts(w) ? w : S(0);
}

// Rounds a row to its storage type.
template <class Arch, class S, class T>
void store_row(const S* sums, T* out, index_t d) noexcept {
  constexpr index_t W = simd::width<S, Arch>;
  index_t c = 0;
  for (; c + W <= d; c += W) {
    simd::store_as<S, Arch>(out + c, simd::load_unaligned<S, Arch>(sums + c));
  }
  for (; c < d; ++c) out[c] = static_cast<T>(sums[c]);
}

// The parts of a slot, in a row of x whose sources are contiguous.
//
// They are scattered, which the hardware does not foresee: each line is asked for when the same
// columns of the source `ahead` parts before are read.
struct slot_parts {
  const topk_part *begin, *end;
  const topk_part* last;  // of all slots: nothing comes behind it
  index_t ahead;
};

// out [C W] = Σ weight · x[source] over the parts, from the first C W columns of x.
template <class Arch, int C, class S, class T>
ATTN_INLINE void pool_part_columns(const slot_parts& parts, const T* x, index_t row_stride,
                                   S* out) noexcept {
  using B = simd::batch<S, Arch>;
  constexpr index_t W = simd::width<S, Arch>, line = 64 / sizeof(T);
  B sum[C];
  ATTN_UNROLL for (int e = 0; e < C; ++e) sum[e] = B(S(0));
  for (const topk_part* part = parts.begin; part != parts.end; ++part) {
    const T* later = x + part[std::min(parts.ahead, parts.last - part)].source * row_stride;
    ATTN_UNROLL for (index_t e = 0; e < C * W; e += line) __builtin_prefetch(later + e);
    const S w = static_cast<S>(part->weight);
    if (!counts(w)) continue;
    const T* in = x + part->source * row_stride;
    ATTN_UNROLL for (int e = 0; e < C; ++e) {
      sum[e] = simd::multiply_add(B(w), simd::load_as<S, Arch>(in + e * W), sum[e]);
    }
  }
  ATTN_UNROLL for (int e = 0; e < C; ++e) sum[e].store_unaligned(out + e * W);
}

// out [d] = Σ weight · x[source] over the parts.
template <class Arch, class S, class T>
ATTN_INLINE void pool_parts(const slot_parts& parts, const T* x, index_t row_stride, S* out,
                            index_t d) noexcept {
  constexpr index_t W = simd::width<S, Arch>;
  index_t c = 0;
  for (; c + 4 * W <= d; c += 4 * W) {
    pool_part_columns<Arch, 4>(parts, x + c, row_stride, out + c);
  }
  for (; c + 2 * W <= d; c += 2 * W) {
    pool_part_columns<Arch, 2>(parts, x + c, row_stride, out + c);
  }
  for (; c + W <= d; c += W) pool_part_columns<Arch, 1>(parts, x + c, row_stride, out + c);
  if (c < d && d >= W) {  // the last W columns, some of them once more
    c = d - W;
    return pool_part_columns<Arch, 1>(parts, x + c, row_stride, out + c);
  }
  for (; c < d; ++c) {
    S sum = 0;
    for (const topk_part* part = parts.begin; part != parts.end; ++part) {
      const S w = static_cast<S>(part->weight);
      if (counts(w)) {
        sum = simd::multiply_add(w, static_cast<S>(x[part->source * row_stride + c]), sum);
      }
    }
    out[c] = sum;
  }
}

// The order in which sources are read. A slot's are added by position in each, with the same bits.
enum class pool_order {
  few,          // by position, the sums of all slots in registers
  by_position,  // by position, each added to its slot's sum: x streams, sums are in the cache
  by_slot,      // slot by slot: sums are written once, and slots can be shared between threads
};

// `streams`: rows are contiguous, and there are enough of them for all threads. `listed`: the parts
// of slots are known, as otherwise they have to be for by_slot.
//
// The caches decide, measured with rows of 128 bytes: 1024 sources are pooled 1.8 to 2.0 times as
// fast by slot, 16384 into 2048 slots 1.1 times as fast by position.
template <class S>
[[nodiscard]] pool_order choose_pool_order(index_t n, index_t k, index_t d, bool streams,
                                           bool listed) noexcept {
  constexpr index_t most_in_registers = 4, size = sizeof(S);
  if (!streams) return pool_order::by_slot;
  // Registers hold a few columns at a time: of longer rows x is read in strides, at a third of the
  // speed.
  if (k <= most_in_registers && d * size <= 512) return pool_order::few;
  const bool sources_fit = n * d * size <= (listed ? index_t{1} << 20 : index_t{1} << 17);
  const bool sums_fit = k * d * size <= index_t{1} << 19;
  return sums_fit && !sources_fit ? pool_order::by_position : pool_order::by_slot;
}

// Elements of scratch to pool a row of n sources.
[[nodiscard]] inline index_t pool_scratch(pool_order order, index_t n, index_t k,
                                          index_t d) noexcept {
  if (order == pool_order::few) return k * d + k * n;
  return order == pool_order::by_position ? k * d : d;
}

// Sums of columns [c, c + C W) of K slots, from weights [K, n] that are 0 outside of their slot.
// False if one is not finite.
template <class Arch, int K, int C, class S, class T>
[[nodiscard]] bool pool_columns(const S* weight, index_t n, const matrix_pointer<const T>& x,
                                index_t c, S* sums, index_t d) noexcept {
  using B = simd::batch<S, Arch>;
  constexpr index_t W = simd::width<S, Arch>;
  // Lines in order, which the hardware foresees too late: asked for, they come 1.1 times as fast.
  constexpr index_t ahead = 16, line = 64 / sizeof(T);
  B sum[K][C];
  for (int r = 0; r < K; ++r) {
    for (int e = 0; e < C; ++e) sum[r][e] = B(S(0));
  }
  for (index_t i = 0; i < n; ++i) {
    const T* in = x.row(i) + c;
    const T* later = x.row(std::min(i + ahead, n - 1)) + c;
    ATTN_UNROLL for (index_t e = 0; e < C * W; e += line) __builtin_prefetch(later + e);
    B v[C];
    ATTN_UNROLL for (int e = 0; e < C; ++e) v[e] = simd::load_as<S, Arch>(in + e * W);
    ATTN_UNROLL for (int r = 0; r < K; ++r) {
      const B w(weight[r * n + i]);
      ATTN_UNROLL for (int e = 0; e < C; ++e) sum[r][e] = simd::multiply_add(w, v[e], sum[r][e]);
    }
  }
  B zero(S(0));
  for (int r = 0; r < K; ++r) {
    for (int e = 0; e < C; ++e) {
      sum[r][e].store_unaligned(sums + r * d + c + e * W);
      zero = simd::multiply_add(sum[r][e], B(S(0)), zero);
    }
  }
  return xsimd::all(zero == B(S(0)));
}

// K slots in one pass over x with all weights, which are 0 outside of a source's slot. False if a
// sum is not finite: 0 · inf may have got into it.
template <class Arch, int K, class S, class T>
[[nodiscard]] bool pool_few(const tournament_row& row, const matrix_pointer<const T>& x, index_t d,
                            S* sums) noexcept {
  constexpr index_t W = simd::width<S, Arch>;
  constexpr int wide = K <= 2 ? 4 : 2;
  const index_t n = row.n;
  S* weight = sums + K * d;
  std::fill_n(weight, K * n, S(0));
  for (index_t i = 0; i < n; ++i) {
    weight[row.share[i].slot * n + i] = payload_weight<S>(row.share[i].weight);
  }
  index_t c = 0;
  bool finite = true;
  for (; c + wide * W <= d; c += wide * W) {
    finite &= pool_columns<Arch, K, wide>(weight, n, x, c, sums, d);
  }
  if constexpr (wide > 2) {
    for (; c + 2 * W <= d; c += 2 * W) finite &= pool_columns<Arch, K, 2>(weight, n, x, c, sums, d);
  }
  for (; c + W <= d; c += W) finite &= pool_columns<Arch, K, 1>(weight, n, x, c, sums, d);
  for (; c < d; ++c) {
    for (int r = 0; r < K; ++r) {
      S sum = 0;
      for (index_t i = 0; i < n; ++i) {
        sum = simd::multiply_add(weight[r * n + i], static_cast<S>(x.row(i)[c]), sum);
      }
      sums[r * d + c] = sum;
      finite &= std::isfinite(sum);
    }
  }
  return finite;
}

// sums [k, d] of all slots.
template <class Arch, class S, class T>
void pool_by_position(const tournament_row& row, const matrix_pointer<const T>& x,
                      const matrix_pointer<S>& sums, index_t d) noexcept {
  constexpr index_t W = simd::width<S, Arch>;
  for (index_t r = 0; r < row.k; ++r) std::fill_n(sums.row(r), d, S(0));
  for (index_t i = 0; i < row.n; ++i) {
    const S w = payload_weight<S>(row.share[i].weight);
    if (w == S(0)) continue;
    const T* in = x.row(i);
    S* out = sums.row(row.share[i].slot);
    index_t c = 0;
    for (; c + W <= d; c += W) {
      simd::multiply_add(simd::batch<S, Arch>(w), simd::load_as<S, Arch>(in + c),
                         simd::load_unaligned<S, Arch>(out + c))
          .store_unaligned(out + c);
    }
    for (; c < d; ++c) out[c] = simd::multiply_add(w, static_cast<S>(in[c]), out[c]);
  }
}

// All slots, in one of the orders that stream.
template <class Arch, class S, class T, class P>
void pool_stream(const tournament_row& row, const matrix_pointer<const T>& x,
                 const matrix_pointer<P>& pooled, index_t d, pool_order order, S* sums) noexcept {
  const auto few = [&] {
    return row.k == 1   ? pool_few<Arch, 1>(row, x, d, sums)
           : row.k == 2 ? pool_few<Arch, 2>(row, x, d, sums)
           : row.k == 3 ? pool_few<Arch, 3>(row, x, d, sums)
                        : pool_few<Arch, 4>(row, x, d, sums);
  };
  if (order == pool_order::by_position || !few()) {
    if constexpr (std::is_same_v<S, P>) return pool_by_position<Arch>(row, x, pooled, d);
    pool_by_position<Arch>(row, x, matrix_pointer<S>{sums, d, 1}, d);
  }
  for (index_t r = 0; r < row.k; ++r) store_row<Arch>(sums + r * d, pooled.row(r), d);
}

// Slots [first, last) of pooled, which are all where x streams. sums [pool_scratch].
template <class Arch, class S, class T, class P>
void pool_slots(const tournament_row& row, const matrix_pointer<const T>& x,
                const matrix_pointer<P>& pooled, index_t d, pool_order order, index_t first,
                index_t last, S* sums) noexcept {
  if (order != pool_order::by_slot) {
    return pool_stream<Arch>(row, x, pooled, d, order, sums);
  }
  if (x.step == 1 && pooled.step == 1) {
    constexpr index_t bytes_ahead = 4096;
    const index_t row_bytes = std::max<index_t>(d * index_t{sizeof(T)}, 1);
    const index_t ahead = std::clamp<index_t>(bytes_ahead / row_bytes, 2, 16);
    slot_parts parts{nullptr, row.part + row.begin[first], row.part + (row.n - 1), ahead};
    for (index_t r = first; r < last; ++r) {
      parts.begin = std::exchange(parts.end, row.part + row.begin[r + 1]);
      if constexpr (std::is_same_v<S, P>) {
        pool_parts<Arch>(parts, x.data, x.row_stride, pooled.row(r), d);
      } else {
        pool_parts<Arch>(parts, x.data, x.row_stride, sums, d);
        store_row<Arch>(sums, pooled.row(r), d);
      }
    }
    return;
  }
  // A stride along dim: column by column, for what lies together is a column.
  for (index_t c = 0; c < d; ++c) {
    for (index_t r = first; r < last; ++r) {
      S sum = 0;
      for (index_t e = row.begin[r]; e < row.begin[r + 1]; ++e) {
        const S w = payload_weight<S>(row.part[e].weight);
        if (w != S(0)) {
          sum = simd::multiply_add(w, static_cast<S>(x.row(row.part[e].source)[c * x.step]), sum);
        }
      }
      pooled.row(r)[c * pooled.step] = static_cast<P>(sum);
    }
  }
}

}  // namespace attn::detail
