// SPDX-License-Identifier: MIT
//
// A plan applied to a payload in each order in which sources may be read; rows planned together.
#include "support/catch.hpp"
#include "support/compare.hpp"
#include "support/element.hpp"
#include "support/random.hpp"
#include "support/tensor_buffer.hpp"

#include <attn/soft_topk.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

using namespace attn_test;
using attn::context;
using attn::tournament;
using reference::tensor;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();

template <class T>
tensor pooled_by(const tournament& t, const tensor_buffer<T>& x, context& ctx) {
  tensor_buffer<T> pooled({t.n_batch(), t.n_heads(), t.n_slots(), x.view().extent(3)},
                          layout::contiguous, from_double<T>(nan_value));
  attn::soft_topk(t, x.view(), pooled.view(), ctx);
  return pooled.values();
}

}  // namespace

// Many threads for one row have its slots read one by one; a single thread streams the payload,
// with the sums in registers (to 4 slots) or in the cache.
TEMPLATE_TEST_CASE("The order in which the payload is read changes no bit", "", float, double,
                   Eigen::half) {
  context serial(1), threaded(5);
  for (const index_t k : {1, 2, 3, 4, 5, 40}) {
    for (const index_t d : {1, 7, 16, 40, 131}) {
      const index_t n = d > 100 ? 2100 : 97;  // x beyond the size that is read slot by slot
      CAPTURE(k, d);
      tensor_buffer<TestType> x({1, 1, n, d}, layout::contiguous, quiet_nan<TestType>());
      x.assign(normal_tensor({1, 1, n, d}, 1));
      tensor_buffer<float> scores({1, 1, n, 1}, layout::contiguous, nan_value);
      scores.assign(uniform_tensor({1, 1, n, 1}, 2, 0, 1));
      const tournament t(scores.view(), k);
      CHECK(compare_bits(pooled_by(t, x, serial), pooled_by(t, x, threaded)));
    }
  }
}

TEST_CASE("A payload that is not finite stays in its slot, and is not read at weight 0") {
  context serial(1), threaded(3);
  context& ctx = GENERATE(false, true) ? serial : threaded;
  const index_t k = GENERATE(1, 2, 3, 4, 5, 20), d = GENERATE(1, 16, 35), n = 60;
  std::vector<double> v(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<double>(i * 7 % 60) / 60;
  v[11] = -infinity;
  const tournament t(attn::bhld(v.data(), 1, 1, n, 1), k);
  tensor x = normal_tensor({1, 1, n, d}, 3);
  const index_t marked = 30;
  CAPTURE(k, d);
  for (index_t c = 0; c < d; ++c) x(0, 0, 11, c) = nan_value;
  tensor_buffer<float> buffer(x.extents(), layout::contiguous, 0.0f);
  buffer.assign(x);
  const tensor finite = pooled_by(t, buffer, ctx);
  for (const double bad : {nan_value, infinity, -infinity}) {
    CAPTURE(bad);
    x(0, 0, marked, 0) = bad;
    buffer.assign(x);
    const tensor pooled = pooled_by(t, buffer, ctx);
    index_t wrong = 0;
    for (index_t r = 0; r < k; ++r) {
      for (index_t c = 0; c < d; ++c) {
        const double got = pooled(0, 0, r, c), before = finite(0, 0, r, c);
        const bool reached = r == t.slot(0, 0, marked) && c == 0;
        const double expected = reached ? bad : before;
        wrong += !std::isfinite(before) ||
                 !(got == expected || (std::isnan(got) && std::isnan(expected)));
      }
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("Rows that are planned together are planned as each alone") {
  const index_t rows = 24, n = GENERATE(1, 15, 16, 17, 31, 64, 65, 129, 300);
  const index_t k = std::min<index_t>(n, GENERATE(1, 2, 7));
  const auto sort = GENERATE(attn::topk_sort::every_round, attn::topk_sort::never);
  random_source random(static_cast<std::uint64_t>(n));
  std::vector<float> v(static_cast<std::size_t>(rows * n));
  for (float& e : v) e = static_cast<float>(random.coin(0.1) ? -infinity : random.uniform(0, 1));
  std::vector<index_t> lengths;
  for (index_t b = 0; b < rows; ++b) lengths.push_back(random.coin() ? n : random.integer(k, n));
  context ctx(GENERATE(1, 2));
  const tournament all(attn::bhld(v.data(), rows, 1, n, 1), k, {.sort = sort, .lengths = lengths},
                       ctx);
  index_t wrong = 0;
  for (index_t b = 0; b < rows; ++b) {
    const index_t length = lengths[static_cast<std::size_t>(b)];
    const tournament one(attn::bhld(v.data() + b * n, 1, 1, length, 1), k, {.sort = sort});
    for (index_t i = 0; i < length; ++i) {
      wrong += all.slot(b, 0, i) != one.slot(0, 0, i) || all.weight(b, 0, i) != one.weight(0, 0, i);
    }
    for (index_t r = 0; r < k; ++r) {
      wrong += all.champion(b, 0, r) != one.champion(0, 0, r) ||
               all.scores()(b, 0, r, 0) != one.scores()(0, 0, r, 0);
    }
  }
  CHECK(wrong == 0);
}

// Scores that a round leaves in no order at all (a boost near an average), all alike, or of a few
// values: sorted from scratch, and ties by the champions' positions.
TEST_CASE("Rounds that mix the ranks up, and rounds of ties") {
  const index_t n = GENERATE(40, 200, 3000);
  const int kind = GENERATE(0, 1, 2);
  random_source random(static_cast<std::uint64_t>(n));
  std::vector<double> v;
  for (index_t i = 0; i < n; ++i) {
    v.push_back(kind == 0   ? random.uniform(0, 1)
                : kind == 1 ? 0.5
                            : static_cast<double>(random.integer(0, 3)));
  }
  const attn::soft_topk_options options{.boost = attn::topk_boost::scaled, .strength = 1e-3};
  const index_t k = 3;
  const tournament t(attn::bhld(v.data(), 1, 1, n, 1), k, options);
  // The same by hand: survivors with score and champion, sorted by a comparison.
  struct survivor {
    double score;
    index_t champion;
  };
  std::vector<survivor> now;
  for (index_t i = 0; i < n; ++i) now.push_back({v[static_cast<std::size_t>(i)], i});
  while (static_cast<index_t>(now.size()) > k) {
    std::sort(now.begin(), now.end(), [](const survivor& a, const survivor& b) {
      return a.score != b.score ? a.score > b.score : a.champion < b.champion;
    });
    const auto m = static_cast<index_t>(now.size()), next = std::max(k, (m + 1) / 2);
    for (index_t w = 2 * next - m, l = m - 1; w < next; ++w, --l) {
      survivor& a = now[static_cast<std::size_t>(w)];
      const double z = now[static_cast<std::size_t>(l)].score;
      const double weight = 1 / (1 + std::exp(-options.strength * (a.score - z)));
      if (a.score != z) a.score = weight * a.score + (1 - weight) * z;
    }
    now.resize(static_cast<std::size_t>(next));
  }
  std::vector<index_t> expected, got;
  for (const survivor& s : now) expected.push_back(s.champion);
  std::sort(expected.begin(), expected.end());
  for (index_t r = 0; r < k; ++r) got.push_back(t.champion(0, 0, r));
  CHECK(got == expected);
}
