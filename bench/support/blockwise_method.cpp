// SPDX-License-Identifier: MIT
#include <algorithm>
#include <memory>

#include <attn/blockwise_attention.hpp>

#include "support/method.hpp"

namespace attn::bench {

template <class T>
method<T> blockwise_method(std::string name, index_t block) {
  return {name,
          "attn::blockwise_attention: each block of positions attends to itself alone",
          [block](const problem<T>& p, tensor_view<T> out, int threads) -> std::function<void()> {
            return [&p, out, block, ctx = std::make_shared<context>(threads)] {
              const blockwise_options options{.block = block};
              if (p.shape.causal) {
                blockwise_attention(p.q(), p.k(), p.v(), out, p.shape.rule(), options, *ctx);
              } else {
                blockwise_attention(p.q(), p.k(), p.v(), out, no_mask{}, options, *ctx);
              }
            };
          },
          [block](const problem_shape& s) {
            double pairs = 0;
            for (index_t i = 0; i < s.n_q; ++i) {
              const index_t first = i / block * block;
              pairs += static_cast<double>(std::min(s.keys(i), first + block) - first);
            }
            return pairs * static_cast<double>(s.n_batch * s.n_heads * 2 * (s.d_qk + s.d_v));
          },
          [block](const problem<T>& p, const oracle& reference) {
            return captured_by(p, reference, [&](const auto& out, const auto& lse) {
              const blockwise_options options{.block = block};
              if (p.shape.causal)
                blockwise_attention(p.q(), p.k(), p.v(), out, lse, p.shape.rule(), options);
              else
                blockwise_attention(p.q(), p.k(), p.v(), out, lse, no_mask{}, options);
            });
          },
          [block](const problem_shape& s) -> std::string {
            if (s.n_q != s.n_kv) return "it needs as many queries as keys";
            return s.n_kv > block ? "" : "the sequence is a single block: that is dense attention";
          }};
}

template method<float> blockwise_method(std::string, index_t);
template method<double> blockwise_method(std::string, index_t);
template method<Eigen::half> blockwise_method(std::string, index_t);
template method<Eigen::bfloat16> blockwise_method(std::string, index_t);

}  // namespace attn::bench
