// SPDX-License-Identifier: MIT
//
// The two products of attention on tiles, with the softmax of one chunk of keys between the
// products of the next.
//
// Layout, as in tile_products.hpp: lanes are queries, here 32 per tile of queries, and keys come in
// chunks of 32.
//
//   S [32 keys][32 queries]  scores              P [part][2 tiles][16 pairs of keys][16 queries][2]
//   O [dims][32 queries]     not normalised      l, −m [32]   state of the softmax
//
// Scores are in units of ln 2: 2^(s − m) is the weight.
#pragma once

#include <attn/detail/amx_plan.hpp>
#include <attn/simd/amx_vector.hpp>

#if defined(ATTN_HAS_AMX)

#include <utility>

namespace attn::detail::amx {

using simd::amx::floats;
using simd::amx::words;

inline constexpr index_t tile_rows = 32;   ///< queries per tile
inline constexpr index_t chunk_keys = 32;  ///< keys per chunk
inline constexpr index_t step_dims = 32;   ///< dims, or keys, that a step sums over
/// Numbers of bfloat16 in a part of an operand of a step, and floats in its 2 x 2 sums.
inline constexpr index_t part_size = 1024, sums_size = 1024;
/// Where sums 2 begin.
inline constexpr index_t late_sums = 16 * simd::amx::pair_stride;

/// How many parts each operand has.
template <int PartsQK, int PartsP, int PartsV, bool ScaleLate>
struct parts {
  static constexpr int q = PartsQK, k = PartsQK, p = PartsP, v = PartsV;
  /// Queries are split as they are and the scale multiplies scores: what keeps queries that are
  /// bfloat16 numbers in one part.
  static constexpr bool scale_late = ScaleLate;
};

/// Scores of a chunk that wait for their softmax.
struct waiting_scores {
  const float* s;     ///< [32][32]
  std::uint16_t* p;   ///< [Parts::p][1024]
  const float* negm;  ///< [32]
  float* l;           ///< [32]
  float scale;        ///< of these scores, where Parts::scale_late
};

struct scores_operands {
  const std::uint16_t* q;  ///< [steps][Parts::q][1024]
  const std::uint16_t* k;  ///< [steps][Parts::k][1024]
  index_t steps;
  float* s;              ///< [32][32]; sums 2 stay pending
  float* pending;        ///< where pending sums of the step before go
  waiting_scores other;  ///< the chunk before
  const char* prefetch;  ///< prefetched_bytes(steps) of what comes next
};

/// Lines of 64 bytes that are prefetched per unit of vector work: a wider head has more to come.
constexpr int prefetched_lines(index_t steps) { return steps > 2 ? 4 : 2; }
constexpr index_t prefetched_bytes(index_t steps) { return 32 * 64 * prefetched_lines(steps); }

struct values_operands {
  const std::uint16_t* p;  ///< [chunks][Parts::p][1024]
  const std::uint16_t* v;  ///< [panels][chunks][Parts::v][1024]
  index_t chunks, panels;
  index_t panel_stride;  ///< numbers from one panel of v to the next
  float* o;              ///< [panels][32][32]; sums 2 of the last panel stay pending
  float* pending;
};

/// The softmax of a chunk, piece by piece.
template <class Parts>
struct softmax_state {
  const float* s;
  std::uint16_t* p;
  floats negm[2], sum[2], scale;
  const char* prefetch;

