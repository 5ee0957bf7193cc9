// SPDX-License-Identifier: MIT
//
// Pooled attention: a tournament, its application to keys and values, dense attention.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <string_view>
#include <type_traits>

#include <attn/context.hpp>
#include <attn/dense_options.hpp>
#include <attn/detail/dense_attention_backward_checks.hpp>
#include <attn/detail/dense_attention_checks.hpp>
#include <attn/detail/soft_topk_backward_kernel.hpp>
#include <attn/detail/soft_topk_checks.hpp>
#include <attn/detail/soft_topk_kernel.hpp>
#include <attn/soft_topk.hpp>
#include <attn/soft_topk_options.hpp>
#include <attn/view.hpp>

namespace attn::detail {

// What lives from the tournament to the end of a call. It is the calling thread's and not the
// context's: scratch of a context belongs to one pass over its threads, and these are several.
struct pooled_memory {
  tournament plan;
  scratch_buffer rows;
};
template <class Arch>
[[nodiscard]] pooled_memory& pooled_memory_of_thread() {
  thread_local pooled_memory memory;
  return memory;
}

// Pooled keys and values, and for the backward pass their gradients: [B, Hkv, k, d].
template <class T>
struct pooled_rows {
  tensor_view<T> k, v, d_k, d_v;

  pooled_rows(scratch_buffer& memory, std::array<index_t, 4> keys, std::array<index_t, 4> values,
              bool with_gradients) {
    scratch_carver count(nullptr);
    cut(count, keys, values, with_gradients);
    scratch_carver block(memory.reserve(count.used()));
    cut(block, keys, values, with_gradients);
  }

