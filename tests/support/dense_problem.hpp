// SPDX-License-Identifier: MIT
#pragma once

#include "reference/dense_attention.hpp"
#include "support/compare.hpp"
#include "support/element.hpp"
#include "support/random.hpp"
#include "support/tensor_buffer.hpp"

#include <attn/dense_options.hpp>

#include <array>
#include <cmath>
#include <cstdint>
#include <ostream>
#include <vector>

namespace attn_test {

/// The shape and the data of one call, printable: SCOPED_INFO it before a check.
struct dense_problem {
  index_t n_batch = 1;
  index_t n_heads = 1;
  index_t n_kv_heads = 1;
  index_t n_q = 1;
  index_t n_kv = 1;
  index_t d_qk = 8;
  index_t d_v = 8;
  layout inputs = layout::contiguous;
  layout outputs = layout::contiguous;
  double deviation = 1;  // of the elements of q: scores have this standard deviation
  std::uint64_t seed = 1;
  attn::precision_mode precision = attn::precision_mode::automatic;

  std::array<index_t, 4> q_extents() const { return {n_batch, n_heads, n_q, d_qk}; }
  std::array<index_t, 4> k_extents() const { return {n_batch, n_kv_heads, n_kv, d_qk}; }
  std::array<index_t, 4> v_extents() const { return {n_batch, n_kv_heads, n_kv, d_v}; }
  std::array<index_t, 4> out_extents() const { return {n_batch, n_heads, n_q, d_v}; }
  std::array<index_t, 4> lse_extents() const { return {n_batch, n_heads, n_q, 1}; }
  std::array<index_t, 4> score_extents() const { return {n_batch, n_heads, n_q, n_kv}; }
};

std::ostream& operator<<(std::ostream& out, const dense_problem& p);

/// Each problem in automatic and in strict precision: the first takes the fastest kernel for the
/// shape and the machine, the second the same one everywhere.
std::vector<dense_problem> in_both_precisions(const std::vector<dense_problem>& problems);

/// The operands of one call in element type T, random; everything around them is the canary.
template <class T>
struct dense_operands {
  dense_problem problem;
  tensor_buffer<T> q, k, v, out;
  tensor_buffer<arithmetic_t<T>> lse;

  explicit dense_operands(const dense_problem& p, double canary = std::nan(""))
      : problem(p), q(p.q_extents(), p.inputs, from_double<T>(canary)),
        k(p.k_extents(), p.inputs, from_double<T>(canary)),
        v(p.v_extents(), p.inputs, from_double<T>(canary)),
        out(p.out_extents(), p.outputs, from_double<T>(canary)),
        lse(p.lse_extents(), p.outputs, from_double<arithmetic_t<T>>(canary)) {
    q.assign(normal_tensor(p.q_extents(), 3 * p.seed, p.deviation));
    k.assign(normal_tensor(p.k_extents(), 3 * p.seed + 1));
    v.assign(normal_tensor(p.v_extents(), 3 * p.seed + 2));
  }

  /// What the operands as stored give.
  reference::dense_result expected(const reference::score_rule& rule = {},
                                   const reference::dense_options& options = {}) const {
    return reference::dense_attention(q.values(), k.values(), v.values(), rule, options);
  }

  comparison matches(const reference::dense_result& expected, tolerance t = {}) const {
    if (!out.canaries_alive()) return {false, "written outside of out"};
    if (!lse.canaries_alive()) return {false, "written outside of lse"};
    return compare_dense<T>(out.values(), lse.values(), expected, t);
  }
};

}  // namespace attn_test
