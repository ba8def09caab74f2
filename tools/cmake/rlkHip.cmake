# rlk_hip_objects(<target> ARCHITECTURES <list> FLAGS <list> SOURCES <files...>): compiles HIP sources for these GPUs and adds
# them to a target.
#
# By custom commands rather than CMake's HIP language, which does not recognise Debian's split of HIP (its clang, its
# headers and its device libraries are three packages of three versions). What is found: RLK_HIP_FOUND,
# RLK_HIP_MISSING.
#
# The device libraries of HIP 5.2 lack the file that tells newer GPUs apart, oclc_isa_version_<gfx>.bc, although
# nothing else in them depends on it. Such a file defines one constant, so it is made here with llvm-as.
include_guard(GLOBAL)

set(RLK_HIP_ARCHITECTURES "gfx90a;gfx942;gfx1100" CACHE STRING "AMD GPUs to compile for; matrix-core kernels always are for theirs")
set(RLK_HIP_FLAGS -O3 CACHE STRING "How portable kernels are optimised for AMD GPUs; -O0 compiles in a seventh of the time")
find_program(RLK_HIP_CLANG NAMES clang++-19 clang++ HINTS /opt/rocm/llvm/bin DOC "clang++ that knows HIP")
find_program(RLK_HIP_LLVM_AS NAMES llvm-as-19 llvm-as HINTS /opt/rocm/llvm/bin)
find_program(RLK_HIP_LLVM_DIS NAMES llvm-dis-19 llvm-dis HINTS /opt/rocm/llvm/bin)
find_program(RLK_HIP_LLD NAMES ld.lld-19 ld.lld HINTS /opt/rocm/llvm/bin)
find_path(RLK_HIP_INCLUDE hip/hip_version.h HINTS /opt/rocm/include)
find_library(RLK_HIP_LIBRARY amdhip64 HINTS /opt/rocm/lib)
find_path(RLK_HIP_BITCODE ocml.bc HINTS /opt/rocm/amdgcn/bitcode
          PATHS /usr/lib/${CMAKE_LIBRARY_ARCHITECTURE}/amdgcn/bitcode /usr/lib/x86_64-linux-gnu/amdgcn/bitcode
          DOC "Folder of AMD device libraries")

set(RLK_HIP_MISSING "")
foreach(part IN ITEMS CLANG LLVM_AS LLVM_DIS LLD INCLUDE LIBRARY BITCODE)
  if(NOT RLK_HIP_${part})
    list(APPEND RLK_HIP_MISSING ${part})
  endif()
  mark_as_advanced(RLK_HIP_${part})
endforeach()
if(RLK_HIP_MISSING)
  set(RLK_HIP_FOUND FALSE)
  list(JOIN RLK_HIP_MISSING ", " RLK_HIP_MISSING)
  string(TOLOWER "HIP (${RLK_HIP_MISSING})" RLK_HIP_MISSING)
  return()
endif()
set(RLK_HIP_FOUND TRUE)

# hip_version.h -> 5.2.21153
set(version "")
file(STRINGS ${RLK_HIP_INCLUDE}/hip/hip_version.h lines REGEX "#define HIP_VERSION_(MAJOR|MINOR|PATCH)")
foreach(line IN LISTS lines)
  string(REGEX MATCH "[0-9]+$" number "${line}")
  list(APPEND version ${number})
endforeach()
list(JOIN version "." RLK_HIP_VERSION)

# gfx90a -> 9010, gfx942 -> 9402, gfx1100 -> 11000: major, minor, stepping in hexadecimal
function(rlk_hip_isa_number gfx out)
  string(REGEX MATCH "^gfx([0-9]+)([0-9])([0-9a-f])$" ok ${gfx})
  if(NOT ok)
    message(FATAL_ERROR "RLK_HIP_ARCHITECTURES: '${gfx}' is not the name of an AMD GPU")
  endif()
  math(EXPR number "${CMAKE_MATCH_1} * 1000 + ${CMAKE_MATCH_2} * 100 + 0x${CMAKE_MATCH_3}")
  set(${out} ${number} PARENT_SCOPE)
endfunction()

