# SPDX-License-Identifier: MIT
#
# c++ main.cpp $(pkg-config --cflags --libs attn), then runs it.
cmake_minimum_required(VERSION 3.25)
set(ENV{PKG_CONFIG_PATH} ${PKG_CONFIG_PATH})
execute_process(
  COMMAND ${PKG_CONFIG} --modversion attn
  OUTPUT_VARIABLE version OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
if(NOT version STREQUAL VERSION)
  message(FATAL_ERROR "attn.pc is of version ${version}, expected ${VERSION}")
endif()
execute_process(
  COMMAND ${PKG_CONFIG} --cflags --libs attn
  OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
message(STATUS "pkg-config: ${flags}")
separate_arguments(flags UNIX_COMMAND "${CXX_FLAGS} ${flags}")
execute_process(
  COMMAND ${CXX} -std=c++20 ${CMAKE_CURRENT_LIST_DIR}/main.cpp -o ${PROGRAM} ${flags}
  COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${PROGRAM} COMMAND_ERROR_IS_FATAL ANY)
