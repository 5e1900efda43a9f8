//! `tile:Q`, `tile:Q/T`: codes on a grid of `2^Q` values for every `T` consecutive values (64 unless given).
//!
//! ```text
//! body   exponent e i32 | ⌈n/T⌉ × (lo f16, step f16) | n codes of Q bits          4 + 4 ⌈n/T⌉ + ⌈nQ/8⌉ bytes
//! value  2^e (lo + code · step)
//! ```
//!
//! With tiles of 64 values, codes of Q bits cost Q + ½ bits a value on the wire. Neighbours in a tensor have similar
//! magnitudes, so the step of a tile is far finer than that of the whole range, and an outlier affects 64 values
//! instead of all.
//!
//! `e` scales the largest magnitude of the tensor into [2^13, 2^14), so gradients of 1e-8 do not underflow, and neither
//! `lo` nor the widest step overflows a 16-bit float. `lo` is rounded down, and `step` is a 16-bit float with which the
//! grid still reaches the largest value of the tile. So no value is farther than half a step from its code.
//!
//! Values are consecutive in logical order, in which the last dimension varies fastest, whatever the order in memory:
//! neighbouring pixels of one channel are similar, the channels of one pixel are not. So a channels-last tensor has the
//! same body as the contiguous one.
//!
//! `tile:Q~` uses stochastic rounding: one of the two codes around a value is chosen at random such that the expected
//! decoded value is the value. The error is below one step instead of half a step.

use super::bits::{self, packed_bytes};
use super::channels_last::{ChannelPlanes, Rows};
use super::grid::{code_max, Grid};
use super::half::{f16_from_f32, f32_from_f16};
use super::kernel_runner::{check_finite, KernelRunner};
use super::simd::{self, Level, Noise};
use super::{check_body, check_f32, check_received, number};
use super::{
    elements_of, Arguments, BodyForm, BodyPart, Codec, CodecContext, CodecError, CodecForm, CodecId, Executor, Member,
    PartForm, TensorView, BLOCK,
};
use crate::wire::{DType, TensorMeta, DIMS_MAX};
use std::sync::Arc;

pub(super) const MEMBER: Member = Member {
    name: "tile",
    id: CodecId::Tile,
    examples: &[
        "tile:4",
        "tile:8",
        "tile:3",
        "tile:2",
        "tile:2/16",
        "tile:1/100",
        "tile:12/7",
        "tile:16/4096",
        "tile:5/1",
        "tile:3~",
        "tile:3/100~",
    ],
    about: "tile:Q or tile:Q/T, a grid of 2^Q values for every T (64) neighbours, Q + 32/T bits a value; a ~ at the \
            end selects stochastic rounding",
    parse,
};

const EXPECTED: &str =
    "tile:Q or tile:Q/T with Q from 1 to 16 bits and T from 1 to 4096 values a tile (64 unless given), \
                        such as tile:4 or tile:4/128, with a ~ at the end for stochastic rounding";
const TILE_DEFAULT: u32 = 64;
const TILE_MAX: u32 = 4096;

fn parse(arguments: Arguments<'_>) -> Result<Box<dyn Codec>, CodecError> {
    let got = arguments.parameter("tile", EXPECTED)?;
    let (text, rounding) = match got.strip_suffix('~') {
        Some(text) => (text, Rounding::Stochastic),
        None => (got, Rounding::Nearest),
    };
    let codec = match text.split_once('/') {
        None => number(text).and_then(|bits| Tile::new(bits, TILE_DEFAULT, rounding)),
        Some((bits, tile)) => number(bits).zip(number(tile)).and_then(|(bits, tile)| Tile::new(bits, tile, rounding)),
    };
    codec.map(|codec| Box::new(codec) as _).ok_or_else(|| CodecError::parameter("tile", EXPECTED, got))
}

/// How a value between two codes is rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// To the nearest code.
    Nearest,
    /// To one of the two codes at random, seeded by [`CodecContext::seed`], such that the expected value is the value.
    Stochastic,
}

/// The codec `tile:Q/T`, with buffers that are reused.
#[derive(Clone, Debug)]
pub struct Tile {
    format: TileFormat,
    rounding: Rounding,
    runner: KernelRunner,
    /// Buffers for each piece of a tensor.
    scratch: Vec<Scratch>,
}

/// The parameters of the codec: bits of a code, values in a tile.
#[derive(Clone, Copy, Debug)]
struct TileFormat {
    bits: u32,
    tile: usize,
}

