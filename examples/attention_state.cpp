// SPDX-License-Identifier: MIT
//
// Attention in pieces: two workers hold half of the keys each, and their results merge into what
// one worker with all the keys would have found. Long caches, several machines and most kernels of
// this library rest on that.
#include <attn/attention_state.hpp>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdio>

int main() {
  // One query, four keys: their scores, and their values with d_v = 2.
  const std::array<double, 4> scores{0.5, -1.0, 2.0, 1.5};
  const std::array<std::array<double, 2>, 4> values{{{1, 0}, {0, 1}, {2, 2}, {-1, 3}}};

  // 1. A state takes in one key after the other; the sums grow, the memory does not.
  const auto attend = [&](std::size_t first, std::size_t last, std::array<double, 2>& out) {
    attn::attention_state<double> state(out);
    for (std::size_t j = first; j < last; ++j) state.add(scores[j], values[j]);
    std::printf("keys %zu to %zu: m = %.3f, l = %.6f, o = (%.6f, %.6f)\n", first, last - 1,
                state.m(), state.l(), state.o()[0], state.o()[1]);
    state.write(out);  // o / l, in place
    return state.lse();
  };
  std::array<double, 2> all{}, left{}, right{}, merged{};
  const double lse_all = attend(0, 4, all);
  double lse_left = attend(0, 2, left), lse_right = attend(2, 4, right), lse_merged = 0;

  // 2. What kernels return, (out, lse), is enough to merge: here [1, 1, 1, 2] and [1, 1, 1, 1].
  const auto row = [](auto& x) { return attn::bhld(x.data(), 1, 1, 1, 2); };
  const auto one = [](double& x) { return attn::bhld(&x, 1, 1, 1, 1); };
  attn::merge_attention(row(left), one(lse_left), row(right), one(lse_right),  //
                        row(merged), one(lse_merged));

  std::printf("all at once: (%.6f, %.6f), lse %.6f\n", all[0], all[1], lse_all);
  std::printf("merged:      (%.6f, %.6f), lse %.6f\n", merged[0], merged[1], lse_merged);
  const double error =
      std::abs(merged[0] - all[0]) + std::abs(merged[1] - all[1]) + std::abs(lse_merged - lse_all);
  return error < 1e-14 ? 0 : 1;
}
