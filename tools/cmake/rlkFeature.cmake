# Optional parts: rlk_feature(ONEDNN "oneDNN backend" FOUND <bool> MISSING <what> INSTALL <command>)
#
# Declares RLK_WITH_<NAME>=AUTO|ON|OFF and sets RLK_HAS_<NAME>. AUTO takes the part when its packages are there, ON
# without them is an error that names the command to install them, OFF never looks. rlk_print_features() says at the
# end of the configuration what was left out and how to add it.
include_guard(GLOBAL)

set_property(GLOBAL PROPERTY rlk_features "")

function(rlk_feature name title)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "FOUND;MISSING;INSTALL" "")
  set(with RLK_WITH_${name})
  if(NOT ${with} MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "${with} is '${${with}}': it takes AUTO, ON or OFF")
  endif()
  if(${with} STREQUAL "OFF")
    set(has FALSE)
    set(state "left out (${with}=OFF)")
  elseif(arg_FOUND)
    set(has TRUE)
    set(state "built")
  elseif(${with} STREQUAL "ON")
    message(FATAL_ERROR "${with}=ON, but ${arg_MISSING} was not found. Add it with: ${arg_INSTALL}")
  else()
    set(has FALSE)
    set(state "left out: ${arg_MISSING} was not found. Add it with: ${arg_INSTALL}")
  endif()
  set(RLK_HAS_${name} ${has} PARENT_SCOPE)
  set_property(GLOBAL APPEND PROPERTY rlk_features "${title}: ${state}")
endfunction()

# Declares the cache variable; before rlk_feature, so that a search can be skipped when it is OFF.
macro(rlk_option name title default)
  set(RLK_WITH_${name} ${default} CACHE STRING "${title}: AUTO, ON or OFF")
  set_property(CACHE RLK_WITH_${name} PROPERTY STRINGS AUTO ON OFF)
endmacro()

function(rlk_print_features)
  get_property(features GLOBAL PROPERTY rlk_features)
  set(lines "")
  foreach(feature IN LISTS features)
    string(APPEND lines "${feature}\n")
    message(STATUS "rlk: ${feature}")
  endforeach()
  # tools/run repeats these lines after the build.
  file(WRITE "${PROJECT_BINARY_DIR}/features.txt" "${lines}")
endfunction()
