// SPDX-License-Identifier: MIT
//
// Linear and nonlinear scores of rows, and their gradients.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include <Eigen/Core>

#include <attn/context.hpp>
#include <attn/detail/multi_head_kernel.hpp>
#include <attn/detail/packing.hpp>
#include <attn/detail/tournament_kernel.hpp>
#include <attn/simd/convert.hpp>
#include <attn/view.hpp>

namespace attn::detail {

inline constexpr index_t scorer_rows = 64;      // rows of one product
inline constexpr index_t scorer_columns = 128;  // columns of a weight gradient per item

// f(b, h, first, n) for pieces of at most scorer_rows rows.
template <class X, class F>
void for_each_row_tile(const tensor_view<X>& x, context& ctx, std::size_t scratch_bytes,
                       const F& f) {
  const index_t n = x.extent(2), tiles = (n + scorer_rows - 1) / scorer_rows;
  ctx.run(x.extent(0) * x.extent(1) * tiles, 1, scratch_bytes,
          [&](std::byte* memory, work_queue& queue) noexcept {
            for (index_t item, last; queue.next(item, last);) {
              const index_t b = item / tiles / x.extent(1), h = item / tiles % x.extent(1);
              const index_t first = item % tiles * scorer_rows;
              f(memory, b, h, first, std::min(scorer_rows, n - first));
            }
          });
}

template <class Arch, class T>
[[nodiscard]] T weighted_sum(const T* x, const T* w, index_t d) noexcept {
  using B = simd::batch<T, Arch>;
  constexpr index_t W = simd::width<T, Arch>;
  B sum(T(0));
  index_t c = 0;
  for (; c + W <= d; c += W) {
    sum = simd::multiply_add(simd::load_unaligned<T, Arch>(x + c),
                             simd::load_unaligned<T, Arch>(w + c), sum);
  }
  T total = simd::sum(sum);
  for (; c < d; ++c) total += x[c] * w[c];
  return total;
}

// scores = x w + b
template <class Arch, class T, class X, class D>
void linear_scores(const tensor_view<X>& x, std::span<const T> w, T b, const tensor_view<D>& scores,
                   context& ctx) {
  const index_t d = x.extent(3);
  for_each_row_tile(x, ctx, static_cast<std::size_t>(scorer_rows * d) * sizeof(T),
                    [&](std::byte* memory, index_t batch, index_t h, index_t first, index_t n) {
                      const row_source<T> source = make_row_source<T, Arch>(x, batch, h);
                      T* rows = reinterpret_cast<T*>(memory);
                      source.read(first, n, d, rows, d);
                      for (index_t i = 0; i < n; ++i) {
                        const T s = weighted_sum<Arch>(rows + i * d, w.data(), d) + b;
                        scores(batch, h, first + i, 0) = static_cast<D>(s);
                      }
                    });
}

// d_x = d_scores wᵀ, d_w = Σ d_scores x, d_b = Σ d_scores
template <class Arch, class T, class X, class G, class DX>
void linear_scores_backward(const tensor_view<X>& x, std::span<const T> w,
                            const tensor_view<G>& d_scores, const tensor_view<DX>& d_x,
                            std::span<T> d_w, T& d_b, context& ctx) {
  const index_t d = x.extent(3), n_rows = x.extent(0) * x.extent(1) * x.extent(2);
  const auto scratch = static_cast<std::size_t>(scorer_rows * d) * sizeof(T);
  // 1. Gradients of x, by rows.
  for_each_row_tile(x, ctx, scratch,
                    [&](std::byte* memory, index_t b, index_t h, index_t first, index_t n) {
                      T* rows = reinterpret_cast<T*>(memory);
                      for (index_t i = 0; i < n; ++i) {
                        const T g = static_cast<T>(d_scores(b, h, first + i, 0));
                        for (index_t c = 0; c < d; ++c) {
                          rows[i * d + c] = g * w[static_cast<std::size_t>(c)];
                        }
                      }
                      make_row_sink<T, Arch>(d_x, b, h).write(rows, d, first, n, d);
                    });
  // 2. Gradients of w and b, by columns: one order of summation whatever the threads. Column d is
  // b.
  const index_t pieces = d / scorer_columns + 1;
  ctx.run(pieces, 1, scorer_columns * sizeof(double),
          [&](std::byte* memory, work_queue& queue) noexcept {
            auto* sum = reinterpret_cast<double*>(memory);
            for (index_t piece, last; queue.next(piece, last);) {
              const index_t begin = piece * scorer_columns;
              const index_t end = std::min(begin + scorer_columns, d + 1);
              std::fill_n(sum, end - begin, 0.0);
              for (index_t row = 0; row < n_rows; ++row) {
                const index_t b = row / x.extent(2) / x.extent(1);
                const index_t h = row / x.extent(2) % x.extent(1), i = row % x.extent(2);
                const auto g = static_cast<double>(d_scores(b, h, i, 0));
                for (index_t c = begin; c < end; ++c) {
                  sum[c - begin] += c < d ? g * static_cast<double>(x(b, h, i, c)) : g;
                }
              }
              for (index_t c = begin; c < end; ++c) {
                (c < d ? d_w[static_cast<std::size_t>(c)] : d_b) = static_cast<T>(sum[c - begin]);
              }
            }
          });
}

// A head tanh(x w1 + b1) w2 + b2.
template <class T>
struct nonlinear_head {
  projection<T> first;  // w1 [d, d_hidden], b1
  std::span<const T> w2;
  T b2;