/// Buffers for the codes and grids of a block, for its values if the tensor is not in logical order, and otherwise for
/// the smallest and largest value of each tile of the piece.
#[derive(Clone, Debug, Default)]
struct Scratch {
    values: Vec<u8>,
    ends: Ends,
    block: Block,
}

#[derive(Clone, Debug, Default)]
struct Ends {
    lo: Vec<f32>,
    hi: Vec<f32>,
    has_nan: bool,
}

#[derive(Clone, Debug, Default)]
struct Block {
    codes: Vec<u16>,
    table: Vec<u8>,
    ranges: Ranges,
    grids: Grids,
}

impl Tile {
    /// The codec with codes of 1 to 16 bits and tiles of 1 to 4096 values; `None` for other numbers.
    pub fn new(bits: u32, tile: u32, rounding: Rounding) -> Option<Self> {
        let valid = (1..=bits::WIDTH_MAX).contains(&bits) && (1..=TILE_MAX).contains(&tile);
        let format = TileFormat { bits, tile: tile as usize };
        valid.then(|| Tile { format, rounding, runner: KernelRunner::default(), scratch: Vec::new() })
    }

    /// Finds the smallest and the largest value of each tile; returns the bits of the largest magnitude, or an error if
    /// a value is not finite.
    fn find_ends(&mut self, bytes: &[u8], piece: usize) -> Result<u32, CodecError> {
        let (tile, level) = (self.format.tile, self.runner.level);
        let work = bytes.chunks(4 * piece).zip(&mut self.scratch);
        self.runner.each(work, |(bytes, scratch)| {
            let Ends { lo, hi, has_nan } = &mut scratch.ends;
            let tiles = (bytes.len() / 4).div_ceil(tile);
            lo.resize(tiles, 0.0);
            hi.resize(tiles, 0.0);
            *has_nan = simd::tile_ends(level, bytes, tile, lo, hi);
        });
        let pieces = (bytes.len() / 4).div_ceil(piece);
        let ends = self.scratch[..pieces].iter().map(|scratch| &scratch.ends);
        let magnitude = ends.fold(0, |most, ends| {
            let magnitudes = ends.lo.iter().chain(&ends.hi).map(|end| end.to_bits() & 0x7fff_ffff);
            most.max(if ends.has_nan { f32::NAN.to_bits() } else { magnitudes.max().unwrap_or(0) })
        });
        check_finite(CodecId::Tile, bytes, magnitude)?;
        Ok(magnitude)
    }
}

impl TileFormat {
    fn table_bytes(self, elements: usize) -> usize {
        elements.div_ceil(self.tile).saturating_mul(4)
    }

    fn packed_bytes(self, elements: usize) -> usize {
        packed_bytes(elements, self.bits)
    }

    /// The exponent, the table and the codes of a received body, whose length has been checked.
    fn parts(self, body: &[u8], elements: usize) -> Result<(i32, &[u8], &[u8]), CodecError> {
        let (head, body) = body.split_at(4);
        let exponent = i32::from_le_bytes([head[0], head[1], head[2], head[3]]);
        if !EXPONENTS.contains(&exponent) {
            return Err(CodecError::Exponent { got: exponent });
        }
        let (table, packed) = body.split_at(self.table_bytes(elements));
        check_table(table)?;
        Ok((exponent, table, packed))
    }

    /// The smallest number of values that are whole tiles and whose codes are whole bytes.
    fn unit(self) -> usize {
        // The tile times the power of two that makes it a multiple of eight.
        self.tile << (bits::GROUP.trailing_zeros() - self.tile.trailing_zeros().min(3))
    }

    /// The number of values that are processed together: as many units as fit `BLOCK`, at least one.
    fn block(self) -> usize {
        self.unit() * (BLOCK / self.unit()).max(1)
    }
}

impl Codec for Tile {
    fn id(&self) -> CodecId {
        CodecId::Tile
    }

    fn encoded_bytes(&self, _dtype: DType, dims: &[usize]) -> usize {
        let elements = elements_of(dims);
        self.format.packed_bytes(elements).saturating_add(self.format.table_bytes(elements)).saturating_add(4)
    }

