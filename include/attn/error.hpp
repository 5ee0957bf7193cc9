// SPDX-License-Identifier: MIT
//
// The two exceptions of the library, and the floating-point modes it refuses.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

// -ffast-math lets the compiler assume that there is no NaN and no infinity, and the meaning of
// masks, empty rows and the lse rests on both.
#if (defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)) &&         \
    !defined(ATTN_ALLOW_FAST_MATH)
#error "attn needs IEEE infinities and NaN: build without -ffast-math / -ffinite-math-only, " \
       "or define ATTN_ALLOW_FAST_MATH and lose the rules on masks, NaN and empty rows"
#endif

namespace attn {

/// An argument has a shape that does not fit the others: extents, strides, counts, overlap.
class shape_error : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

/// An option has a value outside its range.
class option_error : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

namespace detail {

/// Throws `Error`; where exceptions are switched off, prints the message and aborts.
template <class Error>
[[noreturn]] void raise(const std::string& message) {
#if defined(__cpp_exceptions)
  throw Error(message);
#else
  std::fprintf(stderr, "attn: %s\n", message.c_str());
  std::abort();
#endif
}

}  // namespace detail
}  // namespace attn
