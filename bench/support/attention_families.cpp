// SPDX-License-Identifier: MIT
#include "attention_families.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>

#include <attn/lsh.hpp>

#include "normal_noise.hpp"

namespace attn::bench {
namespace {

constexpr index_t heads = 3, length = 1024, dim = 64;  // of what is made up

problem<float> empty_problem(index_t n_heads, index_t n_q, index_t n_kv, index_t d) {
  problem<float> p;
  p.shape = {1, n_heads, n_heads, n_q, n_kv, d, d};
  p.q_elements.resize(static_cast<std::size_t>(n_heads * n_q * d));
  p.k_elements.resize(static_cast<std::size_t>(n_heads * n_kv * d));
  p.v_elements.resize(p.k_elements.size());
  return p;
}

// q and k by functions of (head, row, coordinate, noise); values are noise.
template <class Q, class K>
problem<float> synthetic(std::uint64_t seed, const Q& query, const K& key) {
  problem<float> p = empty_problem(heads, length, length, dim);
  normal_noise noise(seed);
  std::size_t at = 0;
  for (index_t h = 0; h < heads; ++h)
    for (index_t i = 0; i < length; ++i)
      for (index_t c = 0; c < dim; ++c, ++at) {
        p.q_elements[at] = static_cast<float>(query(h, i, c, noise));
        p.k_elements[at] = static_cast<float>(key(h, i, c, noise));
        p.v_elements[at] = static_cast<float>(noise());
      }
  return p;
}

class normal_table {
 public:
  normal_table(std::uint64_t seed, index_t n) : x_(static_cast<std::size_t>(n)) {
    normal_noise noise(seed);
    for (double& x : x_) x = noise();
  }
  double operator()(index_t i) const { return x_[static_cast<std::size_t>(i)]; }

