// SPDX-License-Identifier: MIT
#include "support/catch.hpp"
#include "support/refusal.hpp"
#include "support/tensor_buffer.hpp"

#include <attn/topk_baselines.hpp>

#include <limits>
#include <string>
#include <vector>

using namespace attn_test;

namespace {

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

tensor_buffer<float> buffer(std::array<index_t, 4> extents) {
  return {extents, layout::contiguous, nan_value};
}

std::string iterative(index_t k, const attn::iterative_topk_options& o) {
  const auto x = buffer({1, 1, 7, 4}), scores = buffer({1, 1, 7, 1});
  auto pooled = buffer({1, 1, k, 4}), pooled_scores = buffer({1, 1, k, 1});
  const std::string message = refusal([&] {
    attn::iterative_topk(x.view(), scores.view(), pooled.view(), pooled_scores.view(), o);
  });
  CHECK(pooled.untouched());
  return message;
}

}  // namespace

TEST_CASE("iterative_topk: alpha, k, lengths") {
  CHECK(iterative(2, {.alpha = 0}) ==
        "option_error: iterative_topk: alpha is 0, expected a finite number above 0");
  CHECK(iterative(2, {.alpha = -1}) ==
        "option_error: iterative_topk: alpha is -1, expected a finite number above 0");
  CHECK(iterative(2, {.alpha = nan_value}) ==
        "option_error: iterative_topk: alpha is nan, expected a finite number above 0");
  CHECK(iterative(0, {}) ==
        "option_error: iterative_topk: k is 0, expected 1 to 7 (length of scores)");
  CHECK(iterative(8, {}) ==
        "option_error: iterative_topk: k is 8, expected 1 to 7 (length of scores)");
  const std::vector<index_t> lengths{1};
  CHECK(iterative(2, {.lengths = lengths}) ==
        "option_error: iterative_topk: lengths[0] is 1, expected 2 to 7 (k to length of scores)");
}

TEST_CASE("hard_topk: k, shapes, memory") {
  const auto x = buffer({1, 2, 7, 4}), scores = buffer({1, 2, 7, 1});
  std::vector<index_t> none;
  CHECK(refusal([&] { attn::hard_topk(scores.view(), attn::bhld(none.data(), 1, 2, 0, 1)); }) ==
        "option_error: hard_topk: k is 0, expected 1 to 7 (length of scores)");
  std::vector<index_t> indices(4);
  CHECK(refusal([&] { attn::hard_topk(scores.view(), attn::bhld(indices.data(), 1, 1, 2, 1)); }) ==
        "shape_error: hard_topk: indices is [1, 1, 2, 1], expected heads 2 (heads of scores)");
  auto pooled = buffer({1, 2, 3, 5}), pooled_scores = buffer({1, 2, 3, 1});
  CHECK(refusal([&] {
          attn::hard_topk(x.view(), scores.view(), pooled.view(), pooled_scores.view());
        }) == "shape_error: hard_topk: pooled is [1, 2, 3, 5], expected dim 4 (dim of x)");
  CHECK(pooled.untouched());
}

TEST_CASE("chamfer_cosine_similarity: shapes") {
  const auto y = buffer({1, 1, 3, 4});
  const auto call = [&](std::array<index_t, 4> z) {
    const auto other = buffer(z);
    return refusal([&] { (void)attn::chamfer_cosine_similarity(y.view(), other.view()); });
  };
  CHECK(call({1, 1, 3, 5}) == "shape_error: chamfer_cosine_similarity: approximation is [1, 1, 3, "
                              "5], expected dim 4 (dim of truth)");
  CHECK(call({2, 1, 3, 4}) == "shape_error: chamfer_cosine_similarity: approximation is [2, 1, 3, "
                              "4], expected batch 1 (batch of truth)");
  CHECK(call({1, 1, 0, 4}) == "shape_error: chamfer_cosine_similarity: approximation is [1, 1, 0, "
                              "4], expected no extent of 0");
}
