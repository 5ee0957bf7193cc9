// SPDX-License-Identifier: MIT
//
// What merge_attention refuses, in its own words, before it writes anything.
#include "support/catch.hpp"

#include <attn/attention_state.hpp>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

using attn::index_t;
using attn::tensor_view;

namespace {

struct operands {
  std::vector<float> memory = std::vector<float>(6 * 64, 7);
  tensor_view<float> out_a{memory.data(), 1, 2, 3, 4};
  tensor_view<float> lse_a{memory.data() + 64, 1, 2, 3, 1};
  tensor_view<float> out_b{memory.data() + 128, 1, 2, 3, 4};
  tensor_view<float> lse_b{memory.data() + 192, 1, 2, 3, 1};
  tensor_view<float> out{memory.data() + 256, 1, 2, 3, 4};
  tensor_view<float> lse{memory.data() + 320, 1, 2, 3, 1};

  /// The message of the shape_error; says so if there was none or something was written.
  std::string error() {
    std::string message = "no shape_error";
    try {
      attn::merge_attention(out_a, lse_a, out_b, lse_b, out, lse);
    } catch (const attn::shape_error& e) {
      message = e.what();
    }
    const bool untouched = std::ranges::all_of(memory, [](float x) { return x == 7; });
    return untouched ? message : message + ", and memory was written";
  }
};

}  // namespace

TEST_CASE("Shapes that differ") {
  operands x;
  SECTION("out_b") {
    x.out_b = {x.out_b.data_handle(), 1, 2, 3, 5};
    CHECK(x.error() == "merge_attention: out_b is [1, 2, 3, 5], expected dim 4 (d_v of out_a)");
  }
  SECTION("lse_a: heads") {
    x.lse_a = {x.lse_a.data_handle(), 1, 1, 3, 1};
    CHECK(x.error() == "merge_attention: lse_a is [1, 1, 3, 1], expected heads 2 (heads of out_a)");
  }
  SECTION("lse_b: one per row") {
    x.lse_b = {x.lse_b.data_handle(), 1, 2, 3, 4};
    CHECK(x.error() == "merge_attention: lse_b is [1, 2, 3, 4], expected dim 1 (one lse per row)");
  }
  SECTION("out: rows") {
    x.out = {x.out.data_handle(), 1, 2, 4, 4};
    CHECK(x.error() == "merge_attention: out is [1, 2, 4, 4], expected length 3 (n_q of out_a)");
  }
  SECTION("lse: batch") {
    x.lse = {x.lse.data_handle(), 2, 2, 3, 1};
    CHECK(x.error() == "merge_attention: lse is [2, 2, 3, 1], expected batch 1 (batch of out_a)");
  }
}

TEST_CASE("Memory that is missing, reversed or shared") {
  operands x;
  SECTION("null") {
    x.out_a = {nullptr, 1, 2, 3, 4};
    CHECK(x.error() == "merge_attention: out_a is [1, 2, 3, 4] at a null pointer, expected memory");
  }
  SECTION("a negative stride") {
    x.lse_b = {x.lse_b.data_handle() + 2, {1, 2, 3, 1}, {6, 3, -1, 1}};
    CHECK(x.error() ==
          "merge_attention: lse_b has strides [6, 3, -1, 1], expected no negative stride (length)");
  }
  SECTION("stride 0 in an output") {
    x.out = {x.out.data_handle(), {1, 2, 3, 4}, {12, 0, 4, 1}};
    CHECK(x.error() == "merge_attention: out has strides [12, 0, 4, 1], expected no stride of 0 in "
                       "an output (heads)");
  }
  SECTION("out overlaps out_a in part") {
    x.out = {x.out_a.data_handle() + 1, 1, 2, 3, 4};
    CHECK(x.error() == "merge_attention: out shares memory with out_a, expected separate memory");
  }
  SECTION("out is out_a with other strides") {
    x.out = {x.out_a.data_handle(), {1, 2, 3, 4}, {24, 4, 8, 1}};
    CHECK(x.error() == "merge_attention: out shares memory with out_a, expected separate memory");
  }
  SECTION("lse in out_b") {
    x.lse = {x.out_b.data_handle(), 1, 2, 3, 1};
    CHECK(x.error() == "merge_attention: lse shares memory with out_b, expected separate memory");
  }
  SECTION("lse in out") {
    x.lse = {x.out.data_handle() + 8, 1, 2, 3, 1};
    CHECK(x.error() == "merge_attention: lse shares memory with out, expected separate memory");
  }
}

TEST_CASE("A shape_error is an invalid_argument") {
  operands x;
  x.out = {x.out.data_handle(), 1, 2, 3, 5};
  CHECK_THROWS_AS(attn::merge_attention(x.out_a, x.lse_a, x.out_b, x.lse_b, x.out, x.lse),
                  std::invalid_argument);
}
