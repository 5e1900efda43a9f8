//! Runs of a tensor's values by size, each with its grid: the body that `sort` and `fast` have in common.

use super::bits::{self, packed_bytes};
use super::grid::{code_max, Grid};
use super::hands::Hands;
use super::simd::{self, Level};
use super::{elements_of, push_f32, take_f32, CodecError, CodecId, BLOCK};

/// `2^S` runs with a grid of `2^Q` values each.
#[derive(Clone, Debug)]
pub(super) struct Runs {
    /// Q: bits of a code within its run.
    pub code_bits: u32,
    /// S: bits of the number of the run.
    pub run_bits: u32,
    grids: Vec<Grid>,
    /// From here on values belong to a run: infinite where it has none. At least 16.
    pub begins: Vec<f32>,
    /// Up to here values belong to the last run.
    pub end: f32,
    /// What a difference from there is multiplied by. At least 16.
    pub per_steps: Vec<f64>,
    /// The values of all symbols.
    values: Vec<f32>,
}

/// The most runs for which the kernels keep all tables in registers.
const FEW: usize = 16;

impl Runs {
    /// `code_bits` (Q) of at least 1 and `run_bits` (S), together at most 16.
    pub fn new(code_bits: u32, run_bits: u32) -> Option<Runs> {
        let valid = code_bits >= 1 && code_bits.checked_add(run_bits)? <= bits::WIDTH_MAX;
        let (grids, begins, per_steps, values) = Default::default();
        valid.then_some(Runs { code_bits, run_bits, grids, begins, end: 0.0, per_steps, values })
    }

    /// The bits of a symbol.
    pub fn width(&self) -> u32 {
        self.code_bits + self.run_bits
    }

    /// How many runs there are.
    pub fn count(&self) -> usize {
        1 << self.run_bits
    }

    fn table_bytes(&self) -> usize {
        8 << self.run_bits
    }

    /// The size of a body.
    pub fn encoded_bytes(&self, dims: &[usize]) -> usize {
        packed_bytes(elements_of(dims), self.width()).saturating_add(self.table_bytes())
    }

    /// Sets the ends of the runs that have values.
    pub fn set(&mut self, codec: CodecId, ends: impl Iterator<Item = (f32, f32)>) -> Result<(), CodecError> {
        self.grids.clear();
        self.end = 0.0;
        for (lo, hi) in ends {
            self.end = hi;
            let grid = Grid::over(lo, hi, code_max(self.code_bits));
            self.grids.push(grid.ok_or(CodecError::Overflow { codec, at: 0 })?);
        }
        self.begins.clear();
        self.begins.extend(self.grids.iter().map(|grid| grid.lo as f32));
        self.begins.resize(self.count().max(FEW), f32::INFINITY);
        self.per_steps.clear();
        self.per_steps.extend(self.grids.iter().map(|grid| grid.per_step()));
        self.per_steps.resize(self.count().max(FEW), 0.0);
        self.grids.resize(self.count(), Grid::default());
        Ok(())
    }

    /// Appends the body of finite values. Those below the first run get its lowest code, and those above the last its
    /// highest.
    pub fn encode(&self, hands: &Hands, bytes: &[u8], out: &mut Vec<u8>) {
        let width = self.width();
        self.grids.iter().for_each(|grid| push_f32(out, grid.lo as f32));
        self.grids.iter().for_each(|grid| push_f32(out, grid.step as f32));
        hands.append(bytes, width, out, |bytes, packed| {
            let mut symbols = [0; BLOCK];
            let rooms = packed.chunks_mut(BLOCK / bits::GROUP * width as usize);
            for (block, room) in bytes.chunks(4 * BLOCK).zip(rooms) {
                let symbols = &mut symbols[..block.len() / 4];
                self.symbols(hands.level, block, symbols);
                bits::pack_with(hands.level, symbols, width, room);
            }
        });
    }

