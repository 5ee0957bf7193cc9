// SPDX-License-Identifier: MIT
//
// Built once per instruction set, with ATTENTION the name of the function. The kernels carry the
// instruction set in their types, so that the copies don't collide.
#include "attention.hpp"

#include <attn/dense_attention.hpp>

void ATTENTION(const attention_problem& p) {
  const auto tensor = [&](auto* data) { return attn::bhld(data, 1, p.heads, p.length, p.width); };
  attn::dense_attention(tensor(p.q), tensor(p.k), tensor(p.v), tensor(p.out), attn::causal_mask{});
}
