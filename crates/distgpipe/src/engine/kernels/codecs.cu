// The codecs f16, bf16, uniform, tile, sort and fast on a GPU. Bodies and decoded values are those of the CPU codecs, bit for bit.
//
// A body is at an address that is a multiple of 16. Where a tensor cannot be encoded (a value that is not finite, a range that
// overflows), the kernels set bits of a status word, and the host leaves the tensor to the CPU codec, which names the reason.
#include "codecs.cuh"

constexpr u32 REFUSED = 1;

// The threads of a block, of kernels whose blocks need a fixed number.
constexpr u32 THREADS = 256;

FUNCTION u64 first_index() { return u64(blockIdx.x) * blockDim.x + threadIdx.x; }

FUNCTION u64 index_stride() { return u64(gridDim.x) * blockDim.x; }

struct alignas(16) Four {
  float values[4];
};

FUNCTION bool is_aligned(const void *pointer) { return reinterpret_cast<u64>(pointer) % 16 == 0; }

// Up to eight consecutive values; 0 beyond the end. Returns how many there are.
FUNCTION u32 load_eight(const float *x, u64 first, u64 count, bool aligned, float *out) {
  if (aligned && first + 8 <= count) {
    const Four *from = reinterpret_cast<const Four *>(x + first);
    const Four front = from[0], back = from[1];
    for (u32 at = 0; at < 4; ++at) {
      out[at] = front.values[at];
      out[at + 4] = back.values[at];
    }
    return 8;
  }
  const u32 present = u32(count - first < 8 ? count - first : 8);
  for (u32 at = 0; at < 8; ++at)
    out[at] = at < present ? x[first + at] : 0.0f;
  return present;
}

FUNCTION void store_eight(float *x, u64 first, u64 count, bool aligned, const float *values) {
  if (aligned && first + 8 <= count) {
    Four *to = reinterpret_cast<Four *>(x + first);
    to[0] = Four{{values[0], values[1], values[2], values[3]}};
    to[1] = Four{{values[4], values[5], values[6], values[7]}};
    return;
  }
  for (u32 at = 0; at < 8 && first + at < count; ++at)
    x[first + at] = values[at];
}

// The bytes of the group of codes that begins with value `first`.
FUNCTION u32 group_bytes(u64 first, u64 count, u32 width) {
  return first + 8 <= count ? width : u32(packed_bytes(count - first, width));
}

FUNCTION u32 warp_max(u32 value) {
  for (u32 distance = 16; distance > 0; distance /= 2) {
    const u32 other = __shfl_xor_sync(0xffffffff, value, distance);
    value = value > other ? value : other;
  }
  return value;
}

// --- Extremes ------------------------------------------------------------------------------------------------------------

// The extreme bit patterns of all values, as maxima of unsigned numbers that start at 0: of the complement of the signed order, of
// the signed order, and of the bits.
extern "C" __global__ void extremes(const float *x, u64 count, u32 *out) {
  u32 found[3] = {0, 0, 0};
  const bool aligned = is_aligned(x);
  for (u64 first = 8 * first_index(); first < count; first += 8 * index_stride()) {
    float values[8];
    const u32 present = load_eight(x, first, count, aligned, values);
    for (u32 at = 0; at < present; ++at) {
      const u32 bits = bits_of(values[at]), order = bits ^ 0x80000000u;
      found[0] = found[0] > ~order ? found[0] : ~order;
      found[1] = found[1] > order ? found[1] : order;
      found[2] = found[2] > bits ? found[2] : bits;
    }
  }
  for (u32 which = 0; which < 3; ++which) {
    const u32 most = warp_max(found[which]);
    if (threadIdx.x % 32 == 0)
      atomicMax(&out[which], most);
  }
}

FUNCTION u32 magnitude_of_extremes(const u32 *extremes) {
  const i32 signed_max = i32(extremes[1] ^ 0x80000000u);
  const u32 positive = signed_max > 0 ? u32(signed_max) : 0;
  const u32 negative = extremes[2] >> 31 ? extremes[2] & 0x7fffffff : 0;
  return positive > negative ? positive : negative;
}

