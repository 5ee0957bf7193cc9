// SPDX-License-Identifier: MIT
//
// Rows for finding directions and sides of a cut: 16-bit integers and a power of two per row.
//
//     x[i][c] ≈ value[i][c] · unit[i]
//
// A cut asks on which side of a plane a row lies, and for that 14 bits are plenty: on bench/data
// mass and error are what they are with floats. (With 12 the error of layer 0 rose by 1%: a few
// coordinates there are much larger than the others.) Sums of integers are exact and so the same on
// every platform. With floats that takes products and sums in double, and twice the memory:
// bisection took 2.2 to 3.2 times as long.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include <attn/detail/packing.hpp>
#include <attn/detail/scratch_carver.hpp>
#include <attn/simd/int16.hpp>
#include <attn/simd/reduce.hpp>
#include <attn/view.hpp>

namespace attn::detail {

/// Numbers per row of integers.
[[nodiscard]] constexpr index_t smyrf_coarse_stride(index_t d) noexcept {
  return (d + simd::int16_group - 1) / simd::int16_group * simd::int16_group;
}

[[nodiscard]] constexpr float smyrf_power_of_two(int e) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(e + 127) << 23);  // |e| ≤ 126
}

/// Exponents of numbers begin here: 2^(14 − e) has to be a float.
inline constexpr int smyrf_smallest_exponent = -100;

/// The e with |x[c]| < 2^e for all c, smyrf_smallest_exponent at least; false if there is inf or
/// NaN.
template <class Arch>
[[nodiscard]] bool smyrf_exponent(const float* x, index_t d, int& e) noexcept {
  using B = simd::batch<float, Arch>;
  constexpr index_t W = simd::width<float, Arch>;
  B largest(0.0f), bad(0.0f);
  index_t c = 0;
  for (; c + W <= d; c += W) {
    const B v = simd::load_unaligned<float, Arch>(x + c);
    largest = xsimd::max(largest, xsimd::abs(v));
    bad = simd::multiply_add(v, B(0.0f), bad);
  }
  float top = simd::max(largest), bad_tail = 0;
  for (; c < d; ++c) top = std::max(top, std::abs(x[c])), bad_tail += x[c] * 0.0f;
  e = smyrf_smallest_exponent;
  if (!xsimd::all(bad == B(0.0f)) || bad_tail != bad_tail) return false;
  if (top > 0x1p-100f) e = static_cast<int>(std::bit_cast<std::uint32_t>(top) >> 23) - 126;
  return true;
}

/// x as integers, x[c] ≈ out[c] · 2^u; returns u. e is the exponent of x.
///
/// Products of two rows fit 31 bits: Σ x² is 2^30 at most, but for what rounding adds. A first
/// rounding, to numbers that are small enough whatever the row, tells how much larger they may be.
template <class Arch>
[[nodiscard]] int smyrf_coarsen(const float* x, int e, index_t d, std::int16_t* out) noexcept {
  constexpr int most = 14;
  const int log2_d =
      d > 1 ? static_cast<int>(std::bit_width(static_cast<std::uint64_t>(d - 1))) : 0;
  const int few = std::clamp((30 - log2_d) / 2, 1, most);
  simd::to_int16<Arch>(x, smyrf_power_of_two(few - e), d, out);
  std::int32_t square[4];
  simd::integer_dots<Arch>({out}, out, smyrf_coarse_stride(d), square);
  const int spare =
      (30 - static_cast<int>(std::bit_width(static_cast<std::uint32_t>(square[0])))) / 2;
  const int bits = std::clamp(few + spare, few, most);
  if (bits > few) simd::to_int16<Arch>(x, smyrf_power_of_two(bits - e), d, out);
  return e - bits;
}

/// The rows of one head. Units are relative to the largest of them: at most 1.
class smyrf_coarse_rows {
 public:
  void carve(scratch_carver& memory, index_t n, index_t d) noexcept {
    d_ = d, stride_ = smyrf_coarse_stride(d);
    value_ = memory.take<std::int16_t>(n * stride_);
    unit_ = memory.take<float>(n);
    row_ = memory.take<float>(d);
  }

  /// Rows [0, n) of a head, with the exponents of units in place of units; returns the largest.
  template <class Arch>
  [[nodiscard]] int load(const row_source<float>& source, index_t n) noexcept {
    int highest = 2 * smyrf_smallest_exponent;
    for (index_t i = 0; i < n; ++i) {
      const float* x = row_;
      if (source.direct != nullptr)
        x = source.direct + i * source.row_stride;
      else
        source.read(i, 1, d_, row_, d_);
      int e = 0;
      if (!smyrf_exponent<Arch>(x, d_, e)) {
        std::fill_n(value_ + i * stride_, stride_, std::int16_t{0});
        unit_[i] = std::numeric_limits<float>::quiet_NaN();
        continue;
      }
      const int u = smyrf_coarsen<Arch>(x, e, d_, value_ + i * stride_);
      unit_[i] = static_cast<float>(u);
      highest = std::max(highest, u);
    }
    return highest;
  }

  /// Units, where 1 stands for the exponent `highest`.
  void set_units(index_t n, int highest) noexcept {
    for (index_t i = 0; i < n; ++i) {
      if (!is_finite(i)) continue;
      const int u = static_cast<int>(unit_[i]) - highest;
      unit_[i] = smyrf_power_of_two(std::max(u, smyrf_smallest_exponent));
    }
  }

  [[nodiscard]] const std::int16_t* operator()(index_t i) const noexcept {
    return value_ + i * stride_;
  }
  /// NaN if the row is not finite; its integers are 0 then.
  [[nodiscard]] float unit(index_t i) const noexcept { return unit_[i]; }
  [[nodiscard]] bool is_finite(index_t i) const noexcept { return unit_[i] == unit_[i]; }

 private:
  index_t d_ = 0, stride_ = 0;
  std::int16_t* value_ = nullptr;
  float *unit_ = nullptr, *row_ = nullptr;
};

}  // namespace attn::detail
