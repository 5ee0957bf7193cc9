# SPDX-License-Identifier: MIT
#
# cmake -D ROOT=<repository> -P readme.cmake: the example shown in README.md is examples/readme.cpp to the
# letter (its SPDX line and the empty line after it aside), and the headers in its table are there.
file(READ ${ROOT}/README.md readme)
file(READ ${ROOT}/examples/readme.cpp example)
string(REGEX REPLACE "^// SPDX[^\n]*\n+" "" example "${example}")
string(FIND "${readme}" "```cpp\n${example}```\n" position)
if(position EQUAL -1)
  message(FATAL_ERROR "README.md does not show examples/readme.cpp:\n${example}")
endif()

string(REGEX MATCHALL "`[a-z_]+\\.hpp`" headers "${readme}")
foreach(header IN LISTS headers)
  string(REPLACE "`" "" header "${header}")
  if(NOT EXISTS ${ROOT}/include/attn/${header})
    message(FATAL_ERROR "README.md names ${header}, which is not in include/attn/")
  endif()
endforeach()
