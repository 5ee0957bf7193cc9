// SPDX-License-Identifier: MIT
//
// attn_compare: what each kind of attention costs and loses on your queries, keys and values.
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <limits>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <Eigen/Core>
#include <nlohmann/json.hpp>

#include "support/comparison.hpp"
#include "support/problem.hpp"
#include "support/read_probe.hpp"
#include "support/report.hpp"

namespace {

using namespace attn::bench;
using attn::index_t;

constexpr int exit_bad_input = 2;

struct options {
  std::string file, random, tensors, dtype = "float32", methods, json;
  std::string blocks = "128,512", kept = "128,512", smyrf = "4x32,4x128";
  int threads = 1, repeat = 0;
  bool causal = false;
};

// "a,b,c"; CLI11's own lists would also take the FILE that follows them.
std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) parts.push_back(part);
  if (text.ends_with(',')) parts.emplace_back();
  return parts;
}

// B,H,L,D: q, k, v and the output have this shape and must fit the machine's memory.
problem_shape parse_shape(const std::string& text, std::size_t element_bytes, bool causal) {
  const auto refuse = [&](const char* why) {
    throw std::invalid_argument("--random is \"" + text + "\", " + why);
  };
  const auto parts = split(text);
  constexpr const char* form = "expected B,H,L,D: four whole numbers from 1 up";
  if (parts.size() != 4) refuse(form);
  index_t extents[4];
  auto bytes = static_cast<index_t>(4 * element_bytes);
  bool fits = true;
  for (std::size_t r = 0; r < 4; ++r) {
    const char* const end = parts[r].data() + parts[r].size();
    const auto [stop, error] = std::from_chars(parts[r].data(), end, extents[r]);
    if (error == std::errc::result_out_of_range)
      extents[r] = std::numeric_limits<index_t>::max();
    else if (error != std::errc() || extents[r] < 1)
      refuse(form);
    if (stop != end) refuse(form);
    fits = fits && !__builtin_mul_overflow(bytes, extents[r], &bytes);
  }
  const index_t memory = index_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  if (!fits || bytes > memory) refuse("more than this machine's memory");
  const auto [b, h, l, d] = extents;
  return {b, h, h, l, l, d, d, causal};
}

// "128,512": whole numbers from 1 up.
std::vector<index_t> parse_lengths(const char* option, const std::string& text) {
  std::vector<index_t> lengths;
  for (const auto& part : split(text)) {
    index_t length = 0;
    const char* const end = part.data() + part.size();
    const auto [stop, error] = std::from_chars(part.data(), end, length);
    if (error != std::errc() || stop != end || length < 1) {
      throw std::invalid_argument(std::string(option) + " is \"" + text +
                                  "\", expected whole numbers from 1 up");
    }
    if (std::find(lengths.begin(), lengths.end(), length) == lengths.end()) {
      lengths.push_back(length);
    }
  }
  return lengths;
}

// "4x32,2x64": two whole numbers from 1 up each.
std::vector<smyrf_size> parse_smyrf(const std::string& text) {
  std::vector<smyrf_size> sizes;
  for (const auto& part : split(text)) {
    const char* const end = part.data() + part.size();
    smyrf_size size{0, 0};
    auto parsed = std::from_chars(part.data(), end, size.rounds);
    if (parsed.ptr != end && *parsed.ptr == 'x') {
      parsed = std::from_chars(parsed.ptr + 1, end, size.keys);
    }
    if (parsed.ec != std::errc() || parsed.ptr != end || size.rounds < 1 || size.keys < 1) {
      throw std::invalid_argument("--smyrf is \"" + text +
                                  "\", expected rounds x keys per cluster as in 4x32,2x64");
    }
    const auto is_this = [&](const smyrf_size& s) {
      return s.rounds == size.rounds && s.keys == size.keys;
    };
    if (std::none_of(sizes.begin(), sizes.end(), is_this)) sizes.push_back(size);
  }
  return sizes;
}

method_options families(const options& o) {
  return {.blocks = parse_lengths("--block", o.blocks),
          .kept = parse_lengths("--k", o.kept),
          .smyrf = parse_smyrf(o.smyrf)};
}

template <class T>
std::vector<method<T>> chosen_methods(const options& o) {
  const std::string& names = o.methods;
  const auto all = all_methods<T>(families(o));
  if (names.empty()) return all;
  std::vector<method<T>> chosen;
  for (const auto& name : split(names)) {
    const auto found =
        std::find_if(all.begin(), all.end(), [&](const auto& m) { return m.name == name; });
    if (found == all.end()) {
      throw std::invalid_argument("--method: there is no \"" + name + "\" (see --list)");
    }
    chosen.push_back(*found);
  }
  return chosen;
}

