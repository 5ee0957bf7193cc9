// SPDX-License-Identifier: MIT
//
// Masks and biases are rules, rules compose with &. All scores are 0 here and value j is j, so that
// an output is the mean index of the keys that a query may attend to: the mask made visible.
#include <attn/dense_attention.hpp>

#include <Eigen/Core>

#include <array>
#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <limits>
#include <vector>

using attn::index_t;

namespace {

constexpr int n_q = 4, n_kv = 6;
bool all_as_expected = true;

template <class Rule>
void show(const char* name, const Rule& rule, std::initializer_list<double> expected,
          const attn::dense_options& options = {}) {
  const Eigen::MatrixXf q = Eigen::MatrixXf::Zero(n_q, 1), k = Eigen::MatrixXf::Zero(n_kv, 1);
  const Eigen::VectorXf v = Eigen::VectorXf::LinSpaced(n_kv, 0, n_kv - 1);
  Eigen::MatrixXf out(n_q, 1);
  attn::dense_attention(q, k, v, out, rule, options);
  std::printf("%-34s", name);
  int i = 0;
  for (const double e : expected) {
    std::printf(" %6.3f", out(i, 0));
    all_as_expected &= std::abs(out(i++, 0) - e) < 1e-5;
  }
  std::printf("\n");
}

}  // namespace

int main() {
  std::printf("%-34s", "mean key of query");
  for (int i = 0; i < n_q; ++i) std::printf("      %d", i);
  std::printf("\n");
  show("no_mask", attn::no_mask{}, {2.5, 2.5, 2.5, 2.5});

  // 1. Causal: keys up to the query's own place. With a cache of older keys the last query sees the
  //    last key, which is bottom_right.
  show("causal_mask", attn::causal_mask{}, {0, 0.5, 1, 1.5});
  show("causal_mask, bottom right", attn::causal_mask::bottom_right(n_q, n_kv), {1, 1.5, 2, 2.5});

  // 2. A window: one key back, none ahead.
  show("window_mask, left 1, right 0", attn::window_mask{.left = 1, .right = 0},
       {0, 0.5, 1.5, 2.5});

  // 3. Keys that do not exist: one length per batch, nothing past it is read.
  const std::vector<index_t> lengths{3};
  show("key_lengths 3", attn::key_lengths{lengths}, {1, 1, 1, 1});

  // 4. A prefix that all see, causal after it.
  const std::vector<index_t> prefix{2};
  show("prefix_mask 2", attn::prefix_mask{prefix}, {0.5, 0.5, 1, 1.5});

  // 5. Several sequences packed into one: queries see keys of their own id.
  const std::vector<index_t> q_ids{7, 7, 8, 9}, k_ids{7, 7, 8, 8, 8, 7};
  show("segment_mask",
       attn::segment_mask{attn::bhld(q_ids.data(), 1, 1, n_q, 1),
                          attn::bhld(k_ids.data(), 1, 1, n_kv, 1)},
       {2, 2, 3, 0});  // the last one sees no key: its output is 0

  // 6. Any booleans, true may attend; an axis of extent 1 is shared.
  const std::array<bool, n_kv> odd{false, true, false, true, false, true};
  const attn::boolean_mask odd_keys{attn::bhld(odd.data(), 1, 1, 1, n_kv)};
  show("boolean_mask, odd keys", odd_keys, {3, 3, 3, 3});

  // 7. Biases are added to the scores: ln 3 weighs key 0 three times, −inf forbids.
  std::array<float, n_kv> numbers{std::log(3.0f), 0, 0, 0, 0, 0};
  numbers[5] = -std::numeric_limits<float>::infinity();
  show("additive_bias", attn::additive_bias{attn::bhld(numbers.data(), 1, 1, 1, n_kv)},
       {10.0 / 7, 10.0 / 7, 10.0 / 7, 10.0 / 7});
  const std::vector<float> slopes{std::log(2.0f)};  // half the weight per step away
  show("alibi_bias & causal_mask", attn::alibi_bias{slopes} & attn::causal_mask{},
       {0, 2.0 / 3, 10.0 / 7, 34.0 / 15});

  // 8. A function of your own, and rules composed: what one forbids no other brings back.
  const attn::score_rule_fn even([](auto score, index_t, index_t, index_t, index_t j) {
    return j % 2 == 0 ? score : -std::numeric_limits<decltype(score)>::infinity();
  });
  show("score_rule_fn, even keys", even, {2, 2, 2, 2});
  show("the same & causal_mask", even & attn::causal_mask{}, {0, 0, 1, 1});
  show("even & odd: no key at all", even & odd_keys, {0, 0, 0, 0});

  // 9. A sink takes its share and says nothing: here that of two keys of score 0, of eight in all.
  const std::array<float, 1> sink{std::log(2.0f)};
  show("a sink of ln 2", attn::no_mask{}, {1.875, 1.875, 1.875, 1.875}, {.sinks = sink});
  return all_as_expected ? 0 : 1;
}
