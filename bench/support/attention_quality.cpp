// SPDX-License-Identifier: MIT
#include "attention_quality.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <utility>

#include <Eigen/Dense>

#include <attn/attention_weights.hpp>
#include <attn/dense_attention.hpp>
#include <attn/smyrf_attention.hpp>

#include "normal_noise.hpp"

namespace attn::bench {
namespace {

tensor_view<float> rows(const problem<float>& p, std::vector<float>& x, index_t d) {
  return bhld(x.data(), 1, p.shape.n_heads, p.shape.n_q, d);
}

attention_quality compare(const dense_results& dense, const std::vector<float>& out, double mass) {
  double difference = 0, norm = 0, cosine = 0;
  const auto d = static_cast<std::size_t>(dense.p.shape.d_v);
  const std::size_t n_rows = out.size() / d;
  for (std::size_t r = 0; r < n_rows; ++r) {
    double xy = 0, xx = 0, yy = 0;
    for (std::size_t c = r * d; c < (r + 1) * d; ++c) {
      const double x = static_cast<double>(out[c]), y = static_cast<double>(dense.out[c]);
      xy += x * y, xx += x * x, yy += y * y;
      difference += (x - y) * (x - y), norm += y * y;
    }
    cosine += xx > 0 && yy > 0 ? xy / std::sqrt(xx * yy) : 0;
  }
  return {mass, std::sqrt(difference / norm), cosine / static_cast<double>(n_rows)};
}

// Attention in the clusters `c`. The mass is that of the union of a query's clusters, which the
// same clusters with duplicates removed and no far field tell: `near`.
attention_quality attend(const dense_results& dense, const smyrf_clusters& c,
                         const smyrf_clusters& near) {
  const problem<float>& p = dense.p;
  std::vector<float> out(dense.out.size()), lse(dense.lse.size());
  smyrf_attention(p.q(), p.k(), p.v(), rows(p, out, p.shape.d_v), rows(p, lse, 1), near);
  double mass = 0;
  for (std::size_t i = 0; i < lse.size(); ++i) {
    mass += std::exp(static_cast<double>(lse[i]) - static_cast<double>(dense.lse[i]));
  }
  if (&c != &near) smyrf_attention(p.q(), p.k(), p.v(), rows(p, out, p.shape.d_v), c);
  return compare(dense, out, mass / static_cast<double>(lse.size()));
}

// Clusters of other queries and keys than those that attend: `q` and `k` as for smyrf_clusters.
attention_quality attend_as(const dense_results& dense, const tensor_view<const float>& q,
                            const tensor_view<const float>& k, smyrf_options options) {
  options.seed = 1;
  smyrf_options plain = options;
  plain.duplicates = smyrf_duplicates::removed, plain.far_field = smyrf_far_field::none;
  const smyrf_clusters near(q, k, plain);
  if (options.far_field == smyrf_far_field::none && options.duplicates == plain.duplicates) {
    return attend(dense, near, near);
  }
  return attend(dense, smyrf_clusters(q, k, options), near);
}

using run_function = std::function<attention_quality(const dense_results&, index_t, index_t)>;

run_function with(smyrf_options options) {
  return [=](const dense_results& dense, index_t clusters, index_t rounds) mutable {
    options.clusters = clusters, options.rounds = rounds;
    return attend_as(dense, dense.p.q(), dense.p.k(), options);
  };
}

// Balanced clusters that know nothing of q and k: those of noise.
attention_quality random_clusters(const dense_results& dense, index_t clusters, index_t rounds) {
  problem_shape s = dense.p.shape;
  s.d_qk = s.d_v = 16;
  const problem<float> noise = random_problem<float>(s, 9);
  return attend_as(dense, noise.q(), noise.k(),
                   {.clusters = clusters,
                    .rounds = rounds,
                    .duplicates = smyrf_duplicates::removed,
                    .transform = no_transform{}});
}

using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// The keys of a head, and those that `change` makes of them.
template <class Change>
problem<float> with_heads(const dense_results& dense, const Change& change) {
  problem<float> p = dense.p;
  const problem_shape& s = p.shape;
  for (index_t h = 0; h < s.n_heads; ++h) {
    change(Eigen::Map<matrix>(&p.q_elements[static_cast<std::size_t>(h * s.n_q * s.d_qk)], s.n_q,
                              s.d_qk),
           Eigen::Map<matrix>(&p.k_elements[static_cast<std::size_t>(h * s.n_kv * s.d_qk)], s.n_kv,
                              s.d_qk));
  }
  return p;
}

// SMYRF of keys less their mean: the weights do not change, the norms do.
attention_quality centred_keys(const dense_results& dense, index_t clusters, index_t rounds) {
  const problem<float> p = with_heads(dense, [](auto, auto k) {
    const Eigen::RowVectorXf mean = k.colwise().mean();
    k.rowwise() -= mean;
  });
  return attend_as(
      dense, p.q(), p.k(),
      {.clusters = clusters, .rounds = rounds, .duplicates = smyrf_duplicates::removed});
}

// Ranks by directions a ~ N(0, covariance of the keys): a·q = g·(Lᵀq) with g ~ N(0, I).
attention_quality spread_directions(const dense_results& dense, index_t clusters, index_t rounds) {
  const problem<float> p = with_heads(dense, [](auto q, auto k) {
    const Eigen::RowVectorXf mean = k.colwise().mean();
    k.rowwise() -= mean;
    const Eigen::MatrixXf covariance = k.transpose() * k / static_cast<float>(k.rows());
    const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXf> eigen(covariance);
    const Eigen::MatrixXf root =
        eigen.eigenvectors() * eigen.eigenvalues().cwiseMax(0).cwiseSqrt().asDiagonal();
    q = (q * root).eval();
    k = (k * root).eval();
  });
  return attend_as(dense, p.q(), p.k(),
                   {.clusters = clusters,
                    .rounds = rounds,
                    .duplicates = smyrf_duplicates::removed,
                    .transform = no_transform{}});
}

// The keys with the largest weights of each query.
attention_quality best_keys(const dense_results& dense, index_t clusters, index_t rounds) {
  const problem<float>& p = dense.p;
  const problem_shape& s = p.shape;
  const index_t kept = std::max<index_t>(1, s.n_kv * rounds / clusters);
  std::vector<float> out(dense.out.size());
  std::vector<index_t> order(static_cast<std::size_t>(s.n_kv));
  double mass = 0;
  for (index_t h = 0; h < s.n_heads; ++h) {
    matrix weights(s.n_q, s.n_kv);
    const auto head = [&](const auto& x) {
      return tensor_view<const float>(&x(0, h, 0, 0), 1, 1, x.extent(2), x.extent(3));
    };
    attention_weights(head(p.q()), head(p.k()), weights);
    for (index_t i = 0; i < s.n_q; ++i) {
      std::iota(order.begin(), order.end(), index_t{0});
      std::nth_element(order.begin(), order.begin() + kept - 1, order.end(),
                       [&](index_t a, index_t b) { return weights(i, a) > weights(i, b); });
      double sum = 0;
      Eigen::VectorXd row = Eigen::VectorXd::Zero(s.d_v);
      for (index_t r = 0; r < kept; ++r) {
        const index_t j = order[static_cast<std::size_t>(r)];
        const double w = static_cast<double>(weights(i, j));
        sum += w;
        for (index_t c = 0; c < s.d_v; ++c) row(c) += w * static_cast<double>(p.v()(0, h, j, c));
      }
      mass += sum;
      const index_t at = (h * s.n_q + i) * s.d_v;
      for (index_t c = 0; c < s.d_v; ++c) {
        out[static_cast<std::size_t>(at + c)] = static_cast<float>(row(c) / sum);
      }
    }
  }
  return compare(dense, out, mass / static_cast<double>(s.n_heads * s.n_q));
}

}  // namespace

dense_results::dense_results(problem<float> x)
    : p(std::move(x)), out(static_cast<std::size_t>(p.shape.n_heads * p.shape.n_q * p.shape.d_v)),
      lse(static_cast<std::size_t>(p.shape.n_heads * p.shape.n_q)) {
  dense_attention(p.q(), p.k(), p.v(), rows(p, out, p.shape.d_v), rows(p, lse, 1));
}

std::vector<sparse_way> sparse_ways() {
  using enum smyrf_clustering;
  using enum sparse_way::needs;
  constexpr auto removed = smyrf_duplicates::removed;
  constexpr auto far = smyrf_far_field::means;
  const auto levels = [](index_t clusters) { return std::log2(static_cast<double>(clusters)); };
  const auto hashed = [&](lsh_transform transform, lsh_hash hash = random_projection{}) {
    return with({.duplicates = removed, .transform = transform, .hash = hash});
  };
  return {
      {"best keys", best_keys, one_round},
      {"random", random_clusters},
      {"blockwise", with({.duplicates = removed, .local_round = true}), one_round},
      {"E2LSH", hashed(no_transform{})},
      {"cross-polytope", hashed(no_transform{}, cross_polytope{})},
      {"XBOX", hashed(xbox_transform{})},
      {"L2-ALSH", hashed(l2_alsh_transform{})},
      {"SIMPLE-LSH", hashed(simple_lsh_transform{})},
      {"SMYRF", hashed(smyrf_transform{})},
      {"SMYRF weighted", with({}), several_rounds},
      {"SMYRF, centred keys", centred_keys},
      {"SMYRF, spread directions", spread_directions},
      {"SMYRF + local", with({.duplicates = removed, .local_round = true}), several_rounds},
      {"SMYRF + far", with({.far_field = far}), any, levels},
      {"bisection", with({.duplicates = removed, .clustering = bisection})},
      {"bisection + local",
       with({.duplicates = removed, .clustering = bisection, .local_round = true}), several_rounds},
      {"bisection + far", with({.clustering = bisection, .far_field = far}), any, levels},
      {"bisection + local + far",
       with({.clustering = bisection, .local_round = true, .far_field = far}), several_rounds,
       levels},
  };
}

}  // namespace attn::bench
