// SPDX-License-Identifier: MIT
//
// The algebra under every kernel: attention over a set of keys is a state (m, l, o), and states of
// disjoint sets merge.
#pragma once

#include <cmath>
#include <concepts>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include <attn/context.hpp>
#include <attn/detail/attention_state_kernel.hpp>
#include <attn/detail/checks.hpp>
#include <attn/eigen.hpp>
#include <attn/simd/convert.hpp>
#include <attn/view.hpp>

namespace attn {

/// The attention of one query over a set of keys that is still growing.
///
///     m = max_j s_j     l = Σ_j exp(s_j − m)     o = Σ_j exp(s_j − m) v_j ∈ ℝ^d_v
///
/// The empty set is (−inf, 0, 0). `add` takes one key in, `merge` the state of other keys, in any
/// order and any grouping; the softmax-weighted mean o / l and its lse = m + ln l come out at the
/// end. A normalised row (out, lse) is the state (lse, 1, out), which is what merge_attention uses.
///
/// `o` lives in memory of the caller: a state allocates nothing.
///
/// **Numerics** a score of −inf forbids a key, its value is not read; +inf or NaN makes the row
/// NaN. No exp has a positive argument.
///
/// **References** Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
///
/// **Example** examples/attention_state.cpp
template <std::floating_point T, class Arch = simd::default_arch>
class attention_state {
 public:
  /// The empty set. @param o [d_v] set to 0 here; it must outlive the state.
  explicit attention_state(std::span<T> o) noexcept : o_(o) {
    for (T& x : o_) x = 0;
  }

  /// Takes in one key. @param score s_j  @param v [d_v] its value
  ///
  /// **Errors** shape_error if v has not d_v elements.
  void add(T score, std::span<const T> v) {
    check_length("v", v.size());
    if (score == empty_maximum) return;
    const T m = score > m_ ? score : m_;
    const T rescale = std::exp(m_ - m), p = std::exp(score - m);
    for (std::size_t c = 0; c < o_.size(); ++c) o_[c] = rescale * o_[c] + p * v[c];
    l_ = rescale * l_ + p;
    m_ = m;
  }

  /// Takes in the keys of `other`, which are others than its own: a.merge(b) and b.merge(a) have
  /// the same bits.
  ///
  /// **Errors** shape_error if the d_v differ.
  void merge(const attention_state& other) {
    check_length("o of other", other.o_.size());
    if (other.l_ == 0) return;
    const bool is_high = m_ >= other.m_;
    const attention_state &high = is_high ? *this : other, &low = is_high ? other : *this;
    // l = 0 only in the empty set: its m of −inf gives w = 0.
    const T w = std::exp(low.m_ - high.m_);
    detail::add_scaled_row<Arch, T, T>({high.o_.data(), 1}, {low.o_.data(), 1}, w, T(1),
                                       {o_.data(), 1}, static_cast<index_t>(o_.size()));
    l_ = high.l_ + w * low.l_;
    m_ = high.m_;
  }

  [[nodiscard]] T m() const noexcept { return m_; }
  [[nodiscard]] T l() const noexcept { return l_; }
  [[nodiscard]] std::span<const T> o() const noexcept { return o_; }

  /// ln Σ_j exp(s_j); −inf for the empty set.
  [[nodiscard]] T lse() const noexcept { return l_ == 0 ? empty_maximum : m_ + std::log(l_); }

  /// The attention itself. @param out [d_v] = o / l, and 0 for the empty set; may be o's memory.
  ///
  /// **Errors** shape_error if out has not d_v elements.
  void write(std::span<T> out) const {
    check_length("out", out.size());
    for (std::size_t c = 0; c < o_.size(); ++c) out[c] = l_ == 0 ? T(0) : o_[c] / l_;
  }

 private:
  static constexpr T empty_maximum = -std::numeric_limits<T>::infinity();

  void check_length(std::string_view argument, std::size_t n) const {
    if (n == o_.size()) return;
    detail::raise<shape_error>("attention_state: " + std::string(argument) + " has " +
                               std::to_string(n) + " elements, expected " +
                               std::to_string(o_.size()) + " (d_v)");
  }

