# Debian's cross compiler for aarch64; what it builds runs under QEMU with every extension QEMU knows.
set(GD_CROSS_ARCH aarch64)
include(${CMAKE_CURRENT_LIST_DIR}/toolchain-debian-cross.cmake)
