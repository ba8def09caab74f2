# Installation: the library, its headers, plugins, rlk-dispatch, and what find_package(rlk) and pkg-config read.
include_guard(GLOBAL)
include(CMakePackageConfigHelpers)

set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/rlk)
install(TARGETS rlk_registry rlk_headers rlk_plugin EXPORT rlkTargets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR}
        INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT rlkTargets NAMESPACE rlk:: DESTINATION ${package_folder})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/rlk ${PROJECT_BINARY_DIR}/include/rlk
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")
configure_package_config_file(${PROJECT_SOURCE_DIR}/tools/cmake/rlkConfig.cmake.in ${PROJECT_BINARY_DIR}/rlkConfig.cmake
                              INSTALL_DESTINATION ${package_folder}
                              PATH_VARS CMAKE_INSTALL_INCLUDEDIR CMAKE_INSTALL_LIBDIR)
# Below 1.0 every minor version may break: SameMinorVersion says so to find_package.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/rlkConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/rlkConfig.cmake ${PROJECT_BINARY_DIR}/rlkConfigVersion.cmake
        DESTINATION ${package_folder})

# A path relative to the file, so that a moved installation still works. pcfiledir is <prefix>/<libdir>/pkgconfig.
file(RELATIVE_PATH up /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" RLK_PC_UP "${up}")
configure_file(${PROJECT_SOURCE_DIR}/tools/cmake/rlk.pc.in ${PROJECT_BINARY_DIR}/rlk.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/rlk.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
