// SPDX-License-Identifier: MIT
//
// What a person sees while a long row runs.
#pragma once

#include <cstdio>
#include <string>

#include <unistd.h>

namespace attn::bench {

/// One line on stderr. On a terminal it is rewritten in place and wiped before the row is printed;
/// elsewhere only what takes long is said, on lines of its own.
class progress {
 public:
  progress() = default;
  progress(const progress&) = delete;
  progress& operator=(const progress&) = delete;
  ~progress() { clear(); }  // also before the message of an exception

  /// `seconds` is how long the step will take, as far as known; 0 if it is not.
  void show(const std::string& text, double seconds = 0) {
    if (terminal_) {
      std::fprintf(stderr, "\r\033[K%s ...", text.c_str());
    } else if (seconds > long_step) {
      std::fprintf(stderr, "%s ...\n", text.c_str());
    }
    std::fflush(stderr);
  }
  void clear() const {
    if (terminal_) std::fprintf(stderr, "\r\033[K");
  }

 private:
  static constexpr double long_step = 2;
  bool terminal_ = isatty(STDERR_FILENO) == 1;
};

}  // namespace attn::bench
