// SPDX-License-Identifier: MIT
//
// Every plan of tile instructions, followed op by op: what its tiles hold, what its sums have got.
#include "support/catch.hpp"

#include <attn/detail/amx_plan.hpp>

#include <utility>
#include <vector>

using namespace attn::detail;

namespace {

/// A part of one of the two tiles of an operand.
struct content {
  int part = -1, half = -1;
};

template <int PartsA, int PartsB>
void follow(step_kind kind) {
  constexpr auto products = part_products<PartsA, PartsB>();
  const tile_plan plan = tile_plan::make<PartsA, PartsB>(kind);
  content tile[8];
  std::vector<std::pair<int, int>> got[4];
  bool started[4] = {}, stored[4] = {};
  int units = 0, pending = 0;
  CAPTURE(PartsA, PartsB, kind.first, kind.last, kind.units);
  for (int i = 0; i < plan.size(); ++i) {
    const tile_op op = plan[i];
    switch (op.action) {
    case tile_action::load_a:
      REQUIRE((op.tile == 4 || op.tile == 5));
      tile[op.tile] = {op.part, op.half};
      break;
    case tile_action::load_b:
      REQUIRE((op.tile == 6 || op.tile == 7));
      tile[op.tile] = {op.part, op.half};
      break;
    case tile_action::multiply: {
      const content a = tile[op.tile], b = tile[op.tile_b];
      REQUIRE(a.half == op.sums / 2);
      REQUIRE(b.half == op.sums % 2);
      REQUIRE(started[op.sums] == kind.first);
      REQUIRE_FALSE(stored[op.sums]);
      got[op.sums].emplace_back(a.part, b.part);
      break;
    }
    case tile_action::start:
      REQUIRE_FALSE(started[op.sums]);
      if (op.sums == 2) REQUIRE(pending == 1);  // what the tile held is safe
      started[op.sums] = true;
      break;
    case tile_action::store:
      REQUIRE(got[op.sums].size() == products.size());
      stored[op.sums] = true;
      break;
    case tile_action::store_pending:
      REQUIRE(got[2].empty());
      ++pending;
      break;
    case tile_action::weigh:
      REQUIRE(op.unit == units);
      ++units;
      break;
    }
  }
  CHECK(units == kind.units);
  CHECK(pending == (kind.first ? 1 : 0));
  for (int sums = 0; sums < 4; ++sums) {
    // Sums 2 are left to the next step.
    CHECK(stored[sums] == (kind.last && sums != 2));
    REQUIRE(got[sums].size() == products.size());
    for (std::size_t i = 0; i < products.size(); ++i) {
      CHECK(got[sums][i] == std::pair(products[i].a, products[i].b));
    }
  }
}

}  // namespace

TEST_CASE("A plan gives all sums the same products in the same order, from the right tiles") {
  const bool first = GENERATE(false, true), last = GENERATE(false, true);
  const int units = GENERATE(0, 8, 16, 32);
  follow<3, 3>({first, last, units});
  follow<2, 2>({first, last, units});
  follow<1, 3>({first, last, units});
  follow<1, 1>({first, last, units});
}

TEST_CASE("Products of parts: as many as the precision stands for, none below its last bit") {
  const auto six = part_products<3, 3>();
  for (const part_product& p : six) CHECK(p.a + p.b <= 2);
  CHECK(six.size() == 6);
  CHECK(part_products<2, 2>().size() == 3);
  CHECK(part_products<1, 3>().size() == 3);
  CHECK(part_products<1, 1>().size() == 1);
}
