// SPDX-License-Identifier: MIT
//
// Hashes of all queries and keys.
//
// 1. Norms and products of all rows with the directions of all rounds, into shared arrays.
// 2. Bounds of the norms over each group of heads (queries of all heads that share the keys, so
//    that they share the keys' order too).
// 3. Per head: what the transform appends, and the hash.
#pragma once

#include <algorithm>
#include <limits>
#include <span>
#include <variant>
#include <vector>

#include <attn/context.hpp>
#include <attn/detail/lsh_kernel.hpp>
#include <attn/detail/scratch_carver.hpp>
#include <attn/detail/smyrf_plan.hpp>
#include <attn/smyrf_options.hpp>

namespace attn::detail {

template <class Arch>
class smyrf_hasher {
  using tile = lsh_tile<Arch>;

 public:
  smyrf_hasher(const smyrf_plan& plan, const smyrf_operands& x, const smyrf_options& options,
               index_t first_round)
      : plan_(plan), x_(x), options_(options), first_round_(first_round),
        polytope_(std::get_if<cross_polytope>(&options.hash)) {
    appended_ = std::visit([](const auto& t) { return t.dims(); }, options.transform);
    columns_ = 1;
    if (polytope_ != nullptr) {
      const index_t buckets = polytope_->buckets == 0 ? plan.clusters : polytope_->buckets;
      columns_ = (buckets + 1) / 2;
    }
    n_directions_ = (plan.rounds - first_round) * columns_;
    stride_ =
        (n_directions_ + lsh_directions::group - 1) / lsh_directions::group * lsh_directions::group;
    kept_ = plan.rounds - first_round;
  }

  void run(context& ctx) {
    make_directions();
    const std::size_t rows = static_cast<std::size_t>(
        plan_.n_batch * (plan_.n_heads * plan_.n_q + plan_.n_heads_kv * plan_.n_kv));
    norm2_.resize(rows);
    product_.resize(rows * static_cast<std::size_t>(kept_));
    // Of cross_polytope only the bucket is kept, which needs the appended coordinates, and they
    // need the norms of all rows: so norms come first, in a pass of their own.
    const index_t all = stride_;
    if (polytope_ != nullptr) stride_ = 0;
    multiply(ctx);
    bound_norms(ctx);
    stride_ = all;
    if (polytope_ != nullptr) multiply(ctx);
  }

  /// Rounds to hash: from the first that is not local.
  [[nodiscard]] index_t rounds() const noexcept { return kept_; }

  /// Numbers of T that `lift_rows` writes for n rows.
  [[nodiscard]] index_t lift_size(index_t n) const noexcept { return (1 + appended_) * n; }

  /// What hashes of a head need beside the products, for all rounds: `lift` has lift_size(n).
  /// `side` 0 is queries, 1 is keys.
  void lift_rows(int side, index_t b, index_t h, float* lift) const noexcept {
    if (polytope_ != nullptr) return;
    const head_rows rows = rows_of(side, b, h);
    const lsh_norms& bounds = bounds_of(side, b, h);
    std::visit(
        [&](const auto& transform) {
          for (index_t i = 0; i < rows.length; ++i) {
            const lsh_lift x = side == 0 ? transform.query(rows.norm2[i], bounds)
                                         : transform.key(rows.norm2[i], bounds);
            lift[i] = random_projection::narrow(x.factor);
            for (index_t t = 0; t < transform.dims(); ++t) {
              lift[(1 + t) * rows.length + i] =
                  random_projection::narrow(x.tail[static_cast<std::size_t>(t)]);
            }
          }
        },
        options_.transform);
  }

  /// Hashes of the rows of a head in round r of rounds().
  void hash(int side, index_t b, index_t h, index_t r, const float* lift,
            double* out) const noexcept {
    const head_rows rows = rows_of(side, b, h);
    const float* product = rows.product + r * rows.n;
    if (polytope_ == nullptr)
      finish(product, lift, tail_of(r), rows.length, out);
    else
      std::copy_n(product, rows.length, out);
  }

 private:
  // Rows of a head.
  struct head_rows {
    double* norm2;
    float* product;  // [kept][n]
    index_t n, length;
  };
  [[nodiscard]] head_rows rows_of(int side, index_t b, index_t h) const noexcept {
    const index_t heads = side == 0 ? plan_.n_heads : plan_.n_heads_kv;
    const index_t n = side == 0 ? plan_.n_q : plan_.n_kv;
    index_t at = (b * heads + h) * n;
    if (side == 1) at += plan_.n_batch * plan_.n_heads * plan_.n_q;
    return {const_cast<double*>(norm2_.data()) + at,
            const_cast<float*>(product_.data()) + at * kept_, n,
            side == 0 ? plan_.q_length(b) : plan_.k_length(b)};
  }

