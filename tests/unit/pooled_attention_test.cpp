// SPDX-License-Identifier: MIT
//
// Pooled attention and its gradients against two oracles in a row: soft top-k, dense attention.
#include "reference/soft_topk.hpp"
#include "support/allocation_counter.hpp"
#include "support/backward_call.hpp"
#include "support/catch.hpp"

#include <attn/pooled_attention.hpp>

#include <limits>
#include <string>
#include <utility>
#include <vector>

using namespace attn_test;
using attn::pooled_options;
using reference::tensor;

#define ELEMENT_TYPES float, double, Eigen::half, Eigen::bfloat16

namespace {

constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();

reference::soft_topk_options meaning_of_pooling(const pooled_options& o) {
  return {static_cast<reference::topk_boost>(o.boost),
          o.strength,
          static_cast<reference::topk_sort>(o.sort),
          reference::topk_order::by_rank,
          {o.lengths.begin(), o.lengths.end()}};
}

/// Operands of a pooled call; n_kv is the number of keys before pooling.
template <class T>
struct pooled_operands {
  backward_operands<T> y;
  tensor_buffer<arithmetic_t<T>> scores, d_scores;

  explicit pooled_operands(const dense_problem& p)
      : y(p), scores(score_extents(p), p.inputs, from_double<arithmetic_t<T>>(nan_value)),
        d_scores(score_extents(p), p.outputs, from_double<arithmetic_t<T>>(nan_value)) {
    scores.assign(uniform_tensor(score_extents(p), 77 + p.seed, 0, 1));
  }
  static std::array<index_t, 4> score_extents(const dense_problem& p) {
    return {p.n_batch, p.n_kv_heads, p.n_kv, 1};
  }

  void attend(const pooled_options& o, attn::context& ctx = attn::default_context()) {
    attn::pooled_attention(std::as_const(y.x.q).view(), std::as_const(y.x.k).view(),
                           std::as_const(y.x.v).view(), std::as_const(scores).view(),
                           y.x.out.view(), y.x.lse.view(), o, ctx);
  }
  void differentiate(const pooled_options& o, attn::context& ctx = attn::default_context()) {
    attn::pooled_attention_backward(std::as_const(y.x.q).view(), std::as_const(y.x.k).view(),
                                    std::as_const(y.x.v).view(), std::as_const(scores).view(),
                                    std::as_const(y.x.out).view(), std::as_const(y.x.lse).view(),
                                    std::as_const(y.d_out).view(), y.d_q.view(), y.d_k.view(),
                                    y.d_v.view(), d_scores.view(), o, ctx);
  }

  tensor pooled(const tensor& x, const pooled_options& o) const {
    return reference::soft_topk(x, scores.values(), o.k, meaning_of_pooling(o)).pooled;
  }

  comparison forward_matches(const pooled_options& o) const {
    // Weights of a tournament are computed in double, with errors of some 1e-14: soft_topk_test.
    const tolerance t{std::is_same_v<T, double> ? 300.0 : 16.0};
    return y.x.matches(reference::dense_attention(y.x.q.values(), pooled(y.x.k.values(), o),
                                                  pooled(y.x.v.values(), o), {},
                                                  meaning_of(o.dense())),
                       t);
  }

  comparison gradients_match(const pooled_options& o, double bound) const {
    const tensor k = y.x.k.values(), v = y.x.v.values(), s = scores.values();
    const reference::dense_gradients dense = reference::dense_attention_backward(
        y.x.q.values(), pooled(k, o), pooled(v, o), y.d_out.values(), {}, meaning_of(o.dense()));
    const tensor none({k.extent(0), k.extent(1), o.k, 1});
    const auto through_k =
        reference::soft_topk_backward(k, s, o.k, dense.d_k, none, meaning_of_pooling(o));
    const auto through_v =
        reference::soft_topk_backward(v, s, o.k, dense.d_v, none, meaning_of_pooling(o));
    tensor d_s = through_k.d_scores;
    for (std::size_t e = 0; e < d_s.elements().size(); ++e) {
      d_s.elements()[e] += through_v.d_scores.elements()[e];
    }
    if (const comparison alive = y.canaries_alive(); !alive) return alive;
    if (!d_scores.canaries_alive()) return {false, "written outside of d_scores"};
    for (const auto& [got, expected] :
         {std::pair{y.d_q.values(), dense.d_q}, std::pair{y.d_k.values(), through_k.d_x},
          std::pair{y.d_v.values(), through_v.d_x}, std::pair{d_scores.values(), d_s}}) {
      double largest = 1;
      for (const double e : expected.elements()) largest = std::max(largest, std::abs(e));
      if (const comparison c = compare_within(got, expected, bound * largest); !c) return c;
    }
    return {};
  }
};

}  // namespace

