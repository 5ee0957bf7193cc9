// SPDX-License-Identifier: MIT
//
// Locality-sensitive hashing for maximum inner products: asymmetric transforms of queries and keys,
// and hashes of what they give.
//
// A transform takes a vector x to [factor · x ; tail], and the number and the tail depend on x
// through its norm alone. So transformed vectors are never stored: the hash a·F(q) is
// factor · (a·q) plus one term per appended coordinate.
//
// All of it is the same to the bit on every platform. Coefficients have 20 significant bits and
// vectors are taken as float, so their products are exact in double and a fused multiply-add
// changes nothing; sums run over the coordinates in order; sqrt and division round correctly.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <variant>

#include <attn/view.hpp>

namespace attn {

/// Squared upper bounds of the norms of all queries and of all keys: M_Q², M_K².
struct lsh_norms {
  double query2 = 0;
  double key2 = 0;
};

/// What a transform makes of a vector x: [factor · x ; tail], the first `dims()` numbers of tail.
struct lsh_lift {
  static constexpr std::size_t max_dims = 8;
  double factor = 1;
  std::array<double, max_dims> tail{};
};

/// F(q) = [q ; 0 ; √(R² − ‖q‖²)], G(k) = [k ; √(R² − ‖k‖²) ; 0] with R² = M_Q² + M_K².
///
///     ‖F(q)‖ = ‖G(k)‖ = R        ‖F(q) − G(k)‖² = 2 (M_Q² + M_K² − q·k)
///
/// The nearest key is the one with the largest inner product, for queries of any length. (R times
/// the SIMPLE-ALSH of Neyshabur and Srebro at q/R, k/R.)
///
/// **Numerics** the radicand is M_K² + (M_Q² − ‖q‖²), two terms that are not negative: there is
/// nothing to clamp where the bounds hold. Identity: relative error below 4 eps (double) of R².
/// **References** Daras, Kitaev, Odena, Dimakis, "SMYRF", NeurIPS 2020, equation 4.
/// **Example** examples/smyrf.cpp
struct smyrf_transform {
  [[nodiscard]] static constexpr index_t dims() noexcept { return 2; }
  [[nodiscard]] static lsh_lift query(double norm2, const lsh_norms& m) noexcept {
    return {1, {0, std::sqrt(m.key2 + std::max(0.0, m.query2 - norm2))}};
  }
  [[nodiscard]] static lsh_lift key(double norm2, const lsh_norms& m) noexcept {
    return {1, {std::sqrt(m.query2 + std::max(0.0, m.key2 - norm2)), 0}};
  }
};

/// F(q) = [q ; 0], G(k) = [k ; √(M_K² − ‖k‖²)]: ‖F(q) − G(k)‖² = ‖q‖² + M_K² − 2 q·k.
///
/// **References** Bachrach et al., "Speeding Up the Xbox Recommender System", RecSys 2014.
struct xbox_transform {
  [[nodiscard]] static constexpr index_t dims() noexcept { return 1; }
  [[nodiscard]] static lsh_lift query(double, const lsh_norms&) noexcept { return {}; }
  [[nodiscard]] static lsh_lift key(double norm2, const lsh_norms& m) noexcept {
    return {1, {std::sqrt(std::max(0.0, m.key2 - norm2))}};
  }
};

/// F(q) = [q/‖q‖ ; 1/2, ..., 1/2], G(k) = [x ; ‖x‖², ‖x‖⁴, ..., ‖x‖^(2^terms)] with
/// x = shrink · k / M_K: ‖F − G‖² = 1 + terms/4 − 2 x·q/‖q‖ + ‖x‖^(2^(terms + 1)), the last term
/// small.
///
/// **References** Shrivastava and Li, "Asymmetric LSH (ALSH) for Sublinear Time Maximum Inner
/// Product Search", NeurIPS 2014.
struct l2_alsh_transform {
  int terms = 3;         ///< 1 to 8
  double shrink = 0.83;  ///< in (0, 1)

