# Disassembles OBJECT, whose chains meet as JOINT, for GFX and checks what the arithmetic ids rest on: fused multiply-adds, no
# register spilled, rounding to nearest even with subnormals kept, and matrix-core instructions where they are promised.
cmake_minimum_required(VERSION 3.25)
foreach(tool IN ITEMS CLANG_OFFLOAD_BUNDLER LLVM_OBJCOPY LLVM_OBJDUMP)
  if(NOT RLK_${tool})
    message("[skip] ${tool} is not installed (./tools/install hip)")
    return()
  endif()
endforeach()
if(NOT EXISTS ${OBJECT})
  message(FATAL_ERROR "${OBJECT} is not built")
endif()

# The bundler runs llvm-objcopy by that name, which Debian has in LLVM's own folder only.
get_filename_component(objcopy ${RLK_LLVM_OBJCOPY} REALPATH)
get_filename_component(folder ${objcopy} DIRECTORY)
set(ENV{PATH} "${folder}:$ENV{PATH}")

set(bundle ${WORK}/${GFX}.bundle)
set(code ${WORK}/${GFX}.o)
execute_process(COMMAND ${RLK_LLVM_OBJCOPY} --dump-section .hip_fatbin=${bundle} ${OBJECT} ${WORK}/${GFX}.rest
                COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${RLK_CLANG_OFFLOAD_BUNDLER} --unbundle --type=o --input=${bundle}
                        --targets=hipv4-amdgcn-amd-amdhsa--${GFX} --output=${code} COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${RLK_LLVM_OBJDUMP} -d --no-show-raw-insn --mcpu=${GFX} ${code} OUTPUT_VARIABLE text
                COMMAND_ERROR_IS_FATAL ANY)

# kernel(<out> <words of its mangled name>): its instructions.
function(kernel out words)
  if(NOT text MATCHES "<([^>]*${words}[^>]*)>:")
    message(FATAL_ERROR "${GFX}: no kernel named ${words}")
  endif()
  execute_process(COMMAND ${RLK_LLVM_OBJDUMP} -d --no-show-raw-insn --mcpu=${GFX} --disassemble-symbols=${CMAKE_MATCH_1}
                          ${code} OUTPUT_VARIABLE body COMMAND_ERROR_IS_FATAL ANY)
  set(${out} "${body}" PARENT_SCOPE)
endfunction()
function(count out operations body)
  string(REGEX MATCHALL "\n\t(${operations})" found "${body}")
  list(LENGTH found number)
  set(${out} ${number} PARENT_SCOPE)
endfunction()
function(expect what least actual)
  if(actual LESS least)
    message(FATAL_ERROR "${GFX}: ${what}: ${actual}, expected at least ${least}")
  endif()
  message("${GFX}: ${what}: ${actual}")
endfunction()
function(forbid what operations body)
  count(number "${operations}" "${body}")
  if(number GREATER 0)
    message(FATAL_ERROR "${GFX}: ${what}: ${number}, expected none")
  endif()
endfunction()

# A thread's outputs times the steps of a tile, at least: 4 or 16 times 16.
foreach(tall IN ITEMS 1 4)
  math(EXPR least "${tall} * 4 * 16")
  string(LENGTH ${JOINT} length)
  kernel(body "chain_productIf[^>]*${length}${JOINT}ELi${tall}E")
  count(fused "v_fma_f32|v_fmac_f32|v_dual_fmac_f32" "${body}")
  count(packed "v_pk_fma_f32" "${body}")
  string(REGEX MATCHALL ":: v_dual_fmac_f32" paired "${body}")  # the second half of an instruction of two
  list(LENGTH paired paired)
  math(EXPR fused "${fused} + 2 * ${packed} + ${paired}")
  expect("fp32 fused multiply-adds, ${tall} rows a thread, blocks joined as a ${JOINT}" ${least} ${fused})
  forbid("matrix-core instructions in the fp32 chain" "v_mfma" "${body}")
endforeach()
# linear's, which keep the waiting sums of the tree in memory: the rest is lm_head's alone.
if(JOINT STREQUAL Tree)
  return()
endif()

foreach(tall IN ITEMS 1 4)
  math(EXPR least "${tall} * 4 * 16")
  kernel(body "chain_productId[^>]*3RowELi${tall}E")
  count(fused "v_fma_f64|v_fmac_f64" "${body}")
  expect("fp64 fused multiply-adds, ${tall} rows a thread" ${least} ${fused})
  forbid("matrix-core instructions in the fp64 chain" "v_mfma" "${body}")
  if(GFX STREQUAL gfx90a OR GFX STREQUAL gfx942)
    kernel(body "mfma_productILi${tall}")
    count(matrix "v_mfma_f32_16x16x16_?bf16" "${body}")
    math(EXPR least "${tall} * 2")
    expect("bf16 matrix-core instructions, ${tall} column tiles a wave" ${least} ${matrix})
  endif()
endforeach()
forbid("spills to memory" "scratch_" "${text}")

# llvm-objdump 19 does not read the kernel descriptors of gfx11.
if(GFX MATCHES "^gfx9")
  execute_process(COMMAND ${RLK_LLVM_OBJDUMP} -D -j .rodata --mcpu=${GFX} ${code} OUTPUT_VARIABLE text
                  COMMAND_ERROR_IS_FATAL ANY)
  foreach(mode IN ITEMS "float_round_mode_32 0" "float_round_mode_16_64 0" "float_denorm_mode_32 3"
                        "float_denorm_mode_16_64 3")
    string(REGEX MATCHALL "amdhsa_${mode}" found "${text}")
    list(LENGTH found number)
    expect("kernels with ${mode}" 6 ${number})
  endforeach()
endif()
