# SPDX-License-Identifier: MIT
#
# Headers, find_package(attn) and attn.pc. All of it is the same on every machine: it goes below share/.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(attn_cmake_dir ${CMAKE_INSTALL_DATADIR}/cmake/attn)

install(TARGETS attn EXPORT attnTargets FILE_SET HEADERS)
install(EXPORT attnTargets NAMESPACE attn:: DESTINATION ${attn_cmake_dir})

configure_package_config_file(
  ${CMAKE_CURRENT_LIST_DIR}/attnConfig.cmake.in ${PROJECT_BINARY_DIR}/attnConfig.cmake
  INSTALL_DESTINATION ${attn_cmake_dir}
  NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(
  ${PROJECT_BINARY_DIR}/attnConfigVersion.cmake COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(
  FILES ${PROJECT_BINARY_DIR}/attnConfig.cmake ${PROJECT_BINARY_DIR}/attnConfigVersion.cmake
        ${CMAKE_CURRENT_LIST_DIR}/attn_xsimd.cmake
  DESTINATION ${attn_cmake_dir})

# attn.pc names its folders from where it lies (pcfiledir), so that `cmake --install --prefix` may move it.
set(attn_pkgconfig_dir ${CMAKE_INSTALL_DATADIR}/pkgconfig)
file(RELATIVE_PATH attn_pc_include_dir /prefix/${attn_pkgconfig_dir} /prefix/${CMAKE_INSTALL_INCLUDEDIR})
configure_file(${CMAKE_CURRENT_LIST_DIR}/attn.pc.in ${PROJECT_BINARY_DIR}/attn.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/attn.pc DESTINATION ${attn_pkgconfig_dir})
