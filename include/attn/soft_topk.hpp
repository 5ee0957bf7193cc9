// SPDX-License-Identifier: MIT
//
// Soft top-k by a Successive Halving tournament.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <string_view>
#include <type_traits>
#include <vector>

#include <attn/context.hpp>
#include <attn/detail/soft_topk_backward_kernel.hpp>
#include <attn/detail/soft_topk_checks.hpp>
#include <attn/detail/soft_topk_kernel.hpp>
#include <attn/eigen.hpp>
#include <attn/soft_topk_options.hpp>
#include <attn/view.hpp>

namespace attn {

/// The plan of a Successive Halving soft top-k: from scores alone, the one slot of k that every
/// source ends in, and its weight there.
///
/// A round takes m survivors to m' = max(k, ⌈m/2⌉). By rank, the best 2m' − m have a bye; of the
/// others the best meets the worst, and so inward. A match of i and j leaves one survivor,
///
///     v' = w v_i + (1 − w) v_j,   w = sigmoid(B^v_i − B^v_j)   or   sigmoid(C (v_i − v_j)),
///
/// and a payload would be mixed alike. So a slot is a mixture of sources whose weights are not
/// negative and sum to 1, and the plan is applied to any payload in one pass: `soft_topk`.
/// A slot's champion is the source that was the better-ranked one in each of its matches. Equal
/// scores go by the lower position (of the champion).
///
/// **Numerics** Scores are taken to double, and all is computed in double. Weights of finite scores
/// of any size are the exact limit: B^v may overflow. −inf is "not there": weight 0 against any
/// other score; two that are not there share alike. NaN counts as −inf, and ranks after it among
/// the sources. A slot with nothing else has score −inf, and its weights are finite.
/// **Cost** n − k matches of 3 exponentials, and one sort per round over shrinking arrays: 0.4 ms
/// for n = 16384 (AVX-512). About 72 bytes per source, kept for the next `assign`.
/// **References** Pietruszka, Borchmann, Graliński, "Successive Halving Top-k Operator", AAAI 2021.
/// **Example** examples/soft_topk.cpp
class tournament {
 public:
  /// No batches, no slots; for a later `assign`.
  tournament() = default;

  /// @param scores [B, H, n, 1], any element type
  /// @param k slots, 1 to n
  ///
  /// **Errors** option_error: k outside 1 to n; strength not above 1 (exponential) or 0 (scaled);
  /// lengths outside k to n. shape_error: scores not of dim 1 or of 2^32 positions and more,
  /// lengths not one per batch.
  template <viewable Scores, class Arch = simd::default_arch>
  tournament(const Scores& scores, index_t k, const soft_topk_options& options = {},
             context& ctx = default_context()) {
    plan<Arch>("tournament", view(scores), k, options, ctx);
  }

  /// The same as a new tournament, in the memory of this one. Arguments that are refused leave it
  /// as it was; where memory runs out it has no batches.
  template <viewable Scores, class Arch = simd::default_arch>
  void assign(const Scores& scores, index_t k, const soft_topk_options& options = {},
              context& ctx = default_context()) {
    plan<Arch>("tournament", view(scores), k, options, ctx);
  }

  [[nodiscard]] index_t n_batch() const noexcept { return n_batch_; }
  [[nodiscard]] index_t n_heads() const noexcept { return n_heads_; }
  [[nodiscard]] index_t n_sources() const noexcept { return n_; }
  [[nodiscard]] index_t n_slots() const noexcept { return k_; }

  /// The slot that source i is in; −1 if i is at or past the length of its batch.
  [[nodiscard]] index_t slot(index_t b, index_t h, index_t i) const noexcept {
    const detail::tournament_row r = row(b, h);
    return i < r.n ? r.share[i].slot : -1;
  }
  /// Its weight there, 0 to 1; 0 past the length.
  [[nodiscard]] double weight(index_t b, index_t h, index_t i) const noexcept {
    const detail::tournament_row r = row(b, h);
    return i < r.n ? r.share[i].weight : 0;
  }
  /// The source that won all matches of slot r: what the slot is nearest to.
  [[nodiscard]] index_t champion(index_t b, index_t h, index_t r) const noexcept {
    const detail::tournament_row t = row(b, h);
    const detail::tournament_rounds rounds(t.n, k_);
    return t.champion(rounds, rounds.count, rounds.seats - k_, static_cast<index_t>(t.last[r]));
  }
  /// Interpolated scores of the slots, [B, H, k, 1].
  [[nodiscard]] tensor_view<const double> scores() const noexcept {
    if (memory_.empty()) return {nullptr, n_batch_, n_heads_, k_, 1};
    const auto step = static_cast<index_t>(row_lines_ * sizeof(cache_line) / sizeof(double));
    return {row(0, 0).slot_score, {n_batch_, n_heads_, k_, 1}, {n_heads_ * step, step, 1, 1}};
  }

