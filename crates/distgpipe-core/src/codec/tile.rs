//! `tile:Q`, `tile:Q/T`: a grid of `2^Q` values for every `T` consecutive values, 64 if nothing is said.
//!
//! ```text
//! body   exponent e i32 | ⌈n/T⌉ × (lo f16, step f16) | n codes of Q bits          4 + 4 ⌈n/T⌉ + ⌈nQ/8⌉ bytes
//! value  2^e (lo + code · step)
//! ```
//!
//! With 64 values to a tile, Q bits cost Q + ½ on the wire. Neighbours in a tensor are of one magnitude, so a tile's
//! steps are far finer than those of a whole tensor's range, and an outlier spoils 64 values instead of all.
//!
//! `e` brings the largest magnitude of the tensor into [2^13, 2^14), whatever it was: gradients of 1e-8 do not
//! underflow, and neither `lo` nor the widest step overflows a 16-bit float. `lo` is rounded down, and `step` is a
//! 16-bit float with which the grid still reaches the tile's largest value, so that no value is farther than half a
//! step from its own.

use super::bits::{self, packed_bytes};
use super::grid::{self, code_max, Grid};
use super::half::{f16_from_f32, f32_from_f16};
use super::uniform::range;
use super::{check_body, check_f32, magnitude_max, number};
use super::{elements_of, Arguments, Codec, CodecError, CodecId, Context, Member, TensorView, BLOCK};
use crate::wire::{DType, TensorMeta};

pub(super) const MEMBER: Member = Member {
    name: "tile",
    id: CodecId::Tile,
    lossless: false,
    examples: &["tile:4", "tile:8", "tile:3", "tile:2/16", "tile:1/100", "tile:12/7", "tile:16/4096", "tile:5/1"],
    about: "tile:Q or tile:Q/T, a grid of 2^Q values for every T (64) neighbours, Q + 32/T bits a value",
    parse,
};

const EXPECTED: &str =
    "tile:Q or tile:Q/T with Q from 1 to 16 bits and T from 1 to 4096 values a tile (64 unless given), \
                        such as tile:4 or tile:4/128";
const TILE_DEFAULT: u32 = 64;
const TILE_MAX: u32 = 4096;

fn parse(arguments: Arguments<'_>) -> Result<Box<dyn Codec>, CodecError> {
    let got = arguments.parameter("tile", EXPECTED)?;
    let codec = match got.split_once('/') {
        None => number(got).and_then(|bits| Tile::new(bits, TILE_DEFAULT)),
        Some((bits, tile)) => number(bits).zip(number(tile)).and_then(|(bits, tile)| Tile::new(bits, tile)),
    };
    codec.map(|codec| Box::new(codec) as _).ok_or_else(|| CodecError::parameter("tile", EXPECTED, got))
}

/// The codec for one number of bits and one size of tile.
#[derive(Clone, Debug)]
pub struct Tile {
    bits: u32,
    tile: usize,
    codes: Vec<u16>,
}

impl Tile {
    /// Codes of 1 to 16 bits, tiles of 1 to 4096 values.
    pub fn new(bits: u32, tile: u32) -> Option<Self> {
        let valid = (1..=bits::WIDTH_MAX).contains(&bits) && (1..=TILE_MAX).contains(&tile);
        valid.then(|| Tile { bits, tile: tile as usize, codes: Vec::new() })
    }

    fn table_bytes(&self, elements: usize) -> usize {
        elements.div_ceil(self.tile).saturating_mul(4)
    }

    /// So many values are whole tiles, and their codes whole bytes.
    fn block(&self) -> usize {
        let least = if self.tile % bits::GROUP == 0 { self.tile } else { self.tile * bits::GROUP };
        least * (BLOCK / least).max(1)
    }
}

impl Codec for Tile {
    fn id(&self) -> CodecId {
        CodecId::Tile
    }

    fn encoded_bytes(&self, _dtype: DType, dims: &[usize]) -> usize {
        let elements = elements_of(dims);
        packed_bytes(elements, self.bits).saturating_add(self.table_bytes(elements)).saturating_add(4)
    }

    fn encode(&mut self, tensor: TensorView<'_>, _: &Context<'_>, out: &mut Vec<u8>) -> Result<(), CodecError> {
        let elements = check_f32(self.id(), &tensor)?;
        let exponent = exponent_for(magnitude_max(self.id(), tensor.bytes)?);
        let (max, block) = (code_max(self.bits), self.block());

        let start = out.len();
        out.resize(start + self.encoded_bytes(tensor.dtype, tensor.dims), 0);
        let (head, body) = out[start..].split_at_mut(4);
        head.copy_from_slice(&exponent.to_le_bytes());
        let (table, packed) = body.split_at_mut(self.table_bytes(elements));
        let mut ranges = table.chunks_exact_mut(4);
        self.codes.resize(block.min(elements), 0);
        let pieces = packed.chunks_mut(block / bits::GROUP * self.bits as usize);
        for (block, piece) in tensor.bytes.chunks(4 * block).zip(pieces) {
            let codes = &mut self.codes[..block.len() / 4];
            let tiles = block.chunks(4 * self.tile).zip(codes.chunks_mut(self.tile));
            for ((tile, codes), to) in tiles.zip(&mut ranges) {
                let (lo, hi) = range(tile);
                let wire = Range::over(lo, hi, exponent, max);
                to[..2].copy_from_slice(&wire.lo.to_le_bytes());
                to[2..].copy_from_slice(&wire.step.to_le_bytes());
                grid::codes(tile, wire.grid(exponent), max, codes);
            }
            bits::pack(codes, self.bits, piece);
        }
        Ok(())
    }

