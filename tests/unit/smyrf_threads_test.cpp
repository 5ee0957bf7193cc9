// SPDX-License-Identifier: MIT
//
// Threads in SMYRF attention.
#include "support/catch.hpp"
#include "support/smyrf_call.hpp"

#include <array>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

using namespace attn_test;
using attn::smyrf_clustering;
using attn::smyrf_clusters;
using attn::smyrf_duplicates;
using attn::smyrf_options;

TEMPLATE_TEST_CASE("smyrf_attention: the same bits for any number of threads", "", float,
                   Eigen::half) {
  for (const dense_problem& p :
       {dense_problem{.n_q = 500, .n_kv = 300, .d_qk = 16},
        dense_problem{.n_batch = 2, .n_heads = 8, .n_kv_heads = 4, .n_q = 100, .n_kv = 100}})
    for (const bool far : {false, true})
      for (const bool self : {false, true}) {
        if (self && p.n_q != p.n_kv) continue;
        const smyrf_options options{.clusters = 7,
                                    .rounds = 3,
                                    .attend_self = self,
                                    .far_field = far ? attn::smyrf_far_field::means
                                                     : attn::smyrf_far_field::none};
        dense_operands<TestType> one(p);
        attn::smyrf_attention(one.q.view(), one.k.view(), one.v.view(), one.out.view(),
                              one.lse.view(), options);
        for (const int n_threads : {2, 3, 8}) {
          attn::context ctx(n_threads);
          dense_operands<TestType> x(p);
          attn::smyrf_attention(x.q.view(), x.k.view(), x.v.view(), x.out.view(), x.lse.view(),
                                options, attn::no_mask{}, ctx);
          CHECK(compare_bits(x.out.values(), one.out.values()));
          CHECK(compare_bits(x.lse.values(), one.lse.values()));
        }
      }
}
