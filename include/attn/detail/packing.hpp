// SPDX-License-Identifier: MIT
//
// Rows of any storage type and strides to dense rows of T, rows to transposed tiles, and back.
#pragma once

#include <algorithm>

#include <attn/simd/convert.hpp>
#include <attn/simd/transpose.hpp>
#include <attn/view.hpp>

namespace attn::detail {

/// dst[c][r] = factor · src[r][c] for rows r and columns c; lanes from `rows` to `ld_dst` are 0.
template <class T, class Arch>
void transpose_in(const T* src, index_t ld_src, index_t rows, index_t columns, T factor, T* dst,
                  index_t ld_dst) noexcept {
  constexpr int W = simd::width<T, Arch>;
  index_t r0 = 0;
  if constexpr (simd::has_lane_blocks<Arch>) {
    using block = simd::lane_block<T, Arch>;
    const simd::batch<T, Arch> f(factor);
    for (; r0 + W <= rows; r0 += W) {
      const T* s = src + r0 * ld_src;
      index_t c = 0;
      for (; c + block::columns <= columns; c += block::columns) {
        block x;
        x.load_rows(s + c, ld_src);
        x.transpose();
        ATTN_UNROLL for (int i = 0; i < block::columns; ++i) {
          (x.v[i] * f).store_aligned(dst + (c + i) * ld_dst + r0);
        }
      }
      for (; c < columns; ++c) {
        for (int r = 0; r < W; ++r) dst[c * ld_dst + r0 + r] = s[r * ld_src + c] * factor;
      }
    }
  }
  for (index_t r = r0; r < rows; ++r) {
    for (index_t c = 0; c < columns; ++c) dst[c * ld_dst + r] = src[r * ld_src + c] * factor;
  }
  for (index_t c = 0; c < columns && rows < ld_dst; ++c) {
    std::fill(dst + c * ld_dst + rows, dst + (c + 1) * ld_dst, T(0));
  }
}

/// dst[r][c] = factor[r] · src[c][r]. Whether all of dst is finite.
template <class T, class Arch>
bool transpose_out(const T* src, index_t ld_src, index_t rows, index_t columns, const T* factor,
                   T* dst, index_t ld_dst) noexcept {
  using B = simd::batch<T, Arch>;
  constexpr int W = simd::width<T, Arch>;
  index_t r0 = 0;
  B sum(T(0));  // of all · 0: NaN if one is not finite
  T sum_rest(0);
  if constexpr (simd::has_lane_blocks<Arch>) {
    using block = simd::lane_block<T, Arch>;
    for (; r0 + W <= rows; r0 += W) {
      T* out = dst + r0 * ld_dst;
      const B f = simd::load<T, Arch>(factor + r0);
      index_t c = 0;
      for (; c + block::columns <= columns; c += block::columns) {
        block x;
        ATTN_UNROLL for (int i = 0; i < block::columns; ++i) {
          x.v[i] = simd::load<T, Arch>(src + (c + i) * ld_src + r0) * f;
        }
        B part = x.v[0] * B(T(0));
        ATTN_UNROLL for (int i = 1; i < block::columns; ++i) {
          part = simd::multiply_add(x.v[i], B(T(0)), part);
        }
        sum = sum + part;
        x.transpose();
        x.store_rows(out + c, ld_dst);
      }
      for (; c < columns; ++c) {
        for (int r = 0; r < W; ++r) {
          out[r * ld_dst + c] = src[c * ld_src + r0 + r] * factor[r0 + r];
          sum_rest += out[r * ld_dst + c] * T(0);
        }
      }
    }
  }
  for (index_t r = r0; r < rows; ++r) {
    for (index_t c = 0; c < columns; ++c) {
      dst[r * ld_dst + c] = src[c * ld_src + r] * factor[r];
      sum_rest += dst[r * ld_dst + c] * T(0);
    }
  }
  return xsimd::all(sum == B(T(0))) && sum_rest == T(0);
}

/// Rows of an operand, whatever its storage type and strides, as dense rows of T.
template <class T, class Arch, class Stored>
void copy_rows(const Stored* src, index_t row_stride, index_t dim_stride, index_t rows,
               index_t columns, T* dst, index_t ld_dst) noexcept {
  constexpr int W = simd::width<T, Arch>;
  if (dim_stride == 1) {
    for (index_t r = 0; r < rows; ++r) {
      const Stored* s = src + r * row_stride;
      T* out = dst + r * ld_dst;
      index_t c = 0;
      for (; c + W <= columns; c += W) simd::load_as<T, Arch>(s + c).store_unaligned(out + c);
      for (; c < columns; ++c) out[c] = static_cast<T>(s[c]);
    }
    return;
  }
  // Column-major and the like: along the rows in short stretches, so that both sides stay in L1.
  for (index_t r0 = 0; r0 < rows; r0 += 16) {
    const index_t r1 = std::min(rows, r0 + 16);
    for (index_t c = 0; c < columns; ++c) {
      const Stored* s = src + c * dim_stride;
      for (index_t r = r0; r < r1; ++r) dst[r * ld_dst + c] = static_cast<T>(s[r * row_stride]);
    }
  }
}

/// Dense rows of T into an output of any storage type and strides.
template <class T, class Arch, class Stored>
void store_rows(const T* src, index_t ld_src, index_t rows, index_t columns, Stored* dst,
                index_t row_stride, index_t dim_stride) noexcept {
  constexpr int W = simd::width<T, Arch>;
  for (index_t r = 0; r < rows; ++r) {
    const T* s = src + r * ld_src;
    Stored* out = dst + r * row_stride;
    index_t c = 0;
    if (dim_stride == 1) {
      for (; c + W <= columns; c += W) {
        simd::store_as<T, Arch>(out + c, simd::load_unaligned<T, Arch>(s + c));
      }
    }
    for (; c < columns; ++c) out[c * dim_stride] = static_cast<Stored>(s[c]);
  }
}

/// The rows of one head of an operand, with its storage type hidden behind one function pointer, so
/// that a kernel is instantiated once per T and not once per combination of storage types.
template <class T>
struct row_source {
  const void* data;
  index_t row_stride, dim_stride;
  const T* direct;  ///< not null where rows can be read as they lie: type T, dim stride 1
  void (*copy)(const void*, index_t, index_t, index_t, index_t, index_t, T*, index_t) noexcept;

