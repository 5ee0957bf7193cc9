// SPDX-License-Identifier: MIT
//
// Times calls against the peak of the core they run on, at the moment they run.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include <time.h>

#include <attn/view.hpp>

#include "support/fma_probe.hpp"

namespace attn::bench {

[[nodiscard]] inline double seconds_of(clockid_t id) {
  timespec t{};
  clock_gettime(id, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}
/// Seconds that this thread has run.
[[nodiscard]] inline double thread_seconds() { return seconds_of(CLOCK_THREAD_CPUTIME_ID); }

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
/// if both were measured together. The share is a ratio of trimmed means; repeated, it scatters by
/// 1 to 2 points. It counts the time that the thread ran: what other programs take from it
/// lengthens `median_seconds` but is no fault of the code.
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
    double fastest = run_probe(trial).wall;
    for (int i = 0; i < 20; ++i) fastest = std::min(fastest, run_probe(trial).wall);
    steps_ = std::max<index_t>(1, static_cast<index_t>(wanted / fastest * trial));
  }

  /// Seconds of one call.
  template <class Call>
  double time(const Call& call) {
    const spell before = run_probe(steps_);
    const spell section = timed([&] {
      for (index_t i = 0; i < calls_; ++i) call();
    });
    add(probes_, before, 1);
    if (section.wall > 100e-6) add(probes_, run_probe(steps_), 1);
    add(times_, section, static_cast<double>(calls_));
    return times_.wall.back();
  }

  [[nodiscard]] int runs() const { return static_cast<int>(times_.wall.size()); }
  [[nodiscard]] double median_seconds() const { return median(times_.wall); }

  /// Of one core.
  [[nodiscard]] double peak_gflops() const {
    return fma_probe<T, Arch>::flops(steps_) / median(probes_.thread) * 1e-9;
  }
  /// Share of the peak of `threads` cores that calls of `flops` operations reached. The time that
  /// one thread ran says nothing about several: there it is the time that passed.
  [[nodiscard]] double of_peak(double flops, int threads = 1) const {
    const double probe = fma_probe<T, Arch>::flops(steps_);
    if (threads == 1) {
      return flops / trimmed_mean(times_.thread) / (probe / trimmed_mean(probes_.thread));
    }
    return flops / trimmed_mean(times_.wall) / (probe / trimmed_mean(probes_.wall)) / threads;
  }
  /// How much of the time that passed this thread ran; the rest went to other programs.
  [[nodiscard]] double share_of_core() const {
    return trimmed_mean(times_.thread) / trimmed_mean(times_.wall);
  }

 private:
  struct spell {
    double wall, thread;  // seconds that passed, seconds that this thread ran
  };
  struct spells {
    std::vector<double> wall, thread;
  };

  static void add(spells& all, const spell& one, double parts) {
    all.wall.push_back(one.wall / parts);
    all.thread.push_back(one.thread / parts);
  }
  template <class Work>
  static spell timed(const Work& work) {
    const double wall = seconds_of(CLOCK_MONOTONIC), thread = thread_seconds();
    work();
    const double thread_end = thread_seconds();
    return {seconds_of(CLOCK_MONOTONIC) - wall, thread_end - thread};
  }
  static spell run_probe(index_t steps) {
    return timed([&] { fma_probe<T, Arch>::run(steps); });
  }

  index_t calls_;  // per timed section
  index_t steps_ = 0;
  spells times_, probes_;
};

}  // namespace attn::bench
