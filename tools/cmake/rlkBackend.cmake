# rlk_add_backend(<name> SOURCES ...): a backend plugin, librlk_backend_<name>.so in <build>/lib/rlk.
#
# A plugin links neither the library nor a run path: all it needs from rlk comes through the table it is handed.
include_guard(GLOBAL)

function(rlk_add_backend name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES")
  set(target rlk_backend_${name})
  add_library(${target} MODULE ${arg_SOURCES})
  rlk_own(${target})
  target_link_libraries(${target} PRIVATE rlk::plugin)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/backends)
  set_target_properties(${target} PROPERTIES
    LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib/rlk SKIP_BUILD_RPATH ON INSTALL_RPATH "")
  target_link_options(${target} PRIVATE -Wl,--build-id=sha1 -Wl,--exclude-libs,ALL ${RLK_NO_UNDEFINED})
  # The loader refuses what a group could write; a umask of 002 must not make the build tree unusable.
  add_custom_command(TARGET ${target} POST_BUILD
    COMMAND chmod go-w $<TARGET_FILE:${target}> $<TARGET_FILE_DIR:${target}> VERBATIM)
  install(TARGETS ${target} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}/rlk
          PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
endfunction()
