// SPDX-License-Identifier: MIT
//
// multi_head: projections, heads as views, any kernel between them.
#include "reference/multi_head.hpp"
#include "support/allocation_counter.hpp"
#include "support/catch.hpp"
#include "support/compare.hpp"
#include "support/element.hpp"
#include "support/random.hpp"
#include "support/tensor_buffer.hpp"

#include <attn/dense_attention.hpp>
#include <attn/multi_head.hpp>

#include <Eigen/Core>
#include <unsupported/Eigen/CXX11/Tensor>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

using attn::index_t;
using attn::tensor_view;
using attn_test::layout;

namespace {

// The plainest kernel: two passes over the keys for each row.
struct plain_kernel {
  template <class T>
  void operator()(const tensor_view<const T>& q, const tensor_view<const T>& k,
                  const tensor_view<const T>& v, const tensor_view<T>& out) const {
    const index_t group = q.extent(1) / k.extent(1), d = q.extent(3), n_kv = k.extent(2);
    const T scale = 1 / std::sqrt(static_cast<T>(d));
    for (index_t b = 0; b < q.extent(0); ++b) {
      for (index_t h = 0; h < q.extent(1); ++h) {
        for (index_t i = 0; i < q.extent(2); ++i) {
          const auto score = [&](index_t j) {
            T s = 0;
            for (index_t c = 0; c < d; ++c) s += q(b, h, i, c) * k(b, h / group, j, c);
            return s * scale;
          };
          T m = -HUGE_VALF, l = 0;
          for (index_t j = 0; j < n_kv; ++j) m = std::max(m, score(j));
          for (index_t c = 0; c < v.extent(3); ++c) out(b, h, i, c) = 0;
          for (index_t j = 0; j < n_kv; ++j) {
            const T p = std::exp(score(j) - m);
            l += p;
            for (index_t c = 0; c < v.extent(3); ++c) out(b, h, i, c) += p * v(b, h / group, j, c);
          }
          for (index_t c = 0; c < v.extent(3) && n_kv > 0; ++c) out(b, h, i, c) /= l;
        }
      }
    }
  }
};

struct layer_shape {
  index_t d_model = 24, d_source = 24, d_out = 24;
  index_t n_heads = 4, n_kv_heads = 4, d_qk = 6, d_v = 6;
  bool biases = false;
};

/// Weights as the oracle and as the library see them.
template <class T>
struct layer {
  layer_shape n;
  layout order;
  reference::multi_head_weights expected;
  attn_test::tensor_buffer<T> w_q, w_k, w_v, w_o;
  std::vector<T> b_q, b_k, b_v, b_o;

  explicit layer(const layer_shape& shape, layout matrices = layout::contiguous)
      : n(shape), order(matrices), w_q(matrix(expected.w_q, n.d_model, n.n_heads * n.d_qk, 1)),
        w_k(matrix(expected.w_k, n.d_source, n.n_kv_heads * n.d_qk, 2)),
        w_v(matrix(expected.w_v, n.d_source, n.n_kv_heads * n.d_v, 3)),
        w_o(matrix(expected.w_o, n.n_heads * n.d_v, n.d_out, 4)) {
    if (!n.biases) return;
    b_q = bias(expected.b_q, n.n_heads * n.d_qk, 5);
    b_k = bias(expected.b_k, n.n_kv_heads * n.d_qk, 6);
    b_v = bias(expected.b_v, n.n_kv_heads * n.d_v, 7);
    b_o = bias(expected.b_o, n.d_out, 8);
  }

  attn::multi_head_weights<T> weights() {
    return {.w_q = w_q.view(),
            .w_k = w_k.view(),
            .w_v = w_v.view(),
            .w_o = w_o.view(),
            .b_q = b_q,
            .b_k = b_k,
            .b_v = b_v,
            .b_o = b_o};
  }
  attn::multi_head_attention<T> build() {
    return attn::multi_head_attention<T>(weights(),
                                         {.n_heads = n.n_heads, .n_kv_heads = n.n_kv_heads});
  }
  reference::multi_head_result oracle(const reference::tensor& x,
                                      const reference::tensor& source) const {
    return reference::multi_head_attention(x, source, expected, n.n_heads, n.n_kv_heads);
  }

