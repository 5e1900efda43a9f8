// Instance norm of channels-last images, without weights: each channel of each image gets mean 0 and variance 1. libtorch's own
// works on contiguous images, so it copies channels-last ones before and after.
//
// A block has 8 × 32 threads: eight groups of four channels, of which it reads 128 bytes per pixel, times 32 pixels at a time. Small
// images have a block for all pixels of its channels, which computes everything. The pixels of large ones are split over blocks:
// one kernel sums, one turns the sums into statistics, one writes the result. Nothing depends on the order in which blocks run.
#include "portable.cuh"

constexpr u32 NORM_LANES = 8;
constexpr u32 NORM_ROWS = 32;

struct NormShape {
  u32 images, pixels, channels, splits;
};

// Four neighbouring channels of a pixel.
struct alignas(16) FloatQuad {
  float values[4];
  FUNCTION_MEMBER float get(u32 at) const { return values[at]; }
  FUNCTION_MEMBER void set(u32 at, float value) { values[at] = value; }
};

// bfloat16, rounded to the nearest, to even ones at midpoints.
struct alignas(8) HalfQuad {
  u16 values[4];
  FUNCTION_MEMBER float get(u32 at) const { return float_of(u32(values[at]) << 16); }
  FUNCTION_MEMBER void set(u32 at, float value) {
    const u32 bits = bits_of(value);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    values[at] = is_nan ? u16(0x7fc0) : u16((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
  }
};

// What a thread works on.
struct NormPlace {
  u32 image, quad, split, row, lane;
  bool exists;
};

FUNCTION NormPlace place_of(NormShape shape) {
  const u32 quads = shape.channels / 4, tiles = (quads + NORM_LANES - 1) / NORM_LANES;
  const u32 lane = threadIdx.x % NORM_LANES, tile = blockIdx.x % tiles, rest = blockIdx.x / tiles;
  const u32 quad = tile * NORM_LANES + lane;
  return {rest / shape.splits, quad, rest % shape.splits, threadIdx.x / NORM_LANES, lane, quad < quads};
}

FUNCTION u32 split_begin(NormShape shape, u32 split) {
  return u32(u64(shape.pixels) * split / shape.splits);
}

// Calls `body` with the index of each quad that this thread has.
template <typename Body> FUNCTION void each_quad(NormShape shape, NormPlace place, Body body) {
  if (!place.exists)
    return;
  const u32 quads = shape.channels / 4, end = split_begin(shape, place.split + 1);
  const u64 image = u64(place.image) * shape.pixels;
  UNROLL_4
  for (u32 pixel = split_begin(shape, place.split) + place.row; pixel < end; pixel += NORM_ROWS)
    body((image + pixel) * quads + place.quad);
}

// Adds the sums of the rows of a block; every thread gets those of its lane.
FUNCTION void add_rows(NormPlace place, float *first, float *second) {
  __shared__ float room[NORM_ROWS][NORM_LANES][8];
  float *own = room[place.row][place.lane];
  for (u32 at = 0; at < 4; ++at) {
    own[at] = first[at];
    own[at + 4] = second[at];
  }
  for (u32 half = NORM_ROWS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (place.row < half)
      for (u32 at = 0; at < 8; ++at)
        own[at] += room[place.row + half][place.lane][at];
  }
  __syncthreads();
  for (u32 at = 0; at < 4; ++at) {
    first[at] = room[0][place.lane][at];
    second[at] = room[0][place.lane][at + 4];
  }
}

// The mean of so many values, and the sum of the squares of their distances from it.
struct Moments {
  float count, mean, squares;
};

// Those of both sets of values (Chan). Nothing cancels, wherever the means are.
FUNCTION Moments merged(Moments a, Moments b) {
  if (b.count == 0)
    return a;
  if (a.count == 0)
    return b;
  const float count = a.count + b.count, gap = b.mean - a.mean;
  return {count, a.mean + gap * (b.count / count), a.squares + b.squares + gap * gap * (a.count * (b.count / count))};
}

FUNCTION float inverse_deviation(float squares, u32 pixels, double epsilon) {
  return float(1.0 / sqrt(double(squares) / pixels + epsilon));
}

// The moments of a block's part of each channel; every thread gets those of its lane.
template <typename Quad> FUNCTION void find_moments(const Quad *x, NormShape shape, NormPlace place, Moments *moments) {
  // A thread has few values, and sums their distances from its first one.
  float origin[4] = {}, first[4] = {}, second[4] = {}, count = 0;
  each_quad(shape, place, [&](u64 index) {
    const Quad values = x[index];
    for (u32 at = 0; at < 4; ++at) {
      origin[at] = count == 0 ? values.get(at) : origin[at];
      const float offset = values.get(at) - origin[at];
      first[at] += offset;
      second[at] += offset * offset;
    }
    count += 1;
  });
  __shared__ Moments room[NORM_ROWS][NORM_LANES][4];
  Moments *own = room[place.row][place.lane];
  for (u32 at = 0; at < 4; ++at) {
    const float mean = count == 0 ? 0 : first[at] / count, squares = second[at] - first[at] * mean;
    own[at] = {count, origin[at] + mean, squares > 0 ? squares : 0};
  }
  for (u32 half = NORM_ROWS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (place.row < half)
      for (u32 at = 0; at < 4; ++at)
        own[at] = merged(own[at], room[place.row + half][place.lane][at]);
  }
  __syncthreads();
  for (u32 at = 0; at < 4; ++at)
    moments[at] = room[0][place.lane][at];
}

// The statistics of each channel of each image: all means, then all inverse deviations; or all means of the gradient, then of its
// product with the normalised values.
struct ChannelPair {
  float *first, *second;
};

FUNCTION ChannelPair pair_of(float *pairs, NormShape shape, NormPlace place) {
  const u64 at = u64(place.image) * shape.channels + 4 * place.quad;
  return {pairs + at, pairs + u64(shape.images) * shape.channels + at};
}

// Copies the values of a thread's channels, so that loops read registers.
FUNCTION void read_pair(float *pairs, NormShape shape, NormPlace place, float *first, float *second) {
  if (!place.exists)
    return;
  const ChannelPair from = pair_of(pairs, shape, place);
  for (u32 at = 0; at < 4; ++at) {
    first[at] = from.first[at];
    second[at] = from.second[at];
  }
}

// Sums of a block, for the kernel that adds those of all splits.
FUNCTION void keep_sums(float *sums, NormShape shape, NormPlace place, const float *first, const float *second) {
  if (place.row != 0 || !place.exists)
    return;
  const ChannelPair to = pair_of(sums + 2 * u64(place.split) * shape.images * shape.channels, shape, place);
  for (u32 at = 0; at < 4; ++at) {
    to.first[at] = first[at];
    to.second[at] = second[at];
  }
}

template <typename Quad>
FUNCTION void normalise(const Quad *x, NormShape shape, NormPlace place, const float *mean, const float *inverse, Quad *y) {
  each_quad(shape, place, [&](u64 index) {
    const Quad values = x[index];
    Quad result;
    for (u32 at = 0; at < 4; ++at)
      result.set(at, (values.get(at) - mean[at]) * inverse[at]);
    y[index] = result;
  });
}

template <typename Quad>
FUNCTION void sum_gradients(const Quad *gradient, const Quad *x, NormShape shape, NormPlace place, ChannelPair statistics,
                            float *first, float *second) {
  each_quad(shape, place, [&](u64 index) {
    const Quad values = x[index], upstream = gradient[index];
    for (u32 at = 0; at < 4; ++at) {
      first[at] += upstream.get(at);
      second[at] += upstream.get(at) * ((values.get(at) - statistics.first[at]) * statistics.second[at]);
    }
  });
  add_rows(place, first, second);
}

template <typename Quad>
FUNCTION void write_gradients(const Quad *gradient, const Quad *x, NormShape shape, NormPlace place, ChannelPair statistics,
                              const float *mean, const float *product, Quad *out) {
  each_quad(shape, place, [&](u64 index) {
    const Quad values = x[index], upstream = gradient[index];
    Quad result;
    for (u32 at = 0; at < 4; ++at) {
      const float normal = (values.get(at) - statistics.first[at]) * statistics.second[at];
      result.set(at, statistics.second[at] * (upstream.get(at) - mean[at] - normal * product[at]));
    }
    out[index] = result;
  });
}

// --- Small images: one kernel --------------------------------------------------------------------------------------------

template <typename Quad>
FUNCTION void small_forward(const Quad *x, NormShape shape, double epsilon, float *statistics, Quad *y) {
  const NormPlace place = place_of(shape);
  Moments moments[4];
  find_moments(x, shape, place, moments);
  if (!place.exists)
    return;
  float mean[4], inverse[4];
  const ChannelPair to = pair_of(statistics, shape, place);
  for (u32 at = 0; at < 4; ++at) {
    mean[at] = moments[at].mean;
    inverse[at] = inverse_deviation(moments[at].squares, shape.pixels, epsilon);
    if (place.row == 0) {
      to.first[at] = mean[at];
      to.second[at] = inverse[at];
    }
  }
  normalise(x, shape, place, mean, inverse, y);
}

template <typename Quad>
FUNCTION void small_backward(const Quad *gradient, const Quad *x, NormShape shape, float *statistics, Quad *out) {
  const NormPlace place = place_of(shape);
  float mean[4] = {}, inverse[4] = {}, first[4] = {}, second[4] = {};
  read_pair(statistics, shape, place, mean, inverse);
  const ChannelPair own = {mean, inverse};
  sum_gradients(gradient, x, shape, place, own, first, second);
  for (u32 at = 0; at < 4; ++at) {
    first[at] /= shape.pixels;
    second[at] /= shape.pixels;
  }
  write_gradients(gradient, x, shape, place, own, first, second, out);
}

// --- Large images: sums, statistics, result ------------------------------------------------------------------------------

template <typename Quad> FUNCTION void large_sums(const Quad *x, NormShape shape, float *sums) {
  const NormPlace place = place_of(shape);
  Moments moments[4];
  find_moments(x, shape, place, moments);
  float mean[4], squares[4];
  for (u32 at = 0; at < 4; ++at) {
    mean[at] = moments[at].mean;
    squares[at] = moments[at].squares;
  }
  keep_sums(sums, shape, place, mean, squares);
}

// Adds the sums of all splits of a channel of an image, which has number `channel` of all.
FUNCTION void add_splits(const float *sums, NormShape shape, u32 channel, double *first, double *second) {
  const u64 all = u64(shape.images) * shape.channels;
  *first = *second = 0;
  UNROLL_4
  for (u32 split = 0; split < shape.splits; ++split) {
    *first += sums[2 * split * all + channel];
    *second += sums[(2 * split + 1) * all + channel];
  }
}

// The statistics of all splits together.
extern "C" __global__ void norm_statistics(NormShape shape, double epsilon, const float *sums, float *statistics) {
  const u32 all = shape.images * shape.channels;
  for (u32 channel = blockIdx.x * blockDim.x + threadIdx.x; channel < all; channel += gridDim.x * blockDim.x) {
    Moments moments = {0, 0, 0};
    UNROLL_4
    for (u32 split = 0; split < shape.splits; ++split) {
      const float count = float(split_begin(shape, split + 1) - split_begin(shape, split));
      const u64 at = 2 * u64(split) * all + channel;
      moments = merged(moments, Moments{count, sums[at], sums[at + all]});
    }
    statistics[channel] = moments.mean;
    statistics[all + channel] = inverse_deviation(moments.squares, shape.pixels, epsilon);
  }
}

template <typename Quad>
FUNCTION void large_result(const Quad *x, NormShape shape, float *statistics, Quad *y) {
  const NormPlace place = place_of(shape);
  float mean[4] = {}, inverse[4] = {};
  read_pair(statistics, shape, place, mean, inverse);
  normalise(x, shape, place, mean, inverse, y);
}

template <typename Quad>
FUNCTION void large_gradient_sums(const Quad *gradient, const Quad *x, NormShape shape, float *statistics, float *sums) {
  const NormPlace place = place_of(shape);
  float mean[4] = {}, inverse[4] = {}, first[4] = {}, second[4] = {};
  read_pair(statistics, shape, place, mean, inverse);
  sum_gradients(gradient, x, shape, place, ChannelPair{mean, inverse}, first, second);
  keep_sums(sums, shape, place, first, second);
}

extern "C" __global__ void norm_gradient_means(NormShape shape, const float *sums, float *means) {
  const u32 all = shape.images * shape.channels;
  for (u32 channel = blockIdx.x * blockDim.x + threadIdx.x; channel < all; channel += gridDim.x * blockDim.x) {
    double first, second;
    add_splits(sums, shape, channel, &first, &second);
    means[channel] = float(first / shape.pixels);
    means[all + channel] = float(second / shape.pixels);
  }
}

template <typename Quad>
FUNCTION void large_gradient(const Quad *gradient, const Quad *x, NormShape shape, float *statistics, float *means, Quad *out) {
  const NormPlace place = place_of(shape);
  float mean[4] = {}, inverse[4] = {}, first[4] = {}, second[4] = {};
  read_pair(statistics, shape, place, mean, inverse);
  read_pair(means, shape, place, first, second);
  write_gradients(gradient, x, shape, place, ChannelPair{mean, inverse}, first, second, out);
}

// The kernels for one type of elements.
#define NORM_KERNELS(SUFFIX, Quad)                                                                                             \
  extern "C" __global__ void norm_small_##SUFFIX(const Quad *x, NormShape shape, double epsilon, float *statistics, Quad *y) { \
    small_forward(x, shape, epsilon, statistics, y);                                                                           \
  }                                                                                                                            \
  extern "C" __global__ void norm_small_gradient_##SUFFIX(const Quad *gradient, const Quad *x, NormShape shape,                \
                                                          float *statistics, Quad *out) {                                      \
    small_backward(gradient, x, shape, statistics, out);                                                                       \
  }                                                                                                                            \
  extern "C" __global__ void norm_sums_##SUFFIX(const Quad *x, NormShape shape, float *sums) {                                 \
    large_sums(x, shape, sums);                                                                                                \
  }                                                                                                                            \
  extern "C" __global__ void norm_result_##SUFFIX(const Quad *x, NormShape shape, float *statistics, Quad *y) {                \
    large_result(x, shape, statistics, y);                                                                                     \
  }                                                                                                                            \
  extern "C" __global__ void norm_gradient_sums_##SUFFIX(const Quad *gradient, const Quad *x, NormShape shape,                 \
                                                         float *statistics, float *sums) {                                     \
    large_gradient_sums(gradient, x, shape, statistics, sums);                                                                 \
  }                                                                                                                            \
  extern "C" __global__ void norm_gradient_##SUFFIX(const Quad *gradient, const Quad *x, NormShape shape, float *statistics,   \
                                                    float *means, Quad *out) {                                                 \
    large_gradient(gradient, x, shape, statistics, means, out);                                                                \
  }

NORM_KERNELS(32, FloatQuad)
NORM_KERNELS(16, HalfQuad)
