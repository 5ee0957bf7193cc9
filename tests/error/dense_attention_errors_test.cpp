// SPDX-License-Identifier: MIT
//
// What dense_attention refuses, in its own words, before it writes anything.
#include "support/catch.hpp"

#include <attn/dense_attention.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

using attn::index_t;
using attn::tensor_view;

namespace {

constexpr index_t far_stride = index_t{1} << 61;

/// Operands of a legal call: batch 2, heads 4 over 2, n_q 3, n_kv 5, d_qk 8, d_v 6, each in a
/// region of its own.
struct operands {
  std::vector<float> memory = std::vector<float>(5 * 256, 7);
  float* region(std::size_t n) { return memory.data() + 256 * n; }

  tensor_view<const float> q{region(0), 2, 4, 3, 8};
  tensor_view<const float> k{region(1), 2, 2, 5, 8};
  tensor_view<const float> v{region(2), 2, 2, 5, 6};
  tensor_view<float> out{region(3), 2, 4, 3, 6};
  tensor_view<float> lse{region(4), 2, 4, 3, 1};

  template <class Error, class Rule = attn::no_mask>
  std::string error(const Rule& rule = {}, const attn::dense_options& options = {}) {
    std::string message = "no error";
    try {
      attn::dense_attention(q, k, v, out, lse, rule, options);
    } catch (const Error& e) {
      message = e.what();
    } catch (const std::exception& e) {
      message = std::string("another error: ") + e.what();
    }
    const bool untouched = std::ranges::all_of(memory, [](float x) { return x == 7; });
    return untouched ? message : message + ", and memory was written";
  }
  template <class Rule = attn::no_mask>
  std::string shape_error(const Rule& rule = {}) {
    return error<attn::shape_error>(rule);
  }
  template <class Rule = attn::no_mask>
  std::string option_error(const Rule& rule = {}, const attn::dense_options& options = {}) {
    return error<attn::option_error>(rule, options);
  }
};

}  // namespace

TEST_CASE("The operands of these tests are legal as they stand") {
  operands x;
  CHECK(x.shape_error() == "no error, and memory was written");
}

TEST_CASE("Shapes of q, k and v against each other") {
  operands x;
  SECTION("d_qk") {
    x.k = {x.region(1), 2, 2, 5, 7};
    CHECK(x.shape_error() == "dense_attention: k is [2, 2, 5, 7], expected dim 8 (d_qk of q)");
  }
  SECTION("batch of k") {
    x.k = {x.region(1), 1, 2, 5, 8};
    CHECK(x.shape_error() == "dense_attention: k is [1, 2, 5, 8], expected batch 2 (batch of q)");
  }
  SECTION("batch of v") {
    x.v = {x.region(2), 3, 2, 5, 6};
    CHECK(x.shape_error() == "dense_attention: v is [3, 2, 5, 6], expected batch 2 (batch of q)");
  }
  SECTION("heads of v") {
    x.v = {x.region(2), 2, 4, 5, 6};
    CHECK(x.shape_error() == "dense_attention: v is [2, 4, 5, 6], expected heads 2 (heads of k)");
  }
  SECTION("length of v") {
    x.v = {x.region(2), 2, 2, 6, 6};
    CHECK(x.shape_error() == "dense_attention: v is [2, 2, 6, 6], expected length 5 (length of k)");
  }
  SECTION("heads that do not divide") {
    x.k = {x.region(1), 2, 3, 5, 8};
    x.v = {x.region(2), 2, 3, 5, 6};
    CHECK(x.shape_error() ==
          "dense_attention: k is [2, 3, 5, 8], expected heads that divide 4 (heads of q)");
  }
  SECTION("no key/value head for 4 query heads") {
    x.k = {x.region(1), 2, 0, 5, 8};
    x.v = {x.region(2), 2, 0, 5, 6};
    CHECK(x.shape_error() ==
          "dense_attention: k is [2, 0, 5, 8], expected heads that divide 4 (heads of q)");
  }
}

