// SPDX-License-Identifier: MIT
#include <memory>

#include <attn/dense_attention.hpp>

#include "support/method.hpp"

namespace attn::bench {

template <class T>
method<T> dense_method() {
  return {"dense", "attn::dense_attention: exact, tiled, the scores are never stored",
          [](const problem<T>& p, tensor_view<T> out, int threads) -> std::function<void()> {
            return [&p, out, ctx = std::make_shared<context>(threads)] {
              if (p.shape.causal) {
                dense_attention(p.q(), p.k(), p.v(), out, p.shape.rule(), {}, *ctx);
              } else {
                dense_attention(p.q(), p.k(), p.v(), out, no_mask{}, {}, *ctx);
              }
            };
          }};
}

template method<float> dense_method();
template method<double> dense_method();
template method<Eigen::half> dense_method();
template method<Eigen::bfloat16> dense_method();

}  // namespace attn::bench