  [[nodiscard]] index_t d() const noexcept { return first.n_in(); }
  [[nodiscard]] index_t d_hidden() const noexcept { return first.n_out(); }
  // w1ᵀ, without a bias.
  [[nodiscard]] projection<T> first_transposed() const noexcept {
    const tensor_view<const T>& w = first.w;
    return {tensor_view<const T>(w.data_handle(), {1, 1, d_hidden(), d()},
                                 {w.stride(0), w.stride(1), w.stride(3), w.stride(2)}),
            {}};
  }
  // Columns [begin, begin + n) of the hidden layer.
  [[nodiscard]] projection<T> columns(index_t begin, index_t n) const noexcept {
    const tensor_view<const T>& w = first.w;
    return {
        tensor_view<const T>(w.data_handle() + begin * w.stride(3), {1, 1, d(), n}, w.strides()),
        first.b.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(n))};
  }
};

// hidden [n][columns] = tanh(rows w1 + b1)
template <class Arch, class T>
void hidden_layer(const T* rows, index_t n, const projection<T>& p, T* hidden) {
  project<Arch>(rows, n, p, hidden);
  for (index_t e = 0; e < n * p.n_out(); ++e) hidden[e] = std::tanh(hidden[e]);
}

template <class Arch, class T, class X, class D>
void nonlinear_scores(const tensor_view<X>& x, const nonlinear_head<T>& head,
                      const tensor_view<D>& scores, context& ctx) {
  const index_t d = head.d(), d_hidden = head.d_hidden();
  scratch_carver count(nullptr);
  (void)count.take<T>(scorer_rows * d);
  (void)count.take<T>(scorer_rows * d_hidden);
  for_each_row_tile(
      x, ctx, count.used(), [&](std::byte* memory, index_t b, index_t h, index_t first, index_t n) {
        scratch_carver cutter(memory);
        T* rows = cutter.take<T>(scorer_rows * d);
        T* hidden = cutter.take<T>(scorer_rows * d_hidden);
        make_row_source<T, Arch>(x, b, h).read(first, n, d, rows, d);
        hidden_layer<Arch>(rows, n, head.first, hidden);
        for (index_t i = 0; i < n; ++i) {
          const T s = weighted_sum<Arch>(hidden + i * d_hidden, head.w2.data(), d_hidden) + head.b2;
          scores(b, h, first + i, 0) = static_cast<D>(s);
        }
      });
}

template <class T>
struct nonlinear_gradients {
  tensor_view<T> w1;  // [1, 1, d, d_hidden]
  std::span<T> b1, w2;
  T* b2;
};