TEST_CASE("Shapes of out and lse") {
  operands x;
  SECTION("d_v") {
    x.out = {x.region(3), 2, 4, 3, 8};
    CHECK(x.shape_error() == "dense_attention: out is [2, 4, 3, 8], expected dim 6 (d_v of v)");
  }
  SECTION("length") {
    x.out = {x.region(3), 2, 4, 5, 6};
    CHECK(x.shape_error() ==
          "dense_attention: out is [2, 4, 5, 6], expected length 3 (length of q)");
  }
  SECTION("heads") {
    x.out = {x.region(3), 2, 2, 3, 6};
    CHECK(x.shape_error() == "dense_attention: out is [2, 2, 3, 6], expected heads 4 (heads of q)");
  }
  SECTION("batch") {
    x.out = {x.region(3), 1, 4, 3, 6};
    CHECK(x.shape_error() == "dense_attention: out is [1, 4, 3, 6], expected batch 2 (batch of q)");
  }
  SECTION("lse is one number per query") {
    x.lse = {x.region(4), 2, 4, 3, 6};
    CHECK(x.shape_error() ==
          "dense_attention: lse is [2, 4, 3, 6], expected dim 1 (one per query)");
  }
}

TEST_CASE("Views that are no views") {
  operands x;
  SECTION("a null pointer with extents") {
    x.q = {nullptr, 2, 4, 3, 8};
    CHECK(x.shape_error() ==
          "dense_attention: q is [2, 4, 3, 8] at a null pointer, expected memory");
  }
  SECTION("a null lse") {
    x.lse = {nullptr, 2, 4, 3, 1};
    CHECK(x.shape_error() ==
          "dense_attention: lse is [2, 4, 3, 1] at a null pointer, expected memory");
  }
  SECTION("a negative extent") {
    x.v = {x.region(2), 2, 2, -5, 6};
    CHECK(x.shape_error() == "dense_attention: v is [2, 2, -5, 6], expected no negative extent");
  }
  SECTION("a negative stride of an input") {
    x.k = {x.region(1) + 32, {2, 2, 5, 8}, {80, 40, -8, 1}};
    CHECK(x.shape_error() == "dense_attention: k has strides [80, 40, -8, 1], expected no negative "
                             "stride (length)");
  }
  SECTION("a negative stride of an output") {
    x.out = {x.region(3) + 5, {2, 4, 3, 6}, {72, 18, 6, -1}};
    CHECK(x.shape_error() ==
          "dense_attention: out has strides [72, 18, 6, -1], expected no negative stride (dim)");
  }
  SECTION("stride 0 in an output") {
    x.out = {x.region(3), {2, 4, 3, 6}, {0, 18, 6, 1}};
    CHECK(x.shape_error() == "dense_attention: out has strides [0, 18, 6, 1], expected no stride "
                             "of 0 in an output (batch)");
    x.out = {x.region(3), 2, 4, 3, 6};
    x.lse = {x.region(4), {2, 4, 3, 1}, {12, 3, 0, 1}};
    CHECK(x.shape_error() == "dense_attention: lse has strides [12, 3, 0, 1], expected no stride "
                             "of 0 in an output (length)");
  }
  SECTION("offsets past 63 bits") {
    x.k = {x.region(1), {2, 2, 5, 8}, {80, 40, far_stride, 1}};
    CHECK(x.shape_error() == "dense_attention: k is [2, 2, 5, 8] with strides [80, 40, "
                             "2305843009213693952, 1], expected offsets that fit 63 bits");
  }
  SECTION("a product of extents past 63 bits, contiguous") {
    const index_t many = index_t{1} << 32;
    x.k = {x.region(1), 2, 2, many, many};
    CHECK(x.shape_error().find("dense_attention: k is [2, 2, 4294967296, 4294967296]") == 0);
  }
  SECTION("strides of axes of extent 1, or of nothing, do not matter") {
    operands y;
    y.q = {y.region(0), {2, 4, 1, 8}, {32, 8, -1, 1}};
    y.out = {y.region(3), {2, 4, 1, 6}, {24, 6, 0, 1}};
    y.lse = {y.region(4), {2, 4, 1, 1}, {4, 1, -7, 0}};
    CHECK(y.shape_error() == "no error, and memory was written");
    operands z;
    z.q = {nullptr, {2, 4, 0, 8}, {-1, -1, -1, -1}};
    z.out = {nullptr, 2, 4, 0, 6};
    z.lse = {nullptr, 2, 4, 0, 1};
    CHECK(z.shape_error() == "no error");
  }
}

