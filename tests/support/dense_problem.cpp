// SPDX-License-Identifier: MIT
#include "support/dense_problem.hpp"

namespace attn_test {

std::ostream& operator<<(std::ostream& out, const dense_problem& p) {
  return out << "batch " << p.n_batch << ", heads " << p.n_heads << " over " << p.n_kv_heads
             << ", n_q " << p.n_q << ", n_kv " << p.n_kv << ", d_qk " << p.d_qk << ", d_v " << p.d_v
             << ", inputs " << p.inputs << ", outputs " << p.outputs << ", deviation "
             << p.deviation << ", seed " << p.seed
             << (p.precision == attn::precision_mode::strict ? ", strict" : "");
}

std::vector<dense_problem> in_both_precisions(const std::vector<dense_problem>& problems) {
  std::vector<dense_problem> both = problems;
  for (dense_problem p : problems) {
    p.precision = attn::precision_mode::strict;
    both.push_back(p);
  }
  return both;
}

}  // namespace attn_test
