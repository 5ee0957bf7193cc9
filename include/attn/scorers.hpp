// SPDX-License-Identifier: MIT
//
// Scores for a soft top-k: six ways to say how much a position matters.
// The two that learn are in learned_scorers.hpp.
//
// A scorer is an aggregate of its parameters with a call operator that writes scores [B, H, n, 1].
// Those of rows take x [B, H, n, d] and share their parameters among batch and heads.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include <attn/context.hpp>
#include <attn/dense_options.hpp>
#include <attn/detail/checks.hpp>
#include <attn/detail/dense_attention_backward_checks.hpp>
#include <attn/detail/dense_attention_checks.hpp>
#include <attn/detail/power_scorer_kernel.hpp>
#include <attn/detail/scorers_kernel.hpp>
#include <attn/learned_scorers.hpp>
#include <attn/score_rule.hpp>
#include <attn/view.hpp>

namespace attn {

/// Whether the weight that a position gives to itself counts.
enum class attention_diagonal { included, excluded };

/// How much attention a key receives: the column sums of the attention weights.
///
///     score_j = mean_h Σ_i exp(s_ij − lse_i)        (i ≠ j where the diagonal is excluded)
///
/// h runs over the query heads that share a head of scores. The weights are computed again from the
/// lse of the attention, and never stored.
///
/// (The sum over keys that the paper prints is 1 for every query; PoWER-BERT sums over queries.)
/// **References** Goyal et al., "PoWER-BERT", 2020; ROUGE-1/2 34.9/13.0 in Pietruszka et al.
/// **Example** examples/scorers.cpp
struct power_scorer {
  attention_diagonal diagonal = attention_diagonal::included;
  dense_options options = {};  ///< of the attention; sinks take part through the lse

  /// @param q [B, H, n_q, d_qk], k [B, Hkv, n_kv, d_qk], lse [B, H, n_q, 1] of the attention
  /// @param scores [B, Hs, n_kv, 1], Hs divides H: 1 is the mean over all heads
  /// @param rule that of the attention; `block_mask{512} & rule` for blockwise attention
  ///
  /// **Numerics** each weight as in dense_attention_backward; sums in double, in one order. A row
  /// without keys (lse −inf) adds nothing; forbidden pairs are skipped whatever they hold.
  /// **Errors** shape_error, option_error.
  /// **Cost** 2 n_q n_kv d_qk flops per query head over the tiles that the rule leaves.
  template <viewable Q, viewable K, viewable L, viewable S, score_rule R = no_mask,
            class Arch = simd::default_arch>
  void operator()(const Q& q, const K& k, const L& lse, S&& scores, const R& rule = {},
                  context& ctx = default_context()) const {
    using T = simd::compute_t<element_t<Q>>;
    static_assert(std::is_same_v<T, simd::compute_t<element_t<K>>>,
                  "q and k: both double, or none");
    static_assert(std::is_same_v<T, std::remove_const_t<element_t<L>>>,
                  "lse is double for double tensors, else float");
    constexpr std::string_view function = "power_scorer";
    const auto qs = view(q);
    const auto ks = view(k);
    const tensor_view<const T> ls = view(lse);
    const auto out = view(scores);
    detail::check_qkv(function, qs, ks, ks);
    detail::check_rows_like(function, "lse", ls, detail::access::read, qs, "q", 1, "one per query");
    detail::check_view(function, "scores", out, detail::access::write);
    detail::check_extent(function, "scores", out, 0, qs.extent(0), "batch of q");
    detail::check_extent(function, "scores", out, 2, ks.extent(2), "length of k");
    detail::check_extent(function, "scores", out, 3, 1, "one score per key");
    const index_t n_heads = qs.extent(1), n_scores = out.extent(1);
    if (n_scores == 0 ? n_heads != 0 : n_heads % n_scores != 0) {
      detail::raise_shape(function, "scores", out.extents(),
                          "heads that divide " + std::to_string(n_heads) + " (heads of q)");
    }
    detail::check_disjoint(function, "scores", out, "q", qs);
    detail::check_disjoint(function, "scores", out, "k", ks);
    detail::check_disjoint(function, "scores", out, "lse", ls);
    detail::check_options<T>(function, options, n_heads);
    rule.check(function, attention_shape{qs.extent(0), n_heads, qs.extent(2), ks.extent(2)});

    const detail::power_problem<T> problem{
        .n_batch = qs.extent(0),
        .n_heads = n_heads,
        .n_heads_kv = ks.extent(1),
        .n_heads_scores = n_scores,
        .n_q = qs.extent(2),
        .n_kv = ks.extent(2),
        .d_qk = qs.extent(3),
        .scale = static_cast<T>(detail::scale_of(options, qs.extent(3))),
        .softcap = static_cast<T>(options.softcap),
        .without_diagonal = diagonal == attention_diagonal::excluded,
        .q = detail::make_head_source<T, Arch>(qs),
        .k = detail::make_head_source<T, Arch>(ks),
        .lse = ls,
    };
    detail::power_scores<T, Arch>(problem, rule, out, ctx);
  }
};

/// scores = channel `channel` of x.
///
/// **References** ROUGE-1/2 36.3/13.5 in Pietruszka et al.
/// **Example** examples/scorers.cpp
struct embedding_scorer {
  index_t channel = 0;

