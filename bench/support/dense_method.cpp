// SPDX-License-Identifier: MIT
#include <memory>

#include <attn/dense_attention.hpp>
#include <attn/simd/amx.hpp>

#include "support/method.hpp"

namespace attn::bench {

bool has_tiles() {
#if defined(ATTN_HAS_AMX)
  return simd::amx::available();
#else
  return false;
#endif
}

template <class T>
method<T> dense_method(std::string name, std::string_view summary, precision_mode precision) {
  return {
      std::move(name), summary,
      [precision](const problem<T>& p, tensor_view<T> out, int threads) -> std::function<void()> {
        return [&p, out, options = dense_options{.precision = precision},
                ctx = std::make_shared<context>(threads)] {
          if (p.shape.causal) {
            dense_attention(p.q(), p.k(), p.v(), out, p.shape.rule(), options, *ctx);
          } else {
            dense_attention(p.q(), p.k(), p.v(), out, no_mask{}, options, *ctx);
          }
        };
      }};
}

template method<float> dense_method(std::string, std::string_view, precision_mode);
template method<double> dense_method(std::string, std::string_view, precision_mode);
template method<Eigen::half> dense_method(std::string, std::string_view, precision_mode);
template method<Eigen::bfloat16> dense_method(std::string, std::string_view, precision_mode);

}  // namespace attn::bench
