// SPDX-License-Identifier: MIT
#include "reference/soft_topk.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace reference {
namespace {

constexpr double minus_infinity = -std::numeric_limits<double>::infinity();

bool is_absent(double v) { return std::isnan(v) || v == minus_infinity; }

// One survivor of a round: a mixture of sources.
struct survivor {
  double score;
  std::vector<double> x;        // [d]
  std::vector<double> weights;  // [n]
  index_t champion;
};

// Survivor `to` of a round is w · from[i] + (1 − w) · from[j], or from[i] where j < 0.
struct match {
  index_t i, j;
  long double w;
};

struct round_record {
  std::vector<survivor> from;
  std::vector<match> matches;
};

// All rounds of one row, and the survivors of the last in the order of the slots.
struct row_record {
  std::vector<round_record> rounds;
  std::vector<survivor> last;
  std::vector<index_t> slot_to_last;  // slot -> index in what the last round left
};

double mix(long double w, double a, double b) {
  if (w == 1) return a;
  if (w == 0) return b;
  return static_cast<double>(w * a + (1 - w) * b);
}

void sort_by_rank(std::vector<survivor>& s) {
  std::stable_sort(s.begin(), s.end(), [](const survivor& a, const survivor& b) {
    if (std::isnan(a.score) != std::isnan(b.score)) return std::isnan(b.score);
    if (!std::isnan(a.score) && a.score != b.score) return a.score > b.score;
    return a.champion < b.champion;
  });
}

row_record play(const tensor& x, const tensor& scores, index_t k, const soft_topk_options& options,
                index_t b, index_t h) {
  const index_t n = scores.extent(2), d = x.extent(3);
  const index_t length = options.lengths.empty() ? n : options.lengths[static_cast<std::size_t>(b)];

  // 1. The sources that take part.
  std::vector<survivor> now;
  for (index_t i = 0; i < length; ++i) {
    survivor s{scores(b, h, i, 0), {}, std::vector<double>(static_cast<std::size_t>(n)), i};
    for (index_t c = 0; c < d; ++c) s.x.push_back(x(b, h, i, c));
    s.weights[static_cast<std::size_t>(i)] = 1;
    now.push_back(s);
  }
  if (options.sort != topk_sort::never) sort_by_rank(now);
  for (survivor& s : now) {
    if (std::isnan(s.score)) s.score = minus_infinity;  // last among the sources, then as −inf
  }

  // 2. Rounds, until k are left.
  row_record record;
  while (static_cast<index_t>(now.size()) > k) {
    const auto m = static_cast<index_t>(now.size());
    const index_t next = std::max(k, (m + 1) / 2);
    const index_t byes = 2 * next - m;
    round_record round{now, {}};
    std::vector<survivor> after;
    for (index_t i = 0; i < byes; ++i) {
      round.matches.push_back({i, -1, 1});
      after.push_back(now[static_cast<std::size_t>(i)]);
    }
    for (index_t t = 0; t < m - next; ++t) {
      const index_t i = byes + t, j = m - 1 - t;
      const survivor& a = now[static_cast<std::size_t>(i)];
      const survivor& z = now[static_cast<std::size_t>(j)];
      const long double w = topk_share(a.score, z.score, options.boost, options.strength);
      round.matches.push_back({i, j, w});
      survivor s = a;
      const bool absent = is_absent(a.score) && is_absent(z.score);
      s.score = absent ? minus_infinity : mix(w, a.score, z.score);
      for (std::size_t c = 0; c < s.x.size(); ++c) s.x[c] = mix(w, a.x[c], z.x[c]);
      for (std::size_t c = 0; c < s.weights.size(); ++c) {
        s.weights[c] = mix(w, a.weights[c], z.weights[c]);
      }
      after.push_back(s);
    }
    record.rounds.push_back(round);
    now = after;
    // 3. A sort changes places only: written into the record of the round.
    if (options.sort == topk_sort::every_round && next > k) {
      std::vector<survivor> sorted = now;
      sort_by_rank(sorted);
      std::vector<match> order;
      for (const survivor& s : sorted) {
        for (std::size_t t = 0; t < now.size(); ++t) {
          if (now[t].champion == s.champion) order.push_back(record.rounds.back().matches[t]);
        }
      }
      record.rounds.back().matches = order;
      now = sorted;
    }
  }

  // 4. Slots.
  for (index_t t = 0; t < k; ++t) record.slot_to_last.push_back(t);
  if (options.order == topk_order::by_position) {
    std::sort(record.slot_to_last.begin(), record.slot_to_last.end(), [&](index_t a, index_t z) {
      return now[static_cast<std::size_t>(a)].champion < now[static_cast<std::size_t>(z)].champion;
    });
  }
  record.last = now;
  return record;
}

// dw/dv and dw/d(other); both 0 where w is a step (saturated, or scores beyond the range of B^v).
std::pair<long double, long double> share_slopes(double v, double other, long double w,
                                                 const soft_topk_options& options) {
  const long double steepness = w * (1 - w);
  if (!std::isfinite(v) || !std::isfinite(other) || steepness == 0) return {0, 0};
  if (options.boost == topk_boost::scaled) {
    return {steepness * options.strength, -steepness * options.strength};
  }
  const auto base = static_cast<long double>(options.strength);
  const auto slope = [&](double score) {
    const double power = std::pow(options.strength, score);
    return std::isinf(power) ? 0 : steepness * std::log(base) * std::pow(base, score);
  };
  return {slope(v), -slope(other)};
}

}  // namespace

