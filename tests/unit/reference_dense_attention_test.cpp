// SPDX-License-Identifier: MIT
//
// The oracle against values worked out by hand, and its gradients against finite differences.
#include "reference/dense_attention.hpp"
#include "support/catch.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"

#include <cmath>
#include <functional>
#include <initializer_list>
#include <numeric>

using namespace reference;
using attn_test::compare_within;
using attn_test::normal_tensor;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

tensor filled(std::array<index_t, 4> extents, std::initializer_list<double> values) {
  tensor t(extents);
  t.elements().assign(values);
  return t;
}

/// [1, 1, n, 1]: 0, 1, 2, ...
tensor counting(index_t n) {
  tensor t({1, 1, n, 1});
  std::iota(t.elements().begin(), t.elements().end(), 0.0);
  return t;
}

/// Zero logits, v_j = j: the output is the mean index of the allowed keys.
dense_result mean_index(index_t n_q, index_t n_kv, const score_rule& rule,
                        const dense_options& options = {}) {
  return dense_attention(tensor({1, 1, n_q, 1}), tensor({1, 1, n_kv, 1}), counting(n_kv), rule,
                         options);
}

/// One query with the given logits.
dense_result with_logits(std::initializer_list<double> logits, std::initializer_list<double> values,
                         const score_rule& rule = {}, dense_options options = {}) {
  const auto n = static_cast<index_t>(logits.size());
  if (!options.scale) options.scale = 1;
  return dense_attention(tensor({1, 1, 1, 1}, 1), filled({1, 1, n, 1}, logits),
                         filled({1, 1, n, 1}, values), rule, options);
}

void check_row(const tensor& t, std::initializer_list<double> expected, double bound = 1e-12) {
  tensor e(t.extents());
  REQUIRE(e.elements().size() == expected.size());
  e.elements().assign(expected);
  CHECK(compare_within(t, e, bound));
}

}  // namespace

TEST_CASE("The river bank: self-attention of four words by hand") {
  const tensor x = filled({1, 1, 4, 2}, {0.1, 0.1, 1, 0, 0.5, 0.5, 0.8, 0.2});
  tensor q(x.extents()), k(x.extents());
  for (index_t i = 0; i < 4; ++i) {
    q(0, 0, i, 0) = x(0, 0, i, 0) + x(0, 0, i, 1) / 2;
    q(0, 0, i, 1) = x(0, 0, i, 0) / 2 + x(0, 0, i, 1);
    k(0, 0, i, 0) = 2 * x(0, 0, i, 0);
    k(0, 0, i, 1) = x(0, 0, i, 1);
  }

  const dense_result all = dense_attention(q, k, x);
  check_row(all.weights,
            {0.221937, 0.265790, 0.252062, 0.260211,  //
             0.107958, 0.372107, 0.218952, 0.300982,  //
             0.132124, 0.325481, 0.249669, 0.292726,  //
             0.117259, 0.353356, 0.231183, 0.298202},
            5.1e-7);
  check_row(all.out,
            {0.622183, 0.200267, 0.733165, 0.180468, 0.697708, 0.196592, 0.719235, 0.186958},
            5.1e-7);

  const dense_result without_flooded =
      dense_attention(q, k, x, boolean_mask(filled({1, 1, 1, 4}, {1, 1, 1, 0})));
  CHECK(std::abs(without_flooded.weights(0, 0, 2, 0) - 0.186807) < 5.1e-7);
  CHECK(std::abs(without_flooded.weights(0, 0, 2, 1) - 0.460190) < 5.1e-7);
  CHECK(std::abs(without_flooded.weights(0, 0, 2, 2) - 0.353002) < 5.1e-7);
  CHECK(without_flooded.weights(0, 0, 2, 3) == 0);
  CHECK(std::abs(without_flooded.out(0, 0, 2, 0) - 0.655372) < 5.1e-7);
  CHECK(std::abs(without_flooded.out(0, 0, 2, 1) - 0.195182) < 5.1e-7);

  const dense_result collapsed = dense_attention(q, k, x, {}, {.scale = 8});
  CHECK(std::abs(collapsed.weights(0, 0, 2, 0) - 0.00003) < 5e-6);
  CHECK(std::abs(collapsed.weights(0, 0, 2, 1) - 0.740) < 5e-4);
  CHECK(std::abs(collapsed.weights(0, 0, 2, 2) - 0.037) < 5e-4);
  CHECK(std::abs(collapsed.weights(0, 0, 2, 3) - 0.223) < 5e-4);
}

