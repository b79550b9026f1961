# SPDX-License-Identifier: Apache-2.0
# Says where `cmake --install` puts each file. The pkg-config file and the CMake package find their prefix from where
# they lie; the systemd unit is written when it is installed. So --prefix may be given as late as the installation.
include(CMakePackageConfigHelpers)

set(data ${CMAKE_INSTALL_DATADIR}/tensorlane)
set(package ${CMAKE_INSTALL_LIBDIR}/cmake/tensorlane)

install(DIRECTORY include/tensorlane DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(TARGETS tensorlane
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(FILES ${static_library} DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(TARGET tensorlane_program)
    install(TARGETS tensorlane_program RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

file(RELATIVE_PATH to_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" to_prefix ${to_prefix})
foreach(name tensorlane tensorlane-static)
    configure_file(cmake/${name}.pc.in ${CMAKE_BINARY_DIR}/${name}.pc @ONLY)
    install(FILES ${CMAKE_BINARY_DIR}/${name}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endforeach()

configure_package_config_file(cmake/tensorlaneConfig.cmake.in ${CMAKE_BINARY_DIR}/tensorlaneConfig.cmake
    INSTALL_DESTINATION ${package} PATH_VARS CMAKE_INSTALL_INCLUDEDIR CMAKE_INSTALL_LIBDIR)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/tensorlaneConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/tensorlaneConfig.cmake ${CMAKE_BINARY_DIR}/tensorlaneConfigVersion.cmake
    DESTINATION ${package})

install(FILES config/schema.json DESTINATION ${data}/config)
install(DIRECTORY config/examples DESTINATION ${data}/config)
install(DIRECTORY examples DESTINATION ${data} FILES_MATCHING PATTERN "*.c" PATTERN "*.py" PATTERN "README*")
install(DIRECTORY proto/tensorlane proto/grpc DESTINATION ${data}/proto FILES_MATCHING PATTERN "*.proto")
install(FILES LICENSE CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY docs/ DESTINATION ${CMAKE_INSTALL_DOCDIR} FILES_MATCHING PATTERN "*.md" PATTERN "*.svg")
install(PROGRAMS deploy/slurm.sh DESTINATION ${data}/deploy)
install(DIRECTORY deploy/kubernetes DESTINATION ${data}/deploy)

set(unit_template "${CMAKE_SOURCE_DIR}/deploy/tensorlane@.service.in")
install(CODE "
    set(bindir \${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_BINDIR})
    configure_file(\"${unit_template}\" \"${CMAKE_BINARY_DIR}/tensorlane@.service\" @ONLY)")
install(FILES "${CMAKE_BINARY_DIR}/tensorlane@.service" DESTINATION lib/systemd/system)
