//! `uniform:Q`: codes on one grid of `2^Q` values from the smallest to the largest value of the tensor.
//!
//! ```text
//! body   lo f32 | step f32 | n codes of Q bits          8 + ⌈nQ/8⌉ bytes
//! ```
//!
//! Simple and fast, but one outlier makes the step coarse for all values. [`tile`](super::tile) costs half a bit more
//! and adapts to local ranges; [`sort`](super::sort) adapts to the distribution of the values.

use super::bits::{self, packed_bytes};
use super::grid::{code_max, Grid};
use super::kernel_runner::KernelRunner;
use super::{check_body, check_f32, check_received, number, push_f32, simd, take_f32};
use super::{
    elements_of, Arguments, BinEnds, BodyForm, Codec, CodecContext, CodecError, CodecForm, CodecId, Executor, Member,
    TensorView, BLOCK,
};
use crate::wire::{DType, TensorMeta};
use std::sync::Arc;

pub(super) const MEMBER: Member = Member {
    name: "uniform",
    id: CodecId::Uniform,
    examples: &["uniform:8", "uniform:4", "uniform:12", "uniform:16", "uniform:1", "uniform:11"],
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

/// The codec `uniform:Q`, which has no state.
#[derive(Clone, Debug)]
pub struct Uniform {
    bits: u32,
    runner: KernelRunner,
}

impl Uniform {
    /// The codec with codes of this many bits, from 1 to 16; `None` for other numbers.
    pub fn new(bits: u32) -> Option<Self> {
        (1..=bits::WIDTH_MAX).contains(&bits).then(|| Uniform { bits, runner: KernelRunner::default() })
    }

    /// The grid of a body whose length has been checked.
    fn grid(&self, body: &[u8]) -> Result<Grid, CodecError> {
        Grid::from_peer(CodecId::Uniform, 0, take_f32(body, 0), take_f32(body, 1), code_max(self.bits))
    }

    /// The size in bytes of this many codes, which is a multiple of [`bits::GROUP`].
    fn packed(&self, codes: usize) -> usize {
        codes / bits::GROUP * self.bits as usize
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

    fn encode(&mut self, tensor: TensorView<'_>, _: &CodecContext<'_>, out: &mut Vec<u8>) -> Result<(), CodecError> {
        check_f32(self.id(), &tensor)?;
        let (lo, hi) = self.runner.extremes(self.id(), tensor.bytes)?.range();
        let max = code_max(self.bits);
        let grid = Grid::over(lo, hi, max).ok_or(CodecError::Overflow { codec: self.id(), at: 0 })?;

        push_f32(out, grid.lo as f32);
        push_f32(out, grid.step as f32);
        let level = self.runner.level;
        self.runner.append(tensor.bytes, self.bits, out, |bytes, packed| {
            let mut codes = [0; BLOCK];
            for (block, packed) in bytes.chunks(4 * BLOCK).zip(packed.chunks_mut(self.packed(BLOCK))) {
                let codes = &mut codes[..block.len() / 4];
                simd::codes(level, block, grid.quantizer(max), codes);
                bits::pack_with(level, codes, self.bits, packed);
            }
        });
        Ok(())
    }

    fn decode(&mut self, meta: &TensorMeta, body: &[u8], out: &mut [u8]) -> Result<(), CodecError> {
        let elements = check_body(self, meta, body, out)?;
        let (grid, packed) = (self.grid(body)?, &body[TABLE_BYTES..]);
        let (piece, level) = (self.runner.piece(elements, BLOCK), self.runner.level);
        let work = out.chunks_mut(4 * piece).zip(packed.chunks(self.packed(piece)));
        self.runner.each(work, |(out, packed)| {
            let mut codes = [0; BLOCK];
            for (block, packed) in out.chunks_mut(4 * BLOCK).zip(packed.chunks(self.packed(BLOCK))) {
                let codes = &mut codes[..block.len() / 4];
                bits::unpack_with(level, packed, self.bits, codes);
                simd::values(level, codes, grid.lo, grid.step, block);
            }
        });
        Ok(())
    }

    fn form(&self) -> Option<CodecForm> {
        Some(BodyForm::Bins { code_bits: self.bits, bin_bits: 0, ends: BinEnds::Range }.into())
    }

    fn check(&self, meta: &TensorMeta, body: &[u8]) -> Result<(), CodecError> {
        check_received(self, meta, body)?;
        self.grid(body).map(|_| ())
    }

    fn set_executor(&mut self, executor: Arc<dyn Executor>) {
        self.runner.set_executor(executor);
    }
}