  void make_directions() {
    const index_t d = plan_.d_qk;
    a_.assign(static_cast<std::size_t>((d + appended_) * stride_), 0.0);
    tail_.assign(static_cast<std::size_t>(n_directions_ * appended_), 0.0f);
    for (index_t i = 0; i < n_directions_; ++i) {
      const index_t round = first_round_ + i / columns_, column = i % columns_;
      for (index_t c = 0; c < d + appended_; ++c) {
        const float a = polytope_ == nullptr
                            ? random_projection::coefficient(options_.seed, round, c)
                            : cross_polytope::coefficient(options_.seed, round, c, column);
        if (c < d)
          a_[static_cast<std::size_t>(c * stride_ + i)] = static_cast<double>(a);
        else
          tail_[static_cast<std::size_t>(i * appended_ + c - d)] = a;
      }
    }
  }

  [[nodiscard]] std::span<const float> tail_of(index_t direction) const noexcept {
    return {tail_.data() + direction * appended_, static_cast<std::size_t>(appended_)};
  }

  // Pass 1, in stretches of rows of one head.
  void multiply(context& ctx) {
    constexpr index_t stretch = 256;
    const index_t q_items = (plan_.n_q + stretch - 1) / stretch;
    const index_t k_items = (plan_.n_kv + stretch - 1) / stretch;
    const index_t all_q = plan_.n_batch * plan_.n_heads * q_items;
    const index_t all_k = plan_.n_batch * plan_.n_heads_kv * k_items;
    const auto scratch = [&](scratch_carver memory, float** floats, double** doubles) {
      *floats = memory.take<float>(tile::floats(plan_.d_qk));
      *doubles = memory.take<double>(tile::doubles(stride_));
      return memory.used();
    };
    float* none_f = nullptr;
    double* none_d = nullptr;
    ctx.run(all_q + all_k, 1, scratch(scratch_carver(), &none_f, &none_d),
            [&](std::byte* memory, work_queue& queue) noexcept {
              float* floats = nullptr;
              double* doubles = nullptr;
              scratch(scratch_carver(memory), &floats, &doubles);
              tile t(floats, doubles, plan_.d_qk, {a_.data(), stride_, n_directions_});
              for (index_t first, last; queue.next(first, last);) {
                const int side = first < all_q ? 0 : 1;
                const index_t item = side == 0 ? first : first - all_q;
                const index_t per_head = side == 0 ? q_items : k_items;
                const index_t heads = side == 0 ? plan_.n_heads : plan_.n_heads_kv;
                const index_t b = item / per_head / heads, h = item / per_head % heads;
                const row_source<float> source = side == 0 ? x_.q(b, h) : x_.k(b, h);
                const head_rows rows = rows_of(side, b, h);
                const index_t begin = item % per_head * stretch;
                const index_t end = std::min(begin + stretch, rows.length);
                for (index_t i = begin; i < end; i += tile::rows) {
                  const index_t n = std::min(tile::rows, end - i);
                  t.load(source, i, n);
                  if (polytope_ != nullptr && stride_ != 0)
                    store_buckets(t, rows, side, b, h, i, n);
                  else
                    store(t, rows, i, n);
                }
              }
            });
  }

  void store(const tile& t, const head_rows& rows, index_t first, index_t n) const noexcept {
    std::copy_n(t.norm2(), n, rows.norm2 + first);
    if (stride_ == 0) return;
    // random_projection::narrow_product
    using B = simd::batch<double, Arch>;
    constexpr index_t W = simd::width<double, Arch>;
    const B highest(static_cast<double>(std::numeric_limits<float>::max()));
    const B nan(std::numeric_limits<double>::quiet_NaN());
    for (index_t r = 0; r < kept_; ++r) {
      const double* p = t.product(r);
      float* out = rows.product + r * rows.n + first;
      index_t i = 0;
      for (; i + W <= n; i += W) {
        const B x = simd::load<double, Arch>(p + i);
        const B narrow = xsimd::min(xsimd::max(x, -highest), highest);
        simd::narrow<Arch>(xsimd::select(x - x == B(0.0), narrow, nan), out + i);
      }
      for (; i < n; ++i) out[i] = random_projection::narrow_product(p[i]);
    }
  }

