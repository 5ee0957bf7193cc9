// SPDX-License-Identifier: MIT
#include "support/dense_problem.hpp"

namespace attn_test {

std::ostream& operator<<(std::ostream& out, const dense_problem& p) {
  return out << "batch " << p.n_batch << ", heads " << p.n_heads << " over " << p.n_kv_heads
             << ", n_q " << p.n_q << ", n_kv " << p.n_kv << ", d_qk " << p.d_qk << ", d_v " << p.d_v
             << ", inputs " << p.inputs << ", outputs " << p.outputs << ", deviation "
             << p.deviation << ", seed " << p.seed;
}

}  // namespace attn_test
