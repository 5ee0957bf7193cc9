// SPDX-License-Identifier: MIT
//
// The scorers of soft top-k that learn: scores from rows by a linear map, or by two.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include <attn/context.hpp>
#include <attn/detail/checks.hpp>
#include <attn/detail/dense_attention_backward_checks.hpp>
#include <attn/detail/scorers_kernel.hpp>
#include <attn/eigen.hpp>
#include <attn/view.hpp>

namespace attn {

namespace detail {

template <class X, class S>
void check_scores(std::string_view function, std::string_view argument, const tensor_view<X>& x,
                  const tensor_view<S>& scores, access mode) {
  check_view(function, "x", x, access::read);
  check_rows_like(function, argument, scores, mode, x, "x", 1, "one score per position");
  if (mode == access::write) check_disjoint(function, argument, scores, "x", x);
}

template <class T>
void check_scorer_vector(std::string_view function, std::string_view argument, std::span<T> v,
                         index_t n, std::string_view what) {
  check_count(function, argument, std::span<const std::remove_const_t<T>>(v), n, what);
}

}  // namespace detail

/// scores = x w + b
///
/// T is float, or double for double tensors. Scores are not bounded: `squash_scores` before an
/// exponential tournament.
/// **Cost** n·d multiply-adds per head.
/// **References** the scorer of Pietruszka, Borchmann, Garncarek, ACL 2022 (ROUGE-1/2 37.0/13.9).
/// **Example** examples/pooled_attention.cpp
template <class T>
struct linear_scorer {
  std::span<const T> w;  ///< [d]
  T b = 0;

  /// @param x [B, H, n, d]  @param scores [B, H, n, 1]
  ///
  /// **Errors** shape_error: w is not [d], scores do not fit x or share memory with x or w.
  template <viewable X, viewable S, class Arch = simd::default_arch>
  void operator()(const X& x, S&& scores, context& ctx = default_context()) const {
    static_assert(std::is_same_v<simd::compute_t<element_t<X>>, T>, "T is what x is computed in");
    const auto xv = view(x);
    const auto out = view(scores);
    detail::check_scores(name, "scores", xv, out, detail::access::write);
    detail::check_scorer_vector(name, "w", w, xv.extent(3), "dim of x");
    detail::check_apart(name, detail::named_view("scores", out), detail::named_view("w", w));
    detail::linear_scores<Arch, T>(xv, w, b, out, ctx);
  }

  /// d_x [B, H, n, d] = d_scores wᵀ, d_w [d] = Σ d_scores x, d_b = Σ d_scores: sums over positions,
  /// heads and batches, in double. All are overwritten, each in memory of its own.
  template <viewable X, viewable G, viewable DX, class Arch = simd::default_arch>
  void backward(const X& x, const G& d_scores, DX&& d_x, std::span<T> d_w, T& d_b,
                context& ctx = default_context()) const {
    constexpr std::string_view function = "linear_scorer::backward";
    const auto xv = view(x);
    const auto g = view(d_scores);
    const auto dx = view(d_x);
    detail::check_scores(function, "d_scores", xv, g, detail::access::read);
    detail::check_scorer_vector(function, "w", w, xv.extent(3), "dim of x");
    detail::check_scorer_vector(function, "d_w", d_w, xv.extent(3), "dim of x");
    detail::check_rows_like(function, "d_x", dx, detail::access::write, xv, "x", xv.extent(3),
                            "dim of x");
    using detail::named_view;
    const auto check_output = [&](const auto& gradient, const auto&... before) {
      detail::check_apart(function, gradient, named_view("x", xv), named_view("w", w),
                          named_view("d_scores", g), before...);
    };
    const named_view of_x("d_x", dx);
    const named_view of_w("d_w", d_w);
    const named_view of_b("d_b", std::span<T>(&d_b, 1));
    check_output(of_x);
    check_output(of_w, of_x);
    check_output(of_b, of_x, of_w);
    detail::linear_scores_backward<Arch, T>(xv, w, g, dx, d_w, d_b, ctx);
  }

 private:
  static constexpr std::string_view name = "linear_scorer";
};

/// scores = tanh(x w1 + b1) w2 + b2
///
/// T is float, or double for double tensors. w1 has stride 1 along one of its axes.
/// **Cost** n·d·d_hidden multiply-adds per head, by Eigen's GEMM; backward four times that.
/// **References** the head of RoBERTa; ROUGE-1/2 36.8/13.8 in Pietruszka et al.
/// **Example** examples/scorers.cpp
template <class T>
struct nonlinear_scorer {
  tensor_view<const T> w1;  ///< [1, 1, d, d_hidden]
  std::span<const T> b1;    ///< [d_hidden]
  std::span<const T> w2;    ///< [d_hidden]
  T b2 = 0;