  [[nodiscard]] topk_boost boost() const noexcept { return boost_; }
  [[nodiscard]] double strength() const noexcept { return strength_; }

  /// For kernels: the plan of one row.
  [[nodiscard]] detail::tournament_row row(index_t b, index_t h) const noexcept {
    // The row of a const tournament is only read.
    auto* first = const_cast<cache_line*>(memory_.data()) +
                  static_cast<std::size_t>(b * n_heads_ + h) * row_lines_;
    detail::scratch_carver memory(first->bytes);
    detail::tournament_row r = detail::cut_row(memory, n_, k_);
    if (!lengths_.empty()) r.n = lengths_[static_cast<std::size_t>(b)];
    return r;
  }

 private:
  struct alignas(64) cache_line {
    std::byte bytes[64];
  };

  template <class Arch, class T>
  void plan(std::string_view function, const tensor_view<T>& scores, index_t k,
            const soft_topk_options& options, context& ctx) {
    detail::check_topk_scores(function, scores);
    detail::check_tournament_length(function, scores);
    detail::check_topk_strength(function, options);
    const index_t n_batch = scores.extent(0), n_heads = scores.extent(1), n = scores.extent(2);
    detail::check_topk_lengths(function, options.lengths, n_batch, n, k);

    detail::scratch_carver row_bytes(nullptr), scratch_bytes(nullptr);
    (void)detail::cut_row(row_bytes, n, k);
    (void)detail::cut_scratch(scratch_bytes, n, k);
    n_batch_ = 0;  // until the plan is complete
    row_lines_ = row_bytes.used() / sizeof(cache_line);
    const std::size_t lines = static_cast<std::size_t>(n_batch * n_heads) * row_lines_;
    if (lines > memory_.size()) memory_ = std::vector<cache_line>(lines);
    lengths_.assign(options.lengths.begin(), options.lengths.end());
    n_heads_ = n_heads, n_ = n, k_ = k;
    boost_ = options.boost, strength_ = options.strength;

    const double rate = detail::boost_rate(options.boost, options.strength);
    const index_t together = detail::rows_together(n, n_batch * n_heads, ctx.n_threads());
    ctx.run(n_batch * n_heads, together, scratch_bytes.used(),
            [&](std::byte* memory, detail::work_queue& queue) noexcept {
              detail::scratch_carver cutter(memory);
              const detail::tournament_scratch scratch = detail::cut_scratch(cutter, n, k);
              for (index_t first, last; queue.next(first, last);) {
                detail::tournament_row rows[detail::most_rows_together];
                for (index_t g = 0; g < last - first; ++g) {
                  rows[g] = row((first + g) / n_heads, (first + g) % n_heads);
                }
                detail::plan_rows<Arch>(scores, first, last - first, rows, rate, options, scratch);
                for (index_t g = 0; g < last - first; ++g) detail::list_parts(rows[g], scratch);
              }
            });
    n_batch_ = n_batch;
  }