    /// The exponent and the table, whose entries have four bytes, and the codes.
    fn body_parts(&self, _: DType, dims: &[usize], body: &[u8], each: &mut dyn FnMut(BodyPart)) {
        let head = 4 + self.format.table_bytes(elements_of(dims));
        each(BodyPart { form: PartForm::Values32, bytes: head });
        let form = if self.format.bits == 3 { PartForm::Codes3 } else { PartForm::Bytes };
        each(BodyPart { form, bytes: body.len() - head });
    }

    fn encode(
        &mut self,
        tensor: TensorView<'_>,
        context: &CodecContext<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        let elements = check_f32(self.id(), &tensor)?;
        let (format, level, bytes) = (self.format, self.runner.level, tensor.bytes);
        let planes = ChannelPlanes::of(tensor.layout, tensor.dims);
        let piece = self.runner.piece(elements, planes.map_or(format.unit(), |planes| planes.unit(format.unit())));
        self.scratch.resize_with(self.scratch.len().max(elements.div_ceil(piece)), Scratch::default);
        let magnitude = match planes {
            None => self.find_ends(bytes, piece)?,
            Some(_) => self.runner.extremes(self.id(), bytes)?.magnitude_max(),
        };
        let exponent = exponent_for(magnitude);
        let start = out.len();
        out.resize(start + self.encoded_bytes(tensor.dtype, tensor.dims), 0);
        let (head, body) = out[start..].split_at_mut(4);
        head.copy_from_slice(&exponent.to_le_bytes());
        let (table, packed) = body.split_at_mut(format.table_bytes(elements));

        let key = (self.rounding == Rounding::Stochastic).then(|| key(context.seed));
        let encoder = Encoder { format, level, exponent, key };
        let rooms = table.chunks_mut(format.table_bytes(piece)).zip(packed.chunks_mut(format.packed_bytes(piece)));
        let work = rooms.zip(&mut self.scratch).enumerate();
        self.runner.each(work, |(number, ((table, packed), scratch))| {
            let range = number * piece..elements.min((number + 1) * piece);
            let body = PieceBody { first: range.start, table, packed };
            match planes {
                None => encoder.contiguous(&bytes[4 * range.start..4 * range.end], body, scratch),
                Some(planes) => encoder.planes(planes, bytes, body, scratch, range.len()),
            }
        });
        Ok(())
    }

    fn decode(&mut self, meta: &TensorMeta, body: &[u8], out: &mut [u8]) -> Result<(), CodecError> {
        let elements = check_body(self, meta, body, out)?;
        let (exponent, table, packed) = self.format.parts(body, elements)?;
        let (format, level) = (self.format, self.runner.level);
        let decoder = Decoder { format, level, exponent, table, packed, elements };
        let mut dims = [0; DIMS_MAX];
        dims.iter_mut().zip(meta.shape.dims()).for_each(|(to, &dim)| *to = dim as usize);
        let planes = ChannelPlanes::of(meta.layout, &dims[..meta.shape.rank()]);
        // A channels-last tensor is split by samples, which are contiguous in memory.
        let piece = self.runner.piece(elements, planes.map_or(format.unit(), |planes| planes.channels * planes.pixels));
        self.scratch.resize_with(self.scratch.len().max(elements.div_ceil(piece)), Scratch::default);
        let work = out.chunks_mut(4 * piece).zip(&mut self.scratch).enumerate();
        self.runner.each(work, |(number, (out, scratch))| match planes {
            None => decoder.run(number * piece, out, &mut scratch.block),
            Some(planes) => decoder.planes(planes, number * piece, out, scratch),
        });
        Ok(())
    }

    fn form(&self) -> Option<CodecForm> {
        let TileFormat { bits, tile } = self.format;
        Some(BodyForm::Tile { bits, tile: tile as u32, rounding: self.rounding }.into())
    }

    fn check(&self, meta: &TensorMeta, body: &[u8]) -> Result<(), CodecError> {
        check_received(self, meta, body)?;
        let elements = meta.shape.dims().iter().fold(1, |product: usize, &dim| product.saturating_mul(dim as usize));
        self.format.parts(body, elements).map(|_| ())
    }

    fn set_executor(&mut self, executor: Arc<dyn Executor>) {
        self.runner.set_executor(executor);
    }
}

/// The key of a tensor's random numbers: its seed, mixed by the finalizer of SplitMix64.
pub fn key(seed: u64) -> u32 {
    let mixed = (seed ^ seed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (mixed >> 32) as u32
}

/// The output for some consecutive values: the index of the first, a multiple of the unit, and their parts of the body.
struct PieceBody<'a> {
    first: usize,
    table: &'a mut [u8],
    packed: &'a mut [u8],
}

