//! Images as bytes, for a GPU that resizes and normalises them itself.
//!
//! An image of CIFAR has 3 KB, and 600 KB when it has been resized to 224 × 224 pixels. So the pixels go to the GPU as they are, with the
//! weights that they are resized with, and a kernel makes of them what [`resample`](super::resample::resample) does, bit for bit.

use super::resample::Axis;
use super::{Image, CHANNELS};
use crate::engine::kernels::{self, ImageForm};
use crate::failure::Fault;
use tch::Tensor;

/// A batch of images in the form that [`Dataset::image_bytes`](crate::data::Dataset::image_bytes) returns.
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

    /// What the kernel is told of the bytes.
    pub fn form(&self) -> ImageForm {
        self.form
    }

    /// The images, from a copy of the bytes on a GPU.
    pub(crate) fn resampled(&self, bytes: &Tensor) -> Result<Tensor, Fault> {
        kernels::resample(bytes, self.form)
    }
}

/// Writes an image and how to resize it; `into` has the bytes of one image.
pub(super) fn write(
    image: &Image<'_>,
    columns: &Axis,
    lines: &Axis,
    form: ImageForm,
    into: &mut [u8],
) -> Result<(), Fault> {
    let ((taps_x, starts_x), (taps_y, starts_y)) = (columns.sources(), lines.sources());
    let [taps_x_max, taps_y_max] = form.taps_max();
    let words = |values: &[usize]| values.iter().map(|&value| value as u32).collect::<Vec<u32>>();
    let tables = 2 + starts_x.len() * (1 + taps_x_max) + starts_y.len() * (1 + taps_y_max);
    let pixels = CHANNELS * image.width * image.height;
    if taps_x > taps_x_max || taps_y > taps_y_max || image.pixels.len() != pixels || into.len() < 4 * tables + pixels {
        let got = format!("{} × {} pixels with {taps_x} × {taps_y} taps", image.width, image.height);
        return Err(Fault::internal(format!("an image of the form {form:?}"), got));
    }
    let (words_into, pixels_into) = into.split_at_mut(4 * tables);
    let mut left = words_into.chunks_exact_mut(4);
    let mut put = |word: u32| left.next().into_iter().for_each(|to| to.copy_from_slice(&word.to_ne_bytes()));
    [taps_x, taps_y].into_iter().for_each(|taps| put(taps as u32));
    words(starts_x).into_iter().chain(words(starts_y)).for_each(&mut put);
    for (axis, outputs, taps_max) in [(columns, starts_x.len(), taps_x_max), (lines, starts_y.len(), taps_y_max)] {
        let weights = axis.all_weights();
        weights.iter().for_each(|weight| put(weight.to_bits()));
        (weights.len()..outputs * taps_max).for_each(|_| put(0));
    }
    pixels_into[..pixels].copy_from_slice(image.pixels);
    pixels_into[pixels..].fill(0);
    Ok(())
}
