// SPDX-License-Identifier: MIT
#pragma once

// Catch2 3 has many headers, Catch2 2 has one; the macros used by the tests are in both.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif
