// SPDX-License-Identifier: MIT
//
// What the tile product of the emulation does at the edges of float, and, on a machine with AMX,
// that the instruction does the same to the last bit.
#include "support/catch.hpp"
#include "support/random.hpp"

#include <attn/simd/amx.hpp>
#include <attn/simd/amx_emulation.hpp>

#include <bit>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <utility>

using namespace attn_test;

namespace {

/// A [16][32] and B [16 pairs][16][2] of bfloat16, and sums [16][16] in rows of a pair of tiles.
struct alignas(64) operands {
  std::uint16_t a[16][32] = {}, b[16][16][2] = {};
  float sums[16][32] = {};

  // a(m, k) b(k, n) as numbers of a product of 16 x 32 by 32 x 16.
  void set_a(int m, int k, float x) { a[m][k] = upper(x); }
  void set_b(int k, int n, float x) { b[k / 2][n][k % 2] = upper(x); }
  static std::uint16_t upper(float x) {
    return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16);
  }
};

bool can_emulate() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx2");
#else
  return true;
#endif
}

void emulated_product(operands& x) {
  namespace tiles = attn::simd::amx::emulation;
  constexpr attn::index_t stride = sizeof x.sums[0];
  tiles::load(0, x.sums, stride);
  tiles::load(1, x.a, 64);
  tiles::load(2, x.b, 64);
  tiles::multiply(0, 1, 2);
  tiles::store(0, x.sums, stride);
}

/// The sum of row 0, column 0 after c + a0 b0 + a1 b1 + ..., all of even or all of odd k.
float one_sum(float c, std::initializer_list<std::pair<float, float>> products, int parity) {
  operands x;
  x.sums[0][0] = c;
  int k = parity;
  for (const auto& [a, b] : products) {
    x.set_a(0, k, a), x.set_b(k, 0, b);
    k += 2;
  }
  emulated_product(x);
  return x.sums[0][0];
}

}  // namespace

TEST_CASE("A product of emulated tiles is that of matrices") {
  if (!can_emulate()) return;
  operands x;
  for (int m = 0; m < 16; ++m) {
    for (int k = 0; k < 32; ++k) x.set_a(m, k, static_cast<float>((m * 7 + k * 3) % 11 - 5));
    for (int n = 0; n < 16; ++n) x.sums[m][n] = static_cast<float>(m - n);
  }
  for (int k = 0; k < 32; ++k) {
    for (int n = 0; n < 16; ++n) x.set_b(k, n, static_cast<float>((k * 5 + n * 2) % 13 - 6));
  }
  emulated_product(x);
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 16; ++n) {
      int sum = m - n;
      for (int k = 0; k < 32; ++k) sum += ((m * 7 + k * 3) % 11 - 5) * ((k * 5 + n * 2) % 13 - 6);
      CHECK(x.sums[m][n] == static_cast<float>(sum));
    }
  }
}

