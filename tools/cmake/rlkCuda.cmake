# Finds a CUDA compiler: CUDACXX, PATH, the usual toolkit folder, or the wheels that tools/install puts in the user's
# cache. Sets RLK_CUDA_FOUND and, when found, CMAKE_CUDA_COMPILER for enable_language(CUDA).
#
# rlk_cuda_objects(<target> ARCHITECTURES <list> SOURCES <files...>): adds .cu files compiled for these
# architectures. One plugin holds both files that only sm_90a can run and portable ones, and CMake's
# CUDA_ARCHITECTURES is a property of a target: hence an object library for each.
include_guard(GLOBAL)

if(DEFINED ENV{XDG_CACHE_HOME})
  set(cache $ENV{XDG_CACHE_HOME})
else()
  set(cache $ENV{HOME}/.cache)
endif()
find_program(RLK_NVCC nvcc HINTS ENV CUDACXX_FOLDER ENV CUDA_PATH PATH_SUFFIXES bin
             PATHS /usr/local/cuda/bin ${cache}/rlk/cuda/bin DOC "The CUDA compiler")
if(DEFINED ENV{CUDACXX})
  set(RLK_NVCC $ENV{CUDACXX} CACHE FILEPATH "The CUDA compiler" FORCE)
endif()
mark_as_advanced(RLK_NVCC)
set(RLK_CUDA_ARCHITECTURES "80;90-real" CACHE STRING "NVIDIA GPUs to compile portable kernels for; Hopper's own always are")
set(RLK_CUDA_FLAGS "" CACHE STRING "More for the CUDA compiler; -Ofc=max compiles in a sixth of the time, to slow kernels")

set(RLK_CUDA_MISSING "nvcc")
set(RLK_CUDA_FOUND FALSE)
if(CMAKE_CUDA_COMPILER OR RLK_NVCC)
  if(NOT CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER ${RLK_NVCC})
  endif()
  execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --version OUTPUT_VARIABLE text ERROR_QUIET)
  string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" ignored "${text}")
  if("${CMAKE_MATCH_1}" VERSION_GREATER_EQUAL 12.8)
    set(RLK_CUDA_FOUND TRUE)
    # FindCUDAToolkit looks for nvcc in the path only, and that of CMake 3.25 sets a property of a target whose library CUDA
    # 13 no longer has.
    get_filename_component(nvcc ${CMAKE_CUDA_COMPILER} REALPATH)
    get_filename_component(CUDAToolkit_ROOT ${nvcc}/../.. ABSOLUTE)
    if(NOT TARGET CUDA::nvToolsExt)
      add_library(CUDA::nvToolsExt INTERFACE IMPORTED GLOBAL)
    endif()
  else()
    set(RLK_CUDA_MISSING "nvcc 12.8 or newer (${CMAKE_CUDA_COMPILER} is '${CMAKE_MATCH_1}')")
  endif()
endif()

function(rlk_cuda_objects target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "ARCHITECTURES;SOURCES;OPTIONS")
  list(JOIN arg_ARCHITECTURES "_" suffix)
  set(objects ${target}_${suffix})
  if(TARGET ${objects})  # portable kernels for the GPU that has kernels of its own
    string(APPEND objects _portable)
  endif()
  add_library(${objects} OBJECT ${arg_SOURCES})
  rlk_own(${objects})
  set_target_properties(${objects} PROPERTIES CUDA_ARCHITECTURES "${arg_ARCHITECTURES}")
  target_include_directories(${objects} PRIVATE "$<TARGET_PROPERTY:${target},INCLUDE_DIRECTORIES>")
  target_compile_options(${objects} PRIVATE ${arg_OPTIONS} ${RLK_CUDA_FLAGS})
  add_dependencies(${objects} rlk_ops_header)
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:${objects}>)
endfunction()
