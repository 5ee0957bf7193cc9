// SPDX-License-Identifier: MIT
//
// The bits of a row depend on its own query, keys, values, rule and options: not on the batch, the
// heads, the other rows, its place in a tile, or the number of threads.
#include "support/catch.hpp"
#include "support/dense_call.hpp"
#include "support/rule_operands.hpp"
#include "support/sizes.hpp"
#include "support/watchdog.hpp"

#include <attn/context.hpp>

#include <limits>
#include <vector>

using namespace attn_test;

namespace {

constexpr auto automatic = attn::precision_mode::automatic, strict = attn::precision_mode::strict;
constexpr double infinity = std::numeric_limits<double>::infinity();

/// Copies row i of head h of batch b of one tensor into another.
void copy_row(const reference::tensor& from, index_t b, index_t h, index_t i, reference::tensor& to,
              index_t to_b, index_t to_h, index_t to_i) {
  for (index_t c = 0; c < from.extent(3); ++c) to(to_b, to_h, to_i, c) = from(b, h, i, c);
}

template <class T>
bool same_row(const dense_operands<T>& a, index_t ba, index_t ha, index_t ia,
              const dense_operands<T>& b, index_t bb, index_t hb, index_t ib) {
  const auto x = a.out.view(), y = b.out.view();
  for (index_t c = 0; c < x.extent(3); ++c)
    if (!same_bits(x(ba, ha, ia, c), y(bb, hb, ib, c))) return false;
  return same_bits(a.lse.view()(ba, ha, ia, 0), b.lse.view()(bb, hb, ib, 0));
}

/// Queries of which some rows are as hard as can be for a kernel that bets on moderate scores:
/// `k` grows along the keys in channel 0, so a large q there makes scores that grow for ever.
void make_hard(reference::tensor& q, reference::tensor& k, const std::vector<index_t>& rows) {
  for (index_t b = 0; b < k.extent(0); ++b)
    for (index_t h = 0; h < k.extent(1); ++h)
      for (index_t j = 0; j < k.extent(2); ++j) k(b, h, j, 0) = 0.0625 * static_cast<double>(j);
  for (index_t b = 0; b < q.extent(0); ++b)
    for (index_t h = 0; h < q.extent(1); ++h) {
      for (index_t i = 0; i < q.extent(2); ++i) q(b, h, i, 0) *= 0.125;
      for (const index_t i : rows) q(b, h, i, 0) = 40 + static_cast<double>(i);
    }
}

}  // namespace

TEMPLATE_TEST_CASE("Place in the tile: rows that are permuted give permuted results", "", float,
                   double, Eigen::bfloat16) {
  const auto precision = GENERATE(automatic, strict);
  const index_t w = lanes<TestType>;
  for (const index_t n_q : {index_t{2}, w + 1, 3 * w, 4 * w, 12 * w + 5})
    for (const index_t shift : {index_t{1}, w - 1, w + 1, 2 * w + 1}) {
      const dense_problem p{.n_q = n_q, .n_kv = 300, .d_qk = 21, .d_v = 17, .precision = precision};
      INFO(p);
      CAPTURE(shift);
      dense_operands<TestType> straight(p), rotated(p);
      reference::tensor q = straight.q.values(), k = straight.k.values(), moved = q;
      make_hard(q, k, {0, n_q / 2});
      const auto place = [&](index_t i) { return (i + shift) % n_q; };
      for (index_t i = 0; i < n_q; ++i) copy_row(q, 0, 0, i, moved, 0, 0, place(i));
      straight.q.assign(q), rotated.q.assign(moved);
      straight.k.assign(k), rotated.k.assign(k);
      attend(straight);
      attend(rotated);
      index_t wrong = 0;
      for (index_t i = 0; i < n_q; ++i)
        wrong += !same_row(straight, 0, 0, i, rotated, 0, 0, place(i));
      CHECK(wrong == 0);
    }
}

