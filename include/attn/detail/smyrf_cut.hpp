// SPDX-License-Identifier: MIT
//
// Ranking by hash and cutting into clusters, without sorting.
//
// A cluster is a set of ranks, and nothing depends on the order inside it. So hashes go into
// buckets of equal width; a bucket that lies inside one cluster is done, and only the few that a
// boundary runs through are sorted. Two passes over the data instead of the three or more of a
// radix sort, and the members of a cluster come out in the order of their positions, which keeps
// memory access and masks regular.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include <attn/simd/batch.hpp>
#include <attn/view.hpp>

namespace attn::detail {

/// n rounded up to whole vectors of doubles: what an array of hashes has room for.
template <class Arch>
[[nodiscard]] constexpr index_t smyrf_padded(index_t n) noexcept {
  constexpr index_t W = simd::width<double, Arch>;
  return (n + W - 1) / W * W;
}

/// A member of a bucket that has to be sorted.
struct smyrf_ranked {
  double hash;
  index_t item;
  index_t bucket;
};

/// Scratch of a cut of up to n items into up to `parts` parts.
struct smyrf_cut_scratch {
  double* bucket;           // [n]  2^52 + bucket
  smyrf_ranked* straddler;  // [n]
  index_t* count;           // [max_buckets + 2]
  index_t* part_of;         // [max_buckets + 2 + parts]
  index_t* next;            // [parts]

  static constexpr index_t max_buckets = 8192;

  [[nodiscard]] index_t bucket_of(index_t i) const noexcept {
    return static_cast<index_t>(std::bit_cast<std::uint64_t>(bucket[i]) & 0xffffffffu);
  }
  void set_bucket(index_t i, index_t to) const noexcept {
    bucket[i] = 0x1p52 + static_cast<double>(to);
  }

  template <class Carver>
  [[nodiscard]] static smyrf_cut_scratch carve(Carver& memory, index_t n, index_t parts) noexcept {
    smyrf_cut_scratch s{};
    s.bucket = memory.template take<double>(n + 8);  // whole vectors
    s.straddler = memory.template take<smyrf_ranked>(n);
    s.count = memory.template take<index_t>(max_buckets + 2);
    s.part_of = memory.template take<index_t>(max_buckets + 2 + parts);
    s.next = memory.template take<index_t>(parts);
    return s;
  }
};

/// Ranks items 0 .. n − 1 by (hash, item), NaN after all numbers, and calls place(item, slot) in
/// the order of the items: the parts [begin[p], begin[p + 1]) of slots hold the ranks of the same
/// numbers, and inside a part slots ascend with the item. begin[0] = 0, begin[n_parts] = n.
/// Overwrites the rest of the last vector of hash.
template <class Arch, class Place>
void smyrf_cut(double* hash, index_t n, index_t n_parts, const index_t* begin,
               const smyrf_cut_scratch& s, const Place& place) noexcept {
  using B = simd::batch<double, Arch>;
  constexpr int W = simd::width<double, Arch>;
  constexpr double infinity = std::numeric_limits<double>::infinity();
  if (n == 0) return;
  // 1. The range of the numbers. The last vector is filled up: all items go through the same
  //    instructions, for a fused multiply-add in some of them would not be monotone over all.
  const index_t padded = smyrf_padded<Arch>(n);
  std::fill(hash + n, hash + padded, std::numeric_limits<double>::quiet_NaN());
  B low(infinity), high(-infinity);
  for (index_t i = 0; i < padded; i += W) {
    const B h = simd::load<double, Arch>(hash + i);
    low = xsimd::select(h < low, h, low);
    high = xsimd::select(h > high, h, high);
  }
  alignas(64) double lows[W], highs[W];
  low.store_aligned(lows), high.store_aligned(highs);
  const double lowest = *std::min_element(lows, lows + W);
  const double highest = *std::max_element(highs, highs + W);

  // 2. Buckets of equal width, the last one for NaN. 2^52 is added: the integer nearest to a small
  //    number then stands in the low bits of the sum.
  const index_t n_buckets = std::clamp<index_t>(n / 2, 16, smyrf_cut_scratch::max_buckets);
  const double range = highest > lowest ? highest - lowest : infinity;
  const B scale(static_cast<double>(n_buckets - 1) / range), base(lowest), magic(0x1p52);
  const B of_nan(static_cast<double>(n_buckets));
  for (index_t i = 0; i < padded; i += W) {
    const B at = (simd::load<double, Arch>(hash + i) - base) * scale;
    const B bucket = xsimd::select(at == at, at, of_nan) + magic;
    bucket.store_aligned(s.bucket + i);
  }
  std::fill_n(s.count, n_buckets + 1, index_t{0});
  for (index_t i = 0; i < n; ++i) ++s.count[s.bucket_of(i)];

  // 3. The part of each bucket, or the place of its first straddler.
  index_t part = 0, rank = 0, n_straddlers = 0;
  for (index_t bucket = 0; bucket <= n_buckets; ++bucket) {
    const index_t count = s.count[bucket];
    s.count[bucket] = rank;  // from here on: the first rank of the bucket
    rank += count;
    s.part_of[bucket] = part;
    if (rank < begin[part + 1]) continue;
    if (rank > begin[part + 1]) {
      s.part_of[bucket] = -1 - n_straddlers;
      n_straddlers += count;
    }
    while (part + 1 < n_parts && rank >= begin[part + 1]) ++part;
  }
  // 4. Straddlers by (hash, item); each gets a bucket of its part's own.
  if (n_straddlers > 0) {
    const index_t own = n_buckets + 1;
    for (index_t p = 0; p < n_parts; ++p) s.part_of[own + p] = p;
    for (index_t i = 0; i < n; ++i) {
      index_t& at = s.part_of[s.bucket_of(i)];  // −1 − place of the next one
      if (at >= 0) continue;
      s.straddler[-1 - at] = {hash[i], i, s.bucket_of(i)};
      --at;
    }
    const auto before = [](const smyrf_ranked& a, const smyrf_ranked& b) {
      return a.hash != b.hash && a.hash == a.hash && b.hash == b.hash ? a.hash < b.hash
                                                                      : a.item < b.item;
    };
    for (index_t start = 0; start < n_straddlers;) {
      const index_t bucket = s.straddler[start].bucket;
      const index_t end = -1 - s.part_of[bucket];
      std::sort(s.straddler + start, s.straddler + end, before);
      index_t r = s.count[bucket];
      index_t p = std::upper_bound(begin, begin + n_parts, r) - begin - 1;
      for (index_t i = start; i < end; ++i, ++r) {
        while (r >= begin[p + 1]) ++p;
        s.set_bucket(s.straddler[i].item, own + p);
      }
      start = end;
    }
  }

  // 5. Slots, in the order of the items.
  std::copy_n(begin, n_parts, s.next);
  for (index_t i = 0; i < n; ++i) place(i, s.next[s.part_of[s.bucket_of(i)]]++);
}

}  // namespace attn::detail
