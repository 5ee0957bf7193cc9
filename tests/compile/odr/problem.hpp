// SPDX-License-Identifier: MIT
//
// What the two objects and main.cpp share: plain memory, no type of attn or Eigen.
#pragma once

#include <cstddef>

namespace odr {

inline constexpr std::ptrdiff_t n_heads = 2, n_q = 37, n_kv = 41, d_qk = 24, d_v = 20;

struct problem {
  const float *q, *k,
      *v;            // [1, n_heads, n_q, d_qk] [1, n_heads, n_kv, d_qk] [1, n_heads, n_kv, d_v]
  float *out, *lse;  // [1, n_heads, n_q, d_v] [1, n_heads, n_q, 1]
};

// The same source, built for x86-64 and for x86-64-v4. Causal, and keys end at 33.
void baseline_attention(const problem& p);
void wide_attention(const problem& p);

inline constexpr std::ptrdiff_t key_length = 33;

}  // namespace odr