TEMPLATE_TEST_CASE("Place in the tile, over more keys than are summed in one go", "", float, double,
                   Eigen::bfloat16) {
  const auto precision = GENERATE(automatic, strict);
  const dense_problem p{.n_q = 70, .n_kv = 4500, .d_qk = 20, .d_v = 24, .precision = precision};
  dense_operands<TestType> straight(p), rotated(p);
  reference::tensor q = straight.q.values(), k = straight.k.values(), moved = q;
  make_hard(q, k, {0, 33});
  for (index_t i = 0; i < p.n_q; ++i) copy_row(q, 0, 0, i, moved, 0, 0, (i + 21) % p.n_q);
  straight.q.assign(q), rotated.q.assign(moved);
  straight.k.assign(k), rotated.k.assign(k);
  attend(straight);
  attend(rotated);
  index_t wrong = 0;
  for (index_t i = 0; i < p.n_q; ++i)
    wrong += !same_row(straight, 0, 0, i, rotated, 0, 0, (i + 21) % p.n_q);
  CHECK(wrong == 0);
  // A window that begins in the second part, at two places of the call.
  dense_problem longer = p;
  longer.n_q = p.n_q + 30;
  dense_operands<TestType> c(longer);
  reference::tensor more = c.q.values();
  for (index_t i = 0; i < p.n_q; ++i) copy_row(q, 0, 0, i, more, 0, 0, i + 13);
  c.q.assign(more), c.k.assign(k), c.v.assign(straight.v.values());
  attend(straight, attn::window_mask{.left = 1500, .right = 900, .offset = 2600});
  attend(c, attn::window_mask{.left = 1500, .right = 900, .offset = 2587});
  wrong = 0;
  for (index_t i = 0; i < p.n_q; ++i) wrong += !same_row(straight, 0, 0, i, c, 0, 0, i + 13);
  CHECK(wrong == 0);
  CHECK(check_dense<TestType>(p));
}

TEMPLATE_TEST_CASE("Neighbours: zero, huge, infinite, NaN, or with scores that grow for ever", "",
                   float, double) {
  const auto precision = GENERATE(automatic, strict);
  const std::vector<index_t> lengths = {290};
  for (const index_t n_q : {2, 5, 60})
    for (const double neighbour : {0.0, 1e3, -1e3, 1e30, infinity, std::nan("")}) {
      const dense_problem p{.n_heads = 2,
                            .n_kv_heads = 1,
                            .n_q = n_q,
                            .n_kv = 300,
                            .d_qk = 20,
                            .d_v = 24,
                            .precision = precision};
      INFO(p);
      CAPTURE(neighbour);
      dense_operands<TestType> clean(p), disturbed(p);
      reference::tensor q = clean.q.values(), k = clean.k.values();
      make_hard(q, k, {0});
      clean.q.assign(q);
      clean.k.assign(k), disturbed.k.assign(k);
      const auto is_kept = [&](index_t h, index_t i) { return (i + h) % 3 == 0; };
      for (index_t h = 0; h < 2; ++h)
        for (index_t i = 0; i < n_q; ++i)
          for (index_t c = 0; c < 20; ++c)
            if (!is_kept(h, i)) q(0, h, i, c) = neighbour;
      disturbed.q.assign(q);
      const auto wrong = [&](const auto& rule) {
        attend(clean, rule);
        attend(disturbed, rule);
        index_t n = 0;
        for (index_t h = 0; h < 2; ++h)
          for (index_t i = 0; i < n_q; ++i)
            n += is_kept(h, i) && !same_row(clean, 0, h, i, disturbed, 0, h, i);
        return n;
      };
      CHECK(wrong(attn::no_mask{}) == 0);
      CHECK(wrong(attn::causal_mask{.offset = 240} & attn::key_lengths{lengths}) == 0);
    }
}

