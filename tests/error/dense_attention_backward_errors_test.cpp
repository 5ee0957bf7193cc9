// SPDX-License-Identifier: MIT
//
// What dense_attention_backward refuses, in its own words, before it writes anything.
#include "support/catch.hpp"

#include <attn/dense_attention_backward.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <vector>

using attn::tensor_view;

namespace {

/// Operands of a legal call: batch 2, heads 4 over 2, n_q 3, n_kv 5, d_qk 8, d_v 6, each in a
/// region of its own.
struct operands {
  std::vector<float> memory = std::vector<float>(9 * 256, 7);
  float* region(std::size_t n) { return memory.data() + 256 * n; }

  tensor_view<const float> q{region(0), 2, 4, 3, 8};
  tensor_view<const float> k{region(1), 2, 2, 5, 8};
  tensor_view<const float> v{region(2), 2, 2, 5, 6};
  tensor_view<const float> out{region(3), 2, 4, 3, 6};
  tensor_view<const float> lse{region(4), 2, 4, 3, 1};
  tensor_view<const float> d_out{region(5), 2, 4, 3, 6};
  tensor_view<float> d_q{region(6), 2, 4, 3, 8};
  tensor_view<float> d_k{region(7), 2, 2, 5, 8};
  tensor_view<float> d_v{region(8), 2, 2, 5, 6};

  /// The message less its "dense_attention_backward: ".
  template <class Error = attn::shape_error, class Rule = attn::no_mask>
  std::string error(const Rule& rule = {}, const attn::dense_options& options = {}) {
    const std::string prefix = "dense_attention_backward: ";
    std::string message = "no error";
    try {
      attn::dense_attention_backward(q, k, v, out, lse, d_out, d_q, d_k, d_v, rule, options);
    } catch (const Error& e) {
      message = e.what();
      message = message.starts_with(prefix) ? message.substr(prefix.size()) : "whose? " + message;
    }
    const bool untouched = std::ranges::all_of(memory, [](float x) { return x == 7; });
    return untouched ? message : message + ", and memory was written";
  }
  template <class Rule = attn::no_mask>
  std::string option_error(const Rule& rule = {}, const attn::dense_options& options = {}) {
    return error<attn::option_error>(rule, options);
  }
};

}  // namespace

TEST_CASE("The operands of these tests are legal as they stand") {
  operands x;
  CHECK(x.error() == "no error, and memory was written");
}

TEST_CASE("Shapes that do not fit") {
  operands x;
  SECTION("k") {
    x.k = {x.region(1), 2, 2, 5, 7};
    CHECK(x.error() == "k is [2, 2, 5, 7], expected dim 8 (d_qk of q)");
  }
  SECTION("heads") {
    x.k = {x.region(1), 2, 3, 5, 8}, x.v = {x.region(2), 2, 3, 5, 6};
    CHECK(x.error() == "k is [2, 3, 5, 8], expected heads that divide 4 (heads of q)");
  }
  SECTION("v") {
    x.v = {x.region(2), 2, 2, 6, 6};
    CHECK(x.error() == "v is [2, 2, 6, 6], expected length 5 (length of k)");
  }
  SECTION("out") {
    x.out = {x.region(3), 2, 4, 3, 8};
    CHECK(x.error() == "out is [2, 4, 3, 8], expected dim 6 (d_v of v)");
  }
  SECTION("lse") {
    x.lse = {x.region(4), 2, 4, 1, 3};
    CHECK(x.error() == "lse is [2, 4, 1, 3], expected length 3 (length of q)");
  }
  SECTION("d_out: heads") {
    x.d_out = {x.region(5), 2, 2, 3, 6};
    CHECK(x.error() == "d_out is [2, 2, 3, 6], expected heads 4 (heads of q)");
  }
  SECTION("d_out: dim") {
    x.d_out = {x.region(5), 2, 4, 3, 5};
    CHECK(x.error() == "d_out is [2, 4, 3, 5], expected dim 6 (d_v of v)");
  }
  SECTION("d_q") {
    x.d_q = {x.region(6), 1, 4, 3, 8};
    CHECK(x.error() == "d_q is [1, 4, 3, 8], expected batch 2 (batch of q)");
  }
  SECTION("d_k: one per key/value head, not per query head") {
    x.d_k = {x.region(7), 2, 4, 5, 8};
    CHECK(x.error() == "d_k is [2, 4, 5, 8], expected heads 2 (heads of k)");
  }
  SECTION("d_v") {
    x.d_v = {x.region(8), 2, 2, 5, 8};
    CHECK(x.error() == "d_v is [2, 2, 5, 8], expected dim 6 (d_v of v)");
  }
}

TEST_CASE("Memory that is missing, reversed or shared") {
  operands x;
  SECTION("null") {
    x.d_out = {nullptr, 2, 4, 3, 6};
    CHECK(x.error() == "d_out is [2, 4, 3, 6] at a null pointer, expected memory");
  }
  SECTION("a negative stride") {
    x.lse = {x.region(4) + 2, {2, 4, 3, 1}, {12, 3, -1, 1}};
    CHECK(x.error() == "lse has strides [12, 3, -1, 1], expected no negative stride (length)");
  }
  SECTION("stride 0 in a gradient, where results would have to be added") {
    x.d_k = {x.region(7), {2, 2, 5, 8}, {40, 0, 8, 1}};
    CHECK(x.error() ==
          "d_k has strides [40, 0, 8, 1], expected no stride of 0 in an output (heads)");
  }
  SECTION("a gradient in an operand") {
    x.d_q = {x.region(0), 2, 4, 3, 8};
    CHECK(x.error() == "d_q shares memory with q, expected separate memory");
  }
  SECTION("a gradient in part of another's") {
    x.d_v = {x.region(7) + 8, 2, 2, 5, 6};
    CHECK(x.error() == "d_v shares memory with d_k, expected separate memory");
  }
  SECTION("d_q in d_out") {
    x.d_q = {x.region(5), 2, 4, 3, 8};
    CHECK(x.error() == "d_q shares memory with d_out, expected separate memory");
  }
  SECTION("d_k in lse") {
    x.d_k = {x.region(4), 2, 2, 5, 8};
    CHECK(x.error() == "d_k shares memory with lse, expected separate memory");
  }
  SECTION("d_v in out") {
    x.d_v = {x.region(3), 2, 2, 5, 6};
    CHECK(x.error() == "d_v shares memory with out, expected separate memory");
  }
}

TEST_CASE("Options and rules") {
  operands x;
  CHECK(x.option_error(attn::no_mask{}, {.scale = std::nan("")}) ==
        "scale is nan, expected a finite number");
  CHECK(x.option_error(attn::no_mask{}, {.softcap = -1}) ==
        "softcap is -1, expected 0 (off) or a positive number");
  const std::array<float, 3> sinks{};
  CHECK(x.error(attn::no_mask{}, {.sinks = sinks}) ==
        "sinks has 3 elements, expected 4 (heads of q)");
  const std::array<attn::index_t, 2> lengths{5, 6};
  CHECK(x.option_error(attn::key_lengths{lengths}) ==
        "key_lengths[1] is 6, expected 0 to 5 (n_kv)");
  CHECK(x.option_error(attn::window_mask{-1, 0}) ==
        "window_mask.left is -1, expected at least 0 or attn::unlimited");
}
