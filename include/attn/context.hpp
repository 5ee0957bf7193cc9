// SPDX-License-Identifier: MIT
//
// Threads and reused scratch memory of the kernels.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

// Eigen 5 moved its thread pool out of unsupported/.
#if __has_include(<Eigen/ThreadPool>)
#include <Eigen/ThreadPool>
#else
#include <unsupported/Eigen/CXX11/ThreadPool>
#endif

#include <attn/error.hpp>
#include <attn/view.hpp>

namespace attn {

namespace detail {

// Memory at cache-line alignment that only grows. operator new and not Eigen's allocator: the
// latter's alignment changes with the -m flags of the translation unit.
class scratch_buffer {
 public:
  static constexpr std::size_t alignment = 64;

  [[nodiscard]] std::byte* reserve(std::size_t bytes) {
    if (bytes > size_) {
      memory_.reset();
      size_ = 0;
      memory_.reset(static_cast<std::byte*>(::operator new (bytes, std::align_val_t{alignment})));
      size_ = bytes;
    }
    return memory_.get();
  }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }

 private:
  struct release {
    void operator()(std::byte* p) const noexcept {
      ::operator delete (p, std::align_val_t{alignment});
    }
  };
  std::unique_ptr<std::byte, release> memory_;
  std::size_t size_ = 0;
};

// Items [0, n) handed out in order, `grain` at a time.
class work_queue {
 public:
  work_queue(index_t n_items, index_t grain) noexcept : end_(n_items), grain_(grain) {}

  // The next range; false when there is none left.
  [[nodiscard]] bool next(index_t& first, index_t& last) noexcept {
    first = begin_.fetch_add(grain_, std::memory_order_relaxed);
    last = std::min(first + grain_, end_);
    return first < end_;
  }

 private:
  std::atomic<index_t> begin_{0};
  index_t end_, grain_;
};

}  // namespace detail

/// How many threads a call may use, and the scratch memory that is kept between calls, so that a
/// repeated call of the same size does not allocate.
///
/// A context may be shared by calls that run at the same time or inside one another (a score
/// function that itself calls a kernel): the call that finds it in use takes scratch of its own.
/// A call made from a thread of the context's own pool runs on that thread alone.
///
/// **Example** examples/threads.cpp
class context {
 public:
  /// `n_threads` threads: the caller and `n_threads` − 1 that the context owns. 1 makes no thread.
  ///
  /// **Errors** option_error if `n_threads` is below 1.
  explicit context(int n_threads = 1) : n_threads_(checked(n_threads)), slots_(slot_count()) {
    if (n_threads_ > 1) {
      owned_pool_ = std::make_unique<Eigen::ThreadPool>(n_threads_ - 1);
      pool_ = owned_pool_.get();
    }
  }

  /// As many threads as `pool` has. The caller is one of them and works too, so a call puts at
  /// most NumThreads() − 1 tasks into the pool. The pool must outlive the context.
  ///
  /// **Errors** option_error if `pool` is null.
  explicit context(Eigen::ThreadPoolInterface* pool)
      : n_threads_(checked(pool)), slots_(slot_count()), pool_(pool) {}

  context(const context&) = delete;
  context& operator=(const context&) = delete;

  [[nodiscard]] int n_threads() const noexcept { return n_threads_; }

  /// Bytes of scratch held at present, over all threads.
  [[nodiscard]] std::size_t scratch_bytes() const noexcept {
    std::size_t sum = 0;
    for (const auto& slot : slots_) sum += slot.size();
    return sum;
  }

  /// For kernels: runs `body(scratch, queue)` on up to n_threads() threads, each with
  /// `scratch_bytes` of its own (aligned to 64), and returns when all are done. `body` takes
  /// ranges from the queue until it is empty; it must not throw. Items must not depend on each
  /// other. Allocates before any work starts.
  template <class Body>
  void run(index_t n_items, index_t grain, std::size_t scratch_bytes, const Body& body) {
    run_shared(
        n_items, grain, scratch_bytes, 0,
        [&](std::byte* scratch, std::byte*, detail::work_queue& queue) { body(scratch, queue); });
  }

