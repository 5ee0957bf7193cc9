// SPDX-License-Identifier: MIT
//
// A document of 4096 positions in chunks of 512: an eighth of the scores of full attention. Padding
// is masked at positions of the whole document, and the chunk that holds the answer is trained.
#include <attn/blockwise_attention.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <vector>

using attn::index_t;

int main() {
  constexpr index_t n_heads = 2, n = 4096, d = 64, block = 512, length = 3900;
  const auto tensor = [](int seed) {
    std::vector<float> x(n_heads * n * d);
    for (std::size_t i = 0; i < x.size(); ++i)
      x[i] = static_cast<float>((static_cast<int>(i % 9973) * (seed + 17)) % 1000) / 500 - 1;
    return x;
  };
  const auto as_heads = [](auto& x) { return attn::bhld(x.data(), 1, n_heads, n, d); };
  std::vector<float> q = tensor(1), k = tensor(2), v = tensor(3), out(q.size()), full(q.size());
  std::vector<float> lse(n_heads * n);
  const auto as_rows = attn::bhld(lse.data(), 1, n_heads, n, 1);

  // 1. Positions from `length` on are padding: rules see positions of the whole document.
  const std::array<index_t, 1> lengths{length};
  const attn::key_lengths padding{lengths};
  const auto seconds = [](const auto& call) {
    const auto start = std::chrono::steady_clock::now();
    call();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  const double t_block = seconds([&] {
    attn::blockwise_attention(as_heads(q), as_heads(k), as_heads(v), as_heads(out), as_rows,
                              padding, {.block = block});
  });
  const double t_full = seconds([&] {
    attn::dense_attention(as_heads(q), as_heads(k), as_heads(v), as_heads(full), padding);
  });
  std::printf("full %.1f ms, in chunks of %td %.1f ms\n", 1e3 * t_full, block, 1e3 * t_block);

  // 2. It is dense attention under the block-diagonal mask.
  attn::dense_attention(as_heads(q), as_heads(k), as_heads(v), as_heads(full),
                        attn::block_mask{block} & padding);
  float difference = 0;
  for (std::size_t i = 0; i < out.size(); ++i)
    difference = std::max(difference, std::abs(out[i] - full[i]));

  // 3. Gradients: what is not in the chunk of a trained row gets none.
  std::vector<float> d_out(out.size()), d_q(q.size()), d_k(k.size()), d_v(v.size());
  as_heads(d_out)(0, 0, 1000, 0) = 1;
  attn::blockwise_attention_backward(as_heads(q), as_heads(k), as_heads(v), as_heads(out), as_rows,
                                     as_heads(d_out), as_heads(d_q), as_heads(d_k), as_heads(d_v),
                                     padding, {.block = block});
  const bool inside = as_heads(d_v)(0, 0, 600, 0) > 0, outside = as_heads(d_v)(0, 0, 400, 0) > 0;
  std::printf("largest difference %g; position 600 learns: %d, position 400: %d\n",
              static_cast<double>(difference), inside, outside);
  return difference < 1e-5f && inside && !outside ? 0 : 1;
}