  ATTN_AMX_INLINE void start(const waiting_scores& x) noexcept {
    s = x.s, p = x.p;
    negm[0] = simd::amx::load(x.negm), negm[1] = simd::amx::load(x.negm + 16);
    sum[0] = sum[1] = simd::amx::zero();
    scale = simd::amx::fill(x.scale);
  }
  // Unit 2 t + j: keys 2 t and 2 t + 1 for queries [16 j, 16 j + 16).
  template <int Unit, int Lines>
  ATTN_AMX_INLINE void weigh() noexcept {
    constexpr int t = Unit / 2, j = Unit % 2;
#pragma GCC unroll 4
    for (int i = 0; i < Lines; ++i) __builtin_prefetch(prefetch + (Unit * Lines + i) * 64, 0, 2);
    floats a = simd::amx::load(s + 2 * t * 32 + 16 * j);
    floats b = simd::amx::load(s + (2 * t + 1) * 32 + 16 * j);
    if constexpr (Parts::scale_late) {
      a = simd::amx::multiply(a, scale), b = simd::amx::multiply(b, scale);
    }
    a = simd::amx::add(a, negm[j]), b = simd::amx::add(b, negm[j]);
    if constexpr (Parts::p == 1)
      a = simd::amx::exp2_rough(a), b = simd::amx::exp2_rough(b);
    else
      a = simd::amx::exp2(a), b = simd::amx::exp2(b);
    sum[j] = simd::amx::add(sum[j], simd::amx::add(a, b));
    words part[Parts::p];
    simd::amx::split(a, b, part);
#pragma GCC unroll 3
    for (int i = 0; i < Parts::p; ++i) {
      simd::amx::store(p + i * part_size + j * simd::amx::tile_halves + t * 32, part[i]);
    }
  }
  ATTN_AMX_INLINE void advance(index_t units, int lines) noexcept {
    s += units / 2 * 64;
    p += units / 2 * 32;
    prefetch += units * lines * 64;
  }
  ATTN_AMX_INLINE void finish(float* l) noexcept {
    simd::amx::store(l, simd::amx::add(simd::amx::load(l), sum[0]));
    simd::amx::store(l + 16, simd::amx::add(simd::amx::load(l + 16), sum[1]));
  }
};

/// Operands of one step.
struct step_operands {
  const std::uint16_t *a, *b;
  const float* start;  ///< null: sums start at 0
  float *out, *pending;
};

// Two 16 x 16 tiles side by side, two of them below each other.
constexpr index_t sums_offset(int sums) { return (sums / 2) * late_sums + (sums % 2) * 16; }

/// Op I of a plan.
template <class Step, int I, bool FromZero, class Softmax>
ATTN_AMX_INLINE void execute(const step_operands& x, Softmax& softmax) noexcept {
  constexpr tile_op op = Step::plan[I];
  if constexpr (op.action == tile_action::load_a) {
    simd::amx::load_streaming<op.tile>(x.a + op.part * part_size +
                                       op.half * simd::amx::tile_halves);
  } else if constexpr (op.action == tile_action::load_b) {
    simd::amx::load<op.tile>(x.b + op.part * part_size + op.half * simd::amx::tile_halves);
  } else if constexpr (op.action == tile_action::multiply) {
    simd::amx::multiply<op.sums, op.tile, op.tile_b>();
  } else if constexpr (op.action == tile_action::start) {
    if constexpr (FromZero)
      simd::amx::clear<op.sums>();
    else
      simd::amx::load_sums<op.sums>(x.start + sums_offset(op.sums));
  } else if constexpr (op.action == tile_action::store) {
    simd::amx::store_sums<op.sums>(x.out + sums_offset(op.sums));
  } else if constexpr (op.action == tile_action::store_pending) {
    simd::amx::store_sums<2>(x.pending);
  } else {
    softmax.template weigh<op.unit, Step::lines>();
  }
}

template <class Step, bool FromZero, class Softmax, int... I>
ATTN_AMX_INLINE void execute_all(const step_operands& x, Softmax& softmax,
                                 std::integer_sequence<int, I...>) noexcept {
  (execute<Step, I, FromZero>(x, softmax), ...);
}

template <int PartsA, int PartsB, bool First, bool Last, int Units, int Lines>
struct planned_step {
  static constexpr int lines = Lines;
  static constexpr tile_plan plan =
      tile_plan::make<PartsA, PartsB>(step_kind{.first = First, .last = Last, .units = Units});
};

struct no_softmax {};

/// The products of one choice of parts.
template <class Arch, class Parts>
struct products {
  /// S = K Q^T of one chunk, and the softmax of the chunk before.
  ATTN_AMX_FUNCTION static void scores(const scores_operands& operands) noexcept {
    const scores_operands x = operands;
    softmax_state<Parts> softmax;
    softmax.start(x.other);
    softmax.prefetch = x.prefetch;
    step_operands step{x.k, x.q, nullptr, x.s, x.pending};
    const index_t steps = x.steps;
    if (steps == 1) {
      qk_step<true, true, 32, prefetched_lines(1)>(step, softmax);
    } else if (steps == 2) {
      qk_step<true, false, 16, prefetched_lines(2)>(step, softmax);
      qk_step<false, true, 16, prefetched_lines(2)>(step, softmax);
    } else {
      // 32 units: 8 in the first and last step, 16 in one or two of those between.
      qk_step<true, false, 8, prefetched_lines(3)>(step, softmax);
      if (steps == 3) {
        qk_step<false, false, 16, prefetched_lines(3)>(step, softmax);
      } else {
        qk_step<false, false, 8, prefetched_lines(3)>(step, softmax);
        qk_step<false, false, 8, prefetched_lines(3)>(step, softmax);
        for (index_t i = 4; i < steps; ++i)
          qk_step<false, false, 0, prefetched_lines(3)>(step, softmax);
      }
      qk_step<false, true, 8, prefetched_lines(3)>(step, softmax);
    }
    softmax.finish(x.other.l);
  }