#[derive(Clone, Copy)]
struct Encoder {
    format: TileFormat,
    level: Level,
    exponent: i32,
    /// The key of the random numbers, if rounding is stochastic.
    key: Option<u32>,
}

impl Encoder {
    /// Encodes values in logical order, of whose tiles the ends are known.
    fn contiguous(&self, bytes: &[u8], mut body: PieceBody<'_>, scratch: &mut Scratch) {
        let (block, first) = (self.format.block(), body.first);
        let tiles = block / self.format.tile;
        let ends = scratch.ends.lo.chunks(tiles).zip(scratch.ends.hi.chunks(tiles));
        for (number, (bytes, ends)) in bytes.chunks(4 * block).zip(ends).enumerate() {
            let rows = Rows { first: first + number * block, count: 1, stride: 0, length: bytes.len() / 4 };
            self.rows(bytes, rows, Some(ends), &mut body, &mut scratch.block);
        }
    }

    /// Encodes some values of a channels-last tensor, whose memory is `bytes`.
    fn planes(
        &self,
        planes: ChannelPlanes,
        bytes: &[u8],
        mut body: PieceBody<'_>,
        scratch: &mut Scratch,
        elements: usize,
    ) {
        let range = body.first..body.first + elements;
        planes.read(self.level, bytes, range, self.format.unit(), &mut scratch.values, |rows, values| {
            self.rows(values, rows, None, &mut body, &mut scratch.block);
        });
    }

    /// Encodes rows of values, each of which begins at a multiple of the unit. The ends of their tiles may be given.
    fn rows(
        &self,
        bytes: &[u8],
        rows: Rows,
        ends: Option<(&[f32], &[f32])>,
        body: &mut PieceBody<'_>,
        room: &mut Block,
    ) {
        let Encoder { format, level, .. } = *self;
        let Block { codes, table, ranges, .. } = room;
        let row_tiles = rows.length.div_ceil(format.tile);
        codes.resize(codes.len().max(bytes.len() / 4), 0);
        table.resize(table.len().max(4 * row_tiles * rows.count), 0);
        let (codes, table) = (&mut codes[..bytes.len() / 4], &mut table[..4 * row_tiles * rows.count]);
        let tiles = bytes.chunks(4 * TILES * format.tile).zip(codes.chunks_mut(TILES * format.tile));
        for (number, ((bytes, codes), table)) in tiles.zip(table.chunks_mut(4 * TILES)).enumerate() {
            ranges.count = table.len() / 4;
            let (lo, hi) = (&mut ranges.lo[..table.len() / 4], &mut ranges.hi[..table.len() / 4]);
            match ends {
                None => {
                    let has_nan = simd::tile_ends(level, bytes, format.tile, lo, hi);
                    debug_assert!(!has_nan, "checked before");
                }
                Some((los, his)) => {
                    lo.copy_from_slice(&los[number * TILES..][..lo.len()]);
                    hi.copy_from_slice(&his[number * TILES..][..hi.len()]);
                }
            }
            if self.key.is_some() {
                for (at, first) in ranges.first[..ranges.count].iter_mut().enumerate() {
                    let (row, within) = ((number * TILES + at) / row_tiles, (number * TILES + at) % row_tiles);
                    *first = (rows.first + row * rows.stride + within * format.tile) as u32;
                }
            }
            self.tiles(bytes, ranges, table, codes);
        }
        let parts = table.chunks(4 * row_tiles).zip(codes.chunks(rows.length));
        for (row, (table, codes)) in parts.enumerate() {
            let at = rows.first + row * rows.stride - body.first;
            body.table[format.table_bytes(at)..][..table.len()].copy_from_slice(table);
            let packed = &mut body.packed[format.packed_bytes(at)..][..format.packed_bytes(codes.len())];
            bits::pack_with(level, codes, format.bits, packed);
        }
    }

    /// Encodes at most [`TILES`] tiles with known ends.
    fn tiles(&self, bytes: &[u8], ranges: &mut Ranges, table: &mut [u8], codes: &mut [u16]) {
        let Encoder { format, level, exponent, key } = *self;
        let code_max = code_max(format.bits);
        simd::tile_ranges(level, exponent, code_max, ranges);
        for (at, entry) in table.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let ([a, b], [c, d]) = (ranges.wire_lo[at].to_le_bytes(), ranges.wire_step[at].to_le_bytes());
            *entry = [a, b, c, d];
        }
        match key {
            None => simd::tile_codes(level, bytes, format.tile, ranges, code_max, codes),
            Some(key) => simd::tile_codes_stochastic(level, bytes, format.tile, ranges, Noise { key, code_max }, codes),
        }
    }
}

