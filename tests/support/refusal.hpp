// SPDX-License-Identifier: MIT
#pragma once

#include <attn/error.hpp>

#include <string>

namespace attn_test {

/// The message of a call that is refused, behind "shape_error: " or "option_error: ".
template <class Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const attn::shape_error& e) {
    return std::string("shape_error: ") + e.what();
  } catch (const attn::option_error& e) {
    return std::string("option_error: ") + e.what();
  }
  return "accepted";
}

}  // namespace attn_test