TEST_CASE("Outputs that share memory") {
  operands x;
  SECTION("out is q") {
    x.v = {x.region(2), 2, 2, 5, 8};
    x.out = {x.region(0), 2, 4, 3, 8};
    CHECK(x.shape_error() == "dense_attention: out shares memory with q, expected separate memory");
  }
  SECTION("the end of out is the start of k") {
    x.q = {x.region(4) + 32, 2, 4, 3, 8};
    x.out = {x.region(1) - 143, 2, 4, 3, 6};
    CHECK(x.shape_error() == "dense_attention: out shares memory with k, expected separate memory");
  }
  SECTION("out right before k is fine") {
    x.out = {x.region(1) - 144, 2, 4, 3, 6};
    x.q = {x.region(4) + 32, 2, 4, 3, 8};
    CHECK(x.shape_error() == "no error, and memory was written");
  }
  SECTION("out inside v, by another stride") {
    x.out = {x.region(2) + 1, {2, 4, 3, 6}, {1, 30, 2, 8}};
    CHECK(x.shape_error() == "dense_attention: out shares memory with v, expected separate memory");
  }
  SECTION("lse in each of the others") {
    x.lse = {x.region(0) + 10, 2, 4, 3, 1};
    CHECK(x.shape_error() == "dense_attention: lse shares memory with q, expected separate memory");
    x.lse = {x.region(1) + 10, 2, 4, 3, 1};
    CHECK(x.shape_error() == "dense_attention: lse shares memory with k, expected separate memory");
    x.lse = {x.region(2) + 10, 2, 4, 3, 1};
    CHECK(x.shape_error() == "dense_attention: lse shares memory with v, expected separate memory");
    x.lse = {x.region(3) + 10, 2, 4, 3, 1};
    CHECK(x.shape_error() ==
          "dense_attention: lse shares memory with out, expected separate memory");
  }
}

TEST_CASE("Memory that interleaves but is not shared is accepted") {
  // Rows of 8 + 8 + 6 + 6 + 1 numbers: q, k, v, out, lse side by side in one matrix, as column
  // blocks or as the heads of one [B, L, H, D] tensor.
  std::vector<float> memory(12 * 29, 0.5f);
  const auto columns = [&](index_t first, index_t width) {
    return tensor_view<float>(memory.data() + first, {1, 1, 12, width}, {12 * 29, 12 * 29, 29, 1});
  };
  CHECK_NOTHROW(attn::dense_attention(columns(0, 8), columns(8, 8), columns(16, 6), columns(22, 6),
                                      columns(28, 1)));
  CHECK(memory[22] == 0.5f);
  CHECK(std::abs(memory[28] - (0.25f * std::sqrt(8.0f) + std::log(12.0f))) < 1e-5f);

  // Column-major: rows of one matrix.
  std::vector<float> other(29 * 12, 0.5f);
  const auto rows = [&](index_t first, index_t width) {
    return tensor_view<float>(other.data() + first * 12, {1, 1, 12, width}, {0, 0, 1, 12});
  };
  CHECK_NOTHROW(
      attn::dense_attention(rows(0, 8), rows(8, 8), rows(16, 6), rows(22, 6), rows(28, 1)));

  // Heads: out is head 3 of a tensor of which q, k, v are heads 0 to 2.
  std::vector<float> heads(2 * 5 * 4 * 8, 0.5f);
  const auto all = attn::blhd(heads.data(), 2, 5, 4, 8);
  const auto head = [&](index_t h) {
    return tensor_view<float>(all.data_handle() + h * all.stride(1), {2, 1, 5, 8}, all.strides());
  };
  CHECK_NOTHROW(attn::dense_attention(head(0), head(1), head(2), head(3)));
  CHECK_THROWS_AS(attn::dense_attention(head(0), head(1), head(2), head(2)), attn::shape_error);
}