long double topk_share(double v, double other, topk_boost boost, double strength) {
  if (is_absent(v) && is_absent(other)) return 0.5L;
  if (is_absent(other)) return 1;
  if (is_absent(v)) return 0;
  if (v == other) return 0.5L;
  const auto a = static_cast<long double>(v), z = static_cast<long double>(other);
  const auto c = static_cast<long double>(strength);
  long double difference = 0;
  if (boost == topk_boost::scaled) {
    difference = c * (a - z);
  } else {
    const long double power = std::pow(c, a), other_power = std::pow(c, z);
    difference = std::isinf(power) && std::isinf(other_power) ? (v > other ? power : -power)
                                                              : power - other_power;
  }
  return 1 / (1 + std::exp(-difference));
}

soft_topk_result soft_topk(const tensor& x, const tensor& scores, index_t k,
                           const soft_topk_options& options) {
  const index_t n_batch = scores.extent(0), n_heads = scores.extent(1), n = scores.extent(2);
  soft_topk_result r{tensor({n_batch, n_heads, k, x.extent(3)}), tensor({n_batch, n_heads, k, 1}),
                     tensor({n_batch, n_heads, k, n}), tensor({n_batch, n_heads, k, 1})};
  for (index_t b = 0; b < n_batch; ++b) {
    for (index_t h = 0; h < n_heads; ++h) {
      const row_record row = play(x, scores, k, options, b, h);
      for (index_t t = 0; t < k; ++t) {
        const index_t at = row.slot_to_last[static_cast<std::size_t>(t)];
        const survivor& s = row.last[static_cast<std::size_t>(at)];
        for (index_t c = 0; c < x.extent(3); ++c) {
          r.pooled(b, h, t, c) = s.x[static_cast<std::size_t>(c)];
        }
        for (index_t i = 0; i < n; ++i) {
          r.weights(b, h, t, i) = s.weights[static_cast<std::size_t>(i)];
        }
        r.pooled_scores(b, h, t, 0) = std::isnan(s.score) ? minus_infinity : s.score;
        r.champions(b, h, t, 0) = static_cast<double>(s.champion);
      }
    }
  }
  return r;
}

soft_topk_gradients soft_topk_backward(const tensor& x, const tensor& scores, index_t k,
                                       const tensor& d_pooled, const tensor& d_pooled_scores,
                                       const soft_topk_options& options) {
  soft_topk_gradients r{tensor(x.extents()), tensor(scores.extents())};
  const auto d = static_cast<std::size_t>(x.extent(3));
  for (index_t b = 0; b < scores.extent(0); ++b) {
    for (index_t h = 0; h < scores.extent(1); ++h) {
      const row_record row = play(x, scores, k, options, b, h);

      // 1. Gradients of the last survivors.
      struct gradient {
        long double score = 0;
        std::vector<long double> x;
      };
      std::vector<gradient> now(static_cast<std::size_t>(k));
      for (index_t t = 0; t < k; ++t) {
        gradient& g = now[static_cast<std::size_t>(row.slot_to_last[static_cast<std::size_t>(t)])];
        g.score = d_pooled_scores(b, h, t, 0);
        for (index_t c = 0; c < x.extent(3); ++c) g.x.push_back(d_pooled(b, h, t, c));
      }

      // 2. Each round from the last: e' = w e_i + (1 − w) e_j, v' = w v_i + (1 − w) v_j.
      for (auto round = row.rounds.rbegin(); round != row.rounds.rend(); ++round) {
        std::vector<gradient> before(round->from.size());
        for (std::size_t t = 0; t < round->matches.size(); ++t) {
          const match& m = round->matches[t];
          const gradient& g = now[t];
          gradient& gi = before[static_cast<std::size_t>(m.i)];
          if (m.j < 0) {
            gi = g;
            continue;
          }
          gradient& gj = before[static_cast<std::size_t>(m.j)];
          const survivor& a = round->from[static_cast<std::size_t>(m.i)];
          const survivor& z = round->from[static_cast<std::size_t>(m.j)];
          long double d_w = 0;
          for (std::size_t c = 0; c < d; ++c) {
            gi.x.push_back(m.w * g.x[c]);
            gj.x.push_back((1 - m.w) * g.x[c]);
            d_w += g.x[c] * (static_cast<long double>(a.x[c]) - z.x[c]);
          }
          const auto [slope_i, slope_j] = share_slopes(a.score, z.score, m.w, options);
          gi.score = m.w * g.score;
          gj.score = (1 - m.w) * g.score;
          if (slope_i != 0 || slope_j != 0) {
            d_w += g.score * (static_cast<long double>(a.score) - z.score);
            gi.score += d_w * slope_i;
            gj.score += d_w * slope_j;
          }
        }
        now = before;
      }

      // 3. Back to positions. After the last round `now` is in the order of the first ranking.
      const std::vector<survivor>& first = row.rounds.empty() ? row.last : row.rounds[0].from;
      for (std::size_t t = 0; t < first.size(); ++t) {
        const index_t i = first[t].champion;
        r.d_scores(b, h, i, 0) = is_absent(first[t].score) ? 0 : static_cast<double>(now[t].score);
        for (std::size_t c = 0; c < d; ++c) {
          r.d_x(b, h, i, static_cast<index_t>(c)) = static_cast<double>(now[t].x[c]);
        }
      }
    }
  }
  return r;
}

}  // namespace reference
