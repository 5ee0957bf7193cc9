// SPDX-License-Identifier: MIT
#pragma once

#include "support/smyrf.hpp"

#include <attn/smyrf_attention.hpp>

#include <vector>

namespace attn_test {

inline reference::dense_options meaning_of(const attn::smyrf_options& o) {
  return {.scale = o.scale, .softcap = o.softcap, .sinks = {}};
}

/// smyrf_attention on the operands, against the oracle of its plan.
template <class T, class Rule = attn::no_mask>
comparison check_smyrf(dense_operands<T>& x, const attn::smyrf_options& options,
                       const Rule& rule = {}, const reference::score_rule& meaning = {},
                       attn::context& ctx = attn::default_context()) {
  const attn::smyrf_clusters c(x.q.view(), x.k.view(), options, ctx);
  attn::smyrf_attention(x.q.view(), x.k.view(), x.v.view(), x.out.view(), x.lse.view(), c, rule,
                        ctx);
  // Each merge of two rounds rounds once more.
  const double constant = 16 + 2 * static_cast<double>(options.rounds);
  return x.matches(reference::smyrf_attention(x.q.values(), x.k.values(), x.v.values(),
                                              meetings_of(c, x.problem), meaning,
                                              meaning_of(options)),
                   {.constant = constant});
}

/// One of each kind: rounds, duplicates, ways to cluster.
inline const std::vector<attn::smyrf_options> smyrf_kinds = {
    {.rounds = 1},
    {.rounds = 3},
    {.rounds = 4, .duplicates = attn::smyrf_duplicates::removed},
    {.rounds = 2, .clustering = attn::smyrf_clustering::bisection},
    {.rounds = 3,
     .duplicates = attn::smyrf_duplicates::removed,
     .clustering = attn::smyrf_clustering::bisection,
     .local_round = true},
};

}  // namespace attn_test
