//! Codecs on a GPU: tensor to body and back, with the bits of the codecs of the CPU. The kernels are in `codecs.cu`.

use super::{argument, cuda_index, extent, Extent, Module, Program, PORTABLE};
use crate::failure::Fault;
use distgpipe_core::codec::half::HalfFormat;
use distgpipe_core::codec::tile::{self, Rounding};
use distgpipe_core::codec::{BinEnds, BodyForm};
use libc::c_void;
use std::ffi::CStr;
use std::sync::Arc;
use tch::{Kind, Tensor};

pub(super) static PROGRAM: Program = Program {
    name: "codecs.cu",
    source: include_str!("codecs.cu"),
    headers: &[PORTABLE, ("codecs.cuh", include_str!("codecs.cuh"))],
    kernels: &[
        c"extremes",
        c"half_encode",
        c"half_decode",
        c"tile_encode",
        c"tile_decode",
        c"count_first",
        c"count_second",
        c"count_third",
        c"select_first",
        c"select_second",
        c"select_third",
        c"take_sample",
        c"set_bins",
        c"bins_encode",
        c"bins_decode",
    ],
};

/// What stands before the body in the memory that [`encode`] returns: the status word, and what the kernels tell each other.
pub const HEAD_BYTES: usize = 64;

/// The largest number of bins, as the bits of an index: `BINS_MAX` in `codecs.cu`.
const BIN_BITS_MAX: u32 = 9;

/// The sizes of the histograms in `codecs.cu`.
const FIRST: usize = 8192;
const SECOND: usize = 256;
const THIRD: usize = 2048;

/// The threads of a block, for which `tile_encode` is written.
const THREADS: u32 = 256;

/// The most blocks of kernels whose blocks each add their results to those of all.
const SUMMED_BLOCKS_MAX: u32 = 1024;