TEST_CASE("Zero logits give the mean index of the allowed keys") {
  using std::log;
  SECTION("every key") {
    const auto r = mean_index(1, 1025, no_mask());
    CHECK(std::abs(r.out(0, 0, 0, 0) - 512) < 1e-10);
    CHECK(std::abs(r.lse(0, 0, 0, 0) - log(1025)) < 1e-12);
  }
  SECTION("causal, top left and bottom right") {
    check_row(mean_index(2, 5, causal_mask()).out, {0, 0.5});
    check_row(mean_index(2, 5, causal_mask()).lse, {0, log(2)});
    check_row(mean_index(2, 5, causal_mask(3)).out, {1.5, 2});
    check_row(mean_index(2, 5, causal_mask(3)).lse, {log(4), log(5)});
  }
  SECTION("causal with more queries than keys: the first rows see nothing") {
    check_row(mean_index(3, 1, causal_mask(-2)).out, {0, 0, 0});
    check_row(mean_index(3, 1, causal_mask(-2)).lse, {-infinity, -infinity, 0});
  }
  SECTION("window") {
    check_row(mean_index(4, 6, window_mask(1, 2)).out, {1, 1.5, 2.5, 3.5});
    check_row(mean_index(2, 6, window_mask(0, unlimited, 3)).out, {4, 4.5});
    check_row(mean_index(2, 6, window_mask(unlimited, 0, 1)).out, {0.5, 1});
  }
  SECTION("key lengths") {
    check_row(mean_index(1, 6, key_lengths({3})).out, {1});
    check_row(mean_index(1, 6, key_lengths({0})).out, {0});
  }
  SECTION("boolean, broadcast over the queries") {
    check_row(mean_index(2, 4, boolean_mask(filled({1, 1, 1, 4}, {0, 1, 0, 1}))).out, {2, 2});
    check_row(mean_index(2, 2, boolean_mask(filled({1, 1, 2, 1}, {0, 1}))).out, {0, 0.5});
  }
  SECTION("segments") {
    const tensor ids = filled({1, 1, 4, 1}, {7, 7, 9, 7});
    check_row(mean_index(4, 4, segment_mask(ids, ids)).out, {4. / 3, 4. / 3, 2, 4. / 3});
  }
  SECTION("prefix") {
    check_row(mean_index(4, 4, prefix_mask({3})).out, {1, 1, 1, 1.5});
    check_row(mean_index(4, 4, prefix_mask({0}, -1)).out, {0, 0, 0.5, 1});
  }
  SECTION("sink: e^0 of mass that has no value") {
    const auto r = mean_index(1, 3, no_mask(), {.sinks = {0}});
    check_row(r.out, {3. / 4});
    check_row(r.lse, {log(4)});
    const auto empty = mean_index(1, 3, key_lengths({0}), {.sinks = {1.5}});
    check_row(empty.out, {0});
    check_row(empty.lse, {1.5});
  }
}