// With t = tanh(x w1 + b1) and u = d_score w2 ∘ (1 − t²):
//   d_x = u w1ᵀ,  d_w1 = Σ xᵀ u,  d_b1 = Σ u,  d_w2 = Σ d_score t,  d_b2 = Σ d_score
template <class Arch, class T, class X, class G, class DX>
void nonlinear_scores_backward(const tensor_view<X>& x, const nonlinear_head<T>& head,
                               const tensor_view<G>& d_scores, const tensor_view<DX>& d_x,
                               const nonlinear_gradients<T>& gradients, context& ctx) {
  using matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  using map = Eigen::Map<matrix>;
  const index_t d = head.d(), d_hidden = head.d_hidden();
  // Rows and hidden layer of a tile; hidden becomes u.
  const auto differentiate = [&](const T* w2, index_t columns, index_t b, index_t h, index_t first,
                                 index_t n, T* hidden, double* d_w2, double* d_b1) noexcept {
    for (index_t i = 0; i < n; ++i) {
      const T g = static_cast<T>(d_scores(b, h, first + i, 0));
      for (index_t c = 0; c < columns; ++c) {
        T& t = hidden[i * columns + c];
        const T u = g * w2[c] * (T(1) - t) * (T(1) + t);
        if (d_w2 != nullptr) {
          d_w2[c] += static_cast<double>(g * t);
          d_b1[c] += static_cast<double>(u);
        }
        t = u;
      }
    }
  };

  // 1. Gradients of x, by rows.
  scratch_carver count(nullptr);
  (void)count.take<T>(scorer_rows * d);
  (void)count.take<T>(scorer_rows * d_hidden);
  for_each_row_tile(
      x, ctx, count.used(), [&](std::byte* memory, index_t b, index_t h, index_t first, index_t n) {
        scratch_carver cutter(memory);
        T* rows = cutter.take<T>(scorer_rows * d);
        T* hidden = cutter.take<T>(scorer_rows * d_hidden);
        make_row_source<T, Arch>(x, b, h).read(first, n, d, rows, d);
        hidden_layer<Arch>(rows, n, head.first, hidden);
        differentiate(head.w2.data(), d_hidden, b, h, first, n, hidden, nullptr, nullptr);
        project<Arch>(hidden, n, head.first_transposed(), rows);
        make_row_sink<T, Arch>(d_x, b, h).write(rows, d, first, n, d);
      });

  // 2. Gradients of the weights, by columns of the hidden layer: one order of summation whatever
  // the
  //    threads.
  const index_t pieces = (d_hidden + scorer_columns - 1) / scorer_columns;
  const auto cut_item = [&](scratch_carver& cutter) {
    struct item {
      T *rows, *hidden, *d_w1;
      double *d_w2, *d_b1;
    };
    return item{cutter.take<T>(scorer_rows * d), cutter.take<T>(scorer_rows * scorer_columns),
                cutter.take<T>(d * scorer_columns), cutter.take<double>(scorer_columns),
                cutter.take<double>(scorer_columns)};
  };
  scratch_carver item_count(nullptr);
  (void)cut_item(item_count);
  ctx.run(pieces, 1, item_count.used(), [&](std::byte* memory, work_queue& queue) noexcept {
    scratch_carver cutter(memory);
    const auto item = cut_item(cutter);
    for (index_t piece, last; queue.next(piece, last);) {
      const index_t begin = piece * scorer_columns;
      const index_t columns = std::min(scorer_columns, d_hidden - begin);
      std::fill_n(item.d_w2, columns, 0.0);
      std::fill_n(item.d_b1, columns, 0.0);
      map sum(item.d_w1, d, columns);
      sum.setZero();
      const projection<T> p = head.columns(begin, columns);
      for (index_t b = 0; b < x.extent(0); ++b) {
        for (index_t h = 0; h < x.extent(1); ++h) {
          const row_source<T> source = make_row_source<T, Arch>(x, b, h);
          for (index_t first = 0; first < x.extent(2); first += scorer_rows) {
            const index_t n = std::min(scorer_rows, x.extent(2) - first);
            source.read(first, n, d, item.rows, d);
            hidden_layer<Arch>(item.rows, n, p, item.hidden);
            differentiate(head.w2.data() + begin, columns, b, h, first, n, item.hidden, item.d_w2,
                          item.d_b1);
            const map x_rows(item.rows, n, d), u(item.hidden, n, columns);
            for (index_t c = 0; c < d; c += projection_tile<T>::rows) {  // on the stack
              const index_t some = std::min(projection_tile<T>::rows, d - c);
              sum.middleRows(c, some).noalias() += x_rows.middleCols(c, some).transpose() * u;
            }
          }
        }
      }
      for (index_t c = 0; c < columns; ++c) {
        const auto at = static_cast<std::size_t>(begin + c);
        gradients.w2[at] = static_cast<T>(item.d_w2[c]);
        gradients.b1[at] = static_cast<T>(item.d_b1[c]);
        for (index_t r = 0; r < d; ++r) gradients.w1(0, 0, r, begin + c) = sum(r, c);
      }
    }
  });
  double d_b2 = 0;
  for (index_t b = 0; b < x.extent(0); ++b) {
    for (index_t h = 0; h < x.extent(1); ++h) {
      for (index_t i = 0; i < x.extent(2); ++i) d_b2 += static_cast<double>(d_scores(b, h, i, 0));
    }
  }
  *gradients.b2 = static_cast<T>(d_b2);
}

// In [0, 1), a multiple of 2^−24 and so the same number in float and double.
[[nodiscard]] inline double uniform_number(std::uint64_t seed, index_t b, index_t h,
                                           index_t i) noexcept {
  // splitmix64 over the position, one coordinate after the other.
  const auto mix = [](std::uint64_t z) {
    z += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  };
  std::uint64_t z = mix(seed);
  for (const index_t at : {b, h, i}) z = mix(z ^ static_cast<std::uint64_t>(at));
  return static_cast<double>(z >> 40) * 0x1p-24;
}

}  // namespace attn::detail
