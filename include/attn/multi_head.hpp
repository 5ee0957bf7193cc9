// SPDX-License-Identifier: MIT
//
// Multi-head attention: the four projections around any kernel of the library.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include <attn/context.hpp>
#include <attn/detail/checks.hpp>
#include <attn/detail/multi_head_kernel.hpp>
#include <attn/eigen.hpp>
#include <attn/simd/convert.hpp>
#include <attn/view.hpp>

namespace attn {

/// The projections of a layer, row vectors on the left: q = x W_q + b_q. Nothing is copied, the
/// memory must outlive the layer.
///
/// Matrices are [1, 1, in, out] in either storage order; frameworks that store [out, in] (x Wᵀ)
/// hand in `view(w.transpose())`. A bias is [out], or empty where there is none.
template <std::floating_point T>
struct multi_head_weights {
  tensor_view<const T> w_q;  ///< [d_model, n_heads · d_qk]
  tensor_view<const T> w_k;  ///< [d_source, n_kv_heads · d_qk]
  tensor_view<const T> w_v;  ///< [d_source, n_kv_heads · d_v]
  tensor_view<const T> w_o;  ///< [n_heads · d_v, d_out]
  std::span<const T> b_q = {}, b_k = {}, b_v = {}, b_o = {};
};

/// Options of multi_head_attention: designated initialisers.
struct multi_head_options {
  index_t n_heads = 1;
  /// Grouped-query attention: n_heads / n_kv_heads query heads share one key/value head. 0 is
  /// n_heads.
  index_t n_kv_heads = 0;
};

/// A multi-head attention layer: y = concat_h(attention(x W_q^h, s W_k^h, s W_v^h)) W_o, s = x or
/// another source.
///
/// The kernel between the projections is the caller's, so that another one drops in by one line:
///
///     layer.self_attention(x, y, [&](auto q, auto k, auto v, auto out) {
///       attn::dense_attention(q, k, v, out, attn::causal_mask{}, {}, ctx);
///     }, ctx);
///
/// It gets q [S, n_heads, n_q, d_qk], k [S, n_kv_heads, n_kv, d_qk], v [S, n_kv_heads, n_kv, d_v]
/// as tensor_view<const T> and out [S, n_heads, n_q, d_v] as tensor_view<T>: heads are strided
/// views into the projected matrices. S counts the sequences, batch · heads of x: a matrix is one
/// sequence, an Eigen::Tensor [S, n, d_model] or a view [S, 1, n, d_model] is S.
///
/// A layer keeps the projected matrices, so a repeated call does not allocate and one layer serves
/// one call at a time.
///
/// **Numerics** projections are Eigen's GEMM in T; the last bits of a row may depend on its place
/// among the rows, not on the number of threads. Half types in x, source and y are converted to
/// float and back.
///
/// **Errors** shape_error and option_error: from the constructor for weights that do not fit each
/// other, from a call before y is written.
///
/// **Cost** 2·S·(n_q·(d_model·n_heads·d_qk + n_heads·d_v·d_out) + n_kv·d_source·n_kv_heads·(d_qk +
/// d_v)) flops and the kernel's; memory for q, k, v and out.
///
/// **References** Vaswani et al., "Attention Is All You Need", 2017; Ainslie et al., "GQA", 2023.
///
/// **Example** examples/multi_head.cpp
template <std::floating_point T, class Arch = simd::default_arch>
class multi_head_attention {
 public:
  explicit multi_head_attention(const multi_head_weights<T>& weights,
                                const multi_head_options& options)
      : q_{weights.w_q, weights.b_q}, k_{weights.w_k, weights.b_k}, v_{weights.w_v, weights.b_v},
        o_{weights.w_o, weights.b_o}, n_heads_(options.n_heads),
        n_kv_heads_(options.n_kv_heads == 0 ? options.n_heads : options.n_kv_heads) {
    check_weights();
  }

  [[nodiscard]] index_t n_heads() const noexcept { return n_heads_; }
  [[nodiscard]] index_t n_kv_heads() const noexcept { return n_kv_heads_; }
  [[nodiscard]] index_t d_qk() const noexcept { return q_.n_out() / n_heads_; }
  [[nodiscard]] index_t d_v() const noexcept { return v_.n_out() / n_kv_heads_; }

