// SPDX-License-Identifier: MIT
//
// The data of smyrf_clusters, and what its passes read.
#pragma once

#include <cstdint>
#include <vector>

#include <attn/context.hpp>
#include <attn/detail/head_access.hpp>
#include <attn/view.hpp>

namespace attn::detail {

/// Which query and which key is in which cluster, for every batch, head and round.
struct smyrf_plan {
  index_t n_batch = 0, n_heads = 0, n_heads_kv = 0, n_q = 0, n_kv = 0, d_qk = 0;
  index_t clusters = 1, rounds = 1;
  std::vector<index_t> q_lengths, k_lengths;  // one per batch
  std::vector<index_t> q_order;               // [B][H][rounds][n_q], by cluster, then by position
  std::vector<index_t> k_order;               // [B][Hkv][rounds][n_kv]
  // The cluster of each position, −1 past the length; empty where nobody asks for it.
  std::vector<std::int32_t> q_cluster, k_cluster;

  [[nodiscard]] index_t q_length(index_t b) const noexcept {
    return q_lengths[static_cast<std::size_t>(b)];
  }
  [[nodiscard]] index_t k_length(index_t b) const noexcept {
    return k_lengths[static_cast<std::size_t>(b)];
  }
  [[nodiscard]] index_t group() const noexcept { return n_heads / n_heads_kv; }

  /// The first rank of cluster c among `length`: sizes differ by at most one.
  [[nodiscard]] index_t begin(index_t length, index_t c) const noexcept {
    return length / clusters * c + length % clusters * c / clusters;
  }

  [[nodiscard]] const std::int32_t* query_clusters(index_t b, index_t h, index_t r) const noexcept {
    return q_cluster.data() + ((b * n_heads + h) * rounds + r) * n_q;
  }
  [[nodiscard]] const std::int32_t* key_clusters(index_t b, index_t g, index_t r) const noexcept {
    return k_cluster.data() + ((b * n_heads_kv + g) * rounds + r) * n_kv;
  }
  /// Whether query i of head h and key j (both within their lengths) meet in some round.
  [[nodiscard]] bool meet(index_t b, index_t h, index_t i, index_t j) const noexcept {
    for (index_t r = 0; r < rounds; ++r) {
      if (query_clusters(b, h, r)[i] == key_clusters(b, h / group(), r)[j]) return true;
    }
    return false;
  }

  [[nodiscard]] const index_t* queries(index_t b, index_t h, index_t r) const noexcept {
    return q_order.data() + ((b * n_heads + h) * rounds + r) * n_q;
  }
  [[nodiscard]] index_t* queries(index_t b, index_t h, index_t r) noexcept {
    return q_order.data() + ((b * n_heads + h) * rounds + r) * n_q;
  }
  [[nodiscard]] const index_t* keys(index_t b, index_t g, index_t r) const noexcept {
    return k_order.data() + ((b * n_heads_kv + g) * rounds + r) * n_kv;
  }
  [[nodiscard]] index_t* keys(index_t b, index_t g, index_t r) noexcept {
    return k_order.data() + ((b * n_heads_kv + g) * rounds + r) * n_kv;
  }
};

/// The operands of a plan: rows of a head as float, their storage types hidden.
struct smyrf_operands {
  head_source<float> q, k;
};

/// Fills the local first round, where there is one; returns the rounds that are done.
template <class Arch>
index_t smyrf_local_round(smyrf_plan& plan, bool local) {
  if (!local) return 0;
  for (index_t b = 0; b < plan.n_batch; ++b) {
    for (index_t h = 0; h < plan.n_heads; ++h) {
      index_t* q = plan.queries(b, h, 0);
      for (index_t i = 0; i < plan.q_length(b); ++i) q[i] = i;
    }
    for (index_t g = 0; g < plan.n_heads_kv; ++g) {
      index_t* k = plan.keys(b, g, 0);
      for (index_t i = 0; i < plan.k_length(b); ++i) k[i] = i;
    }
  }
  return 1;
}

/// The clusters of all positions from the orders.
template <class Arch>
void smyrf_invert(smyrf_plan& plan, context& ctx) {
  plan.q_cluster.assign(plan.q_order.size(), -1);
  plan.k_cluster.assign(plan.k_order.size(), -1);
  const auto invert = [&](index_t heads, index_t n, const std::vector<index_t>& lengths,
                          const std::vector<index_t>& orders, std::vector<std::int32_t>& clusters) {
    ctx.run(plan.n_batch * heads * plan.rounds, 1, 0, [&](std::byte*, work_queue& queue) noexcept {
      for (index_t item, end; queue.next(item, end);) {
        const index_t b = item / plan.rounds / heads;
        const index_t length = lengths[static_cast<std::size_t>(b)];
        const index_t* order = orders.data() + item * n;
        std::int32_t* cluster = clusters.data() + item * n;
        for (index_t c = 0; c < plan.clusters; ++c) {
          for (index_t i = plan.begin(length, c); i < plan.begin(length, c + 1); ++i) {
            cluster[order[i]] = static_cast<std::int32_t>(c);
          }
        }
      }
    });
  };
  invert(plan.n_heads, plan.n_q, plan.q_lengths, plan.q_order, plan.q_cluster);
  invert(plan.n_heads_kv, plan.n_kv, plan.k_lengths, plan.k_order, plan.k_cluster);
}

}  // namespace attn::detail
