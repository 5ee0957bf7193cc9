// SPDX-License-Identifier: MIT
//
// What SMYRF keeps of dense attention, at equal numbers of scores: on the captured queries, keys
// and values of bench/data and on synthetic families, for memory shares of 1.6% to 50% and 1 to 8
// rounds, against other ways to choose as many keys per query.
//
//     smyrf_quality                          all, about a minute; a table per family on stdout
//     smyrf_quality --csv docs/data/smyrf_quality.csv      also every combination
//     smyrf_quality --families minilm_2,gaussian --maps    small weights and singular values
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include <Eigen/Dense>

#include <CLI/CLI.hpp>

#include <attn/attention_weights.hpp>
#include <attn/diagnostics.hpp>

#include "support/attention_families.hpp"
#include "support/attention_quality.hpp"
#include "support/progress.hpp"

namespace {

using namespace attn;
using namespace attn::bench;

const std::vector<index_t> shares = {64, 32, 16, 8, 4, 2};  // one in so many scores
const std::vector<index_t> rounds_tried = {1, 2, 4, 8};

// The fewest clusters with which a query has at most n_kv / share scores, over all rounds and with
// those of means; 0 if there are none with two keys each.
index_t clusters_for(const sparse_way& way, index_t n_kv, index_t share, index_t rounds) {
  const double budget = static_cast<double>(n_kv) / static_cast<double>(share);
  for (index_t clusters = share * rounds; clusters <= n_kv / 2; ++clusters) {
    const double keys = static_cast<double>(n_kv) / static_cast<double>(clusters);
    if (static_cast<double>(rounds) * (keys + way.means(clusters)) <= budget) return clusters;
  }
  return 0;
}

struct line {
  std::string way;
  index_t share, rounds, clusters;
  attention_quality quality;
};

std::vector<line> measure(const std::string& family, const dense_results& dense, progress& status) {
  std::vector<line> lines;
  for (const sparse_way& way : sparse_ways())
    for (const index_t share : shares)
      for (const index_t rounds : rounds_tried) {
        const index_t clusters = clusters_for(way, dense.p.shape.n_kv, share, rounds);
        if (!way.applies(rounds) || clusters == 0) continue;
        status.show(family + ", " + way.name + ", 1/" + std::to_string(share) + " in " +
                    std::to_string(rounds) + " rounds");
        lines.push_back({way.name, share, rounds, clusters, way.run(dense, clusters, rounds)});
      }
  status.clear();
  return lines;
}

// Per way and share the number of rounds with the smallest error.
void print_best(const attention_family& family, const std::vector<line>& lines) {
  std::printf("\n%s (%s): mass captured / relative error, rounds\n\n| |", family.name.c_str(),
              family.what.c_str());
  for (const index_t share : shares) std::printf(" %.1f%% |", 100.0 / static_cast<double>(share));
  std::printf("\n|---|");
  for (std::size_t i = 0; i < shares.size(); ++i) std::printf("---|");
  std::printf("\n");
  for (const sparse_way& way : sparse_ways()) {
    std::printf("| %s |", way.name.c_str());
    for (const index_t share : shares) {
      const line* best = nullptr;
      for (const line& l : lines) {
        if (l.way != way.name || l.share != share) continue;
        if (best == nullptr || l.quality.error < best->quality.error) best = &l;
      }
      if (best == nullptr)
        std::printf(" |");
      else
        std::printf(" %.2f / %.2f, %td |", best->quality.mass, best->quality.error, best->rounds);
    }
    std::printf("\n");
  }
  std::fflush(stdout);
}

std::string csv_of(const std::string& family, const std::vector<line>& lines) {
  std::string text;
  for (const line& l : lines) {
    char row[256];
    std::snprintf(row, sizeof row, "%s,\"%s\",%.4f,%td,%td,%.4f,%.4f,%.4f\n", family.c_str(),
                  l.way.c_str(), 1 / static_cast<double>(l.share), l.rounds, l.clusters,
                  l.quality.mass, l.quality.error, l.quality.cosine);
    text += row;
  }
  return text;
}

// Shares of small weights; singular values: the median over heads, and the largest of a head.
void print_maps(const std::vector<attention_family>& families, progress& status) {
  const std::vector<index_t> places = {0, 1, 8, 32, 128, 256};
  std::string head = "| | weights below 0.01 | below 1/n | flatness |";
  for (const index_t i : places) head += " σ" + std::to_string(i) + " |";
  std::printf("%s\n|---|---|---|---|---|---|---|---|---|---|\n", head.c_str());
  for (const attention_family& family : families) {
    const problem<float> p = family.make();
    const attention_diagnostics found = diagnose_attention(p.q(), p.k());
    std::map<index_t, std::vector<double>> values;
    for (index_t h = 0; h < p.shape.n_heads; ++h) {
      status.show(family.name + ", singular values of head " + std::to_string(h));
      Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor> weights(p.shape.n_q,
                                                                                    p.shape.n_kv);
      const auto of_head = [&](const auto& x) {
        return tensor_view<const float>(&x(0, h, 0, 0), 1, 1, x.extent(2), x.extent(3));
      };
      attention_weights(of_head(p.q()), of_head(p.k()), weights);
      // σ² are the eigenvalues of WᵀW; in double σ is good to 1e-8 of the largest.
      const Eigen::MatrixXd w = weights.cast<double>();
      const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> eigen(w.transpose() * w,
                                                                 Eigen::EigenvaluesOnly);
      for (const index_t i : places) {
        const double square = eigen.eigenvalues()(p.shape.n_kv - 1 - i);
        values[i].push_back(std::sqrt(std::max(0.0, square)));
      }
    }
    status.clear();
    std::printf("| %s | %.1f%% | %.1f%% | %.2f |", family.name.c_str(),
                100 * found.total.share_below_0_01, 100 * found.total.share_below_uniform,
                found.total.mean_flatness);
    for (const index_t i : places) {
      std::vector<double>& all = values[i];
      std::sort(all.begin(), all.end());
      std::printf(" %.2g (%.2g) |", all[all.size() / 2], all.back());
    }
    std::printf("\n");
    std::fflush(stdout);
  }
}

std::vector<attention_family> chosen(std::vector<attention_family> all,
                                     const std::vector<std::string>& names) {
  if (names.empty()) return all;
  std::vector<attention_family> families;
  for (const std::string& name : names) {
    families.push_back(*std::find_if(all.begin(), all.end(),
                                     [&](const attention_family& f) { return f.name == name; }));
  }
  return families;
}

}  // namespace

