// SPDX-License-Identifier: MIT
#include <algorithm>
#include <memory>

#include <attn/smyrf_attention.hpp>

#include "support/method.hpp"

namespace attn::bench {

namespace {

// Clusters of at most so many keys.
[[nodiscard]] index_t clusters_of(const problem_shape& s, const smyrf_size& size) {
  return (s.n_kv + size.keys - 1) / size.keys;
}

[[nodiscard]] smyrf_options options_for(const problem_shape& s, smyrf_clustering clustering,
                                        const smyrf_size& size) {
  // A causal mask may leave a row with no key but its own.
  return {.clusters = clusters_of(s, size),
          .rounds = size.rounds,
          .attend_self = s.causal && s.n_q == s.n_kv,
          .clustering = clustering};
}

}  // namespace

template <class T>
method<T> smyrf_method(std::string name, smyrf_clustering clustering, const smyrf_size& size) {
  return {name,
          clustering == smyrf_clustering::ranks
              ? "attn::smyrf_attention: rounds x keys per cluster, clusters by ranks of a hash"
              : "attn::smyrf_attention: rounds x keys per cluster, clusters by bisection",
          [=](const problem<T>& p, tensor_view<T> out, int threads) -> std::function<void()> {
            return [&p, out, options = options_for(p.shape, clustering, size),
                    clusters = std::make_shared<smyrf_clusters>(),
                    ctx = std::make_shared<context>(threads)] {
              clusters->assign(p.q(), p.k(), options, *ctx);
              if (p.shape.causal)
                smyrf_attention(p.q(), p.k(), p.v(), out, *clusters, p.shape.rule(), *ctx);
              else
                smyrf_attention(p.q(), p.k(), p.v(), out, *clusters, no_mask{}, *ctx);
            };
          },
          // Under a mask: what is expected if it takes as much of the clusters as of the whole.
          [size](const problem_shape& s) {
            const index_t n = clusters_of(s, size);
            const auto of = [n](index_t length, index_t c) {
              return static_cast<double>(length * (c + 1) / n - length * c / n);
            };
            double pairs = 0;
            for (index_t c = 0; c < n; ++c) pairs += of(s.n_q, c) * of(s.n_kv, c);
            const double all = static_cast<double>(s.n_q) * static_cast<double>(s.n_kv);
            return s.flops() * pairs / all * static_cast<double>(size.rounds);
          },
          [=](const problem<T>& p, const oracle& reference) {
            return captured_by(p, reference, [&](const auto& out, const auto& lse) {
              smyrf_options options = options_for(p.shape, clustering, size);
              options.duplicates = smyrf_duplicates::removed;
              if (p.shape.causal)
                smyrf_attention(p.q(), p.k(), p.v(), out, lse, options, p.shape.rule());
              else
                smyrf_attention(p.q(), p.k(), p.v(), out, lse, options);
            });
          },
          [size](const problem_shape& s) -> std::string {
            if (size.keys > (s.n_kv - 1) / size.rounds) return "as many scores as dense attention";
            return clusters_of(s, size) > s.n_q ? "there are more clusters than queries" : "";
          }};
}

template method<float> smyrf_method(std::string, smyrf_clustering, const smyrf_size&);
template method<double> smyrf_method(std::string, smyrf_clustering, const smyrf_size&);
template method<Eigen::half> smyrf_method(std::string, smyrf_clustering, const smyrf_size&);
template method<Eigen::bfloat16> smyrf_method(std::string, smyrf_clustering, const smyrf_size&);

}  // namespace attn::bench
