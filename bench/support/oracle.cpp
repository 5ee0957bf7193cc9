// SPDX-License-Identifier: MIT
#include "support/oracle.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include <Eigen/Core>

#include "reference/dense_attention.hpp"

namespace attn::bench {
namespace {

// Multiply-adds: one to two seconds of plain loops.
constexpr double affordable = 7e8;

std::vector<index_t> chosen_rows(const problem_shape& s) {
  const double row_of_all_heads = static_cast<double>(s.n_batch * s.n_heads) *
                                  static_cast<double>(s.n_kv) * static_cast<double>(s.d_qk + s.d_v);
  const double rows = std::clamp(affordable / row_of_all_heads, 2.0, static_cast<double>(s.n_q));
  const auto n = std::min(s.n_q, static_cast<index_t>(rows));
  std::vector<index_t> chosen{0};
  for (index_t r = 1; r < n; ++r) chosen.push_back(r * (s.n_q - 1) / (n - 1));
  return chosen;
}

// Rows of one head.
template <class T>
void copy_rows(tensor_view<const T> from, index_t b, index_t h, const std::vector<index_t>& rows,
               reference::tensor& to, index_t to_head) {
  for (std::size_t r = 0; r < rows.size(); ++r) {
    for (index_t c = 0; c < from.extent(3); ++c) {
      to(0, to_head, static_cast<index_t>(r), c) = static_cast<double>(from(b, h, rows[r], c));
    }
  }
}

std::vector<index_t> all_rows(index_t n) {
  std::vector<index_t> rows(static_cast<std::size_t>(n));
  for (index_t i = 0; i < n; ++i) rows[static_cast<std::size_t>(i)] = i;
  return rows;
}

}  // namespace

template <class T>
oracle::oracle(const problem<T>& p) : shape_(p.shape), rows_(chosen_rows(p.shape)) {
  const problem_shape& n = p.shape;
  const index_t group = n.n_heads / n.n_kv_heads;
  const auto every_key = all_rows(n.n_kv);
  const auto allowed =
      reference::score_rule_fn([this](double score, index_t, index_t, index_t r, index_t j) {
        return j < shape_.keys(rows_[static_cast<std::size_t>(r)]) ? score : reference::forbidden;
      });

  // A key/value head with its group of query heads at a time: K and V in double of all would be
  // twice the memory of the problem.
  for (index_t b = 0; b < n.n_batch; ++b) {
    for (index_t g = 0; g < n.n_kv_heads; ++g) {
      reference::tensor q({1, group, rows(), n.d_qk}), k({1, 1, n.n_kv, n.d_qk});
      reference::tensor v({1, 1, n.n_kv, n.d_v});
      for (index_t h = 0; h < group; ++h) copy_rows(p.q(), b, g * group + h, rows_, q, h);
      copy_rows(p.k(), b, g, every_key, k, 0);
      copy_rows(p.v(), b, g, every_key, v, 0);
      const auto expected = reference::dense_attention(q, k, v, allowed);
      const auto append = [](std::vector<double>& all, const reference::tensor& x) {
        all.insert(all.end(), x.elements().begin(), x.elements().end());
      };
      append(output_, expected.out);
      append(lse_, expected.lse);
    }
  }
}

template <class T>
output_error oracle::compare(tensor_view<const T> out) const {
  double largest = 0, error_squares = 0, squares = 0;
  auto expected = output_.begin();
  for (index_t b = 0; b < shape_.n_batch; ++b) {
    for (index_t h = 0; h < shape_.n_heads; ++h) {
      for (const index_t i : rows_) {
        for (index_t c = 0; c < shape_.d_v; ++c, ++expected) {
          const double got = static_cast<double>(out(b, h, i, c));
          squares += *expected * *expected;
          // NaN and infinities that the data asks for are no error; others are infinitely wrong.
          if (got == *expected || (std::isnan(got) && std::isnan(*expected))) continue;
          const double difference = std::abs(got - *expected);
          const double error =
              std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference;
          largest = std::max(largest, error);
          error_squares += error * error;
        }
      }
    }
  }
  return {largest, squares == 0 ? std::sqrt(error_squares) : std::sqrt(error_squares / squares)};
}

template <class L>
double oracle::captured(tensor_view<const L> lse) const {
  double sum = 0, rows = 0;
  auto expected = lse_.begin();
  for (index_t b = 0; b < shape_.n_batch; ++b) {
    for (index_t h = 0; h < shape_.n_heads; ++h) {
      for (const index_t i : rows_) {
        const double whole = *expected++;
        if (whole == -std::numeric_limits<double>::infinity()) continue;
        sum += std::exp(static_cast<double>(lse(b, h, i, 0)) - whole);
        rows += 1;
      }
    }
  }
  return rows == 0 ? 1 : sum / rows;
}

template double oracle::captured(tensor_view<const float>) const;
template double oracle::captured(tensor_view<const double>) const;

#define ATTN_BENCH_INSTANTIATE(T)                                                                  \
  template oracle::oracle(const problem<T>&);                                                      \
  template output_error oracle::compare(tensor_view<const T>) const;
ATTN_BENCH_INSTANTIATE(float)
ATTN_BENCH_INSTANTIATE(double)
ATTN_BENCH_INSTANTIATE(Eigen::half)
ATTN_BENCH_INSTANTIATE(Eigen::bfloat16)

}  // namespace attn::bench