  /// Queries, keys and values from one sequence.
  ///
  /// @param x       [B, H, n, d_model], each of the B·H a sequence of its own
  /// @param y       [B, H, n, d_out]
  /// @param kernel  called once, kernel(q, k, v, out)
  template <viewable X, class Y, class Kernel>
  requires viewable<Y>
  void self_attention(const X& x, Y&& y, Kernel&& kernel, context& ctx = default_context()) {
    const auto xs = as_input<element_t<const X&>>(view(x));
    const auto ys = view(std::forward<Y>(y));
    detail::check_view(name, "x", xs, detail::access::read);
    detail::check_extent(name, "x", xs, 3, q_.n_in(), "length of w_q");
    detail::check_extent(name, "x", xs, 3, k_.n_in(), "length of w_k");
    check_output("x", xs, ys);

    const projected p = reserve(xs.extents(), xs.extent(2));
    const std::array projections{q_, k_, v_};
    const std::array<T*, 3> c{p.q, p.k, p.v};
    detail::project_in<Arch, T>(xs, std::span<const detail::projection<T>>(projections), c, ctx);
    attend(p, std::forward<Kernel>(kernel));
    detail::project_out<Arch, T>(p.out, o_, ys, ctx);
  }

  /// Queries from x, keys and values from another sequence.
  ///
  /// @param x       [B, H, n_q, d_model]
  /// @param source  [B, H, n_kv, d_source]
  /// @param y       [B, H, n_q, d_out]
  /// @param kernel  called once, kernel(q, k, v, out)
  template <viewable X, viewable Source, class Y, class Kernel>
  requires viewable<Y>
  void cross_attention(const X& x, const Source& source, Y&& y, Kernel&& kernel,
                       context& ctx = default_context()) {
    const auto xs = as_input<element_t<const X&>>(view(x));
    const auto ss = as_input<element_t<const Source&>>(view(source));
    const auto ys = view(std::forward<Y>(y));
    detail::check_view(name, "x", xs, detail::access::read);
    detail::check_extent(name, "x", xs, 3, q_.n_in(), "length of w_q");
    detail::check_view(name, "source", ss, detail::access::read);
    detail::check_extent(name, "source", ss, 0, xs.extent(0), "batch of x");
    detail::check_extent(name, "source", ss, 1, xs.extent(1), "heads of x");
    detail::check_extent(name, "source", ss, 3, k_.n_in(), "length of w_k");
    check_output("x", xs, ys);
    detail::check_disjoint(name, "y", ys, "source", ss);

    const projected p = reserve(xs.extents(), ss.extent(2));
    const std::array projections{k_, v_};
    const std::array<T*, 2> c{p.k, p.v};
    detail::project_in<Arch, T>(xs, std::span<const detail::projection<T>>(&q_, 1),
                                std::span<T* const>(&p.q, 1), ctx);
    detail::project_in<Arch, T>(ss, std::span<const detail::projection<T>>(projections), c, ctx);
    attend(p, std::forward<Kernel>(kernel));
    detail::project_out<Arch, T>(p.out, o_, ys, ctx);
  }

 private:
  static constexpr std::string_view name = "multi_head_attention";

  // [S n_q][n_heads d_qk], [S n_kv][n_kv_heads d_qk], [S n_kv][n_kv_heads d_v], [S n_q][n_heads
  // d_v]
  struct projected {
    index_t n_sequences, n_q, n_kv;
    T *q, *k, *v, *out;
  };

  template <class X>
  static tensor_view<const X> as_input(const tensor_view<X>& x) noexcept {
    static_assert(std::is_same_v<simd::compute_t<X>, T>,
                  "x, source and y hold T, and where T is float also half or bfloat16");
    return x;
  }

  [[nodiscard]] projected reserve(const std::array<index_t, 4>& x, index_t n_kv) {
    const index_t n_sequences = x[0] * x[1], n_q = x[2];
    const std::array sizes{n_sequences * n_q * q_.n_out(), n_sequences * n_kv * k_.n_out(),
                           n_sequences * n_kv * v_.n_out(), n_sequences * n_q * o_.n_in()};
    constexpr index_t line = 64 / static_cast<index_t>(sizeof(T));  // each starts at a cache line
    std::array<index_t, 5> at{};
    for (std::size_t i = 0; i < 4; ++i) at[i + 1] = at[i] + (sizes[i] + line - 1) / line * line;
    T* memory = reinterpret_cast<T*>(scratch_.reserve(static_cast<std::size_t>(at[4]) * sizeof(T)));
    return {n_sequences, n_q, n_kv, memory + at[0], memory + at[1], memory + at[2], memory + at[3]};
  }