#[derive(Clone, Copy)]
struct Decoder<'a> {
    format: TileFormat,
    level: Level,
    exponent: i32,
    table: &'a [u8],
    packed: &'a [u8],
    elements: usize,
}

impl Decoder<'_> {
    /// Decodes the values from index `first` on, which is a multiple of the unit.
    fn run(&self, first: usize, out: &mut [u8], room: &mut Block) {
        let Decoder { format, level, exponent, .. } = *self;
        let Block { codes, grids, .. } = room;
        grids.code_bits = format.bits;
        let block = format.block();
        codes.resize(codes.len().max(block.min(out.len() / 4).next_multiple_of(format.unit())), 0);
        let table = &self.table[format.table_bytes(first)..];
        let packed = &self.packed[format.packed_bytes(first)..];
        let tables = table.chunks(format.table_bytes(block));
        for ((out, table), packed) in
            out.chunks_mut(4 * block).zip(tables).zip(packed.chunks(format.packed_bytes(block)))
        {
            let codes = &mut codes[..out.len() / 4];
            bits::unpack_with(level, &packed[..format.packed_bytes(codes.len())], format.bits, codes);
            let tiles = codes.chunks(TILES * format.tile).zip(out.chunks_mut(4 * TILES * format.tile));
            for ((codes, out), table) in tiles.zip(table.chunks(4 * TILES)) {
                simd::tile_grids(level, table, exponent, grids);
                simd::tile_values(level, codes, format.tile, grids, out);
            }
        }
    }

    /// Decodes whole samples of a channels-last tensor from index `first` on; `out` is their memory.
    fn planes(&self, planes: ChannelPlanes, first: usize, out: &mut [u8], scratch: &mut Scratch) {
        let Scratch { values, block, .. } = scratch;
        let end = first + out.len() / 4;
        planes.write(self.level, out, first..end, (self.format.unit(), self.elements), values, |first, values| {
            self.run(first, values, block);
        });
    }
}

/// The possible exponents: from that of the smallest `f32`, 2^-149, to that of the largest, just below 2^128.
const EXPONENTS: std::ops::RangeInclusive<i32> = -149 - 13..=127 - 13;

/// The `e` for which `2^-e` times this magnitude, given as the bits of an `f32`, is in [2^13, 2^14).
fn exponent_for(magnitude: u32) -> i32 {
    match (magnitude.checked_ilog2(), magnitude >> 23) {
        (None, _) => 0,
        (Some(log), 0) => log as i32 - 149 - 13,
        (_, exponent) => exponent as i32 - 127 - 13,
    }
}

/// 2^exponent. The result must be a normal number.
#[inline(always)]
pub(super) fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((1023 + i64::from(exponent)) as u64) << 52)
}

/// The number of tiles whose grids are computed together.
pub(super) const TILES: usize = 64;

/// The ranges of up to [`TILES`] tiles: of their values, as they are on the wire, and for quantization.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Ranges {
    pub count: usize,
    pub lo: [f32; TILES],
    pub hi: [f32; TILES],
    pub wire_lo: [u16; TILES],
    pub wire_step: [u16; TILES],
    pub grid_lo: [f64; TILES],
    pub per_step: [f64; TILES],
    /// The index of the first element of each tile, modulo 2^32, if rounding is stochastic.
    pub first: [u32; TILES],
    /// Whether `grid_lo` and `per_step` are 0 or within 2^±100, and `grid_lo` is an `f32`.
    pub are_ordinary: bool,
}

/// With exponents up to this magnitude, [`Ranges::are_ordinary`]: 16-bit floats are 0 or within 2^±24.
pub(super) const ORDINARY_EXPONENT: u32 = 70;

impl Default for Ranges {
    fn default() -> Self {
        let (lo, hi) = ([0.0; TILES], [0.0; TILES]);
        let (wire_lo, wire_step) = ([0; TILES], [0; TILES]);
        let (grid_lo, per_step) = ([0.0; TILES], [0.0; TILES]);
        Ranges { count: 0, lo, hi, wire_lo, wire_step, grid_lo, per_step, first: [0; TILES], are_ordinary: false }
    }
}