TEMPLATE_TEST_CASE("Neighbours under other masks, in every precision", "", float, double,
                   Eigen::bfloat16) {
  const auto precision =
      GENERATE(automatic, strict, attn::precision_mode::bf16x3, attn::precision_mode::bf16);
  const bool hard = GENERATE(false, true);
  // The last is wide and long enough for AMX tiles.
  for (const dense_problem& p : {dense_problem{.n_q = 5, .n_kv = 300, .d_qk = 20, .d_v = 24},
                                 dense_problem{.n_q = 60, .n_kv = 300, .d_qk = 20, .d_v = 24},
                                 dense_problem{.n_q = 150, .n_kv = 300, .d_qk = 48, .d_v = 40}}) {
    INFO(p);
    CAPTURE(hard, static_cast<int>(precision));
    const auto is_kept = [](index_t i) { return i % 3 == 0; };
    // Kept rows see all, or all but two keys; their neighbours see everything or a coin's choice.
    reference::tensor free({1, 1, p.n_q, p.n_kv}),
        masked = coin_tensor({1, 1, p.n_q, p.n_kv}, 7, 0.5);
    for (index_t i = 0; i < p.n_q; ++i)
      for (index_t j = 0; j < p.n_kv; ++j) {
        free(0, 0, i, j) = i % 2 == 0 || (j != 3 && j != 170);
        if (is_kept(i))
          masked(0, 0, i, j) = free(0, 0, i, j);
        else
          free(0, 0, i, j) = 1;
      }
    dense_operands<TestType> a(p), b(p);
    if (hard) {
      reference::tensor q = a.q.values(), k = a.k.values();
      make_hard(q, k, {0, 2});
      a.q.assign(q), b.q.assign(q), a.k.assign(k), b.k.assign(k);
    }
    const rule_operand<bool> mask_a(free), mask_b(masked);
    attend(a, attn::boolean_mask{mask_a.view()}, {.precision = precision});
    attend(b, attn::boolean_mask{mask_b.view()}, {.precision = precision});
    index_t wrong = 0;
    for (index_t i = 0; i < p.n_q; ++i) wrong += is_kept(i) && !same_row(a, 0, 0, i, b, 0, 0, i);
    CHECK(wrong == 0);
    // Under a causal mask: the same row at the end of one call and in the middle of another.
    dense_problem longer = p;
    longer.n_q = p.n_q + 37;
    dense_operands<TestType> c(longer);
    reference::tensor q = c.q.values();
    for (index_t i = 0; i < p.n_q; ++i) copy_row(a.q.values(), 0, 0, i, q, 0, 0, i + 20);
    c.q.assign(q), c.k.assign(a.k.values()), c.v.assign(a.v.values());
    attend(a, attn::causal_mask{.offset = 140}, {.precision = precision});
    attend(c, attn::causal_mask{.offset = 120}, {.precision = precision});
    wrong = 0;
    for (index_t i = 0; i < p.n_q; ++i) wrong += !same_row(a, 0, 0, i, c, 0, 0, i + 20);
    // Few queries have another order of summation than many.
    CHECK((wrong == 0 || p.n_q == 5));
  }
}

TEST_CASE("Neighbours, with a bias, a softcap and a function") {
  const auto precision = GENERATE(automatic, strict);
  const std::vector<float> slopes = {0.1f, 0.5f};
  for (const index_t n_q : {2, 60})
    for (const double neighbour : {1e3, infinity, std::nan("")}) {
      const dense_problem p{.n_heads = 2,
                            .n_kv_heads = 1,
                            .n_q = n_q,
                            .n_kv = 300,
                            .d_qk = 20,
                            .d_v = 24,
                            .precision = precision};
      INFO(p);
      CAPTURE(neighbour);
      dense_operands<float> clean(p), disturbed(p);
      reference::tensor q = clean.q.values(), k = clean.k.values();
      make_hard(q, k, {0});
      clean.q.assign(q);
      clean.k.assign(k), disturbed.k.assign(k);
      for (index_t h = 0; h < 2; ++h)
        for (index_t i = 1; i < n_q; i += 2)
          for (index_t c = 0; c < 20; ++c) q(0, h, i, c) = neighbour;
      disturbed.q.assign(q);
      const auto wrong = [&](const auto& rule, const attn::dense_options& options) {
        attend(clean, rule, options);
        attend(disturbed, rule, options);
        index_t n = 0;
        for (index_t h = 0; h < 2; ++h)
          for (index_t i = 0; i < n_q; i += 2) n += !same_row(clean, 0, h, i, disturbed, 0, h, i);
        return n;
      };
      CHECK(wrong(attn::alibi_bias{slopes}, {}) == 0);
      CHECK(wrong(attn::no_mask{}, {.softcap = 20}) == 0);
      CHECK(wrong(attn::score_rule_fn(
                      [](float s, index_t, index_t, index_t, index_t) { return s + 1; }),
                  {}) == 0);
    }
}