TEMPLATE_TEST_CASE("Pooled attention and its gradients, every k", "", float, double) {
  for (const index_t n_kv : {1, 2, 9, 40, 130}) {
    for (const index_t k : {1, 2, 7, 39, 40}) {
      if (k > n_kv) continue;
      const dense_problem p{.n_batch = 2,
                            .n_heads = 4,
                            .n_kv_heads = 2,
                            .n_q = 21,
                            .n_kv = n_kv,
                            .d_qk = 6,
                            .d_v = 5};
      INFO(p);
      CAPTURE(k);
      pooled_operands<TestType> x(p);
      const pooled_options options{.k = k};
      x.attend(options);
      CHECK(x.forward_matches(options));
      x.differentiate(options);
      CHECK(x.gradients_match(options, std::is_same_v<TestType, double> ? 1e-11 : 1e-4));
    }
  }
}

TEMPLATE_TEST_CASE("Every element type and layout", "", ELEMENT_TYPES) {
  for (const layout l : plain_layouts) {
    const dense_problem p{.n_batch = 2,
                          .n_heads = 2,
                          .n_kv_heads = 2,
                          .n_q = 19,
                          .n_kv = 33,
                          .d_qk = 9,
                          .d_v = 7,
                          .inputs = l,
                          .outputs = l};
    INFO(p);
    pooled_operands<TestType> x(p);
    const pooled_options options{.k = 5};
    x.attend(options);
    CHECK(x.forward_matches(options));
    x.differentiate(options);
    CHECK(x.gradients_match(options, std::is_same_v<TestType, double>
                                         ? 1e-11
                                         : 1e-4 + 6 * storage_rounding<TestType>()));
  }
}

TEST_CASE("Options of the tournament and of dense attention; lengths") {
  const dense_problem p{
      .n_batch = 2, .n_heads = 2, .n_kv_heads = 1, .n_q = 8, .n_kv = 50, .d_qk = 6, .d_v = 5};
  const std::vector<float> sinks{0.5f, -1.0f};
  const std::vector<index_t> lengths{13, 50};
  const pooled_options options{.k = 9,
                               .boost = attn::topk_boost::scaled,
                               .strength = 8,
                               .sort = attn::topk_sort::once,
                               .lengths = lengths,
                               .scale = 0.7,
                               .softcap = 3,
                               .sinks = sinks};
  pooled_operands<double> x(p);
  // What is past a length may hold anything.
  tensor k = x.y.x.k.values(), v = x.y.x.v.values(), s = x.scores.values();
  for (index_t j = 13; j < 50; ++j) {
    s(0, 0, j, 0) = nan_value;
    for (index_t c = 0; c < 6; ++c) k(0, 0, j, c) = nan_value;
    for (index_t c = 0; c < 5; ++c) v(0, 0, j, c) = nan_value;
  }
  x.y.x.k.assign(k), x.y.x.v.assign(v), x.scores.assign(s);
  x.attend(options);
  CHECK(x.forward_matches(options));
  x.differentiate(options);
  CHECK(x.gradients_match(options, 1e-11));
  CHECK(x.y.d_k.view()(0, 0, 20, 0) == 0);
  CHECK(x.d_scores.view()(0, 0, 20, 0) == 0);
}

TEST_CASE("k = n_kv is dense attention up to the order of the keys") {
  const dense_problem p{.n_heads = 2, .n_kv_heads = 2, .n_q = 30, .n_kv = 60};
  pooled_operands<float> x(p);
  x.attend({.k = 60});
  CHECK(x.y.x.matches(x.y.x.expected()));
}

