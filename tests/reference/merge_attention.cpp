// SPDX-License-Identifier: MIT
#include "reference/merge_attention.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace reference {

merge_result merge_attention(const tensor& out_a, const tensor& lse_a, const tensor& out_b,
                             const tensor& lse_b) {
  constexpr double empty = -std::numeric_limits<double>::infinity();
  merge_result r{tensor(out_a.extents()), tensor(lse_a.extents(), empty)};
  for (index_t b = 0; b < out_a.extent(0); ++b) {
    for (index_t h = 0; h < out_a.extent(1); ++h) {
      for (index_t i = 0; i < out_a.extent(2); ++i) {
        const double la = lse_a(b, h, i, 0), lb = lse_b(b, h, i, 0);
        const double m = std::isnan(lb) ? lb : std::max(la, lb);  // max(−inf, NaN) is −inf
        if (m == empty) continue;
        const double wa = std::exp(la - m), wb = std::exp(lb - m);
        r.lse(b, h, i, 0) = m + std::log(wa + wb);
        // An empty set weighs 0 and its out takes no part, whatever it holds.
        for (index_t c = 0; c < out_a.extent(3); ++c) {
          const double a = wa == 0 ? 0 : wa * out_a(b, h, i, c);
          const double other = wb == 0 ? 0 : wb * out_b(b, h, i, c);
          r.out(b, h, i, c) = (a + other) / (wa + wb);
        }
      }
    }
  }
  return r;
}

}  // namespace reference
