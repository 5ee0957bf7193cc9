// SPDX-License-Identifier: MIT
//
// Each rule of the library against the oracle's plain function, pair by pair, and the range of
// keys that it promises.
#include "reference/score_rules.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

#include <attn/score_rule.hpp>

#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

using attn::index_t;
using attn::tensor_view;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

// Shape of the pairs that are tried: batch, heads, n_q, n_kv.
constexpr index_t n_batch = 2, n_heads = 3, n_q = 7, n_kv = 6;
constexpr attn::attention_shape shape{n_batch, n_heads, n_q, n_kv};

/// Number of pairs on which the rule and its meaning disagree, or on which a key outside of
/// keys() is allowed. The score that goes in depends on the pair.
template <attn::score_rule R>
index_t disagreements(const R& rule, const reference::score_rule& meaning) {
  rule.check("test", shape);
  index_t wrong = 0;
  for (index_t b = 0; b < n_batch; ++b)
    for (index_t h = 0; h < n_heads; ++h)
      for (index_t i = 0; i < n_q; ++i) {
        const attn::key_range keys = rule.keys(b, h, i, n_kv);
        if (keys.begin < 0 || keys.end > n_kv) ++wrong;
        for (index_t j = 0; j < n_kv; ++j) {
          const double score = 0.25 * static_cast<double>(i) - 0.5 * static_cast<double>(j);
          const double expected = meaning.apply(score, b, h, i, j);
          const bool inside = j >= keys.begin && j < keys.end;
          if (!inside && expected != reference::forbidden) ++wrong;
          if (!inside) continue;
          const double in_double = rule(score, b, h, i, j);
          const double in_float = rule(static_cast<float>(score), b, h, i, j);
          if (expected == reference::forbidden) {
            if (in_double != expected || in_float != expected) ++wrong;
          } else if (!(std::abs(in_double - expected) < 1e-6) ||
                     !(std::abs(in_float - expected) < 1e-5)) {
            ++wrong;
          }
        }
      }
  return wrong;
}

/// A reference tensor and the same values as T, for the views of the library's rules.
template <class T>
struct twin {
  reference::tensor meaning;
  std::unique_ptr<T[]> memory;
  tensor_view<const T> view;

  explicit twin(reference::tensor t)
      : meaning(std::move(t)), memory(std::make_unique<T[]>(meaning.elements().size())) {
    for (std::size_t e = 0; e < meaning.elements().size(); ++e)
      memory[e] = static_cast<T>(meaning.elements()[e]);
    view = {memory.get(), meaning.extent(0), meaning.extent(1), meaning.extent(2),
            meaning.extent(3)};
  }
};

}  // namespace

TEST_CASE("no_mask leaves the score alone") {
  CHECK(disagreements(attn::no_mask{}, reference::no_mask()) == 0);
}

TEST_CASE("causal_mask: j ≤ i + offset") {
  const index_t offset = GENERATE(0, 1, -1, 3, -3, -7, 5, 100, -100);
  CAPTURE(offset);
  CHECK(disagreements(attn::causal_mask{.offset = offset}, reference::causal_mask(offset)) == 0);
  CHECK(attn::causal_mask::bottom_right(3, 10).offset == 7);
  CHECK(attn::causal_mask::bottom_right(10, 3).offset == -7);
}

TEST_CASE("window_mask: i + offset − left ≤ j ≤ i + offset + right") {
  const index_t left = GENERATE(values<index_t>({0, 1, 4, 50, attn::unlimited}));
  const index_t right = GENERATE(values<index_t>({0, 2, 50, attn::unlimited}));
  const index_t offset = GENERATE(0, 2, -5);
  CAPTURE(left, right, offset);
  CHECK(disagreements(attn::window_mask{.left = left, .right = right, .offset = offset},
                      reference::window_mask(left, right, offset)) == 0);
}

TEST_CASE("Positions at the ends of 63 bits do not overflow") {
  constexpr index_t least = std::numeric_limits<index_t>::min();
  CHECK(attn::causal_mask{.offset = attn::unlimited}(1.0f, 0, 0, 5, 7) == 1.0f);
  CHECK(attn::causal_mask{.offset = least}(1.0f, 0, 0, 5, 7) == -infinity);
  CHECK(attn::causal_mask{.offset = attn::unlimited}.keys(0, 0, 5, 10).end == 10);
  CHECK(attn::causal_mask{.offset = least}.keys(0, 0, 5, 10).end <= 0);
  const attn::window_mask all{};
  CHECK(all(1.0f, 0, 0, attn::unlimited - 1, 0) == 1.0f);
  CHECK(all(1.0f, 0, 0, 0, attn::unlimited - 1) == 1.0f);
  const attn::window_mask nearly_all{.left = attn::unlimited - 1, .right = attn::unlimited - 1};
  CHECK(nearly_all(1.0f, 0, 0, 9, 0) == 1.0f);
  CHECK(nearly_all(1.0f, 0, 0, 9, 20) == 1.0f);
}

