// SPDX-License-Identifier: MIT
#pragma once

#include "reference/tensor.hpp"

namespace reference {

struct merge_result {
  tensor out;  // [B, H, n_q, d_v]
  tensor lse;  // [B, H, n_q, 1]
};

/// The attention over two disjoint sets of keys from the attention over each:
/// lse = ln(e^lse_a + e^lse_b), out = e^(lse_a − lse) out_a + e^(lse_b − lse) out_b.
merge_result merge_attention(const tensor& out_a, const tensor& lse_a, const tensor& out_b,
                             const tensor& lse_b);

}  // namespace reference