int main(int argc, char** argv) {
  std::filesystem::path data = std::filesystem::path(ATTN_BENCH_DATA) / "minilm_qkv.safetensors";
  std::string csv;
  std::vector<std::string> names, known;
  for (const attention_family& f : attention_families(data)) known.push_back(f.name);
  bool list = false, maps = false;
  CLI::App app("What SMYRF keeps of dense attention, at equal numbers of scores", "smyrf_quality");
  app.add_option("--families", names, "Some of the families [all]")
      ->delimiter(',')
      ->check(CLI::IsMember(known));
  app.add_option("--data", data, "Captured tensors [bench/data/minilm_qkv.safetensors]");
  app.add_option("--csv", csv, "Write every combination to this file");
  app.add_flag("--maps", maps, "Instead: shares of small weights, singular values of the maps");
  app.add_flag("--benchmark_list_tests", list, "Names of the families");
  try {
    app.parse(argc, argv);
    const std::vector<attention_family> families = chosen(attention_families(data), names);
    if (list) {
      for (const attention_family& f : families) {
        std::printf("%s: %s\n", f.name.c_str(), f.what.c_str());
      }
      return 0;
    }
    progress status;
    if (maps) {
      print_maps(families, status);
      return 0;
    }
    std::string table = "family,way,share,rounds,clusters,mass,error,cosine\n";
    for (const attention_family& f : families) {
      const std::vector<line> lines = measure(f.name, dense_results(f.make()), status);
      print_best(f, lines);
      table += csv_of(f.name, lines);
    }
    if (csv.empty()) return 0;
    std::ofstream file(csv);
    file << table;
    if (!file.flush()) throw std::runtime_error(csv + ": cannot be written");
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "smyrf_quality: %s\n", error.what());
    return 2;
  }
  return 0;
}
