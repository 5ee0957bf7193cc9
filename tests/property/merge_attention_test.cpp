// SPDX-License-Identifier: MIT
//
// merge_attention: the algebra of attention over disjoint sets of keys.
#include "reference/dense_attention.hpp"
#include "reference/merge_attention.hpp"
#include "support/catch.hpp"
#include "support/compare.hpp"
#include "support/element.hpp"
#include "support/random.hpp"
#include "support/tensor_buffer.hpp"

#include <attn/attention_state.hpp>
#include <attn/context.hpp>
#include <attn/eigen.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>

using namespace attn_test;

#define ELEMENT_TYPES float, double, Eigen::half, Eigen::bfloat16

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

/// Attention over some keys: out [2, 3, n_q, d_v] and lse [2, 3, n_q, 1].
template <class T>
struct part {
  tensor_buffer<T> out;
  tensor_buffer<arithmetic_t<T>> lse;

  part(index_t n_q, index_t d_v, layout l = layout::contiguous)
      : out({2, 3, n_q, d_v}, l, quiet_nan<T>()),
        lse({2, 3, n_q, 1}, l, quiet_nan<arithmetic_t<T>>()) {}

  /// Random rows; about one in five saw no key.
  part& random(std::uint64_t seed, double lse_deviation = 3) {
    const auto extents = out.view().extents();
    reference::tensor o = normal_tensor(extents, seed);
    reference::tensor l = normal_tensor({2, 3, extents[2], 1}, seed + 1, lse_deviation);
    random_source random(seed + 2);
    for (index_t b = 0; b < 2; ++b)
      for (index_t h = 0; h < 3; ++h)
        for (index_t i = 0; i < extents[2]; ++i) {
          if (!random.coin(0.2)) continue;
          l(b, h, i, 0) = -infinity;
          for (index_t c = 0; c < extents[3]; ++c) o(b, h, i, c) = 0;
        }
    out.assign(o);
    lse.assign(l);
    return *this;
  }
};

template <class T>
void merge(const part<T>& a, const part<T>& b, part<T>& into) {
  attn::merge_attention(a.out.view(), a.lse.view(), b.out.view(), b.lse.view(), into.out.view(),
                        into.lse.view());
}

template <class T>
comparison same(const part<T>& a, const part<T>& b) {
  const comparison out = compare_bits(a.out.values(), b.out.values());
  return out ? compare_bits(a.lse.values(), b.lse.values()) : out;
}

/// Rounding of one or two merges: outs are within ±6, lse within ±20.
template <class T>
comparison close(const part<T>& a, const part<T>& b) {
  const double eps = std::max(arithmetic_epsilon<T>, 2 * storage_rounding<T>());
  const comparison out = compare_within(a.out.values(), b.out.values(), 32 * 6 * eps);
  const double lse_eps = arithmetic_epsilon<T>;
  return out ? compare_within(a.lse.values(), b.lse.values(), 4 * 20 * lse_eps) : out;
}

}  // namespace

TEMPLATE_TEST_CASE("Merging is what the oracle says, in every layout", "", ELEMENT_TYPES) {
  const layout l = GENERATE(from_range(plain_layouts.begin(), plain_layouts.end()));
  const index_t d_v = GENERATE(values<index_t>({1, 3, 4, 8, 15, 16, 17, 64, 100}));
  CAPTURE(l, d_v);
  part<TestType> a(7, d_v, l), b(7, d_v, l), merged(7, d_v, l);
  a.random(10);
  b.random(20);
  merge(a, b, merged);
  CHECK(merged.out.canaries_alive());
  CHECK(merged.lse.canaries_alive());
  const auto expected =
      reference::merge_attention(a.out.values(), a.lse.values(), b.out.values(), b.lse.values());
  const double eps = arithmetic_epsilon<TestType>;
  CHECK(compare_within(merged.lse.values(), expected.lse, 2 * 20 * eps));
  CHECK(compare_within(merged.out.values(), expected.out,
                       6 * (4 * eps + 20 * eps + storage_rounding<TestType>())));
}

TEMPLATE_TEST_CASE("Merging is commutative bit for bit and associative within rounding", "",
                   ELEMENT_TYPES) {
  part<TestType> a(33, 20), b(33, 20), c(33, 20), ab(33, 20), ba(33, 20), ab_c(33, 20), bc(33, 20),
      a_bc(33, 20);
  a.random(1), b.random(2), c.random(3);
  merge(a, b, ab);
  merge(b, a, ba);
  CHECK(same(ab, ba));
  merge(ab, c, ab_c);
  merge(b, c, bc);
  merge(a, bc, a_bc);
  CHECK(close(ab_c, a_bc));
}

TEMPLATE_TEST_CASE("The empty set is the identity bit for bit, whatever its out holds", "",
                   ELEMENT_TYPES) {
  const double poison = GENERATE(0.0, 5.0, std::nan(""), infinity);
  CAPTURE(poison);
  part<TestType> a(9, 17), empty(9, 17), left(9, 17), right(9, 17), nothing(9, 17);
  a.random(4);
  empty.out.assign(reference::tensor({2, 3, 9, 17}, poison));
  empty.lse.assign(reference::tensor({2, 3, 9, 1}, -infinity));
  merge(a, empty, left);
  merge(empty, a, right);
  CHECK(same(left, a));
  CHECK(same(right, a));
  merge(empty, empty, nothing);
  CHECK(compare_bits(nothing.out.values(), reference::tensor({2, 3, 9, 17}, 0)));
  CHECK(compare_bits(nothing.lse.values(), empty.lse.values()));
}

