// Fills memory with 1 at a probability, else with 0. A value is given by its bits, so there is a kernel for each size.
#include "random.cuh"

// Two values that are written together.
template <typename Bits> struct alignas(2 * sizeof(Bits)) Pair {
  Bits first, second;
};

// The seed is in device memory, so that a captured launch can be replayed with another one.
template <typename Bits>
static __device__ void bernoulli(Bits *out, u64 count, const u64 *seed_at, u64 threshold, Bits one) {
  const u64 seed = *seed_at;
  const bool aligned = reinterpret_cast<u64>(out) % sizeof(Pair<Bits>) == 0;
  const u64 threads = u64(gridDim.x) * blockDim.x;
  for (u64 k = u64(blockIdx.x) * blockDim.x + threadIdx.x; 2 * k < count; k += threads) {
    const u64 bits = draw(seed, k);
    const Bits first = bernoulli_value(u32(bits), threshold, one);
    const Bits second = bernoulli_value(u32(bits >> 32), threshold, one);
    if (aligned && 2 * k + 1 < count) {
      reinterpret_cast<Pair<Bits> *>(out)[k] = Pair<Bits>{first, second};
      continue;
    }
    out[2 * k] = first;
    if (2 * k + 1 < count)
      out[2 * k + 1] = second;
  }
}

extern "C" __global__ void bernoulli_16(u16 *out, u64 count, const u64 *seed, u64 threshold, u64 one) {
  bernoulli<u16>(out, count, seed, threshold, u16(one));
}

extern "C" __global__ void bernoulli_32(u32 *out, u64 count, const u64 *seed, u64 threshold, u64 one) {
  bernoulli<u32>(out, count, seed, threshold, u32(one));
}

extern "C" __global__ void bernoulli_64(u64 *out, u64 count, const u64 *seed, u64 threshold, u64 one) {
  bernoulli<u64>(out, count, seed, threshold, one);
}
