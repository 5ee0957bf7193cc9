// SPDX-License-Identifier: MIT
//
// Every exact method of attn_compare, in every type, against the double reference.
#include "support/catch.hpp"
#include "support/method.hpp"
#include "support/oracle.hpp"

#include <cmath>
#include <cstddef>
#include <limits>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

#include <Eigen/Core>

using namespace attn::bench;

namespace {

// Normal noise keeps |v| under 6; half types are rounded on the way out.
template <class T>
constexpr double bound() {
  if constexpr (std::is_same_v<T, double>) return 1e-14;
  if constexpr (std::is_same_v<T, Eigen::half>) return 6 * 0x1p-11;
  if constexpr (std::is_same_v<T, Eigen::bfloat16>) return 6 * 0x1p-8;
  return 1e-5;
}

bool is_exact(const std::string& name) {
  return name == "eigen" || name == "eigen-blocked" || name == "dense";
}

}  // namespace

TEMPLATE_TEST_CASE("methods: the exact ones agree with the reference", "", float, double,
                   Eigen::half, Eigen::bfloat16) {
  const problem_shape shapes[] = {
      {1, 1, 1, 1, 1, 1, 1, false},      {2, 3, 3, 50, 50, 16, 16, false},
      {1, 4, 2, 150, 70, 8, 24, false},  // grouped heads, d_v is not d_qk
      {1, 2, 1, 300, 300, 32, 32, true}, {1, 2, 2, 40, 200, 16, 8, true},
      {1, 1, 1, 200, 30, 16, 16, true},  // the first 170 queries see no key
  };
  for (const problem_shape& shape : shapes) {
    const auto p = random_problem<TestType>(shape, 5);
    const oracle reference(p);
    REQUIRE(reference.rows() == shape.n_q);
    for (const auto& m : all_methods<TestType>()) {
      if (!is_exact(std::string(m.name))) continue;
      for (const int threads : {1, 3}) {
        CAPTURE(m.name, shape.n_q, shape.n_kv, shape.causal, threads);
        REQUIRE(m.obstacle(shape).empty());
        CHECK(m.flops(shape) == shape.flops());
        aligned_vector<TestType> elements(
            static_cast<std::size_t>(shape.n_batch * shape.n_heads * shape.n_q * shape.d_v),
            static_cast<TestType>(std::numeric_limits<float>::quiet_NaN()));
        const auto out =
            attn::bhld(elements.data(), shape.n_batch, shape.n_heads, shape.n_q, shape.d_v);
        const auto call = m.prepare(p, out, threads);
        call();
        const double first = reference.compare<TestType>(out).largest;
        CHECK(first < bound<TestType>());
        call();  // scratch is reused
        CHECK(reference.compare<TestType>(out).largest == first);
      }
    }
  }
}

TEST_CASE("methods: names are unique and fit the table") {
  const auto methods = all_methods<float>();
  for (std::size_t i = 0; i < methods.size(); ++i) {
    CHECK(methods[i].name.size() <= 24);
    CHECK(methods[i].summary.size() <= 90);
    for (std::size_t j = 0; j < i; ++j) CHECK(methods[i].name != methods[j].name);
  }
}

TEST_CASE("methods: blockwise attention counts what it does and sees its block alone") {
  problem_shape shape{2, 2, 1, 300, 300, 8, 8};
  for (const auto& m : all_methods<float>()) {
    if (m.name != "blockwise-128") continue;
    CHECK(m.flops(shape) == 2 * 2 * (128 * 128 + 128 * 128 + 44 * 44) * 32.0);
    shape.causal = true;
    CHECK(m.flops(shape) == 2 * 2 * (128 * 129 / 2 * 2 + 44 * 45 / 2) * 32.0);
    CHECK(m.obstacle({1, 1, 1, 128, 128, 8, 8}) != "");
    CHECK(m.obstacle({1, 1, 1, 300, 299, 8, 8}) != "");

    // The first block is dense attention to its keys.
    auto p = random_problem<float>({1, 1, 1, 200, 200, 8, 8}, 3);
    std::vector<float> elements(200 * 8);
    const auto out = attn::bhld(elements.data(), 1, 1, 200, 8);
    m.prepare(p, out, 1)();
    problem<float> first_block = p;
    first_block.shape.n_kv = 128;
    std::vector<float> dense_elements(200 * 8);
    all_methods<float>()[0].prepare(first_block, attn::bhld(dense_elements.data(), 1, 1, 200, 8),
                                    1)();
    for (std::size_t i = 0; i < 128 * 8; ++i) {
      REQUIRE(std::abs(elements[i] - dense_elements[i]) < 1e-5);
    }
    return;
  }
  FAIL("blockwise-128 is not in the list");
}

TEST_CASE("methods: pooled attention keeps what it says, and says no to what it cannot do") {
  const problem_shape shape{2, 2, 1, 30, 300, 8, 8};
  const auto methods = all_methods<float>({.blocks = {}, .kept = {299}, .smyrf = {}});
  const auto& m = methods.back();
  CHECK(m.name == "pooled-299");
  CHECK(m.flops(shape) == (2 * 2 * 30 * 299 + 2 * 300) * 32.0);
  CHECK(m.obstacle(shape).empty());
  CHECK(m.obstacle({1, 1, 1, 30, 299, 8, 8}) != "");
  CHECK(m.obstacle({1, 1, 1, 300, 300, 8, 8, true}) != "");

  // All keys but two keep their place: near to dense attention.
  const auto p = random_problem<float>(shape, 3);
  const oracle reference(p);
  std::vector<float> elements(2 * 2 * 30 * 8, std::numeric_limits<float>::quiet_NaN());
  const auto out = attn::bhld(elements.data(), 2, 2, 30, 8);
  m.prepare(p, out, 1)();
  CHECK(reference.compare<float>(out).largest < 0.1);
}