    fn decode(&mut self, meta: &TensorMeta, body: &[u8], out: &mut [u8]) -> Result<(), CodecError> {
        let elements = check_body(self, meta, body, out)?;
        let (head, body) = body.split_at(4);
        let exponent = i32::from_le_bytes([head[0], head[1], head[2], head[3]]);
        if !EXPONENTS.contains(&exponent) {
            return Err(CodecError::Exponent { got: exponent });
        }
        let (table, packed) = body.split_at(self.table_bytes(elements));
        let mut ranges = table.chunks_exact(4).enumerate();
        let block = self.block();
        self.codes.resize(block.min(elements), 0);
        let pieces = packed.chunks(block / bits::GROUP * self.bits as usize);
        for (block, piece) in out.chunks_mut(4 * block).zip(pieces) {
            let codes = &mut self.codes[..block.len() / 4];
            bits::unpack(piece, self.bits, codes);
            let tiles = block.chunks_mut(4 * self.tile).zip(codes.chunks(self.tile));
            for ((tile, codes), (at, from)) in tiles.zip(&mut ranges) {
                let lo = u16::from_le_bytes([from[0], from[1]]);
                let step = u16::from_le_bytes([from[2], from[3]]);
                let grid = Range::from_peer(at, lo, step)?.grid(exponent);
                values(codes, grid, tile);
            }
        }
        Ok(())
    }
}

/// The exponents for the magnitudes of an `f32`: of the smallest, 2^-149, and of the largest, just below 2^128.
const EXPONENTS: std::ops::RangeInclusive<i32> = -149 - 13..=127 - 13;

/// The `e` for which `2^-e` times this magnitude, given as the bits of an `f32`, is in [2^13, 2^14).
fn exponent_for(magnitude: u32) -> i32 {
    match (magnitude.checked_ilog2(), magnitude >> 23) {
        (None, _) => 0,
        (Some(log), 0) => log as i32 - 149 - 13,
        (_, exponent) => exponent as i32 - 127 - 13,
    }
}

/// 2^exponent, for exponents of normal numbers.
fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((1023 + i64::from(exponent)) as u64) << 52)
}

/// A tile's grid as it is on the wire: two 16-bit floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    lo: u16,
    step: u16,
}

impl Range {
    fn over(lo: f32, hi: f32, exponent: i32, code_max: u16) -> Range {
        let scale = power_of_two(-exponent);
        let (scaled_lo, scaled_hi) = (f64::from(lo) * scale, f64::from(hi) * scale);
        let lo = f16_below(scaled_lo);
        let exact = (scaled_hi - f64::from(f32_from_f16(lo))) / f64::from(code_max);
        let nearest = f16_from_f32(exact as f32);
        // The smallest of the three that reaches `hi`, in the numbers that the other end will see.
        let reaches = |&step: &u16| value(Range { lo, step }.grid(exponent), code_max) >= hi;
        let step = (nearest.saturating_sub(1)..=nearest).find(reaches).unwrap_or(nearest + 1);
        Range { lo, step }
    }

    fn from_peer(at: usize, lo: u16, step: u16) -> Result<Range, CodecError> {
        let valid = lo & 0x7c00 != 0x7c00 && step < 0x7c00;
        valid.then_some(Range { lo, step }).ok_or(CodecError::Grid { codec: CodecId::Tile, at })
    }

    #[inline(always)]
    fn grid(self, exponent: i32) -> Grid {
        let scale = power_of_two(exponent);
        Grid { lo: f64::from(f32_from_f16(self.lo)) * scale, step: f64::from(f32_from_f16(self.step)) * scale }
    }
}

/// The value of a code. The end of a grid that was made longer may lie beyond the largest `f32`.
#[inline(always)]
fn value(grid: Grid, code: u16) -> f32 {
    grid.value(code).clamp(f32::MIN, f32::MAX)
}

fn values(codes: &[u16], grid: Grid, out: &mut [u8]) {
    for (to, &code) in out.chunks_exact_mut(4).zip(codes) {
        to.copy_from_slice(&value(grid, code).to_ne_bytes());
    }
}

/// The largest 16-bit float that is at most `value`, whose magnitude is at most 2^14.
fn f16_below(value: f64) -> u16 {
    let nearest = f16_from_f32(value as f32);
    if f64::from(f32_from_f16(nearest)) <= value {
        return nearest;
    }
    match nearest {
        0 | 0x8000 => 0x8001,
        positive if positive < 0x8000 => positive - 1,
        negative => negative + 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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

    #[test]
    fn a_peer_cannot_describe_infinite_values() {
        for (lo, step) in [(0x7c00, 0), (0xfc00, 0), (0x7e00, 0), (0, 0x7c00), (0, 0x7e01), (0, 0x8001), (0, 0xbc00)] {
            assert_eq!(Range::from_peer(3, lo, step), Err(CodecError::Grid { codec: CodecId::Tile, at: 3 }));
        }
        let widest = Range::from_peer(0, 0xfbff, 0x7bff).unwrap().grid(*EXPONENTS.end());
        assert_eq!(value(widest, u16::MAX), f32::MAX);
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
            let range = Range::over(lo, hi, exponent, max);
            prop_assert_eq!(Range::from_peer(0, range.lo, range.step), Ok(range));
            let grid = range.grid(exponent);
            prop_assert!(value(grid, 0) <= lo && hi <= value(grid, max));
        }
    }
}