 private:
  void cut(scratch_carver& memory, const std::array<index_t, 4>& keys,
           const std::array<index_t, 4>& values, bool with_gradients) {
    const auto one = [&](const std::array<index_t, 4>& e) {
      return tensor_view<T>(memory.take<T>(e[0] * e[1] * e[2] * e[3]), e[0], e[1], e[2], e[3]);
    };
    k = one(keys), v = one(values);
    if (with_gradients) d_k = one(keys), d_v = one(values);
  }
};

template <class Q, class K, class V, class S>
void check_pooled(std::string_view function, const tensor_view<Q>& q, const tensor_view<K>& k,
                  const tensor_view<V>& v, const tensor_view<S>& scores, index_t slots,
                  const soft_topk_options& pooling, const dense_options& options) {
  check_qkv(function, q, k, v);
  check_rows_like(function, "scores", scores, access::read, k, "k", 1, "one score per key");
  check_tournament_length(function, scores);
  check_topk_strength(function, pooling);
  check_topk_lengths(function, pooling.lengths, k.extent(0), k.extent(2), slots);
  check_options<simd::compute_t<Q>>(function, options, q.extent(1));
}

template <class Arch, class Q, class K, class V, class S, class O, class L>
void pooled_attention_checked(std::string_view function, const tensor_view<Q>& q,
                              const tensor_view<K>& k, const tensor_view<V>& v,
                              const tensor_view<S>& scores, const tensor_view<O>& out,
                              const tensor_view<L>& lse, bool wants_lse, index_t slots,
                              const soft_topk_options& pooling, const dense_options& options,
                              context& ctx) {
  using T = simd::compute_t<Q>;
  check_pooled(function, q, k, v, scores, slots, pooling, options);
  check_output(function, "out", out, q, v.extent(3), "d_v of v");
  const auto check_apart = [&](std::string_view name, const auto& x) {
    check_disjoint(function, name, x, "q", q);
    check_disjoint(function, name, x, "k", k);
    check_disjoint(function, name, x, "v", v);
    check_disjoint(function, name, x, "scores", scores);
  };
  check_apart("out", out);
  if (wants_lse) {
    check_output(function, "lse", lse, q, 1, "one per query");
    check_apart("lse", lse);
    check_disjoint(function, "lse", lse, "out", out);
  }

  pooled_memory& memory = pooled_memory_of_thread<Arch>();
  memory.plan.assign(scores, slots, pooling, ctx);
  const std::array keys{k.extent(0), k.extent(1), slots, k.extent(3)};
  const std::array values{v.extent(0), v.extent(1), slots, v.extent(3)};
  const pooled_rows<T> pooled(memory.rows, keys, values, false);
  soft_topk(memory.plan, k, pooled.k, ctx);
  soft_topk(memory.plan, v, pooled.v, ctx);
  dense_attention_checked<Arch>(function, q, pooled.k, pooled.v, out, lse, wants_lse, no_mask{},
                                options, ctx);
}

// From gradients of pooled keys and values to those of keys, values and scores.
template <class Arch, class T, class K, class V, class DK, class DV, class DS>
void unpool(const tournament& plan, const pooled_rows<T>& pooled, const tensor_view<K>& k,
            const tensor_view<V>& v, const tensor_view<DK>& d_k, const tensor_view<DV>& d_v,
            const tensor_view<DS>& d_scores, context& ctx) {
  const index_t n_heads = plan.n_heads(), n = plan.n_sources();
  scratch_carver bytes(nullptr);
  (void)scores_backward_scratch(bytes, n, plan.n_slots());
  ctx.run(
      plan.n_batch() * n_heads, 1, bytes.used(),
      [&](std::byte* memory, work_queue& queue) noexcept {
        scratch_carver cutter(memory);
        const scores_backward_scratch s(cutter, n, plan.n_slots());
        const auto head = [](const auto& x, index_t b, index_t h) {
          using X = std::remove_const_t<typename std::remove_cvref_t<decltype(x)>::element_type>;
          return matrix_of(tensor_view<const X>(x), b, h);
        };
        for (index_t first, last; queue.next(first, last);) {
          const index_t b = first / n_heads, h = first % n_heads;
          const tournament_row row = plan.row(b, h);
          std::fill_n(s.gain, row.n, 0.0);
          pool_backward<Arch, T>(row, head(k, b, h), head(pooled.d_k, b, h), matrix_of(d_k, b, h),
                                 k.extent(3), n, s.gain);
          pool_backward<Arch, T>(row, head(v, b, h), head(pooled.d_v, b, h), matrix_of(d_v, b, h),
                                 v.extent(3), n, s.gain);
          // Attention does not look at the slots' own scores.
          std::fill_n(s.d_slot, row.k, 0.0);
          scores_backward<Arch>(row, plan.boost(), plan.strength(), s);
          store_score_gradients<Arch>(row, s.d_seat, n, &d_scores(b, h, 0, 0), d_scores.stride(2));
        }
      });
}

template <class Arch, class Q, class K, class V, class S, class O, class L, class DO, class DQ,
          class DK, class DV, class DS>
void pooled_attention_backward_checked(std::string_view function, const tensor_view<Q>& q,
                                       const tensor_view<K>& k, const tensor_view<V>& v,
                                       const tensor_view<S>& scores, const tensor_view<O>& out,
                                       const tensor_view<L>& lse, const tensor_view<DO>& d_out,
                                       const tensor_view<DQ>& d_q, const tensor_view<DK>& d_k,
                                       const tensor_view<DV>& d_v, const tensor_view<DS>& d_scores,
                                       index_t slots, const soft_topk_options& pooling,
                                       const dense_options& options, context& ctx) {
  using T = simd::compute_t<Q>;
  check_pooled(function, q, k, v, scores, slots, pooling, options);
  check_rows_like(function, "out", out, access::read, q, "q", v.extent(3), "d_v of v");
  check_rows_like(function, "lse", lse, access::read, q, "q", 1, "one per query");
  check_rows_like(function, "d_out", d_out, access::read, q, "q", v.extent(3), "d_v of v");
  check_rows_like(function, "d_q", d_q, access::write, q, "q", q.extent(3), "d_qk of q");
  check_rows_like(function, "d_k", d_k, access::write, k, "k", k.extent(3), "d_qk of k");
  check_rows_like(function, "d_v", d_v, access::write, v, "v", v.extent(3), "d_v of v");
  check_rows_like(function, "d_scores", d_scores, access::write, k, "k", 1, "one score per key");
  const auto check_apart = [&](std::string_view name, const auto& gradient) {
    check_disjoint(function, name, gradient, "q", q);
    check_disjoint(function, name, gradient, "k", k);
    check_disjoint(function, name, gradient, "v", v);
    check_disjoint(function, name, gradient, "scores", scores);
    check_disjoint(function, name, gradient, "out", out);
    check_disjoint(function, name, gradient, "lse", lse);
    check_disjoint(function, name, gradient, "d_out", d_out);
  };
  check_apart("d_q", d_q);
  check_apart("d_k", d_k);
  check_apart("d_v", d_v);
  check_apart("d_scores", d_scores);
  check_disjoint(function, "d_k", d_k, "d_q", d_q);
  check_disjoint(function, "d_v", d_v, "d_q", d_q);
  check_disjoint(function, "d_v", d_v, "d_k", d_k);
  check_disjoint(function, "d_scores", d_scores, "d_q", d_q);
  check_disjoint(function, "d_scores", d_scores, "d_k", d_k);
  check_disjoint(function, "d_scores", d_scores, "d_v", d_v);

  // The plan and the pooled rows again: they are cheaper to make than to keep.
  pooled_memory& memory = pooled_memory_of_thread<Arch>();
  memory.plan.assign(scores, slots, pooling, ctx);
  const std::array keys{k.extent(0), k.extent(1), slots, k.extent(3)};
  const std::array values{v.extent(0), v.extent(1), slots, v.extent(3)};
  const pooled_rows<T> pooled(memory.rows, keys, values, true);
  soft_topk(memory.plan, k, pooled.k, ctx);
  soft_topk(memory.plan, v, pooled.v, ctx);
  dense_attention_backward_checked<Arch>(function, q, pooled.k, pooled.v, out, lse, d_out, d_q,
                                         pooled.d_k, pooled.d_v, no_mask{}, options, ctx);
  unpool<Arch, T>(memory.plan, pooled, k, v, d_k, d_v, d_scores, ctx);
}

}  // namespace attn::detail