  /// @param x [B, H, n, d]  @param scores [B, H, n, 1]
  ///
  /// **Errors** option_error: channel outside 0 to d − 1. shape_error.
  template <viewable X, viewable S, class Arch = simd::default_arch>
  void operator()(const X& x, S&& scores, context& = default_context()) const {
    constexpr std::string_view function = "embedding_scorer";
    const auto xv = view(x);
    const auto out = view(scores);
    using D = std::remove_cvref_t<decltype(out(0, 0, 0, 0))>;
    detail::check_scores(function, "scores", xv, out, detail::access::write);
    if (channel < 0 || channel >= xv.extent(3)) {
      detail::raise_option(function, "channel", std::to_string(channel),
                           "0 to " + std::to_string(xv.extent(3) - 1) + " (dim of x)");
    }
    for (index_t b = 0; b < out.extent(0); ++b) {
      for (index_t h = 0; h < out.extent(1); ++h) {
        for (index_t i = 0; i < out.extent(2); ++i) {
          out(b, h, i, 0) = static_cast<D>(xv(b, h, i, channel));
        }
      }
    }
  }
};

/// Uniform numbers in [0, 1) from the seed and the position (b, h, i) alone: the same on every
/// platform, in any layout, for any n.
///
/// **References** ROUGE-1/2 32.3/11.4 in Pietruszka et al.
/// **Example** examples/scorers.cpp
struct random_scorer {
  std::uint64_t seed = 0;

  /// @param scores [B, H, n, 1]
  template <viewable S, class Arch = simd::default_arch>
  void operator()(S&& scores, context& = default_context()) const {
    const auto out = view(scores);
    using D = std::remove_cvref_t<decltype(out(0, 0, 0, 0))>;
    detail::check_view("random_scorer", "scores", out, detail::access::write);
    detail::check_extent("random_scorer", "scores", out, 3, 1, "one score per position");
    for (index_t b = 0; b < out.extent(0); ++b) {
      for (index_t h = 0; h < out.extent(1); ++h) {
        for (index_t i = 0; i < out.extent(2); ++i) {
          out(b, h, i, 0) = static_cast<D>(detail::uniform_number(seed, b, h, i));
        }
      }
    }
  }
};

/// 1 for every stride-th position, beginning with the first, 0 for the others.
///
/// With stride n / k that picks k positions of n. (The paper says "every k-th", which for k = 512
/// of 2048 would pick 4.)
/// **References** ROUGE-1/2 36.2/13.3 in Pietruszka et al.
/// **Example** examples/scorers.cpp
struct index_scorer {
  index_t stride = 1;

