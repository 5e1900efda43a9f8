// Runs CUDA kernels on the CPU, one block after another. Each thread of a block is a fiber, which runs until it waits for others.
// It has what our kernels use and no more. A kernel that needs another order of its threads than the one here is not found out.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <ucontext.h>
#include <vector>

#define __global__
#define __device__
// Blocks run one after another, so they can share it.
#define __shared__ static

struct Dimension {
  unsigned x;
};
inline Dimension threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_on_cpu {

constexpr size_t STACK_BYTES = 64 << 10;

// Where `expected` fibers wait for each other.
struct Barrier {
  unsigned expected = 0, arrived = 0, generation = 0;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
};

inline std::vector<Fiber> fibers;
inline std::vector<Barrier> warps;
inline Barrier block;
inline ucontext_t scheduler;
inline unsigned current;
inline std::function<void()> body;
inline std::vector<uint64_t> exchanged;

inline void wait(Barrier &barrier) {
  const unsigned generation = barrier.generation;
  if (++barrier.arrived == barrier.expected) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  while (barrier.generation == generation)
    swapcontext(&fibers[current].context, &scheduler);
}

inline void wait_for_warp() { wait(warps[current / 32]); }

inline void run_fiber() {
  body();
  fibers[current].done = true;
  swapcontext(&fibers[current].context, &scheduler);
}

// The value that a lane of this warp gives.
template <typename T> T from_lane(T value, unsigned lane) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "one word for each lane");
  std::memcpy(&exchanged[current], &value, sizeof(T));
  wait_for_warp();
  T other;
  std::memcpy(&other, &exchanged[current / 32 * 32 + lane % 32], sizeof(T));
  wait_for_warp();
  return other;
}

// Runs a kernel. The number of threads must be a multiple of 32.
inline void launch(unsigned blocks, unsigned threads, std::function<void()> kernel) {
  body = std::move(kernel);
  gridDim = {blocks};
  blockDim = {threads};
  exchanged.assign(threads, 0);
  for (unsigned number = 0; number < blocks; ++number) {
    blockIdx = {number};
    block = Barrier{threads};
    warps.assign(threads / 32, Barrier{32});
    fibers.resize(threads);
    for (auto &fiber : fibers) {
      getcontext(&fiber.context);
      if (!fiber.stack)
        fiber.stack.reset(new char[STACK_BYTES]);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = STACK_BYTES;
      fiber.context.uc_link = &scheduler;
      makecontext(&fiber.context, run_fiber, 0);
      fiber.done = false;
    }
    for (unsigned done = 0; done < threads;) {
      done = 0;
      for (current = 0; current < threads; ++current) {
        if (!fibers[current].done) {
          threadIdx = {current};
          swapcontext(&scheduler, &fibers[current].context);
        }
        done += fibers[current].done;
      }
    }
  }
}

} // namespace cuda_on_cpu

inline void __syncthreads() { cuda_on_cpu::wait(cuda_on_cpu::block); }

template <typename T> T __shfl_sync(unsigned, T value, unsigned lane) { return cuda_on_cpu::from_lane(value, lane); }

template <typename T> T __shfl_xor_sync(unsigned, T value, unsigned distance) {
  return cuda_on_cpu::from_lane(value, (cuda_on_cpu::current % 32) ^ distance);
}

inline unsigned __ballot_sync(unsigned, bool vote) {
  using namespace cuda_on_cpu;
  exchanged[current] = vote;
  wait_for_warp();
  unsigned votes = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    votes |= unsigned(exchanged[current / 32 * 32 + lane]) << lane;
  wait_for_warp();
  return votes;
}

inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

template <typename T> T atomicAdd(T *at, T value) {
  const T before = *at;
  *at += value;
  return before;
}

template <typename T> T atomicMax(T *at, T value) {
  const T before = *at;
  *at = before > value ? before : value;
  return before;
}

template <typename T> T atomicOr(T *at, T value) {
  const T before = *at;
  *at |= value;
  return before;
}