// The smallest and the largest value.
FUNCTION void range_of_extremes(const u32 *extremes, float *lo, float *hi) {
  const u32 signed_min = ~extremes[0] ^ 0x80000000u, signed_max = extremes[1] ^ 0x80000000u;
  *lo = float_of(extremes[2] >> 31 ? extremes[2] : signed_min);
  *hi = float_of(signed_max >> 31 ? signed_min : signed_max);
}

// --- f16, bf16 -----------------------------------------------------------------------------------------------------------

extern "C" __global__ void half_encode(const float *x, u64 count, u32 is_bf16, u8 *body, u32 *status) {
  const bool aligned = is_aligned(x);
  const u32 limit = is_bf16 ? 0x7f7f8000u : bits_of(65520.0f);
  bool refused = false;
  for (u64 first = 8 * first_index(); first < count; first += 8 * index_stride()) {
    float values[8];
    u32 codes[8];
    load_eight(x, first, count, aligned, values);
    for (u32 at = 0; at < 8; ++at) {
      refused |= magnitude_bits(values[at]) >= limit;
      codes[at] = is_bf16 ? bf16_from_f32(values[at]) : f16_from_f32(values[at]);
    }
    store_group(body + 2 * first, join_codes(codes, 16), 16, group_bytes(first, count, 16));
  }
  if (refused)
    atomicOr(status, REFUSED);
}

extern "C" __global__ void half_decode(const u8 *body, u64 count, u32 is_bf16, float *out) {
  const bool aligned = is_aligned(out);
  for (u64 first = 8 * first_index(); first < count; first += 8 * index_stride()) {
    u32 codes[8];
    float values[8];
    split_codes(load_group(body + 2 * first, 16, group_bytes(first, count, 16)), 16, codes);
    for (u32 at = 0; at < 8; ++at)
      values[at] = is_bf16 ? f32_from_bf16(u16(codes[at])) : f32_from_f16(u16(codes[at]));
    store_eight(out, first, count, aligned, values);
  }
}

// --- tile ----------------------------------------------------------------------------------------------------------------

struct TileFormat {
  u32 bits, tile;
  // Whether rounding is stochastic, and the key of its random numbers.
  u32 stochastic, key;
};

