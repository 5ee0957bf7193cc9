#!/bin/sh
# SPDX-License-Identifier: MIT
#
# shared_symbols.sh BASELINE.o WIDE.o, two objects of one source: fails if a function of attn that both
# emit computes on vectors. Of two functions of one name the linker keeps one, at will; if their lanes
# differ in number, the other's callers get wrong results. So a function that computes on vectors carries
# the architecture in its name (class Arch), and what both objects share is scalar.
#
# Vector moves and integers are let pass: compilers copy structs and unroll the loops of checks with them.
set -eu
baseline=$1 wide=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

functions_of_attn() { grep -E '^_Z+(GV)?N?K?4attn' || true; }
weak_functions() { nm --defined-only "$1" | awk '$2 == "W" { print $3 }' | functions_of_attn | sort; }
# Those with packed floating-point arithmetic: mulps, vmaxpd, vfmadd231ps, ...
vector_functions() {
  objdump -d --no-show-raw-insn "$1" | awk '
    /^[0-9a-f]+ <.*>:$/ { name = substr($2, 2, length($2) - 3) }
    $2 ~ /^(v?(add|sub|mul|div|max|min|sqrt)|vfn?m(add|sub)[123]+|v(reduce|scalef|rndscale))p[sdh]$/ { print name }' |
    functions_of_attn | sort -u
}
for object in baseline wide; do
  eval "file=\$$object"
  weak_functions "$file" >"$work/$object.weak"
  vector_functions "$file" >"$work/$object.vector"
done
comm -12 "$work/baseline.weak" "$work/wide.weak" >"$work/shared"
sort -u "$work/baseline.vector" "$work/wide.vector" | comm -12 "$work/shared" - >"$work/breaches"

count() { wc -l <"$1" | tr -d ' '; }
echo "functions of attn: $(count "$work/baseline.weak") and $(count "$work/wide.weak")," \
  "$(count "$work/shared") shared; computing on vectors: $(count "$work/baseline.vector") and" \
  "$(count "$work/wide.vector"), $(count "$work/breaches") shared"
c++filt <"$work/breaches"
# Kernels in each object, scalar functions in both: else the test would be looking at the wrong names.
for kind in shared baseline.vector wide.vector; do [ -s "$work/$kind" ]; done
[ ! -s "$work/breaches" ]
