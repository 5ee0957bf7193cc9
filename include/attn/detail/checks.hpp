// SPDX-License-Identifier: MIT
//
// Checks that every public function makes before it writes anything.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <string_view>

#include <attn/error.hpp>
#include <attn/view.hpp>

namespace attn::detail {

[[nodiscard]] inline std::string to_text(const std::array<index_t, 4>& extents) {
  std::string text = "[";
  for (std::size_t r = 0; r < 4; ++r) text += (r ? ", " : "") + std::to_string(extents[r]);
  return text + "]";
}

// One name for the four axes, in the order of a view.
inline constexpr std::array<const char*, 4> axis_names{"batch", "heads", "length", "dim"};

[[noreturn]] inline void raise_shape(std::string_view function, std::string_view argument,
                                     const std::array<index_t, 4>& extents,
                                     const std::string& expected) {
  raise<shape_error>(std::string(function) + ": " + std::string(argument) + " is " +
                     to_text(extents) + ", expected " + expected);
}

// `function: argument is value, expected expectation`
[[noreturn]] inline void raise_option(std::string_view function, std::string_view argument,
                                      const std::string& value, const std::string& expected) {
  raise<option_error>(std::string(function) + ": " + std::string(argument) + " is " + value +
                      ", expected " + expected);
}

enum class access { read, write };

// Extents and strides that are not negative, whose last offset fits an index_t, with memory behind
// them; an output has no stride of 0, since two results would share an element.
template <class T>
void check_view(std::string_view function, std::string_view argument, const tensor_view<T>& x,
                access mode) {
  index_t last = 0;
  for (int r = 0; r < 4; ++r) {
    if (x.extent(r) < 0) raise_shape(function, argument, x.extents(), "no negative extent");
  }
  const bool empty = std::ranges::find(x.extents(), 0) != x.extents().end();
  if (empty) return;
  for (int r = 0; r < 4; ++r) {
    if (x.extent(r) == 1) continue;
    const std::string name(axis_names[static_cast<std::size_t>(r)]);
    if (x.stride(r) < 0) {
      raise<shape_error>(std::string(function) + ": " + std::string(argument) + " has strides " +
                         to_text(x.strides()) + ", expected no negative stride (" + name + ")");
    }
    if (mode == access::write && x.stride(r) == 0) {
      raise<shape_error>(std::string(function) + ": " + std::string(argument) + " has strides " +
                         to_text(x.strides()) + ", expected no stride of 0 in an output (" + name +
                         ")");
    }
    index_t span = 0;
    if (__builtin_mul_overflow(x.extent(r) - 1, x.stride(r), &span) ||
        __builtin_add_overflow(last, span, &last)) {
      last = std::numeric_limits<index_t>::max();
    }
  }
  if (last > std::numeric_limits<index_t>::max() / static_cast<index_t>(sizeof(T)) - 1) {
    raise<shape_error>(std::string(function) + ": " + std::string(argument) + " is " +
                       to_text(x.extents()) + " with strides " + to_text(x.strides()) +
                       ", expected offsets that fit 63 bits");
  }
  if (x.data_handle() == nullptr) {
    raise<shape_error>(std::string(function) + ": " + std::string(argument) + " is " +
                       to_text(x.extents()) + " at a null pointer, expected memory");
  }
}

// `x` has the extent `expected` along axis r; `reason` says where the number comes from.
template <class T>
void check_extent(std::string_view function, std::string_view argument, const tensor_view<T>& x,
                  int r, index_t expected, std::string_view reason) {
  if (x.extent(r) == expected) return;
  raise_shape(function, argument, x.extents(),
              std::string(axis_names[static_cast<std::size_t>(r)]) + " " +
                  std::to_string(expected) + " (" + std::string(reason) + ")");
}

// A view that broadcasts: along axis r the extent is 1 or `expected`.
template <class T>
void check_broadcast(std::string_view function, std::string_view argument, const tensor_view<T>& x,
                     int r, index_t expected, std::string_view reason) {
  if (x.extent(r) == 1 || x.extent(r) == expected) return;
  raise_shape(function, argument, x.extents(),
              std::string(axis_names[static_cast<std::size_t>(r)]) + " 1 or " +
                  std::to_string(expected) + " (" + std::string(reason) + ")");
}

// The bytes a non-empty view touches lie in [begin, end).
struct byte_range {
  std::uintptr_t begin, end;
};

template <class T>
[[nodiscard]] byte_range bytes_of(const tensor_view<T>& x) noexcept {
  index_t last = 0;
  for (int r = 0; r < 4; ++r) last += (x.extent(r) - 1) * x.stride(r);
  const auto begin = reinterpret_cast<std::uintptr_t>(x.data_handle());
  return {begin, begin + (static_cast<std::uintptr_t>(last) + 1) * sizeof(T)};
}

// Whether two views may share an element. Exact where it says no. Ranges that interleave (column
// blocks of one matrix, heads of one [B, L, H, D] tensor) are told apart by position modulo a
// common period: the gcd g of all strides of at least `threshold` elements. If what lies inside a
// period fits it and does not meet the other's, the views are disjoint.
template <class A, class B>
[[nodiscard]] bool may_overlap(const tensor_view<A>& a, const tensor_view<B>& b) noexcept {
  if (a.size() == 0 || b.size() == 0) return false;
  const byte_range ra = bytes_of(a), rb = bytes_of(b);
  if (ra.end <= rb.begin || rb.end <= ra.begin) return false;
  if constexpr (sizeof(A) == sizeof(B)) {
    const auto size = static_cast<index_t>(sizeof(A));
    const auto shift = static_cast<index_t>(rb.begin) - static_cast<index_t>(ra.begin);
    if (shift % size != 0) return true;
    for (int t = 0; t < 8; ++t) {
      const index_t threshold = t < 4 ? a.stride(t) : b.stride(t - 4);
      if (threshold <= 1) continue;
      index_t period = 0, inside_a = 1, inside_b = 1;
      for (int r = 0; r < 4; ++r) {
        if (a.extent(r) > 1) {
          if (a.stride(r) >= threshold)
            period = std::gcd(period, a.stride(r));
          else
            inside_a += (a.extent(r) - 1) * a.stride(r);
        }
        if (b.extent(r) > 1) {
          if (b.stride(r) >= threshold)
            period = std::gcd(period, b.stride(r));
          else
            inside_b += (b.extent(r) - 1) * b.stride(r);
        }
      }
      if (period == 0) continue;
      const index_t offset = ((shift / size) % period + period) % period;
      if (offset >= inside_a && offset + inside_b <= period) return false;
    }
  }
  return true;
}

template <class A, class B>
void check_disjoint(std::string_view function, std::string_view output, const tensor_view<A>& out,
                    std::string_view input, const tensor_view<B>& in) {
  if (!may_overlap(out, in)) return;
  raise<shape_error>(std::string(function) + ": " + std::string(output) + " shares memory with " +
                     std::string(input) + ", expected separate memory");
}

// An output that is written where it is read, element by element, or that shares nothing.
template <class A, class B>
void check_same_or_disjoint(std::string_view function, std::string_view output,
                            const tensor_view<A>& out, std::string_view input,
                            const tensor_view<B>& in) {
  bool same = sizeof(A) == sizeof(B) && static_cast<const void*>(out.data_handle()) ==
                                            static_cast<const void*>(in.data_handle());
  for (int r = 0; r < 4; ++r) same &= out.extent(r) <= 1 || out.stride(r) == in.stride(r);
  if (!same) check_disjoint(function, output, out, input, in);
}

// A view by the name that messages give it.
template <class T>
struct named_view {
  std::string_view name;
  tensor_view<T> view;

  named_view(std::string_view its_name, const tensor_view<T>& x) : name(its_name), view(x) {}
  named_view(std::string_view its_name, std::span<T> x)
      : name(its_name), view(x.data(), 1, 1, 1, static_cast<index_t>(x.size())) {}
};

// An output that shares memory with none of the others.
template <class Out, class... Others>
void check_apart(std::string_view function, const named_view<Out>& out,
                 const named_view<Others>&... others) {
  (check_disjoint(function, out.name, out.view, others.name, others.view), ...);
}

[[nodiscard]] inline std::string to_text(double x) {
  std::array<char, 32> buffer{};
  std::snprintf(buffer.data(), buffer.size(), "%g", x);
  return buffer.data();
}

}  // namespace attn::detail
