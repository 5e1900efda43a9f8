//! Resizing and normalising images on a GPU.

use super::{argument, cuda_index, extent, Program, PORTABLE};
use crate::engine::Layout;
use crate::failure::Fault;
use tch::{Kind, Tensor};

pub(super) static PROGRAM: Program = Program {
    name: "images.cu",
    source: include_str!("images.cu"),
    headers: &[PORTABLE],
    kernels: &[c"resize_images"],
};

const CHANNELS: u32 = 3;
/// Threads of a block, which computes a line of an image at a time.
const THREADS: u32 = 128;

/// How images of one size are resized to squares and normalised.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ImageResizing {
    /// Width and height of the images.
    pub size: [u32; 2],
    /// Width and height of the squares.
    pub side: u32,
    /// The largest number of source pixels per output pixel, along x and along y.
    pub taps_max: [u32; 2],
    /// What each colour from 0 to 255 is multiplied by.
    pub scale: [f32; CHANNELS as usize],
    /// What is then added to it.
    pub shift: [f32; CHANNELS as usize],
    /// The memory layout of the squares.
    pub layout: Layout,
}

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
    image_bytes: u32,
    channels_last: u32,
    scale: [f32; CHANNELS as usize],
    shift: [f32; CHANNELS as usize],
}

impl ImageForm {
    /// The form of this many images. `None` if they have no pixels, or if there are too many lines or bytes for one launch.
    pub fn new(images: usize, how: ImageResizing) -> Option<Self> {
        let ImageResizing { size: [width, height], side, taps_max: [taps_x_max, taps_y_max], .. } = how;
        let images = u32::try_from(images).ok()?;
        images.checked_mul(side).filter(|&lines| lines < 1 << 31)?;
        let words_of_pixel = taps_x_max.checked_add(taps_y_max)?.checked_add(2)?;
        let tables = side.checked_mul(words_of_pixel)?.checked_add(2)?.checked_mul(4)?;
        let pixels = width.checked_mul(height).filter(|&pixels| pixels > 0)?.checked_mul(CHANNELS)?;
        Some(ImageForm {
            images,
            side,
            width,
            height,
            taps_x_max,
            taps_y_max,
            image_bytes: pixels.checked_next_multiple_of(4)?.checked_add(tables)?,
            channels_last: u32::from(how.layout == Layout::ChannelsLast),
            scale: how.scale,
            shift: how.shift,
        })
    }

    /// The form as the kernel gets it.
    pub fn words(&self) -> [u32; 14] {
        const { assert!(size_of::<ImageForm>() == size_of::<[u32; 14]>()) };
        // SAFETY: both have 14 words without gaps between them, and any bits are a `u32`.
        unsafe { std::mem::transmute(*self) }
    }

    /// Width and height of the images.
    pub fn size(&self) -> [usize; 2] {
        [self.width as usize, self.height as usize]
    }

    /// The bytes of an image.
    pub fn image_bytes(&self) -> usize {
        self.image_bytes as usize
    }

    /// The most taps along x and along y.
    pub fn taps_max(&self) -> [usize; 2] {
        [self.taps_x_max as usize, self.taps_y_max as usize]
    }
}

/// Whether a device can resize images. The kernel is compiled at the first call.
pub fn can_resize_images(device: usize) -> bool {
    PROGRAM.on(device).is_ok()
}

/// The squares `[images, 3, side, side]` of bytes on a CUDA device.
pub fn resize_images(bytes: &Tensor, mut form: ImageForm) -> Result<Tensor, Fault> {
    let device = cuda_index(bytes)?;
    let counted = [i64::from(form.images), i64::from(form.image_bytes)];
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
    unsafe { module.launch(device, c"resize_images", extent(lines * THREADS as usize, THREADS), arguments)? };
    Ok(out)
}
