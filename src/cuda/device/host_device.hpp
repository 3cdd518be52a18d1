// Markers for code that host tests and kernels share; empty where no CUDA compiler reads them.
#pragma once

#if defined(__CUDACC__)
#define GD_HOST_DEVICE __host__ __device__
#else
#define GD_HOST_DEVICE
#endif
#if defined(__CUDA_ARCH__)
#define GD_UNROLL _Pragma("unroll")
#define GD_NO_UNROLL _Pragma("unroll 1")
#else
#define GD_UNROLL
#define GD_NO_UNROLL
#endif