// A block encodes THREADS tiles at a time: eight lanes find the ends of a tile, one thread computes the grid of a tile, and one
// thread encodes a group of eight values.
extern "C" __global__ void tile_encode(const float *x, u64 count, TileFormat format, const u32 *extremes, u8 *body,
                                       u32 *status) {
  __shared__ float los[THREADS], his[THREADS];
  __shared__ double grid_los[THREADS], per_steps[THREADS];
  const u32 magnitude = magnitude_of_extremes(extremes), code_max = code_max_of(format.bits);
  // All blocks return, or none.
  if (magnitude >= INFINITY_BITS) {
    if (first_index() == 0)
      *status = REFUSED;
    return;
  }
  const i32 exponent = exponent_for(magnitude);
  if (first_index() == 0)
    *reinterpret_cast<i32 *>(body) = exponent;
  const u64 tile = format.tile, tiles = (count + tile - 1) / tile;
  u32 *table = reinterpret_cast<u32 *>(body + 4);
  u8 *packed = body + 4 + 4 * tiles;
  const bool aligned = is_aligned(x);
  for (u64 first_tile = u64(blockIdx.x) * THREADS; first_tile < tiles; first_tile += u64(gridDim.x) * THREADS) {
    for (u32 round = 0; round < 8; ++round) {
      const u32 within = round * (THREADS / 8) + threadIdx.x / 8;
      const u64 begin = (first_tile + within) * tile;
      const u64 end = begin + tile < count ? begin + tile : count;
      // Lanes without a value repeat the first one.
      float lo = begin < count ? x[begin] : 0.0f, hi = lo;
      for (u64 at = begin + threadIdx.x % 8; at < end; at += 8) {
        const float value = x[at];
        lo = value < lo ? value : lo;
        hi = value > hi ? value : hi;
      }
      for (u32 distance = 4; distance > 0; distance /= 2) {
        const float other_lo = __shfl_xor_sync(0xffffffff, lo, distance);
        const float other_hi = __shfl_xor_sync(0xffffffff, hi, distance);
        lo = other_lo < lo ? other_lo : lo;
        hi = other_hi > hi ? other_hi : hi;
      }
      if (threadIdx.x % 8 == 0) {
        // Adding 0 turns -0 into 0.
        los[within] = lo + 0.0f;
        his[within] = hi + 0.0f;
      }
    }
    __syncthreads();
    if (first_tile + threadIdx.x < tiles) {
      const u32 entry = tile_entry(los[threadIdx.x], his[threadIdx.x], exponent, code_max);
      const Grid grid = tile_grid_of_entry(entry, exponent);
      table[first_tile + threadIdx.x] = entry;
      grid_los[threadIdx.x] = grid.lo;
      per_steps[threadIdx.x] = per_step_of(grid.step);
    }
    __syncthreads();
    const u64 begin = first_tile * tile, most = begin + THREADS * tile, end = most < count ? most : count;
    for (u64 first = begin + 8 * threadIdx.x; first < end; first += 8 * THREADS) {
      float values[8];
      u32 codes[8];
      const u32 present = load_eight(x, first, count, aligned, values);
      u32 number = u32((first - begin) / tile), left = u32(tile - (first - begin) % tile);
      for (u32 at = 0; at < 8; ++at) {
        if (left == 0) {
          ++number;
          left = u32(tile);
        }
        --left;
        const double lo = grid_los[number % THREADS], per_step = per_steps[number % THREADS];
        const u32 code = format.stochastic ? code_stochastic(values[at], lo, per_step, code_max,
                                                             random_of(format.key, u32(first + at)))
                                           : code_of(values[at], lo, per_step, code_max);
        codes[at] = at < present ? code : 0;
      }
      store_group(packed + first / 8 * format.bits, join_codes(codes, format.bits), format.bits,
                  group_bytes(first, count, format.bits));
    }
    __syncthreads();
  }
}

extern "C" __global__ void tile_decode(const u8 *body, u64 count, TileFormat format, float *out) {
  const i32 exponent = *reinterpret_cast<const i32 *>(body);
  const u64 tile = format.tile, tiles = (count + tile - 1) / tile;
  const u32 *table = reinterpret_cast<const u32 *>(body + 4);
  const u8 *packed = body + 4 + 4 * tiles;
  const bool aligned = is_aligned(out);
  for (u64 first = 8 * first_index(); first < count; first += 8 * index_stride()) {
    u32 codes[8];
    float values[8];
    split_codes(load_group(packed + first / 8 * format.bits, format.bits, group_bytes(first, count, format.bits)),
                format.bits, codes);
    u64 number = first / tile;
    u32 left = u32(tile - first % tile);
    Grid grid = tile_grid_of_entry(table[number], exponent);
    for (u32 at = 0; at < 8; ++at) {
      if (left == 0) {
        ++number;
        left = u32(tile);
        grid = tile_grid_of_entry(table[number < tiles ? number : tiles - 1], exponent);
      }
      --left;
      values[at] = grid_value_within(grid, codes[at]);
    }
    store_eight(out, first, count, aligned, values);
  }
}

// --- The values at the ends of quantile bins -----------------------------------------------------------------------------
//
// All ranks at once, without sorting: a histogram of the upper 13 bits of the order keys, one of the next 8 bits within each bucket
// that has a rank, and one of the last 11 bits within each of those.

constexpr u32 FIRST = 8192, SECOND = 256, THIRD = 2048;

