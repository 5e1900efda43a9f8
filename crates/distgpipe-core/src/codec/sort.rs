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

use super::bits::{self, packed_bytes};
use super::grid::{self, code_max, Grid};
use super::order::OrderStatistics;
use super::{check_body, check_f32, floats, magnitude_max, number, push_f32, take_f32};
use super::{elements_of, Arguments, Codec, CodecError, CodecId, Context, Member, TensorView, BLOCK};
use crate::wire::{DType, TensorMeta};

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
    let codec = match got {
        "16" => Sort::new(12, 4),
        "12" => Sort::new(9, 3),
        "8" => Sort::new(6, 2),
        "4" => Sort::new(3, 1),
        _ => got.split_once('+').and_then(|(q, s)| Sort::new(number(q)?, number(s)?)),
    };
    codec.map(|codec| Box::new(codec) as _).ok_or_else(|| CodecError::parameter("sort", EXPECTED, got))
}

/// The codec for one split of the bits.
#[derive(Clone, Debug)]
pub struct Sort {
    /// Q: bits of a code within its run.
    code_bits: u32,
    /// S: bits of the number of the run.
    run_bits: u32,
    ranks: Vec<usize>,
    ends: Vec<f32>,
    statistics: OrderStatistics,
    grids: Vec<Grid>,
    runs: Vec<Run>,
    values: Vec<f32>,
    symbols: Vec<u16>,
}

/// A run as the encoder needs it.
#[derive(Clone, Copy, Debug)]
struct Run {
    /// From here on values belong to this run: infinite where it has none.
    begin: f32,
    lo: f64,
    per_step: f64,
}

impl Sort {
    /// `code_bits` (Q) of at least 1 and `run_bits` (S), together at most 16.
    pub fn new(code_bits: u32, run_bits: u32) -> Option<Self> {
        let valid = code_bits >= 1 && code_bits.checked_add(run_bits)? <= bits::WIDTH_MAX;
        valid.then(|| Sort {
            code_bits,
            run_bits,
            ranks: Vec::new(),
            ends: Vec::new(),
            statistics: OrderStatistics::default(),
            grids: Vec::new(),
            runs: Vec::new(),
            values: Vec::new(),
            symbols: Vec::new(),
        })
    }

    fn width(&self) -> u32 {
        self.code_bits + self.run_bits
    }

    fn table_bytes(&self) -> usize {
        8 << self.run_bits
    }

    /// Fills `grids`: as many as there are runs with values.
    fn find_grids(&mut self, bytes: &[u8]) -> Result<(), CodecError> {
        let elements = bytes.len() / 4;
        let (shortest, longer) = (elements >> self.run_bits, elements & ((1 << self.run_bits) - 1));
        let runs = elements.min(1 << self.run_bits);
        self.ranks.clear();
        let mut begin = 0;
        for run in 0..runs {
            let end = begin + shortest + usize::from(run < longer);
            self.ranks.extend([begin, end - 1]);
            begin = end;
        }
        self.statistics.at_ranks(bytes, &self.ranks, &mut self.ends);
        self.grids.clear();
        for ends in self.ends.chunks_exact(2) {
            let grid = Grid::over(ends[0], ends[1], code_max(self.code_bits));
            self.grids.push(grid.ok_or(CodecError::Overflow { codec: CodecId::Sort, at: 0 })?);
        }
        Ok(())
    }

    fn find_runs(&mut self) {
        let run = |grid: &Grid| Run { begin: grid.lo as f32, lo: grid.lo, per_step: grid.per_step() };
        let empty = Run { begin: f32::INFINITY, lo: 0.0, per_step: 0.0 };
        self.runs.clear();
        self.runs.extend(self.grids.iter().map(run));
        self.runs.resize(1 << self.run_bits, empty);
    }
}

impl Codec for Sort {
    fn id(&self) -> CodecId {
        CodecId::Sort
    }

    fn encoded_bytes(&self, _dtype: DType, dims: &[usize]) -> usize {
        let elements = elements_of(dims);
        packed_bytes(elements, self.width()).saturating_add(self.table_bytes())
    }

