// SPDX-License-Identifier: MIT
//
// Tensors as they lie: a kernel sees [batch, heads, length, dim] and copies nothing, whatever the
// order of the memory. One attention, its operands in six layouts, one result.
#include <attn/dense_attention.hpp>

#include <Eigen/Core>
#include <unsupported/Eigen/CXX11/Tensor>

#include <array>
#include <cmath>
#include <cstdio>
#include <vector>

namespace {

constexpr attn::index_t B = 2, H = 3, L = 10, D = 4;

// The number at (b, h, i, c), the same wherever it is stored.
float value(attn::index_t b, attn::index_t h, attn::index_t i, attn::index_t c, int operand) {
  return std::sin(static_cast<float>(1 + b + 3 * h + 7 * i + 11 * c + 13 * operand));
}

void fill(const attn::tensor_view<float>& x, int operand) {
  for (attn::index_t b = 0; b < x.extent(0); ++b)
    for (attn::index_t h = 0; h < x.extent(1); ++h)
      for (attn::index_t i = 0; i < x.extent(2); ++i)
        for (attn::index_t c = 0; c < x.extent(3); ++c) x(b, h, i, c) = value(b, h, i, c, operand);
}

}  // namespace

int main() {
  constexpr auto size = static_cast<std::size_t>(B * H * L * D);
  std::vector<float> memory_q(size), memory_k(size), memory_v(size), memory_out(size);

  // 1. [B, H, L, D] in memory.
  const auto q = attn::bhld(memory_q.data(), B, H, L, D);
  const auto k = attn::bhld(memory_k.data(), B, H, L, D);
  const auto v = attn::bhld(memory_v.data(), B, H, L, D);
  const auto out = attn::bhld(memory_out.data(), B, H, L, D);
  fill(q, 0), fill(k, 1), fill(v, 2);
  attn::dense_attention(q, k, v, out);
  std::printf("out(1, 2, 3, 0) = %.6f\n", out(1, 2, 3, 0));

  bool same = true;
  const auto compare = [&](const char* what, const auto& other, attn::index_t b, attn::index_t h) {
    float off = 0;
    for (attn::index_t i = 0; i < L; ++i)
      for (attn::index_t c = 0; c < D; ++c)
        off = std::max(off, std::abs(other(i, c) - out(b, h, i, c)));
    std::printf("%-38s differs by %.1e\n", what, off);
    same &= off < 1e-6f;
  };

  // 2. [B, L, H, D] in memory, heads interleaved, as projections leave them.
  std::vector<float> interleaved(size);
  const auto q2 = attn::blhd(interleaved.data(), B, L, H, D);
  fill(q2, 0);
  std::vector<float> memory_out2(size);
  const auto out2 = attn::blhd(memory_out2.data(), B, L, H, D);
  attn::dense_attention(q2, k, v, out2);
  compare(
      "[B, L, H, D]", [&](auto i, auto c) { return out2(1, 2, i, c); }, 1, 2);

  // 3. Any strides: rows of 6 numbers of which 4 are used, elements counted, not bytes.
  std::vector<float> padded(B * H * L * 6);
  const attn::tensor_view<float> k3(padded.data(), {B, H, L, D}, {H * L * 6, L * 6, 6, 1});
  fill(k3, 1);
  attn::dense_attention(q, k3, v, out2);
  compare(
      "padded rows", [&](auto i, auto c) { return out2(1, 2, i, c); }, 1, 2);

  // 4. Stride 0 broadcasts an input: here all batches and heads share the keys of (0, 0).
  const attn::tensor_view<const float> shared(memory_k.data(), {B, H, L, D}, {0, 0, D, 1});
  attn::dense_attention(q, shared, v, out2);
  compare(
      "broadcast keys, first head", [&](auto i, auto c) { return out2(0, 0, i, c); }, 0, 0);

  // 5. Eigen matrices are one head; column-major, row-major, maps and blocks alike.
  Eigen::MatrixXf column_major(L, D);
  fill(attn::view(column_major), 0);
  const Eigen::Map<const Eigen::Matrix<float, L, D, Eigen::RowMajor>> keys(memory_k.data());
  Eigen::MatrixXf wide = Eigen::MatrixXf::Zero(L, 3 * D);
  fill(attn::view(wide.middleCols(D, D)), 2);
  const Eigen::MatrixXf one = attn::dense_attention(column_major, keys, wide.middleCols(D, D));
  compare("Eigen matrix, map and block", one, 0, 0);

  // 6. Eigen tensors of rank 2 to 4, of either storage order; the last two axes are length and dim.
  Eigen::Tensor<float, 4> tensor_v(B, H, L, D), tensor_out(B, H, L, D);
  fill(attn::view(tensor_v), 2);
  attn::dense_attention(q, k, tensor_v, tensor_out);
  compare(
      "Eigen tensor, column-major", [&](auto i, auto c) { return tensor_out(1, 2, i, c); }, 1, 2);

  // A view never owns: copying it copies four extents, four strides and a pointer.
  static_assert(std::is_trivially_copyable_v<attn::tensor_view<float>>);
  return same ? 0 : 1;
}