/// The parameters of the kernels, as in `codecs.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct TileFormat {
    bits: u32,
    tile: u32,
    stochastic: u32,
    key: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct BinFormat {
    code_bits: u32,
    bin_bits: u32,
    present: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Ranks {
    length: u64,
    bins: u32,
    gapless: u32,
    ranks: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Search {
    first: *mut c_void,
    second: *mut c_void,
    third: *mut c_void,
    slots: *mut c_void,
    second_slots: *mut c_void,
    slot_count: *mut c_void,
    places: *mut c_void,
    ends: *mut c_void,
}

/// The size of `Bins` in `codecs.cu`.
const BINS_BYTES: usize = (8 + 4) * (1 << BIN_BITS_MAX) + 8;

/// Whether there are kernels for bodies of this form and tensors with this number of elements.
pub fn supports(form: BodyForm, elements: usize) -> bool {
    let counted = elements > 0 && u32::try_from(elements).is_ok_and(|elements| elements < u32::MAX);
    match form {
        BodyForm::Bins { bin_bits, .. } => counted && bin_bits <= BIN_BITS_MAX,
        _ => counted,
    }
}

/// The kernels on the device of a tensor.
struct Kernels {
    module: Arc<Module>,
    device: usize,
}

impl Kernels {
    fn of(tensor: &Tensor) -> Result<Self, Fault> {
        let device = cuda_index(tensor)?;
        Ok(Kernels { module: PROGRAM.on(device)?, device })
    }

    /// # Safety
    /// As for [`super::Driver::launch`]; the memory must be that of tensors of the thread's current stream.
    unsafe fn launch(&self, kernel: &CStr, extent: Extent, arguments: &mut [*mut c_void]) -> Result<(), Fault> {
        // SAFETY: as the caller promises.
        unsafe { self.module.launch(self.device, kernel, extent, arguments) }
    }

    /// Memory of 0 on the device.
    fn zeros(&self, bytes: usize) -> Result<Tensor, Fault> {
        Ok(Tensor::f_zeros([bytes as i64], (Kind::Uint8, tch::Device::Cuda(self.device)))?)
    }

    fn empty(&self, bytes: usize) -> Result<Tensor, Fault> {
        Ok(Tensor::f_empty([bytes as i64], (Kind::Uint8, tch::Device::Cuda(self.device)))?)
    }

    /// Fills `ends` with the values at the ends of bins of `x`.
    fn find_ends(&self, mut x: *mut c_void, mut ranks: Ranks, ends: *mut c_void) -> Result<(), Fault> {
        let count = ranks.ranks as usize;
        let sizes = [4 * FIRST, 4 * SECOND * count, 4 * THIRD * count, 2 * FIRST, 4 * SECOND * count, 16, 16 * count];
        let mut at = 0;
        let starts = sizes.map(|size| {
            at += size.next_multiple_of(16);
            at - size.next_multiple_of(16)
        });
        let memory = self.zeros(at)?;
        let part = |number: usize| memory.data_ptr().wrapping_byte_add(starts[number]);
        let mut search = Search {
            first: part(0),
            second: part(1),
            third: part(2),
            slots: part(3),
            second_slots: part(4),
            slot_count: part(5),
            places: part(6),
            ends,
        };
        let counting = at_most(extent((ranks.length as usize).div_ceil(4), 512), SUMMED_BLOCKS_MAX / 2);
        let each_rank = Extent { blocks: ranks.ranks, threads: 32 };
        let mut length = ranks.length;
        let [x, length, search, ranks] =
            [argument(&mut x), argument(&mut length), argument(&mut search), argument(&mut ranks)];
        // SAFETY: the arguments are those of the kernels. `x` has `length` floats, `ends` room for all ranks, and the parts of `memory` have
        // the sizes that the kernels need for this many ranks, of which there are at most 1024.
        unsafe {
            self.launch(c"count_first", counting, &mut [x, length, search])?;
            self.launch(c"select_first", Extent { blocks: 1, threads: 1024 }, &mut [search, ranks])?;
            self.launch(c"count_second", counting, &mut [x, length, search])?;
            self.launch(c"select_second", each_rank, &mut [search, ranks])?;
            self.launch(c"count_third", counting, &mut [x, length, search, ranks])?;
            self.launch(c"select_third", each_rank, &mut [search, ranks])
        }
    }
}

/// With fewer blocks, if there are more.
fn at_most(extent: Extent, blocks: u32) -> Extent {
    Extent { blocks: extent.blocks.min(blocks), ..extent }
}

/// The memory of a dense tensor of floats on a GPU, for [`supports`].
fn floats(tensor: &Tensor, form: BodyForm) -> Result<(*mut c_void, usize), Fault> {
    let elements = tensor.numel();
    if tensor.kind() == Kind::Float && super::super::layout(tensor).is_some() && supports(form, elements) {
        return Ok((tensor.data_ptr(), elements));
    }
    Err(Fault::internal("a dense tensor of 32-bit floats that is not empty", format!("{tensor:?}")))
}

fn tile_format(bits: u32, tile: u32, rounding: Rounding, seed: u64) -> TileFormat {
    let stochastic = u32::from(rounding == Rounding::Stochastic);
    TileFormat { bits, tile, stochastic, key: tile::key(seed) }
}

/// Encodes the values of a dense `Float` tensor on a GPU in the order of memory; `seed` is that of the codec's context. Returns memory
/// on the GPU with [`HEAD_BYTES`] bytes in front of the body. If the first four of them are not 0, the codec refuses the tensor.
/// `body_bytes` must be the size of a body of this form.
pub fn encode(tensor: &Tensor, form: BodyForm, seed: u64, body_bytes: usize) -> Result<Tensor, Fault> {
    let (values, elements) = floats(tensor, form)?;
    let kernels = Kernels::of(tensor)?;
    let room = kernels.empty(HEAD_BYTES + body_bytes)?;
    let _ = room.f_narrow(0, 0, HEAD_BYTES as i64)?.f_zero_()?;
    let (mut status, mut body) = (room.data_ptr(), room.data_ptr().wrapping_byte_add(HEAD_BYTES));
    let words = room.data_ptr().wrapping_byte_add(16);
    let (mut x, mut found, mut count) = (values, words, elements as u64);
    let groups = extent(elements.div_ceil(8), THREADS);
    let extremes = at_most(groups, SUMMED_BLOCKS_MAX);
    let [x_at, count_at, body_at, status_at, found_at] =
        [argument(&mut x), argument(&mut count), argument(&mut body), argument(&mut status), argument(&mut found)];
    // SAFETY: the arguments are those of the kernels, and point to what this function owns. The tensor has `count` floats, and the
    // memory behind the head has room for the body, whose size is that of the form. What is allocated here is used on this stream
    // alone.
    unsafe {
        match form {
            BodyForm::Half(format) => {
                let mut is_bf16 = u32::from(format == HalfFormat::BF16);
                let arguments = &mut [x_at, count_at, argument(&mut is_bf16), body_at, status_at];
                kernels.launch(c"half_encode", groups, arguments)?;
            }
            BodyForm::Tile { bits, tile, rounding } => {
                let mut format = tile_format(bits, tile, rounding, seed);
                kernels.launch(c"extremes", extremes, &mut [x_at, count_at, found_at])?;
                let blocks = extent(elements.div_ceil(tile as usize), THREADS);
                let arguments = &mut [x_at, count_at, argument(&mut format), found_at, body_at, status_at];
                kernels.launch(c"tile_encode", blocks, arguments)?;
            }
            BodyForm::Bins { code_bits, bin_bits, ends } => {
                let sampled = match ends {
                    BinEnds::Sample(size) => elements.min(size as usize),
                    BinEnds::Range | BinEnds::Quantiles => elements,
                };
                let bins = 1u32 << bin_bits;
                let present = sampled.min(bins as usize) as u32;
                let mut format = BinFormat { code_bits, bin_bits, present };
                let mut ranks = Ranks { length: sampled as u64, bins, gapless: 0, ranks: 2 * present };
                let (tables, table) = (kernels.empty(BINS_BYTES)?, kernels.empty(8 * bins as usize)?);
                let (mut tables_at, mut ends_at) = (tables.data_ptr(), table.data_ptr());
                let mut range = std::ptr::null_mut();
                match ends {
                    BinEnds::Range => {
                        kernels.launch(c"extremes", extremes, &mut [x_at, count_at, found_at])?;
                        range = words;
                    }
                    BinEnds::Quantiles => kernels.find_ends(values, ranks, table.data_ptr())?,
                    BinEnds::Sample(_) => {
                        let sample = kernels.empty(4 * sampled)?;
                        let (mut seed, mut size, mut out) = (seed, sampled as u64, sample.data_ptr());
                        let arguments =
                            &mut [x_at, count_at, argument(&mut seed), argument(&mut size), argument(&mut out)];
                        kernels.launch(c"take_sample", extent(sampled, THREADS), arguments)?;
                        ranks.gapless = 1;
                        kernels.find_ends(sample.data_ptr(), ranks, table.data_ptr())?;
                    }
                }
                let [format_at, tables_at] = [argument(&mut format), argument(&mut tables_at)];
                let arguments =
                    &mut [argument(&mut ends_at), argument(&mut range), format_at, tables_at, body_at, status_at];
                kernels.launch(c"set_bins", Extent { blocks: 1, threads: 1 << BIN_BITS_MAX }, arguments)?;
                let arguments = &mut [x_at, count_at, format_at, tables_at, body_at, status_at];
                kernels.launch(c"bins_encode", groups, arguments)?;
            }
        }
    }
    Ok(room)
}

/// Decodes a body on a GPU, which the codec has [checked](distgpipe_core::codec::Codec::check) on the host, into a dense `Float` tensor on
/// the same GPU, in the order of memory. The body must begin at an address that is a multiple of 16.
pub fn decode(body: &Tensor, form: BodyForm, out: &mut Tensor) -> Result<(), Fault> {
    let (mut to, elements) = floats(out, form)?;
    let kernels = Kernels::of(out)?;
    let mut from = body.data_ptr();
    if body.device() != out.device() || !(from as usize).is_multiple_of(16) {
        return Err(Fault::internal("a body on the tensor's device, at a multiple of 16 bytes", format!("{body:?}")));
    }
    let (mut count, groups) = (elements as u64, extent(elements.div_ceil(8), THREADS));
    let [from, count, to] = [argument(&mut from), argument(&mut count), argument(&mut to)];
    // SAFETY: the arguments are those of the kernels. The tensor has `count` floats, and the body the size that goes with them, because it
    // has been checked.
    unsafe {
        match form {
            BodyForm::Half(format) => {
                let mut is_bf16 = u32::from(format == HalfFormat::BF16);
                kernels.launch(c"half_decode", groups, &mut [from, count, argument(&mut is_bf16), to])
            }
            BodyForm::Tile { bits, tile, rounding } => {
                let mut format = tile_format(bits, tile, rounding, 0);
                kernels.launch(c"tile_decode", groups, &mut [from, count, argument(&mut format), to])
            }
            BodyForm::Bins { code_bits, bin_bits, .. } => {
                let mut format = BinFormat { code_bits, bin_bits, present: 0 };
                kernels.launch(c"bins_decode", groups, &mut [from, count, argument(&mut format), to])
            }
        }
    }
}
