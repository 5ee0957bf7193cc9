// SPDX-License-Identifier: MIT
//
// Outputs of the scorers that share memory with anything: scores with parameters, gradients with
// operands, parameters and each other.
#include "support/catch.hpp"
#include "support/refusal.hpp"

#include <attn/scorers.hpp>

#include <array>
#include <span>
#include <string>
#include <vector>

using attn::index_t;

namespace {

/// "a shares memory with b", or what else came out.
template <class Call>
std::string refusal(const Call& call) {
  const std::string text = attn_test::refusal(call), end = ", expected separate memory";
  if (!text.ends_with(end)) return text;
  const std::size_t begin = text.rfind(": ") + 2;
  return text.substr(begin, text.size() - begin - end.size());
}

constexpr index_t n = 4, d = 4, d_hidden = 4;
constexpr std::size_t room = 16;
using floats = std::array<float, room>;

attn::tensor_view<float> matrix(float* at, index_t columns) {
  return attn::bhld(at, 1, 1, n, columns);
}

}  // namespace

TEST_CASE("Scores in the memory of a parameter are refused") {
  floats x{}, w{}, w1{}, b1{}, w2{};
  const attn::linear_scorer<float> linear{std::span<const float>(w).first(d)};
  const attn::nonlinear_scorer<float> nonlinear{matrix(w1.data(), d_hidden),
                                                std::span<const float>(b1).first(d_hidden),
                                                std::span<const float>(w2).first(d_hidden)};
  const auto scores = [&](const auto& scorer, float* at) {
    return refusal([&] { scorer(matrix(x.data(), d), matrix(at, 1)); });
  };
  CHECK(scores(linear, w.data() + 3) == "scores shares memory with w");
  CHECK(scores(nonlinear, w1.data() + 12) == "scores shares memory with w1");
  CHECK(scores(nonlinear, b1.data() + 3) == "scores shares memory with b1");
  CHECK(scores(nonlinear, w2.data() + 3) == "scores shares memory with w2");
  CHECK(scores(nonlinear, w2.data() + 4) == "accepted");
}

TEST_CASE("Gradients of a linear scorer have memory of their own") {
  floats x{}, w{}, g{}, d_x{}, d_w{};
  float d_b = 0;
  const auto backward = [&](float* to_x, float* to_w, float* to_b) {
    const attn::linear_scorer<float> scorer{std::span<const float>(w).first(d)};
    return refusal([&] {
      scorer.backward(matrix(x.data(), d), matrix(g.data(), 1), matrix(to_x, d),
                      std::span<float>(to_w, d), *to_b);
    });
  };
  CHECK(backward(d_x.data(), d_w.data(), &d_b) == "accepted");
  CHECK(backward(w.data(), d_w.data(), &d_b) == "d_x shares memory with w");
  CHECK(backward(d_x.data(), x.data() + 12, &d_b) == "d_w shares memory with x");
  CHECK(backward(d_x.data(), w.data() + 1, &d_b) == "d_w shares memory with w");
  CHECK(backward(d_x.data(), g.data() + 3, &d_b) == "d_w shares memory with d_scores");
  CHECK(backward(d_x.data(), d_x.data() + 12, &d_b) == "d_w shares memory with d_x");
  CHECK(backward(d_x.data(), d_w.data(), &x[15]) == "d_b shares memory with x");
  CHECK(backward(d_x.data(), d_w.data(), &d_w[3]) == "d_b shares memory with d_w");
}

TEST_CASE("Gradients of a nonlinear scorer have memory of their own") {
  floats x{}, w1{}, b1{}, w2{}, g{}, d_x{}, d_w1{}, d_b1{}, d_w2{};
  float d_b2 = 0;
  struct outputs {
    float *x, *w1, *b1, *w2, *b2;
  };
  const outputs apart{d_x.data(), d_w1.data(), d_b1.data(), d_w2.data(), &d_b2};
  const auto backward = [&](const outputs& to) {
    const attn::nonlinear_scorer<float> scorer{matrix(w1.data(), d_hidden),
                                               std::span<const float>(b1).first(d_hidden),
                                               std::span<const float>(w2).first(d_hidden)};
    return refusal([&] {
      scorer.backward(matrix(x.data(), d), matrix(g.data(), 1), matrix(to.x, d),
                      matrix(to.w1, d_hidden), std::span<float>(to.b1, d_hidden),
                      std::span<float>(to.w2, d_hidden), *to.b2);
    });
  };
  const auto with = [&](float* outputs::*which, float* at) {
    outputs to = apart;
    to.*which = at;
    return backward(to);
  };
  CHECK(backward(apart) == "accepted");
  CHECK(with(&outputs::x, w1.data()) == "d_x shares memory with w1");
  CHECK(with(&outputs::x, w2.data()) == "d_x shares memory with w2");
  CHECK(with(&outputs::w1, x.data()) == "d_w1 shares memory with x");
  CHECK(with(&outputs::w1, d_x.data()) == "d_w1 shares memory with d_x");
  CHECK(with(&outputs::b1, g.data()) == "d_b1 shares memory with d_scores");
  CHECK(with(&outputs::b1, d_w1.data() + 12) == "d_b1 shares memory with d_w1");
  CHECK(with(&outputs::w2, w2.data()) == "d_w2 shares memory with w2");
  CHECK(with(&outputs::w2, d_b1.data()) == "d_w2 shares memory with d_b1");
  CHECK(with(&outputs::b2, &d_w2[3]) == "d_b2 shares memory with d_w2");
  CHECK(with(&outputs::b2, &b1[0]) == "d_b2 shares memory with b1");
}

TEST_CASE("squash_scores is in place on the same view only") {
  std::vector<float> a(room), b(room);
  const auto column = [](auto* at, index_t step = 1) {
    return attn::tensor_view<std::remove_pointer_t<decltype(at)>>(at, {1, 1, n, 1},
                                                                  {n * step, n * step, step, 1});
  };
  const auto squash = [&](const auto& raw, const auto& scores) {
    return refusal([&] { attn::squash_scores(raw, scores); });
  };
  CHECK(squash(column(a.data()), column(a.data())) == "accepted");
  CHECK(squash(column(a.data()), column(a.data() + n)) == "accepted");
  CHECK(squash(column(a.data()), column(a.data() + 1)) == "scores shares memory with raw");
  CHECK(squash(column(a.data()), column(a.data(), 2)) == "scores shares memory with raw");
  // One address, but elements of another size.
  CHECK(squash(column(reinterpret_cast<Eigen::half*>(a.data())), column(a.data())) ==
        "scores shares memory with raw");

  const auto backward = [&](float* d_raw) {
    return refusal(
        [&] { attn::squash_scores_backward(column(a.data()), column(b.data()), column(d_raw)); });
  };
  CHECK(backward(a.data()) == "accepted");
  CHECK(backward(b.data()) == "accepted");
  CHECK(backward(a.data() + 1) == "d_raw shares memory with scores");
  CHECK(backward(b.data() + 1) == "d_raw shares memory with d_scores");
}
