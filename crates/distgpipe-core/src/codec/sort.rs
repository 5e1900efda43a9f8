//! `sort:Q+S`: codes on a grid of `2^Q` values for each of `2^S` quantile bins.
//!
//! ```text
//! body   2^S × lo f32 | 2^S × step f32 | n symbols of Q+S bits          8 · 2^S + ⌈n(Q+S)/8⌉ bytes
//! ```
//!
//! By definition the values are sorted and split into `2^S` consecutive bins whose sizes differ by at most one, the
//! larger ones first. Bin `i` ranges from `lo_i` to `hi_i` with `step_i = (hi_i − lo_i)/(2^Q − 1)`, and the symbol of a
//! value is `i · 2^Q + round((x − lo_i)/step_i)`. Bins are narrow where values are dense, so the error is small where
//! most values are.
//!
//! The implementation does not sort. The ends of the bins are order statistics (`order_statistics.rs`), and a value
//! belongs to the last bin that begins at or below it. So a value on a boundary may be in another bin than by its rank;
//! it decodes to itself from either. If there are fewer values than bins, the bins without values have `lo` and `step`
//! 0.

use super::kernel_runner::KernelRunner;
use super::order_statistics::{OrderStatistics, Values};
use super::quantile_bins::QuantileBins;
use super::{check_body, check_f32, check_received, number};
use super::{Arguments, BinEnds, Codec, CodecContext, CodecError, CodecForm, CodecId, Executor, Member, TensorView};
use crate::wire::{DType, TensorMeta};
use std::sync::Arc;

pub(super) const MEMBER: Member = Member {
    name: "sort",
    id: CodecId::Sort,
    examples: &["sort:8", "sort:16", "sort:12", "sort:4", "sort:4+4", "sort:2+2", "sort:1+4", "sort:3+9", "sort:5+0"],
    about: "sort:Q+S, a grid of 2^Q values for each of 2^S quantile bins, Q+S bits a value; sort:8 is sort:6+2",
    parse,
};

const EXPECTED: &str =
    "sort:Q+S with Q at least 1 and Q+S at most 16 bits, such as sort:6+2, or sort:16, sort:12, sort:8, \
                        sort:4 for 12+4, 9+3, 6+2, 3+1";

fn parse(arguments: Arguments<'_>) -> Result<Box<dyn Codec>, CodecError> {
    let got = arguments.parameter("sort", EXPECTED)?;
    let codec = split_bits(got).and_then(|(q, s)| Sort::new(q, s));
    codec.map(|codec| Box::new(codec) as _).ok_or_else(|| CodecError::parameter("sort", EXPECTED, got))
}

/// Parses `Q+S`, or a total number of bits for which there is a usual split.
pub(super) fn split_bits(text: &str) -> Option<(u32, u32)> {
    match text {
        "16" => Some((12, 4)),
        "12" => Some((9, 3)),
        "8" => Some((6, 2)),
        "4" => Some((3, 1)),
        _ => text.split_once('+').and_then(|(q, s)| number(q).zip(number(s))),
    }
}

/// The codec `sort:Q+S`, with buffers that are reused.
#[derive(Clone, Debug)]
pub struct Sort {
    runner: KernelRunner,
    bins: QuantileBins,
    ranks: Vec<usize>,
    statistics: OrderStatistics,
}

impl Sort {
    /// The codec with `code_bits` (Q), at least 1, and `bin_bits` (S), together at most 16; `None` for other numbers.
    pub fn new(code_bits: u32, bin_bits: u32) -> Option<Self> {
        let bins = QuantileBins::new(code_bits, bin_bits)?;
        Some(Sort { runner: KernelRunner::default(), bins, ranks: Vec::new(), statistics: OrderStatistics::default() })
    }

    /// Fills `ranks` with the ranks of the first and the last value of each bin that has values.
    fn find_ranks(&mut self, elements: usize) {
        let (shortest, longer) = (elements / self.bins.count(), elements % self.bins.count());
        self.ranks.clear();
        let mut begin = 0;
        for bin in 0..elements.min(self.bins.count()) {
            let end = begin + shortest + usize::from(bin < longer);
            self.ranks.extend([begin, end - 1]);
            begin = end;
        }
    }
}

impl Codec for Sort {
    fn id(&self) -> CodecId {
        CodecId::Sort
    }

    fn encoded_bytes(&self, _dtype: DType, dims: &[usize]) -> usize {
        self.bins.encoded_bytes(dims)
    }

    fn encode(&mut self, tensor: TensorView<'_>, _: &CodecContext<'_>, out: &mut Vec<u8>) -> Result<(), CodecError> {
        let elements = check_f32(self.id(), &tensor)?;
        self.find_ranks(elements);
        let values = Values { codec: self.id(), bytes: tensor.bytes };
        let ends = self.statistics.at_ranks(&self.runner, values, &self.ranks)?;
        self.bins.set(CodecId::Sort, ends.as_chunks().0.iter().map(|&[lo, hi]| (lo, hi)))?;
        self.bins.encode(&self.runner, tensor.bytes, out);
        Ok(())
    }

    fn decode(&mut self, meta: &TensorMeta, body: &[u8], out: &mut [u8]) -> Result<(), CodecError> {
        check_body(self, meta, body, out)?;
        self.bins.decode(CodecId::Sort, &self.runner, body, out)
    }

    fn form(&self) -> Option<CodecForm> {
        Some(self.bins.form(BinEnds::Quantiles))
    }

    fn check(&self, meta: &TensorMeta, body: &[u8]) -> Result<(), CodecError> {
        check_received(self, meta, body)?;
        self.bins.check(self.id(), body)
    }

    fn set_executor(&mut self, executor: Arc<dyn Executor>) {
        self.runner.set_executor(executor);
    }
}