 private:
  attn_test::tensor_buffer<T> matrix(reference::tensor& values, index_t rows, index_t cols,
                                     std::uint64_t seed) const {
    attn_test::tensor_buffer<T> m({1, 1, rows, cols}, order, attn_test::quiet_nan<T>());
    m.assign(attn_test::normal_tensor({1, 1, rows, cols}, seed, 1 / std::sqrt(double(rows))));
    values = m.values();
    return m;
  }
  static std::vector<T> bias(std::vector<double>& values, index_t size, std::uint64_t seed) {
    attn_test::random_source random(seed);
    std::vector<T> b;
    for (index_t c = 0; c < size; ++c) b.push_back(static_cast<T>(random.normal()));
    values.assign(b.begin(), b.end());
    return b;
  }
};

template <class T>
attn_test::tensor_buffer<T> input(std::array<index_t, 4> extents, std::uint64_t seed,
                                  layout l = layout::contiguous) {
  attn_test::tensor_buffer<T> x(extents, l, attn_test::quiet_nan<T>());
  x.assign(attn_test::normal_tensor(extents, seed));
  return x;
}

/// |Δy| ≤ 16 eps bound, and for half types the rounding of y.
template <class T>
attn_test::comparison compare_layer(const reference::tensor& y,
                                    const reference::multi_head_result& expected) {
  for (std::size_t e = 0; e < y.elements().size(); ++e) {
    const double want = expected.y.elements()[e], got = y.elements()[e];
    const double unit = 16 * attn_test::arithmetic_epsilon<T> * expected.bound.elements()[e];
    const double bound = unit + attn_test::storage_rounding<T>() * (std::abs(want) + unit);
    if (!(std::abs(got - want) <= bound)) {
      return {false, "element " + std::to_string(e) + " is " + std::to_string(got) + ", expected " +
                         std::to_string(want) + " within " + std::to_string(bound)};
    }
  }
  return {};
}

}  // namespace

TEMPLATE_TEST_CASE("Eight heads of 64 in a width of 512", "", float, double) {
  layer<TestType> l({.d_model = 512,
                     .d_source = 512,
                     .d_out = 512,
                     .n_heads = 8,
                     .n_kv_heads = 8,
                     .d_qk = 64,
                     .d_v = 64,
                     .biases = true});
  const index_t n = 40;
  auto x = input<TestType>({1, 1, n, 512}, 9);
  attn_test::tensor_buffer<TestType> y({1, 1, n, 512}, layout::contiguous, TestType(-7));
  auto mha = l.build();
  CHECK(mha.n_heads() == 8);
  CHECK(mha.d_qk() == 64);
  mha.self_attention(x.view(), y.view(), plain_kernel{});
  CHECK(compare_layer<TestType>(y.values(), l.oracle(x.values(), x.values())));
  CHECK(y.canaries_alive());
}

TEMPLATE_TEST_CASE("Cross-attention, grouped heads, biases, every width of its own", "", float,
                   double) {
  layer<TestType> l({.d_model = 20,
                     .d_source = 33,
                     .d_out = 17,
                     .n_heads = 6,
                     .n_kv_heads = 2,
                     .d_qk = 5,
                     .d_v = 7,
                     .biases = true});
  auto mha = l.build();
  CHECK(mha.n_kv_heads() == 2);
  CHECK(mha.d_v() == 7);
  auto x = input<TestType>({2, 3, 11, 20}, 9);
  auto source = input<TestType>({2, 3, 14, 33}, 10);
  attn_test::tensor_buffer<TestType> y({2, 3, 11, 17}, layout::padded_by_one, TestType(-7));
  mha.cross_attention(x.view(), source.view(), y.view(), plain_kernel{});
  CHECK(compare_layer<TestType>(y.values(), l.oracle(x.values(), source.values())));
  CHECK(y.canaries_alive());
}

