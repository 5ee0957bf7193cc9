// SPDX-License-Identifier: MIT
//
// Checks of the public functions of SMYRF.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <variant>

#include <attn/detail/checks.hpp>
#include <attn/detail/dense_attention_checks.hpp>
#include <attn/smyrf_options.hpp>

namespace attn::detail {

template <class Q, class K>
void check_smyrf_operands(std::string_view function, const tensor_view<Q>& q,
                          const tensor_view<K>& k) {
  check_view(function, "q", q, access::read);
  check_view(function, "k", k, access::read);
  check_extent(function, "k", k, 0, q.extent(0), "batch of q");
  check_extent(function, "k", k, 3, q.extent(3), "d_qk of q");
  const index_t heads = q.extent(1), heads_kv = k.extent(1);
  if (heads_kv == 0 ? heads != 0 : heads % heads_kv != 0) {
    raise_shape(function, "k", k.extents(),
                "heads that divide " + std::to_string(heads) + " (heads of q)");
  }
}

inline void check_smyrf_lengths(std::string_view function, std::string_view argument,
                                std::span<const index_t> lengths, index_t n_batch, index_t n,
                                std::string_view what) {
  if (lengths.empty()) return;
  check_count(function, argument, lengths, n_batch, "batch of q");
  for (std::size_t b = 0; b < lengths.size(); ++b) {
    if (lengths[b] >= 0 && lengths[b] <= n) continue;
    raise_option(function, std::string(argument) + "[" + std::to_string(b) + "]",
                 std::to_string(lengths[b]),
                 "0 to " + std::to_string(n) + " (" + std::string(what) + ")");
  }
}

inline void check_lsh(std::string_view function, const smyrf_options& options) {
  if (const auto* t = std::get_if<l2_alsh_transform>(&options.transform)) {
    const auto most = static_cast<int>(lsh_lift::max_dims);
    if (t->terms < 1 || t->terms > most) {
      raise_option(function, "l2_alsh_transform.terms", std::to_string(t->terms),
                   "1 to " + std::to_string(most));
    }
    if (!(t->shrink > 0 && t->shrink < 1)) {
      raise_option(function, "l2_alsh_transform.shrink", to_text(t->shrink),
                   "a number above 0 and below 1");
    }
  }
  if (const auto* h = std::get_if<cross_polytope>(&options.hash)) {
    constexpr index_t most = index_t{1} << 24;  // buckets are ranked as floats
    if (h->buckets < 0 || h->buckets > most || h->buckets % 2 != 0) {
      raise_option(function, "cross_polytope.buckets", std::to_string(h->buckets),
                   "an even number, 0 (one per cluster) to " + std::to_string(most));
    }
  }
}

template <class Q, class K>
void check_smyrf_options(std::string_view function, const smyrf_options& options,
                         const tensor_view<Q>& q, const tensor_view<K>& k) {
  // A tensor without rows has any number of empty clusters.
  constexpr index_t unbounded = index_t{1} << 24;  // clusters are compared as floats
  const index_t n_q = q.extent(2), n_kv = k.extent(2);
  const index_t of_q = n_q == 0 ? unbounded : n_q, of_k = n_kv == 0 ? unbounded : n_kv;
  const index_t most = std::min(std::min(of_q, of_k), unbounded);
  if (options.clusters < 1 || options.clusters > most) {
    const bool by_q = of_q <= of_k;
    raise_option(function, "clusters", std::to_string(options.clusters),
                 "1 to " + std::to_string(most) + " (length of " + (by_q ? "q)" : "k)"));
  }
  constexpr index_t most_rounds = index_t{1} << 16;  // sizes of plans fit an index
  if (options.rounds < 1 || options.rounds > most_rounds) {
    raise_option(function, "rounds", std::to_string(options.rounds),
                 "1 to " + std::to_string(most_rounds));
  }
  check_options<simd::compute_t<Q>>(
      function, dense_options{.scale = options.scale, .softcap = options.softcap}, 0);
  check_smyrf_lengths(function, "query_lengths", options.query_lengths, q.extent(0), n_q,
                      "length of q");
  check_smyrf_lengths(function, "key_lengths", options.key_lengths, q.extent(0), n_kv,
                      "length of k");
  check_lsh(function, options);
  if (options.attend_self && n_q != n_kv) {
    raise_shape(function, "k", k.extents(),
                "length " + std::to_string(n_q) + " (length of q, since attend_self is on)");
  }
  if (options.far_field != smyrf_far_field::none && options.rounds > 1 &&
      options.duplicates == smyrf_duplicates::removed) {
    raise<option_error>(std::string(function) +
                        ": far_field is means with duplicates removed, expected duplicates "
                        "weighted or rounds 1");
  }
}

}  // namespace attn::detail
