// SPDX-License-Identifier: MIT
//
// Files that tests write, read and remove.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>

namespace attn_test {

/// A path in the system's folder for temporary files; the file is removed at the end.
class temporary_file {
 public:
  explicit temporary_file(const std::string& name)
      : path_(std::filesystem::temp_directory_path() / ("attn_" + unique() + "_" + name)) {}
  temporary_file(const std::string& name, const std::string& content) : temporary_file(name) {
    std::ofstream(path_, std::ios::binary) << content;
  }
  temporary_file(const temporary_file&) = delete;
  temporary_file& operator=(const temporary_file&) = delete;
  ~temporary_file() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }

  const std::filesystem::path& path() const { return path_; }
  std::string string() const { return path_.string(); }
  std::string content() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

 private:
  // Programs run side by side, and one makes several files.
  static std::string unique() {
    static const unsigned program = std::random_device{}();
    static int counter = 0;
    return std::to_string(program) + "_" + std::to_string(counter++);
  }
  std::filesystem::path path_;
};

/// The bytes of a .safetensors file with this header, true or not, and this data.
inline std::string safetensors_bytes(const std::string& header, const std::string& data = {}) {
  std::string bytes;
  for (int shift = 0; shift < 64; shift += 8) {
    bytes.push_back(static_cast<char>(static_cast<std::uint64_t>(header.size()) >> shift & 255));
  }
  return bytes + header + data;
}

}  // namespace attn_test