TEST_CASE("The kernel gets heads as strided views into the projected matrices") {
  layer<float> l({.d_model = 10,
                  .d_source = 12,
                  .d_out = 10,
                  .n_heads = 6,
                  .n_kv_heads = 2,
                  .d_qk = 5,
                  .d_v = 7});
  auto mha = l.build();
  auto x = input<float>({2, 1, 4, 10}, 1), source = input<float>({2, 1, 3, 12}, 2);
  attn_test::tensor_buffer<float> y({2, 1, 4, 10}, layout::contiguous, -7.0f);
  int calls = 0;
  mha.cross_attention(x.view(), source.view(), y.view(), [&](auto q, auto k, auto v, auto out) {
    using extents = std::array<index_t, 4>;
    ++calls;
    CHECK(q.extents() == extents{2, 6, 4, 5});
    CHECK(q.strides() == extents{4 * 30, 5, 30, 1});
    CHECK(k.extents() == extents{2, 2, 3, 5});
    CHECK(k.strides() == extents{3 * 10, 5, 10, 1});
    CHECK(v.extents() == extents{2, 2, 3, 7});
    CHECK(v.strides() == extents{3 * 14, 7, 14, 1});
    CHECK(out.extents() == extents{2, 6, 4, 7});
    CHECK(out.strides() == extents{4 * 42, 7, 42, 1});
    STATIC_REQUIRE(std::is_same_v<decltype(q), tensor_view<const float>>);
    STATIC_REQUIRE(std::is_same_v<decltype(out), tensor_view<float>>);
    plain_kernel{}(q, k, v, out);
  });
  CHECK(calls == 1);
}

TEST_CASE("Weights in either storage order, activations in any") {
  const layer_shape n{.d_model = 24, .d_source = 24, .d_out = 30, .biases = true};
  const layout matrices = GENERATE(layout::contiguous, layout::padded_wide, layout::offset_by_one,
                                   layout::column_major);
  const layout in = GENERATE(layout::contiguous, layout::column_major, layout::strided_dim,
                             layout::heads_interleaved);
  const layout out = GENERATE(layout::contiguous, layout::column_major, layout::strided_dim);
  CAPTURE(matrices, in, out);
  layer<float> l(n, matrices);
  auto x = input<float>({2, 2, 9, n.d_model}, 3, in);
  attn_test::tensor_buffer<float> y({2, 2, 9, n.d_out}, out, -7.0f);
  l.build().self_attention(x.view(), y.view(), plain_kernel{});
  CHECK(compare_layer<float>(y.values(), l.oracle(x.values(), x.values())));
  CHECK(y.canaries_alive());
}

TEMPLATE_TEST_CASE("Half activations around float weights", "", Eigen::half, Eigen::bfloat16) {
  layer<float> l({.biases = true});
  auto x = input<TestType>({2, 1, 13, 24}, 3);
  attn_test::tensor_buffer<TestType> y({2, 1, 13, 24}, layout::contiguous, TestType(-7.0f));
  l.build().self_attention(x.view(), y.view(), plain_kernel{});
  CHECK(compare_layer<TestType>(y.values(), l.oracle(x.values(), x.values())));
}

