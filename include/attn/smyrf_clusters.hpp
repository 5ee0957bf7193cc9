// SPDX-License-Identifier: MIT
//
// The plan of SMYRF: balanced clusters of queries and keys.
#pragma once

#include <cmath>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <attn/context.hpp>
#include <attn/detail/checks.hpp>
#include <attn/detail/dense_attention_checks.hpp>
#include <attn/detail/smyrf_bisection.hpp>
#include <attn/detail/smyrf_checks.hpp>
#include <attn/detail/smyrf_plan.hpp>
#include <attn/detail/smyrf_ranks.hpp>
#include <attn/eigen.hpp>
#include <attn/smyrf_options.hpp>
#include <attn/view.hpp>

namespace attn {

/// Balanced clusters of queries and keys, in several rounds: who attends to whom in SMYRF.
///
/// In each round, for each batch and head, queries and keys are each cut into `clusters` groups
/// whose sizes differ by at most one, and group c of the queries attends to group c of the keys.
/// With `smyrf_clustering::ranks` both are ranked by a hash, independently of each other; with
/// `bisection` both are halved along directions taken from the data (smyrf_options.hpp).
///
/// It depends on q and k, the options and nothing else: not on threads, the instruction set or the
/// platform. It may be inspected, copied, kept for the backward pass, and used for other tensors of
/// the same shape (the next layer, the next step).
///
/// **Numerics** Vectors are taken as float, by bisection as 14-bit integers times a power of two
/// for each row. Equal hashes go by position; if all are equal, clusters are stretches of the
/// sequence. A row that is not finite ranks after all others and does not enter norms or
/// directions: the clusters of the other rows stay useful. Sizes are balanced over the valid
/// positions of each batch; where these are fewer than the clusters, some are empty.
/// **Cost** ranks: 2·n·d·rounds flops and two passes per round in place of a sort. bisection:
/// log2(clusters) times that, in 16-bit integers. 8 bytes per row and round are kept; while it is
/// made, 4 (rounds + 2) more with ranks, 2 d + 20 more per row of one head and thread with
/// bisection.
/// **References** Daras, Kitaev, Odena, Dimakis, "SMYRF", NeurIPS 2020 (ranks). bisection: this
/// library, docs/kernels/smyrf_attention.md.
/// **Example** examples/smyrf.cpp
class smyrf_clusters {
 public:
  /// No batches; for a later `assign`.
  smyrf_clusters() = default;

  /// @param q [B, H, n_q, d_qk]
  /// @param k [B, Hkv, n_kv, d_qk]; Hkv divides H, the heads of a group share the clusters of keys
  /// @param options clusters, rounds, seed, ... (smyrf_options.hpp)
  ///
  /// **Errors** shape_error: shapes that do not fit. option_error: clusters outside 1 to n_q and
  /// n_kv, rounds outside 1 to 65536, lengths outside 0 to n, parameters of transform and hash
  /// outside their range, far_field with `removed` duplicates over several rounds.
  template <viewable Q, viewable K, class Arch = simd::default_arch>
  smyrf_clusters(const Q& q, const K& k, const smyrf_options& options,
                 context& ctx = default_context()) {
    plan<Arch>("smyrf_clusters", view(q), view(k), options, ctx);
  }

  /// The same as a new object, in the memory of this one. Arguments that are refused leave it as it
  /// was; where memory runs out it has no batches.
  template <viewable Q, viewable K, class Arch = simd::default_arch>
  void assign(const Q& q, const K& k, const smyrf_options& options,
              context& ctx = default_context()) {
    plan<Arch>("smyrf_clusters", view(q), view(k), options, ctx);
  }

  [[nodiscard]] index_t clusters() const noexcept { return plan_.clusters; }
  [[nodiscard]] index_t rounds() const noexcept { return plan_.rounds; }

