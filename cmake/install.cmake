# `cmake --install <build> --prefix <where>`: library, headers, tool, and a package for find_package(gatedelta).
# The Python wheel has a component of its own (bindings/torch); a project that embeds this one installs what it likes.
if(NOT PROJECT_IS_TOP_LEVEL OR SKBUILD)
  return()
endif()
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(GD_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/gatedelta)
install(TARGETS gatedelta EXPORT gatedelta COMPONENT library DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT library)
install(EXPORT gatedelta NAMESPACE gatedelta:: FILE gatedeltaConfig.cmake DESTINATION ${GD_PACKAGE_DIR}
        COMPONENT library)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/gatedeltaConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/gatedeltaConfigVersion.cmake DESTINATION ${GD_PACKAGE_DIR} COMPONENT library)
if(TARGET gatedelta_cli)
  set_target_properties(gatedelta_cli PROPERTIES INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
  install(TARGETS gatedelta_cli COMPONENT library DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