impl Ranges {
    /// Computes the grid of the tile with this index.
    #[inline(always)]
    pub fn find(&mut self, at: usize, exponent: i32, code_max: u16) {
        let scale = power_of_two(-exponent);
        let (scaled_lo, scaled_hi) = (f64::from(self.lo[at]) * scale, f64::from(self.hi[at]) * scale);
        let lo = f16_below(scaled_lo);
        let exact = (scaled_hi - f64::from(f32_from_f16(lo))) / f64::from(code_max);
        let nearest = f16_from_f32(exact as f32);
        // The smallest of three candidates whose grid reaches `hi` when the other end decodes it.
        let hi = self.hi[at];
        let reaches = |step: u16| grid(lo, step, exponent).value_within(code_max) >= hi;
        let below = nearest.saturating_sub(1);
        let step = if reaches(nearest) { nearest } else { nearest + 1 };
        let step = if reaches(below) { below } else { step };
        let grid = grid(lo, step, exponent);
        (self.wire_lo[at], self.wire_step[at]) = (lo, step);
        (self.grid_lo[at], self.per_step[at]) = (grid.lo, grid.per_step());
    }
}

/// The grid described by two 16-bit floats.
#[inline(always)]
fn grid(lo: u16, step: u16, exponent: i32) -> Grid {
    let scale = power_of_two(exponent);
    Grid { lo: f64::from(f32_from_f16(lo)) * scale, step: f64::from(f32_from_f16(step)) * scale }
}

/// The grids of up to [`TILES`] tiles.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Grids {
    pub code_bits: u32,
    pub lo: [f64; TILES],
    pub step: [f64; TILES],
}

impl Default for Grids {
    fn default() -> Self {
        Grids { code_bits: bits::WIDTH_MAX, lo: [0.0; TILES], step: [0.0; TILES] }
    }
}

impl Grids {
    /// Sets a grid that [`check_table`] has accepted.
    #[inline(always)]
    pub fn set(&mut self, at: usize, lo: u16, step: u16, exponent: i32) {
        let grid = grid(lo, step, exponent);
        (self.lo[at], self.step[at]) = (grid.lo, grid.step);
    }
}

/// Checks that all entries of a received table are finite and no step is negative.
fn check_table(table: &[u8]) -> Result<(), CodecError> {
    let valid = |entry: &[u8; 4]| {
        let (lo, step) = (u16::from_le_bytes([entry[0], entry[1]]), u16::from_le_bytes([entry[2], entry[3]]));
        (lo & 0x7c00 != 0x7c00) & (step < 0x7c00)
    };
    let entries = table.as_chunks().0;
    if entries.iter().fold(true, |all, entry| all & valid(entry)) {
        return Ok(());
    }
    let at = entries.iter().position(|entry| !valid(entry));
    Err(CodecError::Grid { codec: CodecId::Tile, at: at.unwrap_or(0) })
}

/// The largest 16-bit float that is at most `value`. The magnitude of `value` must be at most 2^14.
#[inline(always)]
fn f16_below(value: f64) -> u16 {
    let nearest = f16_from_f32(value as f32);
    let next_below = match nearest {
        0 | 0x8000 => 0x8001,
        positive if positive < 0x8000 => positive - 1,
        negative => negative + 1,
    };
    if f64::from(f32_from_f16(nearest)) <= value {
        nearest
    } else {
        next_below
    }
}

#[cfg(test)]
mod tests {
    use super::super::floats;
    use super::*;
    use crate::wire::{Layout, Shape};
    use proptest::prelude::*;

    #[test]
    fn the_exponent_brings_every_magnitude_to_the_same_size() {
        assert_eq!(exponent_for(0), 0);
        for value in [f32::from_bits(1), f32::from_bits(3), f32::MIN_POSITIVE, 1e-8, 1.0, 1.999, 2.0, 3e4, f32::MAX] {
            let exponent = exponent_for(value.to_bits());
            assert!(EXPONENTS.contains(&exponent), "{value}");
            let scaled = f64::from(value) * power_of_two(-exponent);
            assert!((8192.0..16384.0).contains(&scaled), "{value} → {scaled}");
        }
        assert_eq!(exponent_for(1), *EXPONENTS.start());
        assert_eq!(exponent_for(f32::MAX.to_bits()), *EXPONENTS.end());
    }