  /// @param x [B, H, n, d]  @param scores [B, H, n, 1]
  ///
  /// **Errors** shape_error: parameters do not fit x or each other; as in linear_scorer.
  template <viewable X, viewable S, class Arch = simd::default_arch>
  void operator()(const X& x, S&& scores, context& ctx = default_context()) const {
    static_assert(std::is_same_v<simd::compute_t<element_t<X>>, T>, "T is what x is computed in");
    const auto xv = view(x);
    const auto out = view(scores);
    detail::check_scores(name, "scores", xv, out, detail::access::write);
    check_parameters(name, xv.extent(3));
    detail::check_apart(name, detail::named_view("scores", out), detail::named_view("w1", w1),
                        detail::named_view("b1", b1), detail::named_view("w2", w2));
    detail::nonlinear_scores<Arch, T>(xv, {{w1, b1}, w2, b2}, out, ctx);
  }

  /// Gradients of x [B, H, n, d] and of all parameters, each shaped like its parameter, in memory
  /// of its own and overwritten; sums over positions, heads and batches.
  template <viewable X, viewable G, viewable DX, viewable DW1, class Arch = simd::default_arch>
  void backward(const X& x, const G& d_scores, DX&& d_x, DW1&& d_w1, std::span<T> d_b1,
                std::span<T> d_w2, T& d_b2, context& ctx = default_context()) const {
    constexpr std::string_view function = "nonlinear_scorer::backward";
    const auto xv = view(x);
    const auto g = view(d_scores);
    const auto dx = view(d_x);
    const tensor_view<T> dw1 = view(d_w1);
    detail::check_scores(function, "d_scores", xv, g, detail::access::read);
    check_parameters(function, xv.extent(3));
    detail::check_rows_like(function, "d_x", dx, detail::access::write, xv, "x", xv.extent(3),
                            "dim of x");
    detail::check_rows_like(function, "d_w1", dw1, detail::access::write, w1, "w1", w1.extent(3),
                            "dim of w1");
    detail::check_scorer_vector(function, "d_b1", d_b1, w1.extent(3), "dim of w1");
    detail::check_scorer_vector(function, "d_w2", d_w2, w1.extent(3), "dim of w1");
    using detail::named_view;
    const auto check_output = [&](const auto& gradient, const auto&... before) {
      detail::check_apart(function, gradient, named_view("x", xv), named_view("w1", w1),
                          named_view("b1", b1), named_view("w2", w2), named_view("d_scores", g),
                          before...);
    };
    const named_view of_x("d_x", dx);
    const named_view of_w1("d_w1", dw1);
    const named_view of_b1("d_b1", d_b1);
    const named_view of_w2("d_w2", d_w2);
    const named_view of_b2("d_b2", std::span<T>(&d_b2, 1));
    check_output(of_x);
    check_output(of_w1, of_x);
    check_output(of_b1, of_x, of_w1);
    check_output(of_w2, of_x, of_w1, of_b1);
    check_output(of_b2, of_x, of_w1, of_b1, of_w2);
    detail::nonlinear_scores_backward<Arch, T>(xv, {{w1, b1}, w2, b2}, g, dx,
                                               {dw1, d_b1, d_w2, &d_b2}, ctx);
  }

 private:
  static constexpr std::string_view name = "nonlinear_scorer";

  void check_parameters(std::string_view function, index_t d) const {
    detail::check_view(function, "w1", w1, detail::access::read);
    detail::check_extent(function, "w1", w1, 0, 1, "a matrix");
    detail::check_extent(function, "w1", w1, 1, 1, "a matrix");
    detail::check_extent(function, "w1", w1, 2, d, "dim of x");
    if (w1.stride(2) != 1 && w1.stride(3) != 1 && w1.extent(2) > 1 && w1.extent(3) > 1) {
      detail::raise<shape_error>(std::string(function) + ": w1 has strides " +
                                 detail::to_text(w1.strides()) +
                                 ", expected 1 along length or dim");
    }
    detail::check_scorer_vector(function, "b1", b1, w1.extent(3), "dim of w1");
    detail::check_scorer_vector(function, "w2", w2, w1.extent(3), "dim of w1");
  }
};

}  // namespace attn