TEST_CASE("methods: SMYRF counts what it does, and captures what its clusters hold") {
  const problem_shape shape{2, 4, 2, 100, 300, 8, 8};
  const auto p = random_problem<float>(shape, 3);
  const oracle reference(p);
  std::map<std::string, double> captured, error;
  for (const auto& m :
       all_methods<float>({.blocks = {}, .kept = {}, .smyrf = {{1, 100}, {3, 97}}})) {
    if (!m.name.starts_with("smyrf-") && !m.name.starts_with("bisection-")) continue;
    CAPTURE(m.name);
    CHECK(m.obstacle(shape).empty());
    // 3 clusters of 100 keys and 33, 33, 34 queries, that meet 1, 2, 2 means; 4 of 75 and 25, 2.
    double pairs = m.name.ends_with("1x100") ? 100 * 100 : 3 * 4 * 25 * 75;
    if (m.name == "bisection-far-1x100") pairs += 33 * 1 + 33 * 2 + 34 * 2;
    if (m.name == "bisection-far-3x97") pairs += 3 * 4 * 25 * 2;
    CHECK(m.flops(shape) == 2 * 4 * pairs * 32);
    std::vector<float> elements(2 * 4 * 100 * 8, std::numeric_limits<float>::quiet_NaN());
    const auto out = attn::bhld(elements.data(), 2, 4, 100, 8);
    m.prepare(p, out, 1)();
    CHECK(reference.compare<float>(out).largest < 3);
    error[m.name] = reference.compare<float>(out).relative;
    captured[m.name] = *m.captured(p, reference);
    CHECK(captured[m.name] > 0.2);
    CHECK(captured[m.name] < 1);
    CHECK(m.obstacle({1, 1, 1, 99, 99, 8, 8}) != "");   // as many keys as there are
    CHECK(m.obstacle({1, 1, 1, 2, 3000, 8, 8}) != "");  // more clusters than queries
  }
  REQUIRE(captured.size() == 8);
  CHECK(captured["smyrf-3x97"] > captured["smyrf-1x100"]);
  CHECK(captured["bisection-3x97"] > captured["bisection-1x100"]);
  // The same clusters: a key counts once, and one behind a mean does not.
  for (const char* size : {"1x100", "3x97"}) {
    CAPTURE(size);
    const std::string text = size;
    CHECK(captured["bisection-removed-" + text] == captured["bisection-" + text]);
    CHECK(captured["bisection-far-" + text] == captured["bisection-" + text]);
    CHECK(error["bisection-far-" + text] < error["bisection-" + text]);
  }
  CHECK(error["bisection-removed-1x100"] == error["bisection-1x100"]);  // no duplicates
  CHECK(error["bisection-removed-3x97"] < error["bisection-3x97"]);
}

TEST_CASE("methods: the far field says no to a mask and to as many scores as dense attention") {
  const auto methods = all_methods<float>({.blocks = {}, .kept = {}, .smyrf = {{3, 98}}});
  for (const auto& m : methods) {
    if (!m.name.ends_with("-3x98")) continue;
    CAPTURE(m.name);
    const bool far = m.name == "bisection-far-3x98";
    // 4 clusters: two means each, 3 * (98 + 2) scores.
    CHECK(m.obstacle({1, 1, 1, 100, 300, 8, 8}).empty() == !far);
    CHECK(m.obstacle({1, 1, 1, 100, 301, 8, 8}).empty());
    CHECK(m.obstacle({1, 1, 1, 301, 301, 8, 8, true}).empty() == !far);
  }
  CHECK(methods.back().name == "bisection-far-3x98");
}

TEST_CASE("methods: causal SMYRF leaves no query without a key") {
  const problem_shape shape{1, 2, 2, 200, 200, 8, 8, true};
  const auto p = random_problem<float>(shape, 4);
  const oracle reference(p);
  int n_run = 0;
  for (const auto& m : all_methods<float>({.blocks = {}, .kept = {}, .smyrf = {{2, 20}}})) {
    if (!m.name.ends_with("-2x20") || !m.obstacle(shape).empty()) continue;
    CAPTURE(m.name);
    std::vector<float> elements(2 * 200 * 8, std::numeric_limits<float>::quiet_NaN());
    m.prepare(p, attn::bhld(elements.data(), 1, 2, 200, 8), 1)();
    for (std::size_t i = 0; i < 2 * 200; ++i) REQUIRE(elements[8 * i] != 0.0f);
    CHECK(*m.captured(p, reference) > 0.1);
    ++n_run;
  }
  CHECK(n_run == 3);
}

TEST_CASE("methods: exact ones capture everything, pooled attention has no such number") {
  const auto p = random_problem<double>({1, 2, 1, 130, 300, 8, 8}, 3);
  const oracle reference(p);
  for (const auto& m : all_methods<double>()) {
    CAPTURE(m.name);
    if (is_exact(m.name)) CHECK(m.captured(p, reference) == 1.0);
    if (m.name == "pooled-128") CHECK(!m.captured(p, reference));
  }
}

TEST_CASE("methods: plain Eigen says no to a score matrix of many GiB, the others run") {
  const problem_shape shape{1, 1, 1, 100'000, 100'000, 64, 64};
  for (const auto& m : all_methods<float>()) {
    CHECK(m.obstacle(shape).empty() == (m.name != "eigen"));
  }
}