FUNCTION u32 first_of(u32 key) { return key / (SECOND * THIRD); }

FUNCTION u32 second_of(u32 key) { return key / THIRD % SECOND; }

FUNCTION u32 key_of(u32 first, u32 second, u32 third) { return (first * SECOND + second) * THIRD + third; }

// The most buckets with a rank whose second histograms are in shared memory.
constexpr u32 LOCAL_MAX = 28;

// How the ends of bins are found: `bins` bins of `length` values, with `ranks` ends in all.
struct Ranks {
  u64 length;
  u32 bins, gapless, ranks;
};

// What is known of a rank: the number of its first bucket among those that have ranks, from 1 on, the buckets, and its rank within
// the last of them.
struct Place {
  u32 slot, first, second, rest;
};

// The memory of the search. All of it is 0 at first. The arrays have `ranks` entries, or as many times SECOND or THIRD.
struct Search {
  u32 *first, *second, *third;
  // The slot of each first bucket, 0 for none; and of each second bucket `ranks` minus the first rank in it, 0 for none.
  u16 *slots;
  u32 *second_slots;
  u32 *slot_count;
  Place *places;
  float *ends;
};

FUNCTION u32 lane_of(u32 mask) { return u32(__ffs(int(mask))) - 1; }

// Adds one to the counter of each lane that has one, in global memory. Equal counters, which repeated values cause, are added up
// first. All lanes of a warp must call it.
FUNCTION void count_together(u32 *counters, bool counts, u32 at) {
  const u32 counting = __ballot_sync(0xffffffff, counts);
  if (counting == 0)
    return;
  const u32 leader = lane_of(counting), common = __shfl_sync(0xffffffff, at, leader);
  const bool same = counts && at == common;
  const u32 equal = __ballot_sync(0xffffffff, same);
  if (threadIdx.x % 32 == leader)
    atomicAdd(&counters[common], u32(__popc(equal)));
  else if (counts && !same)
    atomicAdd(&counters[at], 1u);
}

// Calls `count(is_present, key)` with each value's key; zeros, which a ReLU makes of half a tensor, are counted and passed on at the end as
// `add(key, number)`. All lanes of a warp make the same calls of `count`.
template <typename Count, typename Add>
FUNCTION void each_key(const float *x, u64 count, Count &&one, Add &&add) {
  u32 zeros = 0, negative_zeros = 0;
  const bool aligned = is_aligned(x);
  const u64 stride = 4 * index_stride();
  for (u64 base = 4 * u64(blockIdx.x) * blockDim.x; base < count; base += stride) {
    const u64 first = base + 4 * threadIdx.x;
    float values[4];
    if (aligned && first + 4 <= count) {
      const Four four = *reinterpret_cast<const Four *>(x + first);
      for (u32 at = 0; at < 4; ++at)
        values[at] = four.values[at];
    } else {
      for (u32 at = 0; at < 4; ++at)
        values[at] = first + at < count ? x[first + at] : 0.0f;
    }
    for (u32 at = 0; at < 4; ++at) {
      const bool present = first + at < count;
      const u32 bits = bits_of(values[at]);
      zeros += present && bits == 0;
      negative_zeros += present && bits == 0x80000000u;
      one(present && bits << 1 != 0, order_key(values[at]));
    }
  }
  if (zeros > 0)
    add(order_key(0.0f), zeros);
  if (negative_zeros > 0)
    add(order_key(-0.0f), negative_zeros);
}

extern "C" __global__ void count_first(const float *x, u64 count, Search search) {
  __shared__ u32 counters[FIRST];
  for (u32 at = threadIdx.x; at < FIRST; at += blockDim.x)
    counters[at] = 0;
  __syncthreads();
  each_key(
      x, count,
      [&](bool present, u32 key) {
        if (present)
          atomicAdd(&counters[first_of(key)], 1u);
      },
      [&](u32 key, u32 number) { atomicAdd(&counters[first_of(key)], number); });
  __syncthreads();
  for (u32 at = threadIdx.x; at < FIRST; at += blockDim.x)
    if (counters[at] > 0)
      atomicAdd(&search.first[at], counters[at]);
}

