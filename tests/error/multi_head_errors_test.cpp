// SPDX-License-Identifier: MIT
//
// What multi_head_attention refuses, in its own words, before y is written.
#include "support/catch.hpp"

#include <attn/multi_head.hpp>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

using attn::index_t;
using attn::tensor_view;

namespace {

/// d_model 6, d_source 5, 4 heads over 2, d_qk 3, d_v 2, d_out 7.
struct layer {
  std::vector<float> memory = std::vector<float>(2000, 7);
  attn::multi_head_weights<float> weights{.w_q = matrix(0, 6, 12),
                                          .w_k = matrix(100, 5, 6),
                                          .w_v = matrix(200, 5, 4),
                                          .w_o = matrix(300, 8, 7)};
  attn::multi_head_options options{.n_heads = 4, .n_kv_heads = 2};
  tensor_view<float> x = matrix(400, 3, 6), source = matrix(500, 9, 5), y = matrix(600, 3, 7);

  tensor_view<float> matrix(index_t at, index_t rows, index_t cols) {
    return {memory.data() + at, 1, 1, rows, cols};
  }

  template <class Error = attn::shape_error>
  std::string construct() const {
    try {
      attn::multi_head_attention<float> mha(weights, options);
    } catch (const Error& e) {
      return e.what();
    }
    return "no error of that kind";
  }

  std::string cross() {
    std::string message = "no shape_error";
    attn::multi_head_attention<float> mha(weights, options);
    bool called = false;
    try {
      mha.cross_attention(x, source, y, [&](auto, auto, auto, auto) { called = true; });
    } catch (const attn::shape_error& e) {
      message = e.what();
    }
    if (called) message += ", and the kernel ran";
    if (std::ranges::any_of(memory, [](float e) { return e != 7; }))
      message += ", and y is written";
    return message;
  }

  std::string self() {
    attn::multi_head_attention<float> mha(weights, options);
    try {
      mha.self_attention(x, y, [&](auto, auto, auto, auto) {});
    } catch (const attn::shape_error& e) {
      return e.what();
    }
    return "no shape_error";
  }
};

}  // namespace

TEST_CASE("What fits is accepted") {
  layer l;
  CHECK(l.construct() == "no error of that kind");
  l.weights.b_o = std::span<const float>(l.memory).subspan(700, 7);
  CHECK(l.construct() == "no error of that kind");
}

TEST_CASE("Numbers of heads") {
  layer l;
  SECTION("none") {
    l.options = {.n_heads = 0};
    CHECK(l.construct<attn::option_error>() ==
          "multi_head_attention: n_heads is 0, expected at least 1");
  }
  SECTION("negative") {
    l.options.n_kv_heads = -2;
    CHECK(l.construct<attn::option_error>() ==
          "multi_head_attention: n_kv_heads is -2, expected a divisor of 4 (n_heads)");
  }
  SECTION("groups of unequal size") {
    l.options.n_kv_heads = 3;
    CHECK(l.construct<attn::option_error>() ==
          "multi_head_attention: n_kv_heads is 3, expected a divisor of 4 (n_heads)");
  }
}