# The folder of device libraries with nothing missing: the system's own, or a copy with the missing files added.
function(rlk_hip_complete_bitcode out)
  set(missing "")
  foreach(gfx IN LISTS ARGN)
    string(SUBSTRING ${gfx} 3 -1 isa)
    if(NOT EXISTS ${RLK_HIP_BITCODE}/oclc_isa_version_${isa}.bc)
      list(APPEND missing ${gfx})
    endif()
  endforeach()
  if(NOT missing)
    set(${out} ${RLK_HIP_BITCODE} PARENT_SCOPE)
    return()
  endif()
  set(folder ${PROJECT_BINARY_DIR}/hip-bitcode)
  file(MAKE_DIRECTORY ${folder})
  file(GLOB files ${RLK_HIP_BITCODE}/*.bc)
  foreach(file IN LISTS files)
    get_filename_component(name ${file} NAME)
    file(CREATE_LINK ${file} ${folder}/${name} SYMBOLIC)
  endforeach()
  # The data layout must be the one of the other files.
  list(GET files 0 any)
  execute_process(COMMAND ${RLK_HIP_LLVM_DIS} ${any} -o - OUTPUT_VARIABLE text COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCH "target datalayout = \"[^\"]*\"" layout "${text}")
  foreach(gfx IN LISTS missing)
    string(SUBSTRING ${gfx} 3 -1 isa)
    rlk_hip_isa_number(${gfx} number)
    file(WRITE ${folder}/${isa}.ll "${layout}\ntarget triple = \"amdgcn-amd-amdhsa\"\n"
         "@__oclc_ISA_version = linkonce_odr hidden local_unnamed_addr addrspace(4) constant i32 ${number}, align 4\n")
    execute_process(COMMAND ${RLK_HIP_LLVM_AS} ${folder}/${isa}.ll -o ${folder}/oclc_isa_version_${isa}.bc
                    COMMAND_ERROR_IS_FATAL ANY)
  endforeach()
  set(${out} ${folder} PARENT_SCOPE)
endfunction()

function(rlk_hip_objects target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "ARCHITECTURES;FLAGS;SOURCES")
  rlk_hip_complete_bitcode(bitcode ${arg_ARCHITECTURES})
  set(launcher "")
  if(CMAKE_CXX_COMPILER_LAUNCHER)
    set(launcher ${CMAKE_CXX_COMPILER_LAUNCHER})
  endif()
  get_filename_component(rocm ${RLK_HIP_INCLUDE} DIRECTORY)
  # A loop that the compiler leaves rolled for one of the GPUs is no error.
  set(warnings -Wall -Wextra -Wno-pass-failed)
  if(RLK_WARNINGS_AS_ERRORS)
    list(APPEND warnings -Werror)
  endif()
  set(includes "$<TARGET_PROPERTY:${target},INCLUDE_DIRECTORIES>")
  foreach(source IN LISTS arg_SOURCES)
    get_filename_component(source ${source} ABSOLUTE)
    file(RELATIVE_PATH shown ${PROJECT_SOURCE_DIR} ${source})
    set(object ${PROJECT_BINARY_DIR}/hip/${shown}.o)
    get_filename_component(folder ${object} DIRECTORY)
    add_custom_command(
      OUTPUT ${object}
      COMMAND ${CMAKE_COMMAND} -E make_directory ${folder}
      COMMAND ${launcher} ${RLK_HIP_CLANG} -x hip --rocm-path=${rocm} --hip-version=${RLK_HIP_VERSION}
              --rocm-device-lib-path=${bitcode} "--offload-arch=$<JOIN:${arg_ARCHITECTURES},;--offload-arch=>"
              -mcode-object-version=4 ${arg_FLAGS} -std=c++20 -fPIC -fvisibility=hidden -ffp-contract=off ${warnings}
              "$<$<BOOL:${includes}>:-I$<JOIN:${includes},;-I>>"
              -MD -MF ${object}.d -MT ${object} -c ${source} -o ${object}
      DEPENDS ${source} DEPFILE ${object}.d COMMAND_EXPAND_LISTS VERBATIM
      COMMENT "Building HIP object ${shown}")
    target_sources(${target} PRIVATE ${object})
  endforeach()
  add_dependencies(${target} rlk_ops_header)
  target_link_libraries(${target} PRIVATE ${RLK_HIP_LIBRARY})
endfunction()
