// SPDX-License-Identifier: MIT
//
// Kinds of attention to try an approximation on: captured from a trained encoder, and made up.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "problem.hpp"

namespace attn::bench {

struct attention_family {
  std::string name, what;
  std::function<problem<float>()> make;
};

/// All families; `captured` is bench/data/minilm_qkv.safetensors, read when a family is made.
[[nodiscard]] std::vector<attention_family>
attention_families(const std::filesystem::path& captured);

}  // namespace attn::bench
