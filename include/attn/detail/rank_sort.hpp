// SPDX-License-Identifier: MIT
//
// Sorting by score for the top-k kernels: best first, NaN last.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

#include <attn/view.hpp>

namespace attn::detail {

// A score as an unsigned number that grows as the rank gets worse, and what has that score.
struct ranked {
  std::uint64_t key;
  index_t node;
};

inline constexpr std::uint64_t nan_key = std::numeric_limits<std::uint64_t>::max();

// The bits of a double are ordered like the number if it is positive and in reverse if negative.
[[nodiscard]] constexpr std::uint64_t rank_key(double v) noexcept {
  if (v != v) return nan_key;
  const auto bits = std::bit_cast<std::uint64_t>(v + 0.0);  // −0 is 0
  return bits >> 63 ? bits : ~bits & (nan_key >> 1);
}

// The score of a key. NaN counts as −inf.
[[nodiscard]] constexpr double ranked_score(std::uint64_t key) noexcept {
  if (key == nan_key) return -std::numeric_limits<double>::infinity();
  return std::bit_cast<double>(key >> 63 ? key : ~key & (nan_key >> 1));
}

// Gives up after `budget` moves, leaving a permutation of what it was given, and returns false.
template <class Arch, class Before>
[[nodiscard]] bool insertion_sort(ranked* items, index_t n, index_t budget,
                                  const Before& before) noexcept {
  for (index_t i = 1; i < n; ++i) {
    const ranked x = items[i];
    index_t j = i;
    for (; j > 0 && before(x, items[j - 1]); --j) items[j] = items[j - 1];
    items[j] = x;
    budget -= i - j;
    if (budget < 0) return false;
  }
  return true;
}

// Stable, by the upper bits of those in which the keys differ: 2 digits of them, 4 where 2 would
// not tell most scores apart. An even number of passes leaves the result in `items`.
template <class Arch>
void radix_sort_upper(ranked* items, ranked* other, index_t n) noexcept {
  constexpr int most_bits = 11, most_digits = 4;
  const auto size = static_cast<int>(std::bit_width(static_cast<std::uint64_t>(n)));
  const int digits = size > 15 ? most_digits : 2;
  const int bits = std::min(most_bits, (size + 5) / 2);  // counts are cleared: no more than needed
  const std::size_t values = std::size_t{1} << bits;

  // 1. The range of the keys: scores in [0, 1) leave half of the exponents and all signs unused.
  std::uint64_t low = items[0].key, high = low;
  for (index_t i = 1; i < n; ++i) {
    low = std::min(low, items[i].key);
    high = std::max(high, items[i].key);
  }
  const int shift = std::max(0, static_cast<int>(std::bit_width(high - low)) - digits * bits);
  const auto digit_of = [=](std::uint64_t key, int digit) {
    return static_cast<std::size_t>((key - low) >> (shift + digit * bits)) & (values - 1);
  };

  // 2. How often each digit has each value.
  std::array<std::array<index_t, 1 << most_bits>, most_digits> begin;
  for (int digit = 0; digit < digits; ++digit) {
    std::fill_n(begin[static_cast<std::size_t>(digit)].data(), values, index_t{0});
  }
  for (index_t i = 0; i < n; ++i) {
    for (int digit = 0; digit < digits; ++digit) {
      ++begin[static_cast<std::size_t>(digit)][digit_of(items[i].key, digit)];
    }
  }

  // 3. From the lowest digit up, each item to where the items of its value begin.
  for (int digit = 0; digit < digits; ++digit) {
    index_t* at = begin[static_cast<std::size_t>(digit)].data();
    index_t sum = 0;
    for (std::size_t value = 0; value < values; ++value) sum += std::exchange(at[value], sum);
    for (index_t i = 0; i < n; ++i) other[at[digit_of(items[i].key, digit)]++] = items[i];
    std::swap(items, other);
  }
}

// In the order of `before`, which is that of the keys with ties broken. `other` is as large as
// `items`.
template <class Arch, class Before>
void rank_sort(ranked* items, ranked* other, index_t n, const Before& before) noexcept {
  if (n < 24) {  // the counts of a radix sort cost more than they save
    (void)insertion_sort<Arch>(items, n, n * n, before);
    return;
  }
  if (insertion_sort<Arch>(items, n, 0, before)) return;  // nothing out of order
  radix_sort_upper<Arch>(items, other, n);
  if (!insertion_sort<Arch>(items, n, 8 * n, before)) std::sort(items, items + n, before);
}

}  // namespace attn::detail
