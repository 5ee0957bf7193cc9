// SPDX-License-Identifier: MIT
//
// What softmax attention promises whatever the numbers are.
#include "support/catch.hpp"
#include "support/dense_call.hpp"
#include "support/rule_operands.hpp"

#include <attn/attention_state.hpp>
#include <attn/dense_attention_backward.hpp>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

using namespace attn_test;

namespace {

const std::vector<dense_problem> problems = in_both_precisions({
    {.n_heads = 4, .n_kv_heads = 2, .n_q = 1, .n_kv = 150, .d_qk = 20, .d_v = 9},
    {.n_batch = 2, .n_heads = 2, .n_kv_heads = 1, .n_q = 53, .n_kv = 300, .d_qk = 20, .d_v = 16},
});

/// Keys (or values) in another order: row j of the result is row order[j].
reference::tensor reordered(const reference::tensor& t, const std::vector<index_t>& order) {
  reference::tensor r({t.extent(0), t.extent(1), static_cast<index_t>(order.size()), t.extent(3)});
  for (index_t b = 0; b < r.extent(0); ++b)
    for (index_t h = 0; h < r.extent(1); ++h)
      for (index_t j = 0; j < r.extent(2); ++j)
        for (index_t c = 0; c < r.extent(3); ++c)
          r(b, h, j, c) = t(b, h, order[static_cast<std::size_t>(j)], c);
  return r;
}

}  // namespace

TEMPLATE_TEST_CASE("The order of the keys does not matter", "", float, double, Eigen::half) {
  for (const dense_problem& p : problems) {
    INFO(p);
    dense_operands<TestType> x(p), shuffled(p);
    std::vector<index_t> order(static_cast<std::size_t>(p.n_kv));
    std::iota(order.begin(), order.end(), 0);
    random_source random(3);
    for (std::size_t j = order.size() - 1; j > 0; --j)
      std::swap(order[j],
                order[static_cast<std::size_t>(random.integer(0, static_cast<index_t>(j)))]);
    shuffled.k.assign(reordered(x.k.values(), order));
    shuffled.v.assign(reordered(x.v.values(), order));
    attend(shuffled);
    CHECK(shuffled.matches(x.expected()));
  }
}

TEMPLATE_TEST_CASE("A constant added to a row of scores changes its lse and nothing else", "",
                   float, double) {
  for (const dense_problem& p : problems) {
    INFO(p);
    const rule_operand<float> shift(uniform_tensor({p.n_batch, p.n_heads, p.n_q, 1}, 4, -50, 50));
    dense_operands<TestType> x(p);
    auto expected = x.expected();
    attend(x, attn::additive_bias{shift.view()});
    for (index_t b = 0; b < p.n_batch; ++b)
      for (index_t h = 0; h < p.n_heads; ++h)
        for (index_t i = 0; i < p.n_q; ++i) {
          const double c = static_cast<double>(shift.view()(b, h, i, 0));
          expected.lse(b, h, i, 0) += c;
          expected.score_bound(b, h, i, 0) += std::abs(c);
        }
    CHECK(x.matches(expected));
  }
}

TEMPLATE_TEST_CASE("A row of a causal call ignores later keys, bit for bit", "", float, double,
                   Eigen::bfloat16) {
  const auto precision = GENERATE(attn::precision_mode::automatic, attn::precision_mode::strict);
  const dense_problem p{.n_heads = 2,
                        .n_kv_heads = 2,
                        .n_q = 100,
                        .n_kv = 100,
                        .d_qk = 20,
                        .d_v = 16,
                        .precision = precision};
  const index_t from = GENERATE(values<index_t>({1, 7, 50, 99}));
  CAPTURE(from);
  dense_operands<TestType> x(p), changed(p);
  reference::tensor k = x.k.values(), v = x.v.values();
  for (index_t h = 0; h < 2; ++h)
    for (index_t j = from; j < 100; ++j) {
      for (index_t c = 0; c < 20; ++c) k(0, h, j, c) = 3 - k(0, h, j, c);
      for (index_t c = 0; c < 16; ++c) v(0, h, j, c) = -2 * v(0, h, j, c);
    }
  changed.k.assign(k);
  changed.v.assign(v);
  attend(x, attn::causal_mask{});
  attend(changed, attn::causal_mask{});
  index_t kept_wrong = 0, rest_same = 0;
  for (index_t h = 0; h < 2; ++h)
    for (index_t i = 0; i < 100; ++i) {
      bool same = same_bits(x.lse.view()(0, h, i, 0), changed.lse.view()(0, h, i, 0));
      for (index_t c = 0; c < 16; ++c)
        same = same && same_bits(x.out.view()(0, h, i, c), changed.out.view()(0, h, i, c));
      (i < from ? kept_wrong : rest_same) += i < from ? !same : same;
    }
  CHECK(kept_wrong == 0);
  CHECK(rest_same == 0);
}

