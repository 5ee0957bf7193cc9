// SPDX-License-Identifier: MIT
//
// The weights of dense attention, for looking at them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <type_traits>
#include <utility>

#include <attn/context.hpp>
#include <attn/dense_options.hpp>
#include <attn/detail/attention_weights_kernel.hpp>
#include <attn/detail/dense_attention_checks.hpp>
#include <attn/eigen.hpp>
#include <attn/score_rule.hpp>
#include <attn/view.hpp>

namespace attn {

namespace detail {

// Checks queries and keys of a call without values, and hides their storage types. The problem
// points to q and k.
template <class Arch, class Q, class K, score_rule R>
[[nodiscard]] weights_problem<simd::compute_t<Q>>
make_weights_problem(std::string_view function, const tensor_view<Q>& q, const tensor_view<K>& k,
                     const R& rule, const dense_options& options) {
  using T = simd::compute_t<Q>;
  static_assert(is_element<std::remove_const_t<Q>> && is_element<std::remove_const_t<K>>,
                "attn computes with float, double, Eigen::half and Eigen::bfloat16");
  static_assert(std::is_same_v<T, simd::compute_t<K>>, "q and k: both double, or none");
  check_qkv(function, q, k, k);  // there are no values: k stands in and fits itself
  check_options<T>(function, options, q.extent(1));
  rule.check(function, attention_shape{q.extent(0), q.extent(1), q.extent(2), k.extent(2)});
  return {
      .n_batch = q.extent(0),
      .n_heads = q.extent(1),
      .n_heads_kv = k.extent(1),
      .n_q = q.extent(2),
      .n_kv = k.extent(2),
      .d_qk = q.extent(3),
      .scale = static_cast<T>(scale_of(options, q.extent(3))),
      .softcap = static_cast<T>(options.softcap),
      .sinks = options.sinks,
      .q = make_head_source<T, Arch>(q),
      .k = make_head_source<T, Arch>(k),
  };
}

// Rows of a tile into weights(b, h, row0.., 0..n_kv): 0 outside of its keys.
template <class T, class Arch, class W>
void store_weights(const tile_of_weights<T, Arch>& t, const tensor_view<W>& weights) noexcept {
  constexpr index_t ld = key_block;
  const index_t n_kv = weights.extent(3), end = t.first_key + t.n_keys;
  const index_t row_stride = weights.stride(2), dim_stride = weights.stride(3);
  W* out = weights.data_handle() + t.b * weights.stride(0) + t.h * weights.stride(1) +
           t.row0 * row_stride;
  for (index_t r = 0; r < t.n_rows; ++r) {
    W* row = out + r * row_stride;
    for (index_t j = 0; j < t.first_key; ++j) row[j * dim_stride] = W(0);
    for (index_t j = end; j < n_kv; ++j) row[j * dim_stride] = W(0);
  }
  // e is [key][row]: turned round in stretches that stay in L1.
  alignas(64) T rows[tile_of_weights<T, Arch>::rows * ld];
  for (index_t j = 0; j < t.n_keys; j += ld) {
    const index_t n = std::min(ld, t.n_keys - j);
    transpose_out<T, Arch>(t.e + j * tile_of_weights<T, Arch>::rows, tile_of_weights<T, Arch>::rows,
                           t.n_rows, n, t.factor.data(), rows, ld);
    store_rows<T, Arch, W>(rows, ld, t.n_rows, n, out + (t.first_key + j) * dim_stride, row_stride,
                           dim_stride);
  }
}

}  // namespace detail

/// The weights that dense attention gives to the values, all of them.
///
///     weights_ij = exp(s_ij − lse_i),  s = rule(softcap(scale · q kᵀ))
///
/// For looking at small problems and for tests: n_q × n_kv numbers are what the kernels of
/// attention never store. `diagnose_attention` says what most people look for without storing them
/// either.
///
/// @param q        [B, H, n_q, d_qk]
/// @param k        [B, Hkv, n_kv, d_qk]; Hkv divides H, query head h reads head h / (H / Hkv)
/// @param weights  [B, H, n_q, n_kv], in memory of its own
/// @param rule     masks and biases, composed with `&` (score_rule.hpp)
/// @param options  scale, softcap, sinks as in dense_attention; precision is not looked at
/// @param ctx      threads and reused scratch (context.hpp)
///
/// **Numerics** relative error at most 24 eps (1 + S/√d_qk), S = max_ij scale·Σ_c |q_ic k_jc|. A
/// row sums to 1, less the share of a sink; a row without a key is 0. A forbidden key has weight 0
/// whatever it holds; where a score is NaN or +inf the allowed keys of the row are NaN. On x86
/// subnormal numbers count as 0.
/// **Errors** shape_error, option_error, before anything is written.
/// **Cost** 2 n_q n_kv d_qk flops per head; scratch O(n_kv) per thread.
/// **Example** examples/diagnostics.cpp
template <viewable Q, viewable K, class W, score_rule R = no_mask, class Arch = simd::default_arch>
requires viewable<W>
void attention_weights(const Q& q, const K& k, W&& weights, const R& rule = {},
                       const dense_options& options = {}, context& ctx = default_context()) {
  constexpr std::string_view function = "attention_weights";
  const auto qs = view(q);
  const auto ks = view(k);
  const auto out = view(weights);
  using T = simd::compute_t<element_t<const Q&>>;
  static_assert(detail::is_element<element_t<W>> &&
                    std::is_same_v<T, simd::compute_t<element_t<W>>>,
                "weights are written: not const; double for double tensors, else not");
  const auto problem = detail::make_weights_problem<Arch>(function, qs, ks, rule, options);
  detail::check_output(function, "weights", out, qs, ks.extent(2), "length of k");
  detail::check_disjoint(function, "weights", out, "q", qs);
  detail::check_disjoint(function, "weights", out, "k", ks);
  if (out.size() == 0) return;

  using worker = detail::weights_worker<T, Arch, R>;
  const index_t tiles = (problem.n_q + worker::QS - 1) / worker::QS;
  ctx.run(problem.n_batch * problem.n_heads * tiles, 1, worker::scratch_bytes(problem, rule),
          [&](std::byte* scratch, detail::work_queue& queue) noexcept {
            const simd::flush_subnormals mode;
            worker rows(problem, rule, detail::scratch_carver(scratch));
            for (index_t item, last; queue.next(item, last);) {
              const index_t head = item / tiles;
              const auto& tile = rows.weigh(head / problem.n_heads, head % problem.n_heads,
                                            item % tiles * worker::QS);
              detail::store_weights(tile, out);
            }
          });
}

}  // namespace attn
