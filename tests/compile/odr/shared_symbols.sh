#!/bin/sh
# SPDX-License-Identifier: MIT
#
# shared_symbols.sh BASELINE.o WIDE.o: fails if a function of attn that both objects may emit holds AVX code
# in the wide one. The linker keeps one of the two at will, so the baseline's caller may get the wide body
# and stop with SIGILL on the machines it was built for.
set -eu
baseline=$1 wide=$2

weak_functions() { nm --defined-only "$1" | awk '$2 == "W" { print $3 }' | sort; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
weak_functions "$baseline" >"$work/baseline"
weak_functions "$wide" >"$work/wide"
comm -12 "$work/baseline" "$work/wide" | grep -E '^_Z+(GV|TV|TI|TS)?N?K?4attn' >"$work/shared" || true

# Functions whose code names a vector register of 32 or 64 bytes.
objdump -d --no-show-raw-insn "$wide" | awk '
  /^[0-9a-f]+ <.*>:$/ { name = substr($2, 2, length($2) - 3) }
  /%[yz]mm[0-9]/      { if (!(name in seen)) { seen[name] = 1; print name } }' | sort >"$work/vector"

comm -12 "$work/shared" "$work/vector" >"$work/breaches"
count() { wc -l <"$1" | tr -d ' '; }
echo "$(count "$work/baseline") and $(count "$work/wide") weak functions, $(count "$work/shared") of attn shared," \
  "$(count "$work/breaches") of them with AVX code"
c++filt <"$work/breaches"
# Both objects came from one source: nothing shared would mean that the test looks at the wrong names.
[ "$(count "$work/shared")" -gt 0 ] && [ "$(count "$work/breaches")" -eq 0 ]
