// SPDX-License-Identifier: MIT
//
// Sorting by score for the top-k kernels: best first, equal scores by the lower index, NaN last.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
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

// Elements already nearly in order cost a few moves each; where they do not, the sort gives up
// after `budget` moves, leaving a permutation of what it was given, and returns false.
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

// Stable, by the upper 33 bits of the keys (sign, exponent, 21 bits of mantissa), 11 at a time.
// The result is in `items`.
template <class Arch>
void radix_sort_upper(ranked* items, ranked* other, index_t n) noexcept {
  constexpr int digits = 3, digit_bits = 11, lowest_bit = 64 - digits * digit_bits;
  constexpr std::uint64_t mask = (1u << digit_bits) - 1;
  const auto digit_of = [](std::uint64_t key, int digit) {
    return static_cast<std::size_t>(key >> (lowest_bit + digit * digit_bits) & mask);
  };

  // 1. How often each digit has each value.
  std::array<std::array<index_t, mask + 1>, digits> begin{};
  for (index_t i = 0; i < n; ++i) {
    for (int digit = 0; digit < digits; ++digit) {
      ++begin[static_cast<std::size_t>(digit)][digit_of(items[i].key, digit)];
    }
  }
  // 2. From the lowest digit up: to where its value begins. A digit that is the same in all keys
  //    changes nothing.
  ranked* from = items;
  ranked* to = other;
  for (int digit = 0; digit < digits; ++digit) {
    auto& at = begin[static_cast<std::size_t>(digit)];
    if (at[digit_of(from[0].key, digit)] == n) continue;
    index_t sum = 0;
    for (index_t& count : at) sum += std::exchange(count, sum);
    for (index_t i = 0; i < n; ++i) to[at[digit_of(from[i].key, digit)]++] = from[i];
    std::swap(from, to);
  }
  if (from != items) std::copy(from, from + n, items);
}

// Best score first; equal scores by `position[node]`. `other` is as large as `items`.
template <class Arch>
void rank_sort(ranked* items, ranked* other, index_t n, const index_t* position) noexcept {
  const auto before = [position](const ranked& a, const ranked& b) {
    return a.key != b.key ? a.key < b.key : position[a.node] < position[b.node];
  };
  // Rounds leave the survivors almost sorted, and 21 bits of mantissa tell most scores apart.
  if (insertion_sort<Arch>(items, n, n, before)) return;
  if (n >= 256) {
    radix_sort_upper<Arch>(items, other, n);
    if (insertion_sort<Arch>(items, n, 4 * n, before)) return;
  }
  std::sort(items, items + n, before);
}

}  // namespace attn::detail
