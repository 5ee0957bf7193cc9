# SPDX-License-Identifier: MIT
#
# Cross build on Debian with g++-aarch64-linux-gnu; the programs run under qemu-user.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)

# Debian keeps xsimd's package file below the host's triplet although the headers serve every target.
file(GLOB xsimd_DIR /usr/lib/*/cmake/xsimd)
