# Installs BUILD into a fresh prefix, builds the stranger's project against it with CMake and with pkg-config, and runs
# what came out.
function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()
set(work ${BUILD}/install_test)
file(REMOVE_RECURSE ${work})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${work}/prefix --component library)
run(${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR} -B ${work}/build -G Ninja -DCMAKE_PREFIX_PATH=${work}/prefix
    -DCMAKE_C_COMPILER=${C_COMPILER} -DCMAKE_CXX_COMPILER=${CXX_COMPILER})
run(${CMAKE_COMMAND} --build ${work}/build)
run(${work}/build/stranger)
run(${work}/prefix/bin/gatedelta info)

file(GLOB_RECURSE pc ${work}/prefix/*/gatedelta.pc)
get_filename_component(folder "${pc}" DIRECTORY)
find_program(pkg_config NAMES pkg-config pkgconf REQUIRED)
function(query_pkg_config result)
  execute_process(COMMAND ${CMAKE_COMMAND} -E env PKG_CONFIG_PATH=${folder} ${pkg_config} ${ARGN} gatedelta
                  OUTPUT_VARIABLE output OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ECHO STDOUT
                  COMMAND_ERROR_IS_FATAL ANY)
  set(${result} "${output}" PARENT_SCOPE)
endfunction()
query_pkg_config(version --modversion)
if(NOT version STREQUAL VERSION)
  message(FATAL_ERROR "gatedelta.pc says version ${version}, the project is ${VERSION}")
endif()
query_pkg_config(flags --cflags --libs)
query_pkg_config(libdir --variable=libdir)
separate_arguments(flags UNIX_COMMAND "${flags}")
run(${C_COMPILER} -std=c99 -pedantic-errors ${CMAKE_CURRENT_LIST_DIR}/../../examples/c/decode.c ${flags} -lm
    -Wl,-rpath,${libdir} -o ${work}/decode)
run(${work}/decode)
