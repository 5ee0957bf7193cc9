// SPDX-License-Identifier: MIT
#pragma once

// The one place where the version stands: CMakeLists.txt reads these three lines.
#define ATTN_VERSION_MAJOR 0
#define ATTN_VERSION_MINOR 1
#define ATTN_VERSION_PATCH 0

namespace attn {

/// Version of the library, as numbers for `if constexpr`; the ATTN_VERSION_* macros serve `#if`.
inline constexpr int version_major = ATTN_VERSION_MAJOR;
inline constexpr int version_minor = ATTN_VERSION_MINOR;
inline constexpr int version_patch = ATTN_VERSION_PATCH;

}  // namespace attn
