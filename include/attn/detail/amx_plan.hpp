// SPDX-License-Identifier: MIT
//
// The order of tile instructions, worked out when compiling: a step multiplies 2 x 2 tiles.
//
//                      queries 0-15   queries 16-31      A: keys, or dims of V   [2 tiles][16][32]
//     A, tile 0           sums 0          sums 1         B: queries, or weights  [2 tiles][32][16]
//     A, tile 1           sums 2          sums 3
//
// Tiles 0-3 hold sums, 4 and 5 operand A, 6 and 7 operand B. Each operand comes in parts
// (bfloat16 numbers whose sum it is) and all products of parts go into the same sums.
//
// Two orders. A step in the middle takes one product of parts after the other for all four sums:
// the fewest loads. In the first and the last step each of the sums gets all its products in turn
// (a chain of dependent products runs at full speed), so that the others can be loaded and stored
// meanwhile: a tile store costs 16 cycles if nothing hides it, as much as a product. Sums 0, 1 and
// 3 are stored one group late, sums 2 not before the first group of whatever step comes next.
//
// Every element gets its products in the same order in all steps: its bits depend neither on where
// in a phase a step stands nor on which of the two tiles of queries the element is in.
#pragma once

#include <array>

namespace attn::detail {

/// A product of part a of operand A and part b of operand B. Part 0 is the largest.
struct part_product {
  int a, b;
};

/// Which parts are multiplied, small products first; those that are left out lie below the
/// precision that the number of parts stands for.
template <int PartsA, int PartsB>
[[nodiscard]] constexpr auto part_products() noexcept {
  if constexpr (PartsA == 3)
    return std::array<part_product, 6>{{{2, 0}, {1, 0}, {1, 1}, {0, 1}, {0, 0}, {0, 2}}};
  else if constexpr (PartsA == 2)
    return std::array<part_product, 3>{{{1, 0}, {0, 0}, {0, 1}}};
  else if constexpr (PartsB == 3)
    return std::array<part_product, 3>{{{0, 2}, {0, 1}, {0, 0}}};
  else
    return std::array<part_product, 1>{{{0, 0}}};
}

enum class tile_action {
  load_a,         ///< tile `tile` <- part `part` of half `half`
  load_b,         ///< the same
  multiply,       ///< sums `sums` += tile `tile` * tile `tile_b`
  start,          ///< sums `sums` <- 0 or memory
  store,          ///< sums `sums` -> memory
  store_pending,  ///< sums 2 of the step before -> memory
  weigh,          ///< one unit of vector work, number `unit`
};

struct tile_op {
  tile_action action;
  int sums = 0, tile = 0, tile_b = 0, part = 0, half = 0, unit = 0;
};

/// Where a step stands among those that add to the same sums, and the units of vector work to
/// spread between its products.
struct step_kind {
  bool first, last;
  int units;
};

class tile_plan {
 public:
  template <int PartsA, int PartsB>
  [[nodiscard]] static constexpr tile_plan make(step_kind kind) noexcept {
    constexpr auto products = part_products<PartsA, PartsB>();
    constexpr int order[4] = {0, 1, 3, 2};
    tile_plan plan;
    plan.products_left_ = static_cast<int>(products.size()) * 4;
    plan.n_products_ = plan.products_left_;
    plan.n_units_ = kind.units;
    if (kind.first || kind.last) {
      for (int n = 0; n < 4; ++n) {
        const int sums = order[n];
        if (n == 1 && kind.first) plan.push({tile_action::store_pending});
        if (kind.first) plan.push({tile_action::start, sums});
        for (const part_product& p : products) {
          plan.product(sums, p, PartsA == 1 ? sums / 2 : p.a & 1, PartsB == 1 ? sums % 2 : p.b & 1);
        }
        if (n > 0 && kind.last) plan.push({tile_action::store, order[n - 1]});
      }
    } else {
      for (const part_product& p : products) {
        for (const int sums : order) plan.product(sums, p, sums / 2, sums % 2);
      }
    }
    return plan;
  }

  [[nodiscard]] constexpr int size() const noexcept { return size_; }
  [[nodiscard]] constexpr tile_op operator[](int i) const noexcept {
    return ops_[static_cast<std::size_t>(i)];
  }

 private:
  // One product, after loads of what its tiles don't hold, then the vector work that is due.
  constexpr void product(int sums, part_product p, int slot_a, int slot_b) noexcept {
    const int half_a = sums / 2, half_b = sums % 2;
    if (held_[slot_a] != 1 + p.a * 2 + half_a) {
      held_[slot_a] = 1 + p.a * 2 + half_a;
      push({tile_action::load_a, 0, 4 + slot_a, 0, p.a, half_a});
    }
    if (held_[2 + slot_b] != 1 + p.b * 2 + half_b) {
      held_[2 + slot_b] = 1 + p.b * 2 + half_b;
      push({tile_action::load_b, 0, 6 + slot_b, 0, p.b, half_b});
    }
    push({tile_action::multiply, sums, 4 + slot_a, 6 + slot_b});
    --products_left_;
    const int due = (n_products_ - products_left_) * n_units_ / n_products_;
    for (; units_done_ < due; ++units_done_) {
      push({tile_action::weigh, 0, 0, 0, 0, 0, units_done_});
    }
  }

  constexpr void push(const tile_op& op) noexcept {
    ops_[static_cast<std::size_t>(size_)] = op;
    ++size_;
  }

  std::array<tile_op, 96> ops_{};
  int size_ = 0;
  int held_[4] = {};  // 1 + 2 part + half in tiles 4-7; 0 is nothing
  int products_left_ = 0, n_products_ = 0, n_units_ = 0, units_done_ = 0;
};

}  // namespace attn::detail
