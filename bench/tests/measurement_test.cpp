// SPDX-License-Identifier: MIT
//
// What attn_compare measures with: memory, statistics, probes, noise, errors.
#include "support/catch.hpp"
#include "support/heap_meter.hpp"
#include "support/normal_noise.hpp"
#include "support/oracle.hpp"
#include "support/peak_clock.hpp"
#include "support/problem.hpp"
#include "support/read_probe.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include <Eigen/Core>

using namespace attn::bench;

namespace {

bool close(double a, double b) { return std::abs(a - b) <= 1e-12 * std::abs(b); }

// Allocated and filled where the compiler cannot see that it is not needed.
void hold(std::size_t bytes) {
  std::vector<char> block(bytes, 1);
  benchmark::DoNotOptimize(block.data());
}

}  // namespace

TEST_CASE("heap_meter: the most that was held at one time") {
  {
    const heap_meter meter;
    if (!meter.peak_bytes()) return;  // no hook in this build
  }
  const auto close_to = [](std::size_t bytes, std::size_t expected) {
    return bytes >= expected && bytes < expected + 4096;  // and what malloc rounds up to
  };
  SECTION("one block after the other is as much as the larger one") {
    const heap_meter meter;
    hold(100'000);
    hold(300'000);
    hold(200'000);
    CHECK(close_to(*meter.peak_bytes(), 300'000));
  }
  SECTION("blocks at the same time add up, by every way to the heap") {
    const heap_meter meter;
    const auto a = std::make_unique<char[]>(100'000);
    const Eigen::ArrayXf b = Eigen::ArrayXf::Zero(25'000);
    const aligned_vector<char> c(100'000);
    void* d = std::malloc(50'000);
    d = std::realloc(d, 100'000);
    void* const e = std::calloc(1000, 100);
    benchmark::DoNotOptimize(a.get());
    benchmark::DoNotOptimize(b.data());
    benchmark::DoNotOptimize(c.data());
    benchmark::DoNotOptimize(d);
    benchmark::DoNotOptimize(e);
    CHECK(close_to(*meter.peak_bytes(), 500'000));
    std::free(d);
    std::free(e);
  }
  SECTION("what was held before does not count, even if it is freed") {
    auto before = std::make_unique<char[]>(1'000'000);
    benchmark::DoNotOptimize(before.get());
    const heap_meter meter;
    before.reset();
    hold(10'000);
    CHECK(*meter.peak_bytes() == 0);
  }
  SECTION("other threads count") {
    const heap_meter meter;
    std::thread([] { hold(1'000'000); }).join();
    CHECK(*meter.peak_bytes() >= 1'000'000);
  }
  SECTION("nothing is counted from before") {
    hold(1'000'000);
    const heap_meter meter;
    CHECK(*meter.peak_bytes() == 0);
  }
}

TEST_CASE("median and trimmed_mean") {
  CHECK(median({3, 1, 2}) == 2);
  CHECK(median({4, 1, 2, 3}) == 2.5);
  CHECK(std::isnan(median({})));
  CHECK(trimmed_mean({5}) == 5);
  std::vector<double> twenty(17, 1.0);  // the slowest 3 of 20 are left out
  twenty.insert(twenty.begin(), {100, 200, 300});
  CHECK(trimmed_mean(twenty) == 1);
}

TEMPLATE_TEST_CASE("peak_clock: the probe reaches about its own peak, half the work half of it", "",
                   float, double) {
  constexpr attn::index_t steps = 100'000;
  const double flops = fma_probe<TestType>::flops(steps);
  peak_clock<TestType> clock(1e-3);
  for (int i = 0; i < 20; ++i) clock.time([] { fma_probe<TestType>::run(steps); });
  CHECK(clock.runs() == 20);
  CHECK(clock.median_seconds() > 0);
  CHECK(clock.peak_gflops() > 0);
  CHECK(clock.of_peak(flops) > 0.7);
  CHECK(clock.of_peak(flops) < 1.3);
  CHECK(close(clock.of_peak(flops / 2), clock.of_peak(flops) / 2));
  CHECK(close(clock.of_peak(flops, 2) * 2, clock.of_peak(flops, 4) * 4));
  CHECK(clock.share_of_core() > 0);
  CHECK(clock.share_of_core() < 1.05);
}

TEST_CASE("read_seconds: takes longer for more") {
  const std::vector<float> data(std::size_t{1} << 22, std::numeric_limits<float>::denorm_min());
  const auto fastest = [&](std::size_t bytes) {
    double best = read_seconds(data.data(), bytes);
    for (int i = 0; i < 5; ++i) best = std::min(best, read_seconds(data.data(), bytes));
    return best;
  };
  const std::size_t all = data.size() * sizeof(float);
  CHECK(fastest(all) > fastest(all / 64));
  CHECK(fastest(0) >= 0);
}

TEST_CASE("normal_noise: depends on the seed, has mean 0 and variance 1") {
  normal_noise a(7), same(7), other(8);
  double sum = 0, squares = 0, fourth = 0;
  int equal_to_other = 0;
  constexpr int n = 100'000;
  for (int i = 0; i < n; ++i) {
    const double x = a();
    REQUIRE(x == same());
    equal_to_other += x == other();
    sum += x;
    squares += x * x;
    fourth += x * x * x * x;
  }
  CHECK(equal_to_other == 0);
  CHECK(std::abs(sum / n) < 4 / std::sqrt(n));
  CHECK(std::abs(squares / n - 1) < 4 * std::sqrt(2.0 / n));
  CHECK(std::abs(fourth / n - 3) < 4 * std::sqrt(96.0 / n));
}

TEST_CASE("problem_shape: pairs and flops") {
  problem_shape s{2, 6, 3, 5, 7, 4, 8};
  CHECK(s.pairs() == 2 * 6 * 5 * 7);
  CHECK(s.flops() == 2 * 6 * 5 * 7 * (2 * 4 + 2 * 8));
  s.causal = true;  // the last of 5 queries sees all 7 keys, the first 3 of them
  CHECK(s.pairs() == 2 * 6 * (3 + 4 + 5 + 6 + 7));
  s = {1, 1, 1, 4, 2, 1, 1, true};  // the first two of 4 queries see none of 2 keys
  CHECK(s.pairs() == 0 + 0 + 1 + 2);
}

TEST_CASE("oracle: compares with the double reference") {
  // q = 0: every key has the same weight, so a causal row is a mean of the values.
  const problem_shape shape{1, 1, 1, 3, 3, 1, 1, true};
  const problem<float> p{shape, {0, 0, 0}, {1, 2, 3}, {6, 2, 1}};
  const oracle reference(p);
  REQUIRE(reference.rows() == 3);

  std::vector<float> out{6, 4, 3};
  const auto compared = [&] {
    return reference.compare(attn::tensor_view<const float>(out.data(), 1, 1, 3, 1));
  };
  CHECK(compared().largest == 0);
  CHECK(compared().relative == 0);
  out[1] = 4.5f;
  CHECK(compared().largest == 0.5);
  CHECK(close(compared().relative, 0.5 / std::sqrt(36.0 + 16 + 9)));
  out[2] = std::numeric_limits<float>::quiet_NaN();
  CHECK(compared().largest == std::numeric_limits<double>::infinity());
}

TEST_CASE("oracle: of a large problem the first, the last and some rows between are compared") {
  const problem_shape shape{1, 2, 1, 40'000, 1000, 16, 16};
  const auto p = random_problem<float>(shape, 1);
  const oracle reference(p);
  REQUIRE(reference.rows() > 100);
  REQUIRE(reference.rows() < 40'000);
  std::vector<float> out(std::size_t{2} * 40'000 * 16);
  const auto compared = [&] {
    return reference.compare(attn::tensor_view<const float>(out.data(), 1, 2, 40'000, 16));
  };
  const double before = compared().largest;
  CHECK(before > 0);
  CHECK(compared().relative == 1);  // of an output of zeros
  for (const std::size_t first_or_last : {std::size_t{0}, out.size() - 1}) {
    out[first_or_last] = 1e6f;
    CHECK(compared().largest > 9e5);
    out[first_or_last] = 0;
  }
}
