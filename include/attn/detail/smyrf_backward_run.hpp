// SPDX-License-Identifier: MIT
//
// The backward pass of SMYRF attention over heads, rounds and threads.
#pragma once

#include <algorithm>
#include <vector>

#include <attn/context.hpp>
#include <attn/detail/smyrf_backward_kernel.hpp>
#include <attn/simd/fp_environment.hpp>

namespace attn::detail {

/// Gradients of one key/value head and the query heads that read it, while rounds add to them.
template <class T>
class smyrf_backward_group {
 public:
  smyrf_backward_group(const smyrf_backward_problem<T>& problem, scratch_carver& memory) noexcept
      : c_(problem) {
    const auto take = [&](const head_sink<T>& x, index_t n, index_t d) {
      // Rows of T in the output itself are summed up where they are.
      return x(0, 0).direct != nullptr ? nullptr : memory.take<T>(n * d);
    };
    dq_ = take(c_.dq, c_.plan->group() * c_.n_q, c_.d_qk);
    dk_ = take(c_.dk, c_.n_kv, c_.d_qk);
    dv_ = take(c_.dv, c_.n_kv, c_.d_v);
    zero_ = memory.take<T>(std::max(c_.d_qk, c_.d_v));
    if (c_.far_field) {
      far_ = smyrf_far_sums<T>::carve(memory, c_.plan->clusters, c_.d_qk, c_.d_v);
      far_.carve_gradients(memory, c_.plan->clusters);
    }
  }

  [[nodiscard]] const smyrf_far_sums<T>& far() const noexcept { return far_; }
  [[nodiscard]] smyrf_sums<T> dq(index_t b, index_t h) const noexcept {
    return sums(c_.dq(b, h), dq_ + h % c_.plan->group() * (dq_ == nullptr ? 0 : c_.n_q * c_.d_qk),
                c_.d_qk);
  }
  [[nodiscard]] smyrf_sums<T> dk(index_t b, index_t g) const noexcept {
    return sums(c_.dk(b, g), dk_, c_.d_qk);
  }
  [[nodiscard]] smyrf_sums<T> dv(index_t b, index_t g) const noexcept {
    return sums(c_.dv(b, g), dv_, c_.d_v);
  }

  /// To the outputs; rows past the lengths are 0.
  void finish(index_t b, index_t g) const noexcept {
    const index_t q_length = c_.plan->q_length(b), k_length = c_.plan->k_length(b);
    for (index_t h = g * c_.plan->group(); h < (g + 1) * c_.plan->group(); ++h) {
      write(c_.dq(b, h), dq(b, h), q_length, c_.n_q, c_.d_qk);
    }
    write(c_.dk(b, g), dk(b, g), k_length, c_.n_kv, c_.d_qk);
    write(c_.dv(b, g), dv(b, g), k_length, c_.n_kv, c_.d_v);
  }

 private:
  [[nodiscard]] static smyrf_sums<T> sums(const row_sink<T>& x, T* memory, index_t d) noexcept {
    if (x.direct != nullptr) return {x.direct, x.row_stride};
    return {memory, d};
  }
  void write(const row_sink<T>& x, const smyrf_sums<T>& rows, index_t length, index_t n,
             index_t d) const noexcept {
    if (x.direct == nullptr) x.write(rows.rows, d, 0, length, d);
    std::fill_n(zero_, d, T(0));
    x.write(zero_, 0, length, n - length, d);
  }

  const smyrf_backward_problem<T>& c_;
  smyrf_far_sums<T> far_{};
  T *dq_ = nullptr, *dk_ = nullptr, *dv_ = nullptr, *zero_ = nullptr;
};

/// Runs the call over the threads of `ctx`. Sums have one order whatever their number: rounds, then
/// query heads, then queries.
template <class T, class Arch, rule_kind Kind>
void smyrf_backward_run(const smyrf_backward_problem<T>& c, const smyrf_rule<T>& rule,
                        context& ctx) {
  using worker = smyrf_backward_worker<T, Arch, Kind>;
  using group_t = smyrf_backward_group<T>;
  const smyrf_plan& plan = *c.plan;
  const index_t groups = c.n_batch * c.n_heads_kv;
  if (groups == 0) return;
  scratch_carver group_bytes;
  group_t(c, group_bytes);
  const std::size_t worker_bytes = worker::scratch_bytes(c, rule);
  const auto cluster = [&](worker& w, const group_t& group, index_t b, index_t g, index_t r,
                           index_t i) {
    w.run(
        b, g, r, i, group.far(), [&](index_t h) { return group.dq(b, h); }, group.dk(b, g),
        group.dv(b, g));
  };
  const auto finish = [&](worker& w, const group_t& group, index_t b, index_t g) {
    for (index_t h = g * plan.group(); h < (g + 1) * plan.group() && c.attend_self; ++h) {
      w.attend_self(b, h, group.dq(b, h), group.dk(b, g), group.dv(b, g));
    }
    group.finish(b, g);
  };

  // 1. An item is a key/value head with all its rounds. With a far field always: its means sum up
  //    over the clusters of a head.
  if (ctx.n_threads() == 1 || groups >= 2 * ctx.n_threads() || c.far_field) {
    ctx.run(groups, 1, group_bytes.used() + worker_bytes,
            [&](std::byte* scratch, work_queue& queue) noexcept {
              const simd::flush_subnormals mode;
              scratch_carver memory(scratch);
              const group_t group(c, memory);
              worker w(c, rule, scratch_carver(scratch + memory.used()));
              for (index_t item, end; queue.next(item, end);) {
                const index_t b = item / c.n_heads_kv, g = item % c.n_heads_kv;
                for (index_t r = 0; r < plan.rounds; ++r) {
                  if (c.far_field) w.add_up(b, g, r, group.far());
                  for (index_t i = 0; i < plan.clusters; ++i) cluster(w, group, b, g, r, i);
                  if (c.far_field) w.spread(b, g, r, group.far(), group.dk(b, g), group.dv(b, g));
                }
                finish(w, group, b, g);
              }
            });
    return;
  }

  // 2. One round after the other, an item is a cluster, and gradients are shared.
  scratch_buffer shared;
  scratch_carver memory(shared.reserve(group_bytes.used() * static_cast<std::size_t>(groups)));
  std::vector<group_t> all;
  for (index_t i = 0; i < groups; ++i) all.emplace_back(c, memory);
  const auto run = [&](index_t items_per_group, const auto& body) {
    ctx.run(groups * items_per_group, 1, worker_bytes,
            [&](std::byte* scratch, work_queue& queue) noexcept {
              const simd::flush_subnormals mode;
              worker w(c, rule, scratch_carver(scratch));
              for (index_t item, end; queue.next(item, end);) {
                const index_t i = item / items_per_group;
                body(w, all[static_cast<std::size_t>(i)], i / c.n_heads_kv, i % c.n_heads_kv,
                     item % items_per_group);
              }
            });
  };
  for (index_t r = 0; r < plan.rounds; ++r) {
    run(plan.clusters, [&](worker& w, const group_t& group, index_t b, index_t g, index_t i) {
      cluster(w, group, b, g, r, i);
    });
  }
  run(1, [&](worker& w, const group_t& group, index_t b, index_t g, index_t) {
    finish(w, group, b, g);
  });
}

}  // namespace attn::detail
