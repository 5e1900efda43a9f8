// Runs the kernels of the codecs, of the masks, of images and of instance norm on the CPU.
// usage: program COMMAND NUMBERS...      reads a tensor or a body from the standard input, and writes to the standard output
//   encode KIND COUNT A B C SEED     the status word (4 bytes) and a body of the bytes that fit COUNT values
//   decode KIND COUNT A B C 0        COUNT values
//   bernoulli BYTES COUNT THRESHOLD ONE SEED 0
//   images 0 VALUES 0 0 0 0          reads an `ImageForm` and the bytes of the images; so many values of resized images
//   norm BYTES IMAGES PIXELS CHANNELS SPLITS 0     reads images and the gradient of the result; the result and the gradient of the images
// KIND is half (A = 1 for bf16), tile (A bits, B values in a tile, C = 1 for stochastic rounding with SEED as the key) or bins (A bits of a
// code, B bits of a bin, C = 0 for uniform, 1 for sort, otherwise the size of the sample of fast).
#include "cuda_on_cpu.h"

#include "../../src/engine/kernels/codecs.cu"
#include "../../src/engine/kernels/images.cu"
#include "../../src/engine/kernels/instance_norm.cu"
#include "../../src/engine/kernels/random.cu"

#include <iostream>
#include <iterator>
#include <string>

using cuda_on_cpu::launch;

// Memory that begins at a multiple of 16, and is 0.
struct Memory {
  std::vector<Four> room;
  explicit Memory(size_t bytes) : room(bytes / sizeof(Four) + 1) {}
  template <typename T> T *as() { return reinterpret_cast<T *>(room.data()); }
};

static void write(const void *from, size_t bytes) { std::cout.write(static_cast<const char *>(from), bytes); }

static void find_ends(const float *x, const Ranks &ranks, float *ends) {
  Memory first(4 * FIRST), second(4 * SECOND * ranks.ranks), third(4 * THIRD * ranks.ranks), slots(2 * FIRST);
  Memory second_slots(4 * SECOND * ranks.ranks), slot_count(4), places(sizeof(Place) * ranks.ranks);
  const Search search = {first.as<u32>(), second.as<u32>(),       third.as<u32>(),      slots.as<u16>(),
                         second_slots.as<u32>(), slot_count.as<u32>(), places.as<Place>(), ends};
  launch(2, 64, [&] { count_first(x, ranks.length, search); });
  launch(1, 1024, [&] { select_first(search, ranks); });
  launch(2, 64, [&] { count_second(x, ranks.length, search); });
  launch(ranks.ranks, 32, [&] { select_second(search, ranks); });
  launch(2, 64, [&] { count_third(x, ranks.length, search, ranks); });
  launch(ranks.ranks, 32, [&] { select_third(search, ranks); });
}

// The kernels for one type of elements.
template <typename Quad> struct NormKernels {
  void (*small)(const Quad *, NormShape, double, float *, Quad *);
  void (*small_gradient)(const Quad *, const Quad *, NormShape, float *, Quad *);
  void (*sums)(const Quad *, NormShape, float *);
  void (*result)(const Quad *, NormShape, float *, Quad *);
  void (*gradient_sums)(const Quad *, const Quad *, NormShape, float *, float *);
  void (*gradient)(const Quad *, const Quad *, NormShape, float *, float *, Quad *);
};

template <typename Quad> static void norm(Memory &in, NormShape shape, const NormKernels<Quad> &run) {
  const size_t quads = size_t(shape.images) * shape.pixels * shape.channels / 4, all = size_t(shape.images) * shape.channels;
  const Quad *x = in.as<Quad>(), *gradient = x + quads;
  Memory y(quads * sizeof(Quad)), out(quads * sizeof(Quad)), statistics(8 * all), sums(8 * all * shape.splits), means(8 * all);
  const unsigned blocks = shape.images * ((shape.channels + 31) / 32) * shape.splits;
  float *kept = statistics.as<float>(), *summed = sums.as<float>(), *mean = means.as<float>();
  if (shape.splits == 1) {
    launch(blocks, 256, [&] { run.small(x, shape, 1e-5, kept, y.as<Quad>()); });
    launch(blocks, 256, [&] { run.small_gradient(gradient, x, shape, kept, out.as<Quad>()); });
  } else {
    launch(blocks, 256, [&] { run.sums(x, shape, summed); });
    launch(2, 32, [&] { norm_statistics(shape, 1e-5, summed, kept); });
    launch(blocks, 256, [&] { run.result(x, shape, kept, y.as<Quad>()); });
    launch(blocks, 256, [&] { run.gradient_sums(gradient, x, shape, kept, summed); });
    launch(2, 32, [&] { norm_gradient_means(shape, summed, mean); });
    launch(blocks, 256, [&] { run.gradient(gradient, x, shape, kept, mean, out.as<Quad>()); });
  }
  write(y.as<char>(), quads * sizeof(Quad));
  write(out.as<char>(), quads * sizeof(Quad));
}

