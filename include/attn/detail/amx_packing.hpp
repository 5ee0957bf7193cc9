// SPDX-License-Identifier: MIT
//
// Rows of floats to parts of bfloat16 in the order that tiles want, and tiles of output back.
//
// A step of K or V is operand A: [part][2 tiles][16 keys or dims][32], of Q operand B:
// [part][2 tiles][16 pairs][16 queries][2]. Dims c and c + 16 of 32 make a pair, and keys 2 t and
// 2 t + 1: any pairing will do if both operands have it, and these need no shuffle to make.
#pragma once

#include <attn/detail/amx_products.hpp>

#if defined(ATTN_HAS_AMX)

namespace attn::detail::amx {

/// Up to 32 rows, `ld` apart, that are multiplied by `factor`; numbers beyond `limit` have no place
/// on tiles.
struct row_block {
  const float* rows;
  index_t ld, n_rows, columns;
  float factor;
  float limit;
};

// Rows [first, last) hold nothing but numbers that can be split.
ATTN_AMX_INLINE bool splittable(const row_block& x, index_t first, index_t last) noexcept {
  const floats factor = simd::amx::fill(x.factor);
  const auto tail = simd::amx::first_lanes(x.columns % 16);
  simd::amx::split_check check;
  check.start();
  for (index_t r = first; r < last; ++r) {
    const float* row = x.rows + r * x.ld;
    index_t c = 0;
    for (; c + 16 <= x.columns; c += 16) {
      check.see(simd::amx::multiply(simd::amx::load(row + c), factor));
    }
    if (c < x.columns) {
      check.see(simd::amx::multiply(simd::amx::load_lanes(row + c, tail), factor));
    }
  }
  return check.good(x.limit);
}

/// Bit r: row r holds a number that cannot be split (infinite, NaN, too large or too small).
template <class Arch>
ATTN_AMX_FUNCTION std::uint32_t unsplittable_rows(const row_block& operands) noexcept {
  const row_block x = operands;
  if (splittable(x, 0, x.n_rows)) [[likely]]
    return 0;
  std::uint32_t bad = 0;
  for (index_t r = 0; r < x.n_rows; ++r) {
    if (!splittable(x, r, r + 1)) bad |= 1u << r;
  }
  return bad;
}

template <class Arch, int Parts>
struct packing {
  /// K: out [steps][Parts][2][16 keys][32]
  ATTN_AMX_FUNCTION static void keys(const row_block& operands, std::uint16_t* out) noexcept {
    const row_block x = operands;
    for (index_t c = 0; c < x.columns; c += 32, out += Parts * part_size) {
      const auto low = simd::amx::first_lanes(x.columns - c),
                 high = simd::amx::first_lanes(x.columns - c - 16);
      for (index_t r = 0; r < 32; ++r) {
        const bool there = r < x.n_rows;
        const float* row = x.rows + (there ? r : 0) * x.ld + c;
        words part[Parts];
        simd::amx::split(simd::amx::load_lanes(row, there ? low : 0),
                         simd::amx::load_lanes(row + 16, there ? high : 0), part);
#pragma GCC unroll 3
        for (int p = 0; p < Parts; ++p) simd::amx::store(out + p * part_size + r * 32, part[p]);
      }
    }
  }

  /// Q: out [steps][Parts][2][16 pairs][16 queries][2]
  ATTN_AMX_FUNCTION static void queries(const row_block& operands, std::uint16_t* out) noexcept {
    const row_block x = operands;
    const floats factor = simd::amx::fill(x.factor);
    for (index_t c = 0; c < x.columns; c += 32) {
      const auto low = simd::amx::first_lanes(x.columns - c),
                 high = simd::amx::first_lanes(x.columns - c - 16);
      for (index_t half = 0; half < 2; ++half) {
        words tile[Parts][16];
        for (index_t i = 0; i < 16; ++i) {
          const index_t r = half * 16 + i;
          const bool there = r < x.n_rows;
          const float* row = x.rows + (there ? r : 0) * x.ld + c;
          words part[Parts];
          simd::amx::split(
              simd::amx::multiply(simd::amx::load_lanes(row, there ? low : 0), factor),
              simd::amx::multiply(simd::amx::load_lanes(row + 16, there ? high : 0), factor), part);
#pragma GCC unroll 3
          for (int p = 0; p < Parts; ++p) tile[p][i] = part[p];
        }
        store_transposed(tile, out + half * simd::amx::tile_halves);
      }
      out += Parts * part_size;
    }
  }

  /// V: one chunk of each panel of 32 dims, panels `panel_stride` apart:
  /// out [Parts][2][16 dims][16 pairs of keys][2]
  ATTN_AMX_FUNCTION static void values(const row_block& operands, std::uint16_t* out,
                                       index_t panel_stride) noexcept {
    const row_block x = operands;
    for (index_t c = 0; c < (x.columns + 31) / 32 * 32; c += 16) {
      const auto lanes = simd::amx::first_lanes(x.columns - c);
      words tile[Parts][16];
      for (index_t t = 0; t < 16; ++t) {
        const bool even = 2 * t < x.n_rows, odd = 2 * t + 1 < x.n_rows;
        const float* row = x.rows + c;
        words part[Parts];
        simd::amx::split(simd::amx::load_lanes(row + (even ? 2 * t : 0) * x.ld, even ? lanes : 0),
                         simd::amx::load_lanes(row + (odd ? 2 * t + 1 : 0) * x.ld, odd ? lanes : 0),
                         part);
#pragma GCC unroll 3
        for (int p = 0; p < Parts; ++p) tile[p][t] = part[p];
      }
      store_transposed(tile, out + c / 32 * panel_stride + c / 16 % 2 * simd::amx::tile_halves);
    }
  }

 private:
  ATTN_AMX_INLINE static void store_transposed(words (&tile)[Parts][16],
                                               std::uint16_t* out) noexcept {
#pragma GCC unroll 3
    for (int p = 0; p < Parts; ++p) {
      simd::amx::transpose(tile[p]);
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) simd::amx::store(out + p * part_size + r * 32, tile[p][r]);
    }
  }
};

/// dst[r][c] = factor[r] · o[c][r] for r < n_rows, c < columns; o is [columns][32].
template <class Arch>
ATTN_AMX_FUNCTION void write_rows(const float* o, const float* factor, index_t n_rows,
                                  index_t columns, float* dst, index_t ld) noexcept {
  for (index_t r0 = 0; r0 < n_rows; r0 += 16) {
    const floats f = simd::amx::load(factor + r0);
    const index_t rows = n_rows - r0 < 16 ? n_rows - r0 : 16;
    for (index_t c = 0; c < columns; c += 16) {
      words tile[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        tile[i] =
            simd::amx::as_words(simd::amx::multiply(simd::amx::load(o + (c + i) * 32 + r0), f));
      }
      simd::amx::transpose(tile);
      const auto lanes = simd::amx::first_lanes(columns - c);
#pragma GCC unroll 16
      for (index_t r = 0; r < 16; ++r) {
        if (r >= rows) break;
        simd::amx::store_lanes(dst + (r0 + r) * ld + c, simd::amx::as_floats(tile[r]), lanes);
      }
    }
  }
}

}  // namespace attn::detail::amx

#endif  // ATTN_HAS_AMX
