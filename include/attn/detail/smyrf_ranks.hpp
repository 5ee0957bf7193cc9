// SPDX-License-Identifier: MIT
//
// Clusters by rank of a hash: equal ranks of queries and keys are paired.
#pragma once

#include <algorithm>

#include <attn/context.hpp>
#include <attn/detail/scratch_carver.hpp>
#include <attn/detail/smyrf_cut.hpp>
#include <attn/detail/smyrf_hasher.hpp>
#include <attn/detail/smyrf_plan.hpp>
#include <attn/smyrf_options.hpp>

namespace attn::detail {

template <class Arch>
class smyrf_ranker {
 public:
  smyrf_ranker(smyrf_plan& plan, const smyrf_operands& x, const smyrf_options& options,
               index_t first_round)
      : plan_(plan), hasher_(plan, x, options, first_round) {}

  // Items: the heads of q, then those of k.
  void run(context& ctx) {
    hasher_.run(ctx);
    const auto carve = [&](scratch_carver& memory) {
      const index_t n = std::max(plan_.n_q, plan_.n_kv);
      const smyrf_cut_scratch s = smyrf_cut_scratch::carve(memory, n, plan_.clusters);
      const cut_memory all{s, memory.take<index_t>(plan_.clusters + 1),
                           memory.take<double>(smyrf_padded<Arch>(n)),
                           memory.take<float>(hasher_.lift_size(n))};
      return all;
    };
    scratch_carver bytes;
    (void)carve(bytes);
    const index_t q_items = plan_.n_batch * plan_.n_heads;
    const index_t k_items = plan_.n_batch * plan_.n_heads_kv;
    ctx.run(q_items + k_items, 1, bytes.used(),
            [&](std::byte* scratch, work_queue& queue) noexcept {
              scratch_carver carver(scratch);
              const cut_memory memory = carve(carver);
              for (index_t first, last; queue.next(first, last);) {
                const int side = first < q_items ? 0 : 1;
                const index_t item = side == 0 ? first : first - q_items;
                const index_t heads = side == 0 ? plan_.n_heads : plan_.n_heads_kv;
                cut_head(side, item / heads, item % heads, memory);
              }
            });
  }

 private:
  struct cut_memory {
    smyrf_cut_scratch cut;
    index_t* begin;  // [clusters + 1]
    double* hash;    // [n]
    float* lift;     // smyrf_hasher::lift_size(n)
  };

  void cut_head(int side, index_t b, index_t h, const cut_memory& memory) noexcept {
    const index_t length = side == 0 ? plan_.q_length(b) : plan_.k_length(b);
    hasher_.lift_rows(side, b, h, memory.lift);
    for (index_t c = 0; c <= plan_.clusters; ++c) memory.begin[c] = plan_.begin(length, c);
    for (index_t r = 0; r < hasher_.rounds(); ++r) {
      hasher_.hash(side, b, h, r, memory.lift, memory.hash);
      const index_t round = plan_.rounds - hasher_.rounds() + r;
      index_t* order = side == 0 ? plan_.queries(b, h, round) : plan_.keys(b, h, round);
      smyrf_cut<Arch>(memory.hash, length, plan_.clusters, memory.begin, memory.cut,
                      [order](index_t i, index_t slot) { order[slot] = i; });
    }
  }

  smyrf_plan& plan_;
  smyrf_hasher<Arch> hasher_;
};

}  // namespace attn::detail