extern "C" __global__ void count_second(const float *x, u64 count, Search search) {
  __shared__ u16 slots[FIRST];
  __shared__ u32 counters[LOCAL_MAX * SECOND];
  const u32 slot_count = *search.slot_count;
  const bool local = slot_count <= LOCAL_MAX;
  for (u32 at = threadIdx.x; at < FIRST; at += blockDim.x)
    slots[at] = search.slots[at];
  for (u32 at = threadIdx.x; at < LOCAL_MAX * SECOND; at += blockDim.x)
    counters[at] = 0;
  __syncthreads();
  auto add = [&](u32 key, u32 number) {
    const u32 slot = slots[first_of(key)];
    if (slot != 0)
      atomicAdd(&(local ? counters : search.second)[(slot - 1) * SECOND + second_of(key)], number);
  };
  if (local) {
    each_key(
        x, count,
        [&](bool present, u32 key) {
          const u32 slot = slots[first_of(key)];
          if (present && slot != 0)
            atomicAdd(&counters[(slot - 1) * SECOND + second_of(key)], 1u);
        },
        add);
  } else {
    each_key(
        x, count,
        [&](bool present, u32 key) {
          const u32 slot = slots[first_of(key)];
          count_together(search.second, present && slot != 0, slot == 0 ? 0 : (slot - 1) * SECOND + second_of(key));
        },
        add);
  }
  if (!local)
    return;
  __syncthreads();
  for (u32 at = threadIdx.x; at < slot_count * SECOND; at += blockDim.x)
    if (counters[at] > 0)
      atomicAdd(&search.second[at], counters[at]);
}

extern "C" __global__ void count_third(const float *x, u64 count, Search search, Ranks ranks) {
  __shared__ u16 slots[FIRST];
  for (u32 at = threadIdx.x; at < FIRST; at += blockDim.x)
    slots[at] = search.slots[at];
  __syncthreads();
  // The counter of a key; false if it has none.
  auto find = [&](u32 key, u32 *at) {
    const u32 slot = slots[first_of(key)];
    const u32 second = slot == 0 ? 0 : search.second_slots[(slot - 1) * SECOND + second_of(key)];
    *at = second == 0 ? 0 : (ranks.ranks - second) * THIRD + key % THIRD;
    return second != 0;
  };
  each_key(
      x, count,
      [&](bool present, u32 key) {
        u32 at = 0;
        const bool counts = present && find(key, &at);
        count_together(search.third, counts, at);
      },
      [&](u32 key, u32 number) {
        u32 at = 0;
        if (find(key, &at))
          atomicAdd(&search.third[at], number);
      });
}

// The sum of the values of all threads up to this one. `sums` has room for one number per thread.
FUNCTION u32 block_scan(u32 value, u32 *sums) {
  sums[threadIdx.x] = value;
  __syncthreads();
  for (u32 distance = 1; distance < blockDim.x; distance *= 2) {
    const u32 other = threadIdx.x >= distance ? sums[threadIdx.x - distance] : 0;
    __syncthreads();
    sums[threadIdx.x] += other;
    __syncthreads();
  }
  const u32 sum = sums[threadIdx.x];
  __syncthreads();
  return sum;
}

