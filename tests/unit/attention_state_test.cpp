// SPDX-License-Identifier: MIT
//
// attention_state: keys one by one, states merged, against the oracle and by hand.
#include "reference/dense_attention.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

#include <attn/attention_state.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <vector>

using attn::attention_state;

namespace {

template <class T>
constexpr T infinity = std::numeric_limits<T>::infinity();

/// Scores and values of a set of keys; value j is [d_v].
template <class T>
struct keys {
  std::vector<T> scores;
  std::vector<T> values;
  std::size_t d_v;

  keys(std::size_t n, std::size_t d, double deviation, std::uint64_t seed) : d_v(d) {
    attn_test::random_source random(seed);
    for (std::size_t j = 0; j < n; ++j) scores.push_back(T(deviation * random.normal()));
    for (std::size_t j = 0; j < n * d; ++j) values.push_back(T(random.normal()));
  }
  std::span<const T> value(std::size_t j) const { return {values.data() + j * d_v, d_v}; }
};

template <class T>
void add_range(attention_state<T>& state, const keys<T>& k, std::size_t first, std::size_t last) {
  for (std::size_t j = first; j < last; ++j) state.add(k.scores[j], k.value(j));
}

/// Whether the state is the attention over all of k.
template <class T>
bool is_attention_over(const attention_state<T>& state, const keys<T>& k) {
  double m = -HUGE_VAL, l = 0, largest = 0;
  for (const T s : k.scores) m = std::max(m, static_cast<double>(s));
  for (const T s : k.scores) l += std::exp(static_cast<double>(s) - m);
  const double eps = std::numeric_limits<T>::epsilon();
  const double bound = 16 * eps * (1 + std::abs(m));
  for (const T v : k.values) largest = std::max(largest, std::abs(static_cast<double>(v)));
  if (!(std::abs(static_cast<double>(state.lse()) - (m + std::log(l))) <= bound)) return false;

  std::vector<T> out(k.d_v);
  state.write(out);
  for (std::size_t c = 0; c < k.d_v; ++c) {
    double o = 0;
    for (std::size_t j = 0; j < k.scores.size(); ++j)
      o += std::exp(static_cast<double>(k.scores[j]) - m) / l *
           static_cast<double>(k.values[j * k.d_v + c]);
    if (!(std::abs(static_cast<double>(out[c]) - o) <= bound * largest)) return false;
  }
  return true;
}

}  // namespace

TEMPLATE_TEST_CASE("The empty state is (−inf, 0, 0) and gives out 0 and lse −inf", "", float,
                   double) {
  std::vector<TestType> memory(3, TestType(7)), out(3, TestType(8));
  const attention_state<TestType> state(memory);
  CHECK(state.m() == -infinity<TestType>);
  CHECK(state.l() == 0);
  CHECK(state.lse() == -infinity<TestType>);
  CHECK(std::ranges::all_of(state.o(), [](TestType x) { return x == 0; }));
  state.write(out);
  CHECK(out == std::vector<TestType>(3, 0));
}

TEMPLATE_TEST_CASE("Keys one by one are the attention over all of them", "", float, double) {
  const std::size_t n = GENERATE(values<std::size_t>({1, 2, 17, 200}));
  const std::size_t d_v = GENERATE(values<std::size_t>({1, 3, 16, 21}));
  const double deviation = GENERATE(1.0, 40.0);
  CAPTURE(n, d_v, deviation);
  const keys<TestType> k(n, d_v, deviation, 5);
  std::vector<TestType> memory(d_v);
  attention_state<TestType> state(memory);
  add_range(state, k, 0, n);
  CHECK(is_attention_over(state, k));
}

TEST_CASE("By hand: two keys") {
  std::vector<float> o(1);
  attention_state<float> state(o);
  const float zero = 0, one = 1;
  state.add(1000, std::span(&zero, 1));
  state.add(1001, std::span(&one, 1));
  CHECK(state.m() == 1001);
  float out = 0;
  state.write(std::span(&out, 1));
  CHECK(std::abs(out - 0.7310586f) < 1e-6f);
  CHECK(std::abs(state.lse() - 1001.3133f) < 1e-4f);
}

TEMPLATE_TEST_CASE("Merging states of parts is the state of the whole, however it is cut", "",
                   float, double) {
  constexpr std::size_t n = 40, d_v = 19;
  const keys<TestType> k(n, d_v, 10, 11);
  const std::size_t a = GENERATE(values<std::size_t>({0, 1, 13, 40}));
  const std::size_t b = GENERATE_COPY(values<std::size_t>({a, (a + n) / 2, n}));
  CAPTURE(a, b);
  std::vector<TestType> memory(3 * d_v);
  const std::span<TestType> o(memory);
  attention_state<TestType> x(o.first(d_v)), y(o.subspan(d_v, d_v)), z(o.last(d_v));
  add_range(x, k, 0, a);
  add_range(y, k, a, b);
  add_range(z, k, b, n);
  SECTION("(x y) z") {
    x.merge(y);
    x.merge(z);
    CHECK(is_attention_over(x, k));
  }
  SECTION("z (y x)") {
    y.merge(x);
    z.merge(y);
    CHECK(is_attention_over(z, k));
  }
}

