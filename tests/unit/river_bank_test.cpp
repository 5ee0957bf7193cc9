// SPDX-License-Identifier: MIT
//
// "the river bank flooded": four words of two numbers, every weight known to six digits.
#include "support/catch.hpp"

#include <attn/attention_state.hpp>
#include <attn/attention_weights.hpp>
#include <attn/dense_attention.hpp>
#include <attn/diagnostics.hpp>

#include <Eigen/Core>

#include <array>
#include <cmath>

namespace {

enum word { the, river, bank, flooded };

template <class T>
struct sentence {
  using matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic>;
  matrix q{4, 2}, k{4, 2}, v{4, 2};

  sentence() {
    v << T(0.1), T(0.1), T(1.0), T(0.0), T(0.5), T(0.5), T(0.8), T(0.2);
    q << v.col(0) + v.col(1) / 2, v.col(0) / 2 + v.col(1);
    k << 2 * v.col(0), v.col(1);
  }
};

/// Whether a row has these values to the digits given.
template <class Row>
bool is(const Row& row, std::initializer_list<double> expected, double unit = 1e-6) {
  if (row.size() != static_cast<Eigen::Index>(expected.size())) return false;
  Eigen::Index i = 0;
  for (const double e : expected) {
    if (!(std::abs(static_cast<double>(row(i++)) - e) <= 0.6 * unit)) return false;
  }
  return true;
}

}  // namespace

TEMPLATE_TEST_CASE("River bank: raw scores", "", float, double) {
  const sentence<TestType> s;
  const typename sentence<TestType>::matrix scores = s.q * s.k.transpose();
  CHECK(is(scores.row(bank), {0.225, 1.5, 1.125, 1.35}));
  CHECK(scores.size() == 16);
}

TEMPLATE_TEST_CASE("River bank: weights and outputs", "", float, double) {
  const sentence<TestType> s;
  typename sentence<TestType>::matrix w(4, 4);
  attn::attention_weights(s.q, s.k, w);
  CHECK(is(w.row(the), {0.221937, 0.265790, 0.252062, 0.260211}));
  CHECK(is(w.row(river), {0.107958, 0.372107, 0.218952, 0.300982}));
  CHECK(is(w.row(bank), {0.132124, 0.325481, 0.249669, 0.292726}));
  CHECK(is(w.row(flooded), {0.117259, 0.353356, 0.231183, 0.298202}));

  const auto out = attn::dense_attention(s.q, s.k, s.v);
  CHECK(is(out.row(the), {0.622183, 0.200267}));
  CHECK(is(out.row(river), {0.733165, 0.180468}));
  CHECK(is(out.row(bank), {0.697708, 0.196592}));
  CHECK(is(out.row(flooded), {0.719235, 0.186958}));
}

TEMPLATE_TEST_CASE("River bank: with \"flooded\" masked the other weights rise", "", float,
                   double) {
  const sentence<TestType> s;
  const std::array<bool, 4> allowed{true, true, true, false};
  const attn::boolean_mask mask{attn::bhld(allowed.data(), 1, 1, 1, 4)};
  typename sentence<TestType>::matrix w(4, 4), out(4, 2);
  attn::attention_weights(s.q, s.k, w, mask);
  attn::dense_attention(s.q, s.k, s.v, out, mask);
  CHECK(is(w.row(bank), {0.186807, 0.460190, 0.353002, 0}));
  CHECK(w(bank, flooded) == 0);
  CHECK(is(out.row(bank), {0.655372, 0.195182}));
}

TEMPLATE_TEST_CASE("River bank: without the scale large scores collapse", "", float, double) {
  const sentence<TestType> s;
  const typename sentence<TestType>::matrix scores = 8 * s.q * s.k.transpose();
  CHECK(is(scores.row(bank), {1.8, 12, 9, 10.8}, 1e-5));
  typename sentence<TestType>::matrix w(4, 4);
  attn::attention_weights(s.q, s.k, w, attn::no_mask{}, {.scale = 8});
  CHECK(is(w.row(bank), {0.000, 0.740, 0.037, 0.223}, 1e-3));
  CHECK(std::abs(static_cast<double>(w(bank, the)) - 0.00003) < 0.000005);
}

TEMPLATE_TEST_CASE("River bank: the longest key draws every row", "", float, double) {
  const sentence<TestType> s;
  typename sentence<TestType>::matrix w(4, 4);
  attn::attention_weights(s.q, s.k, w);
  for (int i = 0; i < 4; ++i) {
    Eigen::Index most = 0;
    w.row(i).maxCoeff(&most);
    CHECK(most == river);
  }
  const attn::attention_diagnostics d = attn::diagnose_attention(s.q, s.k);
  CHECK(d.total.mass_norm_correlation > 0.99);
  CHECK(d.total.mean_flatness > 0.95);
  for (int j = 0; j < 4; ++j) {
    CHECK(std::abs(d.key_mass[static_cast<std::size_t>(j)] - static_cast<double>(w.col(j).sum())) <
          1e-6);
  }
}

TEMPLATE_TEST_CASE("River bank: word order does not matter", "", float, double) {
  const sentence<TestType> s;
  const typename sentence<TestType>::matrix q = s.q.colwise().reverse(),
                                            k = s.k.colwise().reverse(),
                                            v = s.v.colwise().reverse();
  typename sentence<TestType>::matrix w(4, 4);
  attn::attention_weights(q, k, w);
  CHECK(is(w.row(3 - bank), {0.292726, 0.249669, 0.325481, 0.132124}));
  CHECK(is(attn::dense_attention(q, k, v).row(3 - bank), {0.697708, 0.196592}));
}

TEMPLATE_TEST_CASE("River bank: halves of the sentence merge into the whole", "", float, double) {
  const sentence<TestType> s;
  typename sentence<TestType>::matrix a(4, 2), b(4, 2), lse_a(4, 1), lse_b(4, 1);
  attn::dense_attention(s.q, s.k.topRows(2), s.v.topRows(2), a, lse_a);
  attn::dense_attention(s.q, s.k.bottomRows(2), s.v.bottomRows(2), b, lse_b);
  attn::merge_attention(a, lse_a, b, lse_b, a, lse_a);
  CHECK(is(a.row(the), {0.622183, 0.200267}));
  CHECK(is(a.row(bank), {0.697708, 0.196592}));
}
