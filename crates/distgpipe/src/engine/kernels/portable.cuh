// What the kernels' headers need of CUDA, so that a C++ compiler for the CPU can compile them too.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;

#ifdef __CUDACC__
#define FUNCTION static __device__ __forceinline__
#define FUNCTION_MEMBER __device__ __forceinline__
#define UNROLL_4 _Pragma("unroll 4")
#else
#define FUNCTION static inline
#define FUNCTION_MEMBER inline
#define UNROLL_4
#endif

FUNCTION u32 bits_of(float value) {
  union {
    float value;
    u32 bits;
  } both = {value};
  return both.bits;
}

FUNCTION float float_of(u32 bits) {
  union {
    u32 bits;
    float value;
  } both = {bits};
  return both.value;
}

FUNCTION u64 bits_of(double value) {
  union {
    double value;
    u64 bits;
  } both = {value};
  return both.bits;
}

FUNCTION double double_of(u64 bits) {
  union {
    u64 bits;
    double value;
  } both = {bits};
  return both.value;
}
