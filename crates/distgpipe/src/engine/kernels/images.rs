//! Resizing and normalising images on a GPU.

use super::{argument, cuda_index, extent, Program, PORTABLE};
use crate::engine::Layout;
use crate::failure::Fault;
use tch::{Kind, Tensor};

pub(super) static PROGRAM: Program =
    Program { name: "images.cu", source: include_str!("images.cu"), headers: &[PORTABLE], kernels: &[c"resample"] };

const CHANNELS: u32 = 3;
/// Threads of a block, which computes a row of an image at a time.
const THREADS: u32 = 128;

/// What the bytes of a batch of images are: the kernel's `ImageForm`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ImageForm {
    images: u32,
    side: u32,
    width: u32,
    height: u32,
    taps_x_max: u32,
    taps_y_max: u32,
    row_bytes: u32,
    channels_last: u32,
    scale: [f32; CHANNELS as usize],
    shift: [f32; CHANNELS as usize],
}

impl ImageForm {
    /// Images of `size`, width and height, to be resized to squares, with at most so many taps along either axis. `None` if there are
    /// too many of them for the kernel.
    pub fn new(images: usize, size: [u32; 2], side: u32, taps_max: [u32; 2], layout: Layout) -> Option<Self> {
        let [width, height] = size;
        let images = u32::try_from(images).ok()?;
        images.checked_mul(side).filter(|&lines| lines < 1 << 31)?;
        let tables = side.checked_mul(2 + taps_max[0] + taps_max[1])?.checked_add(2)?.checked_mul(4)?;
        let pixels = width.checked_mul(height)?.checked_mul(CHANNELS)?.checked_next_multiple_of(4)?;
        Some(ImageForm {
            images,
            side,
            width,
            height,
            taps_x_max: taps_max[0],
            taps_y_max: taps_max[1],
            row_bytes: tables.checked_add(pixels)?,
            channels_last: u32::from(layout == Layout::ChannelsLast),
            scale: [1.0; CHANNELS as usize],
            shift: [0.0; CHANNELS as usize],
        })
    }

    /// The same images, each colour from 0 to 255 scaled and then shifted.
    pub fn normalised(self, scale: [f32; 3], shift: [f32; 3]) -> Self {
        ImageForm { scale, shift, ..self }
    }

    /// The bytes of an image.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes as usize
    }

    /// The form as the kernel gets it.
    pub fn words(&self) -> [u32; 14] {
        let [r, g, b] = self.scale.map(f32::to_bits);
        let [red, green, blue] = self.shift.map(f32::to_bits);
        let (x, y) = (self.taps_x_max, self.taps_y_max);
        [
            self.images,
            self.side,
            self.width,
            self.height,
            x,
            y,
            self.row_bytes,
            self.channels_last,
            r,
            g,
            b,
            red,
            green,
            blue,
        ]
    }

    /// The most taps along x and along y.
    pub fn taps_max(&self) -> [usize; 2] {
        [self.taps_x_max as usize, self.taps_y_max as usize]
    }
}

/// Whether a device can resize images. The kernel is compiled at the first call.
pub fn can_resample(device: usize) -> bool {
    PROGRAM.on(device).is_ok()
}

/// The images `[images, 3, side, side]` of bytes on a CUDA device.
pub fn resample(bytes: &Tensor, mut form: ImageForm) -> Result<Tensor, Fault> {
    let device = cuda_index(bytes)?;
    let counted = [i64::from(form.images), i64::from(form.row_bytes)];
    let suits = bytes.kind() == Kind::Uint8 && bytes.size() == counted && bytes.is_contiguous();
    if !suits || !(bytes.data_ptr() as usize).is_multiple_of(4) {
        return Err(Fault::internal(format!("bytes {counted:?} of images in words"), format!("{bytes:?}")));
    }
    let [images, side, channels] = [form.images, form.side, CHANNELS].map(i64::from);
    let on_device = (Kind::Float, bytes.device());
    let out = match form.channels_last {
        0 => Tensor::f_empty([images, channels, side, side], on_device)?,
        _ => Tensor::f_empty([images, side, side, channels], on_device)?.f_permute([0, 3, 1, 2])?,
    };
    let lines = form.images as usize * form.side as usize;
    if lines == 0 {
        return Ok(out);
    }
    let module = PROGRAM.on(device)?;
    let (mut from, mut to) = (bytes.data_ptr(), out.data_ptr());
    let arguments = &mut [argument(&mut from), argument(&mut form), argument(&mut to)];
    // SAFETY: the arguments are those of the kernel. It reads no bytes but those that were counted above, because `ImageForm::new` has
    // counted them in the same way, and writes three values for each pixel of the dense tensor `out`. libtorch reuses their memory only
    // for work behind this one on the same stream.
    unsafe { module.launch(device, c"resample", extent(lines * THREADS as usize, THREADS), arguments)? };
    Ok(out)
}