TEST_CASE("Weights that do not fit the heads or each other") {
  layer l;
  SECTION("w_q") {
    l.weights.w_q = l.matrix(0, 6, 10);
    CHECK(l.construct() == "multi_head_attention: w_q is [1, 1, 6, 10], expected a dim that 4 "
                           "divides (n_heads)");
  }
  SECTION("w_k: heads of another size") {
    l.weights.w_k = l.matrix(100, 5, 8);
    CHECK(l.construct() == "multi_head_attention: w_k is [1, 1, 5, 8], expected dim 6 (n_kv_heads "
                           "times d_qk of w_q)");
  }
  SECTION("w_v: another source") {
    l.weights.w_v = l.matrix(200, 6, 4);
    CHECK(l.construct() ==
          "multi_head_attention: w_v is [1, 1, 6, 4], expected length 5 (length of w_k)");
  }
  SECTION("w_v: heads") {
    l.weights.w_v = l.matrix(200, 5, 3);
    CHECK(l.construct() == "multi_head_attention: w_v is [1, 1, 5, 3], expected a dim that 2 "
                           "divides (n_kv_heads)");
  }
  SECTION("w_o") {
    l.weights.w_o = l.matrix(300, 7, 8);
    CHECK(l.construct() == "multi_head_attention: w_o is [1, 1, 7, 8], expected length 8 (n_heads "
                           "times d_v of w_v)");
  }
  SECTION("more than a matrix") {
    l.weights.w_q = tensor_view<float>(l.memory.data(), 1, 4, 6, 3);
    CHECK(l.construct() ==
          "multi_head_attention: w_q is [1, 4, 6, 3], expected heads 1 (a matrix)");
  }
  SECTION("no unit stride") {
    l.weights.w_o = tensor_view<float>(l.memory.data(), {1, 1, 8, 7}, {0, 0, 20, 2});
    CHECK(l.construct() == "multi_head_attention: w_o has strides [0, 0, 20, 2], expected 1 along "
                           "length or dim");
  }
  SECTION("bias") {
    l.weights.b_k = std::span<const float>(l.memory).subspan(0, 5);
    CHECK(l.construct() ==
          "multi_head_attention: b_k has 5 elements, expected 6 (dim of w_k) or none");
  }
  SECTION("no memory") {
    l.weights.w_v = tensor_view<float>(nullptr, 1, 1, 5, 4);
    CHECK(l.construct() ==
          "multi_head_attention: w_v is [1, 1, 5, 4] at a null pointer, expected memory");
  }
}

TEST_CASE("Operands of a call") {
  layer l;
  SECTION("x") {
    l.x = l.matrix(400, 3, 5);
    CHECK(l.cross() == "multi_head_attention: x is [1, 1, 3, 5], expected dim 6 (length of w_q)");
  }
  SECTION("source: width") {
    l.source = l.matrix(500, 9, 6);
    CHECK(l.cross() ==
          "multi_head_attention: source is [1, 1, 9, 6], expected dim 5 (length of w_k)");
  }
  SECTION("source: sequences") {
    l.source = tensor_view<float>(l.memory.data() + 500, 2, 1, 9, 5);
    CHECK(l.cross() ==
          "multi_head_attention: source is [2, 1, 9, 5], expected batch 1 (batch of x)");
  }
  SECTION("y: rows") {
    l.y = l.matrix(600, 4, 7);
    CHECK(l.cross() == "multi_head_attention: y is [1, 1, 4, 7], expected length 3 (length of x)");
  }
  SECTION("y: width") {
    l.y = l.matrix(600, 3, 6);
    CHECK(l.cross() == "multi_head_attention: y is [1, 1, 3, 6], expected dim 7 (dim of w_o)");
  }
  SECTION("y: stride 0") {
    l.y = tensor_view<float>(l.memory.data() + 600, {1, 1, 3, 7}, {0, 0, 0, 1});
    CHECK(l.cross() == "multi_head_attention: y has strides [0, 0, 0, 1], expected no stride of 0 "
                       "in an output (length)");
  }
  SECTION("x: negative stride") {
    l.x = tensor_view<float>(l.memory.data() + 450, {1, 1, 3, 6}, {0, 0, -6, 1});
    CHECK(l.cross() == "multi_head_attention: x has strides [0, 0, -6, 1], expected no negative "
                       "stride (length)");
  }
  SECTION("y over x") {
    l.y = l.matrix(410, 3, 7);
    CHECK(l.cross() == "multi_head_attention: y shares memory with x, expected separate memory");
  }
  SECTION("y over the source") {
    l.y = l.matrix(500, 3, 7);
    CHECK(l.cross() ==
          "multi_head_attention: y shares memory with source, expected separate memory");
  }
  SECTION("y over weights") {
    l.y = l.matrix(340, 3, 7);
    CHECK(l.cross() == "multi_head_attention: y shares memory with w_o, expected separate memory");
  }
  SECTION("self-attention with weights for two widths") {
    CHECK(l.self() == "multi_head_attention: x is [1, 1, 3, 6], expected dim 5 (length of w_k)");
  }
}

TEST_CASE("An error of the kernel leaves y as it was") {
  layer l;
  attn::multi_head_attention<float> mha(l.weights, l.options);
  CHECK_THROWS_AS(mha.cross_attention(
                      l.x, l.source, l.y,
                      [](auto, auto, auto, auto) { throw attn::option_error("of the kernel"); }),
                  attn::option_error);
  CHECK(std::ranges::all_of(l.memory, [](float e) { return e == 7; }));
}
