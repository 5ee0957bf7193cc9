// SPDX-License-Identifier: MIT
//
// Where operands lie has no influence on results, and nothing outside of them is used or written.
#include "support/catch.hpp"
#include "support/dense_call.hpp"
#include "support/guarded_memory.hpp"

#include <limits>
#include <vector>

using namespace attn_test;

#define ELEMENT_TYPES float, double, Eigen::half, Eigen::bfloat16

namespace {

const std::vector<dense_problem> problems = in_both_precisions({
    {.n_heads = 2, .n_kv_heads = 1, .n_q = 1, .n_kv = 150, .d_qk = 33, .d_v = 17},
    {.n_batch = 2, .n_heads = 2, .n_kv_heads = 2, .n_q = 53, .n_kv = 131, .d_qk = 20, .d_v = 35},
});

}  // namespace

TEMPLATE_TEST_CASE("Any layout of inputs and outputs gives the bits of the contiguous one", "",
                   ELEMENT_TYPES) {
  for (dense_problem p : problems) {
    dense_operands<TestType> contiguous(p);
    attend(contiguous);
    for (const layout inputs : plain_layouts)
      for (const layout outputs : plain_layouts) {
        p.inputs = inputs;
        p.outputs = outputs;
        INFO(p);
        dense_operands<TestType> x(p);
        attend(x);
        CHECK(x.out.canaries_alive());
        CHECK(x.lse.canaries_alive());
        CHECK(same_bits_out(x, contiguous));
      }
  }
}

TEMPLATE_TEST_CASE("What lies around the operands has no influence", "", ELEMENT_TYPES) {
  // NaN around them everywhere above; here something finite and huge.
  for (dense_problem p : problems)
    for (const layout l : plain_layouts) {
      p.inputs = p.outputs = l;
      INFO(p);
      dense_operands<TestType> among_nan(p), among_huge(p, to_double(huge_value<TestType>()));
      attend(among_nan);
      attend(among_huge);
      CHECK(among_huge.out.canaries_alive());
      CHECK(among_huge.lse.canaries_alive());
      CHECK(same_bits_out(among_nan, among_huge));
    }
}

TEMPLATE_TEST_CASE("Scratch that earlier calls left behind has no influence", "", ELEMENT_TYPES) {
  const double poison = GENERATE_COPY(std::nan(""), to_double(huge_value<TestType>()),
                                      std::numeric_limits<double>::infinity());
  attn::context fresh, used;
  dense_problem large{
      .n_heads = 2, .n_kv_heads = 2, .n_q = 150, .n_kv = 300, .d_qk = 72, .d_v = 72};
  large.inputs = layout::column_major;  // packed: leaves keys and values in the scratch
  dense_operands<TestType> dirt(large);
  dirt.q.assign(reference::tensor(large.q_extents(), poison));
  dirt.k.assign(reference::tensor(large.k_extents(), poison));
  dirt.v.assign(reference::tensor(large.v_extents(), poison));
  for (dense_problem p : problems)
    for (const layout l : {layout::contiguous, layout::column_major}) {
      p.inputs = p.outputs = l;
      INFO(p);
      dense_operands<TestType> clean(p), after(p);
      attend(clean, attn::no_mask{}, {}, fresh);
      attend(dirt, attn::no_mask{}, {}, used);
      attend(after, attn::no_mask{}, {}, used);
      CHECK(same_bits_out(clean, after));
    }
}

TEMPLATE_TEST_CASE("Stride 0: one batch, head or row of keys seen many times", "", float,
                   Eigen::bfloat16) {
  const layout broadcast =
      GENERATE(layout::broadcast_batch, layout::broadcast_heads, layout::broadcast_rows);
  for (const index_t n_q : {1, 40})
    for (const index_t n_kv : {33, 65}) {
      dense_problem p{.n_batch = 2, .n_heads = 4, .n_kv_heads = 2, .n_q = n_q, .n_kv = n_kv};
      dense_operands<TestType> copied(p);
      p.inputs = broadcast;
      INFO(p);
      dense_operands<TestType> x(p);
      CHECK(check_dense(x));
      copied.q.assign(x.q.values());
      copied.k.assign(x.k.values());
      copied.v.assign(x.v.values());
      attend(copied);
      CHECK(same_bits_out(x, copied));
    }
}

TEMPLATE_TEST_CASE("Nothing past the last element is read or written", "", ELEMENT_TYPES) {
  for (dense_problem p : problems)
    for (const index_t d : {1, 3, 17, 64}) {
      p.d_qk = p.d_v = d;
      INFO(p);
      dense_operands<TestType> plain(p);
      attend(plain);
      const guarded_tensor<TestType> q(plain.q.values()), k(plain.k.values()), v(plain.v.values());
      const guarded_tensor<TestType> out{reference::tensor(p.out_extents())};
      const guarded_tensor<arithmetic_t<TestType>> lse{reference::tensor(p.lse_extents())};
      attn::dense_attention(q.view(), k.view(), v.view(), out.view(), lse.view(), attn::no_mask{},
                            {.precision = p.precision});
      CHECK(compare_bits(out.values(), plain.out.values()));
      CHECK(compare_bits(lse.values(), plain.lse.values()));
    }
}