 private:
  std::vector<double> x_;
};

// Independent directions; scores of standard deviation `sharpness`.
problem<float> gaussian(double sharpness) {
  return synthetic(
      1, [=](index_t, index_t, index_t, normal_noise& noise) { return sharpness * noise(); },
      [](index_t, index_t, index_t, normal_noise& noise) { return noise(); });
}

// Lengths over an order of magnitude, on both sides: what asymmetric transforms are for.
problem<float> lengths() {
  const normal_table log_length(9, 2 * heads * length);
  const auto longer = [&](index_t side, index_t h, index_t i) {
    return std::exp(0.7 * log_length((side * heads + h) * length + i));
  };
  return synthetic(
      10,
      [&](index_t h, index_t i, index_t, normal_noise& noise) { return longer(0, h, i) * noise(); },
      [&](index_t h, index_t i, index_t, normal_noise& noise) {
        return longer(1, h, i) * noise();
      });
}

// 32 directions that queries and keys gather around.
problem<float> clustered() {
  constexpr index_t n_centres = 32;
  const normal_table centres(2, heads * n_centres * dim);
  const auto around = [&](std::uint64_t seed) {
    return [&, seed](index_t h, index_t i, index_t c, normal_noise& noise) {
      const std::uint64_t bits =
          lsh_bits(seed, static_cast<std::uint64_t>(h), static_cast<std::uint64_t>(i), 0);
      const index_t centre = h * n_centres + static_cast<index_t>(bits % n_centres);
      return 1.5 * centres(centre * dim + c) + 0.7 * noise();
    };
  };
  return synthetic(3, around(11), around(12));
}

// Narrow cones, as in trained language models: each side has a large offset of its own and a
// spectrum that decays; the spread directions of queries and keys are the same.
problem<float> cones() {
  const normal_table offset(4, 2 * heads * dim);
  const auto spread = [](index_t c) { return 2 * std::pow(static_cast<double>(c + 1), -0.7); };
  return synthetic(
      5,
      [&](index_t h, index_t, index_t c, normal_noise& noise) {
        return 4 * offset(2 * h * dim + c) + 3 * spread(c) * noise();
      },
      [&](index_t h, index_t, index_t c, normal_noise& noise) {
        return 4 * offset((2 * h + 1) * dim + c) + spread(c) * noise();
      });
}

// Each query attends to one key of its own.
problem<float> permutation() {
  const normal_table keys(6, heads * length * dim);
  const auto key = [&](index_t h, index_t j, index_t c) {
    return keys((h * length + j) * dim + c);
  };
  return synthetic(
      7,
      [&](index_t h, index_t i, index_t c, normal_noise& noise) {
        return 2 * key(h, i * 387 % length, c) + 0.3 * noise();  // 387 is odd: a permutation
      },
      [&](index_t h, index_t j, index_t c, normal_noise&) { return key(h, j, c); });
}

// Smooth features on a 64 x 64 grid, q, k and v linear in them; k and v are max-pooled 2 x 2 as in
// BigGAN's attention: four times as many queries as keys, and no scale.
problem<float> grid() {
  constexpr index_t side = 64, pooled = side / 2, features = 64, d = 32, waves = 12;
  constexpr index_t n = side * side, n_kv = pooled * pooled;
  normal_noise noise(8);
  problem<float> p = empty_problem(1, n, n_kv, d);
  // 1. Features: sums of plane waves of up to six periods, long ones stronger.
  std::vector<double> x(static_cast<std::size_t>(n * features), 0);
  for (index_t f = 0; f < features; ++f)
    for (index_t w = 0; w < waves; ++w) {
      const double fx = 3 * noise(), fy = 3 * noise(), phase = 6 * noise();
      const double amplitude = 1 / (1 + fx * fx + fy * fy);
      for (index_t i = 0; i < n; ++i) {
        const double place =
            fx * static_cast<double>(i % side) + fy * static_cast<double>(i / side);
        x[static_cast<std::size_t>(i * features + f)] +=
            amplitude * std::cos(2 * std::numbers::pi * place / side + phase);
      }
    }
  // 2. Maps of q, k (near that of q) and v.
  const normal_table map_q(21, features * d), map_other(22, features * d), map_v(23, features * d);
  const auto project = [&](index_t i, index_t c, const auto& map) {
    double sum = 0;
    for (index_t f = 0; f < features; ++f) {
      sum += x[static_cast<std::size_t>(i * features + f)] * map(f * d + c);
    }
    return sum / 4;
  };
  const auto map_k = [&](index_t at) { return 0.8 * map_q(at) + 0.6 * map_other(at); };
  const auto max_of_four = [&](index_t j, index_t c, const auto& map) {
    const index_t i = 2 * (j / pooled) * side + 2 * (j % pooled);
    return std::max(std::max(project(i, c, map), project(i + 1, c, map)),
                    std::max(project(i + side, c, map), project(i + side + 1, c, map)));
  };
  for (index_t i = 0; i < n; ++i)
    for (index_t c = 0; c < d; ++c) {
      // Times √d, which the scale of the call takes away.
      p.q_elements[static_cast<std::size_t>(i * d + c)] =
          static_cast<float>(std::sqrt(double{d}) * project(i, c, map_q));
    }
  for (index_t j = 0; j < n_kv; ++j)
    for (index_t c = 0; c < d; ++c) {
      const auto at = static_cast<std::size_t>(j * d + c);
      p.k_elements[at] = static_cast<float>(max_of_four(j, c, map_k));
      p.v_elements[at] = static_cast<float>(max_of_four(j, c, map_v));
    }
  return p;
}

problem<float> minilm(const std::filesystem::path& path, index_t layer) {
  const problem<float> all = load_problem<float>(path, {}, false);
  const problem_shape& s = all.shape;
  problem<float> p = empty_problem(s.n_heads, s.n_q, s.n_kv, s.d_qk);
  const auto size = static_cast<std::ptrdiff_t>(p.q_elements.size());
  std::copy_n(all.q_elements.begin() + layer * size, size, p.q_elements.begin());
  std::copy_n(all.k_elements.begin() + layer * size, size, p.k_elements.begin());
  std::copy_n(all.v_elements.begin() + layer * size, size, p.v_elements.begin());
  return p;
}

}  // namespace

std::vector<attention_family> attention_families(const std::filesystem::path& captured) {
  return {
      {"minilm_0", "all-MiniLM-L6-v2, layer 0", [=] { return minilm(captured, 0); }},
      {"minilm_2", "all-MiniLM-L6-v2, layer 2", [=] { return minilm(captured, 1); }},
      {"minilm_5", "all-MiniLM-L6-v2, layer 5", [=] { return minilm(captured, 2); }},
      {"gaussian", "normal noise, scores of deviation 1", [] { return gaussian(1); }},
      {"gaussian_sharp", "normal noise, scores of deviation 3", [] { return gaussian(3); }},
      {"lengths", "normal noise, log-normal lengths of queries and keys", lengths},
      {"clustered", "32 directions with noise around them", clustered},
      {"cones", "two narrow cones, decaying spectrum", cones},
      {"permutation", "each query has one key", permutation},
      {"grid", "smooth features on 64 x 64 pixels, keys pooled to 32 x 32", grid},
  };
}

}  // namespace attn::bench
