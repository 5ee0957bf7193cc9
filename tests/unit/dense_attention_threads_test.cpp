// SPDX-License-Identifier: MIT
//
// Contexts, pools, and calls from anywhere: no deadlock, no thread that was not asked for.
#include "support/catch.hpp"
#include "support/dense_call.hpp"
#include "support/watchdog.hpp"

#include <attn/context.hpp>

#include <array>
#include <atomic>
#include <filesystem>
#include <iterator>
#include <thread>
#include <vector>

using namespace attn_test;

namespace {

const dense_problem problem{.n_batch = 2, .n_heads = 3, .n_kv_heads = 3, .n_q = 100, .n_kv = 150};

/// Threads of this process, or −1 where the system does not tell.
long count_threads() {
  std::error_code error;
  const std::filesystem::directory_iterator tasks("/proc/self/task", error);
  return error ? -1 : static_cast<long>(std::distance(begin(tasks), end(tasks)));
}

/// Whether a call in `ctx` gives what a serial one gives.
bool right(attn::context& ctx, const dense_problem& p = problem) {
  dense_operands<float> x(p), expected(p);
  attend(x, attn::no_mask{}, {}, ctx);
  attend(expected);
  return static_cast<bool>(same_bits_out(x, expected));
}

}  // namespace

TEST_CASE("Calls with the default context start no thread") {
  const watchdog guard("callers with contexts of their own", std::chrono::seconds(60));
  std::atomic<int> wrong{0}, ready{0};
  std::atomic<bool> counted{false};
  const long before = count_threads();
  std::vector<std::thread> callers;
  for (int t = 0; t < 8; ++t)
    callers.emplace_back([&] {
      for (int call = 0; call < 20; ++call)
        if (!right(attn::default_context())) ++wrong;
      ++ready;
      while (!counted) std::this_thread::yield();
    });
  while (ready < 8) std::this_thread::yield();
  const long during = count_threads();
  counted = true;
  for (auto& t : callers) t.join();
  CHECK(wrong == 0);
  if (before >= 0) CHECK(during == before + 8);
}

TEST_CASE("context(n) uses n threads: the caller and n − 1 of its own") {
  const watchdog guard("context(n)", std::chrono::seconds(60));
  const int n = GENERATE(1, 2, 5);
  const long before = count_threads();
  attn::context ctx(n);
  CHECK(right(ctx));
  if (before >= 0) CHECK(count_threads() == before + n - 1);
}

TEST_CASE("Several callers share one context, and two contexts one pool") {
  const watchdog guard("callers that share", std::chrono::seconds(120));
  Eigen::ThreadPool pool(2);
  attn::context own(2), a(&pool), b(&pool);
  const std::array<attn::context*, 3> contexts = {&own, &a, &b};
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (std::size_t t = 0; t < 6; ++t)
    callers.emplace_back([&, t] {
      for (int call = 0; call < 10; ++call)
        if (!right(*contexts[t % 3])) ++wrong;
    });
  for (auto& t : callers) t.join();
  CHECK(wrong == 0);
}

TEST_CASE("A call from a task of the same pool") {
  const watchdog guard("a call from a task of the pool", std::chrono::seconds(60));
  Eigen::ThreadPool pool(2);
  attn::context ctx(&pool);
  std::atomic<int> wrong{0};
  Eigen::Barrier done(6);
  for (int task = 0; task < 6; ++task)
    pool.Schedule([&] {
      if (!right(ctx)) ++wrong;
      done.Notify();
    });
  done.Wait();
  CHECK(wrong == 0);
}

TEST_CASE("A score function that calls the library, in the same context or the default one") {
  const watchdog guard("attention inside a score function", std::chrono::seconds(120));
  const bool same_context = GENERATE(false, true);
  attn::context ctx(GENERATE(1, 2, 3));
  const dense_problem inner{.n_heads = 2, .n_kv_heads = 1, .n_q = 2, .n_kv = 20};
  dense_operands<float> expected(inner);
  attend(expected);
  std::atomic<int> wrong{0};
  const attn::score_rule_fn rule([&](float score, index_t, index_t, index_t i, index_t j) {
    if ((i + j) % 50 == 0) {
      dense_operands<float> x(inner);
      attend(x, attn::no_mask{}, {}, same_context ? ctx : attn::default_context());
      if (!same_bits_out(x, expected)) ++wrong;
    }
    return score;
  });
  dense_operands<float> outer(problem);
  attend(outer, rule, {}, ctx);
  CHECK(wrong == 0);
  CHECK(outer.matches(outer.expected()));
}
