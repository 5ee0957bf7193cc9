// SPDX-License-Identifier: MIT
//
// Rows of a list of positions, and the pairs of a tile that earlier rounds have had.
#pragma once

#include <cstdint>

#include <attn/detail/packing.hpp>
#include <attn/detail/score_bias.hpp>
#include <attn/detail/smyrf_plan.hpp>
#include <attn/simd/batch.hpp>
#include <attn/view.hpp>

namespace attn::detail {

/// Asks for a row of d numbers.
template <class T>
ATTN_INLINE void prefetch_row(const T* x, index_t d) noexcept {
  constexpr index_t line = 64 / static_cast<index_t>(sizeof(T));
  for (index_t c = 0; c < d; c += line) __builtin_prefetch(x + c, 0, 2);
}

/// out = row
template <class T, class Arch>
ATTN_INLINE void copy_row(const T* row, index_t d, T* out) noexcept {
  constexpr index_t W = simd::width<T, Arch>;
  index_t c = 0;
  for (; c + W <= d; c += W) simd::load_unaligned<T, Arch>(row + c).store_unaligned(out + c);
  for (; c < d; ++c) out[c] = row[c];
}

/// Rows of positions list[0, n) to dense rows `ld` apart. (Asking for rows that come later in the
/// list made it slower: 3.0 against 2.6 ns a row of 256 bytes from L2, 8.4 against 7.9 from L3.)
template <class T, class Arch>
void gather_rows(const row_source<T>& source, const index_t* list, index_t n, index_t d, T* to,
                 index_t ld) noexcept {
  for (index_t i = 0; i < n; ++i) {
    if (source.direct != nullptr)
      copy_row<T, Arch>(source.direct + list[i] * source.row_stride, d, to + i * ld);
    else
      source.read(list[i], 1, d, to + i * ld, ld);
  }
}

/// row = factor · row + add
template <class T, class Arch>
ATTN_INLINE void add_to_row(T* row, T factor, const T* add, index_t d) noexcept {
  using B = simd::batch<T, Arch>;
  constexpr index_t W = simd::width<T, Arch>;
  const B f(factor);
  index_t c = 0;
  for (; c + W <= d; c += W) {
    simd::multiply_add(f, simd::load_unaligned<T, Arch>(row + c),
                       simd::load_unaligned<T, Arch>(add + c))
        .store_unaligned(row + c);
  }
  for (; c < d; ++c) row[c] = factor * row[c] + add[c];
}

/// Pairs of a tile of queries that shared a cluster in an earlier round: where duplicates are
/// removed, they must not count again.
template <class T, class Arch>
class smyrf_past {
  using B = simd::batch<T, Arch>;
  static constexpr index_t W = simd::width<T, Arch>;

 public:
  smyrf_past() = default;
  /// `memory`: rounds · ld numbers.
  smyrf_past(const smyrf_plan& plan, T* memory) noexcept : plan_(&plan), cluster_(memory) {}

  /// The clusters of the tile's queries in rounds [0, round), as numbers of T.
  void load(index_t b, index_t h, index_t round, const index_t* queries, index_t n_queries,
            index_t ld) noexcept {
    b_ = b, g_ = h / plan_->group(), round_ = round, ld_ = ld;
    for (index_t past = 0; past < round; ++past) {
      const std::int32_t* cluster = plan_->query_clusters(b, h, past);
      for (index_t r = 0; r < ld; ++r) {
        cluster_[past * ld + r] = r < n_queries ? static_cast<T>(cluster[queries[r]]) : T(-1);
      }
    }
  }

  /// `mark` into `out` [n_keys][ld] for the pairs that have met.
  void mark_pairs(const index_t* keys, index_t n_keys, T mark, T* out) const noexcept {
    const B forbidden(mark);
    for (index_t past = 0; past < round_; ++past) {
      const std::int32_t* cluster = plan_->key_clusters(b_, g_, past);
      for (index_t j = 0; j < n_keys; ++j) {
        const B of_key(static_cast<T>(cluster[keys[j]]));
        T* x = out + j * ld_;
        for (index_t r = 0; r < ld_; r += W) {
          const auto met = simd::load<T, Arch>(cluster_ + past * ld_ + r) == of_key;
          xsimd::select(met, forbidden, simd::load<T, Arch>(x + r)).store_aligned(x + r);
        }
      }
    }
  }

 private:
  const smyrf_plan* plan_ = nullptr;
  T* cluster_ = nullptr;  // [rounds][ld]
  index_t b_ = 0, g_ = 0, round_ = 0, ld_ = 0;
};

}  // namespace attn::detail
