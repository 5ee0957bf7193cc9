// SPDX-License-Identifier: MIT
#include "support/safetensors.hpp"
#include "temporary_file.hpp"

#include "support/catch.hpp"

#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include <Eigen/Core>

using attn::bench::safetensors_error;
using attn::bench::safetensors_file;
using attn_test::safetensors_bytes;
using attn_test::temporary_file;

namespace {

template <class T>
std::string bytes_of(const std::vector<T>& x) {
  std::string bytes(x.size() * sizeof(T), '\0');
  std::memcpy(bytes.data(), static_cast<const void*>(x.data()), bytes.size());
  return bytes;
}

// The message for a file with these bytes, without the path; "" if the file is accepted.
std::string refusal(const std::string& bytes) {
  const temporary_file file("refused.safetensors", bytes);
  try {
    const safetensors_file opened(file.path());
    return "";
  } catch (const safetensors_error& error) {
    const std::string message = error.what(), prefix = file.string() + ": ";
    REQUIRE(message.substr(0, prefix.size()) == prefix);
    CHECK(message.find('\n') == std::string::npos);
    return message.substr(prefix.size());
  }
}

// The same for a header and `data_bytes` bytes of data.
std::string header_refusal(const std::string& header, std::size_t data_bytes) {
  return refusal(safetensors_bytes(header, std::string(data_bytes, '\0')));
}

// A header with one tensor "q".
std::string header(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"q":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets +
         "}}";
}

}  // namespace

TEST_CASE("safetensors: every float type is read into every element type") {
  const std::vector<float> values{0.0f, -1.5f, 2.25f, 65504.0f, 0.0009765625f, -3.0f};
  std::vector<double> f64;
  std::vector<Eigen::half> f16;
  std::vector<Eigen::bfloat16> bf16;
  for (const float x : values) {
    f64.push_back(static_cast<double>(x) * (1 + 0x1p-40));
    f16.push_back(Eigen::half(x));
    bf16.push_back(Eigen::bfloat16(x));
  }
  // Written out of order: the ranges decide, not the order of the names.
  const temporary_file file(
      "types.safetensors",
      safetensors_bytes(R"({"__metadata__":{"by":"test"},)"
                        R"("b":{"dtype":"BF16","shape":[6],"data_offsets":[84,96]},)"
                        R"("d":{"dtype":"F64","shape":[1,6,1],"data_offsets":[0,48]},)"
                        R"("f":{"dtype":"F32","shape":[2,3],"data_offsets":[48,72]},)"
                        R"("h":{"dtype":"F16","shape":[3,2],"data_offsets":[72,84]}}   )",
                        bytes_of(f64) + bytes_of(values) + bytes_of(f16) + bytes_of(bf16)));
  const safetensors_file opened(file.path());

  REQUIRE(opened.tensors().size() == 4);
  CHECK(opened.tensors().at("d").shape == std::vector<attn::index_t>{1, 6, 1});
  CHECK(opened.tensors().at("h").dtype == "F16");

  CHECK(opened.read<double>("d") == f64);  // nothing is lost on the way
  CHECK(opened.read<float>("f") == values);
  CHECK(opened.read<Eigen::half>("h") == f16);
  CHECK(opened.read<Eigen::bfloat16>("b") == bf16);
  CHECK(opened.read<float>("d") == values);  // rounded
  CHECK(opened.read<Eigen::half>("f") == f16);
  CHECK(opened.read<Eigen::bfloat16>("f") == bf16);
  CHECK(opened.read<double>("h") == std::vector<double>(values.begin(), values.end()));
}

TEST_CASE("safetensors: scalars, empty tensors and an empty file of tensors are legal") {
  const temporary_file file(
      "empty.safetensors",
      safetensors_bytes(R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},)"
                        R"("b":{"dtype":"F32","shape":[3,0,5],"data_offsets":[4,4]},)"
                        R"("c":{"dtype":"F16","shape":[0],"data_offsets":[0,0]}})",
                        bytes_of(std::vector<float>{2.5f})));
  const safetensors_file opened(file.path());
  CHECK(opened.read<float>("a") == std::vector<float>{2.5f});
  CHECK(opened.read<float>("b").empty());
  CHECK(opened.tensors().at("b").shape == std::vector<attn::index_t>{3, 0, 5});

  CHECK(header_refusal("{}", 0) == "");
}

