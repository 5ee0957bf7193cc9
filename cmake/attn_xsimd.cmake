# SPDX-License-Identifier: MIT
#
# attn::xsimd is the include folder of xsimd and nothing else. The build and the installed
# attnConfig.cmake both include this file.
#
# Why not xsimd's own target: Debian 12 exports it with `xtl` as a link library that its config never
# looks for, and a program that links it ends in "cannot find -lxtl". Why no version in find_package:
# xsimd's version file accepts one major version only, and attn works with 8.1 to 14.
if(NOT TARGET attn::xsimd)
  if(NOT TARGET xsimd)
    find_package(xsimd CONFIG QUIET)
  endif()
  if(xsimd_VERSION AND xsimd_VERSION VERSION_LESS 8.1)
    message(FATAL_ERROR "attn needs xsimd 8.1 or newer, found ${xsimd_VERSION} in ${xsimd_DIR}")
  endif()
  if(TARGET xsimd)
    get_target_property(attn_xsimd_include_dirs xsimd INTERFACE_INCLUDE_DIRECTORIES)
    # GLOBAL: who adds attn as a subfolder links it from the folder above.
    add_library(attn::xsimd INTERFACE IMPORTED GLOBAL)
    set_target_properties(attn::xsimd PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${attn_xsimd_include_dirs}")
    unset(attn_xsimd_include_dirs)
  endif()
endif()
