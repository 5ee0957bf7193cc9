# SPDX-License-Identifier: MIT
#
# cmake -D ROOT=<repository> -P readme.cmake: the example shown in README.md is examples/readme.cpp to the
# letter (its SPDX line and the empty line after it aside), and its table names the headers of
# include/attn/, and no others.
cmake_minimum_required(VERSION 3.25)
file(READ ${ROOT}/README.md readme)
file(READ ${ROOT}/examples/readme.cpp example)
string(REGEX REPLACE "^// SPDX[^\n]*\n+" "" example "${example}")
string(FIND "${readme}" "```cpp\n${example}```\n" position)
if(position EQUAL -1)
  message(FATAL_ERROR "README.md does not show examples/readme.cpp:\n${example}")
endif()

string(REGEX MATCHALL "`[a-z_]+\\.hpp`" named "${readme}")
list(TRANSFORM named REPLACE "`" "")
file(GLOB headers RELATIVE ${ROOT}/include/attn ${ROOT}/include/attn/*.hpp)
foreach(header IN LISTS named)
  if(NOT header IN_LIST headers)
    message(FATAL_ERROR "README.md names ${header}, which is not in include/attn/")
  endif()
endforeach()
list(FILTER headers EXCLUDE REGEX "_options\\.hpp$") # these come with the header of their kernel
foreach(header IN LISTS headers)
  if(NOT header IN_LIST named)
    message(FATAL_ERROR "README.md does not say what ${header} is for")
  endif()
endforeach()
