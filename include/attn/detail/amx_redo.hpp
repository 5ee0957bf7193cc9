// SPDX-License-Identifier: MIT
//
// Rows that tiles must not compute (they met numbers that cannot be split), by the FMA kernel: it
// runs over whole items, and only the wanted rows are written. Where all that stood in the way are
// infinite or NaN values, only what becomes infinite or NaN of them is.
#pragma once

#include <cmath>

#include <attn/detail/amx_score_tile.hpp>
#include <attn/detail/dense_attention_kernel.hpp>

#if defined(ATTN_HAS_AMX)

namespace attn::detail::amx {

template <class Arch, score_rule Rule>
class row_redoer {
  using fma_worker = dense_worker<float, Arch, Rule>;

 public:
  struct memory {
    std::byte* worker;
    float *lse, *line;
  };
  static memory carve(const dense_problem<float>& problem, const Rule& rule,
                      scratch_carver& from) noexcept {
    const auto bytes = static_cast<index_t>(fma_worker::scratch_bytes(problem, rule));
    return {from.take<std::byte>(bytes), from.take<float>(problem.n_q),
            from.take<float>(problem.d_v)};
  }

  row_redoer(const dense_problem<float>& problem, const Rule& rule, memory m) noexcept
      : original_(problem), selective_(problem), memory_(m),
        worker_(selective_, rule, scratch_carver(m.worker)) {
    selective_.out = {
        this, [](const void* self, index_t, index_t) noexcept {
          return row_sink<float>{const_cast<void*>(self), 0, 0, nullptr, &write_wanted};
        }};
    if (problem.lse.data_handle() != nullptr) {
      selective_.lse = tensor_view<float>(m.lse, problem.lse.extents(), {0, 0, 1, 1});
    }
  }
  row_redoer(const row_redoer&) = delete;
  row_redoer& operator=(const row_redoer&) = delete;

  /// Rows [row0, row_end) of head h, batch b, those that their tiles say, 32 rows each.
  void run(index_t b, index_t h, index_t row0, index_t row_end, const query_block* tiles) noexcept {
    first_ = row0, last_ = row_end, tiles_ = tiles;
    sink_ = original_.out(b, h);
    for (index_t item = row0 / fma_worker::item_rows; item * fma_worker::item_rows < row_end;
         ++item) {
      if (any_wanted(item)) worker_.run(b, h, item);
    }
    if (original_.lse.data_handle() == nullptr) return;
    for (index_t row = row0; row < row_end; ++row) {
      if (is_set(&query_block::redo, row)) original_.lse(b, h, row, 0) = memory_.lse[row];
    }
  }

 private:
  [[nodiscard]] bool is_set(std::uint32_t query_block::*lanes, index_t row) const noexcept {
    if (row < first_ || row >= last_) return false;
    const index_t at = row - first_;
    return (tiles_[at / tile_rows].*lanes >> (at % tile_rows) & 1) != 0;
  }
  [[nodiscard]] bool any_wanted(index_t item) const noexcept {
    for (index_t r = 0; r < fma_worker::item_rows; ++r) {
      const index_t row = item * fma_worker::item_rows + r;
      if (is_set(&query_block::redo, row) || is_set(&query_block::patch, row)) return true;
    }
    return false;
  }
  // The `store` of a row_sink: whole rows, and of rows to patch what is infinite or NaN.
  static void write_wanted(const float* src, index_t ld_src, index_t n_rows, index_t columns,
                           void* data, index_t first, index_t, index_t) noexcept {
    const auto& self = *static_cast<const row_redoer*>(data);
    for (index_t r = 0; r < n_rows; ++r) {
      const index_t row = first + r;
      const float* line = src + r * ld_src;
      if (!self.is_set(&query_block::redo, row)) {
        if (!self.is_set(&query_block::patch, row)) continue;
        const index_t lane = (row - self.first_) % tile_rows;
        const query_block& t = self.tiles_[(row - self.first_) / tile_rows];
        for (index_t c = 0; c < columns; ++c) {
          const float there = t.o[c * tile_rows + lane] * t.factor[lane];
          self.memory_.line[c] = std::isfinite(line[c]) ? there : line[c];
        }
        line = self.memory_.line;
      }
      self.sink_.write(line, ld_src, row, 1, columns);
    }
  }

  const dense_problem<float>& original_;
  dense_problem<float> selective_;
  memory memory_;
  fma_worker worker_;
  row_sink<float> sink_{};
  index_t first_ = 0, last_ = 0;
  const query_block* tiles_ = nullptr;
};

}  // namespace attn::detail::amx

#endif  // ATTN_HAS_AMX
