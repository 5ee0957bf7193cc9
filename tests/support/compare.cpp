// SPDX-License-Identifier: MIT
#include "support/compare.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <sstream>

namespace attn_test {
namespace {

/// With ATTN_TEST_RATIOS set, every test program says at its end how much of the tolerance it
/// used: the constant that docs/numerics.md states was measured so.
class used_tolerance {
 public:
  ~used_tolerance() {
    if (std::getenv("ATTN_TEST_RATIOS") != nullptr)
      std::fprintf(stderr, "largest error / (eps (1 + score bound) max|v|): out %.3f, lse %.3f\n",
                   out_, lse_);
  }
  void out(double ratio) { out_ = std::max(out_, ratio); }
  void lse(double ratio) { lse_ = std::max(lse_, ratio); }

 private:
  double out_ = 0, lse_ = 0;
};
used_tolerance used;

/// Gathers offences; reports how many there are, the first and the worst.
class offences {
 public:
  template <class... Index>
  void add(double got, double expected, double bound, const char* what, Index... index) {
    const double excess = std::isnan(got - expected) ? HUGE_VAL : std::abs(got - expected) - bound;
    std::ostringstream text;
    text.precision(17);
    text << what << "(";
    const char* separator = "";
    ((text << separator << index, separator = ", "), ...);
    text << ") is " << got << ", expected " << expected << " within " << bound;
    if (count_++ == 0) first_ = text.str();
    if (excess > worst_excess_) worst_excess_ = excess, worst_ = text.str();
  }

  comparison verdict() const {
    if (count_ == 0) return {};
    return {false, std::to_string(count_) + " wrong; first: " + first_ + "; worst: " + worst_};
  }

 private:
  long count_ = 0;
  double worst_excess_ = -1;
  std::string first_, worst_;
};

bool within(double got, double expected, double bound) {
  if (std::isnan(expected)) return std::isnan(got);
  if (std::isinf(expected)) return got == expected;
  return std::abs(got - expected) <= bound;  // false for a NaN
}

template <class F>
void for_each_index(const reference::tensor& t, F f) {
  for (index_t b = 0; b < t.extent(0); ++b)
    for (index_t h = 0; h < t.extent(1); ++h)
      for (index_t i = 0; i < t.extent(2); ++i)
        for (index_t c = 0; c < t.extent(3); ++c) f(b, h, i, c);
}

template <class T>
void check_out(const reference::tensor& out, const reference::dense_result& expected, tolerance t,
               offences& found) {
  constexpr double eps = arithmetic_epsilon<T>;
  // Half the smallest number of a half type: its subnormals are evenly spaced.
  const double storage_floor = std::is_same_v<T, Eigen::half> ? 0x1p-25 : 0;
  for_each_index(expected.out, [&](index_t b, index_t h, index_t i, index_t c) {
    const double e = expected.out(b, h, i, c), got = out(b, h, i, c);
    const double unit =
        eps * (1 + expected.score_bound(b, h, i, 0)) * expected.value_bound(b, h, i, 0);
    const double rounding = storage_rounding<T>() * (std::abs(e) + t.constant * unit);
    const double bound = t.constant * unit + rounding + storage_floor;
    if (!within(got, e, bound)) found.add(got, e, bound, "out", b, h, i, c);
    if (unit > 0 && std::isfinite(e) && !is_half_type<T>) used.out(std::abs(got - e) / unit);
  });
}

}  // namespace

template <class T>
comparison compare_out(const reference::tensor& out, const reference::dense_result& expected,
                       tolerance t) {
  offences found;
  check_out<T>(out, expected, t, found);
  return found.verdict();
}

template <class T>
comparison compare_dense(const reference::tensor& out, const reference::tensor& lse,
                         const reference::dense_result& expected, tolerance t) {
  constexpr double eps = arithmetic_epsilon<T>;
  offences found;
  check_out<T>(out, expected, t, found);
  for_each_index(expected.lse, [&](index_t b, index_t h, index_t i, index_t c) {
    const double e = expected.lse(b, h, i, c), got = lse(b, h, i, c);
    const double unit = eps * (1 + expected.score_bound(b, h, i, 0) + std::abs(e));
    if (!within(got, e, t.constant * unit)) found.add(got, e, t.constant * unit, "lse", b, h, i);
    if (std::isfinite(e)) used.lse(std::abs(got - e) / unit);
  });
  return found.verdict();
}

comparison compare_bits(const reference::tensor& a, const reference::tensor& b) {
  offences found;
  if (a.extents() != b.extents()) return {false, "the shapes differ"};
  for_each_index(a, [&](index_t n, index_t h, index_t i, index_t c) {
    const double x = a(n, h, i, c), y = b(n, h, i, c);
    const bool both_nan = std::isnan(x) && std::isnan(y);
    if (!both_nan && !same_bits(x, y)) found.add(x, y, 0, "element", n, h, i, c);
  });
  return found.verdict();
}

comparison compare_within(const reference::tensor& a, const reference::tensor& b, double bound) {
  offences found;
  if (a.extents() != b.extents()) return {false, "the shapes differ"};
  for_each_index(a, [&](index_t n, index_t h, index_t i, index_t c) {
    if (!within(a(n, h, i, c), b(n, h, i, c), bound))
      found.add(a(n, h, i, c), b(n, h, i, c), bound, "element", n, h, i, c);
  });
  return found.verdict();
}

#define ATTN_TEST_COMPARE(T)                                                                       \
  template comparison compare_out<T>(const reference::tensor&, const reference::dense_result&,     \
                                     tolerance);                                                   \
  template comparison compare_dense<T>(const reference::tensor&, const reference::tensor&,         \
                                       const reference::dense_result&, tolerance);
ATTN_TEST_COMPARE(float)
ATTN_TEST_COMPARE(double)
ATTN_TEST_COMPARE(Eigen::half)
ATTN_TEST_COMPARE(Eigen::bfloat16)
#undef ATTN_TEST_COMPARE

}  // namespace attn_test
