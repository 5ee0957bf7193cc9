// SPDX-License-Identifier: MIT
//
// Compiled twice, with ATTN_ODR_ENTRY = baseline_attention and = wide_attention.
#include <array>

#include <attn/attn.hpp>

#include "problem.hpp"

void odr::ATTN_ODR_ENTRY(const problem& p) {
  using attn::bhld;
  const std::array<attn::index_t, 1> lengths{key_length};
  attn::context two_threads(2);
  attn::dense_attention(bhld(p.q, 1, n_heads, n_q, d_qk), bhld(p.k, 1, n_heads, n_kv, d_qk),
                        bhld(p.v, 1, n_heads, n_kv, d_v), bhld(p.out, 1, n_heads, n_q, d_v),
                        bhld(p.lse, 1, n_heads, n_q, 1),
                        attn::causal_mask{} & attn::key_lengths{lengths}, attn::dense_options{},
                        two_threads);
}