  /// Queries of head h in round r, cluster by cluster: those of cluster c are elements
  /// query_begin(b, c) up to query_begin(b, c + 1), in the order of their positions.
  [[nodiscard]] std::span<const index_t> query_order(index_t b, index_t h,
                                                     index_t r) const noexcept {
    return {plan_.queries(b, h, r), static_cast<std::size_t>(plan_.q_length(b))};
  }
  /// Keys that query head h meets in round r, likewise by key_begin.
  [[nodiscard]] std::span<const index_t> key_order(index_t b, index_t h, index_t r) const noexcept {
    return {plan_.keys(b, h / plan_.group(), r), static_cast<std::size_t>(plan_.k_length(b))};
  }

  /// Where cluster c begins; for c = clusters() the number of valid queries or keys.
  [[nodiscard]] index_t query_begin(index_t b, index_t c) const noexcept {
    return plan_.begin(plan_.q_length(b), c);
  }
  [[nodiscard]] index_t key_begin(index_t b, index_t c) const noexcept {
    return plan_.begin(plan_.k_length(b), c);
  }

  /// What the plan was made with; the lengths are in query_begin and key_begin.
  [[nodiscard]] const smyrf_options& options() const noexcept { return options_; }

  /// For kernels.
  [[nodiscard]] const detail::smyrf_plan& data() const noexcept { return plan_; }

 private:
  template <class Arch, class Q, class K>
  void plan(std::string_view function, const tensor_view<Q>& q, const tensor_view<K>& k,
            const smyrf_options& options, context& ctx) {
    static_assert(detail::is_element<std::remove_const_t<Q>> &&
                      detail::is_element<std::remove_const_t<K>>,
                  "attn computes with float, double, Eigen::half and Eigen::bfloat16");
    detail::check_smyrf_operands(function, q, k);
    detail::check_smyrf_options(function, options, q, k);

    // Where memory runs out there is no plan, rather than half of one.
    struct unfinished {
      detail::smyrf_plan* plan;
      ~unfinished() {
        if (plan != nullptr) *plan = {};
      }
    } guard{&plan_};
    detail::smyrf_plan& p = plan_;
    p.n_batch = q.extent(0), p.n_heads = q.extent(1), p.n_heads_kv = k.extent(1);
    p.n_q = q.extent(2), p.n_kv = k.extent(2), p.d_qk = q.extent(3);
    p.clusters = options.clusters, p.rounds = options.rounds;
    const auto lengths = [&](std::vector<index_t>& to, std::span<const index_t> from, index_t n) {
      to.assign(from.begin(), from.end());
      if (from.empty()) to.assign(static_cast<std::size_t>(p.n_batch), n);
    };
    lengths(p.q_lengths, options.query_lengths, p.n_q);
    lengths(p.k_lengths, options.key_lengths, p.n_kv);
    const auto rounds = static_cast<std::size_t>(p.n_batch * p.rounds);
    p.q_order.resize(rounds * static_cast<std::size_t>(p.n_heads * p.n_q));
    p.k_order.resize(rounds * static_cast<std::size_t>(p.n_heads_kv * p.n_kv));
    options_ = options;
    options_.query_lengths = {}, options_.key_lengths = {};  // spans of memory that is not ours

    const detail::smyrf_operands x{detail::make_head_source<float, Arch>(q),
                                   detail::make_head_source<float, Arch>(k)};
    const index_t done = detail::smyrf_local_round<Arch>(p, options.local_round);
    if (done < p.rounds) {
      if (options.clustering == smyrf_clustering::bisection)
        detail::smyrf_bisect<Arch>(p, x, options.seed, done, ctx);
      else
        detail::smyrf_ranker<Arch>(p, x, options, done).run(ctx);
    }
    const bool removes = options.duplicates == smyrf_duplicates::removed && p.rounds > 1;
    if (removes || options.attend_self) detail::smyrf_invert<Arch>(p, ctx);
    guard.plan = nullptr;
  }

  detail::smyrf_plan plan_;
  smyrf_options options_;
};

}  // namespace attn
