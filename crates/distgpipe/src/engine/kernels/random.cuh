// Random numbers by their position: those of `Stream` in engine/random.rs.
#pragma once
#include "portable.cuh"

// Draw number `k` of a seed, by SplitMix64.
FUNCTION u64 draw(u64 seed, u64 k) {
  u64 z = seed + (k + 1) * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// `one` at the probability threshold / 2^32, else 0, by the lower or the upper half of a draw.
template <typename Bits> FUNCTION Bits bernoulli_value(u32 half, u64 threshold, Bits one) {
  return half < threshold ? one : static_cast<Bits>(0);
}
