// SPDX-License-Identifier: MIT
//
// What the soft top-k functions refuse, in their words, and that nothing was written before.
#include "support/catch.hpp"
#include "support/refusal.hpp"
#include "support/tensor_buffer.hpp"

#include <attn/soft_topk.hpp>

#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

using namespace attn_test;
using attn::soft_topk_options;
using attn::tournament;

namespace {

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

tensor_buffer<float> buffer(std::array<index_t, 4> extents) {
  tensor_buffer<float> b(extents, layout::contiguous, nan_value);
  return b;
}

std::string plan(std::array<index_t, 4> extents, index_t k, const soft_topk_options& o = {}) {
  const auto scores = buffer(extents);
  return refusal([&] { tournament(scores.view(), k, o); });
}

/// The message of a whole soft_topk call, and that it wrote nothing.
std::string pool(std::array<index_t, 4> x, std::array<index_t, 4> scores,
                 std::array<index_t, 4> pooled, std::array<index_t, 4> pooled_scores,
                 const soft_topk_options& o = {}) {
  const auto xs = buffer(x), vs = buffer(scores);
  auto out = buffer(pooled), out_scores = buffer(pooled_scores);
  const std::string message =
      refusal([&] { attn::soft_topk(xs.view(), vs.view(), out.view(), out_scores.view(), o); });
  CHECK(out.untouched());
  CHECK(out_scores.untouched());
  return message;
}

}  // namespace

TEST_CASE("tournament: k, strength, lengths, scores") {
  CHECK(plan({1, 1, 7, 1}, 0) ==
        "option_error: tournament: k is 0, expected 1 to 7 (length of scores)");
  CHECK(plan({1, 1, 7, 1}, 8) ==
        "option_error: tournament: k is 8, expected 1 to 7 (length of scores)");
  CHECK(plan({1, 1, 7, 1}, -1) ==
        "option_error: tournament: k is -1, expected 1 to 7 (length of scores)");
  CHECK(plan({1, 1, 0, 1}, 1) ==
        "option_error: tournament: k is 1, expected scores that are not of length 0");
  CHECK(plan({1, 1, 7, 2}, 2) == "shape_error: tournament: scores is [1, 1, 7, 2], expected dim 1 "
                                 "(one score per position)");
  const float same = 1;  // for all positions
  const attn::tensor_view<const float> endless(&same, {1, 1, index_t{1} << 32, 1}, {0, 0, 0, 1});
  CHECK(refusal([&] { tournament(endless, 2); }) ==
        "shape_error: tournament: scores is [1, 1, 4294967296, 1], expected a length below 2^32");
  CHECK(plan({1, 1, 7, 1}, 2, {.strength = 1}) ==
        "option_error: tournament: strength is 1, expected a finite number above 1 (base of "
        "topk_boost::exponential)");
  CHECK(plan({1, 1, 7, 1}, 2, {.strength = nan_value}) ==
        "option_error: tournament: strength is nan, expected a finite number above 1 (base of "
        "topk_boost::exponential)");
  CHECK(plan({1, 1, 7, 1}, 2, {.boost = attn::topk_boost::scaled, .strength = 0}) ==
        "option_error: tournament: strength is 0, expected a finite number above 0 (factor of "
        "topk_boost::scaled)");
  CHECK(plan({1, 1, 7, 1}, 2, {.boost = attn::topk_boost::scaled, .strength = 0.5}) == "accepted");

  const std::vector<index_t> one{4}, low{4, 1}, high{4, 8}, good{2, 7};
  CHECK(plan({2, 1, 7, 1}, 2, {.lengths = one}) ==
        "shape_error: tournament: lengths has 1 elements, expected 2 (batch of scores)");
  CHECK(plan({2, 1, 7, 1}, 2, {.lengths = low}) ==
        "option_error: tournament: lengths[1] is 1, expected 2 to 7 (k to length of scores)");
  CHECK(plan({2, 1, 7, 1}, 2, {.lengths = high}) ==
        "option_error: tournament: lengths[1] is 8, expected 2 to 7 (k to length of scores)");
  CHECK(plan({2, 1, 7, 1}, 2, {.lengths = good}) == "accepted");
}

TEST_CASE("A tournament that was refused keeps its plan") {
  const std::vector<float> scores{0.1f, 0.9f, 0.5f};
  tournament t(attn::bhld(scores.data(), 1, 1, 3, 1), 1);
  CHECK_THROWS_AS(t.assign(attn::bhld(scores.data(), 1, 1, 3, 1), 4), attn::option_error);
  CHECK(t.n_slots() == 1);
  CHECK(t.champion(0, 0, 0) == 1);
}

