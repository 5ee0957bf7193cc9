// SPDX-License-Identifier: MIT
#pragma once

#include "support/dense_call.hpp"

#include <attn/dense_attention_backward.hpp>

#include <utility>

namespace attn_test {

/// Bounds of the rounding errors of gradients, element by element, in units of the tolerance's
/// constant: see gradient_units.
struct gradient_bounds {
  reference::dense_gradients units;    // times eps
  reference::dense_gradients storage;  // absolute: what rounding out and the results to T adds
};

/// What a relative error of eps in every product and weight can do to each gradient:
///
///     d_v_jc  Σ_i (1 + S_i + |lse_i|) p_ij |d_out_ic|
///     d_q_ic  Σ_j (1 + S_i + |lse_i|) p_ij A_ij |scale k_jc|,  A_ij = |d_out_i|·|v_j| +
///     |d_out_i|·|out_i| d_k_jc  Σ_i ... |scale q_ic|
///
/// with S_i the row's score bound. `rounding` is that of the type out and the gradients are stored
/// in; out is what D is computed from.
gradient_bounds gradient_units(const reference::tensor& q, const reference::tensor& k,
                               const reference::tensor& v, const reference::tensor& d_out,
                               const reference::score_rule& rule,
                               const reference::dense_options& options, double rounding);

/// |Δ| ≤ constant · eps · unit + storage, element by element; NaN where the oracle has NaN.
comparison compare_gradients(const reference::dense_gradients& got,
                             const reference::dense_gradients& expected,
                             const gradient_bounds& bounds, double eps, double storage_floor,
                             tolerance t);

comparison compare_bits(const reference::dense_gradients& a, const reference::dense_gradients& b);

/// The operands of a backward call: those of the forward call, d_out (random), and the gradients.
template <class T>
struct backward_operands {
  dense_operands<T> x;
  tensor_buffer<T> d_out, d_q, d_k, d_v;

  explicit backward_operands(const dense_problem& p, double canary = std::nan(""))
      : x(p, canary), d_out(p.out_extents(), p.inputs, from_double<T>(canary)),
        d_q(p.q_extents(), p.outputs, from_double<T>(canary)),
        d_k(p.k_extents(), p.outputs, from_double<T>(canary)),
        d_v(p.v_extents(), p.outputs, from_double<T>(canary)) {
    d_out.assign(normal_tensor(p.out_extents(), 1000 + p.seed));
  }

  reference::dense_gradients gradients() const {
    return {d_q.values(), d_k.values(), d_v.values()};
  }

  comparison canaries_alive() const {
    if (!d_q.canaries_alive()) return {false, "written outside of d_q"};
    if (!d_k.canaries_alive()) return {false, "written outside of d_k"};
    if (!d_v.canaries_alive()) return {false, "written outside of d_v"};
    return {};
  }

  comparison matches(const reference::score_rule& meaning, const reference::dense_options& options,
                     tolerance t = {}) const {
    if (const comparison alive = canaries_alive(); !alive) return alive;
    const reference::tensor q = x.q.values(), k = x.k.values(), v = x.v.values();
    const reference::tensor g = d_out.values();
    constexpr double floor = std::is_same_v<T, Eigen::half> ? 0x1p-25 : 0;
    return compare_gradients(gradients(),
                             reference::dense_attention_backward(q, k, v, g, meaning, options),
                             gradient_units(q, k, v, g, meaning, options, storage_rounding<T>()),
                             arithmetic_epsilon<T>, floor, t);
  }
};

/// dense_attention_backward on operands whose out and lse are there.
template <class T, class Rule = attn::no_mask>
void differentiate(backward_operands<T>& y, const Rule& rule = {},
                   const attn::dense_options& options = {},
                   attn::context& ctx = attn::default_context()) {
  attn::dense_attention_backward(std::as_const(y.x.q).view(), std::as_const(y.x.k).view(),
                                 std::as_const(y.x.v).view(), std::as_const(y.x.out).view(),
                                 std::as_const(y.x.lse).view(), std::as_const(y.d_out).view(),
                                 y.d_q.view(), y.d_k.view(), y.d_v.view(), rule, options, ctx);
}

/// Forward and backward.
template <class T, class Rule = attn::no_mask>
void attend_and_differentiate(backward_operands<T>& y, const Rule& rule = {},
                              const attn::dense_options& options = {},
                              attn::context& ctx = attn::default_context()) {
  attend(y.x, rule, options, ctx);
  differentiate(y, rule, options, ctx);
}

/// One forward and backward call on existing operands, against the oracle.
template <class T, class Rule = attn::no_mask>
comparison check_backward(backward_operands<T>& y, const Rule& rule = {},
                          const reference::score_rule& meaning = {},
                          const attn::dense_options& options = {}, tolerance t = {}) {
  attend_and_differentiate(y, rule, options);
  return y.matches(meaning, meaning_of(options), t);
}

/// The same on random operands.
template <class T, class Rule = attn::no_mask>
comparison check_backward(const dense_problem& p, const Rule& rule = {},
                          const reference::score_rule& meaning = {},
                          const attn::dense_options& options = {}, tolerance t = {}) {
  backward_operands<T> y(p);
  return check_backward(y, rule, meaning, options, t);
}

}  // namespace attn_test