TEST_CASE("Scores that are not zero") {
  SECTION("two logits, however large") {
    check_row(with_logits({1000, 1001}, {1, 0}).out, {1 / (1 + std::exp(1))});
    check_row(with_logits({-200, -200, -200, -200, -200}, {0, 1, 2, 3, 4}).out, {2});
    check_row(with_logits({-200, -200, -200, -200, -200}, {0, 1, 2, 3, 4}).lse,
              {-200 + std::log(5)});
  }
  SECTION("softcap") {
    const auto r = with_logits({0, 10}, {0, 1}, {}, {.softcap = 2});
    CHECK(std::abs(r.out(0, 0, 0, 0) - 0.8807780) < 5e-8);
  }
  SECTION("scale of 0 and of −1") {
    check_row(with_logits({5, 900, 7}, {1, 2, 4}, {}, {.scale = 0}).out, {7. / 3});
    check_row(with_logits({0, 500}, {1, 0}, {}, {.scale = -1}).out, {1});
  }
  SECTION("additive bias; −inf forbids") {
    const auto r =
        with_logits({1, 2, 3}, {1, 2, 4}, additive_bias(filled({1, 1, 1, 3}, {2, 1, -infinity})));
    check_row(r.out, {1.5});
    check_row(r.lse, {3 + std::log(2)});
  }
  SECTION("ALiBi") {
    const auto r = with_logits({0, 0, 0}, {1, 0, 0}, alibi_bias({std::log(2)}, 2));
    check_row(r.out, {0.25 / 1.75});  // weights 1/4, 1/2, 1 before the division
  }
  SECTION("a key that one rule forbids stays forbidden") {
    const auto infinite = score_rule_fn(
        [](double, index_t, index_t, index_t, index_t j) { return j == 1 ? infinity : 0.0; });
    const auto hide_1 = boolean_mask(filled({1, 1, 1, 3}, {1, 0, 1}));
    check_row(with_logits({0, 0, 0}, {1, 50, 2}, infinite & hide_1).out, {1.5});
    check_row(with_logits({0, 0, 0}, {1, 50, 2}, hide_1 & infinite).out, {1.5});
  }
}

TEST_CASE("Heads share key/value heads in order") {
  tensor v({1, 2, 1, 1});
  v(0, 1, 0, 0) = 1;
  const auto r = dense_attention(tensor({1, 6, 1, 2}), tensor({1, 2, 1, 2}), v);
  check_row(r.out, {0, 0, 0, 1, 1, 1});
}

TEST_CASE("The analytic gradients are those of finite differences") {
  const dense_options options = GENERATE(dense_options{}, dense_options{.softcap = 1.5},
                                         dense_options{.scale = 0.3, .sinks = {0.2, -1, 0, 2}});
  const score_rule doubled =
      score_rule_fn([](double s, index_t, index_t, index_t,
                       index_t j) { return 2 * s + 0.1 * static_cast<double>(j); },
                    [](double, index_t, index_t, index_t, index_t) { return 2.0; });
  const score_rule rule = GENERATE_COPY(no_mask(), causal_mask(-1), doubled & causal_mask(1),
                                        alibi_bias({0.5, 0.25, 0.125, 1}));
  tensor q = normal_tensor({2, 4, 3, 5}, 1), k = normal_tensor({2, 2, 4, 5}, 2),
         v = normal_tensor({2, 2, 4, 3}, 3);
  const tensor d_out = normal_tensor({2, 4, 3, 3}, 4);
  const dense_gradients g = dense_attention_backward(q, k, v, d_out, rule, options);

  const auto loss = [&] {
    const tensor out = dense_attention(q, k, v, rule, options).out;
    return std::inner_product(out.elements().begin(), out.elements().end(),
                              d_out.elements().begin(), 0.0);
  };
  const auto differences = [&](tensor& x) {
    constexpr double h = 1e-5;
    tensor d(x.extents());
    for (std::size_t e = 0; e < x.elements().size(); ++e) {
      const double saved = x.elements()[e];
      x.elements()[e] = saved + h;
      const double up = loss();
      x.elements()[e] = saved - h;
      d.elements()[e] = (up - loss()) / (2 * h);
      x.elements()[e] = saved;
    }
    return d;
  };
  CHECK(compare_within(g.d_q, differences(q), 1e-8));
  CHECK(compare_within(g.d_k, differences(k), 1e-8));
  CHECK(compare_within(g.d_v, differences(v), 1e-8));
}
