// SPDX-License-Identifier: MIT
#include "support/catch.hpp"

#include <attn/view.hpp>

#include <numeric>
#include <type_traits>
#include <vector>

using attn::index_t;
using attn::tensor_view;

namespace {

std::vector<int> counting(index_t n) {
  std::vector<int> x(static_cast<std::size_t>(n));
  std::iota(x.begin(), x.end(), 0);
  return x;
}

}  // namespace

static_assert(std::is_same_v<index_t, std::ptrdiff_t>);
static_assert(std::is_trivially_copyable_v<tensor_view<float>>);
static_assert(std::is_convertible_v<tensor_view<float>, tensor_view<const float>>);
static_assert(!std::is_convertible_v<tensor_view<const float>, tensor_view<float>>);
static_assert(!std::is_convertible_v<tensor_view<float>, tensor_view<const double>>);

TEST_CASE("A view of contiguous memory runs over dim first, then length, heads, batch") {
  auto x = counting(2 * 3 * 4 * 5);
  const tensor_view<int> v(x.data(), 2, 3, 4, 5);
  CHECK(v.data_handle() == x.data());
  CHECK(v.extents() == std::array<index_t, 4>{2, 3, 4, 5});
  CHECK(v.strides() == std::array<index_t, 4>{60, 20, 5, 1});
  CHECK(v.extent(1) == 3);
  CHECK(v.stride(1) == 20);
  CHECK(v.size() == 120);
  int next = 0;
  for (index_t b = 0; b < 2; ++b)
    for (index_t h = 0; h < 3; ++h)
      for (index_t i = 0; i < 4; ++i)
        for (index_t c = 0; c < 5; ++c) CHECK(v(b, h, i, c) == next++);
}

TEST_CASE("Elements are written through a view, and not through one of const elements") {
  auto x = counting(4);
  const tensor_view<int> v(x.data(), 1, 1, 2, 2);
  v(0, 0, 1, 0) = 77;
  CHECK(x[2] == 77);
  const tensor_view<const int> c = v;
  CHECK(c(0, 0, 1, 0) == 77);
  static_assert(std::is_same_v<decltype(c(0, 0, 0, 0)), const int&>);
}

TEST_CASE("Any strides: transposed, padded, broadcast") {
  auto x = counting(12);
  SECTION("transposed") {
    const tensor_view<int> v(x.data(), {1, 1, 4, 3}, {12, 12, 1, 4});
    CHECK(v(0, 0, 2, 1) == 6);
  }
  SECTION("padded rows") {
    const tensor_view<int> v(x.data(), {1, 1, 3, 2}, {12, 12, 4, 1});
    CHECK(v(0, 0, 2, 1) == 9);
  }
  SECTION("stride 0 shows one element many times") {
    const tensor_view<const int> v(x.data(), {5, 2, 4, 3}, {0, 0, 3, 1});
    CHECK(v(4, 1, 3, 2) == 11);
    CHECK(v(0, 0, 3, 2) == 11);
    CHECK(v.size() == 120);
  }
  SECTION("strides past 2^31 elements") {
    const index_t far = index_t{1} << 33;
    const tensor_view<const int> v(x.data(), {2, 1, 1, 1}, {far, 1, 1, 1});
    CHECK(v.stride(0) == far);
  }
}

TEST_CASE("The two layouts of the field are both seen as [batch, heads, length, dim]") {
  auto x = counting(2 * 3 * 4 * 5);
  const auto heads_first = attn::bhld(x.data(), 2, 3, 4, 5);
  const auto heads_inside = attn::blhd(x.data(), 2, 4, 3, 5);  // batch, length, heads, dim
  CHECK(heads_first.extents() == std::array<index_t, 4>{2, 3, 4, 5});
  CHECK(heads_inside.extents() == std::array<index_t, 4>{2, 3, 4, 5});
  CHECK(heads_first.strides() == std::array<index_t, 4>{60, 20, 5, 1});
  CHECK(heads_inside.strides() == std::array<index_t, 4>{60, 5, 15, 1});
  CHECK(heads_inside(1, 2, 3, 4) == 60 + 3 * 15 + 2 * 5 + 4);
}

TEST_CASE("A view is its own view, and everything works in a constant expression") {
  auto x = counting(6);
  const tensor_view<int> v(x.data(), 1, 1, 2, 3);
  CHECK(attn::view(v).data_handle() == v.data_handle());
  CHECK(attn::view(v).strides() == v.strides());

  static constexpr int memory[6] = {0, 1, 2, 3, 4, 5};
  constexpr tensor_view<const int> w(memory, 1, 1, 2, 3);
  static_assert(w(0, 0, 1, 2) == 5);
  static_assert(w.size() == 6);
  static_assert(attn::blhd(memory, 1, 1, 2, 3)(0, 1, 0, 2) == 5);
}

TEST_CASE("A default view is empty") {
  constexpr tensor_view<float> v;
  CHECK(v.data_handle() == nullptr);
  CHECK(v.size() == 0);
}
