// SPDX-License-Identifier: MIT
//
// Reads tensors from a .safetensors file and trusts nothing in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include <attn/view.hpp>

namespace attn::bench {

/// What is wrong with a file, in one line that begins with its name.
class safetensors_error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A file: 8 bytes with the length of a JSON header, the header, the bytes of all tensors.
///
/// The header maps each name to its type, its shape and the range of bytes it has in the third
/// part. Opening a file checks all of that, so a tensor that is then asked for is there: every
/// range lies in the file and has the bytes that shape and type need, and together the ranges
/// cover the data once, without a hole.
///
/// **Errors** safetensors_error for a file that cannot be read or fails a check.
class safetensors_file {
 public:
  struct entry {
    std::string dtype;           // as the file spells it: "F32", "F16", "BF16", ...
    std::vector<index_t> shape;  // none for a scalar
    std::uint64_t begin, end;    // bytes, from the start of the data
  };

  explicit safetensors_file(std::filesystem::path path);

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  [[nodiscard]] const std::map<std::string, entry>& tensors() const { return tensors_; }

  /// The elements of a tensor in the file's order (row-major), rounded to T: float, double,
  /// Eigen::half or Eigen::bfloat16.
  ///
  /// **Errors** safetensors_error if there is no such tensor or it is not F16, BF16, F32 or F64.
  template <class T>
  [[nodiscard]] std::vector<T> read(const std::string& name) const;

 private:
  [[nodiscard]] std::vector<std::byte> read_bytes(std::uint64_t begin, std::uint64_t end) const;

  std::filesystem::path path_;
  std::uint64_t data_begin_ = 0;
  std::map<std::string, entry> tensors_;
};

}  // namespace attn::bench