TEST_CASE("Options") {
  operands x;
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const std::vector<float> three(3, 0.0f), five(5, 0.0f);
  CHECK(x.option_error(attn::no_mask{}, {.scale = infinity}) ==
        "dense_attention: scale is inf, expected a finite number");
  CHECK(x.option_error(attn::no_mask{}, {.scale = -infinity}) ==
        "dense_attention: scale is -inf, expected a finite number");
  CHECK(x.option_error(attn::no_mask{}, {.scale = std::nan("")}) ==
        "dense_attention: scale is nan, expected a finite number");
  CHECK(x.option_error(attn::no_mask{}, {.softcap = -0.5}) ==
        "dense_attention: softcap is -0.5, expected 0 (off) or a positive number");
  CHECK(x.option_error(attn::no_mask{}, {.softcap = infinity}) ==
        "dense_attention: softcap is inf, expected 0 (off) or a positive number");
  CHECK(x.option_error(attn::no_mask{}, {.softcap = std::nan("")}) ==
        "dense_attention: softcap is nan, expected 0 (off) or a positive number");
  // In double these would do; in float they are infinite, 0, or 1/softcap is.
  CHECK(x.option_error(attn::no_mask{}, {.scale = -1e300}) ==
        "dense_attention: scale is -1e+300, expected at most 3.40282e+38 in size (float)");
  for (const double softcap : {1e-46, 1e-39, 2e31, 3e38, 1e300}) {
    CAPTURE(softcap);
    CHECK(x.option_error(attn::no_mask{}, {.softcap = softcap})
              .ends_with("expected 0 (off) or 1.17549e-38 to 1.01412e+31 (float)"));
  }
  CHECK(x.error<attn::shape_error>(attn::no_mask{}, {.sinks = three}) ==
        "dense_attention: sinks has 3 elements, expected 4 (heads of q)");
  CHECK(x.error<attn::shape_error>(attn::no_mask{}, {.sinks = five}) ==
        "dense_attention: sinks has 5 elements, expected 4 (heads of q)");
}

