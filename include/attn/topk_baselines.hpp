// SPDX-License-Identifier: MIT
//
// What soft top-k is compared with: hard top-k, the iterative soft top-k, and the similarity nCCS.
#pragma once

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include <attn/context.hpp>
#include <attn/detail/topk_baselines_kernel.hpp>
#include <attn/soft_topk.hpp>

namespace attn {

/// Options of hard top-k.
struct hard_topk_options {
  topk_order order = topk_order::by_position;
  std::span<const index_t> lengths = {};  ///< one per batch, or none: later positions do not exist
};

/// Positions of the k largest scores. Equal scores go by the lower position; NaN is the smallest.
///
/// @param scores [B, H, n, 1]
/// @param indices [B, H, k, 1] of index_t, in order of position or rank
///
/// **Errors** option_error: k outside 1 to n, lengths outside k to n. shape_error.
/// **Cost** O(n + k log k).
/// **Example** examples/soft_topk.cpp
template <viewable V, viewable I, class Arch = simd::default_arch>
requires std::is_same_v<element_t<I>, index_t>
void hard_topk(const V& scores, I&& indices, const hard_topk_options& options = {},
               context& ctx = default_context()) {
  const auto v = view(scores);
  const tensor_view<index_t> out = view(indices);
  constexpr std::string_view function = "hard_topk";
  detail::check_topk_scores(function, v);
  const index_t n_batch = v.extent(0), n_heads = v.extent(1), n = v.extent(2), k = out.extent(2);
  detail::check_topk_operand(function, "indices", out, detail::access::write,
                             {n_batch, n_heads, k, 1}, "", "one index per slot");
  detail::check_topk_lengths(function, options.lengths, n_batch, n, k);
  detail::check_disjoint(function, "indices", out, "scores", v);
  ctx.run(n_batch * n_heads, 1, static_cast<std::size_t>(n) * sizeof(detail::ranked),
          [&](std::byte* memory, detail::work_queue& queue) noexcept {
            auto* rank = reinterpret_cast<detail::ranked*>(memory);
            for (index_t first, last; queue.next(first, last);) {
              const index_t b = first / n_heads, h = first % n_heads;
              const index_t length = detail::length_of(options.lengths, b, n);
              detail::select_best<Arch>(&v(b, h, 0, 0), v.stride(2), length, k, options.order,
                                        rank);
              for (index_t r = 0; r < k; ++r) out(b, h, r, 0) = rank[r].node;
            }
          });
}

/// The k rows of x with the largest scores, as they are: soft_topk without the softness.
///
/// @param x [B, H, n, d]  @param scores [B, H, n, 1]
/// @param pooled [B, H, k, d]  @param pooled_scores [B, H, k, 1]
///
/// **Errors** as hard_topk of indices; shape_error where the operands do not fit or share memory.
/// **Cost** O(n + k log k + k d).
/// **Example** examples/soft_topk.cpp
template <viewable X, viewable V, viewable P, viewable PV, class Arch = simd::default_arch>
requires std::is_same_v<std::remove_cv_t<element_t<X>>, std::remove_cv_t<element_t<P>>>
void hard_topk(const X& x, const V& scores, P&& pooled, PV&& pooled_scores,
               const hard_topk_options& options = {}, context& ctx = default_context()) {
  using D = std::remove_cv_t<element_t<PV>>;
  const detail::topk_call call("hard_topk", view(x), view(scores), view(pooled),
                               view(pooled_scores), options.lengths);
  ctx.run(call.n_batch * call.n_heads, 1, static_cast<std::size_t>(call.n) * sizeof(detail::ranked),
          [&](std::byte* memory, detail::work_queue& queue) noexcept {
            auto* rank = reinterpret_cast<detail::ranked*>(memory);
            for (index_t first, last; queue.next(first, last);) {
              const index_t b = first / call.n_heads, h = first % call.n_heads;
              const index_t length = detail::length_of(options.lengths, b, call.n);
              detail::select_best<Arch>(&call.scores(b, h, 0, 0), call.scores.stride(2), length,
                                        call.k, options.order, rank);
              const auto from = detail::matrix_of(call.x, b, h);
              const auto to = detail::matrix_of(call.pooled, b, h);
              for (index_t r = 0; r < call.k; ++r) {
                const index_t i = rank[r].node;
                detail::copy_row(from.row(i), from.step, to.row(r), to.step, call.d);
                call.pooled_scores(b, h, r, 0) = static_cast<D>(call.scores(b, h, i, 0));
              }
            }
          });
}

/// Options of iterative top-k.
struct iterative_topk_options {
  /// Peakedness: the larger, the nearer to hard top-k. 1 is the constant of the published code (its
  /// figures fit 2: docs/kernels/topk_baselines.md); with scores in [0, 1] it is nearly an average.
  double alpha = 1;
  std::span<const index_t> lengths = {};  ///< one per batch, or none: later positions do not exist

