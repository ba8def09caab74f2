# How our own code is compiled: rlk_own(<target>) gives a target the project's flags.
#
# -ffp-contract=off is not a preference: an arithmetic id promises bits, and a compiler that fuses a*b+c where it
# pleases breaks the promise. Fused operations are written std::fma.
include_guard(GLOBAL)

find_package(Threads REQUIRED)
find_package(fmt REQUIRED)
find_package(spdlog REQUIRED)

# fmt and spdlog as part of what we build: it then needs nothing but libc and libstdc++ at run time. fmt 9 is compiled
# once, in src/fmt.cpp, which the other versions' sources do not fit: those are used header-only, at the price of
# a slower build. (The packages' own header-only targets disagree about the macros between versions.)
if(fmt_VERSION VERSION_GREATER_EQUAL 9 AND fmt_VERSION VERSION_LESS 10)
  add_library(rlk_text STATIC ${PROJECT_SOURCE_DIR}/src/fmt.cpp)
  set(use PUBLIC)
else()
  add_library(rlk_text INTERFACE)
  set(use INTERFACE)
  target_compile_definitions(rlk_text INTERFACE FMT_HEADER_ONLY=1)
endif()
target_compile_definitions(rlk_text ${use} SPDLOG_FMT_EXTERNAL)
foreach(package fmt::fmt-header-only spdlog::spdlog_header_only)
  get_target_property(folders ${package} INTERFACE_INCLUDE_DIRECTORIES)
  if(folders)
    target_include_directories(rlk_text SYSTEM ${use} ${folders})
  endif()
endforeach()

set(RLK_SANITIZE "" CACHE STRING "Sanitizers for everything, e.g. address,undefined or thread")
option(RLK_WARNINGS_AS_ERRORS "Warnings are errors" ${PROJECT_IS_TOP_LEVEL})

add_library(rlk_flags INTERFACE)
target_compile_features(rlk_flags INTERFACE cxx_std_20)
target_compile_options(rlk_flags INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wno-missing-field-initializers;-Wno-unknown-pragmas;-ffp-contract=off>"
  "$<$<COMPILE_LANGUAGE:C>:-Wall;-Wextra;-Wpedantic;-ffp-contract=off>"
  # Passing an aggregate of vector registers by value is noted by g++ on every such function; nothing of it is public.
  # -Wrestrict of g++ 12 sees overlaps in std::string that cannot be.
  "$<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-psabi;-Wno-restrict>"
  # clang reports what libstdc++ 12's own stable_sort uses.
  "$<$<COMPILE_LANG_AND_ID:CXX,Clang>:-Wno-deprecated-declarations>"
  # -Wpedantic and -Wconversion complain about what nvcc itself writes.
  "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;-fmad=false;-Xcompiler=-Wall,-Wextra,-ffp-contract=off>")
# A project that adds this one without a build type would get kernels at -O0, some sixty times slower.
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES AND NOT CMAKE_CXX_FLAGS MATCHES "(^| )-O")
  target_compile_options(rlk_flags INTERFACE "$<$<COMPILE_LANGUAGE:C,CXX>:-O3;-DNDEBUG>")
endif()
# Addresses of functions are settled when a binary is loaded, and read-only from then on.
target_link_options(rlk_flags INTERFACE LINKER:-z,relro LINKER:-z,now)
if(RLK_WARNINGS_AS_ERRORS)
  target_compile_options(rlk_flags INTERFACE "$<$<COMPILE_LANGUAGE:C,CXX>:-Werror>"
                                             "$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>")
endif()
if(RLK_SANITIZE)
  target_compile_options(rlk_flags INTERFACE
    "$<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=${RLK_SANITIZE};-fno-sanitize-recover=all;-fno-omit-frame-pointer>"
    # Instrumented, g++ 12 sees these in its own <regex> and <immintrin.h>.
    "$<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-maybe-uninitialized;-Wno-uninitialized>")
  target_link_options(rlk_flags INTERFACE "-fsanitize=${RLK_SANITIZE}")
  # Such a build runs where it was made, and without the instruction each fused multiply-add of a reference is a call of
  # the C library: 40% of the suite's time.
  if(EXISTS /proc/cpuinfo)
    file(STRINGS /proc/cpuinfo fused REGEX "^flags.* fma( |$)" LIMIT_COUNT 1)
  endif()
  if(fused)
    target_compile_options(rlk_flags INTERFACE "$<$<COMPILE_LANGUAGE:C,CXX>:-mfma>")
  endif()
endif()

# A library must name all it needs; but a sanitizer's runtime may live in the executable.
set(RLK_NO_UNDEFINED -Wl,--no-undefined)
if(RLK_SANITIZE)
  set(RLK_NO_UNDEFINED "")
endif()

function(rlk_own target)
  target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:rlk_flags>)
  set_target_properties(${target} PROPERTIES
    C_VISIBILITY_PRESET hidden CXX_VISIBILITY_PRESET hidden CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
    POSITION_INDEPENDENT_CODE ON CXX_EXTENSIONS OFF C_STANDARD 99 C_EXTENSIONS OFF)
endfunction()

if(use STREQUAL PUBLIC)
  rlk_own(rlk_text)
  target_compile_features(rlk_text PUBLIC cxx_std_20)
endif()
