// SPDX-License-Identifier: MIT
//
// What attention does with its keys: how flat its rows are and which keys draw them.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdio>
#include <string>
#include <vector>

#include <attn/attention_weights.hpp>
#include <attn/context.hpp>
#include <attn/dense_options.hpp>
#include <attn/detail/diagnostics_kernel.hpp>
#include <attn/eigen.hpp>
#include <attn/score_rule.hpp>
#include <attn/view.hpp>

namespace attn {

/// The weights of one head in a few numbers. Rows without a key and rows that are NaN are counted
/// and left out of everything else; a mean over nothing is NaN.
struct head_diagnostics {
  index_t batch = 0, head = 0;
  index_t n_rows = 0;        ///< rows that the numbers below are about
  index_t n_empty_rows = 0;  ///< rows that may attend to no key
  index_t n_nan_rows = 0;
  index_t n_pairs = 0;  ///< (query, key) with the key allowed

  double mean_entropy = 0;   ///< −Σ_j p_j ln p_j in nats, p = weights of a row / their sum
  double mean_flatness = 0;  ///< entropy / ln(allowed keys): 1 is the plain mean, rows of >= 2 keys
  double mean_largest_weight = 0;  ///< of a row
  double largest_weight = 0;       ///< of all rows
  double mean_sink_weight = 0;     ///< share of a row that its sink takes

  /// Pearson's correlation of the mass a key receives with its norm ‖k_j‖, over the keys that some
  /// row may attend to. Near 1 it is length and not direction that draws attention.
  double mass_norm_correlation = 0;

  double share_below_0_01 = 0;     ///< of the pairs: weight < 0.01
  double share_below_uniform = 0;  ///< of the pairs: weight < 1/n_kv
};

/// What diagnose_attention found: per head, over all heads, per row and per key.
struct attention_diagnostics {
  index_t n_batch = 0, n_heads = 0, n_q = 0, n_kv = 0;

  std::vector<head_diagnostics> heads;  ///< [B, H]
  /// All heads: means over their rows and pairs; the correlation is the mean of the heads' that are
  /// defined. batch and head are −1.
  head_diagnostics total;

  std::vector<double> row_entropy;         ///< [B, H, n_q] NaN for rows without a key
  std::vector<double> row_flatness;        ///< [B, H, n_q] NaN for rows of fewer than 2 keys
  std::vector<double> row_largest_weight;  ///< [B, H, n_q]
  std::vector<double> key_mass;            ///< [B, H, n_kv] Σ_i weight_ij