TEST_CASE("key_lengths: one per batch") {
  for (const auto& lengths : {std::array<index_t, 2>{0, 6}, {3, 1}, {6, 6}, {0, 0}}) {
    CAPTURE(lengths[0], lengths[1]);
    CHECK(disagreements(attn::key_lengths{lengths},
                        reference::key_lengths({lengths.begin(), lengths.end()})) == 0);
  }
}

TEST_CASE("prefix_mask: j < prefix[b] or j ≤ i + offset") {
  const std::array<index_t, 2> prefix = {GENERATE(0, 4), GENERATE(2, 6, 99)};
  const index_t offset = GENERATE(0, -2, 3);
  CAPTURE(prefix[0], prefix[1], offset);
  CHECK(disagreements(attn::prefix_mask{prefix, offset},
                      reference::prefix_mask({prefix.begin(), prefix.end()}, offset)) == 0);
}

TEST_CASE("boolean_mask and additive_bias: every extent is the call's or 1") {
  const index_t b = GENERATE(1, n_batch), h = GENERATE(1, n_heads), q = GENERATE(1, n_q),
                k = GENERATE(1, n_kv);
  CAPTURE(b, h, q, k);
  const twin<bool> mask(attn_test::coin_tensor({b, h, q, k}, 5));
  CHECK(disagreements(attn::boolean_mask{mask.view}, reference::boolean_mask(mask.meaning)) == 0);

  reference::tensor values = attn_test::normal_tensor({b, h, q, k}, 6);
  for (std::size_t e = 0; e < values.elements().size(); e += 3)
    values.elements()[e] = reference::forbidden;
  const twin<float> in_float(values);
  const twin<double> in_double(values);
  CHECK(disagreements(attn::additive_bias{in_float.view}, reference::additive_bias(values)) == 0);
  CHECK(disagreements(attn::additive_bias{in_double.view}, reference::additive_bias(values)) == 0);
}

TEST_CASE("The element type of a bias is deduced from its view") {
  float x = 0;
  static_assert(std::is_same_v<decltype(attn::additive_bias{tensor_view<float>(&x, 1, 1, 1, 1)}),
                               attn::additive_bias<float>>);
  static_assert(std::is_same_v<decltype(attn::additive_bias{tensor_view<const double>()}),
                               attn::additive_bias<double>>);
  CHECK(attn::additive_bias{tensor_view<float>(&x, 1, 1, 1, 1)}(2.0f, 0, 0, 0, 0) == 2.0f);
}

TEST_CASE("A rank-3 mask aligned to the right is per head, not per batch") {
  reference::tensor values({1, n_heads, 1, 1});
  for (index_t h = 0; h < n_heads; ++h) values(0, h, 0, 0) = h == 1;
  const twin<bool> mask(values);
  const attn::boolean_mask rule{mask.view};
  CHECK(rule(1.0f, 0, 0, 0, 0) == -infinity);
  CHECK(rule(1.0f, 1, 1, 3, 4) == 1.0f);
  CHECK(rule(1.0f, 1, 2, 3, 4) == -infinity);
}

TEST_CASE("A bias that is finite in double but not in float forbids in float") {
  const twin<double> bias(reference::tensor({1, 1, 1, 1}, -1.7e308));
  CHECK(attn::additive_bias{bias.view}(5.0f, 0, 0, 0, 0) == -infinity);
  CHECK(attn::additive_bias{bias.view}(5.0, 0, 0, 0, 0) == -1.7e308);
}

TEST_CASE("segment_mask: equal ids attend") {
  reference::tensor q_values({n_batch, 1, n_q, 1}), k_values({n_batch, 1, n_kv, 1});
  attn_test::random_source random(3);
  for (double& x : q_values.elements()) x = static_cast<double>(random.integer(-1, 1));
  for (double& x : k_values.elements()) x = static_cast<double>(random.integer(-1, 1));
  const twin<index_t> q_ids(q_values), k_ids(k_values);
  CHECK(disagreements(attn::segment_mask{q_ids.view, k_ids.view},
                      reference::segment_mask(q_values, k_values)) == 0);
}

