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

/// dense_attention on the operands, into their out and lse. The problem's precision holds where
/// the options name none.
template <class T, class Rule = attn::no_mask>
void attend(dense_operands<T>& x, const Rule& rule = {}, attn::dense_options options = {},
            attn::context& ctx = attn::default_context()) {
  if (options.precision == attn::precision_mode::automatic) options.precision = x.problem.precision;
  attn::dense_attention(std::as_const(x.q).view(), std::as_const(x.k).view(),
                        std::as_const(x.v).view(), x.out.view(), x.lse.view(), rule, options, ctx);
}

/// A call on existing operands against the oracle. If the options name no precision, a strict call
/// is checked too.
template <class T, class Rule = attn::no_mask>
comparison check_dense(dense_operands<T>& x, const Rule& rule = {},
                       const reference::score_rule& meaning = {},
                       const attn::dense_options& options = {}, tolerance t = {}) {
  const reference::dense_result expected = x.expected(meaning, meaning_of(options));
  attn::dense_options strict = options;
  strict.precision = attn::precision_mode::strict;
  if (options.precision == attn::precision_mode::automatic) {
    attend(x, rule, strict);
    if (comparison verdict = x.matches(expected, t); !verdict) {
      verdict.message += " (strict)";
      return verdict;
    }
  }
  attend(x, rule, options);  // last: its results stay in x
  return x.matches(expected, t);
}

/// The same on random operands.
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