  [[nodiscard]] const head_diagnostics& operator()(index_t b, index_t h) const noexcept {
    return heads[static_cast<std::size_t>(b * n_heads + h)];
  }
  /// One of the vectors above as [B, H, length, 1].
  [[nodiscard]] tensor_view<const double> per_row(const std::vector<double>& x) const noexcept {
    return {x.data(), n_batch, n_heads, n_q, 1};
  }
  [[nodiscard]] tensor_view<const double> per_key(const std::vector<double>& x) const noexcept {
    return {x.data(), n_batch, n_heads, n_kv, 1};
  }
};

namespace detail {

template <class Arch>
[[nodiscard]] head_diagnostics summarise(const head_sums& s, index_t b, index_t h) noexcept {
  const auto share = [](double sum, index_t n) { return sum / static_cast<double>(n); };
  return {
      .batch = b,
      .head = h,
      .n_rows = s.n_rows,
      .n_empty_rows = s.n_empty_rows,
      .n_nan_rows = s.n_nan_rows,
      .n_pairs = s.n_pairs,
      .mean_entropy = share(s.entropy, s.n_rows),
      .mean_flatness = share(s.flatness, s.n_flat_rows),
      .mean_largest_weight = share(s.largest_weight, s.n_rows),
      .largest_weight = s.n_rows == 0 ? share(0, 0) : s.largest_of_all,
      .mean_sink_weight = share(s.sink_weight, s.n_rows),
      .mass_norm_correlation = share(s.correlation, s.n_correlations),
      .share_below_0_01 = share(static_cast<double>(s.n_pairs - s.n_at_least_0_01), s.n_pairs),
      .share_below_uniform =
          share(static_cast<double>(s.n_pairs - s.n_at_least_uniform), s.n_pairs),
  };
}

}  // namespace detail

/// How attention spreads its weights: entropy and flatness of the rows, the largest weights, the
/// mass each key receives and whether it goes to the longest keys, the share of small weights.
///
///     p_ij = exp(s_ij − lse_i)            H_i = −Σ_j p_ij ln p_ij        (p over the keys alone)
///     flatness_i = H_i / ln |keys of i|   mass_j = Σ_i p_ij              corr_j(mass_j, ‖k_j‖)
///
/// The n_q × n_kv weights are never stored. Sparse maps (most weights below 1/n_kv) are what
/// clustered attention lives on; a correlation near 1 says that one long key draws every query.
///
/// @param q        [B, H, n_q, d_qk]
/// @param k        [B, Hkv, n_kv, d_qk]; Hkv divides H, query head h reads head h / (H / Hkv)
/// @param rule     masks and biases, composed with `&` (score_rule.hpp)
/// @param options  scale, softcap, sinks as in dense_attention; precision is not looked at
/// @param ctx      threads (heads are shared out among them) and reused scratch (context.hpp)
///
/// **Numerics** weights as in attention_weights; sums over rows in double, over at most 128 keys in
/// the type of the weights. The same bits for any number of threads. NaN rows and rows without a
/// key are counted and otherwise left out.
/// **Errors** shape_error, option_error.
/// **Cost** 2 n_q n_kv d_qk flops per head; scratch O(n_kv) per thread, results O(n_q + n_kv) per
/// head.
/// **References** Daras et al., "SMYRF", 2020 (the two shares: 98.1% and 86.1% in BigGAN).
/// **Example** examples/diagnostics.cpp
template <viewable Q, viewable K, score_rule R = no_mask, class Arch = simd::default_arch>
[[nodiscard]] attention_diagnostics diagnose_attention(const Q& q, const K& k, const R& rule = {},
                                                       const dense_options& options = {},
                                                       context& ctx = default_context()) {
  const auto qs = view(q);
  const auto ks = view(k);
  using T = simd::compute_t<element_t<const Q&>>;
  const auto c = detail::make_weights_problem<Arch>("diagnose_attention", qs, ks, rule, options);

  const index_t n_all = c.n_batch * c.n_heads;
  const auto numbers = [&](index_t n) { return std::vector<double>(static_cast<std::size_t>(n)); };
  attention_diagnostics result{
      .n_batch = c.n_batch,
      .n_heads = c.n_heads,
      .n_q = c.n_q,
      .n_kv = c.n_kv,
      .heads = std::vector<head_diagnostics>(static_cast<std::size_t>(n_all)),
      .total = {},
      .row_entropy = numbers(n_all * c.n_q),
      .row_flatness = numbers(n_all * c.n_q),
      .row_largest_weight = numbers(n_all * c.n_q),
      .key_mass = numbers(n_all * c.n_kv),
  };
  std::vector<detail::head_sums> sums(static_cast<std::size_t>(n_all));

  using worker = detail::weights_worker<T, Arch, R>;
  detail::scratch_carver counter;
  (void)detail::head_scratch<T>(c, counter);
  ctx.run(n_all, 1, counter.used() + worker::scratch_bytes(c, rule),
          [&](std::byte* scratch, detail::work_queue& queue) noexcept {
            const simd::flush_subnormals mode;
            detail::scratch_carver memory(scratch);
            const detail::head_scratch<T> own(c, memory);
            worker rows(c, rule, memory);
            for (index_t head, last; queue.next(head, last);) {
              const detail::head_details details{
                  result.row_entropy.data() + head * c.n_q,
                  result.row_flatness.data() + head * c.n_q,
                  result.row_largest_weight.data() + head * c.n_q,
                  result.key_mass.data() + head * c.n_kv,
              };
              sums[static_cast<std::size_t>(head)] =
                  detail::diagnose_head(c, head / c.n_heads, head % c.n_heads, rows, own, details);
            }
          });

  detail::head_sums total;
  for (index_t head = 0; head < n_all; ++head) {
    const auto at = static_cast<std::size_t>(head);
    detail::add_sums<Arch>(total, sums[at]);
    result.heads[at] = detail::summarise<Arch>(sums[at], head / c.n_heads, head % c.n_heads);
  }
  result.total = detail::summarise<Arch>(total, -1, -1);
  return result;
}

/// The numbers of every head and of all of them as a table to print, one line each.
[[nodiscard]] inline std::string to_table(const attention_diagnostics& d) {
  std::string table =
      "batch head   rows  entropy flatness  largest corr(mass, |k|)  < 0.01   < 1/n\n";
  const auto number = [&](double x, int width, int digits) {
    char text[32];
    std::snprintf(text, sizeof text, "%*.*f", width, digits, x);
    table += std::isnan(x) ? std::string(static_cast<std::size_t>(width - 1), ' ') + '-' : text;
  };
  const auto line = [&](const head_diagnostics& x) {
    char text[32] = " all heads";
    if (x.head >= 0) std::snprintf(text, sizeof text, "%5td %4td", x.batch, x.head);
    table += text;
    std::snprintf(text, sizeof text, "%7td", x.n_rows);
    table += text;
    number(x.mean_entropy, 9, 4);
    number(x.mean_flatness, 9, 4);
    number(x.mean_largest_weight, 9, 4);
    number(x.mass_norm_correlation, 16, 3);
    number(x.share_below_0_01, 8, 4);
    number(x.share_below_uniform, 8, 4);
    table += '\n';
  };
  for (const head_diagnostics& head : d.heads) line(head);
  line(d.total);
  return table;
}

}  // namespace attn
