# SPDX-License-Identifier: MIT
#
# Each dependency is taken from the system; what is not there is fetched at a pinned version.
# Users of attn need the first function alone: Eigen, xsimd and threads.
#
# GLOBAL: an imported target is otherwise seen in its own folder and below, but a project that adds attn
# as a subfolder links attn::attn, and so Eigen3::Eigen, from above.
include(FetchContent)

# A header-only dependency. When it is fetched its own CMake is not run (SOURCE_SUBDIR names no folder),
# so its options, warnings and install rules stay out of this build.
macro(attn_header_dependency name target include_subdir url sha256)
  if(NOT TARGET ${target})
    FetchContent_Declare(
      ${name}
      URL ${url}
      URL_HASH SHA256=${sha256}
      SOURCE_SUBDIR not-built
      FIND_PACKAGE_ARGS CONFIG GLOBAL)
    FetchContent_MakeAvailable(${name})
    string(TOLOWER ${name} attn_lower_name)
    if(${attn_lower_name}_SOURCE_DIR AND NOT TARGET ${target})
      add_library(${target} INTERFACE IMPORTED GLOBAL)
      set_target_properties(
        ${target} PROPERTIES INTERFACE_INCLUDE_DIRECTORIES
                             "${${attn_lower_name}_SOURCE_DIR}/${include_subdir}")
    endif()
  endif()
endmacro()

# What every user of attn needs. No version is asked for: Eigen 3.4 accepts no range that leaves its
# major version, Eigen 5 does not accept 3.4, and xsimd accepts its own major version alone.
function(attn_find_library_dependencies)
  find_package(Threads REQUIRED GLOBAL)

  attn_header_dependency(
    Eigen3 Eigen3::Eigen "."
    https://gitlab.com/libeigen/eigen/-/archive/3.4.0/eigen-3.4.0.tar.bz2
    b4c198460eba6f28d34894e3a5710998818515104d6e74e5cc331ce31e46e626)
  if(Eigen3_VERSION AND Eigen3_VERSION VERSION_LESS 3.4)
    message(FATAL_ERROR "attn needs Eigen 3.4 or newer, found ${Eigen3_VERSION} in ${Eigen3_DIR}")
  endif()

  if(NOT TARGET attn::xsimd)
    attn_header_dependency(
      xsimd xsimd include https://github.com/xtensor-stack/xsimd/archive/13.2.0.tar.gz
      edd8cd3d548c185adc70321c53c36df41abe64c1fe2c67bc6d93c3ecda82447a)
    include(${CMAKE_CURRENT_FUNCTION_LIST_DIR}/attn_xsimd.cmake)
  endif()
endfunction()

# Catch2 2.13 or 3, as Catch2::Catch2WithMain.
function(attn_find_test_dependencies)
  FetchContent_Declare(
    Catch2
    URL https://github.com/catchorg/Catch2/archive/v3.6.0.tar.gz
    URL_HASH SHA256=485932259a75c7c6b72d4b874242c489ea5155d17efa345eb8cc72159f49f356
    SYSTEM FIND_PACKAGE_ARGS CONFIG GLOBAL)
  FetchContent_MakeAvailable(Catch2)

  # The Catch2 2 of a distribution is built for the host. A cross build takes its header and makes a main.
  if(CMAKE_CROSSCOMPILING AND Catch2_VERSION AND Catch2_VERSION VERSION_LESS 3)
    set(main_source ${PROJECT_BINARY_DIR}/catch_main.cpp)
    file(WRITE ${main_source} "#define CATCH_CONFIG_MAIN\n#include <catch2/catch.hpp>\n")
    add_library(attn_catch_main STATIC ${main_source})
    target_link_libraries(attn_catch_main PUBLIC Catch2::Catch2)
    target_compile_features(attn_catch_main PUBLIC cxx_std_20)
  else()
    add_library(attn_catch_main INTERFACE)
    target_link_libraries(attn_catch_main INTERFACE Catch2::Catch2WithMain)
  endif()
endfunction()

# Google Benchmark, CLI11 and nlohmann-json.
function(attn_find_bench_dependencies)
  set(BENCHMARK_ENABLE_TESTING OFF)
  set(BENCHMARK_ENABLE_INSTALL OFF)
  FetchContent_Declare(
    benchmark
    URL https://github.com/google/benchmark/archive/refs/tags/v1.8.2.tar.gz
    URL_HASH SHA256=2aab2980d0376137f969d92848fbb68216abb07633034534fc8c65cc4e7a0e93
    SYSTEM FIND_PACKAGE_ARGS CONFIG GLOBAL)
  FetchContent_MakeAvailable(benchmark)
  attn_header_dependency(
    CLI11 CLI11::CLI11 include https://github.com/CLIUtils/CLI11/archive/v2.4.2.tar.gz
    f2d893a65c3b1324c50d4e682c0cdc021dd0477ae2c048544f39eed6654b699a)
  attn_header_dependency(
    nlohmann_json nlohmann_json::nlohmann_json include
    https://github.com/nlohmann/json/releases/download/v3.11.3/json.tar.xz
    d6c65aca6b1ed68e7a182f4757257b107ae403032760ed6ef121c9d55e81757d)
endfunction()
