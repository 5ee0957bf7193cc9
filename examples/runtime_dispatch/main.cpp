// SPDX-License-Identifier: MIT
//
// Attention with the widest vectors that this processor has, in a program built for any x86-64.
#include "attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

namespace {

struct choice {
  const char* name;
  bool available;
  void (*attention)(const attention_problem&);
};

// The compiler's run time library asks the processor and the operating system, once.
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}

}  // namespace

int main() {
  const choice choices[] = {{"AVX-512", has_avx512(), attention_x86_64_v4},
                            {"AVX2", has_avx2(), attention_x86_64_v3},
                            {"SSE2", true, attention_x86_64}};

  constexpr std::ptrdiff_t heads = 2, length = 50, width = 24;
  std::vector<float> x(heads * length * width);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i));
  std::vector<float> first;
  for (const choice& c : choices) {
    if (!c.available) continue;
    std::vector<float> out(x.size());
    c.attention({x.data(), x.data(), x.data(), out.data(), heads, length, width});
    if (first.empty()) {
      std::printf("%s is what this processor runs\n", c.name);
      first = out;
    }
    // The others, to see that they agree: to rounding, not to the bit.
    float difference = 0;
    for (std::size_t i = 0; i < out.size(); ++i) {
      difference = std::max(difference, std::abs(out[i] - first[i]));
    }
    if (!(difference < 1e-5f)) {
      std::printf("%s differs by %g\n", c.name, static_cast<double>(difference));
      return 1;
    }
  }
  return 0;
}
