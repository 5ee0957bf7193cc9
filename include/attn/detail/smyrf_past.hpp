// SPDX-License-Identifier: MIT
//
// Pairs of a query and a key that an earlier round has had.
#pragma once

#include <algorithm>
#include <cstdint>

#include <attn/detail/scratch_carver.hpp>
#include <attn/detail/smyrf_plan.hpp>
#include <attn/detail/tile_products.hpp>
#include <attn/simd/batch.hpp>
#include <attn/view.hpp>

namespace attn::detail {

/// Where duplicates are removed: which pairs of a tile of queries and a cluster of keys shared a
/// cluster in an earlier round and must not count again.
template <class T, class Arch>
class smyrf_past {
  using B = simd::batch<T, Arch>;
  static constexpr index_t W = simd::width<T, Arch>, QS = tile_size<T, Arch>::max_rows;

 public:
  /// Without `removes` there is nothing to mark and no memory is taken.
  void carve(scratch_carver& memory, const smyrf_plan& plan, bool removes) noexcept {
    plan_ = &plan;
    most_keys_ = (plan.n_kv + plan.clusters - 1) / plan.clusters;
    of_query_ = memory.take<T>(removes ? plan.rounds * QS : 0);
    of_key_ = memory.take<T>(removes ? plan.rounds * most_keys_ : 0);
    removes_ = removes;
  }

  /// The keys list[0, n) of a cluster of round `round`.
  void enter_cluster(index_t b, index_t g, index_t round, const index_t* list, index_t n) noexcept {
    round_ = removes_ ? round : 0;
    for (index_t past = 0; past < round_; ++past) {
      const std::int32_t* cluster = plan_->key_clusters(b, g, past);
      T* to = of_key_ + past * most_keys_;
      for (index_t j = 0; j < n; ++j) to[j] = static_cast<T>(cluster[list[j]]);
    }
  }

  /// The tile of queries list[0, n) of head h, `ld` lanes.
  void enter_tile(index_t b, index_t h, const index_t* list, index_t n, index_t ld) noexcept {
    ld_ = ld;
    for (index_t past = 0; past < round_; ++past) {
      const std::int32_t* cluster = plan_->query_clusters(b, h, past);
      T* to = of_query_ + past * QS;
      for (index_t r = 0; r < n; ++r) to[r] = static_cast<T>(cluster[list[r]]);
      std::fill(to + n, to + ld, T(-1));
    }
  }

  /// Whether there are pairs to mark.
  [[nodiscard]] bool any() const noexcept { return round_ > 0; }

  /// `mark` into out [n][ld] for the pairs of the tile and keys [first, first + n) of the cluster
  /// that have met.
  void mark_pairs(index_t first, index_t n, T mark, T* out) const noexcept {
    const B marked(mark);
    for (index_t j = first; j < first + n; ++j, out += ld_) {
      for (index_t r = 0; r < ld_; r += W) {
        B x = simd::load<T, Arch>(out + r);
        for (index_t past = 0; past < round_; ++past) {
          const B of_key(of_key_[past * most_keys_ + j]);
          x = xsimd::select(simd::load<T, Arch>(of_query_ + past * QS + r) == of_key, marked, x);
        }
        x.store_aligned(out + r);
      }
    }
  }

 private:
  const smyrf_plan* plan_ = nullptr;
  bool removes_ = false;
  T* of_query_ = nullptr;  // [rounds][QS]         clusters, as numbers of T
  T* of_key_ = nullptr;    // [rounds][most_keys]
  index_t most_keys_ = 0, round_ = 0, ld_ = 0;
};

}  // namespace attn::detail