  T m_ = empty_maximum;
  T l_ = 0;
  std::span<T> o_;
};

namespace detail {

template <class T, class S>
void check_merge(const tensor_view<const T>& out_a, const tensor_view<const S>& lse_a,
                 const tensor_view<const T>& out_b, const tensor_view<const S>& lse_b,
                 const tensor_view<T>& out, const tensor_view<S>& lse) {
  constexpr std::string_view function = "merge_attention";
  const auto check = [&](std::string_view argument, const auto& x, access mode, bool is_lse) {
    check_view(function, argument, x, mode);
    check_extent(function, argument, x, 0, out_a.extent(0), "batch of out_a");
    check_extent(function, argument, x, 1, out_a.extent(1), "heads of out_a");
    check_extent(function, argument, x, 2, out_a.extent(2), "n_q of out_a");
    if (is_lse)
      check_extent(function, argument, x, 3, 1, "one lse per row");
    else
      check_extent(function, argument, x, 3, out_a.extent(3), "d_v of out_a");
  };
  check("out_a", out_a, access::read, false);
  check("lse_a", lse_a, access::read, true);
  check("out_b", out_b, access::read, false);
  check("lse_b", lse_b, access::read, true);
  check("out", out, access::write, false);
  check("lse", lse, access::write, true);
  check_same_or_disjoint(function, "out", out, "out_a", out_a);
  check_same_or_disjoint(function, "out", out, "out_b", out_b);
  check_same_or_disjoint(function, "lse", lse, "lse_a", lse_a);
  check_same_or_disjoint(function, "lse", lse, "lse_b", lse_b);
  check_disjoint(function, "out", out, "lse_a", lse_a);
  check_disjoint(function, "out", out, "lse_b", lse_b);
  check_disjoint(function, "lse", lse, "out_a", out_a);
  check_disjoint(function, "lse", lse, "out_b", out_b);
  check_disjoint(function, "lse", lse, "out", out);
}

}  // namespace detail

/// Joins the attention over two disjoint sets of keys into the attention over both.
///
///     lse = ln(e^lse_a + e^lse_b)     out = e^(lse_a − lse) out_a + e^(lse_b − lse) out_b
///
/// @param out_a, out_b  [B, H, n_q, d_v]
/// @param lse_a, lse_b  [B, H, n_q, 1]: float, for double tensors double
/// @param out           [B, H, n_q, d_v]: out_a or out_b itself, or memory apart from the inputs
/// @param lse           [B, H, n_q, 1]: lse_a or lse_b itself, or memory apart from the inputs
///
/// **Numerics** |Δout| ≤ 2 eps · max(|out_a|, |out_b|), |Δlse| ≤ eps · (1 + |lse|); half types
/// round once more. Commutative bit for bit. A row that saw no key is (0, −inf): merging with it
/// keeps the other bit for bit, two of them give (0, −inf). An lse of +inf or NaN makes its row
/// NaN.
///
/// **Errors** shape_error, before anything is written: shapes that differ, an output that overlaps
/// an input in part.
///
/// **Cost** B·H·n_q·(2 transcendental functions + 3 d_v flops), each element read and written once.
///
/// **References** Dao, "FlashAttention-2", 2023, section 3.1 (the same algebra over blocks).
///
/// **Example** examples/attention_state.cpp
template <viewable OutA, viewable LseA, viewable OutB, viewable LseB, class Out, class Lse,
          class Arch = simd::default_arch>
requires viewable<Out> && viewable<Lse>
void merge_attention(const OutA& out_a, const LseA& lse_a, const OutB& out_b, const LseB& lse_b,
                     Out&& out, Lse&& lse, context& ctx = default_context()) {
  using T = element_t<Out>;
  using S = element_t<Lse>;
  static_assert(!std::is_const_v<T> && !std::is_const_v<S>, "out and lse are written to");
  static_assert(std::is_same_v<std::remove_const_t<element_t<const OutA&>>, T> &&
                    std::is_same_v<std::remove_const_t<element_t<const OutB&>>, T>,
                "out_a, out_b and out have one element type");
  static_assert(std::is_same_v<S, simd::compute_t<T>> &&
                    std::is_same_v<std::remove_const_t<element_t<const LseA&>>, S> &&
                    std::is_same_v<std::remove_const_t<element_t<const LseB&>>, S>,
                "an lse is float, and double for double tensors");
  const tensor_view<const T> oa = view(out_a), ob = view(out_b);
  const tensor_view<const S> la = view(lse_a), lb = view(lse_b);
  const tensor_view<T> o = view(std::forward<Out>(out));
  const tensor_view<S> l = view(std::forward<Lse>(lse));
  detail::check_merge(oa, la, ob, lb, o, l);
  detail::merge_attention_kernel<Arch>(oa, la, ob, lb, o, l, ctx);
}

}  // namespace attn
