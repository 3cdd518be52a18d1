# Debian's cross compiler for x86-64; what it builds runs under QEMU with every extension QEMU knows.
set(GD_CROSS_ARCH x86_64)
include(${CMAKE_CURRENT_LIST_DIR}/toolchain-debian-cross.cmake)