TEMPLATE_TEST_CASE("In place: out and lse may be either input's", "", ELEMENT_TYPES) {
  const layout l = GENERATE(layout::contiguous, layout::padded_by_one, layout::column_major);
  part<TestType> a(9, 17, l), b(9, 17, l), merged(9, 17, l);
  a.random(5), b.random(6);
  merge(a, b, merged);
  SECTION("a's") {
    merge(a, b, a);
    CHECK(same(a, merged));
  }
  SECTION("b's") {
    merge(a, b, b);
    CHECK(same(b, merged));
  }
}

TEMPLATE_TEST_CASE("lse of any size: no overflow, no loss", "", float, double) {
  const double size = GENERATE(1e3, 1e30);
  const double sign = GENERATE(-1.0, 1.0);
  CAPTURE(size, sign);
  part<TestType> a(1, 3), b(1, 3), merged(1, 3);
  a.out.assign(reference::tensor({2, 3, 1, 3}, 2));
  b.out.assign(reference::tensor({2, 3, 1, 3}, 4));
  a.lse.assign(reference::tensor({2, 3, 1, 1}, sign * size));
  SECTION("equal: the mean") {
    b.lse.assign(a.lse.values());
    merge(a, b, merged);
    CHECK(compare_bits(merged.out.values(), reference::tensor({2, 3, 1, 3}, 3)));
  }
  SECTION("far apart: one of them") {
    b.lse.assign(reference::tensor({2, 3, 1, 1}, -sign * size));
    merge(a, b, merged);
    CHECK(same(merged, sign > 0 ? a : b));
  }
}

TEST_CASE("NaN and +inf stay in their row") {
  const double poison = GENERATE(std::nan(""), infinity);
  part<float> a(4, 5), b(4, 5), clean(4, 5), merged(4, 5);
  a.random(7), b.random(8);
  merge(a, b, clean);
  reference::tensor lse = a.lse.values();
  lse(1, 2, 3, 0) = poison;
  a.lse.assign(lse);
  merge(a, b, merged);
  reference::tensor expected = clean.out.values();
  for (index_t c = 0; c < 5; ++c) expected(1, 2, 3, c) = std::nan("");
  CHECK(compare_bits(merged.out.values(), expected));
  CHECK_FALSE(std::isfinite(merged.lse.view()(1, 2, 3, 0)));
}

TEST_CASE("Attention over two sets of keys merges into attention over both") {
  const index_t cut = GENERATE(values<index_t>({0, 1, 5, 11}));
  const reference::tensor q = normal_tensor({2, 3, 4, 6}, 1), k = normal_tensor({2, 3, 11, 6}, 2),
                          v = normal_tensor({2, 3, 11, 7}, 3);
  const auto over = [&](index_t first, index_t last) {
    return reference::dense_attention(
        q, k, v, reference::score_rule_fn([=](double s, index_t, index_t, index_t, index_t j) {
          return j >= first && j < last ? s : reference::forbidden;
        }));
  };
  const auto whole = over(0, 11), first = over(0, cut), rest = over(cut, 11);
  part<double> a(4, 7), b(4, 7), merged(4, 7);
  a.out.assign(first.out), a.lse.assign(first.lse);
  b.out.assign(rest.out), b.lse.assign(rest.lse);
  merge(a, b, merged);
  CHECK(compare_dense<double>(merged.out.values(), merged.lse.values(), whole));
}

TEST_CASE("Any number of threads gives the same bits") {
  part<float> a(300, 33), b(300, 33), serial(300, 33), threaded(300, 33);
  a.random(9), b.random(10);
  merge(a, b, serial);
  attn::context ctx(GENERATE(2, 3));
  attn::merge_attention(a.out.view(), a.lse.view(), b.out.view(), b.lse.view(), threaded.out.view(),
                        threaded.lse.view(), ctx);
  CHECK(same(serial, threaded));
}

TEST_CASE("Eigen objects, and extents of zero") {
  using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic>;
  SECTION("column-major matrices") {
    const matrix out_a = matrix::Constant(3, 4, 1), out_b = matrix::Constant(3, 4, 3);
    const Eigen::VectorXf lse = Eigen::VectorXf::Zero(3);
    matrix out(3, 4);
    Eigen::VectorXf lse_out(3);
    attn::merge_attention(out_a, lse, out_b, lse, out, lse_out);
    CHECK(out == matrix::Constant(3, 4, 2));
    CHECK((lse_out.array() - std::log(2.0f)).abs().maxCoeff() < 1e-6f);
  }
  SECTION("no rows") {
    matrix out(0, 4);
    Eigen::VectorXf lse(0);
    CHECK_NOTHROW(attn::merge_attention(out, lse, out, lse, out, lse));
  }
  SECTION("no columns: lse alone") {
    const matrix a(2, 0), b(2, 0);
    const Eigen::VectorXf lse = Eigen::VectorXf::Zero(2);
    matrix out(2, 0);
    Eigen::VectorXf lse_out(2);
    attn::merge_attention(a, lse, b, lse, out, lse_out);
    CHECK((lse_out.array() - std::log(2.0f)).abs().maxCoeff() < 1e-6f);
  }
}
