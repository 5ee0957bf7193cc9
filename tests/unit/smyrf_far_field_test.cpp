// SPDX-License-Identifier: MIT
//
// The far field of SMYRF attention against the oracle.
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

#define ELEMENT_TYPES float, double, Eigen::half, Eigen::bfloat16

TEMPLATE_TEST_CASE("smyrf_attention: the far field counts means of the keys that are not met", "",
                   ELEMENT_TYPES) {
  for (const auto clustering : {smyrf_clustering::ranks, smyrf_clustering::bisection})
    for (const index_t rounds : {1, 3})
      for (const index_t clusters : {1, 2, 5, 8, 21})
        for (const double softcap : {0.0, 2.0})
          for (const bool short_keys : {false, true}) {
            const dense_problem p{.n_batch = 2,
                                  .n_heads = 2,
                                  .n_kv_heads = 1,
                                  .n_q = 60,
                                  .n_kv = 90,
                                  .d_qk = 10,
                                  .d_v = 13};
            CAPTURE(rounds, clusters, softcap, short_keys);
            const std::vector<index_t> k_lengths = {90, 11};
            smyrf_options options{.clusters = clusters, .rounds = rounds, .softcap = softcap};
            options.clustering = clustering;
            options.far_field = attn::smyrf_far_field::means;
            if (short_keys) options.key_lengths = k_lengths;
            dense_operands<TestType> x(p);
            const smyrf_clusters c(x.q.view(), x.k.view(), options);
            attn::smyrf_attention(x.q.view(), x.k.view(), x.v.view(), x.out.view(), x.lse.view(),
                                  c);
            const reference::tensor q = x.q.values(), k = x.k.values(), v = x.v.values();
            const reference::tensor out = x.out.values(), lse = x.lse.values();
            const auto head = [](const reference::tensor& t, index_t b, index_t h) {
              reference::tensor one({1, 1, t.extent(2), t.extent(3)});
              for (index_t i = 0; i < t.extent(2); ++i)
                for (index_t e = 0; e < t.extent(3); ++e) one(0, 0, i, e) = t(b, h, i, e);
              return one;
            };
            for (index_t b = 0; b < 2; ++b)
              for (index_t h = 0; h < 2; ++h) {
                const auto expected = reference::smyrf_far_field(
                    head(q, b, h), head(k, b, 0), head(v, b, 0), rounds_of(c, b, h, 60, 90),
                    clusters, meaning_of(options));
                const double eps = arithmetic_epsilon<TestType>;
                const double largest = 5;  // |v|, |lse|, scores: normal numbers
                CHECK(compare_within(head(lse, b, h), expected.lse, 100 * eps * largest));
                CHECK(compare_within(head(out, b, h), expected.out,
                                     (100 * eps + storage_rounding<TestType>()) * largest));
              }
          }
}
