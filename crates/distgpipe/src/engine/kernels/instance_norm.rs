//! Instance norm of channels-last images on a GPU.

use super::super::ffi::outcome;
use super::{argument, cuda_index, extent, Extent, Program, PORTABLE};
use crate::engine::{layout, Layout};
use crate::failure::Fault;
use libc::{c_char, c_void};
use std::ffi::{CStr, CString};
use tch::{Kind, Tensor};
use torch_sys::C_tensor;

pub(super) static PROGRAM: Program = Program {
    name: "instance_norm.cu",
    source: include_str!("instance_norm.cu"),
    headers: &[PORTABLE],
    kernels: &[
        c"norm_small_32",
        c"norm_small_gradient_32",
        c"norm_sums_32",
        c"norm_result_32",
        c"norm_gradient_sums_32",
        c"norm_gradient_32",
        c"norm_small_16",
        c"norm_small_gradient_16",
        c"norm_sums_16",
        c"norm_result_16",
        c"norm_gradient_sums_16",
        c"norm_gradient_16",
        c"norm_statistics",
        c"norm_gradient_means",
    ],
};

/// What is added to variances, as in PyTorch.
pub const NORM_EPSILON: f64 = 1e-5;

/// Channels of a block.
const BLOCK_CHANNELS: u32 = 4 * 8;
const THREADS: u32 = 8 * 32;

/// Images of more pixels are split over blocks.
const SMALL_PIXELS_MAX: u32 = 1024;
const SPLIT_PIXELS: u32 = 256;
const SPLITS_MAX: u32 = 32;

/// The kernels' `NormShape`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct NormShape {
    images: u32,
    pixels: u32,
    channels: u32,
    splits: u32,
}

impl NormShape {
    /// `None` if there are no kernels for the tensor.
    fn of(x: &Tensor) -> Option<Self> {
        let suits = matches!(x.kind(), Kind::Float | Kind::BFloat16) && layout(x) == Some(Layout::ChannelsLast);
        let [images, channels, height, width] = *x.size() else { return None };
        let quad_bytes = 4 * x.kind().elt_size_in_bytes();
        if !suits || channels % 4 != 0 || x.numel() == 0 || !(x.data_ptr() as usize).is_multiple_of(quad_bytes) {
            return None;
        }
        let pixels = u32::try_from(height * width).ok()?;
        let splits = if pixels <= SMALL_PIXELS_MAX { 1 } else { pixels.div_ceil(SPLIT_PIXELS).min(SPLITS_MAX) };
        let (images, channels) = (u32::try_from(images).ok()?, u32::try_from(channels).ok()?);
        let tiles = channels.div_ceil(BLOCK_CHANNELS);
        // The most blocks of a launch, and the number of a channel of an image has 32 bits.
        let blocks = u64::from(images) * u64::from(tiles) * u64::from(splits);
        let counted = blocks < 1 << 31 && u64::from(images) * u64::from(channels) < 1 << 31;
        counted.then_some(NormShape { images, pixels, channels, splits })
    }

    fn blocks(self) -> Extent {
        let blocks = self.images * self.channels.div_ceil(BLOCK_CHANNELS) * self.splits;
        Extent { blocks, threads: THREADS }
    }

    fn each_channel(self) -> Extent {
        extent(self.images as usize * self.channels as usize, 64)
    }

    /// Memory for the sums of all splits.
    fn sums(self, like: &Tensor) -> Result<Tensor, Fault> {
        let count = 2 * i64::from(self.splits) * i64::from(self.images) * i64::from(self.channels);
        Ok(Tensor::f_empty([count], (Kind::Float, like.device()))?)
    }
}

extern "C" {
    fn dg_message(text: *const c_char) -> *mut c_char;
    fn dg_instance_norm(
        x: *const C_tensor,
        forward: ForwardKernel,
        backward: BackwardKernel,
        result: *mut *mut C_tensor,
    ) -> *mut c_char;
}

type ForwardKernel = extern "C" fn(*const C_tensor, *mut C_tensor, *mut C_tensor) -> *mut c_char;
type BackwardKernel = extern "C" fn(*const C_tensor, *const C_tensor, *const C_tensor, *mut C_tensor) -> *mut c_char;

/// Instance norm without weights, of statistics of the input; `None` where there are no kernels for the tensor. The result has the
/// layout of the input, and a backward pass.
pub fn instance_norm(x: &Tensor) -> Option<Result<Tensor, Fault>> {
    NormShape::of(x)?;
    let device = cuda_index(x).ok()?;
    PROGRAM.on(device).ok()?;
    let mut result = std::ptr::null_mut();
    // SAFETY: the shim keeps handles of its own, and calls the kernels with tensors that live during the call.
    let outcome = outcome(unsafe { dg_instance_norm(x.as_ptr(), forward, backward, &mut result) });
    // SAFETY: on success the shim has stored a tensor from `new`, which tch's Tensor then owns.
    Some(outcome.map_err(Fault::engine).map(|()| unsafe { Tensor::from_ptr(result) }))
}

/// The result of a kernel for the shim.
fn answer(result: Result<(), Fault>) -> *mut c_char {
    match result {
        Ok(()) => std::ptr::null_mut(),
        Err(fault) => {
            let text = CString::new(fault.to_string().replace('\0', " ")).unwrap_or_default();
            // SAFETY: the shim copies the text.
            unsafe { dg_message(text.as_ptr()) }
        }
    }
}

