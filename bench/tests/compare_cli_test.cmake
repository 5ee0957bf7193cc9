# SPDX-License-Identifier: MIT
#
# The command line of attn_compare: what it prints, what it refuses and how.
#   cmake -D ATTN_COMPARE=<program> -D BENCH_DIR=<bench folder> -P compare_cli_test.cmake
set(data ${BENCH_DIR}/data/minilm_qkv.safetensors)
set(work ${CMAKE_CURRENT_BINARY_DIR}/compare_cli_test)
file(REMOVE_RECURSE ${work})
file(MAKE_DIRECTORY ${work})
set(ENV{LC_ALL} C)

function(fail text)
  message(SEND_ERROR "${text}\nexit code: ${code}\nstdout: ${out}\nstderr: ${err}")
endfunction()

macro(run)
  execute_process(
    COMMAND ${ATTN_COMPARE} ${ARGN}
    WORKING_DIRECTORY ${work}
    RESULT_VARIABLE code
    OUTPUT_VARIABLE out
    ERROR_VARIABLE err)
endmacro()

# expect_success(<regex of stdout> <arguments>...): nothing on stderr but, on a slow machine, progress.
function(expect_success pattern)
  run(${ARGN})
  if(NOT code EQUAL 0
     OR NOT err MATCHES "^([a-z0-9-]+: (call [0-9]+ of [0-9]+|what it captures) \\.\\.\\.\n)*$"
     OR NOT out MATCHES "${pattern}")
    fail("attn_compare ${ARGN}: expected success and '${pattern}'")
  endif()
endfunction()

# expect_refusal(<message> <arguments>...): exit code 2, that one line on stderr, nothing on stdout.
function(expect_refusal message)
  run(${ARGN})
  if(NOT code EQUAL 2
     OR NOT out STREQUAL ""
     OR NOT err STREQUAL "attn_compare: ${message}\n")
    fail("attn_compare ${ARGN}: expected exit code 2 and '${message}'")
  endif()
endfunction()

# The same where the words are those of CLI11 and differ between its versions.
function(expect_refusal_naming word)
  run(${ARGN})
  if(NOT code EQUAL 2
     OR NOT out STREQUAL ""
     OR NOT err MATCHES "^attn_compare: [^\n]*${word}[^\n]*\n$")
    fail("attn_compare ${ARGN}: expected exit code 2 and a line with '${word}'")
  endif()
endfunction()

# edited(<file> <sed script>): the captured file with the same number of bytes and another header.
function(edited file script)
  execute_process(
    COMMAND sed "1s/${script}/" ${data}
    OUTPUT_FILE ${work}/${file}
    RESULT_VARIABLE code)
  if(NOT code EQUAL 0)
    message(SEND_ERROR "sed failed on ${script}")
  endif()
endfunction()

# 1. Help, version, list.
expect_success("--random.*--json.*--threads|--random.*--threads.*--json" --help)
expect_success("^[0-9]+\\.[0-9]+\\.[0-9]+\n$" --version)
expect_success("^eigen +[^\n]+\neigen-blocked +[^\n]+\ndense +[^\n]+\n" --list)

# 2. The table, from a file and from noise, in every type.
set(row " +[0-9.]+ +[0-9.]+ +[0-9.]+% +([0-9.]+ [KMG]?i?B|n/a) +[0-9.]+e-[0-9]+ +[0-9.]+e-[0-9]+ +100.0%\n")
expect_success(
  "q \\[3, 12, 512, 32\\].*float32.*method +ms +GFLOP/s +of peak +extra memory +max error +rel. error +captured\neigen${row}.*dense${row}.*all rows"
  ${data} --repeat 1 --json real.json)
foreach(dtype IN ITEMS float32 float64 float16 bfloat16)
  expect_success("random: q \\[1, 2, 65, 8\\].*${dtype}, causal, 2 threads.*dense${row}" --random 1,2,65,8
                 --dtype ${dtype} --causal --threads 2 --repeat 2)
endforeach()
expect_success("captured\ndense${row}eigen${row}\n" --random 1,1,16,4 --repeat 1 --method dense,eigen)

