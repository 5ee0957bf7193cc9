// SPDX-License-Identifier: MIT
//
// Runs methods on one problem and measures them.
#pragma once

#include <chrono>
#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "support/heap_meter.hpp"
#include "support/method.hpp"
#include "support/oracle.hpp"
#include "support/peak_clock.hpp"
#include "support/progress.hpp"

namespace attn::bench {

/// A line of the table.
struct comparison_row {
  std::string method;
  std::string obstacle;  ///< why it was not run; then nothing below means anything
  int runs = 0;
  double seconds = 0;        ///< median of one call
  double flops = 0;          ///< of one call
  double of_peak = 0;        ///< share of the peak of the cores used, measured between the calls
  double peak_gflops = 0;    ///< of one core
  double share_of_core = 1;  ///< with one thread: less where other programs ran in between
  /// Most heap held by the first call; the operands and the output are not in it.
  std::optional<std::size_t> extra_bytes = {};
  output_error error{};
  /// Share of the attention on the keys that their query sees.
  std::optional<double> captured = {};
};

/// Times one method: its first call for the memory, then `repeat` calls, or if that is 0 as many
/// as fit in a second, at least 3.
template <class T>
[[nodiscard]] comparison_row run_method(const method<T>& m, const problem<T>& p,
                                        const oracle& reference, int threads, int repeat,
                                        progress& status) {
  comparison_row row{.method = std::string(m.name), .obstacle = m.obstacle(p.shape)};
  if (!row.obstacle.empty()) return row;

  // Elements that a method forgets stay NaN and show as an error.
  const auto& n = p.shape;
  aligned_vector<T> elements(static_cast<std::size_t>(n.n_batch * n.n_heads * n.n_q * n.d_v),
                             static_cast<T>(std::numeric_limits<float>::quiet_NaN()));
  const auto out = bhld(elements.data(), n.n_batch, n.n_heads, n.n_q, n.d_v);

  // 1. First call, on a context without scratch.
  const auto seconds_of = [](const auto& call) {
    const auto begin = std::chrono::steady_clock::now();
    call();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  status.show(row.method + ": first call");
  const auto call = m.prepare(p, out, threads);
  double expected = 0;
  {
    const heap_meter meter;
    expected = seconds_of(call);
    row.extra_bytes = meter.peak_bytes();
  }

  // 2. Timed calls. A second call tells their length better where it costs little.
  if (expected < 0.2) expected = seconds_of(call);
  peak_clock<arithmetic_t<T>> clock(expected);
  double spent = 0;
  const auto enough = [&] {
    return repeat > 0 ? clock.runs() >= repeat : clock.runs() >= 3 && spent + expected > 1;
  };
  while (!enough()) {
    const int last = repeat > 0 ? repeat : std::max(3, static_cast<int>(1 / expected));
    status.show(row.method + ": call " + std::to_string(clock.runs() + 1) + " of " +
                    std::to_string(std::max(last, clock.runs() + 1)),
                expected);
    spent += clock.time(call);
  }

  row.runs = clock.runs();
  row.seconds = clock.median_seconds();
  row.flops = m.flops(n);
  row.of_peak = clock.of_peak(row.flops, threads);
  row.peak_gflops = clock.peak_gflops();
  if (threads == 1) row.share_of_core = clock.share_of_core();
  row.error = reference.compare<T>(out);
  status.show(row.method + ": what it captures", expected);
  row.captured = m.captured(p, reference);
  return row;
}

}  // namespace attn::bench
