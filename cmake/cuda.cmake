# GD_CUDA: whether the CUDA kernels are built. Sets GD_CUDA_COMPILED, and with it GD_NVCC and CUDA::cudart_static.
set(GD_CUDA AUTO CACHE STRING "Build the CUDA backend: AUTO (where an nvcc works), ON or OFF")
set_property(CACHE GD_CUDA PROPERTY STRINGS AUTO ON OFF)

set(GD_CUDA_COMPILED 0)
set(GD_NVCC_FLAGS -ccbin ${CMAKE_CXX_COMPILER} -std=c++20)

# Compiles an empty kernel. Each nvcc accepts the host compilers of its time only, and says so when it compiles.
function(gd_try_nvcc problem)
  set(key "${GD_NVCC} ${CUDAToolkit_VERSION}, ${CMAKE_CXX_COMPILER} ${CMAKE_CXX_COMPILER_VERSION}")
  if(GD_NVCC_WORKS STREQUAL key)
    return()
  endif()
  set(folder ${PROJECT_BINARY_DIR}/CMakeFiles/gd_try_nvcc)
  file(WRITE ${folder}/empty.cu "__global__ void empty() {}\n")
  execute_process(COMMAND ${GD_NVCC} ${GD_NVCC_FLAGS} -gencode arch=compute_90a,code=sm_90a -c empty.cu -o empty.o
                  WORKING_DIRECTORY ${folder} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(result EQUAL 0)
    set(GD_NVCC_WORKS "${key}" CACHE INTERNAL "The nvcc and the host compiler that were tried together")
    return()
  endif()
  string(REGEX MATCH "[^\n]*(error|fatal)[^\n]*" reason "${output}")
  if(NOT reason)
    set(reason "exit status ${result} ${output}")
  endif()
  set(${problem} "${GD_NVCC} does not work with ${CMAKE_CXX_COMPILER}: ${reason}" PARENT_SCOPE)
endfunction()

function(gd_find_cuda)
  if(GD_CUDA STREQUAL "AUTO" AND (CMAKE_CROSSCOMPILING OR GD_SANITIZE OR GD_FUZZ))
    message(STATUS "CUDA backend: off in cross, sanitizer and fuzz builds")
    return()
  endif()
  find_program(GD_NVCC NAMES $ENV{CUDACXX} nvcc PATHS /usr/local/cuda/bin DOC "nvcc, for the CUDA backend")
  if(NOT GD_NVCC)
    set(problem "there is no nvcc in PATH, CUDACXX or /usr/local/cuda/bin")
  else()
    file(REAL_PATH ${GD_NVCC} nvcc)
    get_filename_component(CUDAToolkit_ROOT ${nvcc}/../.. ABSOLUTE)
    find_package(CUDAToolkit QUIET)
    find_package(Python3 QUIET COMPONENTS Interpreter)
    if(NOT TARGET CUDA::cudart_static)
      set(problem "${nvcc} comes without the static CUDA run time")
    elseif(CUDAToolkit_VERSION VERSION_LESS 12.5)
      set(problem "CUDA 12.5 or later is needed, ${nvcc} is ${CUDAToolkit_VERSION}")
    elseif(NOT Python3_FOUND)
      set(problem "tools/nvcc_checked.py needs Python 3")
    else()
      gd_try_nvcc(problem)
    endif()
  endif()
  if(NOT problem)
    message(STATUS "CUDA backend: ${GD_NVCC} ${CUDAToolkit_VERSION}")
    set(GD_CUDA_COMPILED 1 PARENT_SCOPE)
    set(CUDAToolkit_VERSION ${CUDAToolkit_VERSION} PARENT_SCOPE)
    set(Python3_EXECUTABLE ${Python3_EXECUTABLE} PARENT_SCOPE)
  elseif(GD_CUDA STREQUAL "AUTO")
    message(NOTICE "CUDA backend: off, ${problem}")
  else()
    message(FATAL_ERROR "GD_CUDA is ON, but ${problem}")
  endif()
endfunction()
if(NOT GD_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "GD_CUDA is '${GD_CUDA}', must be AUTO, ON or OFF")
elseif(NOT GD_CUDA STREQUAL "OFF")
  gd_find_cuda()
endif()

option(GD_RACECHECK "Kernels that compute-sanitizer's racecheck understands (ptx.cuh); slower" OFF)
if(GD_RACECHECK AND NOT GD_CUDA_COMPILED)
  message(FATAL_ERROR "GD_RACECHECK is ON, but the CUDA backend is not built: -DGD_CUDA=ON says why")
endif()

# What the portable kernels are compiled for: sm_80 code serves 8.x, sm_100 10.x, sm_120 12.x, and PTX all that comes
# later. CUDA before 12.8 does not know the last two.
set(GD_PORTABLE_ARCHITECTURES 80 90)
if(CUDAToolkit_VERSION VERSION_GREATER_EQUAL 12.8)
  list(APPEND GD_PORTABLE_ARCHITECTURES 100 120)
endif()

# Compressed, the library is a fourth as large. Not with CUDA 12: its programs also run on drivers that cannot read it.
set(GD_NVCC_COMPRESSION)
if(CUDAToolkit_VERSION VERSION_GREATER_EQUAL 13.0)
  set(GD_NVCC_COMPRESSION -compress-mode=size)
endif()

# gd_add_cuda(<target> <source> [ARCHITECTURES <architecture>...] [PTX <architecture>]): one .cu file, with machine code
# of every architecture (90a alone by default), and with PTX that the driver compiles on later devices. By nvcc itself,
# not by CMake's CUDA language: that knows neither every nvcc nor these architectures in all versions of CMake we build
# with, and what ptxas says must be read.
function(gd_add_cuda target source)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "PTX" "ARCHITECTURES")
  if(NOT arg_ARCHITECTURES)
    set(arg_ARCHITECTURES 90a)
  endif()
  set(code)
  foreach(architecture IN LISTS arg_ARCHITECTURES)
    list(APPEND code -gencode arch=compute_${architecture},code=sm_${architecture})
  endforeach()
  if(arg_PTX)
    list(APPEND code -gencode arch=compute_${arg_PTX},code=compute_${arg_PTX})
  endif()
  get_filename_component(path ${source} ABSOLUTE)
  set(object ${CMAKE_CURRENT_BINARY_DIR}/${source}.o)
  get_filename_component(folder ${object} DIRECTORY)
  file(MAKE_DIRECTORY ${folder})
  set(warnings -Xcompiler=-Wall,-Wextra,-Wno-unused-function) # CUDA's own headers are full of those
  if(GD_WERROR)
    list(APPEND warnings -Werror all-warnings)
  endif()
  set(launcher)
  if(CMAKE_CXX_COMPILER_LAUNCHER MATCHES "ccache$")
    set(launcher ${CMAKE_CXX_COMPILER_LAUNCHER})
  endif()
  set(nvcc ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/tools/nvcc_checked.py ${launcher} ${GD_NVCC})
  if(GD_RACECHECK)
    set(nvcc ${launcher} ${GD_NVCC} -DGD_EVERY_LANE_ARRIVES) # not checked: there, registers spill
  endif()
  add_custom_command(
    OUTPUT ${object}
    COMMAND ${nvcc} ${GD_NVCC_FLAGS} ${code} -O3 ${GD_NVCC_COMPRESSION}
            -Xcudafe --signed_chars # nvcc loads a bool as a char: the same code on x86 and Arm
            -Xcompiler=-fPIC,-fvisibility=hidden,-fsigned-char ${warnings}
            -I${PROJECT_SOURCE_DIR}/src -I${PROJECT_SOURCE_DIR}/include
            # No path of the build folder: ccache finds what another one compiled.
            -MD -MT ${source}.o -MF ${source}.o.d -c ${path} -o ${source}.o
    DEPENDS ${path} ${PROJECT_SOURCE_DIR}/tools/nvcc_checked.py
    DEPFILE ${object}.d
    COMMENT "Building CUDA object ${source}.o"
    VERBATIM)
  set_source_files_properties(${object} PROPERTIES EXTERNAL_OBJECT ON GENERATED ON)
  target_sources(${target} PRIVATE ${object})
endfunction()
