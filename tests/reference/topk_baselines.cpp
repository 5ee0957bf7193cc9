// SPDX-License-Identifier: MIT
#include "reference/topk_baselines.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace reference {
namespace {

constexpr double minus_infinity = -std::numeric_limits<double>::infinity();

index_t length_of(const std::vector<index_t>& lengths, index_t b, index_t n) {
  return lengths.empty() ? n : lengths[static_cast<std::size_t>(b)];
}

}  // namespace

tensor hard_topk_ranks(const tensor& scores, index_t k, const std::vector<index_t>& lengths) {
  tensor ranks({scores.extent(0), scores.extent(1), k, 1});
  for (index_t b = 0; b < scores.extent(0); ++b) {
    for (index_t h = 0; h < scores.extent(1); ++h) {
      std::vector<index_t> order;
      for (index_t i = 0; i < length_of(lengths, b, scores.extent(2)); ++i) order.push_back(i);
      std::stable_sort(order.begin(), order.end(), [&](index_t a, index_t z) {
        const double x = scores(b, h, a, 0), y = scores(b, h, z, 0);
        return std::isnan(y) ? !std::isnan(x) : x > y;
      });
      for (index_t r = 0; r < k; ++r) {
        ranks(b, h, r, 0) = static_cast<double>(order[static_cast<std::size_t>(r)]);
      }
    }
  }
  return ranks;
}

topk_result hard_topk(const tensor& x, const tensor& scores, index_t k,
                      const std::vector<index_t>& lengths) {
  const tensor ranks = hard_topk_ranks(scores, k, lengths);
  topk_result r{tensor({x.extent(0), x.extent(1), k, x.extent(3)}), tensor(ranks.extents())};
  for (index_t b = 0; b < x.extent(0); ++b) {
    for (index_t h = 0; h < x.extent(1); ++h) {
      std::vector<index_t> chosen;
      for (index_t t = 0; t < k; ++t) chosen.push_back(static_cast<index_t>(ranks(b, h, t, 0)));
      std::sort(chosen.begin(), chosen.end());
      for (index_t t = 0; t < k; ++t) {
        const index_t i = chosen[static_cast<std::size_t>(t)];
        r.pooled_scores(b, h, t, 0) = scores(b, h, i, 0);
        for (index_t c = 0; c < x.extent(3); ++c) r.pooled(b, h, t, c) = x(b, h, i, c);
      }
    }
  }
  return r;
}

topk_result iterative_topk(const tensor& x, const tensor& scores, index_t k, double alpha,
                           const std::vector<index_t>& lengths) {
  topk_result r{tensor({x.extent(0), x.extent(1), k, x.extent(3)}),
                tensor({x.extent(0), x.extent(1), k, 1})};
  for (index_t b = 0; b < x.extent(0); ++b) {
    for (index_t h = 0; h < x.extent(1); ++h) {
      // 1. Who is left, and with what score.
      struct candidate {
        index_t i;
        double score;
      };
      std::vector<candidate> left;
      for (index_t i = 0; i < length_of(lengths, b, x.extent(2)); ++i) {
        const double v = scores(b, h, i, 0);
        left.push_back({i, std::isnan(v) ? minus_infinity : v});
      }
      for (index_t t = 0; t < k; ++t) {
        // 2. The first of the largest, and weights by the distance to it.
        const auto top =
            std::max_element(left.begin(), left.end(), [](const candidate& a, const candidate& z) {
              return a.score < z.score;
            });
        double sum = 0;
        std::vector<double> weights;
        for (const candidate& c : left) {
          const double gap = c.score == top->score ? 0 : c.score - top->score;
          weights.push_back(std::exp(-alpha * gap * gap));
          sum += weights.back();
        }
        for (std::size_t e = 0; e < left.size(); ++e) {
          if (weights[e] == 0) continue;
          const double w = weights[e] / sum;
          r.pooled_scores(b, h, t, 0) += w * left[e].score;
          for (index_t c = 0; c < x.extent(3); ++c) {
            r.pooled(b, h, t, c) += w * x(b, h, left[e].i, c);
          }
        }
        left.erase(top);
      }
    }
  }
  return r;
}

double chamfer_cosine_similarity(const tensor& truth, const tensor& approximation) {
  const index_t d = truth.extent(3);
  double sum = 0;
  for (index_t b = 0; b < truth.extent(0); ++b) {
    for (index_t h = 0; h < truth.extent(1); ++h) {
      for (index_t i = 0; i < truth.extent(2); ++i) {
        double best = minus_infinity;
        for (index_t j = 0; j < approximation.extent(2); ++j) {
          double dot = 0, yy = 0, zz = 0;
          for (index_t c = 0; c < d; ++c) {
            const double y = truth(b, h, i, c), z = approximation(b, h, j, c);
            dot += y * z, yy += y * y, zz += z * z;
          }
          best = std::max(best, yy == 0 || zz == 0 ? 0 : dot / std::sqrt(yy) / std::sqrt(zz));
        }
        sum += best;
      }
    }
  }
  return sum / static_cast<double>(truth.extent(0) * truth.extent(1) * truth.extent(2));
}

}  // namespace reference