TEST_CASE("soft_topk of a tournament: shapes and memory") {
  const auto scores = buffer({2, 3, 7, 1});
  const tournament t(scores.view(), 2);
  const auto apply = [&](std::array<index_t, 4> x, std::array<index_t, 4> pooled) {
    const auto xs = buffer(x);
    auto out = buffer(pooled);
    const std::string message = refusal([&] { attn::soft_topk(t, xs.view(), out.view()); });
    if (message != "accepted") CHECK(out.untouched());
    return message;
  };
  CHECK(apply({1, 3, 7, 4}, {2, 3, 2, 4}) ==
        "shape_error: soft_topk: x is [1, 3, 7, 4], expected batch 2 (batch of scores)");
  CHECK(apply({2, 1, 7, 4}, {2, 3, 2, 4}) ==
        "shape_error: soft_topk: x is [2, 1, 7, 4], expected heads 3 (heads of scores)");
  CHECK(apply({2, 3, 8, 4}, {2, 3, 2, 4}) ==
        "shape_error: soft_topk: x is [2, 3, 8, 4], expected length 7 (length of scores)");
  CHECK(apply({2, 3, 7, 4}, {2, 3, 3, 4}) == "shape_error: soft_topk: pooled is [2, 3, 3, 4], "
                                             "expected length 2 (slots of the tournament)");
  CHECK(apply({2, 3, 7, 4}, {2, 3, 2, 5}) ==
        "shape_error: soft_topk: pooled is [2, 3, 2, 5], expected dim 4 (dim of x)");
  CHECK(apply({2, 3, 7, 4}, {2, 3, 2, 4}) == "accepted");

  auto x = buffer({2, 3, 7, 4});
  const attn::tensor_view<float> inside(x.view().data_handle(), 2, 3, 2, 4);
  CHECK(refusal([&] { attn::soft_topk(t, x.view(), inside); }) ==
        "shape_error: soft_topk: pooled shares memory with x, expected separate memory");
  CHECK(x.untouched());
}

TEST_CASE("soft_topk of scores: shapes and options") {
  CHECK(pool({1, 1, 7, 4}, {1, 1, 7, 1}, {1, 1, 0, 4}, {1, 1, 0, 1}) ==
        "option_error: soft_topk: k is 0, expected 1 to 7 (length of scores)");
  CHECK(pool({1, 1, 7, 4}, {1, 1, 7, 1}, {1, 1, 8, 4}, {1, 1, 8, 1}) ==
        "option_error: soft_topk: k is 8, expected 1 to 7 (length of scores)");
  CHECK(pool({1, 1, 6, 4}, {1, 1, 7, 1}, {1, 1, 2, 4}, {1, 1, 2, 1}) ==
        "shape_error: soft_topk: x is [1, 1, 6, 4], expected length 7 (length of scores)");
  CHECK(pool({1, 1, 7, 4}, {1, 1, 7, 1}, {1, 1, 2, 4}, {1, 1, 3, 1}) ==
        "shape_error: soft_topk: pooled_scores is [1, 1, 3, 1], expected length 2 (length of "
        "pooled)");
  CHECK(
      pool({1, 1, 7, 4}, {1, 1, 7, 1}, {1, 1, 2, 4}, {1, 1, 2, 2}) ==
      "shape_error: soft_topk: pooled_scores is [1, 1, 2, 2], expected dim 1 (one score per slot)");
  CHECK(pool({1, 1, 7, 4}, {1, 1, 7, 1}, {1, 1, 2, 4}, {1, 1, 2, 1}, {.strength = 0.5}) ==
        "option_error: soft_topk: strength is 0.5, expected a finite number above 1 (base of "
        "topk_boost::exponential)");
}

TEST_CASE("soft_topk_backward: shapes and memory") {
  const auto scores = buffer({1, 1, 7, 1});
  const tournament t(scores.view(), 2);
  const auto x = buffer({1, 1, 7, 4});
  const auto d_pooled = buffer({1, 1, 2, 4}), d_pooled_scores = buffer({1, 1, 2, 1});
  const auto call = [&](std::array<index_t, 4> dx, std::array<index_t, 4> dv) {
    auto d_x = buffer(dx), d_scores = buffer(dv);
    const std::string message = refusal([&] {
      attn::soft_topk_backward(t, x.view(), d_pooled.view(), d_pooled_scores.view(), d_x.view(),
                               d_scores.view());
    });
    if (message != "accepted") CHECK(d_x.untouched());
    if (message != "accepted") CHECK(d_scores.untouched());
    return message;
  };
  CHECK(call({1, 1, 6, 4}, {1, 1, 7, 1}) == "shape_error: soft_topk_backward: d_x is [1, 1, 6, 4], "
                                            "expected length 7 (length of scores)");
  CHECK(call({1, 1, 7, 3}, {1, 1, 7, 1}) ==
        "shape_error: soft_topk_backward: d_x is [1, 1, 7, 3], expected dim 4 (dim of x)");
  CHECK(call({1, 1, 7, 4}, {1, 1, 7, 2}) ==
        "shape_error: soft_topk_backward: d_scores is [1, 1, 7, "
        "2], expected dim 1 (one score per position)");
  CHECK(call({1, 1, 7, 4}, {1, 1, 7, 1}) == "accepted");

  auto d_x = buffer({1, 1, 7, 4});
  const attn::tensor_view<float> inside(d_x.view().data_handle(), 1, 1, 7, 1);
  CHECK(refusal([&] {
          attn::soft_topk_backward(t, x.view(), d_pooled.view(), d_pooled_scores.view(), d_x.view(),
                                   inside);
        }) == "shape_error: soft_topk_backward: d_scores shares memory with d_x, expected separate "
              "memory");
}

TEST_CASE("A tournament that there is no memory for is none") {
  const auto scores = buffer({1, 1, 7, 1});
  tournament t(scores.view(), 2);
  const attn::tensor_view<const float> many(
      scores.view().data_handle(), {index_t{1} << 27, 1, index_t{1} << 31, 1}, {0, 0, 0, 1});
  CHECK_THROWS_AS(t.assign(many, 2), std::length_error);
  CHECK(t.n_batch() == 0);
  t.assign(scores.view(), 3);
  CHECK(t.n_batch() == 1);
  CHECK(refusal([&] { t.assign(scores.view(), 8); }) ==
        "option_error: tournament: k is 8, expected 1 to 7 (length of scores)");
  CHECK(t.n_slots() == 3);
}
