// SPDX-License-Identifier: MIT
//
// Whether a call goes to AMX tiles, and the call.
#pragma once

#include <attn/detail/amx_attention_kernel.hpp>

namespace attn::detail {

/// Whether tiles are the faster kernel, by shape alone: the same call gets the same bits however
/// busy the machine is.
///
/// Splitting costs as much per row of Q, K and V whatever the row meets, so what decides is the
/// number of pairs per row, n_q n_kv / (n_q + n_kv), which is n / 2 for a square. Break-even,
/// measured with AVX-512 (docs/amx.md): six products n = 120 at d = 64 and 128, 190 at d = 32;
/// fewer products n = 64. Without AVX-512 the other kernel is 2 to 8 times slower.
template <class Arch>
[[nodiscard]] constexpr bool tiles_pay(const dense_problem<float>& c,
                                       [[maybe_unused]] precision_mode precision) noexcept {
  if (c.n_q < 32 || c.n_kv < 32 || c.d_qk < 16 || c.d_v < 16) return false;
  index_t least = 32;
  if (!simd::is_avx512<Arch>)
    least = 16;
  else if (precision == precision_mode::automatic)
    least = c.d_qk + c.d_v > 64 ? 64 : 104;
  const auto n_q = static_cast<double>(c.n_q), n_kv = static_cast<double>(c.n_kv);
  return n_q * n_kv >= static_cast<double>(least) * (n_q + n_kv);
}

/// Runs the call on tiles if they are there, allowed and faster; else returns false and has done
/// nothing.
template <class Arch, bool AllBfloat16, score_rule Rule>
bool dense_attention_on_tiles([[maybe_unused]] const dense_problem<float>& problem,
                              [[maybe_unused]] const Rule& rule,
                              [[maybe_unused]] precision_mode precision,
                              [[maybe_unused]] context& ctx) {
#if defined(ATTN_HAS_AMX)
  // A rule that is any function of the score costs more than the products: it stays where it is
  // called once per score.
  if constexpr (Rule::kind != rule_kind::function) {
    const amx::engine* e = amx::engine_for<Arch, AllBfloat16>(precision);
    if (e == nullptr || !tiles_pay<Arch>(problem, precision) || !simd::amx::available())
      return false;
    using worker = amx::worker<Arch, Rule>;
    const index_t per_head = worker::items_per_head(problem.n_q);
    const index_t heads = problem.n_batch * problem.n_heads;
    const index_t grain = heads >= 4 * ctx.n_threads() ? per_head : 1;
    ctx.run(heads * per_head, grain, worker::scratch_bytes(problem, rule, *e),
            [&](std::byte* scratch, work_queue& queue) noexcept {
              const simd::flush_subnormals mode;
              const simd::amx::tile_scope tiles;
              worker w(problem, rule, *e, scratch_carver(scratch));
              index_t first = 0, last = 0;
              while (queue.next(first, last)) {
                for (index_t item = first; item < last; ++item) {
                  const index_t head = item / per_head;
                  w.run(head / problem.n_heads, head % problem.n_heads, item % per_head);
                }
              }
            });
    return true;
  }
#endif
  return false;
}

}  // namespace attn::detail