  /// The same with `shared_bytes` that all threads see, zeroed before they start:
  /// `body(scratch, shared, queue)`.
  template <class Body>
  void run_shared(index_t n_items, index_t grain, std::size_t scratch_bytes,
                  std::size_t shared_bytes, const Body& body) {
    if (n_items <= 0) return;
    const index_t ranges = (n_items - 1) / grain + 1;
    int workers = static_cast<int>(std::min<index_t>(n_threads_, ranges));
    if (workers > 1 && pool_->CurrentThreadId() >= 0) workers = 1;  // inside our own pool

    const lease held(*this, workers, scratch_bytes, shared_bytes);
    if (shared_bytes > 0) std::memset(held.shared(), 0, shared_bytes);
    detail::work_queue queue(n_items, grain);
    if (workers == 1) {
      body(held.scratch(0), held.shared(), queue);
      return;
    }
    // One pointer is captured, which std::function stores without allocating.
    struct shared_state {
      const Body& body;
      const lease& held;
      detail::work_queue& queue;
      Eigen::Barrier done;
      std::atomic<int> next_slot{1};
    } shared{body, held, queue, Eigen::Barrier(static_cast<unsigned>(workers - 1))};
    for (int w = 1; w < workers; ++w) {
      pool_->Schedule([state = &shared] {
        const int slot = state->next_slot.fetch_add(1, std::memory_order_relaxed);
        state->body(state->held.scratch(slot), state->held.shared(), state->queue);
        state->done.Notify();
      });
    }
    body(held.scratch(0), held.shared(), queue);
    shared.done.Wait();
  }

 private:
  // The context's own scratch, or if that is in use, a set that lives as long as the call.
  class lease {
   public:
    lease(context& owner, int workers, std::size_t bytes, std::size_t shared_bytes)
        : owner_(owner), owns_slots_(!owner.busy_.exchange(true, std::memory_order_acquire)) {
      try_reserve(static_cast<std::size_t>(workers), bytes, shared_bytes);
    }
    ~lease() {
      if (owns_slots_) owner_.busy_.store(false, std::memory_order_release);
    }
    lease(const lease&) = delete;
    lease& operator=(const lease&) = delete;

    [[nodiscard]] std::byte* scratch(int slot) const noexcept {
      return slots()[static_cast<std::size_t>(slot) + 1].reserve(0);
    }
    [[nodiscard]] std::byte* shared() const noexcept { return slots()[0].reserve(0); }

   private:
    void try_reserve(std::size_t workers, std::size_t bytes, std::size_t shared_bytes) {
      guard on_failure{*this};
      if (!owns_slots_) own_.resize(workers + 1);
      (void)slots()[0].reserve(shared_bytes);
      for (std::size_t w = 1; w <= workers; ++w) (void)slots()[w].reserve(bytes);
      on_failure.armed = false;
    }
    // bad_alloc leaves the constructor, so the destructor above would not run.
    struct guard {
      lease& self;
      bool armed = true;
      ~guard() {
        if (armed && self.owns_slots_) self.owner_.busy_.store(false, std::memory_order_release);
      }
    };
    [[nodiscard]] std::vector<detail::scratch_buffer>& slots() const noexcept {
      return owns_slots_ ? owner_.slots_ : own_;
    }

    context& owner_;
    bool owns_slots_;
    mutable std::vector<detail::scratch_buffer> own_;
  };

  static int checked(int n_threads) {
    if (n_threads < 1) {
      detail::raise<option_error>("context: n_threads is " + std::to_string(n_threads) +
                                  ", expected at least 1");
    }
    return n_threads;
  }
  static int checked(Eigen::ThreadPoolInterface* pool) {
    if (pool == nullptr) detail::raise<option_error>("context: pool is null");
    return std::max(1, pool->NumThreads());
  }
  // One shared by all threads, then one per thread.
  [[nodiscard]] std::size_t slot_count() const { return static_cast<std::size_t>(n_threads_) + 1; }

  int n_threads_;
  std::vector<detail::scratch_buffer> slots_;
  std::unique_ptr<Eigen::ThreadPool> owned_pool_;
  Eigen::ThreadPoolInterface* pool_ = nullptr;
  std::atomic<bool> busy_{false};
};

/// The context that calls without one use: serial, one per thread.
[[nodiscard]] inline context& default_context() {
  thread_local context serial(1);
  return serial;
}

}  // namespace attn
