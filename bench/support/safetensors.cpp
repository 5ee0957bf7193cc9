// SPDX-License-Identifier: MIT
#include "support/safetensors.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <fstream>
#include <limits>
#include <set>
#include <string_view>
#include <utility>

#include <Eigen/Core>
#include <nlohmann/json.hpp>

namespace attn::bench {
namespace {

using json = nlohmann::json;

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

// The limit of the format's own reader: a longer header is an attack or a mistake.
constexpr std::uint64_t max_header_bytes = 100'000'000;
// A tensor's shape is the deepest thing in a header: object, object, array.
constexpr int max_header_depth = 3;

constexpr std::array<std::pair<std::string_view, std::uint64_t>, 15> dtype_bytes{{{"BOOL", 1},
                                                                                  {"U8", 1},
                                                                                  {"I8", 1},
                                                                                  {"F8_E4M3", 1},
                                                                                  {"F8_E5M2", 1},
                                                                                  {"I16", 2},
                                                                                  {"U16", 2},
                                                                                  {"F16", 2},
                                                                                  {"BF16", 2},
                                                                                  {"I32", 4},
                                                                                  {"U32", 4},
                                                                                  {"F32", 4},
                                                                                  {"I64", 8},
                                                                                  {"U64", 8},
                                                                                  {"F64", 8}}};

[[noreturn]] void fail(const std::filesystem::path& path, const std::string& what) {
  throw safetensors_error(path.string() + ": " + what);
}

// Names come from the file: quoted and escaped, they keep a message on its line.
std::string in_quotes(const std::string& name) {
  constexpr std::size_t longest = 60;
  const json text = name.size() <= longest ? name : name.substr(0, longest) + "...";
  return text.dump(-1, ' ', true, json::error_handler_t::replace);
}

// JSON that names a key of an object twice, or nests deeper than a header does, is refused: a
// parser would keep one of the two and not say which.
json parse_header(const std::filesystem::path& path, std::string_view text) {
  std::vector<std::set<std::string>> keys;
  int depth = 0;
  const auto check = [&](int, json::parse_event_t event, json& parsed) {
    switch (event) {
    case json::parse_event_t::object_start:
      keys.emplace_back();
      [[fallthrough]];
    case json::parse_event_t::array_start:
      if (++depth > max_header_depth) fail(path, "header nests too deep");
      break;
    case json::parse_event_t::object_end:
      keys.pop_back();
      [[fallthrough]];
    case json::parse_event_t::array_end:
      --depth;
      break;
    case json::parse_event_t::key: {
      const auto& name = parsed.get_ref<const std::string&>();
      if (!keys.back().insert(name).second) fail(path, "header has " + in_quotes(name) + " twice");
      break;
    }
    case json::parse_event_t::value:
      break;
    }
    return true;
  };
  try {
    return json::parse(text.begin(), text.end(), check);
  } catch (const json::parse_error& error) {
    fail(path, "header is not JSON (byte " + std::to_string(error.byte) + ")");
  } catch (const json::out_of_range&) {  // a number that no double holds
    fail(path, "header has a number that is out of range");
  }
}

const json& member(const std::filesystem::path& path, const std::string& name, const json& tensor,
                   const char* key) {
  const auto found = tensor.find(key);
  if (found == tensor.end()) fail(path, "tensor " + in_quotes(name) + " has no " + key);
  return *found;
}

// An array of non-negative integers.
std::vector<std::uint64_t> integers(const std::filesystem::path& path, const std::string& name,
                                    const json& tensor, const char* key) {
  const json& array = member(path, name, tensor, key);
  const auto valid = [](const json& x) { return x.is_number_unsigned(); };
  if (!array.is_array() || !std::all_of(array.begin(), array.end(), valid)) {
    fail(path, "tensor " + in_quotes(name) + ": " + key + " is not an array of integers from 0 up");
  }
  return array.get<std::vector<std::uint64_t>>();
}

safetensors_file::entry parse_entry(const std::filesystem::path& path, const std::string& name,
                                    const json& tensor, std::uint64_t data_bytes) {
  const std::string who = "tensor " + in_quotes(name);
  if (!tensor.is_object()) fail(path, who + " is not a JSON object");

  const json& dtype = member(path, name, tensor, "dtype");
  if (!dtype.is_string()) fail(path, who + ": dtype is not a string");
  safetensors_file::entry e;
  e.dtype = dtype.get<std::string>();
  const auto type = std::find_if(dtype_bytes.begin(), dtype_bytes.end(),
                                 [&](const auto& t) { return t.first == e.dtype; });
  if (type == dtype_bytes.end()) fail(path, who + ": dtype " + in_quotes(e.dtype) + " is unknown");

  // The product of the shape fits 63 bits, in elements and in bytes; an extent of 0 does not
  // excuse the others.
  constexpr auto largest = static_cast<std::uint64_t>(std::numeric_limits<index_t>::max());
  std::uint64_t bytes = type->second, bytes_without_zeros = type->second;
  for (const std::uint64_t extent : integers(path, name, tensor, "shape")) {
    if (extent != 0 && bytes_without_zeros > largest / extent) {
      fail(path, who + ": shape has more bytes than 63 bits can count");
    }
    bytes *= extent;
    if (extent != 0) bytes_without_zeros *= extent;
    e.shape.push_back(static_cast<index_t>(extent));
  }

  const auto offsets = integers(path, name, tensor, "data_offsets");
  if (offsets.size() != 2) fail(path, who + ": data_offsets are not two numbers");
  e.begin = offsets[0];
  e.end = offsets[1];
  const std::string range =
      who + ": data_offsets [" + std::to_string(e.begin) + ", " + std::to_string(e.end) + "]";
  if (e.begin > e.end) fail(path, range + " are reversed");
  if (e.end > data_bytes) {
    fail(path, range + " go past the " + std::to_string(data_bytes) + " bytes of data");
  }
  if (e.end - e.begin != bytes) {
    fail(path, range + " hold " + std::to_string(e.end - e.begin) + " bytes, expected " +
                   std::to_string(bytes) + " (shape and dtype)");
  }
  return e;
}

// In the order of their bytes, each tensor begins where the one before it ends.
void check_cover(const std::filesystem::path& path,
                 const std::map<std::string, safetensors_file::entry>& tensors,
                 std::uint64_t data_bytes) {
  using item = std::pair<const std::string, safetensors_file::entry>;
  std::vector<const item*> order;
  for (const item& t : tensors) order.push_back(&t);
  std::sort(order.begin(), order.end(), [](const item* a, const item* b) {
    return std::pair(a->second.begin, a->second.end) < std::pair(b->second.begin, b->second.end);
  });
  std::uint64_t covered = 0;
  for (const item* t : order) {
    if (t->second.begin < covered) {
      fail(path, "tensor " + in_quotes(t->first) + " overlaps the one before it");
    }
    if (t->second.begin > covered) {
      fail(path, "bytes " + std::to_string(covered) + " to " + std::to_string(t->second.begin) +
                     " of the data belong to no tensor");
    }
    covered = t->second.end;
  }
  if (covered != data_bytes) {
    fail(path, "bytes " + std::to_string(covered) + " to " + std::to_string(data_bytes) +
                   " of the data belong to no tensor");
  }
}

template <class T, class Stored>
std::vector<T> converted(const std::vector<std::byte>& bytes) {
  std::vector<T> elements(bytes.size() / sizeof(Stored));
  for (std::size_t i = 0; i < elements.size(); ++i) {
    Stored x;
    std::memcpy(static_cast<void*>(&x), bytes.data() + i * sizeof(Stored), sizeof(Stored));
    elements[i] = static_cast<T>(x);
  }
  return elements;
}

}  // namespace

safetensors_file::safetensors_file(std::filesystem::path path) : path_(std::move(path)) {
  std::error_code error;
  if (!std::filesystem::exists(path_, error)) fail(path_, "no such file");
  if (!std::filesystem::is_regular_file(path_, error)) fail(path_, "not a regular file");
  const std::uint64_t file_bytes = std::filesystem::file_size(path_, error);
  if (error) fail(path_, error.message());

  // 1. The length of the header.
  std::uint64_t header_bytes = 0;
  if (file_bytes < sizeof header_bytes) {
    fail(path_, "has " + std::to_string(file_bytes) + " bytes, too few for a safetensors file");
  }
  const auto length = read_bytes(0, sizeof header_bytes);
  std::memcpy(&header_bytes, length.data(), sizeof header_bytes);
  if (header_bytes > file_bytes - sizeof header_bytes) {
    fail(path_, "header length " + std::to_string(header_bytes) + " goes past the file's " +
                    std::to_string(file_bytes) + " bytes");
  }
  if (header_bytes > max_header_bytes) {
    fail(path_, "header length " + std::to_string(header_bytes) + " is over the limit of " +
                    std::to_string(max_header_bytes));
  }
  data_begin_ = sizeof header_bytes + header_bytes;

  // 2. The header.
  const auto text = read_bytes(sizeof header_bytes, data_begin_);
  const json header = parse_header(
      path_, std::string_view(reinterpret_cast<const char*>(text.data()), text.size()));
  if (!header.is_object()) fail(path_, "header is not a JSON object");

  // 3. Its tensors. "__metadata__" is free text for people.
  const std::uint64_t data_bytes = file_bytes - data_begin_;
  for (const auto& [name, tensor] : header.items()) {
    if (name == "__metadata__") continue;
    tensors_.emplace(name, parse_entry(path_, name, tensor, data_bytes));
  }
  check_cover(path_, tensors_, data_bytes);
}

std::vector<std::byte> safetensors_file::read_bytes(std::uint64_t begin, std::uint64_t end) const {
  std::vector<std::byte> bytes(end - begin);
  std::ifstream file(path_, std::ios::binary);
  file.seekg(static_cast<std::streamoff>(begin));
  file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  if (!file) fail(path_, "cannot be read");
  return bytes;
}

template <class T>
std::vector<T> safetensors_file::read(const std::string& name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) fail(path_, "has no tensor " + in_quotes(name));
  const entry& e = found->second;
  const auto bytes = [&] { return read_bytes(data_begin_ + e.begin, data_begin_ + e.end); };
  if (e.dtype == "F32") return converted<T, float>(bytes());
  if (e.dtype == "F64") return converted<T, double>(bytes());
  if (e.dtype == "F16") return converted<T, Eigen::half>(bytes());
  if (e.dtype == "BF16") return converted<T, Eigen::bfloat16>(bytes());
  fail(path_, "tensor " + in_quotes(name) + " is " + e.dtype + ", expected F16, BF16, F32 or F64");
}

template std::vector<float> safetensors_file::read(const std::string&) const;
template std::vector<double> safetensors_file::read(const std::string&) const;
template std::vector<Eigen::half> safetensors_file::read(const std::string&) const;
template std::vector<Eigen::bfloat16> safetensors_file::read(const std::string&) const;

}  // namespace attn::bench
