# The CPU kernels use __builtin_shufflevector, which GCC has from version 12 on. Without this check an older compiler
# fails in the middle of the build.
include(CheckCXXSourceCompiles)
set(CMAKE_REQUIRED_QUIET ON)
check_cxx_source_compiles("
  #include <concepts>
  using Vector [[gnu::vector_size(16)]] = float;
  template <std::floating_point T> T first(Vector x) { return __builtin_shufflevector(x, x, 3, 2, 1, 0)[0]; }
  int main() { return static_cast<int>(first<float>(Vector{})); }
" GD_COMPILER_IS_NEW_ENOUGH)
unset(CMAKE_REQUIRED_QUIET)
if(NOT GD_COMPILER_IS_NEW_ENOUGH)
  unset(GD_COMPILER_IS_NEW_ENOUGH CACHE) # so that the next run looks again
  message(FATAL_ERROR
    "gatedelta needs C++20 and __builtin_shufflevector: GCC 12, Clang 14 or later.\n"
    "${CMAKE_CXX_COMPILER} is ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}.\n"
    "Choose another compiler in an empty build folder: -DCMAKE_CXX_COMPILER=g++-12, or CXX=g++-12 in the environment.")
endif()
