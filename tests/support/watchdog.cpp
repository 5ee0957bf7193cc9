// SPDX-License-Identifier: MIT
#include "support/watchdog.hpp"

#include <cstdio>
#include <cstdlib>

namespace attn_test {

watchdog::watchdog(const char* what, std::chrono::seconds patience)
    : thread_([this, what, patience] {
        std::unique_lock lock(mutex_);
        if (changed_.wait_for(lock, patience, [this] { return done_; })) return;
        std::fprintf(stderr, "watchdog: %s is not done after %lld s\n", what,
                     static_cast<long long>(patience.count()));
        std::_Exit(EXIT_FAILURE);
      }) {}

watchdog::~watchdog() {
  {
    const std::lock_guard lock(mutex_);
    done_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

}  // namespace attn_test
