// SPDX-License-Identifier: MIT
#include "support/catch.hpp"

#include <attn/eigen.hpp>

#include <Eigen/Core>
#include <unsupported/Eigen/CXX11/Tensor>

#include <array>
#include <type_traits>

using attn::index_t;
using attn::tensor_view;
using attn::view;

namespace {

using row_major = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using column_major = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::ColMajor>;

/// Element (i, j) holds 100 i + j.
template <class M>
M numbered(index_t rows, index_t cols) {
  M m(rows, cols);
  for (index_t i = 0; i < rows; ++i)
    for (index_t j = 0; j < cols; ++j)
      m(i, j) = static_cast<typename M::Scalar>(static_cast<float>(100 * i + j));
  return m;
}

/// Whether view(x) is [1, 1, rows, cols] of x's own memory, element by element.
template <class X>
bool shows_matrix(X&& x) {
  const auto v = view(x);
  if (v.extents() != std::array<index_t, 4>{1, 1, x.rows(), x.cols()}) return false;
  for (index_t i = 0; i < x.rows(); ++i)
    for (index_t j = 0; j < x.cols(); ++j)
      if (&v(0, 0, i, j) != &x.coeffRef(i, j)) return false;
  return true;
}

}  // namespace

TEMPLATE_TEST_CASE("A matrix is one batch of one head", "", float, double, Eigen::half,
                   Eigen::bfloat16) {
  using rows_first = Eigen::Matrix<TestType, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  using columns_first = Eigen::Matrix<TestType, Eigen::Dynamic, Eigen::Dynamic, Eigen::ColMajor>;
  auto r = numbered<rows_first>(3, 5);
  auto c = numbered<columns_first>(3, 5);
  CHECK(shows_matrix(r));
  CHECK(shows_matrix(c));
  CHECK(view(r).stride(2) == 5);
  CHECK(view(r).stride(3) == 1);
  CHECK(view(c).stride(2) == 1);
  CHECK(view(c).stride(3) == 3);
}

TEST_CASE("Constness of the view is constness of the object") {
  row_major m = numbered<row_major>(2, 3);
  const row_major& c = m;
  static_assert(std::is_same_v<decltype(view(m)), tensor_view<float>>);
  static_assert(std::is_same_v<decltype(view(c)), tensor_view<const float>>);
  view(m)(0, 0, 1, 2) = -1;
  CHECK(m(1, 2) == -1);
  CHECK(view(c)(0, 0, 1, 2) == -1);

  const Eigen::Map<const row_major> map(m.data(), 2, 3);
  static_assert(std::is_same_v<decltype(view(map)), tensor_view<const float>>);
}

TEST_CASE("Blocks, columns and rows keep their strides") {
  auto r = numbered<row_major>(7, 9);
  auto c = numbered<column_major>(7, 9);
  auto block_of_r = r.block(1, 2, 4, 5);
  auto block_of_c = c.block(1, 2, 4, 5);
  auto some_columns = c.middleCols(3, 4);
  auto some_rows = r.topRows(2);
  auto column = r.col(3);
  auto row = c.row(2);
  CHECK(shows_matrix(block_of_r));
  CHECK(shows_matrix(block_of_c));
  CHECK(shows_matrix(some_columns));
  CHECK(shows_matrix(some_rows));
  CHECK(shows_matrix(column));
  CHECK(shows_matrix(row));
  CHECK(view(block_of_r).stride(2) == 9);
  CHECK(view(block_of_c).stride(3) == 7);
  CHECK(view(column).stride(2) == 9);
  CHECK(view(row).stride(3) == 7);
  CHECK(shows_matrix(block_of_r.transpose()));
}

