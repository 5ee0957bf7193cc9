// SPDX-License-Identifier: MIT
//
// Calls attention from an object built for x86-64 and from one built for x86-64-v4, linked into one
// program, and compares both with plain loops. With the argument "baseline" the wide one is linked
// but never called: what a program that dispatches at run time does on an old machine. With
// "wide_first" code that both share is the wide object's, which an old machine cannot run at all.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "problem.hpp"

namespace {

using namespace odr;

std::vector<float> noise(std::ptrdiff_t n, std::uint32_t seed) {
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& value : x) {
    seed = seed * 1664525u + 1013904223u;  // the linear congruence of Numerical Recipes
    value = static_cast<float>(seed >> 8) / 8388608.0f - 1.0f;
  }
  return x;
}

// softmax(q kᵀ / √d) v, row by row.
std::vector<double> expected(const problem& p) {
  std::vector<double> out;
  for (std::ptrdiff_t h = 0; h < n_heads; ++h) {
    for (std::ptrdiff_t i = 0; i < n_q; ++i) {
      const std::ptrdiff_t keys = std::min(i + 1, key_length);
      double sum = 0;
      std::vector<double> row(d_v);
      for (std::ptrdiff_t j = 0; j < keys; ++j) {
        double score = 0;
        for (std::ptrdiff_t c = 0; c < d_qk; ++c) {
          score += double{p.q[(h * n_q + i) * d_qk + c]} * p.k[(h * n_kv + j) * d_qk + c];
        }
        const double weight = std::exp(score / std::sqrt(double{d_qk}));
        sum += weight;
        for (std::ptrdiff_t c = 0; c < d_v; ++c) {
          row[static_cast<std::size_t>(c)] += weight * p.v[(h * n_kv + j) * d_v + c];
        }
      }
      for (const double value : row) out.push_back(value / sum);
    }
  }
  return out;
}

bool check(const char* name, void (*attention)(const problem&), problem p) {
  std::vector<float> out(n_heads * n_q * d_v, NAN), lse(n_heads * n_q, NAN);
  p.out = out.data();
  p.lse = lse.data();
  attention(p);
  const std::vector<double> right = expected(p);
  double error = 0;
  for (std::size_t x = 0; x < out.size(); ++x) {
    const double difference = std::abs(double{out[x]} - right[x]);
    error = difference <= error ? error : difference;  // NaN stays
  }
  std::printf("%s: largest error %g\n", name, error);
  return error < 1e-5;
}

constexpr int skipped = 77;  // what CMakeLists.txt takes for "not run"

bool has_x86_64_v4() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}

}  // namespace

int main(int argc, char** argv) {
  const auto asked_for = [&](const char* what) {
    return argc > 1 && std::strcmp(argv[1], what) == 0;
  };
  if (asked_for("wide_first") && !has_x86_64_v4()) return skipped;
  const auto q = noise(n_heads * n_q * d_qk, 1), k = noise(n_heads * n_kv * d_qk, 2),
             v = noise(n_heads * n_kv * d_v, 3);
  const problem p{q.data(), k.data(), v.data(), nullptr, nullptr};
  bool good = check("x86-64", baseline_attention, p);
  if (asked_for("baseline")) return good ? 0 : 1;
  if (has_x86_64_v4()) {
    good = check("x86-64-v4", wide_attention, p) && good;
  } else {
    std::printf("x86-64-v4: not run, this processor lacks it\n");
  }
  return good ? 0 : 1;
}
