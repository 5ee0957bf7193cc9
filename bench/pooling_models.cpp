// SPDX-License-Identifier: MIT
//
// What pooling saves in a whole model: the rows of Tables 3 to 5 of Pietruszka, Borchmann,
// Garncarek, "Sparsifying Transformer Models with Trainable Representation Pooling" (ACL 2022).
// Each is an encoder-decoder of examples/support/ with width 512, FFN 2048, 8 heads, two layers
// each; its complexity by the paper's formulas, its time and memory measured.
//
//     pooling_models                 some minutes
//     pooling_models --targets 32    a shorter decoder
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "../examples/support/pooling_model.hpp"
#include "support/heap_meter.hpp"
#include "support/progress.hpp"
#include "support/thread_clock.hpp"

namespace {

using attn::index_t;
using transformer::pooling_options;

// The paper counts attention in blocks of 512 x 512 for the encoder, and in 512 source positions
// per target position for the decoder.
constexpr index_t unit = 512;

struct model_row {
  const char* name;
  index_t length;             // of the document
  index_t block;              // 0: full attention
  std::vector<index_t> kept;  // after each encoder layer, 0: all
};

[[nodiscard]] std::string thousands(index_t n) {
  return n >= 1024 ? std::to_string(n / 1024) + "k" : std::to_string(n);
}

// Σ over encoder layers of n/512 · min(n, block)/512.
[[nodiscard]] index_t encoder_units(const model_row& m) {
  index_t n = m.length, sum = 0;
  for (const index_t kept : m.kept) {
    const index_t window = m.block == 0 ? n : std::min(n, m.block);
    sum += n / unit * (window / unit);
    if (kept > 0) n = kept;
  }
  return sum;
}
[[nodiscard]] index_t source_length(const model_row& m) {
  index_t n = m.length;
  for (const index_t kept : m.kept) n = kept > 0 ? kept : n;
  return n;
}
// Per target position: layers · source / 512.
[[nodiscard]] index_t decoder_units(const model_row& m, index_t layers) {
  return layers * source_length(m) / unit;
}

std::vector<model_row> all_rows() {
  std::vector<model_row> rows;
  for (const index_t n : {512, 2048, 8192}) rows.push_back({"vanilla", n, 0, {0, 0}});
  for (const index_t n : {2048, 8192}) rows.push_back({"blockwise", n, unit, {0, 0}});
  rows.push_back({"Transpooler", 2048, unit, {0, 512}});
  rows.push_back({"Transpooler", 8192, unit, {0, 512}});
  rows.push_back({"Transpooler", 8192, unit, {0, 2048}});
  rows.push_back({"Pyramidion", 2048, unit, {512, 0}});
  rows.push_back({"Pyramidion", 8192, unit, {2048, 0}});
  rows.push_back({"Pyramidion", 8192, unit, {2048, 512}});
  return rows;
}

struct measured {
  double encoder = 0, decoder = 0;
  double peak_megabytes = 0;
};

measured measure(const model_row& m, index_t n_targets, int repeat, int threads) {
  // One thread: its processor time, in which other programs have no part.
  const auto now = [threads] {
    if (threads > 1) {
      return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
          .count();
    }
    return attn::bench::thread_seconds();
  };
  const pooling_options options{.block = m.block, .encoder_widths = m.kept};
  transformer::pooling_model model(options, 1);
  attn::context ctx(threads);
  const std::vector<std::vector<index_t>> document{
      transformer::made_up_document(m.length, options.n_tokens, 1)};
  const std::vector<std::vector<index_t>> targets{
      transformer::made_up_document(n_targets, options.n_tokens, 2)};
  const std::vector<index_t> lengths{m.length};

  measured best{1e30, 1e30, 0};
  for (int run = 0; run < repeat; ++run) {
    const attn::bench::heap_meter meter;
    const double start = now();
    const transformer::sequences memory = model.encode(document, lengths, ctx);
    const double encoded = now();
    const transformer::sequences decoded = model.decode(targets, memory, ctx);
    const double end = now();
    if (!decoded.rows.allFinite()) throw std::runtime_error("the decoder's output is not finite");
    best.encoder = std::min(best.encoder, encoded - start);
    best.decoder = std::min(best.decoder, end - encoded);
    if (run == 0) best.peak_megabytes = static_cast<double>(meter.peak_bytes().value_or(0)) / 1e6;
  }
  return best;
}

void run_table(index_t n_targets, int repeat, int threads, const std::string& output) {
  constexpr index_t decoder_layers = 2;
  struct line {
    model_row row;
    measured time;
  };
  std::vector<line> lines;
  attn::bench::progress status;
  for (const model_row& row : all_rows()) {
    status.show(std::string(row.name) + " " + thousands(row.length), 3);
    lines.push_back({row, measure(row, n_targets, repeat, threads)});
  }
  status.clear();
  const auto vanilla = std::find_if(lines.begin(), lines.end(), [](const line& l) {
    return std::strcmp(l.row.name, "vanilla") == 0 && l.row.length == 8192;
  });
  const double whole = vanilla->time.encoder + vanilla->time.decoder;

  std::string table =
      "| model | document | after each layer | encoder attention | decoder attention | encoder s | "
      "decoder s | total, vanilla 8k = 1 | peak MB |\n|---|---|---|---|---|---|---|---|---|\n";
  for (const line& l : lines) {
    std::string kept;
    index_t n = l.row.length;
    for (const index_t k : l.row.kept) {
      n = k > 0 ? k : n;
      kept += (kept.empty() ? "" : ", ") + thousands(n);
    }
    char text[256];
    std::snprintf(text, sizeof text, "| %s | %s | %s | %td | %tdt | %.3f | %.3f | %.3f | %.0f |\n",
                  l.row.name, thousands(l.row.length).c_str(), kept.c_str(), encoder_units(l.row),
                  decoder_units(l.row, decoder_layers), l.time.encoder, l.time.decoder,
                  (l.time.encoder + l.time.decoder) / whole, l.time.peak_megabytes);
    table += text;
  }
  std::fputs(table.c_str(), stdout);
  std::printf(
      "encoder attention in blocks of 512 x 512, decoder attention in 512 source positions per "
      "target position (t = %td); %d thread%s\n",
      n_targets, threads, threads == 1 ? "" : "s");
  if (output.empty()) return;
  std::ofstream file(output);
  file << table;
  if (!file.flush()) throw std::runtime_error(output + ": cannot be written");
}

}  // namespace

int main(int argc, char** argv) {
  index_t n_targets = 256;
  int repeat = 2, threads = 1;
  bool list = false;
  std::string output;
  CLI::App app("Vanilla, blockwise, Transpooler and Pyramidion: complexity, time, memory",
               "pooling_models");
  app.add_option("--targets", n_targets, "Target tokens of the decoder [256]")
      ->check(CLI::Range(1, 8192));
  app.add_option("--repeat", repeat, "Runs of each model, of which the fastest counts [2]")
      ->check(CLI::Range(1, 100));
  app.add_option("--threads", threads, "Threads of the attention and the projections [1]")
      ->check(CLI::Range(1, 1024));
  app.add_option("--output", output, "Also write the table to this Markdown file");
  app.add_flag("--benchmark_list_tests", list, "Names of the rows");
  try {
    app.parse(argc, argv);
    if (list) {
      for (const model_row& row : all_rows()) {
        std::printf("%s/%s/%s\n", row.name, thousands(row.length).c_str(),
                    thousands(source_length(row)).c_str());
      }
      return 0;
    }
    run_table(n_targets, repeat, threads, output);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "pooling_models: %s\n", error.what());
    return 2;
  }
  return 0;
}
