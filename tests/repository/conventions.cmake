# SPDX-License-Identifier: MIT
#
# cmake -D ROOT=<repository> -P conventions.cmake: what every source file has, as design and CONTRIBUTING
# promise it. Prints each breach and fails if there is one.
cmake_minimum_required(VERSION 3.25)
set(breaches "")
function(breach file text)
  cmake_path(RELATIVE_PATH file BASE_DIRECTORY ${ROOT})
  set(breaches "${breaches}${file}: ${text}\n" PARENT_SCOPE)
endfunction()

set(sources)
foreach(folder IN ITEMS include tests bench examples cmake tools)
  file(GLOB_RECURSE found ${ROOT}/${folder}/*.hpp ${ROOT}/${folder}/*.cpp ${ROOT}/${folder}/*.cmake
       ${ROOT}/${folder}/*.py ${ROOT}/${folder}/*.sh ${ROOT}/${folder}/CMakeLists.txt)
  list(APPEND sources ${found})
endforeach()
list(APPEND sources ${ROOT}/CMakeLists.txt ${ROOT}/.ci/run)

foreach(source IN LISTS sources)
  file(READ ${source} text)
  if(NOT text MATCHES "^(#![^\n]*\n)?(//|#) SPDX-License-Identifier: MIT\n")
    breach(${source} "does not begin with its SPDX line")
  endif()
  if(source MATCHES "\\.hpp$" AND NOT text MATCHES "\n#pragma once\n")
    breach(${source} "has no #pragma once")
  endif()
  if(text MATCHES "#include <xsimd" AND source MATCHES "\\.[ch]pp$" AND NOT source MATCHES "/include/attn/simd/")
    breach(${source} "includes xsimd, which only include/attn/simd/ may")
  endif()
  # **Example** examples/<file>: the reader is to find it, and ctest builds and runs what is there.
  set(examples)
  if(source MATCHES "/include/attn/")
    string(REGEX MATCHALL "examples/[a-z0-9_]+\\.cpp" examples "${text}")
  endif()
  foreach(example IN LISTS examples)
    if(NOT EXISTS ${ROOT}/${example})
      breach(${source} "names ${example}, which does not exist")
    endif()
  endforeach()
endforeach()

# attn.hpp is everything in the library.
file(READ ${ROOT}/include/attn/attn.hpp umbrella)
file(GLOB headers RELATIVE ${ROOT}/include ${ROOT}/include/attn/*.hpp)
list(REMOVE_ITEM headers attn/attn.hpp)
foreach(header IN LISTS headers)
  string(FIND "${umbrella}" "#include <${header}>\n" position)
  if(position EQUAL -1)
    breach(${ROOT}/include/attn/attn.hpp "does not include <${header}>")
  endif()
endforeach()

if(breaches)
  message(FATAL_ERROR "\n${breaches}")
endif()
list(LENGTH sources n_sources)
message(STATUS "${n_sources} files checked")
