// The arithmetic of the codecs: that of crates/distgpipe-core/src/codec, function by function, with the same bits. It must be
// compiled without fused multiply-adds.
#pragma once
#include "portable.cuh"

constexpr u32 INFINITY_BITS = 0x7f800000;
constexpr float FLOAT_MAX = 3.40282346638528859811704183484516925e+38f;

FUNCTION u32 magnitude_bits(float value) { return bits_of(value) & 0x7fffffff; }

FUNCTION u32 code_max_of(u32 bits) { return 0xffffu >> (16 - bits); }

// half.rs

// The nearest half-precision number, ties to even. The value must not be a NaN.
FUNCTION u16 f16_from_f32(float value) {
  const u32 bits = bits_of(value), magnitude = bits & 0x7fffffff;
  if (magnitude < (113u << 23))
    return u16((bits >> 16 & 0x8000) | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f)));
  const u32 normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  return u16((bits >> 16 & 0x8000) | (normal < 0x7c00 ? normal : 0x7c00));
}

FUNCTION float f32_from_f16(u16 half) {
  const u32 sign = u32(half & 0x8000) << 16, magnitude = u32(half & 0x7fff) << 13;
  if ((half & 0x7c00) == 0)
    return float_of(sign | bits_of(float_of(magnitude + (113u << 23)) - float_of(113u << 23)));
  if ((half & 0x7c00) == 0x7c00)
    return float_of(sign | (magnitude + (224u << 23)) | ((half & 0x3ff) == 0 ? 0 : 0x00400000));
  return float_of(sign | (magnitude + (112u << 23)));
}