int main(int arguments, char **texts) {
  if (arguments != 8)
    return 2;
  const std::string command = texts[1], kind = texts[2];
  const u64 count = std::stoull(texts[3]), a = std::stoull(texts[4]), b = std::stoull(texts[5]);
  const u64 c = std::stoull(texts[6]), seed = std::stoull(texts[7]);
  const std::string input{std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>()};
  Memory in(input.size());
  std::memcpy(in.as<char>(), input.data(), input.size());

  if (command == "bernoulli") {
    const u64 bytes = std::stoull(kind);
    Memory out(bytes * count);
    const u64 *at = &c;
    launch(3, 32, [&] {
      if (bytes == 2)
        bernoulli_16(out.as<u16>(), count, at, a, b);
      else if (bytes == 4)
        bernoulli_32(out.as<u32>(), count, at, a, b);
      else
        bernoulli_64(out.as<u64>(), count, at, a, b);
    });
    write(out.as<char>(), bytes * count);
    return 0;
  }

  if (command == "images") {
    ImageForm form;
    std::memcpy(&form, in.as<char>(), sizeof(form));
    Memory out(4 * count);
    launch(3, 64, [&] { resize_images(in.as<u8>() + sizeof(form), form, out.as<float>()); });
    write(out.as<char>(), 4 * count);
    return 0;
  }

  if (command == "norm") {
    const NormShape shape = {u32(count), u32(a), u32(b), u32(c)};
    if (kind == "4")
      norm<FloatQuad>(in, shape, {norm_small_32, norm_small_gradient_32, norm_sums_32, norm_result_32,
                                  norm_gradient_sums_32, norm_gradient_32});
    else
      norm<HalfQuad>(in, shape, {norm_small_16, norm_small_gradient_16, norm_sums_16, norm_result_16,
                                 norm_gradient_sums_16, norm_gradient_16});
    return 0;
  }

  const TileFormat tile = {u32(a), u32(b), u32(c), u32(seed)};
  const u64 bins = u64(1) << (kind == "bins" ? b : 0);
  const u64 sampled = c <= 1 || c > count ? count : c;
  const BinFormat format = {u32(a), u32(b), u32(sampled < bins ? sampled : bins)};
  if (command == "decode") {
    Memory out(4 * count);
    launch(3, 64, [&] {
      if (kind == "half")
        half_decode(in.as<u8>(), count, u32(a), out.as<float>());
      else if (kind == "tile")
        tile_decode(in.as<u8>(), count, tile, out.as<float>());
      else
        bins_decode(in.as<u8>(), count, format, out.as<float>());
    });
    write(out.as<char>(), 4 * count);
    return 0;
  }

  const float *x = in.as<float>();
  Memory words(64), tables(sizeof(Bins));
  u32 *found = words.as<u32>(), *status = words.as<u32>() + 4;
  u64 bytes = 2 * count;
  if (kind == "tile")
    bytes = 4 + 4 * ((count + b - 1) / b) + packed_bytes(count, tile.bits);
  if (kind == "bins")
    bytes = 8 * bins + packed_bytes(count, u32(a + b));
  Memory body(bytes);
  if (kind == "half") {
    launch(3, 64, [&] { half_encode(x, count, u32(a), body.as<u8>(), status); });
  } else if (kind == "tile") {
    launch(3, 64, [&] { extremes(x, count, found); });
    launch(3, THREADS, [&] { tile_encode(x, count, tile, found, body.as<u8>(), status); });
  } else {
    Memory ends(8 * bins), sample(4 * sampled);
    if (c == 0) {
      launch(3, 64, [&] { extremes(x, count, found); });
    } else if (c == 1) {
      find_ends(x, Ranks{count, u32(bins), 0, 2 * format.present}, ends.as<float>());
    } else {
      launch(3, 64, [&] { take_sample(x, count, seed, sampled, sample.as<float>()); });
      find_ends(sample.as<float>(), Ranks{sampled, u32(bins), 1, 2 * format.present}, ends.as<float>());
    }
    launch(1, BINS_MAX, [&] {
      set_bins(ends.as<float>(), c == 0 ? found : nullptr, format, tables.as<Bins>(), body.as<u8>(), status);
    });
    launch(3, 64, [&] { bins_encode(x, count, format, tables.as<Bins>(), body.as<u8>(), status); });
  }
  write(status, 4);
  write(body.as<char>(), bytes);
}
