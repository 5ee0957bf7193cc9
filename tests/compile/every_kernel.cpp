// SPDX-License-Identifier: MIT
//
// Every kernel once, to see that a build without optimisation compiles: intrinsics are macros
// there, which take less than the functions they are otherwise.
#include <vector>

#include <attn/attn.hpp>

namespace {

template <class T>
void call_every_kernel() {
  using attn::bhld;
  constexpr attn::index_t n = 64, d = 16, slots = 8;
  std::vector<T> data(n * d), row(n);
  const auto x = [&] { return bhld(data.data(), 1, 1, n, d); };
  const auto one = [&] { return bhld(row.data(), 1, 1, n, 1); };
  const attn::causal_mask causal;
  attn::dense_attention(x(), x(), x(), x(), one(), causal, {.softcap = 2});
  attn::dense_attention_backward(x(), x(), x(), x(), one(), x(), x(), x(), x(), causal);
  attn::blockwise_attention(x(), x(), x(), x(), causal, {.block = 16});
  attn::merge_attention(x(), one(), x(), one(), x(), one());
  (void)attn::diagnose_attention(x(), x());
  const attn::tournament plan(one(), slots);
  attn::soft_topk(plan, x(), bhld(data.data(), 1, 1, slots, d));
  attn::soft_topk_backward(plan, x(), bhld(data.data(), 1, 1, slots, d),
                           bhld(row.data(), 1, 1, slots, 1), x(), one());
  attn::pooled_attention(x(), x(), x(), one(), x(), {.k = slots});
  const attn::smyrf_clusters clusters(x(), x(), {.clusters = 4});
  attn::smyrf_attention(x(), x(), x(), x(), one(), clusters, causal);
  attn::smyrf_attention_backward(x(), x(), x(), x(), one(), x(), clusters, x(), x(), x(), causal);
}

}  // namespace

// Only compiled and linked: the tensors share their memory.
int main(int argc, char**) {
  if (argc > 1) call_every_kernel<float>(), call_every_kernel<double>();
}