// One block of 1024 threads: the first bucket of each rank. At most 1024 ranks.
extern "C" __global__ void select_first(Search search, Ranks ranks) {
  constexpr u32 EACH = FIRST / 1024;
  __shared__ u32 below[FIRST];
  __shared__ u32 sums[1024];
  u32 total = 0;
  for (u32 at = 0; at < EACH; ++at)
    total += search.first[EACH * threadIdx.x + at];
  u32 sum = block_scan(total, sums) - total;
  for (u32 at = 0; at < EACH; ++at) {
    below[EACH * threadIdx.x + at] = sum;
    sum += search.first[EACH * threadIdx.x + at];
  }
  __syncthreads();
  const bool is_rank = threadIdx.x < ranks.ranks;
  u32 rank = 0, bucket = 0;
  if (is_rank) {
    rank = rank_of_end(threadIdx.x, ranks.length, ranks.bins, ranks.gapless);
    // The last bucket with at most `rank` values below it.
    for (u32 bit = FIRST / 2; bit > 0; bit /= 2)
      bucket |= below[bucket | bit] <= rank ? bit : 0;
  }
  sums[threadIdx.x] = bucket;
  __syncthreads();
  // Ranks ascend, so those in one bucket follow each other.
  const bool is_new = is_rank && (threadIdx.x == 0 || sums[threadIdx.x - 1] != bucket);
  __syncthreads();
  const u32 slot = block_scan(is_new, sums);
  if (is_rank) {
    search.places[threadIdx.x] = Place{slot, bucket, 0, rank - below[bucket]};
    search.slots[bucket] = u16(slot);
    if (threadIdx.x == ranks.ranks - 1)
      *search.slot_count = slot;
  }
}

// Where the value of rank `rest` is: the bucket, and its rank within it.
struct Found {
  u32 bucket, rest;
};

// One warp: finds a rank among the buckets of a histogram, of which each lane adds up `each`.
FUNCTION Found find_bucket(const u32 *counters, u32 each, u32 rest) {
  const u32 lane = threadIdx.x % 32;
  u32 total = 0;
  for (u32 at = 0; at < each; ++at)
    total += counters[lane * each + at];
  u32 sum = total;
  for (u32 distance = 1; distance < 32; distance *= 2) {
    const u32 other = __shfl_sync(0xffffffff, sum, (lane + 32 - distance) % 32);
    sum += lane >= distance ? other : 0;
  }
  const u32 below = sum - total;
  const bool is_here = below <= rest && rest < sum;
  Found found = {lane * each, rest - below};
  if (is_here) {
    while (found.rest >= counters[found.bucket]) {
      found.rest -= counters[found.bucket];
      ++found.bucket;
    }
  }
  const u32 where = lane_of(__ballot_sync(0xffffffff, is_here));
  found.bucket = __shfl_sync(0xffffffff, found.bucket, where);
  found.rest = __shfl_sync(0xffffffff, found.rest, where);
  return found;
}

// One block of 32 threads for each rank: its second bucket.
extern "C" __global__ void select_second(Search search, Ranks ranks) {
  const Place place = search.places[blockIdx.x];
  const Found found = find_bucket(search.second + (place.slot - 1) * SECOND, SECOND / 32, place.rest);
  if (threadIdx.x == 0) {
    search.places[blockIdx.x] = Place{place.slot, place.first, found.bucket, found.rest};
    atomicMax(&search.second_slots[(place.slot - 1) * SECOND + found.bucket], ranks.ranks - blockIdx.x);
  }
}

// One block of 32 threads for each rank: its value.
extern "C" __global__ void select_third(Search search, Ranks ranks) {
  const Place place = search.places[blockIdx.x];
  const u32 histogram = ranks.ranks - search.second_slots[(place.slot - 1) * SECOND + place.second];
  const Found found = find_bucket(search.third + histogram * THIRD, THIRD / 32, place.rest);
  if (threadIdx.x == 0)
    search.ends[blockIdx.x] = value_of_order_key(key_of(place.first, place.second, found.bucket));
}

// One value from each of `size` equal parts.
extern "C" __global__ void take_sample(const float *x, u64 count, u64 seed, u64 size, float *sample) {
  for (u64 part = first_index(); part < size; part += index_stride())
    sample[part] = x[sample_position(seed, part, count, size)];
}

// --- uniform, sort, fast -------------------------------------------------------------------------------------------------

// Codes of `code_bits` in each of 2^bin_bits bins, of which the first `present` have values.
struct BinFormat {
  u32 code_bits, bin_bits, present;
};