    fn symbols(&self, level: Level, bytes: &[u8], out: &mut [u16]) {
        match self.run_bits {
            0 => simd::symbols_of_few::<0>(level, bytes, self, self.code_bits, out),
            1 => simd::symbols_of_few::<1>(level, bytes, self, self.code_bits, out),
            2 => simd::symbols_of_few::<2>(level, bytes, self, self.code_bits, out),
            3 => simd::symbols_of_few::<3>(level, bytes, self, self.code_bits, out),
            4 => simd::symbols_of_few::<4>(level, bytes, self, self.code_bits, out),
            run_bits => simd::symbols_of_many(level, bytes, self, run_bits, self.code_bits, out),
        }
    }

    /// Decodes a body of the right length.
    pub fn decode(&mut self, codec: CodecId, hands: &Hands, body: &[u8], out: &mut [u8]) -> Result<(), CodecError> {
        let (table, packed) = body.split_at(self.table_bytes());
        let (los, steps) = table.split_at(table.len() / 2);
        self.grids.clear();
        for run in 0..self.count() {
            let (lo, step) = (take_f32(los, run), take_f32(steps, run));
            self.grids.push(Grid::from_peer(codec, run, lo, step, code_max(self.code_bits))?);
        }
        let (elements, width) = (out.len() / 4, self.width());
        let decoding = self.decoding(hands.level, elements);
        let piece = hands.piece(elements, BLOCK);
        let packed = packed.chunks(piece / bits::GROUP * width as usize);
        hands.each(out.chunks_mut(4 * piece).zip(packed), |(out, packed)| {
            let mut symbols = [0; BLOCK];
            let packed = packed.chunks(BLOCK / bits::GROUP * width as usize);
            for (block, packed) in out.chunks_mut(4 * BLOCK).zip(packed) {
                let symbols = &mut symbols[..block.len() / 4];
                bits::unpack_with(hands.level, packed, width, symbols);
                decoding.values(hands.level, symbols, block);
            }
        });
        Ok(())
    }

    /// How to decode so many symbols the quickest.
    fn decoding(&mut self, level: Level, elements: usize) -> Decoding<'_> {
        let width = self.width();
        let few = width <= 4;
        if !few && self.run_bits <= 4 && (level.has_wide_registers() || elements < 1 << width) {
            let (mut los, mut steps) = ([0.0; FEW], [0.0; FEW]);
            for (run, grid) in self.grids.iter().enumerate() {
                (los[run], steps[run]) = (grid.lo as f32, grid.step as f32);
            }
            return Decoding::Computed { los, steps, code_bits: self.code_bits };
        }
        if !few && elements < 1 << width {
            return Decoding::Searched { grids: &self.grids, code_bits: self.code_bits };
        }
        self.values.clear();
        let codes = 0..=code_max(self.code_bits);
        self.values.extend(self.grids.iter().flat_map(|grid| codes.clone().map(|code| grid.value(code))));
        self.values.resize(self.values.len().max(FEW), 0.0);
        match self.values.as_slice().try_into() {
            Ok(table) => Decoding::Few(table),
            Err(_) => Decoding::Table(&self.values),
        }
    }
}

/// The ways from a symbol to its value, all to the same.
#[derive(Clone, Copy, Debug)]
enum Decoding<'a> {
    /// A table of all values, in a register.
    Few(&'a [f32; FEW]),
    /// A table of all values, in memory.
    Table(&'a [f32]),
    /// Grids in registers.
    Computed { los: [f32; FEW], steps: [f32; FEW], code_bits: u32 },
    /// Grids in memory, for tensors that are smaller than a table would be.
    Searched { grids: &'a [Grid], code_bits: u32 },
}

impl Decoding<'_> {
    fn values(&self, level: Level, symbols: &[u16], out: &mut [u8]) {
        match self {
            Decoding::Few(table) => simd::look_up_few(level, symbols, table, out),
            Decoding::Table(table) => simd::look_up(level, symbols, table, out),
            Decoding::Computed { los, steps, code_bits } => {
                simd::values_of_few(level, symbols, los, steps, *code_bits, out);
            }
            Decoding::Searched { grids, code_bits } => {
                for (to, &symbol) in out.as_chunks_mut().0.iter_mut().zip(symbols) {
                    let grid = grids[usize::from(symbol) >> code_bits];
                    *to = grid.value(symbol & code_max(*code_bits)).to_ne_bytes();
                }
            }
        }
    }
}