  /// The softmax alone.
  ATTN_AMX_FUNCTION static void weights(const waiting_scores& operands) noexcept {
    const waiting_scores x = operands;
    softmax_state<Parts> softmax;
    softmax.start(x);
    softmax.prefetch = nullptr;
    for (int i = 0; i < 8; ++i) {
      softmax.template weigh<0, 0>();
      softmax.template weigh<1, 0>();
      softmax.template weigh<2, 0>();
      softmax.template weigh<3, 0>();
      softmax.advance(4, 0);
    }
    softmax.finish(x.l);
  }

  /// O += V^T P of the chunks of a block. Returns where sums 2 have to go.
  ATTN_AMX_FUNCTION static float* values(const values_operands& operands) noexcept {
    const values_operands x = operands;
    float *o = x.o, *pending = x.pending;
    for (index_t panel = 0; panel < x.panels; ++panel, o += sums_size) {
      step_operands step{x.v + panel * x.panel_stride, x.p, o, o, pending};
      if (x.chunks == 1) {
        pv_step<true, true>(step);
      } else {
        pv_step<true, false>(step);
        for (index_t i = 2; i < x.chunks; ++i) pv_step<false, false>(step);
        pv_step<false, true>(step);
      }
      pending = o + late_sums;
    }
    return pending;
  }

 private:
  template <bool First, bool Last, int Units, int Lines>
  ATTN_AMX_INLINE static void qk_step(step_operands& x, softmax_state<Parts>& softmax) noexcept {
    using step = planned_step<Parts::k, Parts::q, First, Last, Units, Lines>;
    execute_all<step, true>(x, softmax, std::make_integer_sequence<int, step::plan.size()>());
    softmax.advance(Units, Lines);
    x.a += Parts::k * part_size, x.b += Parts::q * part_size;
  }
  template <bool First, bool Last>
  ATTN_AMX_INLINE static void pv_step(step_operands& x) noexcept {
    using step = planned_step<Parts::v, Parts::p, First, Last, 0, 0>;
    no_softmax none;
    execute_all<step, false>(x, none, std::make_integer_sequence<int, step::plan.size()>());
    x.a += Parts::v * part_size, x.b += Parts::p * part_size;
  }
};

/// Stores pending sums where they belong.
inline void store_pending(float* pending) noexcept { simd::amx::store_sums<2>(pending); }

}  // namespace attn::detail::amx

#endif  // ATTN_HAS_AMX
