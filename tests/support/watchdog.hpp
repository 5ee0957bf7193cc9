// SPDX-License-Identifier: MIT
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace attn_test {

/// Ends the program with a message if the scope it guards does not: a deadlock is a failure, not
/// a test run that hangs.
class watchdog {
 public:
  watchdog(const char* what, std::chrono::seconds patience);
  ~watchdog();
  watchdog(const watchdog&) = delete;
  watchdog& operator=(const watchdog&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::thread thread_;
};

}  // namespace attn_test
