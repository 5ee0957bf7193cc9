// SPDX-License-Identifier: MIT
//
// A set of rows cut in two by rank of a hash.
//
// What smyrf_cut.hpp does for many parts: hashes go into buckets, and only the one that the cut
// runs through is looked at. With two parts the member at the cut is all that has to be known.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include <attn/detail/scratch_carver.hpp>
#include <attn/simd/batch.hpp>
#include <attn/view.hpp>

namespace attn::detail {

/// A place in the order by (hash, item).
struct smyrf_threshold {
  float hash;
  index_t item;
  [[nodiscard]] bool is_above(float h, index_t i) const noexcept {
    return (h < hash) | ((h == hash) & (i < item));
  }
};

class smyrf_halving {
  static constexpr index_t most_buckets = 1024;

 public:
  /// For up to n items.
  void carve(scratch_carver& memory, index_t n) noexcept {
    hash = memory.take<float>(n + 64);  // whole vectors
    bucket_ = memory.take<float>(n + 64);
    member_ = memory.take<index_t>(n + 1);
    count_ = memory.take<index_t>(most_buckets + 1);
  }

  /// What has `rank` items of hash[0, n) before it by (hash, item), 0 ≤ rank < n. Hashes are
  /// numbers or +∞. Overwrites the rest of the last vector of hash.
  template <class Arch>
  [[nodiscard]] smyrf_threshold find(index_t n, index_t rank) const noexcept {
    using B = simd::batch<float, Arch>;
    constexpr index_t W = simd::width<float, Arch>;
    constexpr float infinity = std::numeric_limits<float>::infinity();
    // 1. The range of the numbers.
    const index_t padded = (n + W - 1) / W * W;
    std::fill(hash + n, hash + padded, infinity);
    B low(infinity), high(-infinity);
    for (index_t i = 0; i < padded; i += W) {
      const B h = simd::load<float, Arch>(hash + i);
      low = xsimd::min(low, h);
      high = xsimd::max(high, xsimd::select(h < B(infinity), h, high));
    }
    alignas(64) float lows[W], highs[W];
    low.store_aligned(lows), high.store_aligned(highs);
    const float lowest = *std::min_element(lows, lows + W);
    const float highest = *std::max_element(highs, highs + W);
    // 2. Buckets of equal width, the last one for +∞. 2^23 is added: the integer nearest to a small
    //    number then stands in the low bits of the sum.
    const index_t n_buckets = std::clamp<index_t>(n / 2, 16, most_buckets);
    const float range = highest > lowest ? highest - lowest : 1.0f;
    const float first = lowest < infinity ? lowest : 0.0f;
    const B scale(static_cast<float>(n_buckets - 1) / range), base(first);
    const B last(static_cast<float>(n_buckets)), magic(0x1p23f);
    for (index_t i = 0; i < padded; i += W) {
      const B at = (simd::load<float, Arch>(hash + i) - base) * scale;
      (xsimd::min(at, last) + magic).store_aligned(bucket_ + i);
    }
    std::fill_n(count_, n_buckets + 1, index_t{0});
    for (index_t i = 0; i < n; ++i) ++count_[bucket_of(i)];
    // 3. The bucket that the cut runs through, and its members.
    index_t bucket = 0, before = 0;
    while (before + count_[bucket] <= rank) before += count_[bucket++];
    const float wanted = 0x1p23f + static_cast<float>(bucket);
    index_t n_members = 0;
    for (index_t i = 0; i < n; ++i) {
      member_[n_members] = i;
      n_members += bucket_[i] == wanted;
    }
    index_t* const at = member_ + (rank - before);
    std::nth_element(member_, at, member_ + n_members, [&](index_t i, index_t j) {
      return hash[i] != hash[j] ? hash[i] < hash[j] : i < j;
    });
    return {hash[*at], *at};
  }

  /// Moves those of list[0, n) that are above the threshold by hash[0, n) to the front; both parts
  /// keep their order.
  void split(index_t* list, index_t n, const smyrf_threshold& cut) const noexcept {
    index_t n_above = 0, n_below = 0;
    for (index_t i = 0; i < n; ++i) {
      const index_t item = list[i];
      const bool above = cut.is_above(hash[i], i);
      list[n_above] = item, member_[n_below] = item;
      n_above += above, n_below += !above;
    }
    std::copy_n(member_, n_below, list + n_above);
  }

  float* hash = nullptr;

 private:
  [[nodiscard]] index_t bucket_of(index_t i) const noexcept {
    return static_cast<index_t>(std::bit_cast<std::uint32_t>(bucket_[i]) & 0x7fffffu);
  }

  float* bucket_ = nullptr;    // 2^23 + bucket
  index_t* member_ = nullptr;  // of the bucket; then those below the cut
  index_t* count_ = nullptr;
};

}  // namespace attn::detail