    fn entry(lo: u16, step: u16) -> [u8; 4] {
        let ([a, b], [c, d]) = (lo.to_le_bytes(), step.to_le_bytes());
        [a, b, c, d]
    }

    #[test]
    fn a_peer_cannot_describe_infinite_values() {
        for (lo, step) in [(0x7c00, 0), (0xfc00, 0), (0x7e00, 0), (0, 0x7c00), (0, 0x7e01), (0, 0x8001), (0, 0xbc00)] {
            let table = [[0; 4]; 3].concat().into_iter().chain(entry(lo, step)).collect::<Vec<u8>>();
            assert_eq!(check_table(&table), Err(CodecError::Grid { codec: CodecId::Tile, at: 3 }));
        }
        assert_eq!(check_table(&entry(0xfbff, 0x7bff)), Ok(()));
        let widest = grid(0xfbff, 0x7bff, *EXPONENTS.end());
        assert_eq!(widest.value_within(u16::MAX), f32::MAX);
    }

    /// The mean of many decoded values is the value, within four standard deviations and the bias near codes.
    #[test]
    fn stochastic_rounding_is_unbiased() {
        let elements = 1 << 16;
        for part in [0.0f32, 0.1, 0.25, 0.5, 0.77, 1.0] {
            // Every tile contains the ends 0 and 7, so that all have the same grid with a step of 1.
            let wanted = 3.0 + part;
            let value = |at: usize| [0.0, 7.0, wanted][(at % 64).min(2)];
            let bytes: Vec<u8> = (0..elements).flat_map(|at| value(at).to_ne_bytes()).collect();
            let mut codec = Tile::new(3, 64, Rounding::Stochastic).unwrap();
            let view = TensorView { dtype: DType::F32, dims: &[elements], layout: Layout::Contiguous, bytes: &bytes };
            let bodies = [1, 1, 2].map(|seed| {
                let mut body = Vec::new();
                codec.encode(view, &CodecContext { seed, ..CodecContext::default() }, &mut body).unwrap();
                body
            });
            assert_eq!(bodies[0], bodies[1], "one seed, one body");
            assert_eq!(bodies[1] == bodies[2], part == 0.0 || part == 1.0, "another seed, another one");

            let shape = Shape::new(&[elements]).unwrap();
            let meta = TensorMeta { dtype: DType::F32, layout: Layout::Contiguous, shape, codec: CodecId::Tile };
            let mut out = vec![0; bytes.len()];
            codec.decode(&meta, &bodies[0], &mut out).unwrap();
            let values = floats(&out).enumerate().filter(|(at, _)| at % 64 >= 2).map(|(_, value)| f64::from(value));
            let (count, sum) = values.fold((0.0, 0.0), |(count, sum), value| (count + 1.0, sum + value));
            let deviation = f64::from(part * (1.0 - part)).sqrt() / f64::sqrt(count);
            assert!((sum / count - f64::from(wanted)).abs() <= 4.0 * deviation + 1e-3, "{} of {wanted}", sum / count);
        }
    }

    proptest! {
        #[test]
        fn below_is_the_next_one_below(value in -16384.0f64..=16384.0, shrink in 0i32..40) {
            let value = value * power_of_two(-shrink);
            let below = f64::from(f32_from_f16(f16_below(value)));
            prop_assert!(below <= value);
            prop_assert!(value - below < (value.abs() / 1024.0).max(power_of_two(-24)));
        }

        #[test]
        fn a_tile_is_covered(a in any::<f32>(), b in any::<f32>(), largest in any::<f32>(), bits in 1u32..=16) {
            prop_assume!(a.is_finite() && b.is_finite() && largest.is_finite());
            let (lo, hi, max) = (a.min(b), a.max(b), code_max(bits));
            let magnitude = lo.abs().max(hi.abs()).max(largest.abs());
            let exponent = exponent_for(magnitude.to_bits());
            let mut ranges = Ranges::default();
            (ranges.lo[0], ranges.hi[0]) = (lo, hi);
            ranges.find(0, exponent, max);
            prop_assert_eq!(check_table(&entry(ranges.wire_lo[0], ranges.wire_step[0])), Ok(()));
            let grid = grid(ranges.wire_lo[0], ranges.wire_step[0], exponent);
            prop_assert!(grid.value_within(0) <= lo && hi <= grid.value_within(max));
        }
    }
}