# Families: one row per member; half of the keys, met or seen, hold less than all of the attention.
expect_success(
  "captured\nblockwise-64 [^\n]* [0-9][0-9]?\\.[0-9]%\npooled-64 [^\n]* n/a\nsmyrf-2x32 [^\n]* [0-9][0-9]?\\.[0-9]%\nbisection-2x32 [^\n]* [0-9][0-9]?\\.[0-9]%\nbisection-removed-2x32 [^\n]* [0-9][0-9]?\\.[0-9]%\nbisection-far-2x32 [^\n]* [0-9][0-9]?\\.[0-9]%\nsmyrf-3x48 +left out: as many"
  --random 1,2,128,16 --repeat 1 --block 64 --k 64 --smyrf 2x32,3x48 --method
  blockwise-64,pooled-64,smyrf-2x32,bisection-2x32,bisection-removed-2x32,bisection-far-2x32,smyrf-3x48)
expect_success("captured\nbisection-removed-2x32 [^\n]*%\nbisection-far-2x32 +left out: the means are of all"
               --random 1,2,128,16 --causal --repeat 1 --smyrf 2x32 --method bisection-removed-2x32,bisection-far-2x32)

# 3. As JSON: the error is at rounding level, the times are positive.
function(check_json file error_bound)
  file(READ ${work}/${file} json)
  string(JSON n LENGTH ${json} methods)
  if(n LESS 3)
    fail("${file}: ${n} methods")
  endif()
  math(EXPR last "${n} - 1")
  foreach(i RANGE ${last})
    string(JSON name GET ${json} methods ${i} method)
    string(JSON reason ERROR_VARIABLE was_run GET ${json} methods ${i} left_out)
    if(NOT was_run)
      continue()
    endif()
    foreach(key IN ITEMS ms gflops of_peak)
      string(JSON value GET ${json} methods ${i} ${key})
      if(NOT value GREATER 0)
        fail("${file}: ${key} of ${name} is ${value}")
      endif()
    endforeach()
    if(name MATCHES "^(eigen|eigen-blocked|dense)$")
      foreach(key IN ITEMS max_error relative_error)
        string(JSON value GET ${json} methods ${i} ${key})
        if(NOT value LESS ${error_bound} OR value LESS 0)
          fail("${file}: ${key} of ${name} is ${value}, expected less than ${error_bound}")
        endif()
      endforeach()
    endif()
    string(JSON bytes GET ${json} methods ${i} peak_extra_bytes)
  endforeach()
endfunction()
check_json(real.json 2e-5)
expect_success("" --random 1,3,100,20 --dtype float64 --repeat 1 --json double.json)
check_json(double.json 1e-13)
file(READ ${work}/double.json json)
foreach(pair IN ITEMS "batch=1" "heads=3" "kv_heads=3" "n_q=100" "n_kv=100" "d_qk=20" "d_v=20")
  string(REPLACE "=" ";" pair ${pair})
  list(POP_FRONT pair key expected)
  string(JSON value GET ${json} shape ${key})
  if(NOT value EQUAL expected)
    fail("shape.${key} is ${value}, expected ${expected}")
  endif()
endforeach()

# 4. Options that make no sense.
set(form "expected B,H,L,D: four whole numbers from 1 up")
expect_refusal("expected either FILE or --random B,H,L,D (see --help)")
expect_refusal("expected either FILE or --random B,H,L,D (see --help)" ${data} --random 1,1,1,1)
foreach(shape IN ITEMS 1,2,3 1,2,3,4,5 1,2,3,4x 1,2,3, 0,1,1,1 1,1,-1,1 a,b,c,d 1.5,1,1,1)
  expect_refusal("--random is \"${shape}\", ${form}" --random ${shape})
endforeach()
foreach(shape IN ITEMS 1,1,1000000000,64 4294967296,4294967296,1,1 1,99999999999999999999,1,1)
  expect_refusal("--random is \"${shape}\", more than this machine's memory" --random ${shape})
endforeach()
foreach(sizes IN ITEMS 4 4x 4x0 0x32 x32 4x32, 4x32x2 4*32 -4x32 4x99999999999999999999)
  expect_refusal("--smyrf is \"${sizes}\", expected rounds x keys per cluster as in 4x32,2x64" --random 1,1,1,1 --smyrf
                 "${sizes}")
