// SPDX-License-Identifier: MIT
//
// Eigen objects as operands and results, without copies of them.
#include "support/catch.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"

#include <attn/dense_attention.hpp>

#include <Eigen/Core>
#include <unsupported/Eigen/CXX11/Tensor>

#include <array>

using attn::index_t;
using namespace attn_test;

namespace {

using row_major = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using column_major = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::ColMajor>;

template <class M>
M random_matrix(index_t rows, index_t cols, std::uint64_t seed) {
  random_source random(seed);
  M m(rows, cols);
  for (index_t i = 0; i < rows; ++i)
    for (index_t j = 0; j < cols; ++j) m(i, j) = static_cast<typename M::Scalar>(random.normal());
  return m;
}

template <class X>
reference::tensor values(const X& x) {
  const auto v = attn::view(x);
  reference::tensor t(v.extents());
  for (index_t b = 0; b < v.extent(0); ++b)
    for (index_t h = 0; h < v.extent(1); ++h)
      for (index_t i = 0; i < v.extent(2); ++i)
        for (index_t c = 0; c < v.extent(3); ++c) t(b, h, i, c) = to_double(v(b, h, i, c));
  return t;
}

constexpr index_t n_q = 53, n_kv = 140, d_qk = 24, d_v = 20;

}  // namespace

TEMPLATE_TEST_CASE("Matrices of both storage orders: out is returned or written", "", row_major,
                   column_major) {
  const auto q = random_matrix<TestType>(n_q, d_qk, 1), k = random_matrix<TestType>(n_kv, d_qk, 2),
             v = random_matrix<TestType>(n_kv, d_v, 3);
  const auto expected = reference::dense_attention(values(q), values(k), values(v));
  const auto returned = attn::dense_attention(q, k, v);
  CHECK(returned.rows() == n_q);
  CHECK(returned.cols() == d_v);
  CHECK(compare_out<float>(values(returned), expected));

  TestType out = TestType::Zero(n_q, d_v);
  Eigen::VectorXf lse(n_q);
  attn::dense_attention(q, k, v, out, lse);
  CHECK(compare_dense<float>(values(out), values(lse), expected));
  CHECK((out - returned).cwiseAbs().maxCoeff() == 0);

  row_major other_order(n_q, d_v);
  attn::dense_attention(q, k, v, other_order);
  CHECK((other_order - returned).cwiseAbs().maxCoeff() == 0);
}

TEST_CASE("Blocks, Maps and Refs are read and written in place") {
  row_major all = random_matrix<row_major>(200, 3 * 24, 4);  // q | k | v side by side
  const auto q = all.block(0, 0, n_q, 24), k = all.block(10, 24, n_kv, 24),
             v = all.block(10, 48, n_kv, 24);
  const auto expected = reference::dense_attention(values(q), values(k), values(v));

  SECTION("out is a block of another matrix, written through a temporary") {
    row_major big = row_major::Constant(n_q + 2, 40, -7);
    attn::dense_attention(q, k, v, big.block(1, 5, n_q, 24));
    CHECK(compare_out<float>(values(big.block(1, 5, n_q, 24)), expected));
    big.block(1, 5, n_q, 24).setConstant(-7);
    CHECK((big.array() == -7).all());
  }
  SECTION("Map and Ref") {
    std::vector<float> memory(static_cast<std::size_t>(n_q) * 24);
    Eigen::Map<row_major> map(memory.data(), n_q, 24);
    attn::dense_attention(Eigen::Ref<const row_major, 0, Eigen::OuterStride<>>(q), k, v, map);
    CHECK(compare_out<float>(values(map), expected));
  }
  SECTION("out is a column block of the matrix that holds q, k and v") {
    row_major wide(200, 4 * 24);
    wide.leftCols(72) = all;
    attn::dense_attention(wide.block(0, 0, n_q, 24), wide.block(10, 24, n_kv, 24),
                          wide.block(10, 48, n_kv, 24), wide.block(0, 72, n_q, 24));
    CHECK(compare_out<float>(values(wide.block(0, 72, n_q, 24)), expected));
    CHECK((wide.leftCols(72) - all).cwiseAbs().maxCoeff() == 0);
  }
}

TEST_CASE("A returned matrix has the storage order and type of v") {
  const auto q = random_matrix<row_major>(3, 4, 1);
  static_assert(std::is_same_v<decltype(attn::dense_attention(q, q, q)), row_major>);
  const Eigen::Matrix3d fixed = random_matrix<Eigen::MatrixXd>(3, 3, 2);
  const Eigen::MatrixXd out = attn::dense_attention(fixed, fixed, fixed);
  CHECK(compare_out<double>(
      values(out), reference::dense_attention(values(fixed), values(fixed), values(fixed))));
}

TEMPLATE_TEST_CASE_SIG("Tensors of rank 3 and 4 in both storage orders", "", ((int O), O),
                       (Eigen::RowMajor), (Eigen::ColMajor)) {
  const auto fill = [](auto& tensor, std::uint64_t seed) {
    random_source random(seed);
    for (index_t e = 0; e < tensor.size(); ++e)
      tensor.data()[e] = static_cast<float>(random.normal());
  };
  SECTION("rank 4") {
    Eigen::Tensor<float, 4, O> q(2, 4, 13, 8), k(2, 2, 30, 8), v(2, 2, 30, 6), out(2, 4, 13, 6),
        lse(2, 4, 13, 1);
    fill(q, 1), fill(k, 2), fill(v, 3);
    attn::dense_attention(q, k, v, out, lse);
    CHECK(compare_dense<float>(values(out), values(lse),
                               reference::dense_attention(values(q), values(k), values(v))));
  }
  SECTION("rank 3: one batch") {
    Eigen::Tensor<float, 3, O> q(3, 13, 8), k(3, 30, 8), v(3, 30, 6), out(3, 13, 6);
    fill(q, 1), fill(k, 2), fill(v, 3);
    attn::dense_attention(q, k, v, out);
    CHECK(compare_out<float>(values(out),
                             reference::dense_attention(values(q), values(k), values(v))));
  }
}
