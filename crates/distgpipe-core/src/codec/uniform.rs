//! `uniform:Q`: one grid of `2^Q` values from the tensor's smallest to its largest.
//!
//! ```text
//! body   lo f32 | step f32 | n codes of Q bits          8 + ⌈nQ/8⌉ bytes
//! ```
//!
//! Simple and fast, but one outlier makes every step coarse. [`tile`](super::tile) costs half a bit more and follows
//! the values; [`sort`](super::sort) follows their distribution.

use super::bits::{self, packed_bytes};
use super::grid::{self, code_max, Grid};
use super::{check_body, check_f32, floats, magnitude_max, number, push_f32, take_f32};
use super::{elements_of, Arguments, Codec, CodecError, CodecId, Context, Member, TensorView, BLOCK};
use crate::wire::{DType, TensorMeta};

pub(super) const MEMBER: Member = Member {
    name: "uniform",
    id: CodecId::Uniform,
    lossless: false,
    examples: &["uniform:8", "uniform:1", "uniform:4", "uniform:11", "uniform:16"],
    about: "uniform:Q, a grid of 2^Q values over the tensor's range, Q bits a value",
    parse,
};

const EXPECTED: &str = "uniform:Q with Q from 1 to 16 bits, such as uniform:8";
const TABLE_BYTES: usize = 8;

fn parse(arguments: Arguments<'_>) -> Result<Box<dyn Codec>, CodecError> {
    let got = arguments.parameter("uniform", EXPECTED)?;
    let codec = number(got).and_then(Uniform::new);
    codec.map(|codec| Box::new(codec) as _).ok_or_else(|| CodecError::parameter("uniform", EXPECTED, got))
}

/// The codec for one number of bits.
#[derive(Clone, Debug)]
pub struct Uniform {
    bits: u32,
    codes: Vec<u16>,
}

impl Uniform {
    /// Codes of 1 to 16 bits.
    pub fn new(bits: u32) -> Option<Self> {
        (1..=bits::WIDTH_MAX).contains(&bits).then(|| Uniform { bits, codes: Vec::new() })
    }
}

impl Codec for Uniform {
    fn id(&self) -> CodecId {
        CodecId::Uniform
    }

    fn encoded_bytes(&self, _dtype: DType, dims: &[usize]) -> usize {
        let elements = elements_of(dims);
        packed_bytes(elements, self.bits).saturating_add(TABLE_BYTES)
    }

    fn encode(&mut self, tensor: TensorView<'_>, _: &Context<'_>, out: &mut Vec<u8>) -> Result<(), CodecError> {
        let elements = check_f32(self.id(), &tensor)?;
        magnitude_max(self.id(), tensor.bytes)?;
        let (lo, hi) = range(tensor.bytes);
        let max = code_max(self.bits);
        let grid = Grid::over(lo, hi, max).ok_or(CodecError::Overflow { codec: self.id(), at: 0 })?;

        out.reserve(self.encoded_bytes(tensor.dtype, tensor.dims));
        push_f32(out, grid.lo as f32);
        push_f32(out, grid.step as f32);
        let mut at = out.len();
        out.resize(at + packed_bytes(elements, self.bits), 0);
        self.codes.resize(BLOCK.min(elements), 0);
        for block in tensor.bytes.chunks(4 * BLOCK) {
            let codes = &mut self.codes[..block.len() / 4];
            grid::codes(block, grid, max, codes);
            let end = at + packed_bytes(codes.len(), self.bits);
            bits::pack(codes, self.bits, &mut out[at..end]);
            at = end;
        }
        Ok(())
    }

    fn decode(&mut self, meta: &TensorMeta, body: &[u8], out: &mut [u8]) -> Result<(), CodecError> {
        let elements = check_body(self, meta, body, out)?;
        let (table, packed) = body.split_at(TABLE_BYTES);
        let (lo, step) = (take_f32(table, 0), take_f32(table, 1));
        let grid = Grid::from_peer(self.id(), 0, lo, step, code_max(self.bits))?;
        self.codes.resize(BLOCK.min(elements), 0);
        let pieces = packed.chunks(BLOCK / bits::GROUP * self.bits as usize);
        for (block, piece) in out.chunks_mut(4 * BLOCK).zip(pieces) {
            let codes = &mut self.codes[..block.len() / 4];
            bits::unpack(piece, self.bits, codes);
            grid::values(codes, grid, block);
        }
        Ok(())
    }
}

/// The smallest and the largest of finite values; 0 and 0 if there are none.
pub(super) fn range(bytes: &[u8]) -> (f32, f32) {
    // Several running extremes, because one would have to wait for itself at every value.
    const LANES: usize = 16;
    let Some(first) = floats(bytes).next() else {
        return (0.0, 0.0);
    };
    let (mut lo, mut hi) = ([first; LANES], [first; LANES]);
    let chunks = bytes.chunks_exact(4 * LANES);
    let rest = chunks.remainder();
    let mut take = |chunk: &[u8]| {
        for (lane, value) in floats(chunk).enumerate() {
            lo[lane] = if value < lo[lane] { value } else { lo[lane] };
            hi[lane] = if value > hi[lane] { value } else { hi[lane] };
        }
    };
    chunks.for_each(&mut take);
    take(rest);
    (lo.into_iter().fold(first, f32::min), hi.into_iter().fold(first, f32::max))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_range_is_that_of_the_values(values in prop::collection::vec(-1e30f32..1e30, 1..100)) {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
            let lo = values.iter().copied().fold(f32::INFINITY, f32::min);
            let hi = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            prop_assert_eq!(range(&bytes), (lo, hi));
        }
    }
}
