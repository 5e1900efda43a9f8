// Resizes and normalises images that came as bytes: data/image/resample.rs for a GPU, with the same operations in the same order.
#include "portable.cuh"

constexpr u32 CHANNELS = 3;

// A batch. Each image has `image_bytes` bytes, a multiple of 4:
//   taps x, taps y | starts x [side] | starts y [side] | weights x [side * taps_x_max] | weights y [side * taps_y_max] | pixels
// all of them words of 32 bits, but for the pixels [height, width, 3]. The weights of an output pixel follow those of the one before.
// Whatever the words are, no byte outside the image's is read.
struct ImageForm {
  u32 images, side, width, height, taps_x_max, taps_y_max, image_bytes, channels_last;
  float scale[CHANNELS], shift[CHANNELS];
};

FUNCTION u32 least(u32 a, u32 b) { return a < b ? a : b; }

// A block computes lines of images, and a thread pixels of a line.
extern "C" __global__ void resize_images(const u8 *bytes, ImageForm form, float *out) {
  const u32 side = form.side;
  const u64 plane = u64(side) * side;
  for (u32 line = blockIdx.x; line < form.images * side; line += gridDim.x) {
    const u32 image = line / side, y = line % side;
    const u32 *words = reinterpret_cast<const u32 *>(bytes + u64(image) * form.image_bytes);
    const u32 taps_x = least(words[0], form.taps_x_max), taps_y = least(words[1], form.taps_y_max);
    const u32 *starts_x = words + 2, *starts_y = starts_x + side;
    const float *weights_x = reinterpret_cast<const float *>(starts_y + side), *weights_y = weights_x + side * form.taps_x_max;
    const u8 *pixels = reinterpret_cast<const u8 *>(weights_y + side * form.taps_y_max);
    for (u32 x = threadIdx.x; x < side; x += blockDim.x) {
      float sum[CHANNELS] = {};
      for (u32 tap_y = 0; tap_y < taps_y; ++tap_y) {
        const u8 *source = pixels + CHANNELS * u64(form.width) * least(starts_y[y] + tap_y, form.height - 1);
        float across[CHANNELS] = {};
        for (u32 tap_x = 0; tap_x < taps_x; ++tap_x) {
          const u8 *pixel = source + CHANNELS * least(starts_x[x] + tap_x, form.width - 1);
          for (u32 c = 0; c < CHANNELS; ++c)
            across[c] += (float(pixel[c]) * form.scale[c] + form.shift[c]) * weights_x[x * taps_x + tap_x];
        }
        const float weight = weights_y[y * taps_y + tap_y];
        // The CPU adds two products, and more or fewer to 0, which differs where a product is -0.
        const bool first_of_two = tap_y == 0 && taps_y == 2;
        for (u32 c = 0; c < CHANNELS; ++c)
          sum[c] = first_of_two ? across[c] * weight : sum[c] + across[c] * weight;
      }
      const u64 pixel = u64(y) * side + x;
      for (u32 c = 0; c < CHANNELS; ++c)
        out[form.channels_last ? CHANNELS * (image * plane + pixel) + c : (CHANNELS * u64(image) + c) * plane + pixel] = sum[c];
    }
  }
}