FUNCTION u16 bf16_from_f32(float value) {
  const u32 bits = bits_of(value);
  return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

FUNCTION float f32_from_bf16(u16 half) { return float_of(u32(half) << 16); }

// grid.rs

struct Grid {
  double lo, step;
};

FUNCTION float grid_value(Grid grid, u32 code) { return float(grid.lo + double(code) * grid.step); }

FUNCTION float grid_value_within(Grid grid, u32 code) {
  float value = grid_value(grid, code);
  value = value < FLOAT_MAX ? value : FLOAT_MAX;
  return value > -FLOAT_MAX ? value : -FLOAT_MAX;
}

FUNCTION bool is_infinite(float value) { return magnitude_bits(value) == INFINITY_BITS; }

FUNCTION bool is_finite(float value) { return magnitude_bits(value) < INFINITY_BITS; }

// The grid over a range; false if it overflows.
FUNCTION bool grid_over(float lo, float hi, u32 code_max, Grid *out) {
  float step = float((double(hi) - double(lo)) / double(code_max));
  const double reach = double(lo) + (double(code_max) + 0.5) * double(step);
  if (reach < double(hi))
    step = float_of(bits_of(step) + 1);
  if (is_finite(step) && is_infinite(grid_value(Grid{lo, step}, code_max)))
    step = float_of(bits_of(step) - 1);
  *out = Grid{lo, step};
  return is_finite(grid_value(*out, code_max));
}

FUNCTION double per_step_of(double step) { return step > 0.0 ? 1.0 / step : 0.0; }

// To the nearest code, ties to even, at most `code_max`.
FUNCTION u32 code_of(float value, double lo, double per_step, u32 code_max) {
  const double steps = (double(value) - lo) * per_step;
  const u32 code = u32(bits_of(steps + 6755399441055744.0));
  return code < code_max ? code : code_max;
}

// The random number from 0 to 1 of an element.
FUNCTION double random_of(u32 key, u32 element) {
  u32 mixed = element ^ key;
  mixed = (mixed ^ mixed >> 16) * 0x7feb352du;
  mixed = (mixed ^ mixed >> 15) * 0x846ca68bu;
  mixed ^= mixed >> 16;
  return double(mixed >> 8) * (1.0 / 16777216.0);
}

// One of the two codes around a value, chosen by a random number from 0 to 1.
FUNCTION u32 code_stochastic(float value, double lo, double per_step, u32 code_max, double random) {
  constexpr double NEAR = 1.0 / 1024.0;
  double steps = (double(value) - lo) * per_step;
  steps = steps < double(code_max) ? steps : double(code_max);
  steps = steps > 0.0 ? steps : 0.0;
  const i32 below = i32(steps);
  const double above = steps - double(below);
  const bool up = above > NEAR && (above >= 1.0 - NEAR || above + random >= 1.0);
  return u32(below) + (up ? 1 : 0);
}

// tile.rs

FUNCTION double power_of_two(i32 exponent) { return double_of(u64(1023 + exponent) << 52); }

// The `e` for which 2^-e times this magnitude, given by its bits, is in [2^13, 2^14).
FUNCTION i32 exponent_for(u32 magnitude) {
  if (magnitude == 0)
    return 0;
  if (magnitude >> 23 != 0)
    return i32(magnitude >> 23) - 127 - 13;
  i32 log = 0;
  while (magnitude >> (log + 1) != 0)
    ++log;
  return log - 149 - 13;
}

FUNCTION u16 f16_below(double value) {
  const u16 nearest = f16_from_f32(float(value));
  if (double(f32_from_f16(nearest)) <= value)
    return nearest;
  if (nearest == 0 || nearest == 0x8000)
    return 0x8001;
  return u16(nearest < 0x8000 ? nearest - 1 : nearest + 1);
}

FUNCTION Grid tile_grid(u16 lo, u16 step, i32 exponent) {
  const double scale = power_of_two(exponent);
  return Grid{double(f32_from_f16(lo)) * scale, double(f32_from_f16(step)) * scale};
}

// The entry of a tile in the table: `lo` in the lower half, `step` in the upper.
FUNCTION u32 tile_entry(float tile_lo, float tile_hi, i32 exponent, u32 code_max) {
  const double scale = power_of_two(-exponent);
  const u16 lo = f16_below(double(tile_lo) * scale);
  const double exact = (double(tile_hi) * scale - double(f32_from_f16(lo))) / double(code_max);
  const u16 nearest = f16_from_f32(float(exact));
  const u16 below = u16(nearest == 0 ? 0 : nearest - 1);
  u16 step = nearest;
  if (!(grid_value_within(tile_grid(lo, nearest, exponent), code_max) >= tile_hi))
    step = u16(nearest + 1);
  if (grid_value_within(tile_grid(lo, below, exponent), code_max) >= tile_hi)
    step = below;
  return u32(lo) | u32(step) << 16;
}

FUNCTION Grid tile_grid_of_entry(u32 entry, i32 exponent) { return tile_grid(u16(entry), u16(entry >> 16), exponent); }

// order_statistics.rs

// An unsigned number that is ordered as the float is, with -0 below 0.
FUNCTION u32 order_key(float value) {
  const u32 bits = bits_of(value);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

FUNCTION float value_of_order_key(u32 key) { return float_of(key >> 31 ? key & 0x7fffffff : ~key); }

// The position of value `part` of a sample of `size` out of `length` values.
FUNCTION u64 sample_position(u64 seed, u64 part, u64 length, u64 size) {
  // `part + 1` steps of Knuth's generator at once: its steps are affine, and so are powers of them.
  u64 multiplier = 6364136223846793005ull, increment = 1442695040888963407ull, state = seed;
  for (u64 steps = part + 1; steps != 0; steps >>= 1) {
    if (steps & 1)
      state = state * multiplier + increment;
    increment = (multiplier + 1) * increment;
    multiplier *= multiplier;
  }
  const u64 begin = length * part / size, end = length * (part + 1) / size;
  return begin + (((state >> 32) * (end - begin)) >> 32);
}

// quantile_bins.rs

// The bin of a value: the last one that begins at or below it.
FUNCTION u32 bin_of(float value, const float *begins, u32 bin_bits) {
  u32 bin = 0;
  for (u32 bit = bin_bits; bit-- > 0;)
    bin |= u32(value >= begins[bin | 1u << bit]) << bit;
  return bin;
}

FUNCTION u32 symbol_of(float value, const float *begins, const double *per_steps, float end, u32 bin_bits,
                       u32 code_bits) {
  value = value < end ? value : end;
  value = value > begins[0] ? value : begins[0];
  const u32 bin = bin_of(value, begins, bin_bits);
  return bin << code_bits | code_of(value, double(begins[bin]), per_steps[bin], code_max_of(code_bits));
}

// The ranks of the two ends of a bin, for `sort` (all values) and for `fast` (a sample, in which a bin ends where the next begins).
FUNCTION u32 rank_of_end(u32 which, u64 length, u32 bins, bool gapless) {
  const u64 bin = which / 2, last = which % 2;
  if (gapless) {
    const u64 present = length < bins ? length : bins, rank = (bin + last) * length / present;
    return u32(rank < length ? rank : length - 1);
  }
  const u64 shortest = length / bins, longer = length % bins;
  const u64 begin = bin * shortest + (bin < longer ? bin : longer);
  return u32(last ? begin + shortest + (bin < longer ? 1 : 0) - 1 : begin);
}

// bits.rs

// Eight codes of `width` bits, which take exactly `width` bytes.
struct Group {
  u64 low, high;
};

FUNCTION Group join_codes(const u32 *codes, u32 width) {
  u64 front = 0, back = 0;
  for (u32 at = 0; at < 4; ++at) {
    front |= u64(codes[at]) << (at * width);
    back |= u64(codes[at + 4]) << (at * width);
  }
  const u32 shift = 4 * width;
  return shift == 64 ? Group{front, back} : Group{front | back << shift, back >> (64 - shift)};
}

FUNCTION void split_codes(Group group, u32 width, u32 *codes) {
  const u32 shift = 4 * width, mask = 0xffffu >> (16 - width);
  const u64 front = group.low, back = shift == 64 ? group.high : group.low >> shift | group.high << (64 - shift);
  for (u32 at = 0; at < 4; ++at) {
    codes[at] = u32(front >> (at * width)) & mask;
    codes[at + 4] = u32(back >> (at * width)) & mask;
  }
}

FUNCTION u64 packed_bytes(u64 codes, u32 width) { return (codes * width + 7) / 8; }

// Writes the first `bytes` bytes of a group. `to` is at a multiple of `width` bytes from an address that is a multiple of four.
FUNCTION void store_group(u8 *to, Group group, u32 width, u32 bytes) {
  if (bytes == width && width % 4 == 0) {
    u32 *words = reinterpret_cast<u32 *>(to);
    for (u32 at = 0; at < width / 4; ++at)
      words[at] = u32((at < 2 ? group.low : group.high) >> (32 * (at % 2)));
  } else if (bytes == width && width % 2 == 0) {
    u16 *words = reinterpret_cast<u16 *>(to);
    for (u32 at = 0; at < width / 2; ++at)
      words[at] = u16((at < 4 ? group.low : group.high) >> (16 * (at % 4)));
  } else {
    for (u32 at = 0; at < bytes; ++at)
      to[at] = u8((at < 8 ? group.low : group.high) >> (8 * (at % 8)));
  }
}

// The inverse. The other bits are 0.
FUNCTION Group load_group(const u8 *from, u32 width, u32 bytes) {
  u64 low = 0, high = 0;
  if (bytes == width && width % 4 == 0) {
    const u32 *words = reinterpret_cast<const u32 *>(from);
    for (u32 at = 0; at < width / 4; ++at)
      (at < 2 ? low : high) |= u64(words[at]) << (32 * (at % 2));
  } else if (bytes == width && width % 2 == 0) {
    const u16 *words = reinterpret_cast<const u16 *>(from);
    for (u32 at = 0; at < width / 2; ++at)
      (at < 4 ? low : high) |= u64(words[at]) << (16 * (at % 4));
  } else {
    for (u32 at = 0; at < bytes; ++at)
      (at < 8 ? low : high) |= u64(from[at]) << (8 * (at % 8));
  }
  return Group{low, high};
}