TEMPLATE_TEST_CASE("Grouped heads are repeated key/value heads", "", float, Eigen::bfloat16) {
  const auto precision = GENERATE(attn::precision_mode::automatic, attn::precision_mode::strict);
  for (const index_t n_q : {1, 5, 53}) {
    const dense_problem grouped{.n_batch = 2,
                                .n_heads = 6,
                                .n_kv_heads = 2,
                                .n_q = n_q,
                                .n_kv = 150,
                                .d_qk = 24,
                                .d_v = 24,
                                .precision = precision};
    dense_problem all = grouped;
    all.n_kv_heads = 6;
    dense_operands<TestType> x(grouped), repeated(all);
    const auto repeat = [](const reference::tensor& t) {
      reference::tensor r({2, 6, t.extent(2), t.extent(3)});
      for (index_t b = 0; b < 2; ++b)
        for (index_t h = 0; h < 6; ++h)
          for (index_t j = 0; j < t.extent(2); ++j)
            for (index_t c = 0; c < t.extent(3); ++c) r(b, h, j, c) = t(b, h / 3, j, c);
      return r;
    };
    repeated.q.assign(x.q.values());
    repeated.k.assign(repeat(x.k.values()));
    repeated.v.assign(repeat(x.v.values()));
    attend(x);
    attend(repeated);
    CHECK(same_bits_out(x, repeated));
  }
}

TEMPLATE_TEST_CASE("Merging the attention over parts of the keys gives the whole", "", float,
                   double) {
  for (const dense_problem& p : problems)
    for (const std::vector<index_t>& cuts : std::vector<std::vector<index_t>>{
             {0, p.n_kv}, {1, p.n_kv - 1}, {64, 64}, {p.n_kv / 3, p.n_kv / 2}, {0, 0}}) {
      INFO(p);
      CAPTURE(cuts);
      dense_operands<TestType> whole(p);
      const std::vector<index_t> edges = {0, cuts[0], cuts[1], p.n_kv};
      dense_operands<TestType> sum(p), part(p);
      for (std::size_t piece = 0; piece < 3; ++piece) {
        // Keys [first, last) of every head, in place.
        const index_t first = edges[piece], n = edges[piece + 1] - first;
        const auto slice = [&](const auto& t) {
          auto extents = t.extents();
          extents[2] = n;
          return attn::tensor_view<const TestType>(t.data_handle() + first * t.stride(2), extents,
                                                   t.strides());
        };
        auto& into = piece == 0 ? sum : part;
        attn::dense_attention(std::as_const(whole.q).view(), slice(std::as_const(whole.k).view()),
                              slice(std::as_const(whole.v).view()), into.out.view(),
                              into.lse.view());
        if (piece > 0)
          attn::merge_attention(sum.out.view(), sum.lse.view(), part.out.view(), part.lse.view(),
                                sum.out.view(), sum.lse.view());
      }
      CHECK(sum.matches(whole.expected(), {.constant = 24}));
    }
}

TEMPLATE_TEST_CASE("Equal values come out as they are", "", float, double, Eigen::half) {
  for (const dense_problem& p : problems) {
    INFO(p);
    dense_operands<TestType> x(p);
    x.v.assign(reference::tensor(p.v_extents(), 0.75));
    attend(x);
    CHECK(compare_within(x.out.values(), reference::tensor(p.out_extents(), 0.75),
                         16 * arithmetic_epsilon<TestType> + storage_rounding<TestType>()));
  }
}