TEST_CASE("safetensors: a tensor that cannot be given is named") {
  const temporary_file file(
      "integers.safetensors",
      safetensors_bytes(R"({"ids":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}})",
                        std::string(8, '\0')));
  const safetensors_file opened(file.path());
  CHECK_THROWS_WITH(opened.read<float>("ids"),
                    file.string() + ": tensor \"ids\" is I64, expected F16, BF16, F32 or F64");
  CHECK_THROWS_WITH(opened.read<float>("q"), file.string() + ": has no tensor \"q\"");
}

TEST_CASE("safetensors: a file that is missing or is none") {
  const temporary_file none("missing.safetensors");
  CHECK_THROWS_WITH(safetensors_file(none.path()), none.string() + ": no such file");
  const std::string folder = std::filesystem::temp_directory_path().string();
  CHECK_THROWS_WITH(safetensors_file(folder), folder + ": not a regular file");
}

TEST_CASE("safetensors: truncated at every byte, a file is refused") {
  const std::string whole =
      safetensors_bytes(header(R"("F32")", "[2]", "[0,8]"), bytes_of(std::vector<float>{1, 2}));
  REQUIRE(refusal(whole) == "");
  for (std::size_t n = 0; n < whole.size(); ++n) {
    CAPTURE(n);
    CHECK(refusal(whole.substr(0, n)) != "");
  }
  CHECK(refusal("") == "has 0 bytes, too few for a safetensors file");
  CHECK(refusal("1234567") == "has 7 bytes, too few for a safetensors file");
  CHECK(refusal(whole.substr(0, 20)) == "header length 54 goes past the file's 20 bytes");
  CHECK(refusal(whole.substr(0, whole.size() - 1)) ==
        "tensor \"q\": data_offsets [0, 8] go past the 7 bytes of data");
  CHECK(refusal(whole + "x") == "bytes 8 to 9 of the data belong to no tensor");
}

TEST_CASE("safetensors: a header length that lies") {
  std::string huge(8, '\xff');
  CHECK(refusal(huge + "{}") == "header length 18446744073709551615 goes past the file's 10 bytes");
  std::string shorter = safetensors_bytes(header(R"("F32")", "[2]", "[0,8]"), std::string(8, '\0'));
  shorter[0] = static_cast<char>(shorter[0] - 1);
  CHECK(refusal(shorter) == "header is not JSON (byte 54)");
  CHECK(refusal(std::string(8, '\0')) == "header is not JSON (byte 1)");
}