  template <class Kernel>
  void attend(const projected& p, Kernel&& kernel) const {
    const tensor_view<const T> q = blhd(p.q, p.n_sequences, p.n_q, n_heads_, d_qk());
    const tensor_view<const T> k = blhd(p.k, p.n_sequences, p.n_kv, n_kv_heads_, d_qk());
    const tensor_view<const T> v = blhd(p.v, p.n_sequences, p.n_kv, n_kv_heads_, d_v());
    std::forward<Kernel>(kernel)(q, k, v, blhd(p.out, p.n_sequences, p.n_q, n_heads_, d_v()));
  }

  void check_weights() const {
    if (n_heads_ < 1) detail::raise_option(name, "n_heads", std::to_string(n_heads_), "at least 1");
    if (n_kv_heads_ < 1 || n_heads_ % n_kv_heads_ != 0) {
      detail::raise_option(name, "n_kv_heads", std::to_string(n_kv_heads_),
                           "a divisor of " + std::to_string(n_heads_) + " (n_heads)");
    }
    check_matrix("w_q", "b_q", q_, n_heads_, "n_heads");
    check_matrix("w_k", "b_k", k_, n_kv_heads_, "n_kv_heads");
    detail::check_extent(name, "w_k", k_.w, 3, n_kv_heads_ * d_qk(),
                         "n_kv_heads times d_qk of w_q");
    check_matrix("w_v", "b_v", v_, n_kv_heads_, "n_kv_heads");
    detail::check_extent(name, "w_v", v_.w, 2, k_.n_in(), "length of w_k");
    check_matrix("w_o", "b_o", o_, 1, "");
    detail::check_extent(name, "w_o", o_.w, 2, n_heads_ * d_v(), "n_heads times d_v of w_v");
  }

  static void check_matrix(std::string_view argument, std::string_view bias,
                           const detail::projection<T>& p, index_t n, std::string_view divisor) {
    const tensor_view<const T>& w = p.w;
    detail::check_view(name, argument, w, detail::access::read);
    detail::check_extent(name, argument, w, 0, 1, "a matrix");
    detail::check_extent(name, argument, w, 1, 1, "a matrix");
    if (w.extent(3) % n != 0) {
      detail::raise_shape(name, argument, w.extents(),
                          "a dim that " + std::to_string(n) + " divides (" + std::string(divisor) +
                              ")");
    }
    if (!p.is_row_major() && w.stride(2) != 1 && w.extent(2) > 1) {
      detail::raise<shape_error>(std::string(name) + ": " + std::string(argument) +
                                 " has strides " + detail::to_text(w.strides()) +
                                 ", expected 1 along length or dim");
    }
    if (!p.b.empty() && static_cast<index_t>(p.b.size()) != w.extent(3)) {
      detail::raise<shape_error>(std::string(name) + ": " + std::string(bias) + " has " +
                                 std::to_string(p.b.size()) + " elements, expected " +
                                 std::to_string(w.extent(3)) + " (dim of " + std::string(argument) +
                                 ") or none");
    }
  }

  template <class X, class Y>
  void check_output(std::string_view input, const tensor_view<X>& x,
                    const tensor_view<Y>& y) const {
    static_assert(!std::is_const_v<Y>, "y is written to");
    static_assert(std::is_same_v<simd::compute_t<Y>, T>,
                  "x, source and y hold T, and where T is float also half or bfloat16");
    detail::check_view(name, "y", y, detail::access::write);
    detail::check_extent(name, "y", y, 0, x.extent(0), "batch of x");
    detail::check_extent(name, "y", y, 1, x.extent(1), "heads of x");
    detail::check_extent(name, "y", y, 2, x.extent(2), "length of x");
    detail::check_extent(name, "y", y, 3, o_.n_out(), "dim of w_o");
    detail::check_disjoint(name, "y", y, input, x);
    detail::check_disjoint(name, "y", y, "w_q", q_.w);
    detail::check_disjoint(name, "y", y, "w_k", k_.w);
    detail::check_disjoint(name, "y", y, "w_v", v_.w);
    detail::check_disjoint(name, "y", y, "w_o", o_.w);
  }

  detail::projection<T> q_, k_, v_, o_;
  index_t n_heads_, n_kv_heads_;
  detail::scratch_buffer scratch_;
};

}  // namespace attn
