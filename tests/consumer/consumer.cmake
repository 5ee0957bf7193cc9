# SPDX-License-Identifier: MIT
#
# Included by each consumer once attn::attn is there.
foreach(property IN ITEMS INTERFACE_COMPILE_OPTIONS INTERFACE_COMPILE_DEFINITIONS INTERFACE_LINK_OPTIONS)
  get_target_property(value attn::attn ${property})
  if(value)
    message(FATAL_ERROR "attn::attn hands its users ${property} ${value}")
  endif()
endforeach()
foreach(target IN ITEMS attn_development attn_catch_main attn_compare benchmark::benchmark)
  if(TARGET ${target})
    message(FATAL_ERROR "attn brings ${target} into the project of its user")
  endif()
endforeach()

add_executable(consumer ${CMAKE_CURRENT_LIST_DIR}/main.cpp)
target_link_libraries(consumer PRIVATE attn::attn)
