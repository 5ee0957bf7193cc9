// SPDX-License-Identifier: MIT
//
// Intel AMX: whether this machine has it, and its tile instructions.
//
// Compilers have the tile intrinsics since GCC 11 and clang 12, but GCC 12 drops stores of the tile
// configuration (its operand is 8 of 64 bytes) and lets vector stores slide past tile loads (they
// clobber no memory). So the instructions stand here as assembler with exact memory operands; they
// need no flag of the compiler, only an assembler that knows them.
//
// ATTN_EMULATE_AMX (for the whole program) puts plain C++ in their place, so that everything on top
// of them can be tested on any machine with AVX-512.
#pragma once

#include <cstddef>
#include <cstdint>

#include <attn/view.hpp>

// ATTN_NO_AMX (for the whole program, not for single files) leaves everything of AMX out.
#if defined(__x86_64__) && !defined(__ILP32__) && defined(__linux__) && !defined(ATTN_NO_AMX)
#if defined(__clang__) ? __clang_major__ >= 12 : defined(__GNUC__) && __GNUC__ >= 11
#define ATTN_HAS_AMX 1
#endif
#endif

#if defined(ATTN_HAS_AMX)

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(ATTN_EMULATE_AMX)
#include <attn/simd/amx_emulation.hpp>
#endif

// Vector code beside the tiles is AVX-512 in every program, also in one built for plain x86-64.
// Every function that touches such a vector says so itself: neither lambdas nor templates inherit
// a target, and an always-inlined function needs a caller that has its own.
#define ATTN_AMX_TARGET "avx512f,avx512bw,avx512dq,avx512vl"
#define ATTN_AMX_INLINE inline __attribute__((always_inline, target(ATTN_AMX_TARGET)))
#define ATTN_AMX_FUNCTION __attribute__((noinline, target(ATTN_AMX_TARGET)))

namespace attn::simd::amx {

namespace detail {

// CPUID leaf 7: AVX-512 F, DQ, BW, VL, AMX-BF16 and AMX-TILE; and that the system saves the
// registers (XCR0 bits 1, 2, 5-7, 17, 18).
[[nodiscard]] inline bool processor_has_it(bool with_tiles) noexcept {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & (1u << 27)) == 0) return false;  // OSXSAVE
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned vectors = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
  const unsigned tiles = with_tiles ? 1u << 22 | 1u << 24 : 0u;
  if ((b & vectors) != vectors || (d & tiles) != tiles) return false;
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  const unsigned saved = 0x6u | 0xe0u | (with_tiles ? 0x60000u : 0u);
  return (low & saved) == saved;
}

// Linux hands out the 8 KB of tile registers on request, to the whole process (since 5.16).
[[nodiscard]] inline bool system_permits_it() noexcept {
  constexpr long request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

}  // namespace detail

#if defined(ATTN_EMULATE_AMX)
inline constexpr bool emulated = true;
#else
inline constexpr bool emulated = false;
#endif

/// Whether tiles of bfloat16 can be multiplied here. The first call asks the system, once.
[[nodiscard]] inline bool available() noexcept {
  static const bool yes =
      detail::processor_has_it(!emulated) && (emulated || detail::system_permits_it());
  return yes;
}

/// While it lives, this thread's eight tiles are 16 rows of 64 bytes.
class tile_scope {
 public:
#if defined(ATTN_EMULATE_AMX)
  tile_scope() noexcept = default;
  ~tile_scope() {}
#else
  tile_scope() noexcept {
    struct alignas(64) {
      std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
      std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } const layout;
    asm volatile("ldtilecfg %0" : : "m"(layout));
  }
  ~tile_scope() { asm volatile("tilerelease"); }
#endif
  tile_scope(const tile_scope&) = delete;
  tile_scope& operator=(const tile_scope&) = delete;
};

/// Floats per row of a pair of tiles that lie side by side.
inline constexpr index_t pair_stride = 32;

/// 16 rows of 16 numbers of 4 bytes, or of 16 pairs of bfloat16.
inline constexpr index_t tile_floats = 256, tile_halves = 512;

#if defined(ATTN_EMULATE_AMX)

template <int T>
void load(const std::uint16_t* p) noexcept {
  emulation::load(T, p, 64);
}
template <int T>
void load_streaming(const std::uint16_t* p) noexcept {
  emulation::load(T, p, 64);
}
template <int T>
void load_sums(const float* p) noexcept {
  emulation::load(T, p, 4 * pair_stride);
}
template <int T>
void store_sums(float* p) noexcept {
  emulation::store(T, p, 4 * pair_stride);
}
template <int T>
void clear() noexcept {
  emulation::clear(T);
}
template <int Sums, int A, int B>
void multiply() noexcept {
  emulation::multiply(Sums, A, B);
}

#else

/// Tile T from 1024 contiguous bytes that are used again soon.
template <int T>
inline __attribute__((always_inline)) void load(const std::uint16_t* p) noexcept {
  asm volatile("{tileloadd (%0,%1,1), %%tmm%c2|tileloadd tmm%c2, [%0+%1]}"
               :
               : "r"(p), "r"(index_t{64}), "i"(T), "m"(*reinterpret_cast<const char(*)[1024]>(p)));
}

/// The same of bytes that stream by: they don't displace the rest from L1 (3 to 19% of the whole).
template <int T>
inline __attribute__((always_inline)) void load_streaming(const std::uint16_t* p) noexcept {
  asm volatile("{tileloaddt1 (%0,%1,1), %%tmm%c2|tileloaddt1 tmm%c2, [%0+%1]}"
               :
               : "r"(p), "r"(index_t{64}), "i"(T), "m"(*reinterpret_cast<const char(*)[1024]>(p)));
}

/// Tile T from, and to, 16 x 16 floats in rows of 32.
template <int T>
inline __attribute__((always_inline)) void load_sums(const float* p) noexcept {
  asm volatile("{tileloadd (%0,%1,1), %%tmm%c2|tileloadd tmm%c2, [%0+%1]}"
               :
               : "r"(p), "r"(index_t{128}), "i"(T), "m"(*reinterpret_cast<const char(*)[1984]>(p)));
}
template <int T>
inline __attribute__((always_inline)) void store_sums(float* p) noexcept {
  asm volatile("{tilestored %%tmm%c3, (%1,%2,1)|tilestored [%1+%2], tmm%c3}"
               : "+m"(*reinterpret_cast<char(*)[1984]>(p))
               : "r"(p), "r"(index_t{128}), "i"(T));
}

template <int T>
inline __attribute__((always_inline)) void clear() noexcept {
  asm volatile("{tilezero %%tmm%c0|tilezero tmm%c0}" : : "i"(T));
}

/// sums[16][16] += A B over 32 numbers of bfloat16, in float: A [16][32], B [16 pairs][16][2].
template <int Sums, int A, int B>
inline __attribute__((always_inline)) void multiply() noexcept {
  asm volatile("{tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0|tdpbf16ps tmm%c0, tmm%c1, tmm%c2}"
               :
               : "i"(Sums), "i"(A), "i"(B));
}

#endif  // ATTN_EMULATE_AMX

}  // namespace attn::simd::amx

#endif  // ATTN_HAS_AMX
