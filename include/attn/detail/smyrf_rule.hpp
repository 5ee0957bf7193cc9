// SPDX-License-Identifier: MIT
//
// Score rules inside clusters, where queries and keys are lists of positions.
#pragma once

#include <algorithm>
#include <string_view>
#include <type_traits>

#include <attn/detail/score_slope.hpp>
#include <attn/score_rule.hpp>

namespace attn::detail {

/// Queries and keys of a tile by their original positions.
struct smyrf_pairs {
  index_t b, h;
  const index_t* queries;
  index_t n_queries;
  const index_t* keys;
  index_t n_keys;
};

/// A rule whose type is hidden: kernels are compiled once per kind. It is asked per row for a range
/// and per tile for numbers to add, so the calls cost nothing.
template <class T>
class smyrf_rule {
 public:
  template <score_rule Rule>
  explicit smyrf_rule(const Rule& rule) noexcept
      : rule_(&rule), sees_all_(std::is_same_v<Rule, no_mask>),
        keys_([](const void* r, index_t b, index_t h, index_t i, index_t n_kv) {
          return as<Rule>(r).keys(b, h, i, n_kv);
        }),
        score_([](const void* r, T score, index_t b, index_t h, index_t i, index_t j) {
          return static_cast<T>(as<Rule>(r)(score, b, h, i, j));
        }),
        slope_([](const void* r, T score, index_t b, index_t h, index_t i, index_t j) {
          return slope_of<T>(as<Rule>(r), score, b, h, i, j);
        }),
        add_([](const void* r, const smyrf_pairs& p, T* out, index_t ld) {
          const Rule& rule_of_type = as<Rule>(r);
          for (index_t j = 0; j < p.n_keys; ++j, out += ld) {
            for (index_t i = 0; i < p.n_queries; ++i) {
              out[i] = static_cast<T>(rule_of_type(T(0), p.b, p.h, p.queries[i], p.keys[j]));
            }
          }
        }) {}

  [[nodiscard]] bool sees_all() const noexcept { return sees_all_; }
  [[nodiscard]] key_range keys(index_t b, index_t h, index_t i, index_t n_kv) const {
    return keys_(rule_, b, h, i, n_kv);
  }
  [[nodiscard]] T operator()(T score, index_t b, index_t h, index_t i, index_t j) const {
    return score_(rule_, score, b, h, i, j);
  }
  [[nodiscard]] T slope(T score, index_t b, index_t h, index_t i, index_t j) const {
    return slope_(rule_, score, b, h, i, j);
  }
  /// out[key][ld]: what a rule of kind bias adds.
  void add(const smyrf_pairs& pairs, T* out, index_t ld) const { add_(rule_, pairs, out, ld); }

 private:
  template <class Rule>
  static const Rule& as(const void* rule) noexcept {
    return *static_cast<const Rule*>(rule);
  }

  const void* rule_;
  bool sees_all_;
  key_range (*keys_)(const void*, index_t, index_t, index_t, index_t);
  T (*score_)(const void*, T, index_t, index_t, index_t, index_t);
  T (*slope_)(const void*, T, index_t, index_t, index_t, index_t);
  void (*add_)(const void*, const smyrf_pairs&, T*, index_t);
};

/// The rule seen from inside a cluster: query i and key j are places in its lists. Both ascend, so
/// that what was a range of keys is one again.
template <class T, rule_kind Kind>
struct cluster_rule {
  static constexpr rule_kind kind = Kind;
  const smyrf_rule<T>& rule;
  const index_t* queries;
  const index_t* list;  // of keys
  index_t n_kv;

  template <class S>
  [[nodiscard]] S operator()(S score, index_t b, index_t h, index_t i, index_t j) const {
    return static_cast<S>(rule(static_cast<T>(score), b, h, queries[i], list[j]));
  }
  template <class S>
  [[nodiscard]] S slope(S score, index_t b, index_t h, index_t i, index_t j) const {
    return static_cast<S>(rule.slope(static_cast<T>(score), b, h, queries[i], list[j]));
  }
  [[nodiscard]] key_range keys(index_t b, index_t h, index_t i, index_t n) const noexcept {
    if (rule.sees_all()) return {0, n};
    const key_range positions = rule.keys(b, h, queries[i], n_kv);
    const auto place = [&](index_t position) {
      return std::lower_bound(list, list + n, position) - list;
    };
    return {positions.begin <= 0 ? 0 : place(positions.begin),
            positions.end >= n_kv ? n : place(positions.end)};
  }
  void check(std::string_view, const attention_shape&) const noexcept {}
};

}  // namespace attn::detail
