// SPDX-License-Identifier: MIT
#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include <attn/pooled_attention.hpp>
#include <attn/scorers.hpp>

#include "support/method.hpp"

namespace attn::bench {

namespace {

// What a key receives of the attention of up to 256 queries, evenly spread, in multiples of the
// mean: [B, Hkv, n_kv, 1]. A model would have learned its scores.
template <class T>
std::vector<arithmetic_t<T>> received_attention(const problem<T>& p) {
  using S = arithmetic_t<T>;
  const problem_shape& s = p.shape;
  const index_t step = std::max<index_t>(1, s.n_q / 256), n = (s.n_q + step - 1) / step;
  const auto all = p.q();
  const tensor_view<const T> q(all.data_handle(), {s.n_batch, s.n_heads, n, s.d_qk},
                               {all.stride(0), all.stride(1), step * all.stride(2), 1});
  const auto rows = static_cast<std::size_t>(s.n_batch * s.n_heads * n);
  std::vector<T> out(rows * static_cast<std::size_t>(s.d_v));
  std::vector<S> lse(rows), scores(static_cast<std::size_t>(s.n_batch * s.n_kv_heads * s.n_kv));
  const auto log_sums = bhld(lse.data(), s.n_batch, s.n_heads, n, 1);
  dense_attention(q, p.k(), p.v(), bhld(out.data(), s.n_batch, s.n_heads, n, s.d_v), log_sums);
  power_scorer{}(q, p.k(), log_sums, bhld(scores.data(), s.n_batch, s.n_kv_heads, s.n_kv, 1));
  for (S& score : scores) score *= static_cast<S>(s.n_kv) / static_cast<S>(n);
  return scores;
}

}  // namespace

template <class T>
method<T> pooled_method(std::string name, index_t kept) {
  return {name,
          "attn::pooled_attention: keys and values pooled to so many by the attention they get",
          [kept](const problem<T>& p, tensor_view<T> out, int threads) -> std::function<void()> {
            return [&p, out, kept, scores = received_attention(p),
                    ctx = std::make_shared<context>(threads)] {
              const problem_shape& s = p.shape;
              pooled_attention(p.q(), p.k(), p.v(),
                               bhld(scores.data(), s.n_batch, s.n_kv_heads, s.n_kv, 1), out,
                               pooled_options{.k = kept}, *ctx);
            };
          },
          [kept](const problem_shape& s) {
            const auto width = static_cast<double>(2 * (s.d_qk + s.d_v));
            return width * static_cast<double>(s.n_batch * s.n_heads * s.n_q * kept) +
                   width * static_cast<double>(s.n_batch * s.n_kv_heads * s.n_kv);
          },
          [](const problem<T>&, const oracle&) { return std::nullopt; },  // mixtures of keys
          [kept](const problem_shape& s) -> std::string {
            if (s.causal) return "a pooled key is of many positions: nothing is causal";
            return s.n_kv > kept ? "" : "there are no more keys than that";
          }};
}

template method<float> pooled_method(std::string, index_t);
template method<double> pooled_method(std::string, index_t);
template method<Eigen::half> pooled_method(std::string, index_t);
template method<Eigen::bfloat16> pooled_method(std::string, index_t);

}  // namespace attn::bench
