//! Images as bytes, for a GPU that resizes and normalises them itself.
//!
//! An image of CIFAR has 3 KB, and 600 KB after resizing to 224 × 224 pixels. So the loader sends the original pixels with the weights of
//! the interpolation, and a kernel resizes them, with the bits of [`resample`](super::resample::resample).

use super::resample::Axis;
use super::Image;
use crate::engine::kernels::{self, ImageForm};
use crate::failure::Fault;
use tch::Tensor;

/// A batch of images as bytes; see [`Dataset::image_bytes`](crate::data::Dataset::image_bytes).
pub struct ImageBytes {
    pub(super) bytes: Tensor,
    pub(super) form: ImageForm,
    pub(super) target: Tensor,
}

impl ImageBytes {
    /// The bytes `[images, bytes of an image]`, on the host.
    pub fn bytes(&self) -> &Tensor {
        &self.bytes
    }

    /// The class numbers.
    pub fn target(&self) -> &Tensor {
        &self.target
    }

    /// What the bytes are, for the kernel.
    pub fn form(&self) -> ImageForm {
        self.form
    }

    /// The inputs of the model, from a copy of the bytes on a GPU.
    pub(crate) fn resized(&self, copy: &Tensor) -> Result<Tensor, Fault> {
        kernels::resize_images(copy, self.form)
    }
}

/// Writes an image, which has the size of `form`, and how to resize it. `into` has the bytes of one image.
pub(super) fn write(image: &Image<'_>, axes: &[Axis; 2], form: ImageForm, into: &mut [u8]) -> Result<(), Fault> {
    let taps = axes.each_ref().map(Axis::taps);
    let taps_max = form.taps_max();
    if taps[0] > taps_max[0] || taps[1] > taps_max[1] {
        return Err(Fault::internal(format!("at most {taps_max:?} taps"), format!("{taps:?}")));
    }
    let starts = axes.iter().flat_map(Axis::starts).map(|&start| start as u32);
    let weights = axes.iter().zip(taps_max).flat_map(|(axis, taps_max)| {
        let unused = axis.starts().len() * taps_max - axis.weights().len();
        axis.weights().iter().map(|weight| weight.to_bits()).chain(std::iter::repeat_n(0, unused))
    });
    let words = taps.into_iter().map(|taps| taps as u32).chain(starts).chain(weights);
    let tables: usize =
        2 + axes.iter().zip(taps_max).map(|(axis, taps)| axis.starts().len() * (1 + taps)).sum::<usize>();
    let (words_into, pixels_into) = into.split_at_mut(4 * tables);
    words_into.chunks_exact_mut(4).zip(words).for_each(|(to, word)| to.copy_from_slice(&word.to_ne_bytes()));
    let (pixels_into, rest) = pixels_into.split_at_mut(image.pixels.len());
    pixels_into.copy_from_slice(image.pixels);
    rest.fill(0);
    Ok(())
}
