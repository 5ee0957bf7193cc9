// SPDX-License-Identifier: MIT
//
// One choice of parts as a table of functions: the driver picks it at run time, so that it is
// compiled once per rule and not once per rule and precision.
#pragma once

#include <type_traits>

#include <attn/dense_options.hpp>
#include <attn/detail/amx_packing.hpp>
#include <attn/detail/amx_products.hpp>

#if defined(ATTN_HAS_AMX)

namespace attn::detail::amx {

struct engine {
  int parts_q, parts_k, parts_p, parts_v;
  bool scale_late;
  void (*pack_keys)(const row_block&, std::uint16_t*) noexcept;
  void (*pack_queries)(const row_block&, std::uint16_t*) noexcept;
  void (*pack_values)(const row_block&, std::uint16_t*, index_t) noexcept;
  void (*scores)(const scores_operands&) noexcept;
  void (*weights)(const waiting_scores&) noexcept;
  float* (*values)(const values_operands&) noexcept;
};

template <class Arch, class Parts>
inline constexpr engine engine_of = {Parts::q,
                                     Parts::k,
                                     Parts::p,
                                     Parts::v,
                                     Parts::scale_late,
                                     &packing<Arch, Parts::k>::keys,
                                     &packing<Arch, Parts::q>::queries,
                                     &packing<Arch, Parts::v>::values,
                                     &products<Arch, Parts>::scores,
                                     &products<Arch, Parts>::weights,
                                     &products<Arch, Parts>::values};

/// The engine of a precision; null where it means the FMA kernel. Whether all operands are stored
/// as bfloat16 is known when compiling, and a type's own engines are all that a call compiles: each
/// takes about half a second.
template <class Arch, bool AllBfloat16>
[[nodiscard]] const engine* engine_for(precision_mode mode) noexcept {
  // bfloat16 operands have one part. Weights have three all the same.
  using float_parts = parts<3, 3, 3, false>;
  using stored_parts = parts<1, 3, 1, true>;
  using half_parts = parts<2, 2, 2, false>;
  switch (mode) {
  case precision_mode::automatic:
    return &engine_of<Arch, std::conditional_t<AllBfloat16, stored_parts, float_parts>>;
  case precision_mode::bf16x3:
    return &engine_of<Arch, std::conditional_t<AllBfloat16, stored_parts, half_parts>>;
  case precision_mode::bf16:
    return &engine_of<Arch, parts<1, 1, 1, true>>;
  case precision_mode::strict:
    break;
  }
  return nullptr;
}

}  // namespace attn::detail::amx

#endif  // ATTN_HAS_AMX
