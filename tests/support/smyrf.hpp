// SPDX-License-Identifier: MIT
//
// What the tests of SMYRF share: a plan in the oracle's terms.
#pragma once

#include "reference/smyrf.hpp"
#include "support/dense_problem.hpp"

#include <attn/smyrf_clusters.hpp>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace attn_test {

/// The rounds of one head, as the oracle has them.
inline std::vector<reference::clustering> rounds_of(const attn::smyrf_clusters& c, index_t b,
                                                    index_t h, index_t n_q, index_t n_kv) {
  std::vector<reference::clustering> rounds;
  for (index_t r = 0; r < c.rounds(); ++r) {
    reference::clustering round{std::vector<index_t>(static_cast<std::size_t>(n_q), -1),
                                std::vector<index_t>(static_cast<std::size_t>(n_kv), -1)};
    for (index_t x = 0; x < c.clusters(); ++x) {
      for (index_t i = c.query_begin(b, x); i < c.query_begin(b, x + 1); ++i) {
        const index_t query = c.query_order(b, h, r)[static_cast<std::size_t>(i)];
        round.of_query[static_cast<std::size_t>(query)] = x;
      }
      for (index_t j = c.key_begin(b, x); j < c.key_begin(b, x + 1); ++j) {
        const index_t key = c.key_order(b, h, r)[static_cast<std::size_t>(j)];
        round.of_key[static_cast<std::size_t>(key)] = x;
      }
    }
    rounds.push_back(round);
  }
  return rounds;
}

/// How often the query counts the key, [B, H, n_q, n_kv], by the options of the plan.
inline reference::tensor meetings_of(const attn::smyrf_clusters& c, const dense_problem& p) {
  reference::tensor all(p.score_extents());
  const attn::smyrf_options& options = c.options();
  for (index_t b = 0; b < p.n_batch; ++b)
    for (index_t h = 0; h < p.n_heads; ++h) {
      const reference::tensor m = reference::meetings(rounds_of(c, b, h, p.n_q, p.n_kv));
      for (index_t i = 0; i < p.n_q; ++i)
        for (index_t j = 0; j < p.n_kv; ++j) {
          double times = m(0, 0, i, j);
          if (options.duplicates == attn::smyrf_duplicates::removed) times = std::min(times, 1.0);
          const bool valid = i < c.query_begin(b, c.clusters()) && i < c.key_begin(b, c.clusters());
          if (options.attend_self && i == j && valid) times = std::max(times, 1.0);
          all(b, h, i, j) = times;
        }
    }
  return all;
}

/// Empty, or what is wrong with a plan: every valid position is in each round's order once, sizes
/// differ by at most one, positions ascend inside a cluster.
inline std::string fault_of(const attn::smyrf_clusters& c, const dense_problem& p) {
  const auto check = [&](const char* side, index_t b, index_t h, index_t r, auto order,
                         const auto& begin) -> std::string {
    const std::string at = std::string(side) + " of batch " + std::to_string(b) + ", head " +
                           std::to_string(h) + ", round " + std::to_string(r);
    const auto length = static_cast<index_t>(order.size());
    if (begin(0) != 0 || begin(c.clusters()) != length) return at + ": bounds";
    index_t smallest = length, largest = 0;
    for (index_t x = 0; x < c.clusters(); ++x) {
      smallest = std::min(smallest, begin(x + 1) - begin(x));
      largest = std::max(largest, begin(x + 1) - begin(x));
      for (index_t i = begin(x) + 1; i < begin(x + 1); ++i) {
        const auto place = static_cast<std::size_t>(i);
        if (order[place - 1] >= order[place]) return at + ": positions do not ascend";
      }
    }
    if (largest - smallest > 1)
      return at + ": sizes " + std::to_string(smallest) + " to " + std::to_string(largest);
    std::vector<bool> seen(static_cast<std::size_t>(length), false);
    for (const index_t i : order) {
      if (i < 0 || i >= length) return at + ": position " + std::to_string(i);
      if (seen[static_cast<std::size_t>(i)]) return at + ": twice " + std::to_string(i);
      seen[static_cast<std::size_t>(i)] = true;
    }
    return {};
  };
  for (index_t b = 0; b < p.n_batch; ++b)
    for (index_t h = 0; h < p.n_heads; ++h)
      for (index_t r = 0; r < c.rounds(); ++r) {
        const std::string q = check("queries", b, h, r, c.query_order(b, h, r),
                                    [&](index_t x) { return c.query_begin(b, x); });
        if (!q.empty()) return q;
        const std::string k = check("keys", b, h, r, c.key_order(b, h, r),
                                    [&](index_t x) { return c.key_begin(b, x); });
        if (!k.empty()) return k;
      }
  return {};
}

/// One number for a whole plan.
inline std::uint64_t checksum(const attn::smyrf_clusters& c, const dense_problem& p) {
  std::uint64_t sum = 0;
  for (index_t b = 0; b < p.n_batch; ++b)
    for (index_t h = 0; h < p.n_heads; ++h)
      for (index_t r = 0; r < c.rounds(); ++r) {
        for (const index_t i : c.query_order(b, h, r))
          sum = attn::lsh_bits(sum, static_cast<std::uint64_t>(i), 0, 0);
        for (const index_t j : c.key_order(b, h, r))
          sum = attn::lsh_bits(sum, static_cast<std::uint64_t>(j), 1, 0);
      }
  return sum;
}

}  // namespace attn_test
