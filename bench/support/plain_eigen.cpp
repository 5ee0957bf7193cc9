// SPDX-License-Identifier: MIT
//
// Attention as one writes it with Eigen: two matrix products around a softmax over rows.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <memory>

#include <attn/context.hpp>

#include "support/method.hpp"

namespace attn::bench {
namespace {

template <class T>
using matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <class T>
using matrix_map = Eigen::Map<matrix<T>>;
template <class T>
using const_matrix_map = Eigen::Map<const matrix<T>>;

// Rows [first, first + rows) of one head; s is room for rows × n_kv scores.
template <class C, class T>
void attend_rows(const Eigen::Ref<const matrix<C>>& q, const Eigen::Ref<const matrix<C>>& k,
                 const Eigen::Ref<const matrix<C>>& v, matrix_map<T> out, C* s_room, C scale,
                 const problem_shape& shape, index_t first) {
  const index_t rows = q.rows();
  const index_t n_keys = shape.keys(first + rows - 1);  // of the last row

  // 1. Scores [rows, n_keys].
  matrix_map<C> s(s_room, rows, n_keys);
  s.noalias() = (scale * q) * k.topRows(n_keys).transpose();

  // 2. Softmax over the keys that each row sees; its sum divides the output. Eigen's exp(−inf) is a
  // subnormal number, which would slow the next product down 30 times: the others become 0.
  Eigen::Matrix<C, Eigen::Dynamic, 1> sum(rows);
  for (index_t r = 0; r < rows; ++r) {
    const index_t n_seen = shape.keys(first + r);
    auto seen = s.row(r).head(n_seen);
    if (n_seen > 0) seen = (seen.array() - seen.maxCoeff()).exp();
    sum(r) = seen.sum();
    s.row(r).tail(n_keys - n_seen).setZero();
  }

  // 3. Output [rows, d_v].
  matrix<C> o(rows, v.cols());
  o.noalias() = s * v.topRows(n_keys);
  for (index_t r = 0; r < rows; ++r) {
    if (shape.keys(first + r) > 0) {
      out.row(r) = (o.row(r) / sum(r)).template cast<T>();
    } else {
      out.row(r).setZero();
    }
  }
}

// `block` rows of scores at a time.
template <class T>
void eigen_attention(const problem<T>& p, tensor_view<T> out, index_t block, context& ctx) {
  using C = arithmetic_t<T>;
  const problem_shape& n = p.shape;
  const index_t group = n.n_heads / n.n_kv_heads;
  const C scale = static_cast<C>(1 / std::sqrt(static_cast<double>(n.d_qk)));
  block = std::min(block, n.n_q);
  const auto scratch_bytes =
      sizeof(C) * static_cast<std::size_t>(block) * static_cast<std::size_t>(n.n_kv);

  // Heads are shared out over the threads.
  ctx.run(n.n_batch * n.n_heads, 1, scratch_bytes, [&](std::byte* scratch, auto& queue) {
    index_t first = 0, last = 0;
    while (queue.next(first, last)) {
      for (index_t head = first; head < last; ++head) {
        const index_t b = head / n.n_heads, h = head % n.n_heads;
        const const_matrix_map<T> q(&p.q()(b, h, 0, 0), n.n_q, n.d_qk);
        const const_matrix_map<T> k(&p.k()(b, h / group, 0, 0), n.n_kv, n.d_qk);
        const const_matrix_map<T> v(&p.v()(b, h / group, 0, 0), n.n_kv, n.d_v);
        // No copy for float and double; the half types become float, a head at a time.
        const Eigen::Ref<const matrix<C>> kc = k.template cast<C>(), vc = v.template cast<C>();
        for (index_t i = 0; i < n.n_q; i += block) {
          const index_t rows = std::min(block, n.n_q - i);
          attend_rows<C, T>(q.middleRows(i, rows).template cast<C>(), kc, vc,
                            matrix_map<T>(&out(b, h, i, 0), rows, n.d_v),
                            reinterpret_cast<C*>(scratch), scale, n, i);
        }
      }
    }
  });
}

template <class T>
auto prepare_with(index_t block) {
  return [block](const problem<T>& p, tensor_view<T> out, int threads) -> std::function<void()> {
    return [&p, out, block, ctx = std::make_shared<context>(threads)] {
      eigen_attention(p, out, block, *ctx);
    };
  };
}

}  // namespace

template <class T>
method<T> plain_eigen_method() {
  method<T> m{"eigen", "plain Eigen: a head's whole score matrix, two products and a softmax",
              prepare_with<T>(std::numeric_limits<index_t>::max())};
  m.obstacle = [](const problem_shape& s) -> std::string {
    constexpr double limit_gib = 4;
    const double gib = static_cast<double>(s.n_q) * static_cast<double>(s.n_kv) *
                       sizeof(arithmetic_t<T>) / (1 << 30);
    return gib <= limit_gib ? "" : "its score matrix needs over 4 GiB per head";
  };
  return m;
}

template <class T>
method<T> blocked_eigen_method() {
  // 128 rows of 2048 scores are 1 MiB: they stay in the second-level cache between the passes.
  return {"eigen-blocked",
          "plain Eigen, 128 queries at a time; causal blocks end at their last key",
          prepare_with<T>(128)};
}

#define ATTN_BENCH_INSTANTIATE(T)                                                                  \
  template method<T> plain_eigen_method<T>();                                                      \
  template method<T> blocked_eigen_method<T>();
ATTN_BENCH_INSTANTIATE(float)
ATTN_BENCH_INSTANTIATE(double)
ATTN_BENCH_INSTANTIATE(Eigen::half)
ATTN_BENCH_INSTANTIATE(Eigen::bfloat16)

}  // namespace attn::bench