    fn encode(&mut self, tensor: TensorView<'_>, _: &Context<'_>, out: &mut Vec<u8>) -> Result<(), CodecError> {
        let elements = check_f32(self.id(), &tensor)?;
        magnitude_max(self.id(), tensor.bytes)?;
        self.find_grids(tensor.bytes)?;
        self.find_runs();

        out.reserve(self.encoded_bytes(tensor.dtype, tensor.dims));
        self.grids.resize(1 << self.run_bits, Grid::default());
        self.grids.iter().for_each(|grid| push_f32(out, grid.lo as f32));
        self.grids.iter().for_each(|grid| push_f32(out, grid.step as f32));

        let width = self.width();
        let mut at = out.len();
        out.resize(at + packed_bytes(elements, width), 0);
        self.symbols.resize(BLOCK.min(elements), 0);
        for block in tensor.bytes.chunks(4 * BLOCK) {
            let symbols = &mut self.symbols[..block.len() / 4];
            symbols_of(block, &self.runs, self.code_bits, symbols);
            let end = at + packed_bytes(symbols.len(), width);
            bits::pack(symbols, width, &mut out[at..end]);
            at = end;
        }
        Ok(())
    }

    fn decode(&mut self, meta: &TensorMeta, body: &[u8], out: &mut [u8]) -> Result<(), CodecError> {
        let elements = check_body(self, meta, body, out)?;
        let (table, packed) = body.split_at(self.table_bytes());
        let (los, steps) = table.split_at(table.len() / 2);
        self.grids.clear();
        for run in 0..1usize << self.run_bits {
            let (lo, step) = (take_f32(los, run), take_f32(steps, run));
            self.grids.push(Grid::from_peer(self.id(), run, lo, step, code_max(self.code_bits))?);
        }

        let width = self.width();
        // Every value that there can be, if the tensor has more of them than that.
        let tabulated = elements >= 1 << width;
        if tabulated {
            self.values.clear();
            let codes = 0..=code_max(self.code_bits);
            self.values.extend(self.grids.iter().flat_map(|grid| codes.clone().map(|code| grid.value(code))));
        }
        self.symbols.resize(BLOCK.min(elements), 0);
        let pieces = packed.chunks(BLOCK / bits::GROUP * width as usize);
        for (block, piece) in out.chunks_mut(4 * BLOCK).zip(pieces) {
            let symbols = &mut self.symbols[..block.len() / 4];
            bits::unpack(piece, width, symbols);
            if tabulated {
                look_up(symbols, &self.values, block);
            } else {
                values_of(symbols, &self.grids, self.code_bits, block);
            }
        }
        Ok(())
    }
}

/// The symbols of values, given all `2^S` runs in ascending order.
fn symbols_of(bytes: &[u8], runs: &[Run], code_bits: u32, out: &mut [u16]) {
    match runs.len().ilog2() {
        0 => symbols_among::<0>(bytes, runs, code_bits, out),
        1 => symbols_among::<1>(bytes, runs, code_bits, out),
        2 => symbols_among::<2>(bytes, runs, code_bits, out),
        3 => symbols_among::<3>(bytes, runs, code_bits, out),
        4 => symbols_among::<4>(bytes, runs, code_bits, out),
        run_bits => symbols_by_halving(bytes, runs, run_bits, code_bits, out),
    }
}

/// For the usual numbers of runs the halving is unrolled.
fn symbols_among<const S: u32>(bytes: &[u8], runs: &[Run], code_bits: u32, out: &mut [u16]) {
    symbols_by_halving(bytes, runs, S, code_bits, out);
}

#[inline(always)]
fn symbols_by_halving(bytes: &[u8], runs: &[Run], run_bits: u32, code_bits: u32, out: &mut [u16]) {
    let code_max = f64::from(code_max(code_bits));
    let runs = &runs[..1 << run_bits];
    for (to, value) in out.iter_mut().zip(floats(bytes)) {
        // Run 0 begins at the smallest value. Each bit, from the highest, is set if the run so named has begun.
        let mut run = 0;
        for bit in (0..run_bits).rev() {
            run |= usize::from(value >= runs[run | 1 << bit].begin) << bit;
        }
        let Run { lo, per_step, .. } = runs[run];
        *to = (run as u16) << code_bits | grid::code(value, lo, per_step, code_max);
    }
}

fn look_up(symbols: &[u16], values: &[f32], out: &mut [u8]) {
    for (to, &symbol) in out.chunks_exact_mut(4).zip(symbols) {
        to.copy_from_slice(&values[usize::from(symbol)].to_ne_bytes());
    }
}

fn values_of(symbols: &[u16], grids: &[Grid], code_bits: u32, out: &mut [u8]) {
    for (to, &symbol) in out.chunks_exact_mut(4).zip(symbols) {
        let grid = grids[usize::from(symbol) >> code_bits];
        to.copy_from_slice(&grid.value(symbol & code_max(code_bits)).to_ne_bytes());
    }
}