TEMPLATE_TEST_CASE("Batch and heads: alone, among others, under grouped heads", "", float, double,
                   Eigen::half) {
  const auto precision = GENERATE(automatic, strict);
  for (const index_t n_q : {1, 3, 53}) {
    const dense_problem alone{
        .n_q = n_q, .n_kv = 200, .d_qk = 24, .d_v = 24, .precision = precision};
    dense_operands<TestType> one(alone);
    attend(one);
    dense_problem p = alone;
    p.n_batch = 8;
    p.n_heads = 6;
    p.n_kv_heads = GENERATE(1, 2, 6);
    p.seed = 5;
    INFO(p);
    dense_operands<TestType> many(p);
    reference::tensor q = many.q.values(), k = many.k.values(), v = many.v.values();
    const std::vector<std::pair<index_t, index_t>> places = {{0, 0}, {3, 4}, {7, 5}};
    for (const auto& [b, h] : places) {
      const index_t kv_head = h / (p.n_heads / p.n_kv_heads);
      for (index_t i = 0; i < n_q; ++i) copy_row(one.q.values(), 0, 0, i, q, b, h, i);
      for (index_t j = 0; j < p.n_kv; ++j) {
        copy_row(one.k.values(), 0, 0, j, k, b, kv_head, j);
        copy_row(one.v.values(), 0, 0, j, v, b, kv_head, j);
      }
    }
    many.q.assign(q), many.k.assign(k), many.v.assign(v);
    attend(many);
    for (const auto& [b, h] : places)
      for (index_t i = 0; i < n_q; ++i) CHECK(same_row(one, 0, 0, i, many, b, h, i));
  }
}

TEMPLATE_TEST_CASE("Any number of threads, also more than there is work", "", float, double,
                   Eigen::bfloat16) {
  const watchdog guard("attention with threads", std::chrono::seconds(120));
  for (const dense_problem& p :
       in_both_precisions({{.n_q = 1, .n_kv = 5},
                           {.n_q = 1, .n_kv = 5000, .d_qk = 33, .d_v = 20},
                           {.n_batch = 2, .n_heads = 8, .n_kv_heads = 2, .n_q = 1, .n_kv = 1500},
                           {.n_heads = 3, .n_kv_heads = 3, .n_q = 4, .n_kv = 700},
                           {.n_batch = 2,
                           .n_heads = 3,
                           .n_kv_heads = 1,
                           .n_q = 211,
                           .n_kv = 190,
                           .d_qk = 24,
                           .d_v = 20},
                           {.n_batch = 5, .n_heads = 7, .n_kv_heads = 7, .n_q = 17, .n_kv = 40}})) {
    INFO(p);
    dense_operands<TestType> serial(p);
    attend(serial);
    for (const int n_threads : {1, 2, 3, 4, 16}) {
      CAPTURE(n_threads);
      attn::context ctx(n_threads);
      dense_operands<TestType> threaded(p);
      attend(threaded, attn::no_mask{}, {}, ctx);
      CHECK(same_bits_out(serial, threaded));
    }
    Eigen::ThreadPool pool(3);
    attn::context ctx(&pool);
    dense_operands<TestType> threaded(p);
    attend(threaded, attn::no_mask{}, {}, ctx);
    CHECK(same_bits_out(serial, threaded));
  }
}

TEST_CASE("Repeated calls, and calls in another order on one context") {
  attn::context ctx(2);
  const dense_problem small{.n_q = 3, .n_kv = 9};
  const dense_problem large{
      .n_heads = 3, .n_kv_heads = 3, .n_q = 100, .n_kv = 200, .d_qk = 64, .d_v = 64};
  dense_operands<float> first(small), second(small), a(large), b(large);
  attend(first, attn::no_mask{}, {}, ctx);
  attend(a, attn::no_mask{}, {}, ctx);
  attend(second, attn::no_mask{}, {}, ctx);
  attend(b, attn::no_mask{}, {}, ctx);
  CHECK(same_bits_out(first, second));
  CHECK(same_bits_out(a, b));
}
