//! `sort:Q+S`: a grid of `2^Q` values for each of `2^S` runs of the sorted tensor.
//!
//! ```text
//! body   2^S × lo f32 | 2^S × step f32 | n symbols of Q+S bits          8 · 2^S + ⌈n(Q+S)/8⌉ bytes
//! ```
//!
//! By definition the values are sorted and split into `2^S` consecutive runs whose sizes differ by at most one, the
//! first ones longer; run `i` reaches from `lo_i` to `hi_i` with `step_i = (hi_i − lo_i)/(2^Q − 1)`, and a value's
//! symbol is `i · 2^Q + round((x − lo_i)/step_i)`. Runs are narrow where values are dense, so the error is small where
//! most of them are.
//!
//! Nothing is sorted here: the ends of the runs are order statistics (`order.rs`), and a value belongs to the last
//! run that begins at or below it. One that lies on a boundary may so come into another run than by its rank, and
//! decodes to itself from either. Runs without values, where there are fewer values than runs, have `lo` and `step` 0.

use super::hands::Hands;
use super::order::{OrderStatistics, Values};
use super::runs::Runs;
use super::{check_body, check_f32, number};
use super::{Arguments, Codec, CodecError, CodecId, Context, Crew, Member, TensorView};
use crate::wire::{DType, TensorMeta};
use std::sync::Arc;

pub(super) const MEMBER: Member = Member {
    name: "sort",
    id: CodecId::Sort,
    lossless: false,
    examples: &["sort:8", "sort:16", "sort:12", "sort:4", "sort:4+4", "sort:2+2", "sort:1+4", "sort:3+9", "sort:5+0"],
    about: "sort:Q+S, a grid of 2^Q values for each 2^S-th of the values by size, Q+S bits a value; sort:8 is sort:6+2",
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

/// Q and S of `Q+S`, or of the usual split of so many bits.
pub(super) fn split_bits(text: &str) -> Option<(u32, u32)> {
    match text {
        "16" => Some((12, 4)),
        "12" => Some((9, 3)),
        "8" => Some((6, 2)),
        "4" => Some((3, 1)),
        _ => text.split_once('+').and_then(|(q, s)| number(q).zip(number(s))),
    }
}

/// The codec for one split of the bits.
#[derive(Clone, Debug)]
pub struct Sort {
    hands: Hands,
    runs: Runs,
    ranks: Vec<usize>,
    statistics: OrderStatistics,
}

impl Sort {
    /// `code_bits` (Q) of at least 1 and `run_bits` (S), together at most 16.
    pub fn new(code_bits: u32, run_bits: u32) -> Option<Self> {
        let runs = Runs::new(code_bits, run_bits)?;
        Some(Sort { hands: Hands::default(), runs, ranks: Vec::new(), statistics: OrderStatistics::default() })
    }

    /// Fills `ranks` with those of the first and the last value of each run that has any.
    fn find_ranks(&mut self, elements: usize) {
        let (shortest, longer) = (elements / self.runs.count(), elements % self.runs.count());
        self.ranks.clear();
        let mut begin = 0;
        for run in 0..elements.min(self.runs.count()) {
            let end = begin + shortest + usize::from(run < longer);
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
        self.runs.encoded_bytes(dims)
    }

    fn encode(&mut self, tensor: TensorView<'_>, _: &Context<'_>, out: &mut Vec<u8>) -> Result<(), CodecError> {
        let elements = check_f32(self.id(), &tensor)?;
        self.find_ranks(elements);
        let values = Values { codec: self.id(), bytes: tensor.bytes };
        let ends = self.statistics.at_ranks(&self.hands, values, &self.ranks)?;
        self.runs.set(CodecId::Sort, ends.as_chunks().0.iter().map(|&[lo, hi]| (lo, hi)))?;
        self.runs.encode(&self.hands, tensor.bytes, out);
        Ok(())
    }

    fn decode(&mut self, meta: &TensorMeta, body: &[u8], out: &mut [u8]) -> Result<(), CodecError> {
        check_body(self, meta, body, out)?;
        self.runs.decode(CodecId::Sort, &self.hands, body, out)
    }

    fn set_crew(&mut self, crew: Arc<dyn Crew>) {
        self.hands.set_crew(crew);
    }
}