TEST_CASE("Around the edges of the row, depth and column tiles") {
  const index_t n = GENERATE(1, 2, 127, 128, 129, 300);
  const index_t width = GENERATE(1, 127, 128, 129, 260);
  const bool one_sequence =
      GENERATE(true, false);  // of n rows, or n of one row: the same GEMM rows
  CAPTURE(n, width, one_sequence);
  // Small integers: every sum is exact, whatever its order.
  const auto integers = [](std::array<index_t, 4> extents, std::uint64_t seed) {
    reference::tensor t(extents);
    attn_test::random_source random(seed);
    for (double& e : t.elements()) e = static_cast<double>(random.integer(-2, 2));
    attn_test::tensor_buffer<float> x(extents, layout::contiguous, attn_test::quiet_nan<float>());
    return x.assign(t);
  };
  std::array<index_t, 4> extents{1, 1, n, width};
  if (!one_sequence) extents = {n, 1, 1, width};
  auto x = integers(extents, 1), w_q = integers({1, 1, width, 1}, 2),
       w_k = integers({1, 1, width, 1}, 3), w_v = integers({1, 1, width, 1}, 4),
       w_o = integers({1, 1, 1, width}, 5);
  attn::multi_head_attention<float> mha(
      {.w_q = w_q.view(), .w_k = w_k.view(), .w_v = w_v.view(), .w_o = w_o.view()}, {});
  attn_test::tensor_buffer<float> y(extents, layout::contiguous, -7.5f);
  mha.self_attention(x.view(), y.view(), [&](auto q, auto k, auto v, auto out) {
    for (index_t s = 0; s < q.extent(0); ++s)
      for (index_t i = 0; i < q.extent(2); ++i)
        out(s, 0, i, 0) = q(s, 0, i, 0) + 2 * k(s, 0, i, 0) - v(s, 0, i, 0);
  });
  reference::tensor expected(extents);
  const float* row = x.view().data_handle();
  for (index_t r = 0; r < n; ++r, row += width) {
    float out = 0;
    for (index_t c = 0; c < width; ++c) {
      out +=
          row[c] * (w_q.view()(0, 0, c, 0) + 2 * w_k.view()(0, 0, c, 0) - w_v.view()(0, 0, c, 0));
    }
    for (index_t c = 0; c < width; ++c) {
      expected.elements()[static_cast<std::size_t>(r * width + c)] = out * w_o.view()(0, 0, 0, c);
    }
  }
  CHECK(attn_test::compare_within(y.values(), expected, 0));
}

TEST_CASE("Matrices, tensors of rank 3 and views are the same layer") {
  layer<float> l({});
  auto mha = l.build();
  auto x = input<float>({3, 1, 5, 24}, 4);
  attn_test::tensor_buffer<float> y({3, 1, 5, 24}, layout::contiguous, -7.0f);
  mha.self_attention(x.view(), y.view(), plain_kernel{});
  const reference::tensor expected = y.values();

  Eigen::Tensor<float, 3, Eigen::RowMajor> tx(3, 5, 24), ty(3, 5, 24);
  for (index_t s = 0; s < 3; ++s)
    for (index_t i = 0; i < 5; ++i)
      for (index_t c = 0; c < 24; ++c) tx(s, i, c) = x.view()(s, 0, i, c);
  mha.self_attention(tx, ty, plain_kernel{});
  for (index_t s = 0; s < 3; ++s) {
    Eigen::MatrixXf mx(5, 24), my(5, 24);
    for (index_t i = 0; i < 5; ++i)
      for (index_t c = 0; c < 24; ++c) mx(i, c) = tx(s, i, c);
    mha.self_attention(mx, my, plain_kernel{});
    for (index_t i = 0; i < 5; ++i) {
      for (index_t c = 0; c < 24; ++c) {
        CHECK(ty(s, i, c) == static_cast<float>(expected(s, 0, i, c)));
        CHECK(std::abs(my(i, c) - ty(s, i, c)) < 1e-5f);
      }
    }
  }
}

