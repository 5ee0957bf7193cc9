// SPDX-License-Identifier: MIT
#include "reference/dense_attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace reference {
namespace {

struct shape {
  index_t n_batch, n_heads, n_kv_heads, n_q, n_kv, d_qk, d_v;

  shape(const tensor& q, const tensor& k, const tensor& v)
      : n_batch(q.extent(0)), n_heads(q.extent(1)), n_kv_heads(k.extent(1)), n_q(q.extent(2)),
        n_kv(k.extent(2)), d_qk(q.extent(3)), d_v(v.extent(3)) {}

  index_t kv_head(index_t h) const { return h / (n_heads / n_kv_heads); }
};

/// A sum that carries what rounding took from it along (Neumaier): where the kernel under test is
/// double too, the sums of the oracle must be better than its own.
class compensated_sum {
 public:
  void add(double x) {
    const double sum = sum_ + x;
    rest_ += std::abs(sum_) >= std::abs(x) ? (sum_ - sum) + x : (x - sum) + sum_;
    sum_ = sum;
  }
  /// Not for infinities: their rest is NaN, the plain sum is what they give.
  double value() const { return std::isfinite(sum_) ? sum_ + rest_ : sum_; }

 private:
  double sum_ = 0, rest_ = 0;
};

double scale_of(const dense_options& options, index_t d_qk) {
  return options.scale.value_or(1 / std::sqrt(static_cast<double>(d_qk)));
}

double softcapped(double s, double cap) { return cap == 0 ? s : cap * std::tanh(s / cap); }

double softcap_slope(double s, double cap) {
  if (cap == 0) return 1;
  const double t = std::tanh(s / cap);
  return 1 - t * t;
}

}  // namespace

dense_result dense_attention(const tensor& q, const tensor& k, const tensor& v,
                             const score_rule& rule, const dense_options& options) {
  const shape n(q, k, v);
  const double scale = scale_of(options, n.d_qk);
  dense_result r{tensor({n.n_batch, n.n_heads, n.n_q, n.d_v}),
                 tensor({n.n_batch, n.n_heads, n.n_q, 1}, forbidden),
                 tensor({n.n_batch, n.n_heads, n.n_q, n.n_kv}),
                 tensor({n.n_batch, n.n_heads, n.n_q, 1}),
                 tensor({n.n_batch, n.n_heads, n.n_q, 1})};

  for (index_t b = 0; b < n.n_batch; ++b) {
    for (index_t h = 0; h < n.n_heads; ++h) {
      const index_t g = n.kv_head(h);
      for (index_t i = 0; i < n.n_q; ++i) {
        // 1. Scores s [n_kv], kept in the row of weights, and their largest.
        double m = forbidden;
        for (index_t j = 0; j < n.n_kv; ++j) {
          compensated_sum dot;
          double absolute_dot = 0;
          for (index_t c = 0; c < n.d_qk; ++c) {
            const double product = q(b, h, i, c) * k(b, g, j, c);
            dot.add(product);
            absolute_dot += std::abs(product);
          }
          const double raw = softcapped(scale * dot.value(), options.softcap);
          const double s = rule.apply(raw, b, h, i, j);
          r.weights(b, h, i, j) = s;
          if (s == forbidden) continue;
          m = std::isnan(s) || std::isnan(m) ? std::nan("") : std::max(m, s);
          double& bound = r.score_bound(b, h, i, 0);
          bound = std::max(bound,
                           std::abs(scale) * absolute_dot / std::sqrt(static_cast<double>(n.d_qk)) +
                               std::abs(s - raw));
        }

        // 2. The sink takes part in the maximum and in the sum, and has no value.
        const bool has_sink = !options.sinks.empty();
        const double sink = has_sink ? options.sinks[static_cast<std::size_t>(h)] : forbidden;
        if (!std::isnan(m)) m = std::max(m, sink);
        if (m == forbidden) {  // nothing to attend to: out 0, lse −inf, weights 0
          for (index_t j = 0; j < n.n_kv; ++j) r.weights(b, h, i, j) = 0;
          continue;
        }

        // 3. lse = m + ln Σ_j exp(s_j − m).
        compensated_sum weights;
        if (has_sink) weights.add(std::exp(sink - m));
        for (index_t j = 0; j < n.n_kv; ++j) {
          const double s = r.weights(b, h, i, j);
          if (s != forbidden) weights.add(std::exp(s - m));
        }
        const double sum = weights.value();
        r.lse(b, h, i, 0) = m + std::log(sum);

        // 4. p_j = exp(s_j − m) / Σ and o = Σ_j p_j v_j; forbidden values are never touched.
        std::vector<compensated_sum> out(static_cast<std::size_t>(n.d_v));
        for (index_t j = 0; j < n.n_kv; ++j) {
          double& p = r.weights(b, h, i, j);
          if (p == forbidden) {
            p = 0;
            continue;
          }
          p = std::exp(p - m) / sum;
          for (index_t c = 0; c < n.d_v; ++c) {
            out[static_cast<std::size_t>(c)].add(p * v(b, g, j, c));
            double& bound = r.value_bound(b, h, i, 0);
            bound = std::max(bound, std::abs(v(b, g, j, c)));
          }
        }
        for (index_t c = 0; c < n.d_v; ++c)
          r.out(b, h, i, c) = out[static_cast<std::size_t>(c)].value();
      }
    }
  }
  return r;
}

dense_gradients dense_attention_backward(const tensor& q, const tensor& k, const tensor& v,
                                         const tensor& d_out, const score_rule& rule,
                                         const dense_options& options) {
  const shape n(q, k, v);
  const double scale = scale_of(options, n.d_qk);
  const dense_result forward = dense_attention(q, k, v, rule, options);
  dense_gradients g{tensor(q.extents()), tensor(k.extents()), tensor(v.extents())};

  for (index_t b = 0; b < n.n_batch; ++b) {
    for (index_t h = 0; h < n.n_heads; ++h) {
      const index_t kv = n.kv_head(h);
      for (index_t i = 0; i < n.n_q; ++i) {
        // 1. D = d_out · out, which is Σ_j p_j dp_j (a sink adds nothing: its value is 0).
        double d = 0;
        for (index_t c = 0; c < n.d_v; ++c) d += d_out(b, h, i, c) * forward.out(b, h, i, c);

        for (index_t j = 0; j < n.n_kv; ++j) {
          double dot = 0;
          for (index_t c = 0; c < n.d_qk; ++c) dot += q(b, h, i, c) * k(b, kv, j, c);
          const double raw = softcapped(scale * dot, options.softcap);
          if (rule.apply(raw, b, h, i, j) == forbidden) continue;

          // 2. dv_j += p_j d_out and dp_j = d_out · v_j.
          const double p = forward.weights(b, h, i, j);
          double dp = 0;
          for (index_t c = 0; c < n.d_v; ++c) {
            g.d_v(b, kv, j, c) += p * d_out(b, h, i, c);
            dp += d_out(b, h, i, c) * v(b, kv, j, c);
          }

          // 3. ds_j = p_j (dp_j − D), carried back through the rule, the softcap and the scale.
          const double ds = p * (dp - d) * rule.slope(raw, b, h, i, j) *
                            softcap_slope(scale * dot, options.softcap) * scale;
          for (index_t c = 0; c < n.d_qk; ++c) {
            g.d_q(b, h, i, c) += ds * k(b, kv, j, c);
            g.d_k(b, kv, j, c) += ds * q(b, h, i, c);
          }
        }
      }
    }
  }
  return g;
}

}  // namespace reference
