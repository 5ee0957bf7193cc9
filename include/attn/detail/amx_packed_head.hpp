// SPDX-License-Identifier: MIT
//
// Keys and values of one head as parts of bfloat16, each chunk split when a row first needs it, and
// which of their numbers tiles cannot take.
#pragma once

#include <algorithm>
#include <cmath>

#include <attn/detail/amx_engine.hpp>
#include <attn/detail/dense_problem.hpp>
#include <attn/detail/packing.hpp>
#include <attn/detail/scratch_carver.hpp>

#if defined(ATTN_HAS_AMX)

namespace attn::detail::amx {

inline constexpr index_t block_chunks = 4, block_keys = block_chunks * chunk_keys;
/// o grows like l: rows that meet larger values than this might overflow where their average does
/// not, so they are redone.
inline constexpr float largest_value = 0x1p103f;

/// Up to 32 rows of `source` as floats, in place or in `buffer` [32][columns]. Those that cannot be
/// split are 0 and in `bad`; or, of values, for which `holes` is given, if only infinities and NaN
/// stand in the way, these alone are 0 and the row is in `holes`.
template <class Arch>
[[nodiscard]] row_block read_rows(const row_source<float>& source, index_t first, index_t n,
                                  index_t columns, float factor, float* buffer, std::uint32_t& bad,
                                  std::uint32_t* holes = nullptr) noexcept {
  const float limit = holes == nullptr ? simd::amx::largest_split : largest_value;
  row_block x{buffer, columns, n, columns, factor, limit};
  if (source.direct != nullptr)
    x.rows = source.direct + first * source.row_stride, x.ld = source.row_stride;
  else
    source.read(first, n, columns, buffer, columns);
  std::uint32_t found = unsplittable_rows<Arch>(x);
  if (found == 0) return x;
  for (index_t r = 0; r < n && x.rows != buffer; ++r) {
    std::copy_n(x.rows + r * x.ld, columns, buffer + r * columns);
  }
  x.rows = buffer, x.ld = columns;
  if (holes != nullptr) {
    for (std::uint32_t rest = found; rest != 0; rest &= rest - 1) {
      float* row = buffer + index_t{__builtin_ctz(rest)} * columns;
      std::replace_if(
          row, row + columns, [](float y) { return !std::isfinite(y); }, 0.0f);
    }
    *holes = found;
    found = unsplittable_rows<Arch>(x);
  }
  for (std::uint32_t rest = found; rest != 0; rest &= rest - 1) {
    std::fill_n(buffer + index_t{__builtin_ctz(rest)} * columns, columns, 0.0f);
  }
  bad |= found;
  return x;
}

template <class Arch>
class packed_head {
 public:
  packed_head(const dense_problem<float>& problem, const engine& e) noexcept
      : c_(problem), e_(e), steps_((problem.d_qk + step_dims - 1) / step_dims),
        panels_((problem.d_v + step_dims - 1) / step_dims), k_size_(steps_ * e.parts_k * part_size),
        panel_stride_(block_chunks * e.parts_v * part_size) {}

  void carve(scratch_carver& memory) noexcept {
    const index_t blocks = (c_.n_kv + block_keys - 1) / block_keys;
    n_chunks_ = blocks * block_chunks;
    k_parts_ = memory.take<std::uint16_t>(n_chunks_ * k_size_);
    v_parts_ = memory.take<std::uint16_t>(blocks * panels_ * panel_stride_);
    // One block more, so that whoever looks ahead may ask.
    rows_ = memory.take<std::uint8_t>(n_chunks_ + block_chunks);
    unsplittable_ = memory.take<std::uint32_t>(n_chunks_);
    holes_ = memory.take<std::uint32_t>(n_chunks_);
    buffer_ = memory.take<float>(chunk_keys * std::max(c_.d_qk, c_.d_v));
  }

  void enter(const row_source<float>& k, const row_source<float>& v) noexcept {
    k_ = k, v_ = v;
    std::fill_n(rows_, n_chunks_, std::uint8_t{0});
  }

  /// Splits what is not yet split of a chunk, up to key `end`.
  void pack(index_t chunk, index_t end) noexcept {
    const index_t first = chunk * chunk_keys, n = std::min(chunk_keys, end - first);
    if (n <= rows_[chunk]) return;
    std::uint32_t bad = 0, holes = 0;
    e_.pack_keys(read_rows<Arch>(k_, first, n, c_.d_qk, 1, buffer_, bad),
                 k_parts_ + chunk * k_size_);
    e_.pack_values(read_rows<Arch>(v_, first, n, c_.d_v, 1, buffer_, bad, &holes), values(chunk),
                   panel_stride_);
    rows_[chunk] = static_cast<std::uint8_t>(n);
    unsplittable_[chunk] = bad;
    holes_[chunk] = holes;
  }

  [[nodiscard]] const std::uint16_t* keys(index_t chunk) const noexcept {
    return k_parts_ + chunk * k_size_;
  }
  /// The first panel; the next lie panel_stride() numbers further each.
  [[nodiscard]] std::uint16_t* values(index_t chunk) const noexcept {
    return v_parts_ + chunk / block_chunks * panels_ * panel_stride_ +
           chunk % block_chunks * e_.parts_v * part_size;
  }
  [[nodiscard]] index_t steps() const noexcept { return steps_; }
  [[nodiscard]] index_t panels() const noexcept { return panels_; }
  [[nodiscard]] index_t panel_stride() const noexcept { return panel_stride_; }

  /// Keys of a packed chunk that count as 0.
  [[nodiscard]] std::uint32_t unsplittable(index_t chunk) const noexcept {
    return unsplittable_[chunk];
  }
  /// Keys of which some values are infinite or NaN, and count as 0.
  [[nodiscard]] std::uint32_t holes(index_t chunk) const noexcept { return holes_[chunk]; }

  /// Where the keys and the values of the block that begins with `chunk` lie, as parts or, as long
  /// as they are not split, as rows; and the bytes of its keys. Addresses and no pointers: they may
  /// lie outside of their arrays, or be those of rows that cannot be read in place.
  struct places {
    std::uintptr_t keys, values;
    index_t key_bytes;
  };
  [[nodiscard]] places block_places(index_t chunk) const noexcept {
    if (rows_[chunk] != 0)
      return {address(keys(chunk), 0), address(values(chunk), 0), 2 * block_chunks * k_size_};
    const index_t row = 4 * chunk * chunk_keys;
    return {address(k_.direct, row * k_.row_stride), address(v_.direct, row * v_.row_stride),
            4 * block_keys * k_.row_stride};
  }
  [[nodiscard]] static std::uintptr_t address(const void* p, index_t bytes) noexcept {
    return reinterpret_cast<std::uintptr_t>(p) + static_cast<std::uintptr_t>(bytes);
  }

 private:
  const dense_problem<float>& c_;
  const engine& e_;
  row_source<float> k_{}, v_{};
  index_t steps_, panels_, k_size_, panel_stride_, n_chunks_ = 0;
  std::uint16_t *k_parts_ = nullptr, *v_parts_ = nullptr;
  std::uint8_t* rows_ = nullptr;  // of each chunk that are packed
  std::uint32_t *unsplittable_ = nullptr, *holes_ = nullptr;
  float* buffer_ = nullptr;  // [32][d]
};

}  // namespace attn::detail::amx

#endif  // ATTN_HAS_AMX
