// SPDX-License-Identifier: MIT
#include "support/allocation_counter.hpp"
#include "support/catch.hpp"
#include "support/watchdog.hpp"

#include <attn/context.hpp>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

using attn::context;
using attn::index_t;

namespace {

/// Runs items [0, n) and counts how often each is visited.
std::vector<int> visits(context& ctx, index_t n, index_t grain) {
  std::vector<std::atomic<int>> seen(static_cast<std::size_t>(n));
  ctx.run(n, grain, 0, [&](std::byte*, auto& queue) {
    index_t first = 0, last = 0;
    while (queue.next(first, last))
      for (index_t i = first; i < last; ++i) ++seen[static_cast<std::size_t>(i)];
  });
  return {seen.begin(), seen.end()};
}

}  // namespace

TEST_CASE("Every item is done once, whatever the threads and the grain") {
  const attn_test::watchdog guard("context::run", std::chrono::seconds(60));
  const int n_threads = GENERATE(1, 2, 3, 8);
  const index_t n = GENERATE(0, 1, 2, 7, 100);
  const index_t grain = GENERATE(1, 3, 1000);
  CAPTURE(n_threads, n, grain);
  context ctx(n_threads);
  CHECK(ctx.n_threads() == n_threads);
  CHECK(visits(ctx, n, grain) == std::vector<int>(static_cast<std::size_t>(n), 1));
}

TEST_CASE("A pool that is handed in does the work") {
  const attn_test::watchdog guard("a pool handed in", std::chrono::seconds(60));
  Eigen::ThreadPool pool(3);
  context ctx(&pool);
  CHECK(ctx.n_threads() == 3);
  CHECK(visits(ctx, 50, 1) == std::vector<int>(50, 1));
}

TEST_CASE("Scratch is aligned, one's own, and kept between calls") {
  const attn_test::watchdog guard("scratch", std::chrono::seconds(60));
  const int n_threads = GENERATE(1, 2, 4);
  context ctx(n_threads);
  std::mutex mutex;
  std::set<std::byte*> scratch;
  bool aligned = true;
  const auto body = [&](std::byte* mine, auto& queue) {
    index_t first = 0, last = 0;
    while (queue.next(first, last)) {
      const std::lock_guard lock(mutex);
      aligned = aligned && reinterpret_cast<std::uintptr_t>(mine) % 64 == 0;
      for (int e = 0; e < 1000; ++e) mine[e] = std::byte{1};
      scratch.insert(mine);
    }
  };
  ctx.run(100, 1, 1000, body);
  CHECK(aligned);
  CHECK(scratch.size() <= static_cast<std::size_t>(n_threads));
  CHECK(ctx.scratch_bytes() >= 1000);

  const std::size_t held = ctx.scratch_bytes();
  const attn_test::allocation_counter allocations;
  const auto quiet = [](std::byte*, auto& queue) {
    index_t first = 0, last = 0;
    while (queue.next(first, last)) {
    }
  };
  for (int call = 0; call < 10; ++call) ctx.run(100, 1, 1000, quiet);
  ctx.run(100, 1, 10, quiet);
  CHECK(allocations.count() == 0);
  CHECK(ctx.scratch_bytes() == held);
}

TEST_CASE("A call inside a call, from the same thread or a worker, neither blocks nor overwrites") {
  const attn_test::watchdog guard("nested context::run", std::chrono::seconds(60));
  const int n_threads = GENERATE(1, 2, 4);
  CAPTURE(n_threads);
  context ctx(n_threads);
  std::atomic<int> inner_items{0};
  std::atomic<bool> overwritten{false};
  ctx.run(20, 1, 64, [&](std::byte* outer, auto& queue) {
    index_t first = 0, last = 0;
    while (queue.next(first, last)) {
      outer[0] = std::byte{42};
      ctx.run(5, 1, 64, [&](std::byte* inner, auto& inner_queue) {
        index_t a = 0, b = 0;
        while (inner_queue.next(a, b)) {
          inner[0] = std::byte{7};
          ++inner_items;
        }
      });
      if (outer[0] != std::byte{42}) overwritten = true;
    }
  });
  CHECK(inner_items == 100);
  CHECK_FALSE(overwritten);
}

TEST_CASE("Several threads may share a context") {
  const attn_test::watchdog guard("a shared context", std::chrono::seconds(60));
  context ctx(2);
  std::atomic<int> done{0};
  std::vector<std::thread> callers;
  for (int t = 0; t < 4; ++t)
    callers.emplace_back([&] {
      for (int call = 0; call < 50; ++call)
        if (visits(ctx, 20, 1) == std::vector<int>(20, 1)) ++done;
    });
  for (auto& t : callers) t.join();
  CHECK(done == 200);
}

TEST_CASE("A call from a task of the pool does not wait for that pool") {
  const attn_test::watchdog guard("a call from the pool's own task", std::chrono::seconds(60));
  Eigen::ThreadPool pool(2);
  context ctx(&pool);
  Eigen::Barrier done(4);
  std::atomic<int> right{0};
  for (int task = 0; task < 4; ++task)
    pool.Schedule([&] {
      if (visits(ctx, 30, 1) == std::vector<int>(30, 1)) ++right;
      done.Notify();
    });
  done.Wait();
  CHECK(right == 4);
}

TEST_CASE("The default context is serial and each thread's own") {
  CHECK(attn::default_context().n_threads() == 1);
  CHECK(&attn::default_context() == &attn::default_context());
  const context* other = nullptr;
  std::thread([&] { other = &attn::default_context(); }).join();
  CHECK(other != nullptr);
  CHECK(other != &attn::default_context());
}

TEST_CASE("A number of threads below 1 and a missing pool are refused") {
  const auto message = [](auto make) -> std::string {
    try {
      make();
    } catch (const attn::option_error& e) {
      return e.what();
    }
    return "no option_error";
  };
  CHECK(message([] { context ctx(0); }) == "context: n_threads is 0, expected at least 1");
  CHECK(message([] { context ctx(-3); }) == "context: n_threads is -3, expected at least 1");
  CHECK(message([] { context ctx(static_cast<Eigen::ThreadPoolInterface*>(nullptr)); }) ==
        "context: pool is null");
}