TEMPLATE_TEST_CASE("Dense attention with a rule drops in", "", float, double) {
  layer<TestType> l({.d_model = 40,
                     .d_source = 40,
                     .d_out = 40,
                     .n_heads = 6,
                     .n_kv_heads = 3,
                     .d_qk = 8,
                     .d_v = 12,
                     .biases = true});
  auto mha = l.build();
  auto x = input<TestType>({3, 1, 150, 40}, 4);
  const std::vector<index_t> lengths{150, 20, 0};  // one per sequence
  const auto rule = attn::causal_mask{} & attn::key_lengths{lengths};
  attn_test::tensor_buffer<TestType> y({3, 1, 150, 40}, layout::contiguous, TestType(-7));
  attn::context ctx(2);
  const auto dense = [&](auto q, auto k, auto v, auto out) {
    attn::dense_attention(q, k, v, out, rule, {}, ctx);
  };
  const auto xs = x.view(), ys = y.view();
  mha.self_attention(xs, ys, dense, ctx);
  const reference::multi_head_result expected =
      reference::multi_head_attention(x.values(), x.values(), l.expected, 6, 3, [&](index_t s) {
        return reference::causal_mask() &
               reference::key_lengths({lengths[static_cast<std::size_t>(s)]});
      });
  CHECK(compare_layer<TestType>(y.values(), expected));
  const attn_test::allocation_counter allocations;
  mha.self_attention(xs, ys, dense, ctx);
  CHECK(allocations.count() == 0);
}

TEST_CASE("A repeated call allocates nothing") {
  layer<float> l({.d_model = 300,
                  .d_source = 300,
                  .d_out = 300,
                  .n_heads = 4,
                  .n_kv_heads = 2,
                  .d_qk = 70,
                  .d_v = 66,
                  .biases = true},
                 GENERATE(layout::contiguous, layout::column_major));
  auto mha = l.build();
  auto x = input<float>({1, 2, 150, 300}, 4);
  attn_test::tensor_buffer<float> y({1, 2, 150, 300}, layout::contiguous, -7.0f);
  attn::context ctx(GENERATE(1, 2));
  const auto no_kernel = [](auto, auto, auto, auto) {};
  const auto xs = x.view(), ys = y.view();
  mha.self_attention(xs, ys, no_kernel, ctx);
  const attn_test::allocation_counter allocations;
  mha.self_attention(xs, ys, no_kernel, ctx);
  mha.cross_attention(xs, xs, ys, no_kernel, ctx);
  CHECK(allocations.count() == 0);
}

TEST_CASE("The number of threads changes no bit") {
  layer<float> l({.d_model = 64, .d_source = 64, .d_out = 64, .biases = true});
  auto mha = l.build();
  auto x = input<float>({2, 1, 333, 64}, 4);
  attn_test::tensor_buffer<float> y1({2, 1, 333, 64}, layout::contiguous, -7.0f);
  mha.self_attention(x.view(), y1.view(), plain_kernel{});
  for (const int n_threads : {2, 3, 8}) {
    attn::context ctx(n_threads);
    attn_test::tensor_buffer<float> y({2, 1, 333, 64}, layout::contiguous, -8.0f);
    mha.self_attention(x.view(), y.view(), plain_kernel{}, ctx);
    CHECK(attn_test::compare_bits(y.values(), y1.values()));
  }
}

TEST_CASE("Zero lengths") {
  layer<float> l({.biases = true});
  auto mha = l.build();
  attn_test::tensor_buffer<float> none({2, 1, 0, 24}, layout::contiguous, -7.0f);
  auto x = input<float>({2, 1, 3, 24}, 4);
  attn_test::tensor_buffer<float> y({2, 1, 3, 24}, layout::contiguous, -7.0f);
  SECTION("no rows") {
    mha.self_attention(none.view(), none.view(), plain_kernel{});
    CHECK(none.untouched());
  }
  SECTION("no source: y is the bias of the output") {
    mha.cross_attention(x.view(), none.view(), y.view(), plain_kernel{});
    for (index_t i = 0; i < 3; ++i)
      for (index_t c = 0; c < 24; ++c)
        CHECK(y.view()(1, 0, i, c) == l.b_o[static_cast<std::size_t>(c)]);
  }
}