TEST_CASE("All heads may share one tournament by a stride of 0") {
  const dense_problem p{.n_heads = 4, .n_kv_heads = 4, .n_q = 5, .n_kv = 20, .d_qk = 4, .d_v = 4};
  pooled_operands<float> x(p);
  tensor shared = x.scores.values();
  for (index_t h = 1; h < 4; ++h)
    for (index_t j = 0; j < 20; ++j) shared(0, h, j, 0) = shared(0, 0, j, 0);
  x.scores.assign(shared);
  x.attend({.k = 3});
  const tensor expected = x.y.x.out.values();
  const attn::tensor_view<const float> one(&x.scores.view()(0, 0, 0, 0), {1, 4, 20, 1},
                                           {0, 0, x.scores.view().stride(2), 1});
  attn::pooled_attention(x.y.x.q.view(), x.y.x.k.view(), x.y.x.v.view(), one, x.y.x.out.view(),
                         pooled_options{.k = 3});
  CHECK(compare_bits(expected, x.y.x.out.values()));
}

TEST_CASE("Threads change no bit; a repeated call does not allocate") {
  const dense_problem p{.n_batch = 2, .n_heads = 4, .n_kv_heads = 2, .n_q = 70, .n_kv = 300};
  pooled_operands<float> x(p), y(p);
  attn::context serial(1), threaded(3);
  x.attend({.k = 40}, serial);
  x.differentiate({.k = 40}, serial);
  y.attend({.k = 40}, threaded);
  y.differentiate({.k = 40}, threaded);
  CHECK(same_bits_out(x.y.x, y.y.x));
  CHECK(compare_bits(x.y.gradients(), y.y.gradients()));
  CHECK(compare_bits(x.d_scores.values(), y.d_scores.values()));
  {
    const allocation_counter allocations;
    x.attend({.k = 40}, serial);
    x.differentiate({.k = 40}, serial);
    CHECK(allocations.count() == 0);
  }
}

TEST_CASE("What is refused, before anything is written") {
  pooled_operands<float> x({.n_batch = 2, .n_heads = 2, .n_kv_heads = 2, .n_q = 4, .n_kv = 6});
  const auto message = [&](const pooled_options& o) -> std::string {
    try {
      x.attend(o);
    } catch (const std::invalid_argument& e) {
      return e.what();
    }
    return "accepted";
  };
  CHECK(message({.k = 0}) == "pooled_attention: k is 0, expected 1 to 6 (length of scores)");
  CHECK(message({.k = 7}) == "pooled_attention: k is 7, expected 1 to 6 (length of scores)");
  CHECK(message({.k = 2, .strength = 1}) ==
        "pooled_attention: strength is 1, expected a finite number above 1 (base of "
        "topk_boost::exponential)");
  const std::vector<index_t> lengths{2, 1};
  CHECK(message({.k = 2, .lengths = lengths}) ==
        "pooled_attention: lengths[1] is 1, expected 2 to 6 (k to length of scores)");
  CHECK(message({.k = 2, .softcap = -1}) ==
        "pooled_attention: softcap is -1, expected 0 (off) or a positive number");
  const std::vector<float> scores(24);
  const auto with_scores = [&](std::array<index_t, 4> e) -> std::string {
    try {
      attn::pooled_attention(x.y.x.q.view(), x.y.x.k.view(), x.y.x.v.view(),
                             attn::bhld(scores.data(), e[0], e[1], e[2], e[3]), x.y.x.out.view(),
                             pooled_options{.k = 2});
    } catch (const attn::shape_error& error) {
      return error.what();
    }
    return "accepted";
  };
  CHECK(with_scores({2, 1, 6, 1}) ==
        "pooled_attention: scores is [2, 1, 6, 1], expected heads 2 (heads of k)");
  CHECK(with_scores({2, 2, 5, 1}) ==
        "pooled_attention: scores is [2, 2, 5, 1], expected length 6 (length of k)");
  CHECK(x.y.x.out.untouched());
  CHECK(x.y.x.lse.untouched());
}
