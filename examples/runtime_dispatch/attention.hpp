// SPDX-License-Identifier: MIT
//
// What main.cpp knows of attention: plain memory and functions, no type of attn or Eigen, so that
// nothing of theirs is compiled with main.cpp's flags and linked in the place of a kernel.
#pragma once

#include <cstddef>

/// Causal attention of contiguous [heads, length, width] tensors.
struct attention_problem {
  const float *q, *k, *v;
  float* out;
  std::ptrdiff_t heads, length, width;
};

void attention_x86_64(const attention_problem& p);
void attention_x86_64_v3(const attention_problem& p);
void attention_x86_64_v4(const attention_problem& p);
