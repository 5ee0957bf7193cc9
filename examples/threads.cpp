// SPDX-License-Identifier: MIT
//
// Threads and scratch: a context holds both, and no number depends on how many threads there are.
#include <attn/dense_attention.hpp>

#include <cmath>
#include <cstdio>
#include <vector>

int main() {
  constexpr attn::index_t n_heads = 8, n = 700, d = 64;
  std::vector<float> memory(static_cast<std::size_t>(3 * n_heads * n * d));
  for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = std::sin(static_cast<float>(i));
  const auto operand = [&](attn::index_t x) {
    return attn::bhld<const float>(memory.data() + x * n_heads * n * d, 1, n_heads, n, d);
  };
  const auto run = [&](attn::context& ctx) {
    std::vector<float> out(static_cast<std::size_t>(n_heads * n * d));
    attn::dense_attention(operand(0), operand(1), operand(2),
                          attn::bhld(out.data(), 1, n_heads, n, d), attn::causal_mask{}, {}, ctx);
    return out;
  };

  // 1. Without a context a call is serial, on scratch that its thread keeps.
  const std::vector<float> serial = run(attn::default_context());

  // 2. Four threads: the caller and three that the context owns. Make it once and keep it, because
  //    the second call finds threads and scratch as the first one left them and allocates nothing.
  attn::context four(4);
  const bool same = run(four) == serial && run(four) == serial;
  std::printf("4 threads, %zu bytes of scratch: %s\n", four.scratch_bytes(),
              same ? "the same bits as one" : "other bits");

  // 3. A pool that the program has already, shared with Eigen's tensors.
  Eigen::ThreadPool pool(2);
  attn::context shared(&pool);
  const bool same_in_pool = run(shared) == serial;
  std::printf("a pool of %d: %s\n", shared.n_threads(),
              same_in_pool ? "the same bits" : "other bits");

  // 4. Inside a task of that pool a call runs on the task's own thread, so it can't wait for
  // itself.
  bool same_in_task = false;
  Eigen::Notification done;
  pool.Schedule([&] {
    same_in_task = run(shared) == serial;
    done.Notify();
  });
  done.Wait();
  return same && same_in_pool && same_in_task ? 0 : 1;
}
