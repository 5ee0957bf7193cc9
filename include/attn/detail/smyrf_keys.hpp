// SPDX-License-Identifier: MIT
//
// The keys and values that the queries of one cluster meet.
#pragma once

#include <algorithm>

#include <attn/detail/backward_tile.hpp>
#include <attn/detail/packing.hpp>
#include <attn/detail/scratch_carver.hpp>
#include <attn/detail/smyrf_far_field.hpp>
#include <attn/detail/smyrf_gather.hpp>
#include <attn/detail/smyrf_plan.hpp>
#include <attn/view.hpp>

namespace attn::detail {

/// Keys and values of a cluster, gathered, and the means that stand for those of other clusters.
template <class T, class Arch>
struct smyrf_keys {
  const index_t* list = nullptr;  ///< positions, ascending
  index_t n = 0, n_far = 0;
  T *k = nullptr, *v = nullptr;  ///< [n][d_qk], [n][d_v]
  T *far_k = nullptr, *far_v = nullptr, *far_log_count = nullptr;

  void carve(scratch_carver& memory, const smyrf_plan& plan, index_t d_qk, index_t d_v,
             bool far_field) noexcept {
    d_qk_ = d_qk, d_v_ = d_v, far_field_ = far_field;
    const index_t most = most_keys(plan), most_far = far_field ? smyrf_most_far : 0;
    k = memory.take<T>(most * d_qk);
    v = memory.take<T>(most * d_v);
    far_k = memory.take<T>(most_far * d_qk);
    far_v = memory.take<T>(most_far * d_v);
    far_log_count = memory.take<T>(most_far);
  }

  /// Room for one key also where there is none.
  [[nodiscard]] static index_t most_keys(const smyrf_plan& plan) noexcept {
    return std::max<index_t>(1, (plan.n_kv + plan.clusters - 1) / plan.clusters);
  }

  void gather(const smyrf_plan& plan, index_t b, index_t g, index_t round, index_t cluster,
              const row_source<T>& k_rows, const row_source<T>& v_rows,
              const smyrf_far_sums<T>& far) noexcept {
    const index_t length = plan.k_length(b), first = plan.begin(length, cluster);
    n = plan.begin(length, cluster + 1) - first;
    list = plan.keys(b, g, round) + first;
    gather_rows<T, Arch>(k_rows, list, n, d_qk_, k, d_qk_);
    gather_rows<T, Arch>(v_rows, list, n, d_v_, v, d_v_);
    n_far = far_field_ ? far.take(plan, length, cluster, far_k, far_v, far_log_count) : 0;
    k_checked_ = v_checked_ = false;
  }

  /// Whether the keys (the values) have neither inf nor NaN: asked for where pairs are masked.
  [[nodiscard]] bool keys_finite() noexcept {
    if (!k_checked_) k_finite_ = all_finite<T, Arch>(k, d_qk_, n, d_qk_);
    k_checked_ = true;
    return k_finite_;
  }
  [[nodiscard]] bool values_finite() noexcept {
    if (!v_checked_) v_finite_ = all_finite<T, Arch>(v, d_v_, n, d_v_);
    v_checked_ = true;
    return v_finite_;
  }

 private:
  index_t d_qk_ = 0, d_v_ = 0;
  bool far_field_ = false;
  bool k_checked_ = false, k_finite_ = false, v_checked_ = false, v_finite_ = false;
};

}  // namespace attn::detail