TEST_CASE("Sums of emulated tiles at the edges of float") {
  if (!can_emulate()) return;
  constexpr float infinity = std::numeric_limits<float>::infinity();
  const int parity = GENERATE(0, 1);
  // 2^128 is no float, 2^128 − 2^127 is one: multiplication and addition are one operation.
  CHECK(one_sum(0, {{-0x1p63f, 0x1p64f}, {0x1p64f, 0x1p64f}}, parity) == 0x1p127f);
  CHECK(one_sum(-0x1p127f, {{0x1p64f, 0x1p64f}}, parity) == infinity);  // but not with the tile's
  // The same below 2^-126.
  CHECK(one_sum(0, {{0x1p-60f, 0x1p-60f}, {0x1.8p-70f, 0x1p-70f}}, parity) == 0x1.000018p-120f);
  // Subnormal numbers are 0: operands, ...
  CHECK(one_sum(1, {{0x1p-127f, 0x1p126f}}, parity) == 1);
  CHECK(one_sum(1, {{0x1p126f, 0x1p-127f}}, parity) == 1);
  CHECK(one_sum(0x1p-127f, {{0x1p-126f, 1}}, parity) == 0x1p-126f);
  // ... sums on the way and results.
  CHECK(one_sum(0, {{0x1p-64f, 0x1p-63f}, {0x1p-63f, 0x1p-63f}}, parity) == 0x1p-126f);
  CHECK(one_sum(0, {{0x1p-64f, 0x1p-63f}, {0x1p-64f, 0x1p-63f}}, parity) == 0);
  CHECK(one_sum(0x1.8p-126f, {{-0x1p-126f, 1}}, parity) == 0);
  // Each sum rounds to nearest even, in the order of k, from 0.
  CHECK(one_sum(0x1p24f, {{1, 1}, {1, 1}}, parity) == 0x1.000002p24f);
  CHECK(one_sum(0, {{0x1p24f, 1}, {1, 1}, {1, 1}}, parity) == 0x1p24f);
  CHECK(std::isnan(one_sum(0, {{infinity, 0}}, parity)));
  CHECK(std::isnan(one_sum(-infinity, {{infinity, 1}}, parity)));
}

#if defined(ATTN_HAS_AMX)

namespace {

void tile_product(operands& x) {
  namespace tiles = attn::simd::amx;
  const tiles::tile_scope scope;
  tiles::load_sums<0>(&x.sums[0][0]);
  tiles::load<1>(&x.a[0][0]);
  tiles::load_streaming<2>(&x.b[0][0][0]);
  tiles::multiply<0, 1, 2>();
  tiles::store_sums<0>(&x.sums[0][0]);
}

/// Numbers of all kinds that meet in a tile product.
double draw(int kind, random_source& random) {
  switch (kind) {
  case 0:  // what attention multiplies
    return random.normal();
  case 1:  // exponents far apart
    return std::ldexp(random.normal(), static_cast<int>(random.integer(-60, 60)));
  case 2:  // products around the smallest normal number
    return std::ldexp(random.normal(), static_cast<int>(random.integer(-75, -55)));
  case 3:  // products around the largest
    return std::ldexp(random.normal(), static_cast<int>(random.integer(61, 64)));
  case 4:  // sums that cancel
    return (random.coin() ? 1 : -1) * (1 + static_cast<double>(random.integer(0, 2)) / 128);
  case 5:  // zeros of both signs
    return random.coin() ? 0.0 : -0.0;
  default:  // any bits
    return std::bit_cast<float>(static_cast<std::uint32_t>(random.bits()));
  }
}
constexpr int kinds = 7;

}  // namespace

TEST_CASE("Emulated tiles have the bits of the instruction, where there is one") {
  if (!attn::simd::amx::available() || attn::simd::amx::emulated) return;
  const int kind = GENERATE(range(0, kinds));
  random_source random(static_cast<std::uint64_t>(kind) + 1);
  for (int round = 0; round < 50; ++round) {
    operands x;
    for (int m = 0; m < 16; ++m) {
      for (int k = 0; k < 32; ++k) {
        x.set_a(m, k, static_cast<float>(draw(kind, random)));
        x.set_b(k, m, static_cast<float>(draw(kind, random)));
      }
      // Sums have the range of the products.
      for (int n = 0; n < 16; ++n) {
        x.sums[m][n] = static_cast<float>(draw(kind, random) * (kind == 2   ? 0x1p-63
                                                                : kind == 3 ? 0x1p63
                                                                            : 1));
      }
    }
    operands y = x;
    emulated_product(x);
    tile_product(y);
    CAPTURE(kind, round);
    for (int m = 0; m < 16; ++m) {
      for (int n = 0; n < 16; ++n) {
        const float a = x.sums[m][n], b = y.sums[m][n];
        if (std::isnan(a) && std::isnan(b)) continue;
        CHECK(std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b));
      }
    }
  }
}

#endif  // ATTN_HAS_AMX