  /// @param scores [B, H, n, 1]
  ///
  /// **Errors** option_error: stride below 1.
  template <viewable S, class Arch = simd::default_arch>
  void operator()(S&& scores, context& = default_context()) const {
    constexpr std::string_view function = "index_scorer";
    const auto out = view(scores);
    using D = std::remove_cvref_t<decltype(out(0, 0, 0, 0))>;
    detail::check_view(function, "scores", out, detail::access::write);
    detail::check_extent(function, "scores", out, 3, 1, "one score per position");
    if (stride < 1) detail::raise_option(function, "stride", std::to_string(stride), "at least 1");
    for (index_t b = 0; b < out.extent(0); ++b) {
      for (index_t h = 0; h < out.extent(1); ++h) {
        for (index_t i = 0; i < out.extent(2); ++i) {
          out(b, h, i, 0) = static_cast<D>(static_cast<float>(i % stride == 0));
        }
      }
    }
  }
};

/// scores = sigmoid(raw): into (0, 1), where the exponential boost of a tournament wants them. In
/// place where both are the same view.
///
/// @param raw [B, H, n, 1]  @param scores [B, H, n, 1]
///
/// **Numerics** in double; no overflow. The sigmoid of −inf is 0: mask by lengths, or after it.
/// **Errors** shape_error: shapes that do not fit, memory that is shared in another way.
/// **Example** examples/transpooler.cpp
template <viewable R, viewable S, class Arch = simd::default_arch>
void squash_scores(const R& raw, S&& scores) {
  constexpr std::string_view function = "squash_scores";
  const auto in = view(raw);
  const auto out = view(scores);
  using D = std::remove_cvref_t<decltype(out(0, 0, 0, 0))>;
  detail::check_view(function, "raw", in, detail::access::read);
  detail::check_rows_like(function, "scores", out, detail::access::write, in, "raw", in.extent(3),
                          "dim of raw");
  detail::check_same_or_disjoint(function, "scores", out, "raw", in);
  for (index_t b = 0; b < out.extent(0); ++b) {
    for (index_t h = 0; h < out.extent(1); ++h) {
      for (index_t i = 0; i < out.extent(2); ++i) {
        for (index_t c = 0; c < out.extent(3); ++c) {
          const double s = 1 / (1 + std::exp(-static_cast<double>(in(b, h, i, c))));
          out(b, h, i, c) = static_cast<D>(s);
        }
      }
    }
  }
}

/// d_raw = d_scores · scores (1 − scores), from the squashed scores. In place where d_raw is
/// d_scores or scores; shape_error where memory is shared in another way.
template <viewable S, viewable DS, viewable DR, class Arch = simd::default_arch>
void squash_scores_backward(const S& scores, const DS& d_scores, DR&& d_raw) {
  constexpr std::string_view function = "squash_scores_backward";
  const auto s = view(scores);
  const auto g = view(d_scores);
  const auto out = view(d_raw);
  using D = std::remove_cvref_t<decltype(out(0, 0, 0, 0))>;
  detail::check_view(function, "scores", s, detail::access::read);
  detail::check_rows_like(function, "d_scores", g, detail::access::read, s, "scores", s.extent(3),
                          "dim of scores");
  detail::check_rows_like(function, "d_raw", out, detail::access::write, s, "scores", s.extent(3),
                          "dim of scores");
  detail::check_same_or_disjoint(function, "d_raw", out, "scores", s);
  detail::check_same_or_disjoint(function, "d_raw", out, "d_scores", g);
  for (index_t b = 0; b < out.extent(0); ++b) {
    for (index_t h = 0; h < out.extent(1); ++h) {
      for (index_t i = 0; i < out.extent(2); ++i) {
        for (index_t c = 0; c < out.extent(3); ++c) {
          const auto y = static_cast<double>(s(b, h, i, c));
          out(b, h, i, c) = static_cast<D>(static_cast<double>(g(b, h, i, c)) * y * (1 - y));
        }
      }
    }
  }
}

}  // namespace attn
