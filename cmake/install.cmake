# `cmake --install <build> --prefix <where>`: library, headers, tool, licences, a package for find_package(gatedelta),
# and gatedelta.pc for pkg-config.
# The Python wheel has a component of its own (bindings/torch); a project that embeds this one installs what it likes.
if(NOT PROJECT_IS_TOP_LEVEL OR SKBUILD)
  return()
endif()
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(GD_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/gatedelta)
install(TARGETS gatedelta EXPORT gatedelta COMPONENT library DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT library)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/THIRD_PARTY.md
        DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT library)
install(EXPORT gatedelta NAMESPACE gatedelta:: FILE gatedeltaConfig.cmake DESTINATION ${GD_PACKAGE_DIR}
        COMPONENT library)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/gatedeltaConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/gatedeltaConfigVersion.cmake DESTINATION ${GD_PACKAGE_DIR} COMPONENT library)
# Paths in gatedelta.pc start at its own folder, so the prefix may be chosen, or moved, after the build.
file(RELATIVE_PATH GD_PC_PREFIX ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
string(REGEX REPLACE "/$" "" GD_PC_PREFIX ${GD_PC_PREFIX})
configure_file(${CMAKE_CURRENT_LIST_DIR}/gatedelta.pc.in ${PROJECT_BINARY_DIR}/gatedelta.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/gatedelta.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT library)
if(TARGET gatedelta_cli)
  set_target_properties(gatedelta_cli PROPERTIES INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
  install(TARGETS gatedelta_cli COMPONENT library DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
