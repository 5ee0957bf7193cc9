// SPDX-License-Identifier: MIT
#include "support/tensor_buffer.hpp"

namespace attn_test {

std::ostream& operator<<(std::ostream& out, layout l) {
  switch (l) {
  case layout::contiguous:
    return out << "contiguous";
  case layout::padded_by_one:
    return out << "padded_by_one";
  case layout::padded_wide:
    return out << "padded_wide";
  case layout::offset_by_one:
    return out << "offset_by_one";
  case layout::heads_interleaved:
    return out << "heads_interleaved";
  case layout::column_major:
    return out << "column_major";
  case layout::strided_dim:
    return out << "strided_dim";
  case layout::broadcast_batch:
    return out << "broadcast_batch";
  case layout::broadcast_heads:
    return out << "broadcast_heads";
  case layout::broadcast_rows:
    return out << "broadcast_rows";
  }
  return out << "?";
}

placement::placement(std::array<index_t, 4> n, layout l) : extents(n), begin(0), span(0) {
  index_t row = n[3], step = 1;
  if (l == layout::padded_by_one) row += 1;
  if (l == layout::padded_wide) row += 19;
  if (l == layout::strided_dim) step = 2, row *= 2;
  if (l == layout::offset_by_one) begin = 1;
  strides = {n[1] * n[2] * row, n[2] * row, row, step};
  if (l == layout::heads_interleaved) strides = {n[2] * n[1] * row, row, n[1] * row, 1};
  if (l == layout::column_major) strides = {n[1] * n[3] * n[2], n[3] * n[2], 1, n[2]};
  if (l == layout::broadcast_batch) strides[0] = 0;
  if (l == layout::broadcast_heads) strides[1] = 0;
  if (l == layout::broadcast_rows) strides[2] = 0;

  if (n[0] > 0 && n[1] > 0 && n[2] > 0 && n[3] > 0) {
    span = 1;
    for (std::size_t r = 0; r < 4; ++r) span += (n[r] - 1) * strides[r];
  }
}

}  // namespace attn_test