// Rounding that goes the same way in each addition of a long sum. One chain of them over all keys
// was wrong by 6e-4 of the value at 65536 keys.
TEMPLATE_TEST_CASE("Equal values come out as they are, over any number of keys", "", float,
                   double) {
  const auto precision = GENERATE(attn::precision_mode::automatic, attn::precision_mode::strict);
  const bool uniform = GENERATE(true, false);
  constexpr index_t d = 16;
  for (const index_t n_kv : {100, 2000, 9000, 40000})
    for (const index_t n_q : {1, 70}) {
      CAPTURE(n_kv, n_q, uniform, static_cast<int>(precision));
      random_source random(5);
      std::vector<TestType> q(static_cast<std::size_t>(n_q * d)), out(q);
      std::vector<TestType> k(static_cast<std::size_t>(n_kv * d)), v(k);
      if (!uniform)
        for (TestType& x : q) x = static_cast<TestType>(random.normal());
      for (TestType& x : k) x = static_cast<TestType>(random.normal());
      const auto value = [](index_t c) {
        return static_cast<TestType>(0.1 + 0.07 * static_cast<double>(c));
      };
      for (std::size_t x = 0; x < v.size(); ++x) v[x] = value(static_cast<index_t>(x) % d);
      attn::dense_attention(attn::bhld(q.data(), 1, 1, n_q, d), attn::bhld(k.data(), 1, 1, n_kv, d),
                            attn::bhld(v.data(), 1, 1, n_kv, d),
                            attn::bhld(out.data(), 1, 1, n_q, d), attn::no_mask{},
                            {.precision = precision});
      double worst = 0;
      for (std::size_t x = 0; x < out.size(); ++x) {
        const auto right = static_cast<double>(value(static_cast<index_t>(x) % d));
        worst = std::max(worst, std::abs(static_cast<double>(out[x]) / right - 1));
      }
      // The bound of docs/numerics.md for a row of scores that are 0.
      CHECK(worst <= 16 * arithmetic_epsilon<TestType>);
    }
}

TEMPLATE_TEST_CASE("Equal gradients add up, over many queries", "", float, double) {
  constexpr index_t n_q = sizeof(TestType) == 4 ? 2000 : 600, n_kv = 2, d = 16;
  const auto gradient = [](index_t c) {
    return static_cast<TestType>(0.1 + 0.07 * static_cast<double>(c));
  };
  std::vector<TestType> q(n_q * d), out(q), d_out(q), d_q(q), lse(n_q);
  std::vector<TestType> k(n_kv * d), v(k), d_k(k), d_v(k);
  for (std::size_t x = 0; x < d_out.size(); ++x) d_out[x] = gradient(static_cast<index_t>(x) % d);
  const auto rows = [](std::vector<TestType>& x, index_t n, index_t width = 16) {
    return attn::bhld(x.data(), 1, 1, n, width);
  };
  attn::dense_attention(rows(q, n_q), rows(k, n_kv), rows(v, n_kv), rows(out, n_q),
                        rows(lse, n_q, 1));
  attn::dense_attention_backward(rows(q, n_q), rows(k, n_kv), rows(v, n_kv), rows(out, n_q),
                                 rows(lse, n_q, 1), rows(d_out, n_q), rows(d_q, n_q),
                                 rows(d_k, n_kv), rows(d_v, n_kv));
  double worst = 0;
  for (std::size_t x = 0; x < d_v.size(); ++x) {
    const double right = static_cast<double>(gradient(static_cast<index_t>(x) % d)) * n_q / n_kv;
    worst = std::max(worst, std::abs(static_cast<double>(d_v[x]) / right - 1));
  }
  // The bound of docs/kernels/dense_attention_backward.md, 16 eps (1 + S + |lse|).
  CHECK(worst / arithmetic_epsilon<TestType> <= 16 * (1 + std::log(static_cast<double>(n_kv))));
}