  /// A peakedness that tells apart n scores spread over a range of 1: neighbours, 1/n apart, get
  /// e^−1 of the weight.
  [[nodiscard]] static constexpr double tuned_alpha(index_t n) noexcept {
    return static_cast<double>(n) * static_cast<double>(n);
  }
};

/// Iterative soft top-k: k times a mean around the largest score that is left.
///
///     pooled_r = Σ_i w_i x_i,  w = softmax_i(−alpha (s_i − m)²),  m = max s;  then s_argmax leaves
///
/// @param x [B, H, n, d]  @param scores [B, H, n, 1]
/// @param pooled [B, H, k, d]  @param pooled_scores [B, H, k, 1]
///
/// **Numerics** weights in double. −inf and NaN have weight 0 as long as another score is left, and
/// their rows are not read. Ties: lower position first.
/// **Errors** option_error: alpha not above 0, k outside 1 to n, lengths outside k to n.
/// shape_error.
/// **Cost** k passes over x: n·k exponentials, n·k·d multiply-adds.
/// **References** Goyal, Neubig, Dyer, Berg-Kirkpatrick, "A Continuous Relaxation of Beam Search
/// for End-to-end Training of Neural Sequence Models", 2018; as used by Pietruszka et al., 2021.
/// **Example** examples/soft_topk.cpp
template <viewable X, viewable V, viewable P, viewable PV, class Arch = simd::default_arch>
requires detail::computed_alike<X, P>
void iterative_topk(const X& x, const V& scores, P&& pooled, PV&& pooled_scores,
                    const iterative_topk_options& options = {}, context& ctx = default_context()) {
  using T = std::remove_cv_t<element_t<X>>;
  using S = simd::compute_t<T>;
  constexpr std::string_view function = "iterative_topk";
  const detail::topk_call call(function, view(x), view(scores), view(pooled), view(pooled_scores),
                               options.lengths);
  if (!(std::isfinite(options.alpha) && options.alpha > 0)) {
    detail::raise_option(function, "alpha", detail::to_text(options.alpha),
                         "a finite number above 0");
  }
  detail::scratch_carver bytes(nullptr);
  (void)detail::iterative_scratch<S>(bytes, call.n, call.d);
  ctx.run(call.n_batch * call.n_heads, 1, bytes.used(),
          [&](std::byte* memory, detail::work_queue& queue) noexcept {
            detail::scratch_carver cutter(memory);
            const detail::iterative_scratch<S> scratch(cutter, call.n, call.d);
            for (index_t first, last; queue.next(first, last);) {
              const index_t b = first / call.n_heads, h = first % call.n_heads;
              detail::iterative_row<Arch, S>(
                  &call.scores(b, h, 0, 0), call.scores.stride(2),
                  detail::length_of(options.lengths, b, call.n), call.k, options.alpha,
                  detail::matrix_of(call.x, b, h), detail::matrix_of(call.pooled, b, h), call.d,
                  &call.pooled_scores(b, h, 0, 0), call.pooled_scores.stride(2), scratch);
            }
          });
}

/// Normalised Chamfer cosine similarity: how well rows of `approximation` stand for those of
/// `truth`, averaged over batch and heads.
///
///     nCCS = 1/k Σ_i max_j cos(truth_i, approximation_j)
///
/// It does not look at the order, and one row may stand for several.
///
/// @param truth [B, H, k, d], k >= 1  @param approximation [B, H, k', d], k' >= 1
///
/// **Numerics** float, for double double. The cosine with a row of zeros is 0. NaN gives NaN.
/// **Errors** shape_error: no rows, extents that do not fit.
/// **Cost** k·k'·d multiply-adds per head; allocates.
/// **References** Pietruszka, Borchmann, Graliński, "Successive Halving Top-k Operator", AAAI 2021.
/// **Example** examples/soft_topk.cpp
template <viewable Y, viewable Z, class Arch = simd::default_arch>
requires detail::computed_alike<Y, Z>
[[nodiscard]] double chamfer_cosine_similarity(const Y& truth, const Z& approximation,
                                               context& ctx = default_context()) {
  using T = std::remove_cv_t<element_t<Y>>;
  using S = simd::compute_t<T>;
  const tensor_view<const T> y = view(truth);
  const tensor_view<const std::remove_cv_t<element_t<Z>>> z = view(approximation);
  constexpr std::string_view function = "chamfer_cosine_similarity";
  using detail::access;
  detail::check_view(function, "truth", y, access::read);
  detail::check_view(function, "approximation", z, access::read);
  detail::check_extent(function, "approximation", z, 0, y.extent(0), "batch of truth");
  detail::check_extent(function, "approximation", z, 1, y.extent(1), "heads of truth");
  detail::check_extent(function, "approximation", z, 3, y.extent(3), "dim of truth");
  const index_t n_heads = y.extent(1), n_rows = y.extent(0) * n_heads, d = y.extent(3);
  const index_t k = y.extent(2), m = z.extent(2);
  if (y.size() == 0) detail::raise_shape(function, "truth", y.extents(), "no extent of 0");
  if (m == 0) detail::raise_shape(function, "approximation", z.extents(), "no extent of 0");

  std::vector<double> row_mean(static_cast<std::size_t>(n_rows));
  const auto elements = static_cast<std::size_t>((k + m) * d + k);
  ctx.run(n_rows, 1, elements * sizeof(S),
          [&](std::byte* memory, detail::work_queue& queue) noexcept {
            auto* unit_y = reinterpret_cast<S*>(memory);
            S* unit_z = unit_y + k * d;
            for (index_t first, last; queue.next(first, last);) {
              const index_t b = first / n_heads, h = first % n_heads;
              detail::normalise_rows<Arch>(detail::matrix_of(y, b, h), k, d, unit_y);
              detail::normalise_rows<Arch>(detail::matrix_of(z, b, h), m, d, unit_z);
              row_mean[static_cast<std::size_t>(first)] =
                  detail::mean_best_cosine<Arch>(unit_y, k, unit_z, m, d, unit_z + m * d);
            }
          });
  double sum = 0;
  for (const double mean : row_mean) sum += mean;
  return sum / static_cast<double>(n_rows);
}

}  // namespace attn