  index_t n_batch_ = 0, n_heads_ = 0, n_ = 0, k_ = 0;
  topk_boost boost_ = topk_boost::exponential;
  double strength_ = 0;
  std::vector<index_t> lengths_;
  std::vector<cache_line> memory_;  // rows, each cut by detail::cut_row
  std::size_t row_lines_ = 0;
};

/// Applies a tournament to a payload: pooled[r] = Σ weight(i) · x[i] over the sources of slot r.
///
/// @param t a tournament over [B, H, n] scores
/// @param x [B, H, n, d]; rows past the length are not read, nor are those whose weight is 0 or
///     below the smallest normal number
///
/// @param pooled [B, H, k, d], any element type if neither or both are double
///
/// **Numerics** half types are summed in float and rounded once; sources are added by position. A
/// row of pooled depends on its own sources alone.
/// **Errors** shape_error: extents that do not fit the tournament, pooled shares memory with x.
/// **Cost** n·d multiply-adds; reads x once and writes pooled once.
/// **Example** examples/soft_topk.cpp
template <viewable X, viewable P, class Arch = simd::default_arch>
requires detail::computed_alike<X, P>
void soft_topk(const tournament& t, const X& x, P&& pooled, context& ctx = default_context()) {
  using T = std::remove_cv_t<element_t<X>>;
  using S = simd::compute_t<T>;
  const tensor_view<const T> xv = view(x);
  const auto out = view(pooled);
  constexpr std::string_view function = "soft_topk";
  const index_t n_batch = t.n_batch(), n_heads = t.n_heads(), k = t.n_slots(), d = xv.extent(3);
  using detail::access;
  detail::check_topk_operand(function, "x", xv, access::read, {n_batch, n_heads, t.n_sources(), d},
                             detail::per_position, "");
  detail::check_topk_operand(function, "pooled", out, access::write, {n_batch, n_heads, k, d},
                             detail::per_slot, "dim of x");
  detail::check_disjoint(function, "pooled", out, "x", xv);

  const detail::pool_order order = detail::choose_pool_order<S>(
      t.n_sources(), k, d, detail::can_stream(xv, out, ctx.n_threads()), true);
  const index_t slots_per_task =
      order == detail::pool_order::by_slot ? 128 : std::max<index_t>(k, 1);
  const index_t tasks = k == 0 ? 0 : (k - 1) / slots_per_task + 1;
  const index_t n_sums = detail::pool_scratch(order, t.n_sources(), k, d);
  ctx.run(n_batch * n_heads * tasks, 1, static_cast<std::size_t>(n_sums) * sizeof(S),
          [&](std::byte* memory, detail::work_queue& queue) noexcept {
            for (index_t first, last; queue.next(first, last);) {
              const index_t b = first / tasks / n_heads, h = first / tasks % n_heads;
              const index_t begin = first % tasks * slots_per_task;
              detail::pool_slots<Arch, S>(
                  t.row(b, h), detail::matrix_of(xv, b, h), detail::matrix_of(out, b, h), d, order,
                  begin, std::min(k, begin + slots_per_task), reinterpret_cast<S*>(memory));
            }
          });
}

/// A tournament over scores and its application to x in one call; keeps no plan and does not
/// allocate when repeated with the same context.
///
/// @param x [B, H, n, d]
/// @param scores [B, H, n, 1]
/// @param pooled [B, H, k, d]: its length is k
/// @param pooled_scores [B, H, k, 1]
///
/// **Errors** as for `tournament` and the application, in the name of soft_topk.
/// **Example** examples/soft_topk.cpp
template <viewable X, viewable V, viewable P, viewable PV, class Arch = simd::default_arch>
requires detail::computed_alike<X, P>
void soft_topk(const X& x, const V& scores, P&& pooled, PV&& pooled_scores,
               const soft_topk_options& options = {}, context& ctx = default_context()) {
  using T = std::remove_cv_t<element_t<X>>;
  using S = simd::compute_t<T>;
  using D = std::remove_cv_t<element_t<PV>>;
  constexpr std::string_view function = "soft_topk";
  const detail::topk_call call(function, view(x), view(scores), view(pooled), view(pooled_scores),
                               options.lengths);
  detail::check_tournament_length(function, call.scores);
  detail::check_topk_strength(function, options);

  // Everything that rows planned together need.
  struct parts {
    detail::tournament_scratch scratch;
    detail::tournament_row row[detail::most_rows_together];
    S* sums;
    parts(detail::scratch_carver& memory, index_t rows, index_t n, index_t k, index_t n_sums)
        : scratch(detail::cut_scratch(memory, n, k)) {
      for (index_t g = 0; g < rows; ++g) row[g] = detail::cut_row(memory, n, k);
      sums = memory.take<S>(n_sums);
    }
  };
  const index_t together =
      detail::rows_together(call.n, call.n_batch * call.n_heads, ctx.n_threads());
  const double rate = detail::boost_rate(options.boost, options.strength);
  const detail::pool_order order = detail::choose_pool_order<S>(
      call.n, call.k, call.d, detail::can_stream(call.x, call.pooled, ctx.n_threads()), false);
  const index_t n_sums = detail::pool_scratch(order, call.n, call.k, call.d);
  detail::scratch_carver bytes(nullptr);
  (void)parts(bytes, together, call.n, call.k, n_sums);
  ctx.run(call.n_batch * call.n_heads, together, bytes.used(),
          [&](std::byte* memory, detail::work_queue& queue) noexcept {
            detail::scratch_carver cutter(memory);
            parts p(cutter, together, call.n, call.k, n_sums);
            for (index_t first, last; queue.next(first, last);) {
              for (index_t item = first; item < last; ++item) {
                p.row[item - first].n =
                    detail::length_of(options.lengths, item / call.n_heads, call.n);
              }
              detail::plan_rows<Arch>(call.scores, first, last - first, p.row, rate, options,
                                      p.scratch);
              for (index_t item = first; item < last; ++item) {
                const index_t b = item / call.n_heads, h = item % call.n_heads;
                const detail::tournament_row& row = p.row[item - first];
                if (order == detail::pool_order::by_slot) detail::list_parts(row, p.scratch);
                detail::pool_slots<Arch, S>(row, detail::matrix_of(call.x, b, h),
                                            detail::matrix_of(call.pooled, b, h), call.d, order, 0,
                                            call.k, p.sums);
                for (index_t r = 0; r < call.k; ++r) {
                  call.pooled_scores(b, h, r, 0) = static_cast<D>(row.slot_score[r]);
                }
              }
            }
          });
}

/// Gradients of a soft top-k, through the weights and the interpolated scores; who meets whom is a
/// constant.
///
/// @param t the tournament of the forward call
/// @param x [B, H, n, d]
/// @param d_pooled [B, H, k, d] gradient of pooled
/// @param d_pooled_scores [B, H, k, 1] gradient of the slots' scores
/// @param d_x [B, H, n, d], overwritten; 0 past the length and where the weight is 0
/// @param d_scores [B, H, n, 1], overwritten; 0 past the length and for scores that are not there
///
/// **Numerics** the gradient of the weights is in double; that of a payload in its compute type. 0
/// where a weight is a step of the score: at infinite scores, and where B^v exceeds double.
/// **Errors** shape_error: extents that do not fit the tournament, outputs that share memory.
/// **Cost** 2·n·d multiply-adds, 2 (n − k) exponentials.
/// **Example** examples/soft_topk.cpp
template <viewable X, viewable DP, viewable DPV, viewable DX, viewable DV,
          class Arch = simd::default_arch>
requires detail::computed_alike<X, DP, DX>
void soft_topk_backward(const tournament& t, const X& x, const DP& d_pooled,
                        const DPV& d_pooled_scores, DX&& d_x, DV&& d_scores,
                        context& ctx = default_context()) {
  using T = std::remove_cv_t<element_t<X>>;
  using S = simd::compute_t<T>;
  using D = std::remove_cv_t<element_t<DV>>;
  const tensor_view<const T> xv = view(x);
  const tensor_view<const std::remove_cv_t<element_t<DP>>> d_out = view(d_pooled);
  const auto d_out_scores = view(d_pooled_scores);
  const auto dx = view(d_x);
  const tensor_view<D> dv = view(d_scores);
  constexpr std::string_view function = "soft_topk_backward";
  const index_t n_batch = t.n_batch(), n_heads = t.n_heads(), n = t.n_sources(), k = t.n_slots();
  const index_t d = xv.extent(3);
  using detail::access, detail::check_topk_operand;
  check_topk_operand(function, "x", xv, access::read, {n_batch, n_heads, n, d},
                     detail::per_position, "");
  check_topk_operand(function, "d_pooled", d_out, access::read, {n_batch, n_heads, k, d},
                     detail::per_slot, "dim of x");
  check_topk_operand(function, "d_pooled_scores", d_out_scores, access::read,
                     {n_batch, n_heads, k, 1}, detail::per_slot, "one score per slot");
  check_topk_operand(function, "d_x", dx, access::write, {n_batch, n_heads, n, d},
                     detail::per_position, "dim of x");
  check_topk_operand(function, "d_scores", dv, access::write, {n_batch, n_heads, n, 1},
                     detail::per_position, "one score per position");
  const auto check_output = [&](std::string_view argument, const auto& a) {
    detail::check_disjoint(function, argument, a, "x", xv);
    detail::check_disjoint(function, argument, a, "d_pooled", d_out);
    detail::check_disjoint(function, argument, a, "d_pooled_scores", d_out_scores);
  };
  check_output("d_x", dx);
  check_output("d_scores", dv);
  detail::check_disjoint(function, "d_scores", dv, "d_x", dx);

  detail::scratch_carver bytes(nullptr);
  (void)detail::scores_backward_scratch(bytes, n, k);
  ctx.run(n_batch * n_heads, 1, bytes.used(),
          [&](std::byte* memory, detail::work_queue& queue) noexcept {
            detail::scratch_carver cutter(memory);
            const detail::scores_backward_scratch s(cutter, n, k);
            for (index_t first, last; queue.next(first, last);) {
              const index_t b = first / n_heads, h = first % n_heads;
              const detail::tournament_row row = t.row(b, h);
              std::fill_n(s.gain, row.n, 0.0);
              detail::pool_backward<Arch, S>(row, detail::matrix_of(xv, b, h),
                                             detail::matrix_of(d_out, b, h),
                                             detail::matrix_of(dx, b, h), d, n, s.gain);
              for (index_t r = 0; r < k; ++r) {
                s.d_slot[r] = static_cast<double>(d_out_scores(b, h, r, 0));
              }
              detail::scores_backward<Arch>(row, t.boost(), t.strength(), s);
              detail::store_score_gradients<Arch>(row, s.d_seat, n, &dv(b, h, 0, 0), dv.stride(2));
            }
          });
}

}  // namespace attn