TEST_CASE("Maps with strides, Ref and fixed sizes") {
  std::array<float, 64> memory{};
  Eigen::Map<row_major, 0, Eigen::OuterStride<>> outer(memory.data(), 3, 4,
                                                       Eigen::OuterStride<>(10));
  Eigen::Map<row_major, 0, Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>> both(
      memory.data(), 3, 4, Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>(20, 2));
  Eigen::Map<column_major, 0, Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>> both_columns(
      memory.data(), 3, 4, Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>(12, 3));
  CHECK(shows_matrix(outer));
  CHECK(shows_matrix(both));
  CHECK(shows_matrix(both_columns));
  CHECK(view(both).stride(2) == 20);
  CHECK(view(both).stride(3) == 2);
  CHECK(view(both_columns).stride(2) == 3);
  CHECK(view(both_columns).stride(3) == 12);

  auto m = numbered<row_major>(5, 6);
  Eigen::Ref<row_major> ref(m);
  CHECK(shows_matrix(ref));
  CHECK(view(ref).data_handle() == m.data());

  Eigen::Matrix<float, 2, 3> fixed = Eigen::Matrix<float, 2, 3>::Zero();
  Eigen::Vector4f vector = Eigen::Vector4f::Zero();
  Eigen::Array<float, 3, 2> array = Eigen::Array<float, 3, 2>::Zero();
  CHECK(shows_matrix(fixed));
  CHECK(shows_matrix(vector));
  CHECK(shows_matrix(array));
  CHECK(view(vector).extents() == std::array<index_t, 4>{1, 1, 4, 1});
}

TEST_CASE("Empty matrices have views") {
  row_major m(0, 4);
  column_major n(3, 0);
  CHECK(view(m).extents() == std::array<index_t, 4>{1, 1, 0, 4});
  CHECK(view(n).extents() == std::array<index_t, 4>{1, 1, 3, 0});
}

namespace {

template <class X>
concept has_view = requires(X&& x) {
  view(x);
};

}  // namespace

// An expression has no memory: to take it would be to copy it, silently.
static_assert(!has_view<decltype(row_major() + row_major())&>);
static_assert(!has_view<decltype(row_major() * row_major())&>);
static_assert(!has_view<int&>);
static_assert(attn::viewable<row_major&>);
static_assert(attn::viewable<const column_major&>);
static_assert(attn::viewable<tensor_view<float>>);
static_assert(!attn::viewable<float>);
static_assert(std::is_same_v<attn::element_t<const row_major&>, const float>);

TEMPLATE_TEST_CASE_SIG("Tensors of rank 2 to 4 in both storage orders", "",
                       ((int Options), Options), (Eigen::RowMajor), (Eigen::ColMajor)) {
  Eigen::Tensor<float, 4, Options> four(2, 3, 4, 5);
  Eigen::Tensor<float, 3, Options> three(3, 4, 5);
  Eigen::Tensor<float, 2, Options> two(4, 5);
  Eigen::TensorMap<Eigen::Tensor<float, 4, Options>> map(four.data(), 2, 3, 4, 5);
  Eigen::TensorMap<const Eigen::Tensor<float, 3, Options>> const_map(three.data(), 3, 4, 5);
  Eigen::TensorFixedSize<float, Eigen::Sizes<4, 5>, Options> fixed;

  CHECK(view(four).extents() == std::array<index_t, 4>{2, 3, 4, 5});
  CHECK(view(three).extents() == std::array<index_t, 4>{1, 3, 4, 5});
  CHECK(view(two).extents() == std::array<index_t, 4>{1, 1, 4, 5});
  CHECK(view(fixed).extents() == std::array<index_t, 4>{1, 1, 4, 5});
  static_assert(std::is_same_v<decltype(view(four)), tensor_view<float>>);
  static_assert(std::is_same_v<decltype(view(std::as_const(four))), tensor_view<const float>>);
  static_assert(std::is_same_v<decltype(view(const_map)), tensor_view<const float>>);

  bool same = true;
  for (index_t h = 0; h < 3; ++h)
    for (index_t i = 0; i < 4; ++i)
      for (index_t c = 0; c < 5; ++c) {
        for (index_t b = 0; b < 2; ++b) {
          same = same && &view(four)(b, h, i, c) == &four(b, h, i, c);
          same = same && &view(map)(b, h, i, c) == &four(b, h, i, c);
        }
        same = same && &view(three)(0, h, i, c) == &three(h, i, c);
        same = same && &view(const_map)(0, h, i, c) == &three(h, i, c);
        same = same && &view(two)(0, 0, i, c) == &two(i, c);
        same = same && &view(fixed)(0, 0, i, c) == &fixed(i, c);
      }
  CHECK(same);
}