  [[nodiscard]] constexpr index_t dims() const noexcept { return terms; }
  [[nodiscard]] lsh_lift query(double norm2, const lsh_norms&) const noexcept {
    lsh_lift lift{norm2 > 0 ? 1 / std::sqrt(norm2) : 0, {}};
    for (std::size_t i = 0; i < static_cast<std::size_t>(terms); ++i) lift.tail[i] = 0.5;
    return lift;
  }
  [[nodiscard]] lsh_lift key(double norm2, const lsh_norms& m) const noexcept {
    lsh_lift lift{m.key2 > 0 ? shrink / std::sqrt(m.key2) : 0, {}};
    double power = lift.factor * lift.factor * norm2;
    for (std::size_t i = 0; i < static_cast<std::size_t>(terms); ++i) {
      lift.tail[i] = power;
      power *= power;
    }
    return lift;
  }
};

/// F(q) = [q/‖q‖ ; 0], G(k) = [k/M_K ; √(1 − ‖k‖²/M_K²)], all on the unit sphere: the cosine is
/// q·k / (‖q‖ M_K).
///
/// **References** Neyshabur and Srebro, "On Symmetric and Asymmetric LSHs for Inner Product
/// Search", ICML 2015.
struct simple_lsh_transform {
  [[nodiscard]] static constexpr index_t dims() noexcept { return 1; }
  [[nodiscard]] static lsh_lift query(double norm2, const lsh_norms&) noexcept {
    return {norm2 > 0 ? 1 / std::sqrt(norm2) : 0, {}};
  }
  [[nodiscard]] static lsh_lift key(double norm2, const lsh_norms& m) noexcept {
    if (!(m.key2 > 0)) return {0, {1}};
    return {1 / std::sqrt(m.key2), {std::sqrt(std::max(0.0, 1 - norm2 / m.key2))}};
  }
};

/// Queries and keys as they are: with random_projection the plain E2LSH of Datar et al. (2004).
struct no_transform {
  [[nodiscard]] static constexpr index_t dims() noexcept { return 0; }
  [[nodiscard]] static constexpr lsh_lift query(double, const lsh_norms&) noexcept { return {}; }
  [[nodiscard]] static constexpr lsh_lift key(double, const lsh_norms&) noexcept { return {}; }
};

/// One of the transforms.
using lsh_transform = std::variant<smyrf_transform, xbox_transform, l2_alsh_transform,
                                   simple_lsh_transform, no_transform>;

/// Bits that depend on the four numbers alone (the finaliser of SplitMix64 after each of them):
/// any element of any stream without the ones before it.
[[nodiscard]] constexpr std::uint64_t lsh_bits(std::uint64_t seed, std::uint64_t stream,
                                               std::uint64_t i, std::uint64_t word) noexcept {
  std::uint64_t x = 0;
  for (const std::uint64_t part : {seed, stream, i, word}) {
    x = (x ^ part) + 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    x ^= x >> 31;
  }
  return x;
}

/// A normal number, mean 0 and variance 1 − 2^−32, that depends on seed, stream and i alone.
///
/// The sum of 12 uniform numbers of 16 bits less its mean (Irwin-Hall): integers, so it is the same
/// on every platform, which a logarithm from libm would not be. Within ±6; its distribution
/// function is within 0.003 of the normal one. It has 20 significant bits and is a float exactly.
[[nodiscard]] constexpr float lsh_gaussian(std::uint64_t seed, std::uint64_t stream,
                                           std::uint64_t i) noexcept {
  std::int32_t sum = 0;
  for (std::uint64_t word = 0; word < 3; ++word) {
    const std::uint64_t bits = lsh_bits(seed, stream, i, word);
    for (int shift = 0; shift < 64; shift += 16) {
      sum += static_cast<std::int32_t>((bits >> shift) & 0xffff);
    }
  }
  constexpr std::int32_t mean = 12 * 65535 / 2;
  return static_cast<float>(sum - mean) / 65536;
}

/// h(u) = a·u with a ~ N(0, I), one a per round, the same for all batches and heads, queries and
/// keys.
///
/// E2LSH has h(u) = ⌊(a·u + b) / r⌋. Where only the order of hashes counts and there is no floor,
/// b and r > 0 have no effect, so they are not offered.
struct random_projection {
  /// a[c] of a round. The appended coordinates of a transform come after the d of the vector.
  [[nodiscard]] static constexpr float coefficient(std::uint64_t seed, index_t round,
                                                   index_t c) noexcept {
    return lsh_gaussian(seed, static_cast<std::uint64_t>(round), static_cast<std::uint64_t>(c));
  }

  /// The hash from the product a·x of the vector itself and the coefficients of the appended
  /// coordinates: what the kernels compute. Factor and tail are taken as float, so that these
  /// products are exact too.
  ///
  /// @param product a·x summed in double over the coordinates in order, then narrowed; NaN for a
  ///     vector that is not finite
  [[nodiscard]] static double finish(float product, const lsh_lift& lift,
                                     std::span<const float> tail_coefficients) noexcept {
    double sum = static_cast<double>(narrow(lift.factor)) * static_cast<double>(product);
    for (std::size_t t = 0; t < tail_coefficients.size(); ++t) {
      sum += static_cast<double>(tail_coefficients[t]) * static_cast<double>(narrow(lift.tail[t]));
    }
    return sum;
  }

  /// To float, where it is too large to the largest one. NaN stays NaN.
  [[nodiscard]] static constexpr float narrow(double x) noexcept {
    constexpr double highest = static_cast<double>(std::numeric_limits<float>::max());
    return static_cast<float>(std::clamp(x, -highest, highest));
  }

  /// The same for a product: the infinities that only a vector with infinities gives become NaN.
  [[nodiscard]] static constexpr float narrow_product(double x) noexcept {
    return x - x == 0 ? narrow(x) : std::numeric_limits<float>::quiet_NaN();
  }
};

/// h(u) = argmax [uR ; −uR], R ~ N(0, 1) of [dim, buckets / 2]: the nearest vertex of a randomly
/// rotated cross-polytope, of vectors on a sphere. The bucket with the lower number wins a tie.
///
/// **References** Andoni et al., "Practical and Optimal LSH for Angular Distance", NeurIPS 2015;
/// with a Gaussian R as in Kitaev, Kaiser, Levskaya, "Reformer", ICLR 2020.
struct cross_polytope {
  index_t buckets = 0;  ///< an even number; 0: as many as there are clusters, rounded up to even

  /// R[c][column] of a round.
  [[nodiscard]] static constexpr float coefficient(std::uint64_t seed, index_t round, index_t c,
                                                   index_t column) noexcept {
    const auto stream = static_cast<std::uint64_t>(round) << 32 | static_cast<std::uint64_t>(c);
    return lsh_gaussian(~seed, stream, static_cast<std::uint64_t>(column));
  }
};

/// One of the hashes.
using lsh_hash = std::variant<random_projection, cross_polytope>;

}  // namespace attn
