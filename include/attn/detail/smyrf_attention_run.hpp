// SPDX-License-Identifier: MIT
//
// SMYRF attention over heads, rounds and threads. Rounds follow each other; clusters of a round
// touch different rows and run in any order.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include <attn/context.hpp>
#include <attn/detail/smyrf_attention_kernel.hpp>
#include <attn/simd/fp_environment.hpp>

namespace attn::detail {

/// What the heads of one key/value head share while they are computed: running results, and the
/// sums of the far field.
template <class T>
class smyrf_group {
 public:
  smyrf_group(const smyrf_problem<T>& problem, scratch_carver& memory) noexcept : c_(problem) {
    const index_t heads = c_.plan->group();
    lse_ = memory.take<T>(heads * c_.n_q);
    // Rows of T in the output itself are summed up where they are.
    is_direct_ = c_.out(0, 0).direct != nullptr;
    if (!is_direct_) out_ = memory.take<T>(heads * c_.n_q * c_.d_v);
    zero_ = memory.take<T>(c_.d_v);
    if (c_.far_field) {
      far_ = smyrf_far_sums<T>::carve(memory, c_.plan->clusters, c_.d_qk, c_.d_v);
    }
  }

  [[nodiscard]] const smyrf_far_sums<T>& far() const noexcept { return far_; }

  [[nodiscard]] smyrf_result<T> result(index_t b, index_t h) const noexcept {
    const index_t i = h % c_.plan->group();
    if (!is_direct_) return {out_ + i * c_.n_q * c_.d_v, c_.d_v, lse_ + i * c_.n_q};
    const row_sink<T> out = c_.out(b, h);
    return {out.direct, out.row_stride, lse_ + i * c_.n_q};
  }

  /// Results to the outputs; rows past the length are 0 and −inf.
  void finish(index_t b, index_t h) const noexcept {
    const index_t length = c_.plan->q_length(b);
    const smyrf_result<T> rows = result(b, h);
    const row_sink<T> out = c_.out(b, h);
    if (!is_direct_) out.write(rows.out, c_.d_v, 0, length, c_.d_v);
    std::fill_n(zero_, c_.d_v, T(0));
    out.write(zero_, 0, length, c_.n_q - length, c_.d_v);
    if (c_.lse.data_handle() == nullptr) return;
    for (index_t i = 0; i < c_.n_q; ++i) {
      c_.lse(b, h, i, 0) = i < length ? rows.lse[i] : -std::numeric_limits<T>::infinity();
    }
  }

 private:
  const smyrf_problem<T>& c_;
  smyrf_far_sums<T> far_{};
  T *lse_ = nullptr, *out_ = nullptr, *zero_ = nullptr;
  bool is_direct_ = false;
};

/// Runs the call over the threads of `ctx`.
template <class T, class Arch, rule_kind Kind, bool Pairs>
void smyrf_attention_run(const smyrf_problem<T>& c, const smyrf_rule<T>& rule, context& ctx) {
  using worker = smyrf_worker<T, Arch, Kind, Pairs>;
  const smyrf_plan& plan = *c.plan;
  const index_t groups = c.n_batch * c.n_heads_kv;
  if (groups == 0 || c.n_q == 0) return;
  scratch_carver group_bytes;
  smyrf_group<T>(c, group_bytes);
  const std::size_t worker_bytes = worker::scratch_bytes(c, rule);
  const auto heads = [&](index_t g) { return key_range{g * plan.group(), (g + 1) * plan.group()}; };
  const auto cluster = [&](worker& w, const smyrf_group<T>& group, index_t b, index_t g, index_t r,
                           index_t c0) {
    w.run(
        b, g, r, c0, group.far(), [&](index_t h) { return group.result(b, h); },
        r == 0 && !c.attend_self);
  };

  // 1. Enough heads for the threads: an item is a key/value head with all its rounds.
  if (ctx.n_threads() == 1 || groups >= 2 * ctx.n_threads()) {
    ctx.run(groups, 1, group_bytes.used() + worker_bytes,
            [&](std::byte* scratch, work_queue& queue) noexcept {
              const simd::flush_subnormals mode;
              scratch_carver memory(scratch);
              smyrf_group<T> group(c, memory);
              worker w(c, rule, scratch_carver(scratch + memory.used()));
              for (index_t item, end; queue.next(item, end);) {
                const index_t b = item / c.n_heads_kv, g = item % c.n_heads_kv;
                for (index_t h = heads(g).begin; h < heads(g).end && c.attend_self; ++h) {
                  w.attend_self(b, h, group.result(b, h));
                }
                for (index_t r = 0; r < plan.rounds; ++r) {
                  if (c.far_field) w.add_up(b, g, r, group.far());
                  for (index_t i = 0; i < plan.clusters; ++i) cluster(w, group, b, g, r, i);
                }
                for (index_t h = heads(g).begin; h < heads(g).end; ++h) group.finish(b, h);
              }
            });
    return;
  }

  // 2. Otherwise one round after the other, an item is a cluster, and results are shared.
  scratch_buffer shared;
  scratch_carver memory(shared.reserve(group_bytes.used() * static_cast<std::size_t>(groups)));
  std::vector<smyrf_group<T>> all;
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
  using group_t = const smyrf_group<T>&;
  if (c.attend_self) {
    run(plan.group(), [&](worker& w, group_t group, index_t b, index_t g, index_t i) {
      w.attend_self(b, heads(g).begin + i, group.result(b, heads(g).begin + i));
    });
  }
  for (index_t r = 0; r < plan.rounds; ++r) {
    if (c.far_field) {
      run(1, [&](worker& w, group_t group, index_t b, index_t g, index_t) {
        w.add_up(b, g, r, group.far());
      });
    }
    run(plan.clusters, [&](worker& w, group_t group, index_t b, index_t g, index_t i) {
      cluster(w, group, b, g, r, i);
    });
  }
  run(plan.group(), [&](worker&, group_t group, index_t b, index_t g, index_t i) {
    group.finish(b, heads(g).begin + i);
  });
}

/// The same; a tile of numbers to add takes part only where something needs it.
template <class T, class Arch, score_rule Rule>
void smyrf_attention_clustered(const smyrf_problem<T>& c, const Rule& rule, context& ctx) {
  const smyrf_rule<T> erased(rule);
  if constexpr (Rule::kind == rule_kind::range) {
    if (!c.removes_duplicates && !c.far_field) {
      return smyrf_attention_run<T, Arch, rule_kind::range, false>(c, erased, ctx);
    }
  }
  smyrf_attention_run<T, Arch, Rule::kind, true>(c, erased, ctx);
}

}  // namespace attn::detail
