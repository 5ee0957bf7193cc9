// SPDX-License-Identifier: MIT
#pragma once

#include "support/dense_problem.hpp"

#include <attn/dense_attention.hpp>

#include <utility>

namespace attn_test {

/// The oracle's options for the library's.
inline reference::dense_options meaning_of(const attn::dense_options& options) {
  return {.scale = options.scale,
          .softcap = options.softcap,
          .sinks = {options.sinks.begin(), options.sinks.end()}};
}

/// dense_attention on the operands, into their out and lse.
template <class T, class Rule = attn::no_mask>
void attend(dense_operands<T>& x, const Rule& rule = {}, const attn::dense_options& options = {},
            attn::context& ctx = attn::default_context()) {
  attn::dense_attention(std::as_const(x.q).view(), std::as_const(x.k).view(),
                        std::as_const(x.v).view(), x.out.view(), x.lse.view(), rule, options, ctx);
}

/// One call on existing operands, against the oracle.
template <class T, class Rule = attn::no_mask>
comparison check_dense(dense_operands<T>& x, const Rule& rule = {},
                       const reference::score_rule& meaning = {},
                       const attn::dense_options& options = {}, tolerance t = {}) {
  attend(x, rule, options);
  return x.matches(x.expected(meaning, meaning_of(options)), t);
}

/// One call on random operands, against the oracle.
template <class T, class Rule = attn::no_mask>
comparison check_dense(const dense_problem& p, const Rule& rule = {},
                       const reference::score_rule& meaning = {},
                       const attn::dense_options& options = {}, tolerance t = {}) {
  dense_operands<T> x(p);
  return check_dense(x, rule, meaning, options, t);
}

/// Bits of out and lse of two calls.
template <class T>
comparison same_bits_out(const dense_operands<T>& a, const dense_operands<T>& b) {
  const comparison out = compare_bits(a.out.values(), b.out.values());
  return out ? compare_bits(a.lse.values(), b.lse.values()) : out;
}

}  // namespace attn_test
