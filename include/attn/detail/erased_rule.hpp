// SPDX-License-Identifier: MIT
//
// A score rule behind function pointers.
#pragma once

#include <string_view>

#include <attn/detail/score_bias.hpp>
#include <attn/score_rule.hpp>

namespace attn::detail {

/// A rule of some kind whose type is hidden: kernels are compiled once per kind and not once per
/// rule, which is most of the compile time of a program with several rules. Kernels ask a rule once
/// per row for its range and once per tile for the rest, so the calls cost nothing.
template <class T, class Arch, rule_kind Kind>
class erased_rule {
 public:
  static constexpr rule_kind kind = Kind;

  template <score_rule Rule>
  requires(Rule::kind == Kind) explicit erased_rule(const Rule& rule) noexcept
      : rule_(&rule), keys_([](const void* r, index_t b, index_t h, index_t i, index_t n_kv) {
          return as<Rule>(r).keys(b, h, i, n_kv);
        }),
        score_([](const void* r, T score, index_t b, index_t h, index_t i, index_t j) {
          return static_cast<T>(as<Rule>(r)(score, b, h, i, j));
        }) {
    if constexpr (Kind == rule_kind::bias) {
      add_bias_ = [](const void* r, bias_tile<T>& t) {
        return attn::detail::add_bias<Arch>(as<Rule>(r), t);
      };
    }
    if constexpr (Kind == rule_kind::function) {
      apply_ = [](const void* r, const bias_tile<T>& t, T* s, index_t n_kv) {
        attn::detail::apply_rule(as<Rule>(r), t, s, n_kv);
      };
    }
  }

  template <class S>
  [[nodiscard]] S operator()(S score, index_t b, index_t h, index_t i, index_t j) const {
    return static_cast<S>(score_(rule_, static_cast<T>(score), b, h, i, j));
  }
  [[nodiscard]] key_range keys(index_t b, index_t h, index_t i, index_t n_kv) const {
    return keys_(rule_, b, h, i, n_kv);
  }
  void check(std::string_view, const attention_shape&) const noexcept {}  // the rule was checked

  [[nodiscard]] tile_effect add(bias_tile<T>& t) const { return add_bias_(rule_, t); }
  void apply(const bias_tile<T>& t, T* s, index_t n_kv) const { apply_(rule_, t, s, n_kv); }

 private:
  template <class Rule>
  static const Rule& as(const void* rule) noexcept {
    return *static_cast<const Rule*>(rule);
  }

  const void* rule_;
  key_range (*keys_)(const void*, index_t, index_t, index_t, index_t);
  T (*score_)(const void*, T, index_t, index_t, index_t, index_t);
  tile_effect (*add_bias_)(const void*, bias_tile<T>&) = nullptr;
  void (*apply_)(const void*, const bias_tile<T>&, T*, index_t) = nullptr;
};

template <class Arch, class T>
tile_effect add_bias(const erased_rule<T, Arch, rule_kind::bias>& rule, bias_tile<T>& t) noexcept {
  return rule.add(t);
}

template <class T, class Arch>
void apply_rule(const erased_rule<T, Arch, rule_kind::function>& rule, const bias_tile<T>& t, T* s,
                index_t n_kv) noexcept {
  rule.apply(t, s, n_kv);
}

}  // namespace attn::detail
