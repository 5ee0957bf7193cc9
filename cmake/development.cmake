# SPDX-License-Identifier: MIT
#
# Flags for the tests, benchmarks and examples of this repository: attn_development is never exported.
option(ATTN_WERROR "Treat warnings as errors" OFF)
set(ATTN_ARCH_FLAGS "" CACHE STRING "Instruction set of tests, benchmarks and examples, e.g. -march=native")

add_library(attn_development INTERFACE)
target_link_libraries(attn_development INTERFACE attn::attn)
separate_arguments(attn_arch_flags UNIX_COMMAND "${ATTN_ARCH_FLAGS}")
target_compile_options(
  attn_development
  INTERFACE ${attn_arch_flags}
            -Wall
            -Wextra
            -Wpedantic
            -Wconversion
            -Wshadow
            $<$<BOOL:${ATTN_WERROR}>:-Werror>)

# GCC before 13 calls the operand of its own AVX-512 intrinsics uninitialised, system header or not.
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(attn_development INTERFACE -Wno-uninitialized -Wno-maybe-uninitialized)
endif()

# attn_executable(<target> <output name> <sources>... [LIBRARIES <targets>...])
function(attn_executable target output)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "" "LIBRARIES")
  add_executable(${target} ${arg_UNPARSED_ARGUMENTS})
  set_target_properties(${target} PROPERTIES OUTPUT_NAME ${output} CXX_EXTENSIONS OFF)
  target_link_libraries(${target} PRIVATE attn_development ${arg_LIBRARIES})
endfunction()

# attn_helper_library(<target> <folder> [LIBRARIES <targets>...]): the sources of a folder, which may hold
# headers alone. Included as "<folder>/<file>" from the folder that calls.
function(attn_helper_library target folder)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "" "LIBRARIES")
  file(GLOB sources CONFIGURE_DEPENDS ${folder}/*.cpp)
  if(sources)
    add_library(${target} STATIC ${sources})
    set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF)
    target_include_directories(${target} PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
    target_link_libraries(${target} PUBLIC attn_development ${arg_LIBRARIES})
  else()
    add_library(${target} INTERFACE)
    target_include_directories(${target} INTERFACE ${CMAKE_CURRENT_SOURCE_DIR})
    target_link_libraries(${target} INTERFACE attn_development ${arg_LIBRARIES})
  endif()
endfunction()
