// SPDX-License-Identifier: MIT
#include "support/report.hpp"

#include <algorithm>
#include <array>
#include <cstdio>

#include <nlohmann/json.hpp>

#include <attn/simd/batch.hpp>
#include <attn/version.hpp>

namespace attn::bench {
namespace {

template <class... Args>
std::string print(const char* format, Args... args) {
  std::array<char, 256> text{};
  std::snprintf(text.data(), text.size(), format, args...);
  return text.data();
}

std::string shape_text(index_t b, index_t h, index_t l, index_t d) {
  return "[" + std::to_string(b) + ", " + std::to_string(h) + ", " + std::to_string(l) + ", " +
         std::to_string(d) + "]";
}

// Three digits that count: 0.0312, 3.12, 31.2, 3120.
std::string three_digits(double x) {
  const int decimals = x >= 100 ? 0 : x >= 10 ? 1 : x >= 1 ? 2 : x >= 0.1 ? 3 : 4;
  return print("%.*f", decimals, x);
}

std::string bytes_text(std::optional<std::size_t> bytes) {
  if (!bytes) return "n/a";
  double x = static_cast<double>(*bytes);
  if (x < 1024) return print("%.0f B", x);
  for (const char* unit : {"KiB", "MiB"}) {
    x /= 1024;
    if (x < 1024) return print("%.1f %s", x, unit);
  }
  return print("%.1f GiB", x / 1024);
}

constexpr const char* line_format = "%-24s %9s %9s %8s %13s %11s %11s %9s\n";

const char* arch_name() { return simd::default_arch::name(); }

double median_peak(const std::vector<comparison_row>& rows) {
  std::vector<double> peaks;
  for (const auto& row : rows) {
    if (row.obstacle.empty()) peaks.push_back(row.peak_gflops);
  }
  return median(peaks);
}

#if defined(__clang__)
constexpr const char* compiler = "clang " __clang_version__;
#elif defined(__GNUC__)
constexpr const char* compiler = "gcc " __VERSION__;
#else
constexpr const char* compiler = "unknown";
#endif

}  // namespace

std::string version_text() {
  return print("%d.%d.%d", version_major, version_minor, version_patch);
}

std::string table_heading(const comparison_setup& setup) {
  const problem_shape& n = setup.shape;
  std::string text = setup.source + ": q " + shape_text(n.n_batch, n.n_heads, n.n_q, n.d_qk);
  text += ", k " + shape_text(n.n_batch, n.n_kv_heads, n.n_kv, n.d_qk);
  text += ", v " + shape_text(n.n_batch, n.n_kv_heads, n.n_kv, n.d_v);
  text += ", " + setup.dtype + (n.causal ? ", causal" : "");
  text += print(", %d thread%s, %s\n\n", setup.threads, setup.threads == 1 ? "" : "s", arch_name());
  return text + print(line_format, "method", "ms", "GFLOP/s", "of peak", "extra memory",
                      "max error", "rel. error", "captured");
}

std::string table_line(const comparison_row& row) {
  if (!row.obstacle.empty()) {
    return print("%-24s left out: %s\n", row.method.c_str(), row.obstacle.c_str());
  }
  return print(line_format, row.method.c_str(), three_digits(row.seconds * 1e3).c_str(),
               three_digits(row.flops / row.seconds * 1e-9).c_str(),
               print("%.1f%%", row.of_peak * 100).c_str(), bytes_text(row.extra_bytes).c_str(),
               print("%.1e", row.error.largest).c_str(), print("%.1e", row.error.relative).c_str(),
               row.captured ? print("%.1f%%", *row.captured * 100).c_str() : "n/a");
}

std::string table_footing(const comparison_setup& setup, const std::vector<comparison_row>& rows) {
  const problem_shape& n = setup.shape;
  std::string text = "\nms: median of one call. ";
  text +=
      print("Peak: %.0f GFLOP/s per core, multiply-adds in registers, timed between the calls.\n",
            median_peak(rows));
  text += "Extra memory: most heap that the first call held besides its operands.\n";
  text += "Errors: against double, ";
  text += setup.checked_rows == n.n_q
              ? "all rows"
              : print("%td of %td rows of each head", setup.checked_rows, n.n_q);
  text += "; relative: of the whole, |o - ref| / |ref|.\n";
  text += "Captured: share of the attention on the keys that their query sees.\n";
  text += print("One core reads K and V at %.1f GB/s.\n", setup.read_gb_per_second);
  double share = 1;
  for (const auto& row : rows) share = std::min(share, row.share_of_core);
  if (share < 0.95) {
    text +=
        print("Other programs took up to %.0f%% of the core: ms and GFLOP/s suffer, the share of "
              "the peak does not.\n",
              (1 - share) * 100);
  }
  return text;
}

nlohmann::json json_report(const comparison_setup& setup, const std::vector<comparison_row>& rows) {
  using json = nlohmann::json;
  const problem_shape& n = setup.shape;
  json methods = json::array();
  for (const auto& row : rows) {
    if (!row.obstacle.empty()) {
      methods.push_back({{"method", row.method}, {"left_out", row.obstacle}});
      continue;
    }
    json entry{{"method", row.method},
               {"ms", row.seconds * 1e3},
               {"gflops", row.flops / row.seconds * 1e-9},
               {"of_peak", row.of_peak},
               {"peak_extra_bytes", nullptr},
               {"max_error", row.error.largest},
               {"relative_error", row.error.relative},
               {"captured", nullptr},
               {"runs", row.runs},
               {"flops", row.flops},
               {"peak_gflops_per_core", row.peak_gflops},
               {"share_of_core", row.share_of_core}};
    if (row.extra_bytes) entry["peak_extra_bytes"] = *row.extra_bytes;
    if (row.captured) entry["captured"] = *row.captured;
    methods.push_back(std::move(entry));
  }
  return {{"attn_version", version_text()},
          {"source", setup.source},
          {"dtype", setup.dtype},
          {"causal", n.causal},
          {"threads", setup.threads},
          {"shape",
           {{"batch", n.n_batch},
            {"heads", n.n_heads},
            {"kv_heads", n.n_kv_heads},
            {"n_q", n.n_q},
            {"n_kv", n.n_kv},
            {"d_qk", n.d_qk},
            {"d_v", n.d_v}}},
          {"machine",
           {{"arch", arch_name()},
            {"compiler", compiler},
            {"peak_gflops_per_core", median_peak(rows)},
            {"read_gb_per_second", setup.read_gb_per_second}}},
          {"checked_rows_per_head", setup.checked_rows},
          {"methods", std::move(methods)}};
}

}  // namespace attn::bench
