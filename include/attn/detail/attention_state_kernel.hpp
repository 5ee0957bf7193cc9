// SPDX-License-Identifier: MIT
//
// Merging rows of attention over two sets of keys.
#pragma once

#include <cmath>
#include <limits>

#include <attn/context.hpp>
#include <attn/simd/batch.hpp>
#include <attn/simd/convert.hpp>
#include <attn/view.hpp>

namespace attn::detail {

// A row of out: [d] elements, `step` apart.
template <class T>
struct row_pointer {
  T* data;
  index_t step;
};

// A view without elements may have no memory: no offset is added to a null pointer.
template <class T>
[[nodiscard]] row_pointer<T> row_of(const tensor_view<T>& x, index_t b, index_t h,
                                    index_t i) noexcept {
  if (x.extent(3) == 0) return {x.data_handle(), 0};
  return {&x(b, h, i, 0), x.stride(3)};
}

// out = (hi + w lo) f over [d] elements, computed in S. `out` may be either input.
//
// hi is the row with the larger maximum, so that 0 <= w <= 1 and nothing overflows that should not;
// w = 1 gives the same bits with hi and lo exchanged, whether the compiler fuses w lo or not.
template <class Arch, class S, class T>
void add_scaled_row(row_pointer<const T> hi, row_pointer<const T> lo, S w, S f, row_pointer<T> out,
                    index_t d) noexcept {
  using B = simd::batch<S, Arch>;
  constexpr index_t W = simd::width<S, Arch>;
  index_t c = 0;
  if (hi.step == 1 && lo.step == 1 && out.step == 1) {
    for (; c + W <= d; c += W) {
      const B x = simd::load_as<S, Arch>(hi.data + c), y = simd::load_as<S, Arch>(lo.data + c);
      simd::store_as<S, Arch>(out.data + c, simd::multiply_add(B(w), y, x) * B(f));
    }
  }
  for (; c < d; ++c) {
    const S x = static_cast<S>(hi.data[c * hi.step]), y = static_cast<S>(lo.data[c * lo.step]);
    out.data[c * out.step] = static_cast<T>((x + w * y) * f);
  }
}

// One row: (out_a, lse_a) and (out_b, lse_b) to (out, lse). As states (m, l, o) the inputs are
// (lse, 1, out): a row that is normalised has l = 1 at m = lse.
template <class Arch, class S, class T>
void merge_attention_row(row_pointer<const T> out_a, S lse_a, row_pointer<const T> out_b, S lse_b,
                         row_pointer<T> out, S& lse, index_t d_v) noexcept {
  constexpr S empty = -std::numeric_limits<S>::infinity();
  // 1. An empty side takes no part, whatever its out holds: the other is copied bit for bit.
  if (lse_a == empty || lse_b == empty) {
    const row_pointer<const T> kept = lse_a == empty ? out_b : out_a;
    lse = lse_a == empty ? lse_b : lse_a;
    for (index_t c = 0; c < d_v; ++c) {
      out.data[c * out.step] = lse == empty ? T(0) : kept.data[c * kept.step];
    }
    return;
  }
  // 2. w = exp(smaller − larger lse) in [0, 1]; l = 1 + w. NaN in either lse makes all NaN, and so
  //    does +inf: its exp has no finite share.
  const bool a_is_high = lse_a >= lse_b;
  const S high = a_is_high ? lse_a : lse_b, low = a_is_high ? lse_b : lse_a;
  const S w = std::exp(low - high) + (high - high);
  // 3. lse = high + ln(1 + w), o = (o_high + w o_low) / (1 + w).
  lse = high + std::log1p(w);
  add_scaled_row<Arch>(a_is_high ? out_a : out_b, a_is_high ? out_b : out_a, w, S(1) / (S(1) + w),
                       out, d_v);
}

// Shapes agree; outputs equal an input exactly or share nothing with it.
template <class Arch, class S, class T>
void merge_attention_kernel(const tensor_view<const T>& out_a, const tensor_view<const S>& lse_a,
                            const tensor_view<const T>& out_b, const tensor_view<const S>& lse_b,
                            const tensor_view<T>& out, const tensor_view<S>& lse, context& ctx) {
  const index_t n_heads = out.extent(1), n_q = out.extent(2), d_v = out.extent(3);
  constexpr index_t rows_per_task = 64;
  ctx.run(out.extent(0) * n_heads * n_q, rows_per_task, 0,
          [&](std::byte*, work_queue& queue) noexcept {
            for (index_t first, last; queue.next(first, last);) {
              for (index_t row = first; row < last; ++row) {
                const index_t b = row / (n_heads * n_q), h = row / n_q % n_heads, i = row % n_q;
                merge_attention_row<Arch, S, T>(row_of(out_a, b, h, i), lse_a(b, h, i, 0),
                                                row_of(out_b, b, h, i), lse_b(b, h, i, 0),
                                                row_of(out, b, h, i), lse(b, h, i, 0), d_v);
              }
            }
          });
}

}  // namespace attn::detail