// GB/s of one core that reads K and V: the median of 5 passes.
template <class T>
double read_bandwidth(const problem<T>& p) {
  const std::size_t k_bytes = p.k_elements.size() * sizeof(T);
  const std::size_t v_bytes = p.v_elements.size() * sizeof(T);
  std::vector<double> seconds;
  for (int pass = 0; pass < 5; ++pass) {
    seconds.push_back(read_seconds(p.k_elements.data(), k_bytes) +
                      read_seconds(p.v_elements.data(), v_bytes));
  }
  return static_cast<double>(k_bytes + v_bytes) / median(seconds) * 1e-9;
}

template <class T>
void compare(const options& o) {
  const auto methods = chosen_methods<T>(o);
  progress status;
  status.show("reading the operands");
  const auto p = o.file.empty() ? random_problem<T>(parse_shape(o.random, sizeof(T), o.causal), 1)
                                : load_problem<T>(o.file, split(o.tensors), o.causal);
  std::ofstream json;
  if (!o.json.empty()) {
    json.open(o.json);
    if (!json) throw std::runtime_error(o.json + ": cannot be written");
  }

  status.show("computing the reference in double");
  const oracle reference(p);
  const comparison_setup setup{
      .source = o.file.empty() ? "random" : std::filesystem::path(o.file).filename().string(),
      .dtype = o.dtype,
      .shape = p.shape,
      .threads = o.threads,
      .checked_rows = reference.rows(),
      .read_gb_per_second = read_bandwidth(p)};
  status.clear();
  std::fputs(table_heading(setup).c_str(), stdout);
  std::vector<comparison_row> rows;
  for (const auto& m : methods) {
    std::fflush(stdout);
    rows.push_back(run_method(m, p, reference, o.threads, o.repeat, status));
    status.clear();
    std::fputs(table_line(rows.back()).c_str(), stdout);
  }
  std::fputs(table_footing(setup, rows).c_str(), stdout);

  if (json.is_open()) {
    json << json_report(setup, rows).dump(2) << '\n';
    if (!json.flush()) throw std::runtime_error(o.json + ": cannot be written");
  }
}

void list_methods(const options& o) {
  for (const auto& m : all_methods<float>(families(o))) {
    std::printf("%-24s %s\n", m.name.c_str(), std::string(m.summary).c_str());
  }
}

// One line, whatever an exception says.
int complain(const std::string& what) {
  std::fprintf(stderr, "attn_compare: %s\n", what.substr(0, what.find('\n')).c_str());
  return exit_bad_input;
}

}  // namespace

int main(int argc, char** argv) {
  options o;
  bool list = false;
  CLI::App app("Compares attention methods in time, memory and error, on tensors q, k, v\n"
               "[batch, heads, length, dim] of a .safetensors file or on normal noise.",
               "attn_compare");
  app.footer("Bad input gets one line on stderr and exit code 2.\n"
             "docs/attn_compare.md explains the columns and the keys of the JSON.");
  app.add_option("FILE", o.file, "A .safetensors file with q, k and v (F16, BF16, F32 or F64)");
  app.add_option("--random", o.random, "Normal noise of this shape instead of a file")
      ->type_name("B,H,L,D");
  app.add_option("--tensors", o.tensors,
                 "Names of the three tensors in FILE [q,k,v or query,key,value]")
      ->type_name("Q,K,V");
  app.add_option("--dtype", o.dtype, "Element type that the operands are rounded to [float32]")
      ->check(CLI::IsMember({"float32", "float64", "float16", "bfloat16"}));
  app.add_flag("--causal", o.causal, "Query i sees keys up to i + n_kv - n_q");
  app.add_option("--threads", o.threads, "Threads of every method [1]")->check(CLI::Range(1, 1024));
  app.add_option("--repeat", o.repeat, "Timed calls per method [as many as fit in a second]")
      ->check(CLI::Range(1, 1'000'000));
  app.add_option("--method", o.methods, "Only these methods")->type_name("NAME,...");
  app.add_option("--block", o.blocks, "Block lengths of blockwise attention [128,512]")
      ->type_name("N,...");
  app.add_option("--k", o.kept, "Keys that pooled attention keeps [128,512]")->type_name("N,...");
  app.add_option("--smyrf", o.smyrf,
                 "Rounds x keys per cluster of SMYRF, four rows each [4x32,4x128]")
      ->type_name("RxN,...");
  app.add_option("--json", o.json, "Also write the results to a file, as JSON")->type_name("FILE");
  app.add_flag("--list", list, "List the methods and stop");
  app.set_version_flag("--version", version_text());
  try {
    app.parse(argc, argv);
    if (list) {
      list_methods(o);
      return 0;
    }
    if (o.file.empty() == o.random.empty()) {
      return complain("expected either FILE or --random B,H,L,D (see --help)");
    }
    if (o.dtype == "float32") compare<float>(o);
    if (o.dtype == "float64") compare<double>(o);
    if (o.dtype == "float16") compare<Eigen::half>(o);
    if (o.dtype == "bfloat16") compare<Eigen::bfloat16>(o);
    return 0;
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    return complain(error.what());
  } catch (const std::bad_alloc&) {
    return complain("not enough memory for these operands");
  } catch (const std::exception& error) {
    return complain(error.what());
  }
}
