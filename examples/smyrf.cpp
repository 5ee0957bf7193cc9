// SPDX-License-Identifier: MIT
//
// SMYRF: clusters of queries and keys, attention inside them, and what of the attention they catch.
#include <attn/dense_attention.hpp>
#include <attn/smyrf_attention.hpp>

#include <cmath>
#include <cstddef>
#include <cstdio>
#include <vector>

namespace {

using attn::index_t;
using attn::tensor_view;

constexpr index_t n = 1024, d = 32;

// Queries and keys of 24 topics: a token attends to those of its own topic. Counter-based normal
// numbers from lsh.hpp, the same everywhere.
std::vector<float> tokens(std::uint64_t seed) {
  std::vector<float> x(static_cast<std::size_t>(n * d));
  for (index_t i = 0; i < n; ++i) {
    const auto topic = attn::lsh_bits(seed, static_cast<std::uint64_t>(i), 0, 0) % 24;
    for (index_t c = 0; c < d; ++c) {
      const auto u = static_cast<std::uint64_t>(c);
      x[static_cast<std::size_t>(i * d + c)] =
          2 * attn::lsh_gaussian(1, topic, u) +
          attn::lsh_gaussian(seed, static_cast<std::uint64_t>(i), u);
    }
  }
  return x;
}

// |a − b| / |b| in the Euclidean norm.
double relative_error(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double x = static_cast<double>(a[i]), y = static_cast<double>(b[i]);
    difference += (x - y) * (x - y), norm += y * y;
  }
  return std::sqrt(difference / norm);
}

// The share of the softmax weights of dense attention that fall on keys a query meets: with
// duplicates removed exp(lse − dense lse), on average.
double mass_captured(const std::vector<float>& lse, const std::vector<float>& dense_lse) {
  double sum = 0;
  for (std::size_t i = 0; i < lse.size(); ++i) {
    sum += std::exp(static_cast<double>(lse[i]) - static_cast<double>(dense_lse[i]));
  }
  return sum / static_cast<double>(lse.size());
}

}  // namespace

int main() {
  const std::vector<float> q = tokens(2), k = tokens(3), v = tokens(4);
  const tensor_view<const float> Q(q.data(), 1, 1, n, d), K(k.data(), 1, 1, n, d),
      V(v.data(), 1, 1, n, d);
  const auto size = static_cast<std::size_t>(n * d);
  std::vector<float> dense(size), dense_lse(n), out(size), lse(n);
  attn::dense_attention(Q, K, V, tensor_view<float>(dense.data(), 1, 1, n, d),
                        tensor_view<float>(dense_lse.data(), 1, 1, n, 1));

  const auto show = [&](const char* what, const attn::smyrf_options& options) {
    // The plan depends on q and k alone; it may be kept for other values and for the gradients.
    const attn::smyrf_clusters clusters(Q, K, options);
    attn::smyrf_attention(Q, K, V, tensor_view<float>(out.data(), 1, 1, n, d),
                          tensor_view<float>(lse.data(), 1, 1, n, 1), clusters);
    const double scores =
        static_cast<double>(options.rounds) / static_cast<double>(options.clusters);
    std::printf("%-34s %5.1f%% of the scores, %5.1f%% of the attention, error %.3f\n", what,
                100 * scores, 100 * mass_captured(lse, dense_lse), relative_error(out, dense));
    return relative_error(out, dense);
  };
  using enum attn::smyrf_duplicates;
  using enum attn::smyrf_clustering;
  const double by_rank =
      show("ranks, 4 rounds of 32 clusters", {.clusters = 32, .rounds = 4, .duplicates = removed});
  const double halved =
      show("bisection, 2 rounds of 16",
           {.clusters = 16, .rounds = 2, .duplicates = removed, .clustering = bisection});

  // Gradients: of out and lse as the last call left them, with a plan like its own.
  const attn::smyrf_clusters clusters(
      Q, K, {.clusters = 16, .rounds = 2, .duplicates = removed, .clustering = bisection});
  std::vector<float> d_out(size, 1.0f), d_q(size), d_k(size), d_v(size);
  const auto rows = [](std::vector<float>& x) { return tensor_view<float>(x.data(), 1, 1, n, d); };
  attn::smyrf_attention_backward(Q, K, V, rows(out), tensor_view<float>(lse.data(), 1, 1, n, 1),
                                 rows(d_out), clusters, rows(d_q), rows(d_k), rows(d_v));
  // Each query hands out a gradient of 1 per dim, in parts that are its weights.
  double handed_out = 0;
  for (const float g : d_v) handed_out += static_cast<double>(g);
  std::printf("gradients of values add up to %.1f of %td\n", handed_out, n * d);
  const bool adds_up = std::abs(handed_out - n * d) < 1e-3 * n * d;
  return halved < by_rank && adds_up ? 0 : 1;
}