TEMPLATE_TEST_CASE("Merging is commutative bit for bit and has its identity", "", float, double) {
  constexpr std::size_t d_v = 21;
  const keys<TestType> k(9, d_v, 3, 2);
  std::vector<TestType> m1(d_v), m2(d_v), m3(d_v), m4(d_v), nothing(d_v);
  attention_state<TestType> x(m1), y(m2), x2(m3), y2(m4);
  const attention_state<TestType> empty(nothing);
  add_range(x, k, 0, 4);
  add_range(x2, k, 0, 4);
  add_range(y, k, 4, 9);
  add_range(y2, k, 4, 9);

  const TestType m = x.m(), l = x.l();
  x.merge(empty);
  CHECK(x.m() == m);
  CHECK(x.l() == l);
  CHECK(std::ranges::equal(x.o(), x2.o()));
  std::vector<TestType> m5(d_v);
  attention_state<TestType> from_empty(m5);
  from_empty.merge(x);
  CHECK(from_empty.m() == m);
  CHECK(from_empty.l() == l);
  CHECK(std::ranges::equal(from_empty.o(), x.o()));

  x.merge(y);
  y2.merge(x2);
  CHECK(x.m() == y2.m());
  CHECK(x.l() == y2.l());
  CHECK(std::ranges::equal(x.o(), y2.o()));
}

TEMPLATE_TEST_CASE("A forbidden key is no key, whatever its value", "", float, double) {
  std::vector<TestType> memory(2);
  attention_state<TestType> state(memory);
  const std::vector<TestType> poison(2, std::numeric_limits<TestType>::quiet_NaN());
  const std::vector<TestType> value = {3, 4};
  state.add(-infinity<TestType>, poison);
  CHECK(state.l() == 0);
  state.add(-200, value);
  state.add(-infinity<TestType>, poison);
  std::vector<TestType> out(2);
  state.write(out);
  CHECK(out == value);
  CHECK(state.lse() == -200);
}

TEMPLATE_TEST_CASE("NaN and +inf scores make the row NaN", "", float, double) {
  const TestType score =
      GENERATE(values<TestType>({infinity<TestType>, std::numeric_limits<TestType>::quiet_NaN()}));
  const int before = GENERATE(0, 1, 3), after = GENERATE(0, 1, 3);
  CAPTURE(score, before, after);
  std::vector<TestType> memory(1), out(1);
  attention_state<TestType> state(memory);
  const std::vector<TestType> one(1, 1);
  for (int j = 0; j < before; ++j) state.add(0, one);
  state.add(score, one);
  for (int j = 0; j < after; ++j) state.add(5, one);
  state.write(out);
  CHECK(std::isnan(out[0]));
  CHECK_FALSE(std::isfinite(state.lse()));

  std::vector<TestType> other_memory(1);
  attention_state<TestType> other(other_memory);
  other.add(1, one);
  SECTION("merged into") { state.merge(other); }
  SECTION("merged from") {
    other.merge(state);
    other.write(out);
    CHECK(std::isnan(out[0]));
    return;
  }
  state.write(out);
  CHECK(std::isnan(out[0]));
}

TEST_CASE("out may be the state's own memory") {
  std::vector<float> memory(2);
  attention_state<float> state(memory);
  state.add(1, std::vector<float>{2, 4});
  state.add(1, std::vector<float>{4, 8});
  state.write(memory);
  CHECK(memory == std::vector<float>{3, 6});
}

TEST_CASE("Lengths that differ are refused in words") {
  std::vector<float> three(3), two(2);
  attention_state<float> state(three);
  const attention_state<float> narrow(two);
  const auto message = [](auto call) -> std::string {
    try {
      call();
    } catch (const attn::shape_error& e) {
      return e.what();
    }
    return "no shape_error";
  };
  CHECK(message([&] { state.add(0, two); }) ==
        "attention_state: v has 2 elements, expected 3 (d_v)");
  CHECK(message([&] { state.merge(narrow); }) ==
        "attention_state: o of other has 2 elements, expected 3 (d_v)");
  CHECK(message([&] { state.write(two); }) ==
        "attention_state: out has 2 elements, expected 3 (d_v)");
}
