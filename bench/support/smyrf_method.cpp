// SPDX-License-Identifier: MIT
#include <algorithm>
#include <memory>
#include <string>
#include <string_view>

#include <attn/detail/smyrf_far_field.hpp>
#include <attn/smyrf_attention.hpp>

#include "support/method.hpp"

namespace attn::bench {

namespace {

// Clusters of at most so many keys.
[[nodiscard]] index_t clusters_of(const problem_shape& s, const smyrf_size& size) {
  return (s.n_kv + size.keys - 1) / size.keys;
}

[[nodiscard]] smyrf_options options_for(const problem_shape& s, smyrf_options how,
                                        const smyrf_size& size) {
  how.clusters = clusters_of(s, size), how.rounds = size.rounds;
  // A causal mask may leave a row with no key but its own.
  how.attend_self = s.causal && s.n_q == s.n_kv;
  return how;
}

// Means that a query of cluster c of n meets in a round.
[[nodiscard]] index_t means_of(const smyrf_options& how, index_t n, index_t c) {
  index_t means = 0;
  if (how.far_field == smyrf_far_field::means) {
    detail::for_far_groups(n, c, [&](index_t, index_t) { ++means; });
  }
  return means;
}

}  // namespace

template <class T>
method<T> smyrf_method(std::string name, std::string_view summary, const smyrf_options& how,
                       const smyrf_size& size) {
  return {name, summary,
          [=](const problem<T>& p, tensor_view<T> out, int threads) -> std::function<void()> {
            return [&p, out, options = options_for(p.shape, how, size),
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
          [=](const problem_shape& s) {
            const index_t n = clusters_of(s, size);
            const auto of = [n](index_t length, index_t c) {
              return static_cast<double>(length * (c + 1) / n - length * c / n);
            };
            double pairs = 0;
            for (index_t c = 0; c < n; ++c) {
              pairs += of(s.n_q, c) * (of(s.n_kv, c) + static_cast<double>(means_of(how, n, c)));
            }
            const double all = static_cast<double>(s.n_q) * static_cast<double>(s.n_kv);
            return s.flops() * pairs / all * static_cast<double>(size.rounds);
          },
          [=](const problem<T>& p, const oracle& reference) {
            return captured_by(p, reference, [&](const auto& out, const auto& lse) {
              // The same clusters, each key that a query meets once and nothing else.
              smyrf_options options = options_for(p.shape, how, size);
              options.duplicates = smyrf_duplicates::removed;
              options.far_field = smyrf_far_field::none;
              if (p.shape.causal)
                smyrf_attention(p.q(), p.k(), p.v(), out, lse, options, p.shape.rule());
              else
                smyrf_attention(p.q(), p.k(), p.v(), out, lse, options);
            });
          },
          [=](const problem_shape& s) -> std::string {
            if (s.causal && how.far_field == smyrf_far_field::means) {
              return "the means are of all positions: nothing is causal";
            }
            constexpr const char* as_many = "as many scores as dense attention";
            const index_t most = (s.n_kv - 1) / size.rounds;  // scores of a query and round
            if (size.keys > most) return as_many;
            const index_t n = clusters_of(s, size);
            if (n > s.n_q) return "there are more clusters than queries";
            return size.keys + means_of(how, n, n - 1) > most ? as_many : "";
          }};
}

template method<float> smyrf_method(std::string, std::string_view, const smyrf_options&,
                                    const smyrf_size&);
template method<double> smyrf_method(std::string, std::string_view, const smyrf_options&,
                                     const smyrf_size&);
template method<Eigen::half> smyrf_method(std::string, std::string_view, const smyrf_options&,
                                          const smyrf_size&);
template method<Eigen::bfloat16> smyrf_method(std::string, std::string_view, const smyrf_options&,
                                              const smyrf_size&);

}  // namespace attn::bench
