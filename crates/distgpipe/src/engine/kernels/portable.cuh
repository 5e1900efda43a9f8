// The subset of CUDA that the kernels' headers use, so that a C++ compiler for the CPU can compile them too.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;

#ifdef __CUDACC__
#define FUNCTION static __device__ __forceinline__
#else
#define FUNCTION static inline
#endif
