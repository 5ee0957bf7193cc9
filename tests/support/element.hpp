// SPDX-License-Identifier: MIT
#pragma once

#include <Eigen/Core>

#include <cstring>
#include <limits>
#include <string_view>
#include <type_traits>

namespace attn_test {

template <class T>
inline constexpr bool is_half_type =
    std::is_same_v<T, Eigen::half> || std::is_same_v<T, Eigen::bfloat16>;

/// What the kernels compute in: float for the half types, which are storage only.
template <class T>
using arithmetic_t = std::conditional_t<is_half_type<T>, float, T>;

template <class T>
inline constexpr double
    arithmetic_epsilon = static_cast<double>(std::numeric_limits<arithmetic_t<T>>::epsilon());

/// Half the distance between neighbours around 1: the largest relative error of a rounding to T.
template <class T>
constexpr double storage_rounding() {
  if constexpr (std::is_same_v<T, Eigen::half>) return 0x1p-11;
  if constexpr (std::is_same_v<T, Eigen::bfloat16>) return 0x1p-8;
  return 0;  // results are not rounded again
}

template <class T>
double to_double(T x) {
  if constexpr (is_half_type<T>) return static_cast<double>(static_cast<float>(x));
  if constexpr (!is_half_type<T>) return static_cast<double>(x);
}

template <class T>
T from_double(double x) {
  if constexpr (is_half_type<T>) return T(static_cast<float>(x));
  if constexpr (!is_half_type<T>) return static_cast<T>(x);
}

/// A finite value that no result of a test is near: 1e30, or what the type has in its stead.
template <class T>
T huge_value() {
  return from_double<T>(std::is_same_v<T, Eigen::half> ? 6e4 : 1e30);
}

template <class T>
T quiet_nan() {
  return from_double<T>(std::numeric_limits<double>::quiet_NaN());
}

template <class T>
bool same_bits(const T& a, const T& b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

template <class T>
constexpr std::string_view type_name() {
  if constexpr (std::is_same_v<T, float>) return "float";
  if constexpr (std::is_same_v<T, double>) return "double";
  if constexpr (std::is_same_v<T, Eigen::half>) return "half";
  if constexpr (std::is_same_v<T, Eigen::bfloat16>) return "bfloat16";
  return "?";
}

}  // namespace attn_test