  /// Rows [first, first + rows) into dst.
  void read(index_t first, index_t rows, index_t columns, T* dst, index_t ld_dst) const noexcept {
    copy(data, first, row_stride, dim_stride, rows, columns, dst, ld_dst);
  }
};

template <class T, class Arch, class Stored>
[[nodiscard]] row_source<T> make_row_source(const tensor_view<Stored>& x, index_t b,
                                            index_t h) noexcept {
  using S = std::remove_const_t<Stored>;
  const S* data = x.data_handle() + b * x.stride(0) + h * x.stride(1);
  const index_t dim_stride = x.extent(3) == 1 ? 1 : x.stride(3);
  row_source<T> rows{data, x.stride(2), dim_stride, nullptr,
                     [](const void* p, index_t first, index_t row_stride, index_t stride,
                        index_t n_rows, index_t columns, T* dst, index_t ld_dst) noexcept {
                       copy_rows<T, Arch, S>(static_cast<const S*>(p) + first * row_stride,
                                             row_stride, stride, n_rows, columns, dst, ld_dst);
                     }};
  if constexpr (std::is_same_v<S, T>) {
    if (dim_stride == 1) rows.direct = data;
  }
  return rows;
}

/// The rows of one head of an output.
template <class T>
struct row_sink {
  void* data;
  index_t row_stride, dim_stride;
  T* direct;  ///< not null where rows of T can be written as they are
  void (*store)(const T*, index_t, index_t, index_t, void*, index_t, index_t, index_t) noexcept;

  void write(const T* src, index_t ld_src, index_t first, index_t rows,
             index_t columns) const noexcept {
    store(src, ld_src, rows, columns, data, first, row_stride, dim_stride);
  }
};

template <class T, class Arch, class Stored>
[[nodiscard]] row_sink<T> make_row_sink(const tensor_view<Stored>& x, index_t b,
                                        index_t h) noexcept {
  Stored* data = x.data_handle() + b * x.stride(0) + h * x.stride(1);
  const index_t dim_stride = x.extent(3) == 1 ? 1 : x.stride(3);
  row_sink<T> rows{data, x.stride(2), dim_stride, nullptr,
                   [](const T* src, index_t ld_src, index_t n_rows, index_t columns, void* p,
                      index_t first, index_t row_stride, index_t stride) noexcept {
                     store_rows<T, Arch, Stored>(src, ld_src, n_rows, columns,
                                                 static_cast<Stored*>(p) + first * row_stride,
                                                 row_stride, stride);
                   }};
  if constexpr (std::is_same_v<Stored, T>) {
    if (dim_stride == 1) rows.direct = data;
  }
  return rows;
}

}  // namespace attn::detail
