// SPDX-License-Identifier: MIT
#include "support/backward_call.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace attn_test {
namespace {

using reference::tensor;

/// With ATTN_TEST_RATIOS set, the largest error in units of eps is said at the end of the program.
class used_tolerance {
 public:
  ~used_tolerance() {
    if (std::getenv("ATTN_TEST_RATIOS") != nullptr)
      std::fprintf(stderr, "largest gradient error / (eps unit): d_q %.3f, d_k %.3f, d_v %.3f\n",
                   largest_[0], largest_[1], largest_[2]);
  }
  void note(int which, double ratio) { largest_[which] = std::max(largest_[which], ratio); }

 private:
  double largest_[3] = {};
};
used_tolerance used;

constexpr const char* names[3] = {"d_q", "d_k", "d_v"};

const tensor& part(const reference::dense_gradients& g, int which) {
  return which == 0 ? g.d_q : which == 1 ? g.d_k : g.d_v;
}

}  // namespace

gradient_bounds gradient_units(const tensor& q, const tensor& k, const tensor& v,
                               const tensor& d_out, const reference::score_rule& rule,
                               const reference::dense_options& options, double rounding) {
  const reference::dense_result forward = reference::dense_attention(q, k, v, rule, options);
  const index_t d_qk = q.extent(3), d_v = v.extent(3);
  const double scale = std::abs(options.scale.value_or(1 / std::sqrt(static_cast<double>(d_qk))));
  const auto zeros = [&] {
    return reference::dense_gradients{tensor(q.extents()), tensor(k.extents()),
                                      tensor(v.extents())};
  };
  gradient_bounds bounds{zeros(), zeros()};
  for (index_t b = 0; b < q.extent(0); ++b)
    for (index_t h = 0; h < q.extent(1); ++h) {
      const index_t g = h / (q.extent(1) / k.extent(1));
      for (index_t i = 0; i < q.extent(2); ++i) {
        // 1. What the row's weights are known to, and |D|.
        const double lse = forward.lse(b, h, i, 0);
        const double row = 1 + forward.score_bound(b, h, i, 0) + std::abs(lse);
        if (std::isinf(lse) || std::isnan(row)) continue;
        double abs_d = 0;
        for (index_t c = 0; c < d_v; ++c)
          abs_d += std::abs(d_out(b, h, i, c) * forward.out(b, h, i, c));
        for (index_t j = 0; j < k.extent(2); ++j) {
          const double p = forward.weights(b, h, i, j);
          if (p == 0) continue;
          double dot = 0, abs_dp = 0;
          for (index_t c = 0; c < d_qk; ++c) dot += q(b, h, i, c) * k(b, g, j, c);
          for (index_t c = 0; c < d_v; ++c) {
            bounds.units.d_v(b, g, j, c) += row * p * std::abs(d_out(b, h, i, c));
            abs_dp += std::abs(d_out(b, h, i, c) * v(b, g, j, c));
          }
          // 2. Gradients of scores; the slope of a softcap is at most 1.
          const double raw = options.softcap == 0
                                 ? options.scale.value_or(scale) * dot
                                 : options.softcap * std::tanh(options.scale.value_or(scale) * dot /
                                                               options.softcap);
          const double slope = scale * std::abs(rule.slope(raw, b, h, i, j));
          const double unit = row * p * (abs_dp + abs_d) * slope, stored = p * abs_d * slope;
          for (index_t c = 0; c < d_qk; ++c) {
            bounds.units.d_q(b, h, i, c) += unit * std::abs(k(b, g, j, c));
            bounds.units.d_k(b, g, j, c) += unit * std::abs(q(b, h, i, c));
            bounds.storage.d_q(b, h, i, c) += rounding * stored * std::abs(k(b, g, j, c));
            bounds.storage.d_k(b, g, j, c) += rounding * stored * std::abs(q(b, h, i, c));
          }
        }
      }
    }
  // 3. The gradients are rounded once more.
  const reference::dense_gradients exact =
      reference::dense_attention_backward(q, k, v, d_out, rule, options);
  const auto add = [&](tensor& storage, const tensor& value) {
    for (std::size_t n = 0; n < storage.elements().size(); ++n)
      storage.elements()[n] =
          storage.elements()[n] * (1 + rounding) + rounding * std::abs(value.elements()[n]);
  };
  add(bounds.storage.d_q, exact.d_q);
  add(bounds.storage.d_k, exact.d_k);
  add(bounds.storage.d_v, exact.d_v);
  return bounds;
}

comparison compare_gradients(const reference::dense_gradients& got,
                             const reference::dense_gradients& expected,
                             const gradient_bounds& bounds, double eps, double storage_floor,
                             tolerance t) {
  for (int which = 0; which < 3; ++which) {
    const tensor &g = part(got, which), &e = part(expected, which);
    const tensor& unit = part(bounds.units, which);
    const tensor& storage = part(bounds.storage, which);
    for (std::size_t n = 0; n < e.elements().size(); ++n) {
      const double x = g.elements()[n], y = e.elements()[n];
      const double stored = storage.elements()[n] + storage_floor;
      const double limit = t.constant * eps * unit.elements()[n] + stored;
      const bool ok = std::isnan(y) ? std::isnan(x) : std::abs(x - y) <= limit;
      if (!ok) {
        return {false, std::string(names[which]) + " element " + std::to_string(n) + " is " +
                           std::to_string(x) + ", expected " + std::to_string(y) + " within " +
                           std::to_string(limit)};
      }
      if (stored == 0 && unit.elements()[n] > 0)
        used.note(which, std::abs(x - y) / (eps * unit.elements()[n]));
    }
  }
  return {};
}

comparison compare_bits(const reference::dense_gradients& a, const reference::dense_gradients& b) {
  for (int which = 0; which < 3; ++which) {
    if (comparison c = compare_bits(part(a, which), part(b, which)); !c) {
      c.message = std::string(names[which]) + ": " + c.message;
      return c;
    }
  }
  return {};
}

}  // namespace attn_test
