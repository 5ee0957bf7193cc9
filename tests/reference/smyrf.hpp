// SPDX-License-Identifier: MIT
#pragma once

#include "reference/dense_attention.hpp"
#include "reference/score_rules.hpp"
#include "reference/tensor.hpp"

#include <functional>
#include <vector>

namespace reference {

enum class lsh_transform { smyrf, xbox, l2_alsh, simple_lsh, none };

/// Coefficient c of direction `column` of a round: that of a hash.
using coefficients = std::function<double(index_t round, index_t c, index_t column)>;

/// The vectors of one head [n][d]; those of queries and of keys have one transform each.
using vectors = std::vector<std::vector<double>>;

/// The transformed vectors, all coordinates. `norm2_q`, `norm2_k`: squared bounds of the norms.
vectors transformed(const vectors& x, bool is_query, lsh_transform t, double norm2_q,
                    double norm2_k);

/// The largest squared norm among the vectors that are finite.
double largest_norm2(const vectors& x);

/// The cluster of each item when items are ranked by hash (equal ones by index, NaN last) and cut
/// into groups whose sizes differ by at most one.
std::vector<index_t> rank_clusters(const std::vector<double>& hash, index_t clusters);

/// Who is where in one round of one head; −1: in no cluster.
struct clustering {
  std::vector<index_t> of_query, of_key;
};

/// How often each query meets each key over the rounds, [n_q][n_kv], as a tensor [1, 1, n_q, n_kv].
tensor meetings(const std::vector<clustering>& rounds);

/// The rule of attention in which key j counts m(b, h, i, j) times for query i: ln m is added, 0 is
/// a forbidden pair.
score_rule counted(const tensor& m);

/// Attention in which key j counts m(b, h, i, j) times for query i.
dense_result smyrf_attention(const tensor& q, const tensor& k, const tensor& v, const tensor& m,
                             const score_rule& rule = {}, const dense_options& options = {});

struct far_field_result {
  tensor out;  // [1, 1, n_q, d_v]
  tensor lse;  // [1, 1, n_q, 1]
};

/// One head: in every round the keys of the query's cluster, and for each subtree that branches off
/// on the way to it in the binary tree over clusters, the mean key and value, counted as often as
/// there are keys in it.
far_field_result smyrf_far_field(const tensor& q, const tensor& k, const tensor& v,
                                 const std::vector<clustering>& rounds, index_t clusters,
                                 const dense_options& options = {});

}  // namespace reference