TEST_CASE("safetensors: a header that is not what it should be") {
  struct bad {
    const char* header;
    const char* message;
  };
  const bad cases[] = {
      {"", "header is not JSON (byte 1)"},
      {"{", "header is not JSON (byte 2)"},
      {"{} {}", "header is not JSON (byte 4)"},
      {"[]", "header is not a JSON object"},
      {"17", "header is not a JSON object"},
      {"null", "header is not a JSON object"},
      {"{\"q\xff\":1}", "header is not JSON (byte 4)"},  // not UTF-8
      {"{\"\xc3\x28\":1}", "header is not JSON (byte 4)"},
      {R"({"q":1e999})", "header has a number that is out of range"},
      {R"({"q":[]})", "tensor \"q\" is not a JSON object"},
      {R"({"q":{"shape":[],"data_offsets":[0,4]}})", "tensor \"q\" has no dtype"},
      {R"({"q":{"dtype":"F32","data_offsets":[0,4]}})", "tensor \"q\" has no shape"},
      {R"({"q":{"dtype":"F32","shape":[]}})", "tensor \"q\" has no data_offsets"},
      {R"({"q":[[[[]]]]})", "header nests too deep"},
      {R"({"a\nb":7})", R"(tensor "a\nb" is not a JSON object)"},
      {"{\"\xc3\xa9\":7}", R"(tensor "\u00e9" is not a JSON object)"},
  };
  for (const bad& c : cases) {
    CAPTURE(c.header);
    CHECK(header_refusal(c.header, 4) == c.message);
  }
  CHECK(header_refusal(std::string(100'000, '['), 0) == "header nests too deep");
  CHECK(header_refusal("{\"" + std::string(1000, 'x') + "\":1}", 0) ==
        "tensor \"" + std::string(60, 'x') + "...\" is not a JSON object");
}

TEST_CASE("safetensors: a key that is there twice") {
  const std::string q = R"("q":{"dtype":"F32","shape":[],"data_offsets":[0,4]})";
  CHECK(header_refusal("{" + q + "," + q + "}", 4) == "header has \"q\" twice");
  CHECK(header_refusal(R"({"__metadata__":{},"__metadata__":{}})", 0) ==
        "header has \"__metadata__\" twice");
  CHECK(header_refusal(R"({"q":{"dtype":"F32","dtype":"F16","shape":[],"data_offsets":[0,4]}})",
                       4) == "header has \"dtype\" twice");
  // The same spelled with an escape, and the same key in two objects, which is no fault.
  CHECK(header_refusal("{" + q + R"(,"\u0071":1})", 4) == "header has \"q\" twice");
  CHECK(header_refusal(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                       R"("b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                       2) == "");
}

TEST_CASE("safetensors: a wrong type, shape or range") {
  struct bad {
    const char *dtype, *shape, *offsets;
    std::size_t data_bytes;
    std::string message;
  };
  const std::string shape_type = "shape is not an array of integers from 0 up";
  const std::string offsets_type = "data_offsets is not an array of integers from 0 up";
  const std::string overflow = "shape has more bytes than 63 bits can count";
  const bad cases[] = {
      {R"("F33")", "[1]", "[0,4]", 4, R"(dtype "F33" is unknown)"},
      {R"("f32")", "[1]", "[0,4]", 4, R"(dtype "f32" is unknown)"},
      {"32", "[1]", "[0,4]", 4, "dtype is not a string"},
      {R"("F32")", "1", "[0,4]", 4, shape_type},
      {R"("F32")", "[-1]", "[0,4]", 4, shape_type},
      {R"("F32")", "[1.0]", "[0,4]", 4, shape_type},
      {R"("F32")", R"(["1"])", "[0,4]", 4, shape_type},
      {R"("F32")", "[99999999999999999999]", "[0,4]", 4, shape_type},  // becomes a double
      {R"("F32")", "[1]", R"({"begin":0})", 4, offsets_type},
      {R"("F32")", "[1]", "[-4,0]", 4, offsets_type},
      {R"("F32")", "[1]", "[0]", 4, "data_offsets are not two numbers"},
      {R"("F32")", "[1]", "[0,4,8]", 8, "data_offsets are not two numbers"},
      {R"("F32")", "[1]", "[4,0]", 4, "data_offsets [4, 0] are reversed"},
      {R"("F32")", "[1]", "[0,8]", 4, "data_offsets [0, 8] go past the 4 bytes of data"},
      {R"("F32")", "[1]", "[0,18446744073709551615]", 4,
       "data_offsets [0, 18446744073709551615] go past the 4 bytes of data"},
      {R"("F32")", "[3]", "[0,8]", 8,
       "data_offsets [0, 8] hold 8 bytes, expected 12 (shape and dtype)"},
      {R"("F16")", "[1]", "[0,4]", 4,
       "data_offsets [0, 4] hold 4 bytes, expected 2 (shape and dtype)"},
      {R"("F32")", "[0,7]", "[0,4]", 4,
       "data_offsets [0, 4] hold 4 bytes, expected 0 (shape and dtype)"},
      // 2^64 elements would wrap to 0 bytes, and hide behind an extent of 0.
      {R"("F32")", "[4294967296,4294967296]", "[0,0]", 0, overflow},
      {R"("F32")", "[4611686018427387904,4]", "[0,0]", 0, overflow},
      {R"("F32")", "[0,4294967296,4294967296]", "[0,0]", 0, overflow},
      {R"("U8")", "[9223372036854775808]", "[0,0]", 0, overflow},
  };
  for (const bad& c : cases) {
    CAPTURE(c.dtype, c.shape, c.offsets);
    CHECK(header_refusal(header(c.dtype, c.shape, c.offsets), c.data_bytes) ==
          "tensor \"q\": " + c.message);
  }
}

TEST_CASE("safetensors: ranges that overlap or leave holes") {
  const auto two = [](const char* a, const char* b) {
    return std::string(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":)") + a +
           R"(},"b":{"dtype":"F32","shape":[2],"data_offsets":)" + b + "}}";
  };
  CHECK(header_refusal(two("[0,8]", "[8,16]"), 16) == "");
  CHECK(header_refusal(two("[8,16]", "[0,8]"), 16) == "");
  CHECK(header_refusal(two("[0,8]", "[4,12]"), 12) == "tensor \"b\" overlaps the one before it");
  CHECK(header_refusal(two("[0,8]", "[0,8]"), 8) == "tensor \"b\" overlaps the one before it");
  CHECK(header_refusal(two("[0,8]", "[12,20]"), 20) ==
        "bytes 8 to 12 of the data belong to no tensor");
  CHECK(header_refusal(two("[4,12]", "[12,20]"), 20) ==
        "bytes 0 to 4 of the data belong to no tensor");
  CHECK(header_refusal(two("[0,8]", "[8,16]"), 20) ==
        "bytes 16 to 20 of the data belong to no tensor");
}