endforeach()
expect_refusal_naming(--bogus --bogus)
expect_refusal_naming(second.file ${data} second.file)
expect_refusal_naming(--threads --random 1,1,1,1 --threads 0)
expect_refusal_naming(--threads --random 1,1,1,1 --threads two)
expect_refusal_naming(--repeat --random 1,1,1,1 --repeat 0)
expect_refusal_naming(--json --random 1,1,1,1 --json)
expect_refusal_naming(--dtype --random 1,1,1,1 --dtype int8)
expect_refusal("--method: there is no \"sparse\" (see --list)" ${data} --method dense,sparse)
expect_refusal("no/folder/x.json: cannot be written" --random 1,1,1,1 --json no/folder/x.json)

# 5. Files that are missing, truncated, mis-typed or lie. The header of the captured file says
# "q": {"dtype": "F16", "shape": [3, 12, 512, 32], "data_offsets": [0, 1179648]}, ...
expect_refusal("missing.safetensors: no such file" missing.safetensors)
expect_refusal("${work}: not a regular file" ${work})
file(WRITE ${work}/empty.safetensors "")
expect_refusal("empty.safetensors: has 0 bytes, too few for a safetensors file" empty.safetensors)
file(WRITE ${work}/text.safetensors "aaaaaaaa{}")
expect_refusal("text.safetensors: header length 7016996765293437281 goes past the file's 10 bytes" text.safetensors)
execute_process(COMMAND head -c 3000000 ${data} OUTPUT_FILE ${work}/truncated.safetensors)
run(truncated.safetensors)
if(NOT code EQUAL 2 OR NOT err MATCHES
   "^attn_compare: truncated.safetensors: tensor \"v\": data_offsets \\[2359296, 3538944\\] go past the [0-9]+ bytes of data\n$")
  fail("truncated.safetensors")
endif()

set(q "tensor \"q\": ")
edited(twice.safetensors "\"v\":/\"q\":")
expect_refusal("twice.safetensors: header has \"q\" twice" twice.safetensors)
edited(unnamed.safetensors "\"v\":/\"w\":")
expect_refusal("unnamed.safetensors: has no tensor \"v\" or \"value\" (see --tensors)" unnamed.safetensors)
expect_success("dense" unnamed.safetensors --tensors q,k,w --repeat 1)
edited(mistyped.safetensors "F16/F32")
expect_refusal(
  "mistyped.safetensors: ${q}data_offsets [0, 1179648] hold 1179648 bytes, expected 2359296 (shape and dtype)"
  mistyped.safetensors)
edited(unknown.safetensors "F16/F15")
expect_refusal("unknown.safetensors: ${q}dtype \"F15\" is unknown" unknown.safetensors)
edited(integers.safetensors "F16/I16")
expect_refusal("integers.safetensors: tensor \"q\" is I16, expected F16, BF16, F32 or F64" integers.safetensors)
edited(shape.safetensors "12, 512/12, 513")
expect_refusal(
  "shape.safetensors: ${q}data_offsets [0, 1179648] hold 1179648 bytes, expected 1181952 (shape and dtype)"
  shape.safetensors)
edited(past_end.safetensors "\\[0, 1179648\\]/[0, 9179648]")
expect_refusal("past_end.safetensors: ${q}data_offsets [0, 9179648] go past the 3538944 bytes of data"
               past_end.safetensors)
edited(broken.safetensors "{/[")
run(broken.safetensors)
if(NOT code EQUAL 2 OR NOT err MATCHES "^attn_compare: broken.safetensors: header is not JSON \\(byte [0-9]+\\)\n$")
  fail("broken.safetensors")
endif()

# Three good tensors that do not belong together.
edited(heads.safetensors "\\(\"k\".*\\)12, 512, 32\\]\\(.*\\)12, 512, 32\\]/\\18, 768, 32] \\28, 768, 32] ")
expect_refusal("heads.safetensors: k is [3, 8, 768, 32], expected heads that divide 12 (heads of q)" heads.safetensors)
edited(unfit.safetensors "\\(\"v\".*\\)\\[3, 12, 512, 32\\]/\\1[3, 12, 32, 512]")
expect_refusal("unfit.safetensors: v is [3, 12, 32, 512], expected length 512 (length of k)" unfit.safetensors)
