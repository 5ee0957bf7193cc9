// SPDX-License-Identifier: MIT
#pragma once

#include "reference/tensor.hpp"
#include "support/element.hpp"

#include <attn/simd/batch.hpp>

#include <initializer_list>
#include <set>
#include <vector>

namespace attn_test {

using reference::index_t;

/// SIMD lanes of the arithmetic type of T.
template <class T>
inline constexpr index_t lanes = attn::simd::width<arithmetic_t<T>, attn::simd::default_arch>;

/// The given sizes, and for every edge one below, the edge, one above.
inline std::vector<index_t> sizes(std::initializer_list<index_t> plain,
                                  std::initializer_list<index_t> edges) {
  std::set<index_t> all(plain);
  for (const index_t edge : edges) all.insert({edge - 1, edge, edge + 1});
  return {all.begin(), all.end()};
}

/// Numbers of queries around every edge of a query tile, which is up to three vectors wide.
template <class T>
std::vector<index_t> query_counts() {
  constexpr index_t w = lanes<T>;
  return sizes({0, 1, 2, 3, 5, 6 * w + 3}, {w, 2 * w, 3 * w, 4 * w, 5 * w, 6 * w, 12 * w});
}

/// Numbers of keys around the edges of key groups of 4 and 8 and of key blocks of 128.
inline std::vector<index_t> key_counts() {
  return sizes({0, 1, 2, 259}, {4, 8, 16, 32, 64, 128, 256, 384});
}

template <class T>
std::vector<index_t> head_dimensions() {
  return sizes({1, 2, 3, 5, 48, 64, 72, 80, 96, 104, 112, 128, 136, 200}, {lanes<T>});
}

}  // namespace attn_test
