// SPDX-License-Identifier: MIT
//
// Sorting by score for the top-k kernels: best first, equal scores by index, NaN last.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include <attn/simd/batch.hpp>
#include <attn/view.hpp>

namespace attn::detail {

// A score as an unsigned number that grows as the rank gets worse, and what has that score.
struct ranked {
  std::uint64_t key;
  index_t node;
};

inline constexpr std::uint64_t nan_key = std::numeric_limits<std::uint64_t>::max();

// The bits of a float or double are ordered like the number if it is positive and in reverse if it
// is negative.
template <class F>
[[nodiscard]] constexpr std::uint64_t rank_key(F v) noexcept {
  using bits_t = std::conditional_t<sizeof(F) == 4, std::uint32_t, std::uint64_t>;
  constexpr bits_t positive = std::numeric_limits<bits_t>::max() >> 1;
  const auto bits = std::bit_cast<bits_t>(v + F(0));  // −0 is 0
  const std::uint64_t key = bits > positive ? bits : bits ^ positive;
  return v != v ? nan_key : key;
}

// What counts as not there, as NaN does once it has its rank.
inline constexpr double absent_score = -std::numeric_limits<double>::infinity();
[[nodiscard]] constexpr double without_nan(double v) noexcept { return v != v ? absent_score : v; }

// Whole vectors: up to W − 1 elements behind are read and overwritten.
template <class Arch, class F>
ATTN_INLINE void copy_vectors(const F* from, index_t n, F* to) noexcept {
  // Not a call of memcpy: most copies are a few vectors.
  for (index_t i = 0; i < n; i += simd::width<F, Arch>) {
    simd::load_unaligned<F, Arch>(from + i).store_unaligned(to + i);
  }
}

// order[r] = index of the score of rank r, by counting for each score those before it. False if
// scores are equal or NaN, which have no rank of their own: then `order` is unfinished. Scores are
// aligned, and overwritten behind n to a whole vector.
template <class F, class Arch>
inline constexpr index_t most_counted = 4 * simd::width<F, Arch>;
template <class Arch, class F>
[[nodiscard]] bool rank_by_counting(F* score, index_t n, std::uint32_t* order) noexcept {
  using B = simd::batch<F, Arch>;
  constexpr index_t W = simd::width<F, Arch>, most = most_counted<F, Arch>;
  static_assert(most <= 64);
  alignas(64) F before[most];
  const index_t whole = (n + W - 1) / W * W;
  for (index_t i = n; i < whole; ++i) score[i] = -std::numeric_limits<F>::infinity();
  for (index_t i = 0; i < n; i += W) {
    const B v = simd::load<F, Arch>(score + i), one(F(1)), zero(F(0));
    B even = zero, odd = zero;  // one sum would wait for itself
    for (index_t j = 0; j < n; j += 2) {
      even += xsimd::select(B(score[j]) > v, one, zero);
      odd += xsimd::select(B(score[j + 1]) > v, one, zero);
    }
    (even + odd).store_aligned(before + i);
  }
  std::uint64_t taken = 0;
  for (index_t i = 0; i < n; ++i) {
    const auto r = static_cast<std::uint32_t>(before[i]);
    taken |= std::uint64_t{1} << r;
    order[r] = static_cast<std::uint32_t>(i);
  }
  return std::popcount(taken) == n;
}

// Scores [n] that are almost in order, with the order of what they belong to: by insertion, equal
// ones staying as they are. False, with both a permutation of what they were, after more than
// `budget` moves.
template <class Arch>
[[nodiscard]] bool insert_scores(double* score, std::uint32_t* order, index_t n,
                                 index_t budget) noexcept {
  constexpr index_t W = simd::width<double, Arch>;
  for (index_t q = 1; q < n;) {
    if (q + W <= n && xsimd::all(simd::load_unaligned<double, Arch>(score + q) <=
                                 simd::load_unaligned<double, Arch>(score + q - 1))) {
      q += W;
      continue;
    }
    for (const index_t end = std::min(q + W, n); q < end; ++q) {
      const double v = score[q];
      if (v <= score[q - 1]) continue;
      const std::uint32_t i = order[q];
      index_t j = q;
      for (; j > 0 && v > score[j - 1]; --j) score[j] = score[j - 1], order[j] = order[j - 1];
      score[j] = v, order[j] = i;
      budget -= q - j;
    }
    if (budget < 0) return false;
  }
  return true;
}

// The best score and the worst that is there (not −inf, not NaN), and whether all are.
template <class F>
struct score_range {
  F best = -std::numeric_limits<F>::infinity(), worst = std::numeric_limits<F>::infinity();
  bool all = true;
};
template <class Arch, class F>
[[nodiscard]] score_range<F> range_of_scores(const F* score, index_t n) noexcept {
  using B = simd::batch<F, Arch>;
  constexpr index_t W = simd::width<F, Arch>;
  score_range<F> r;
  const F absent = r.best;
  const B lowest(absent), highest(r.worst);
  B best = lowest, worst = highest;
  index_t i = 0;
  auto all = lowest == lowest;
  for (; i + W <= n; i += W) {
    const B v = simd::load_unaligned<F, Arch>(score + i);
    const auto there = v > lowest;
    all = all & there;
    best = xsimd::select(v > best, v, best);
    const B low = xsimd::select(there, v, highest);
    worst = xsimd::select(low < worst, low, worst);
  }
  r.all = xsimd::all(all);
  alignas(64) F lanes[2 * W];
  best.store_aligned(lanes);
  worst.store_aligned(lanes + W);
  for (index_t l = 0; l < W; ++l) {
    r.best = std::max(r.best, lanes[l]);
    r.worst = std::min(r.worst, lanes[W + l]);
  }
  for (; i < n; ++i) {
    if (!(score[i] > absent)) {
      r.all = false;
      continue;
    }
    r.best = std::max(r.best, score[i]);
    r.worst = std::min(r.worst, score[i]);
  }
  r.worst = std::min(r.worst, r.best);  // none is there
  return r;
}

template <class Arch>
[[nodiscard]] bool has_equal_neighbours(const double* score, index_t n) noexcept {
  constexpr index_t W = simd::width<double, Arch>;
  index_t q = 1;
  for (; q + W <= n; q += W) {
    if (xsimd::any(simd::load_unaligned<double, Arch>(score + q) ==
                   simd::load_unaligned<double, Arch>(score + q - 1))) {
      return true;
    }
  }
  for (; q < n; ++q) {
    if (score[q] == score[q - 1]) return true;
  }
  return false;
}

// What sorting n scores needs besides them.
struct rank_scratch {
  static constexpr int most_bits = 12, digits = 2;
  std::uint64_t* words;  // [n]
  std::uint64_t* other;  // [n]
  std::uint32_t* count;  // [digits << most_bits]
};

template <class F>
using rank_bits = std::conditional_t<sizeof(F) == 4, std::uint32_t, std::uint64_t>;

// key [n] = rank_key − best. −inf and NaN come behind the worst, at `range`, for often they are far
// from the rest.
template <class Arch, class F>
void keys_of_scores(const F* score, index_t n, const score_range<F>& scores, rank_bits<F> best,
                    rank_bits<F> range, rank_bits<F>* key) noexcept {
  using B = simd::batch<F, Arch>;
  using bits_t = simd::bits_t<F>;
  using I = simd::batch<bits_t, Arch>;
  constexpr index_t W = simd::width<F, Arch>;
  constexpr bits_t positive = std::numeric_limits<bits_t>::max();
  const B zero(F(0)), all_but_sign = simd::from_bits<F, Arch>(I(positive));
  index_t i = 0;
  for (; i + W <= n; i += W) {
    const B v = simd::load_unaligned<F, Arch>(score + i) + zero;  // −0 is 0
    const I flips = simd::to_bits<F, Arch>(xsimd::select(v < zero, zero, all_but_sign));
    const I delta = (simd::to_bits<F, Arch>(v) ^ flips) - I(static_cast<bits_t>(best));
    delta.store_unaligned(reinterpret_cast<bits_t*>(key + i));
  }
  for (; i < n; ++i) key[i] = static_cast<rank_bits<F>>(rank_key(score[i])) - best;
  if (scores.all) return;
  for (i = 0; i < n; ++i) {
    if (!(score[i] > -std::numeric_limits<F>::infinity())) key[i] = range - (score[i] == score[i]);
  }
}

// order[r] = index of the score of rank r, sorted[r] = that score, −inf for NaN. n < 2^32.
//
// A radix sort by as many of the upper bits as tell most of n apart, and insertion.
template <class Arch, class F>
void rank_scores(const F* score, index_t n, double* sorted, std::uint32_t* order,
                 const rank_scratch& s) noexcept {
  // 1. Keys, and how often each digit of their upper bits occurs.
  const score_range<F> scores = range_of_scores<Arch>(score, n);
  const auto best = static_cast<rank_bits<F>>(rank_key(scores.best));
  const auto range = static_cast<rank_bits<F>>(rank_key(scores.worst) - best + 2);
  auto* key = reinterpret_cast<rank_bits<F>*>(s.words);
  keys_of_scores<Arch>(score, n, scores, best, range, key);
  // Scores of a smooth density fill a few of the exponents: 6 bits more than n has.
  const auto size = static_cast<int>(std::bit_width(static_cast<std::uint64_t>(n)));
  const int bits = std::min(rank_scratch::most_bits, (size + 6) / rank_scratch::digits);
  const int lost =
      std::max(0, static_cast<int>(std::bit_width(range)) - rank_scratch::digits * bits);
  const std::size_t values = std::size_t{1} << bits;
  const std::uint64_t mask = values - 1;
  std::uint32_t *low = s.count, *high = s.count + values;
  std::fill_n(low, 2 * values, std::uint32_t{0});
  for (index_t i = 0; i < n; ++i) {
    const std::uint64_t upper = key[i] >> lost;
    ++low[upper & mask];
    ++high[upper >> bits];
  }
  std::uint32_t low_sum = 0, high_sum = 0;
  for (std::size_t value = 0; value < values; ++value) {
    low_sum += std::exchange(low[value], low_sum);
    high_sum += std::exchange(high[value], high_sum);
  }

  // 2. By the lower digit, then by the upper one to their ranks.
  constexpr int index_bits = 32;
  for (index_t i = 0; i < n; ++i) {
    const std::uint64_t upper = key[i] >> lost;
    s.other[low[upper & mask]++] = upper >> bits << index_bits | static_cast<std::uint64_t>(i);
  }
  for (index_t i = 0; i < n; ++i) {
    const std::uint64_t word = s.other[i];
    const std::uint32_t r = high[word >> index_bits]++;
    const auto index = static_cast<std::uint32_t>(word);
    order[r] = index;
    sorted[r] = static_cast<double>(score[index]);
  }
  if (!scores.all) {
    for (index_t r = 0; r < n; ++r) sorted[r] = without_nan(sorted[r]);
  }

  // 3. What is left.
  if (!insert_scores<Arch>(sorted, order, n, 8 * n)) {
    std::sort(order, order + n, [score](std::uint32_t a, std::uint32_t z) {
      const std::uint64_t key_a = rank_key(score[a]), key_z = rank_key(score[z]);
      return key_a != key_z ? key_a < key_z : a < z;
    });
    for (index_t r = 0; r < n; ++r) {
      sorted[r] = without_nan(static_cast<double>(score[order[r]]));
    }
  } else if (!scores.all) {
    std::uint32_t* tail = order + n;
    while (tail != order && sorted[tail - order - 1] == absent_score) --tail;
    std::sort(tail, order + n, [score](std::uint32_t a, std::uint32_t z) {
      const bool a_is_nan = score[a] != score[a], z_is_nan = score[z] != score[z];
      return a_is_nan != z_is_nan ? z_is_nan : a < z;
    });
  }
}

}  // namespace attn::detail
