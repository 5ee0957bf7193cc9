// SPDX-License-Identifier: MIT
//
// Times calls against the peak of the core they run on, at the moment they run.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <vector>

#include <attn/view.hpp>

#include "support/fma_probe.hpp"

namespace attn::bench {

/// The middle of the values (the mean of the two in the middle).
[[nodiscard]] inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t n = values.size();
  return n == 0 ? std::nan("") : (values[(n - 1) / 2] + values[n / 2]) / 2;
}

/// The mean without the slowest 15%, which interrupts and other programs made.
[[nodiscard]] inline double trimmed_mean(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t kept = std::max<std::size_t>(1, values.size() * 85 / 100);
  double sum = 0;
  for (std::size_t i = 0; i < kept && i < values.size(); ++i) sum += values[i];
  return sum / static_cast<double>(kept);
}

/// A stopwatch that runs the FMA probe before and after each timed call.
///
/// A core's clock moves by 20% and more within seconds, so a share of the peak means something only
/// if both were measured together. The share is a ratio of trimmed means: repeated, it scatters
/// by 1 to 2 points.
///
///     peak_clock<float> clock(seconds of one call, roughly);
///     while (...) clock.time([&] { dense_attention(q, k, v, out); });
///     clock.median_seconds(); clock.of_peak(flops of one call);
template <class T, class Arch = simd::default_arch>
class peak_clock {
 public:
  /// The probe takes a sixteenth of a call, at least 5 and at most 50 µs: one that is much longer
  /// or shorter than what it is compared with meets other interrupts and another clock (4% and
  /// more). Calls under 40 µs are timed several at a time.
  explicit peak_clock(double call_seconds)
      : calls_(std::clamp<index_t>(static_cast<index_t>(40e-6 / call_seconds), 1, 10'000)) {
    const double section = call_seconds * static_cast<double>(calls_);
    const double wanted = std::clamp(section / 16, 5e-6, 50e-6);
    constexpr index_t trial = 2000;
    double fastest = probe_seconds(trial);
    for (int i = 0; i < 20; ++i) fastest = std::min(fastest, probe_seconds(trial));
    steps_ = std::max<index_t>(1, static_cast<index_t>(wanted / fastest * trial));
  }

  /// Seconds of one call.
  template <class Call>
  double time(const Call& call) {
    const double before = probe_seconds(steps_);
    const auto begin = now();
    for (index_t i = 0; i < calls_; ++i) call();
    const double section = seconds_since(begin);
    probes_.push_back(before);
    if (section > 100e-6) probes_.push_back(probe_seconds(steps_));
    times_.push_back(section / static_cast<double>(calls_));
    return times_.back();
  }

  [[nodiscard]] int runs() const { return static_cast<int>(times_.size()); }
  [[nodiscard]] double median_seconds() const { return median(times_); }
  [[nodiscard]] double peak_gflops() const {
    return fma_probe<T, Arch>::flops(steps_) / median(probes_) * 1e-9;
  }
  /// Share of one core's peak that calls of `flops` operations reached.
  [[nodiscard]] double of_peak(double flops) const {
    const double peak = fma_probe<T, Arch>::flops(steps_) / trimmed_mean(probes_);
    return flops / trimmed_mean(times_) / peak;
  }

 private:
  static std::chrono::steady_clock::time_point now() { return std::chrono::steady_clock::now(); }
  static double seconds_since(std::chrono::steady_clock::time_point begin) {
    return std::chrono::duration<double>(now() - begin).count();
  }
  static double probe_seconds(index_t steps) {
    const auto begin = now();
    fma_probe<T, Arch>::run(steps);
    return seconds_since(begin);
  }

  index_t calls_;  // per timed section
  index_t steps_ = 0;
  std::vector<double> times_, probes_;
};

}  // namespace attn::bench
