// SPDX-License-Identifier: MIT
//
// SMYRF with everything at once, forward and backward: grouped heads, lengths from 0, causal or
// not, own keys, duplicates, softcap, both clusterings, layouts, small and odd sizes, threads.
#include "support/backward_call.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/smyrf_call.hpp"

#include <algorithm>
#include <utility>
#include <vector>

using namespace attn_test;
using attn::smyrf_clustering;
using attn::smyrf_clusters;
using attn::smyrf_duplicates;
using attn::smyrf_options;

namespace {

index_t one_of(random_source& random, const std::vector<index_t>& values) {
  return values[static_cast<std::size_t>(
      random.integer(0, static_cast<index_t>(values.size()) - 1))];
}

layout one_of(random_source& random) {
  const std::vector<layout> all = {layout::contiguous, layout::offset_by_one,
                                   layout::heads_interleaved, layout::column_major};
  return all[static_cast<std::size_t>(random.integer(0, 3))];
}

std::vector<index_t> random_lengths(random_source& random, index_t batch, index_t n) {
  std::vector<index_t> lengths;
  for (index_t b = 0; b < batch; ++b) {
    lengths.push_back(random.coin(0.2) ? 0 : random.integer(0, n));
  }
  return lengths;
}

}  // namespace

TEMPLATE_TEST_CASE("smyrf: everything at once, against the oracle", "", float, Eigen::half) {
  random_source random(17);
  attn::context three(3);
  for (std::uint64_t seed = 1; seed <= 120; ++seed) {
    const index_t heads_kv = random.integer(1, 3);
    const index_t n_q = random.integer(1, 130);
    const dense_problem p{.n_batch = random.integer(1, 3),
                          .n_heads = heads_kv * random.integer(1, 3),
                          .n_kv_heads = heads_kv,
                          .n_q = n_q,
                          .n_kv = random.coin() ? n_q : random.integer(1, 130),
                          .d_qk = one_of(random, {1, 2, 3, 8, 17, 32}),
                          .d_v = one_of(random, {1, 3, 4, 16, 33}),
                          .inputs = one_of(random),
                          .outputs = one_of(random),
                          .seed = seed};
    smyrf_options o{.clusters = random.integer(1, std::min({p.n_q, p.n_kv, index_t{40}})),
                    .rounds = random.integer(1, 5),
                    .seed = random.bits()};
    if (random.coin()) o.duplicates = smyrf_duplicates::removed;
    if (random.coin()) o.clustering = smyrf_clustering::bisection;
    if (random.coin(0.2)) o.softcap = 3;
    o.local_round = random.coin(0.2);
    o.attend_self = p.n_q == p.n_kv && random.coin();
    const std::vector<index_t> q_lengths = random_lengths(random, p.n_batch, p.n_q);
    const std::vector<index_t> k_lengths = random_lengths(random, p.n_batch, p.n_kv);
    if (random.coin()) o.query_lengths = q_lengths;
    if (random.coin()) o.key_lengths = k_lengths;
    const bool causal = random.coin();
    const index_t offset = random.integer(-20, 20);
    attn::context& ctx = random.coin() ? three : attn::default_context();
    CAPTURE(p, o.clusters, o.rounds, causal, offset, o.attend_self, o.softcap);

    backward_operands<TestType> y(p);
    const smyrf_clusters c(y.x.q.view(), y.x.k.view(), o, ctx);
    CHECK(fault_of(c, p) == "");
    const auto run = [&](const auto& rule, const reference::score_rule& meaning) {
      CHECK(check_smyrf(y.x, o, rule, meaning, ctx));
      attn::smyrf_attention_backward(std::as_const(y.x.q).view(), std::as_const(y.x.k).view(),
                                     std::as_const(y.x.v).view(), std::as_const(y.x.out).view(),
                                     std::as_const(y.x.lse).view(), std::as_const(y.d_out).view(),
                                     c, y.d_q.view(), y.d_k.view(), y.d_v.view(), rule, ctx);
      CHECK(y.matches(meaning & reference::counted(meetings_of(c, p)),
                      {.scale = o.scale, .softcap = o.softcap, .sinks = {}},
                      {.constant = 16 + 2 * static_cast<double>(o.rounds)}));
    };
    if (causal)
      run(attn::causal_mask{offset}, reference::causal_mask(offset));
    else
      run(attn::no_mask{}, {});
  }
}
