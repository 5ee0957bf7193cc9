// SPDX-License-Identifier: MIT
//
// A comparison as a table for people and as JSON for programs.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "support/comparison.hpp"
#include "support/problem.hpp"

namespace attn::bench {

/// What a comparison ran on.
struct comparison_setup {
  std::string source;  ///< name of the file, or "random"
  std::string dtype;
  problem_shape shape;
  int threads;
  index_t checked_rows;       ///< per head, that were compared with the double reference
  double read_gb_per_second;  ///< one core reading K and V
};

/// Of the library: "1.2.3".
[[nodiscard]] std::string version_text();

/// Widths are fixed, so that each row can be printed when it is there.
[[nodiscard]] std::string table_heading(const comparison_setup& setup);
[[nodiscard]] std::string table_line(const comparison_row& row);
[[nodiscard]] std::string table_footing(const comparison_setup& setup,
                                        const std::vector<comparison_row>& rows);

/// The keys are listed in docs/attn_compare.md.
[[nodiscard]] nlohmann::json json_report(const comparison_setup& setup,
                                         const std::vector<comparison_row>& rows);

}  // namespace attn::bench