constexpr u32 BINS_MAX = 512;

// The tables for encoding.
struct Bins {
  double per_steps[BINS_MAX];
  float begins[BINS_MAX];
  float end;
};

// One block of BINS_MAX threads: the grids of the bins, from their ends or, for one bin, from the extremes.
extern "C" __global__ void set_bins(const float *ends, const u32 *extremes, BinFormat format, Bins *bins, u8 *body,
                                    u32 *status) {
  const u32 bin = threadIdx.x, count = 1u << format.bin_bits;
  if (bin >= count)
    return;
  Grid grid = {0.0, 0.0};
  const bool present = bin < format.present;
  if (present) {
    float lo, hi;
    if (extremes != nullptr) {
      range_of_extremes(extremes, &lo, &hi);
    } else {
      lo = ends[2 * bin];
      hi = ends[2 * bin + 1];
    }
    if (!grid_over(lo, hi, code_max_of(format.code_bits), &grid))
      atomicOr(status, REFUSED);
    if (bin == format.present - 1)
      bins->end = hi;
  }
  bins->begins[bin] = present ? float(grid.lo) : float_of(INFINITY_BITS);
  bins->per_steps[bin] = per_step_of(grid.step);
  float *table = reinterpret_cast<float *>(body);
  table[bin] = float(grid.lo);
  table[count + bin] = float(grid.step);
}

extern "C" __global__ void bins_encode(const float *x, u64 count, BinFormat format, const Bins *bins, u8 *body,
                                       u32 *status) {
  __shared__ double per_steps[BINS_MAX];
  __shared__ float begins[BINS_MAX];
  const u32 bin_count = 1u << format.bin_bits, width = format.code_bits + format.bin_bits;
  for (u32 at = threadIdx.x; at < bin_count; at += blockDim.x) {
    per_steps[at] = bins->per_steps[at];
    begins[at] = bins->begins[at];
  }
  __syncthreads();
  const float end = bins->end;
  u8 *packed = body + 8 * u64(bin_count);
  const bool aligned = is_aligned(x);
  bool refused = false;
  for (u64 first = 8 * first_index(); first < count; first += 8 * index_stride()) {
    float values[8];
    u32 symbols[8];
    const u32 present = load_eight(x, first, count, aligned, values);
    for (u32 at = 0; at < 8; ++at) {
      refused |= !is_finite(values[at]);
      const u32 symbol = symbol_of(values[at], begins, per_steps, end, format.bin_bits, format.code_bits);
      symbols[at] = at < present ? symbol : 0;
    }
    store_group(packed + first / 8 * width, join_codes(symbols, width), width, group_bytes(first, count, width));
  }
  if (refused)
    atomicOr(status, REFUSED);
}

extern "C" __global__ void bins_decode(const u8 *body, u64 count, BinFormat format, float *out) {
  __shared__ float los[BINS_MAX], steps[BINS_MAX];
  const u32 bin_count = 1u << format.bin_bits, width = format.code_bits + format.bin_bits;
  const float *table = reinterpret_cast<const float *>(body);
  for (u32 at = threadIdx.x; at < bin_count; at += blockDim.x) {
    los[at] = table[at];
    steps[at] = table[bin_count + at];
  }
  __syncthreads();
  const u8 *packed = body + 8 * u64(bin_count);
  const bool aligned = is_aligned(out);
  for (u64 first = 8 * first_index(); first < count; first += 8 * index_stride()) {
    u32 symbols[8];
    float values[8];
    split_codes(load_group(packed + first / 8 * width, width, group_bytes(first, count, width)), width, symbols);
    for (u32 at = 0; at < 8; ++at) {
      const u32 bin = symbols[at] >> format.code_bits;
      values[at] = grid_value(Grid{los[bin], steps[bin]}, symbols[at] & code_max_of(format.code_bits));
    }
    store_eight(out, first, count, aligned, values);
  }
}