TEST_CASE("alibi_bias: −slope · distance") {
  const std::array<float, n_heads> slopes = {0.5f, 0.25f, 2.0f};
  const index_t offset = GENERATE(0, 4, -9);
  CHECK(disagreements(attn::alibi_bias{slopes, offset},
                      reference::alibi_bias({0.5, 0.25, 2.0}, offset)) == 0);

  // The largest distances there are.
  constexpr index_t lowest = std::numeric_limits<index_t>::min();
  const attn::alibi_bias before{slopes, lowest}, after{slopes, std::numeric_limits<index_t>::max()};
  CHECK(before(0.0f, 0, 0, 0, 7) == -0.5f * 0x1p63f);
  CHECK(after(0.0f, 0, 0, 7, 0) == -0.5f * 0x1p63f);
}

TEST_CASE("score_rule_fn: any function, called with the score's type") {
  const auto f = [](auto score, index_t b, index_t h, index_t i, index_t j) {
    return j == 2 ? decltype(score)(reference::forbidden)
                  : 2 * score + static_cast<decltype(score)>(b + 10 * h + 100 * i + 1000 * j);
  };
  const reference::score_rule meaning =
      reference::score_rule_fn([](double score, index_t b, index_t h, index_t i, index_t j) {
        return j == 2 ? reference::forbidden
                      : 2 * score + static_cast<double>(b + 10 * h + 100 * i + 1000 * j);
      });
  index_t wrong = 0;
  const attn::score_rule_fn rule(f);
  for (index_t i = 0; i < n_q; ++i)
    for (index_t j = 0; j < n_kv; ++j)
      wrong += rule(0.5, 1, 2, i, j) != meaning.apply(0.5, 1, 2, i, j);
  CHECK(wrong == 0);
  static_assert(std::is_same_v<decltype(rule(1.0f, 0, 0, 0, 0)), float>);
  static_assert(std::is_same_v<decltype(rule(1.0, 0, 0, 0, 0)), double>);
}

TEST_CASE("a & b is a, then b, and what one forbids the other does not bring back") {
  const std::array<index_t, 2> lengths = {4, 6};
  const std::array<float, n_heads> slopes = {0.5f, 0.25f, 2.0f};
  SECTION("like the oracle") {
    CHECK(disagreements(attn::causal_mask{.offset = 1} & attn::key_lengths{lengths},
                        reference::causal_mask(1) & reference::key_lengths({4, 6})) == 0);
    CHECK(disagreements(attn::alibi_bias{slopes} & attn::window_mask{.left = 3, .right = 1} &
                            attn::key_lengths{lengths},
                        reference::alibi_bias({0.5, 0.25, 2.0}) & reference::window_mask(3, 1) &
                            reference::key_lengths({4, 6})) == 0);
  }
  SECTION("order matters for functions of the score") {
    const attn::score_rule_fn twice(
        [](auto s, index_t, index_t, index_t, index_t) { return 2 * s; });
    const attn::score_rule_fn plus_1(
        [](auto s, index_t, index_t, index_t, index_t) { return s + 1; });
    CHECK((twice & plus_1)(3.0f, 0, 0, 0, 0) == 7.0f);
    CHECK((plus_1 & twice)(3.0f, 0, 0, 0, 0) == 8.0f);
  }
  SECTION("NaN and +inf of the other rule") {
    for (const float poison : {infinity, std::nanf(""), 1.0f}) {
      const attn::score_rule_fn add([=](auto s, index_t, index_t, index_t, index_t) {
        return s + static_cast<decltype(s)>(poison);
      });
      const attn::score_rule_fn replace([=](auto s, index_t, index_t, index_t, index_t) {
        return static_cast<decltype(s)>(poison);
      });
      const attn::causal_mask mask{.offset = -1};
      CHECK((mask & add)(0.0f, 0, 0, 0, 0) == -infinity);
      CHECK((add & mask)(0.0f, 0, 0, 0, 0) == -infinity);
      CHECK((mask & replace)(0.0f, 0, 0, 0, 0) == -infinity);
      CHECK((replace & mask)(0.0f, 0, 0, 0, 0) == -infinity);
      const twin<float> minus_infinity(reference::tensor({1, 1, 1, 1}, reference::forbidden));
      CHECK((add & attn::additive_bias{minus_infinity.view})(0.0f, 0, 0, 0, 0) == -infinity);
      CHECK((attn::additive_bias{minus_infinity.view} & add)(0.0f, 0, 0, 0, 0) == -infinity);
    }
  }
  SECTION("the range of keys is that of both") {
    const auto rule = attn::window_mask{.left = 2, .right = 2} & attn::key_lengths{lengths};
    CHECK(rule.keys(0, 0, 3, n_kv).begin == 1);
    CHECK(rule.keys(0, 0, 3, n_kv).end == 4);
    CHECK(rule.keys(1, 0, 3, n_kv).end == 6);
  }
}

static_assert(attn::score_rule<attn::no_mask>);
static_assert(attn::score_rule<attn::causal_mask>);
static_assert(attn::score_rule<attn::additive_bias<float>>);
static_assert(!attn::score_rule<int>);