TEST_CASE("Rules that do not fit the call") {
  operands x;
  SECTION("window_mask") {
    CHECK(x.option_error(attn::window_mask{.left = -1}) ==
          "dense_attention: window_mask.left is -1, expected at least 0 or attn::unlimited");
    CHECK(x.option_error(attn::window_mask{.left = 3, .right = -2}) ==
          "dense_attention: window_mask.right is -2, expected at least 0 or attn::unlimited");
  }
  SECTION("key_lengths") {
    const std::vector<index_t> one = {3}, negative = {3, -1}, long_one = {6, 5};
    CHECK(x.shape_error(attn::key_lengths{one}) ==
          "dense_attention: key_lengths has 1 elements, expected 2 (batch of q)");
    CHECK(x.option_error(attn::key_lengths{negative}) ==
          "dense_attention: key_lengths[1] is -1, expected 0 to 5 (n_kv)");
    CHECK(x.option_error(attn::key_lengths{long_one}) ==
          "dense_attention: key_lengths[0] is 6, expected 0 to 5 (n_kv)");
  }
  SECTION("prefix_mask") {
    const std::vector<index_t> three = {1, 2, 3}, negative = {-4, 0};
    CHECK(x.shape_error(attn::prefix_mask{three}) ==
          "dense_attention: prefix_mask.prefix has 3 elements, expected 2 (batch of q)");
    CHECK(x.option_error(attn::prefix_mask{negative}) ==
          "dense_attention: prefix_mask.prefix[0] is -4, expected at least 0");
  }
  SECTION("boolean_mask") {
    const std::array<bool, 256> allowed{};
    const auto mask = [&](index_t b, index_t h, index_t q, index_t k) {
      return x.shape_error(attn::boolean_mask{tensor_view<const bool>(allowed.data(), b, h, q, k)});
    };
    CHECK(mask(3, 1, 1, 1) ==
          "dense_attention: boolean_mask is [3, 1, 1, 1], expected batch 1 or 2 (batch of q)");
    CHECK(mask(1, 2, 1, 1) ==
          "dense_attention: boolean_mask is [1, 2, 1, 1], expected heads 1 or 4 (heads of q)");
    CHECK(mask(1, 1, 5, 1) ==
          "dense_attention: boolean_mask is [1, 1, 5, 1], expected length 1 or 3 (n_q)");
    CHECK(mask(2, 4, 3, 3) ==
          "dense_attention: boolean_mask is [2, 4, 3, 3], expected dim 1 or 5 (n_kv)");
    CHECK(x.shape_error(attn::boolean_mask{}) !=
          "no error");  // a default view has no elements, the call has scores
    CHECK(x.shape_error(attn::boolean_mask{tensor_view<const bool>(nullptr, 1, 1, 1, 1)}) ==
          "dense_attention: boolean_mask is [1, 1, 1, 1] at a null pointer, expected memory");
  }
  SECTION("additive_bias") {
    const std::array<float, 256> bias{};
    CHECK(x.shape_error(attn::additive_bias{tensor_view<const float>(bias.data(), 1, 1, 3, 6)}) ==
          "dense_attention: additive_bias is [1, 1, 3, 6], expected dim 1 or 5 (n_kv)");
    CHECK(x.shape_error(attn::additive_bias{
              tensor_view<const float>(bias.data() + 20, {1, 1, 3, 5}, {15, 15, -5, 1})}) ==
          "dense_attention: additive_bias has strides [15, 15, -5, 1], expected no negative "
          "stride (length)");
  }
  SECTION("segment_mask") {
    const std::array<index_t, 64> ids{};
    const tensor_view<const index_t> q_ids(ids.data(), 2, 1, 3, 1), k_ids(ids.data(), 2, 1, 5, 1);
    CHECK(x.shape_error(attn::segment_mask{k_ids, k_ids}) ==
          "dense_attention: segment_mask.q_ids is [2, 1, 5, 1], expected length 3 (n_q)");
    CHECK(x.shape_error(attn::segment_mask{q_ids, q_ids}) ==
          "dense_attention: segment_mask.k_ids is [2, 1, 3, 1], expected length 5 (n_kv)");
    CHECK(x.shape_error(
              attn::segment_mask{tensor_view<const index_t>(ids.data(), 2, 4, 3, 1), k_ids}) ==
          "dense_attention: segment_mask.q_ids is [2, 4, 3, 1], expected heads 1 (shared by all "
          "heads)");
  }
  SECTION("alibi_bias") {
    const std::vector<float> two(2, 0.5f);
    CHECK(x.shape_error(attn::alibi_bias{two}) ==
          "dense_attention: alibi_bias.slopes has 2 elements, expected 4 (heads of q)");
  }
  SECTION("a rule inside a composition") {
    const std::vector<index_t> one = {3};
    CHECK(x.shape_error(attn::causal_mask{} & attn::key_lengths{one}) ==
          "dense_attention: key_lengths has 1 elements, expected 2 (batch of q)");
  }
}

TEST_CASE("Both errors are invalid_argument") {
  operands x;
  x.k = {x.region(1), 2, 2, 5, 7};
  CHECK_THROWS_AS(attn::dense_attention(x.q, x.k, x.v, x.out), std::invalid_argument);
  operands y;
  CHECK_THROWS_AS(attn::dense_attention(y.q, y.k, y.v, y.out, attn::no_mask{}, {.softcap = -1}),
                  std::invalid_argument);
}

TEST_CASE("The form that returns a matrix says the same") {
  const Eigen::MatrixXf q = Eigen::MatrixXf::Zero(3, 4), k = Eigen::MatrixXf::Zero(5, 3),
                        v = Eigen::MatrixXf::Zero(5, 2);
  std::string message;
  try {
    (void)attn::dense_attention(q, k, v);
  } catch (const attn::shape_error& e) {
    message = e.what();
  }
  CHECK(message == "dense_attention: k is [1, 1, 5, 3], expected dim 4 (d_qk of q)");
}
