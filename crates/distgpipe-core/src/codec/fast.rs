//! `fast:Q+S`, `fast:Q+S/N`: the body of [`sort`](super::sort), with the bins estimated from a sample of `N` values
//! (4096 unless given).
//!
//! ```text
//! body   2^S × lo f32 | 2^S × step f32 | n symbols of Q+S bits          8 · 2^S + ⌈n(Q+S)/8⌉ bytes
//! ```
//!
//! The tensor is divided into `N` equal parts in memory order, and one value is taken from each at a position that
//! depends on [`CodecContext::seed`]. The sample is sorted: `lo_i` is its value of rank `⌊i N / 2^S⌋`, and each bin
//! ends where the next one begins, the last one at the largest value of the sample. So there are no gaps between bins.
//! Values outside the range of the sample, about two in `N`, are clamped to it. A tensor of at most `N` values is its
//! own sample and has no such values.

use super::kernel_runner::KernelRunner;
use super::order_statistics::{sample, value};
use super::quantile_bins::QuantileBins;
use super::sort::split_bits;
use super::{check_body, check_f32, check_received, number};
use super::{Arguments, BinEnds, Codec, CodecContext, CodecError, CodecForm, CodecId, Executor, Member, TensorView};
use crate::wire::{DType, TensorMeta};
use std::sync::Arc;

pub(super) const MEMBER: Member = Member {
    name: "fast",
    id: CodecId::Fast,
    examples: &["fast:8", "fast:16", "fast:12", "fast:4", "fast:6+2/64", "fast:1+4/100", "fast:3+9", "fast:5+0/16"],
    about: "fast:Q+S or fast:Q+S/N, as sort, with bins from a sample of N (4096) values; values outside its range are clamped",
    parse,
};

const EXPECTED: &str =
    "fast:Q+S or fast:Q+S/N with Q at least 1, Q+S at most 16 bits and a sample of N from 16 to 1048576 \
                        values (4096 unless given), such as fast:6+2, or fast:16, fast:12, fast:8, fast:4 for 12+4, \
                        9+3, 6+2, 3+1";
const SAMPLE_DEFAULT: u32 = 4096;
const SAMPLE_MIN: u32 = 16;
const SAMPLE_MAX: u32 = 1 << 20;

fn parse(arguments: Arguments<'_>) -> Result<Box<dyn Codec>, CodecError> {
    let got = arguments.parameter("fast", EXPECTED)?;
    let (bits, sample) = match got.split_once('/') {
        Some((bits, sample)) => (bits, number(sample)),
        None => (got, Some(SAMPLE_DEFAULT)),
    };
    let codec = split_bits(bits).zip(sample).and_then(|((q, s), sample)| Fast::new(q, s, sample));
    codec.map(|codec| Box::new(codec) as _).ok_or_else(|| CodecError::parameter("fast", EXPECTED, got))
}

/// The codec `fast:Q+S/N`, with buffers that are reused.
#[derive(Clone, Debug)]
pub struct Fast {
    runner: KernelRunner,
    bins: QuantileBins,
    sample_size: usize,
    sample: Vec<i32>,
    spare: Vec<i32>,
}

impl Fast {
    /// The codec with `code_bits` (Q), at least 1, and `bin_bits` (S), together at most 16, and a sample of 16 to 2^20
    /// values; `None` for other numbers.
    pub fn new(code_bits: u32, bin_bits: u32, sample_size: u32) -> Option<Self> {
        let bins = QuantileBins::new(code_bits, bin_bits)?;
        let sample_size = (SAMPLE_MIN..=SAMPLE_MAX).contains(&sample_size).then_some(sample_size as usize)?;
        Some(Fast { runner: KernelRunner::default(), bins, sample_size, sample: Vec::new(), spare: Vec::new() })
    }
}

impl Codec for Fast {
    fn id(&self) -> CodecId {
        CodecId::Fast
    }

    fn encoded_bytes(&self, _dtype: DType, dims: &[usize]) -> usize {
        self.bins.encoded_bytes(dims)
    }

    fn encode(
        &mut self,
        tensor: TensorView<'_>,
        context: &CodecContext<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        check_f32(self.id(), &tensor)?;
        self.runner.extremes(self.id(), tensor.bytes)?;
        sample(tensor.bytes, self.sample_size, context.seed, &mut self.sample, &mut self.spare);
        let sample = &self.sample;
        let bins = sample.len().min(self.bins.count());
        let begin = |bin: usize| value(sample[(bin * sample.len() / bins).min(sample.len() - 1)]);
        self.bins.set(CodecId::Fast, (0..bins).map(|bin| (begin(bin), begin(bin + 1))))?;
        self.bins.encode(&self.runner, tensor.bytes, out);
        Ok(())
    }

    fn decode(&mut self, meta: &TensorMeta, body: &[u8], out: &mut [u8]) -> Result<(), CodecError> {
        check_body(self, meta, body, out)?;
        self.bins.decode(CodecId::Fast, &self.runner, body, out)
    }

    fn form(&self) -> Option<CodecForm> {
        Some(self.bins.form(BinEnds::Sample(self.sample_size as u32)))
    }

    fn check(&self, meta: &TensorMeta, body: &[u8]) -> Result<(), CodecError> {
        check_received(self, meta, body)?;
        self.bins.check(self.id(), body)
    }

    fn set_executor(&mut self, executor: Arc<dyn Executor>) {
        self.runner.set_executor(executor);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Layout, Shape};

    /// Values outside the sample's range become its end; all others are within half a step.
    #[test]
    fn outliers_become_the_ends_of_the_sample() {
        let values: Vec<f32> = (0..10_000).map(|i| if i == 77 { 1e6 } else { (i * 37 % 1001) as f32 }).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        let view = TensorView { dtype: DType::F32, dims: &[10_000], layout: Layout::Contiguous, bytes: &bytes };
        let mut codec = Fast::new(8, 2, 256).unwrap();
        // With this seed the sample does not contain the outlier.
        let context = CodecContext { seed: 5, ..CodecContext::default() };
        let mut body = Vec::new();
        codec.encode(view, &context, &mut body).unwrap();
        let shape = Shape::new(&[10_000]).unwrap();
        let meta = TensorMeta { dtype: DType::F32, layout: Layout::Contiguous, shape, codec: CodecId::Fast };
        let mut out = vec![0; bytes.len()];
        codec.decode(&meta, &body, &mut out).unwrap();
        let decoded: Vec<f32> = out.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect();
        let end = decoded.iter().copied().fold(0.0, f32::max);
        assert!((980.0..=1000.1).contains(&end), "{end}");
        assert_eq!(decoded[77], end);
        for (x, y) in values.iter().zip(&decoded).filter(|(x, _)| **x > 20.0 && **x < 980.0) {
            assert!((x - y).abs() <= 1001.0 / 4.0 / 255.0, "{x} became {y}");
        }

        let other = CodecContext { seed: 6, ..CodecContext::default() };
        let mut again = Vec::new();
        codec.encode(view, &other, &mut again).unwrap();
        assert_ne!(body, again, "another seed takes another sample");
    }
}