  void store_buckets(const tile& t, const head_rows& rows, int side, index_t b, index_t h,
                     index_t first, index_t n) noexcept {
    const lsh_norms& bounds = bounds_of(side, b, h);
    for (index_t i = 0; i < n; ++i) {
      const lsh_lift lift = lift_of(side, rows.norm2[first + i], bounds);
      for (index_t r = 0; r < kept_; ++r) {
        double best = -std::numeric_limits<double>::infinity();
        index_t bucket = -1;
        for (int sign : {1, -1}) {
          for (index_t column = 0; column < columns_; ++column) {
            const index_t direction = r * columns_ + column;
            const float p = random_projection::narrow_product(t.product(direction)[i]);
            const double u = sign * random_projection::finish(p, lift, tail_of(direction));
            if (u > best) best = u, bucket = column + (sign == 1 ? 0 : columns_);
          }
        }
        rows.product[r * rows.n + first + i] =
            bucket < 0 ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(bucket);
      }
    }
  }

  [[nodiscard]] lsh_lift lift_of(int side, double norm2, const lsh_norms& bounds) const noexcept {
    return std::visit(
        [&](const auto& t) { return side == 0 ? t.query(norm2, bounds) : t.key(norm2, bounds); },
        options_.transform);
  }

  // Bounds of the norms of finite rows over the queries and keys of a group of heads.
  [[nodiscard]] const lsh_norms& bounds_of(int side, index_t b, index_t h) const noexcept {
    const index_t g = side == 0 ? h / plan_.group() : h;
    return bounds_[static_cast<std::size_t>(b * plan_.n_heads_kv + g)];
  }

  void bound_norms(context& ctx) {
    const auto largest = [](const head_rows& rows) {
      double top[4] = {0, 0, 0, 0};  // four chains of comparisons; NaN passes none
      for (index_t i = 0; i < rows.length; ++i) {
        const double x = rows.norm2[i];
        if (x > top[i & 3] && x <= std::numeric_limits<double>::max()) top[i & 3] = x;
      }
      return std::max(std::max(top[0], top[1]), std::max(top[2], top[3]));
    };
    const index_t items = plan_.n_batch * plan_.n_heads_kv;
    bounds_.assign(static_cast<std::size_t>(items), {});
    ctx.run(items, 1, 0, [&](std::byte*, work_queue& queue) noexcept {
      for (index_t first, last; queue.next(first, last);) {
        const index_t b = first / plan_.n_heads_kv, g = first % plan_.n_heads_kv;
        lsh_norms& bounds = bounds_[static_cast<std::size_t>(first)];
        bounds.key2 = largest(rows_of(1, b, g));
        for (index_t h = g * plan_.group(); h < (g + 1) * plan_.group(); ++h) {
          bounds.query2 = std::max(bounds.query2, largest(rows_of(0, b, h)));
        }
      }
    });
  }

  // random_projection::finish of all rows.
  static void finish(const float* product, const float* lift, std::span<const float> tail,
                     index_t n, double* hash) noexcept {
    using B = simd::batch<double, Arch>;
    constexpr int W = simd::width<double, Arch>;
    index_t i = 0;
    for (; i + W <= n; i += W) {
      B sum = simd::widen<Arch>(lift + i) * simd::widen<Arch>(product + i);
      const float* x = lift + n + i;
      for (std::size_t t = 0; t < tail.size(); ++t, x += n) {
        sum = simd::multiply_add(B(static_cast<double>(tail[t])), simd::widen<Arch>(x), sum);
      }
      sum.store_aligned(hash + i);
    }
    for (; i < n; ++i) {
      hash[i] = static_cast<double>(lift[i]) * static_cast<double>(product[i]);
      for (std::size_t t = 0; t < tail.size(); ++t) {
        hash[i] += static_cast<double>(tail[t]) *
                   static_cast<double>(lift[(static_cast<index_t>(t) + 1) * n + i]);
      }
    }
  }

  const smyrf_plan& plan_;
  const smyrf_operands& x_;
  const smyrf_options& options_;
  index_t first_round_;
  const cross_polytope* polytope_;
  index_t appended_, columns_, n_directions_, stride_, kept_;
  std::vector<double> a_;      // [d + appended][stride]
  std::vector<float> tail_;    // [direction][appended]
  std::vector<double> norm2_;  // queries of all heads, then keys
  std::vector<float> product_;
  std::vector<lsh_norms> bounds_;  // [B][Hkv]
};

}  // namespace attn::detail