/// A handle on a tensor of the shim's.
fn borrowed(tensor: *const C_tensor) -> Tensor {
    // SAFETY: the shim passes tensors that live during the call; the clone is a handle of its own.
    unsafe { Tensor::clone_from_ptr(tensor.cast_mut()) }
}

extern "C" fn forward(x: *const C_tensor, statistics: *mut C_tensor, y: *mut C_tensor) -> *mut c_char {
    answer(run_forward(&borrowed(x), &borrowed(statistics), &borrowed(y)))
}

extern "C" fn backward(
    gradient: *const C_tensor,
    x: *const C_tensor,
    statistics: *const C_tensor,
    out: *mut C_tensor,
) -> *mut c_char {
    answer(run_backward(&borrowed(gradient), &borrowed(x), &borrowed(statistics), &borrowed(out)))
}

/// The shape of tensors that the kernels read and write side by side.
fn shape_of(tensors: &[&Tensor]) -> Result<NormShape, Fault> {
    let shape = NormShape::of(tensors[0]);
    let alike = |other: &&Tensor| {
        NormShape::of(other).is_some() && other.size() == tensors[0].size() && other.kind() == tensors[0].kind()
    };
    shape
        .filter(|_| tensors.iter().all(alike))
        .ok_or_else(|| Fault::internal("channels-last images of one shape", format!("{tensors:?}")))
}

/// The kernels for 32-bit floats and for bfloat16.
fn kernel_for(x: &Tensor, kernels: [&'static CStr; 2]) -> &'static CStr {
    kernels[usize::from(x.kind() == Kind::BFloat16)]
}

fn run_forward(x: &Tensor, statistics: &Tensor, y: &Tensor) -> Result<(), Fault> {
    let mut shape = shape_of(&[x, y])?;
    let device = cuda_index(x)?;
    let module = PROGRAM.on(device)?;
    let (mut from, mut kept, mut to, mut epsilon) = (x.data_ptr(), statistics.data_ptr(), y.data_ptr(), NORM_EPSILON);
    let [from, kept, to, epsilon] =
        [argument(&mut from), argument(&mut kept), argument(&mut to), argument(&mut epsilon)];
    let shape_at = argument(&mut shape);
    let launch = |kernels: [&'static CStr; 2], extent, arguments: &mut [*mut c_void]| {
        // SAFETY: the arguments are those of the kernel. The tensors are dense and have the shape that goes along, the statistics two values
        // for each channel of each image, and the sums those of each split. libtorch reuses their memory only for work behind this one on
        // the same stream.
        unsafe { module.launch(device, kernel_for(x, kernels), extent, arguments) }
    };
    if shape.splits == 1 {
        let arguments = &mut [from, shape_at, epsilon, kept, to];
        return launch([c"norm_small_32", c"norm_small_16"], shape.blocks(), arguments);
    }
    let memory = shape.sums(x)?;
    let mut sums = memory.data_ptr();
    let sums = argument(&mut sums);
    launch([c"norm_sums_32", c"norm_sums_16"], shape.blocks(), &mut [from, shape_at, sums])?;
    launch([c"norm_statistics"; 2], shape.each_channel(), &mut [shape_at, epsilon, sums, kept])?;
    launch([c"norm_result_32", c"norm_result_16"], shape.blocks(), &mut [from, shape_at, kept, to])
}

fn run_backward(gradient: &Tensor, x: &Tensor, statistics: &Tensor, out: &Tensor) -> Result<(), Fault> {
    let mut shape = shape_of(&[x, gradient, out])?;
    let device = cuda_index(x)?;
    let module = PROGRAM.on(device)?;
    let (mut upstream, mut from, mut kept, mut to) =
        (gradient.data_ptr(), x.data_ptr(), statistics.data_ptr(), out.data_ptr());
    let [upstream, from, kept, to] =
        [argument(&mut upstream), argument(&mut from), argument(&mut kept), argument(&mut to)];
    let shape_at = argument(&mut shape);
    let launch = |kernels: [&'static CStr; 2], extent, arguments: &mut [*mut c_void]| {
        // SAFETY: as in `run_forward`; the means have two values for each channel of each image.
        unsafe { module.launch(device, kernel_for(x, kernels), extent, arguments) }
    };
    if shape.splits == 1 {
        let arguments = &mut [upstream, from, shape_at, kept, to];
        return launch([c"norm_small_gradient_32", c"norm_small_gradient_16"], shape.blocks(), arguments);
    }
    let (memory, means) = (shape.sums(x)?, statistics.f_empty_like()?);
    let (mut sums, mut means_at) = (memory.data_ptr(), means.data_ptr());
    let [sums, means_at] = [argument(&mut sums), argument(&mut means_at)];
    let arguments = &mut [upstream, from, shape_at, kept, sums];
    launch([c"norm_gradient_sums_32", c"norm_gradient_sums_16"], shape.blocks(), arguments)?;
    let extent = shape.each_channel();
    launch([c"norm_gradient_means"; 2], extent, &mut [shape_at, sums, means_at])?;
    let arguments = &mut [upstream, from, shape_at, kept, means_at, to];
    launch([c"norm_gradient_32", c"norm_gradient_16"], shape.blocks(), arguments)
}
