// SPDX-License-Identifier: MIT
#include "reference/smyrf.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>

namespace reference {
namespace {

double squared_norm(const std::vector<double>& x) {
  double sum = 0;
  for (const double e : x) sum += e * e;
  return sum;
}

}  // namespace

double largest_norm2(const vectors& x) {
  double largest = 0;
  for (const auto& row : x) {
    const double n = squared_norm(row);
    if (std::isfinite(n)) largest = std::max(largest, n);
  }
  return largest;
}

vectors transformed(const vectors& x, bool is_query, lsh_transform t, double norm2_q,
                    double norm2_k) {
  vectors result = x;
  for (auto& row : result) {
    const double norm2 = squared_norm(row);
    const auto scale = [&](double factor) {
      for (double& e : row) e *= factor;
    };
    switch (t) {
    case lsh_transform::smyrf: {
      const double rest = std::sqrt(norm2_q + norm2_k - norm2);
      row.push_back(is_query ? 0 : rest);
      row.push_back(is_query ? rest : 0);
      break;
    }
    case lsh_transform::xbox:
      row.push_back(is_query ? 0 : std::sqrt(std::max(0.0, norm2_k - norm2)));
      break;
    case lsh_transform::l2_alsh: {
      scale(is_query ? (norm2 > 0 ? 1 / std::sqrt(norm2) : 0)
                     : (norm2_k > 0 ? 0.83 / std::sqrt(norm2_k) : 0));
      double power = squared_norm(row);
      for (int i = 0; i < 3; ++i, power *= power) row.push_back(is_query ? 0.5 : power);
      break;
    }
    case lsh_transform::simple_lsh:
      scale(is_query ? (norm2 > 0 ? 1 / std::sqrt(norm2) : 0)
                     : (norm2_k > 0 ? 1 / std::sqrt(norm2_k) : 0));
      row.push_back(is_query ? 0 : std::sqrt(std::max(0.0, 1 - squared_norm(row))));
      break;
    case lsh_transform::none:
      break;
    }
  }
  return result;
}

std::vector<index_t> rank_clusters(const std::vector<double>& hash, index_t clusters) {
  const auto n = static_cast<index_t>(hash.size());
  std::vector<index_t> order(hash.size()), cluster(hash.size());
  std::iota(order.begin(), order.end(), index_t{0});
  std::stable_sort(order.begin(), order.end(), [&](index_t a, index_t b) {
    const double x = hash[static_cast<std::size_t>(a)], y = hash[static_cast<std::size_t>(b)];
    if (std::isnan(x) || std::isnan(y)) return !std::isnan(x) && std::isnan(y);
    return x < y;
  });
  index_t c = 0;
  for (index_t rank = 0; rank < n; ++rank) {
    while (rank >= n * (c + 1) / clusters) ++c;
    cluster[static_cast<std::size_t>(order[static_cast<std::size_t>(rank)])] = c;
  }
  return cluster;
}

tensor meetings(const std::vector<clustering>& rounds) {
  const auto n_q = static_cast<index_t>(rounds[0].of_query.size());
  const auto n_kv = static_cast<index_t>(rounds[0].of_key.size());
  tensor m({1, 1, n_q, n_kv});
  for (const clustering& round : rounds) {
    for (index_t i = 0; i < n_q; ++i) {
      for (index_t j = 0; j < n_kv; ++j) {
        const index_t c = round.of_query[static_cast<std::size_t>(i)];
        if (c >= 0 && c == round.of_key[static_cast<std::size_t>(j)]) m(0, 0, i, j) += 1;
      }
    }
  }
  return m;
}

score_rule counted(const tensor& m) {
  tensor log_m = m;
  for (double& x : log_m.elements()) x = x == 0 ? forbidden : std::log(x);
  return additive_bias(log_m);
}

dense_result smyrf_attention(const tensor& q, const tensor& k, const tensor& v, const tensor& m,
                             const score_rule& rule, const dense_options& options) {
  return dense_attention(q, k, v, rule & counted(m), options);
}

far_field_result smyrf_far_field(const tensor& q, const tensor& k, const tensor& v,
                                 const std::vector<clustering>& rounds, index_t clusters,
                                 const dense_options& options) {
  const index_t n_q = q.extent(2), n_kv = k.extent(2), d_qk = q.extent(3), d_v = v.extent(3);
  const double scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(d_qk)));
  const auto capped = [&](double s) {
    return options.softcap == 0 ? s : options.softcap * std::tanh(s / options.softcap);
  };
  far_field_result r{tensor({1, 1, n_q, d_v}), tensor({1, 1, n_q, 1}, forbidden)};
  for (index_t i = 0; i < n_q; ++i) {
    // 1. What the query sees: scores and values.
    std::vector<double> scores;
    vectors values;
    for (const clustering& round : rounds) {
      const index_t own = round.of_query[static_cast<std::size_t>(i)];
      if (own < 0) continue;
      // The mean of the keys of clusters [c0, c1), counted as often as there are keys.
      const auto see = [&](index_t c0, index_t c1, bool one_by_one) {
        double count = 0;
        std::vector<double> mean_k(static_cast<std::size_t>(d_qk)),
            mean_v(static_cast<std::size_t>(d_v));
        const auto add = [&](double times_counted, const std::vector<double>& key,
                             const std::vector<double>& value) {
          double dot = 0;
          for (index_t c = 0; c < d_qk; ++c)
            dot += q(0, 0, i, c) * key[static_cast<std::size_t>(c)];
          scores.push_back(capped(scale * dot) + std::log(times_counted));
          values.push_back(value);
        };
        for (index_t j = 0; j < n_kv; ++j) {
          const index_t c = round.of_key[static_cast<std::size_t>(j)];
          if (c < c0 || c >= c1) continue;
          if (one_by_one) std::fill(mean_k.begin(), mean_k.end(), 0.0);
          if (one_by_one) std::fill(mean_v.begin(), mean_v.end(), 0.0);
          for (index_t x = 0; x < d_qk; ++x) mean_k[static_cast<std::size_t>(x)] += k(0, 0, j, x);
          for (index_t x = 0; x < d_v; ++x) mean_v[static_cast<std::size_t>(x)] += v(0, 0, j, x);
          count += 1;
          if (one_by_one) add(1, mean_k, mean_v);
        }
        if (one_by_one || count == 0) return;
        for (double& x : mean_k) x /= count;
        for (double& x : mean_v) x /= count;
        add(count, mean_k, mean_v);
      };
      see(own, own + 1, true);
      for (index_t c0 = 0, c1 = clusters; c1 - c0 > 1;) {
        const index_t mid = c0 + (c1 - c0) / 2;
        const bool left = own < mid;
        see(left ? mid : c0, left ? c1 : mid, false);
        (left ? c1 : c0) = mid;
      }
    }
    // 2. Softmax.
    if (scores.empty()) continue;
    const double m = *std::max_element(scores.begin(), scores.end());
    double sum = 0;
    for (const double s : scores) sum += std::exp(s - m);
    r.lse(0, 0, i, 0) = m + std::log(sum);
    for (std::size_t x = 0; x < scores.size(); ++x) {
      const double p = std::exp(scores[x] - m) / sum;
      for (index_t c = 0; c < d_v; ++c)
        r.out(0, 0, i, c) += p * values[x][static_cast<std::size_t>(c)];
    }
  }
  return r;
}

}  // namespace reference
