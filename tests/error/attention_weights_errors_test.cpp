// SPDX-License-Identifier: MIT
//
// What attention_weights refuses, in its own words, before it writes anything.
#include "support/catch.hpp"

#include <attn/attention_weights.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <vector>

using attn::index_t;
using attn::tensor_view;

namespace {

struct operands {
  std::vector<float> memory = std::vector<float>(1000, 7);
  tensor_view<float> q{memory.data(), 1, 4, 3, 5};
  tensor_view<float> k{memory.data() + 100, 1, 2, 6, 5};
  tensor_view<float> weights{memory.data() + 300, 1, 4, 3, 6};
  attn::dense_options options;

  template <class Error = attn::shape_error, class Rule = attn::no_mask>
  std::string error(const Rule& rule = {}) {
    std::string message = "no error of that kind";
    try {
      attn::attention_weights(q, k, weights, rule, options);
    } catch (const Error& e) {
      message = e.what();
    }
    const bool untouched = std::ranges::all_of(memory, [](float x) { return x == 7; });
    return untouched ? message : message + ", and memory was written";
  }
};

}  // namespace

TEST_CASE("Shapes") {
  operands x;
  SECTION("k: dim") {
    x.k = {x.memory.data() + 100, 1, 2, 6, 4};
    CHECK(x.error() == "attention_weights: k is [1, 2, 6, 4], expected dim 5 (d_qk of q)");
  }
  SECTION("k: heads") {
    x.k = {x.memory.data() + 100, 1, 3, 6, 5};
    CHECK(x.error() ==
          "attention_weights: k is [1, 3, 6, 5], expected heads that divide 4 (heads of q)");
  }
  SECTION("weights: rows") {
    x.weights = {x.memory.data() + 300, 1, 4, 2, 6};
    CHECK(x.error() ==
          "attention_weights: weights is [1, 4, 2, 6], expected length 3 (length of q)");
  }
  SECTION("weights: keys") {
    x.weights = {x.memory.data() + 300, 1, 4, 3, 7};
    CHECK(x.error() == "attention_weights: weights is [1, 4, 3, 7], expected dim 6 (length of k)");
  }
  SECTION("weights over k") {
    x.weights = {x.memory.data() + 150, 1, 4, 3, 6};
    CHECK(x.error() == "attention_weights: weights shares memory with k, expected separate memory");
  }
}

TEST_CASE("Options and rules") {
  operands x;
  SECTION("scale") {
    x.options.scale = std::nan("");
    CHECK(x.error<attn::option_error>() ==
          "attention_weights: scale is nan, expected a finite number");
  }
  SECTION("sinks") {
    const std::array<float, 2> sinks{1, 2};
    x.options.sinks = sinks;
    CHECK(x.error() == "attention_weights: sinks has 2 elements, expected 4 (heads of q)");
  }
  SECTION("rule") {
    const std::vector<index_t> lengths{7};
    CHECK(x.error<attn::option_error>(attn::key_lengths{lengths}) ==
          "attention_weights: key_lengths[0] is 7, expected 0 to 6 (n_kv)");
  }
}
