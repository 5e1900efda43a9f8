//! Quantile bins, each with its own grid: the body that `sort` and `fast` share.

use super::bits::{self, packed_bytes};
use super::grid::{code_max, Grid};
use super::kernel_runner::KernelRunner;
use super::simd::{self, Level};
use super::{elements_of, push_f32, take_f32, BinEnds, BodyForm, CodecError, CodecForm, CodecId, BLOCK};

/// `2^S` bins, each with a grid of `2^Q` values.
#[derive(Clone, Debug)]
pub(super) struct QuantileBins {
    /// Q: the bits of a code within its bin.
    pub code_bits: u32,
    /// S: the bits of the index of a bin.
    pub bin_bits: u32,
    grids: Vec<Grid>,
    /// The smallest value of each bin; infinite for bins without values. At least 16 entries.
    pub begins: Vec<f32>,
    /// The largest value of the last bin that has values.
    pub end: f32,
    /// The reciprocal of each bin's step. At least 16 entries.
    pub per_steps: Vec<f64>,
    /// The values of all symbols; a buffer that is reused.
    values: Vec<f32>,
}

/// The largest number of bins for which kernels keep all tables in registers.
const FEW: usize = 16;

impl QuantileBins {
    /// Bins with `code_bits` (Q), at least 1, and `bin_bits` (S), together at most 16; `None` for other numbers.
    pub fn new(code_bits: u32, bin_bits: u32) -> Option<QuantileBins> {
        let valid = code_bits >= 1 && code_bits.checked_add(bin_bits)? <= bits::WIDTH_MAX;
        let (grids, begins, per_steps, values) = Default::default();
        valid.then_some(QuantileBins { code_bits, bin_bits, grids, begins, end: 0.0, per_steps, values })
    }

    /// The number of bits of a symbol.
    pub fn width(&self) -> u32 {
        self.code_bits + self.bin_bits
    }

    /// The number of bins.
    pub fn count(&self) -> usize {
        1 << self.bin_bits
    }

    fn table_bytes(&self) -> usize {
        8 << self.bin_bits
    }

    /// The size of a body in bytes.
    pub fn encoded_bytes(&self, dims: &[usize]) -> usize {
        packed_bytes(elements_of(dims), self.width()).saturating_add(self.table_bytes())
    }

    /// Sets the range of each bin that has values.
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

    /// Appends the body of finite values. Values below the first bin get its lowest code, and values above the last bin
    /// its highest.
    pub fn encode(&self, runner: &KernelRunner, bytes: &[u8], out: &mut Vec<u8>) {
        let width = self.width();
        self.grids.iter().for_each(|grid| push_f32(out, grid.lo as f32));
        self.grids.iter().for_each(|grid| push_f32(out, grid.step as f32));
        runner.append(bytes, width, out, |bytes, packed| {
            let mut symbols = [0; BLOCK];
            let rooms = packed.chunks_mut(BLOCK / bits::GROUP * width as usize);
            for (block, room) in bytes.chunks(4 * BLOCK).zip(rooms) {
                let symbols = &mut symbols[..block.len() / 4];
                self.symbols(runner.level, block, symbols);
                bits::pack_with(runner.level, symbols, width, room);
            }
        });
    }

    fn symbols(&self, level: Level, bytes: &[u8], out: &mut [u16]) {
        match self.bin_bits {
            0 => simd::symbols_of_few::<0>(level, bytes, self, self.code_bits, out),
            1 => simd::symbols_of_few::<1>(level, bytes, self, self.code_bits, out),
            2 => simd::symbols_of_few::<2>(level, bytes, self, self.code_bits, out),
            3 => simd::symbols_of_few::<3>(level, bytes, self, self.code_bits, out),
            4 => simd::symbols_of_few::<4>(level, bytes, self, self.code_bits, out),
            bin_bits => simd::symbols_of_many(level, bytes, self, bin_bits, self.code_bits, out),
        }
    }

    /// The form of bodies with these bins.
    pub fn form(&self, ends: BinEnds) -> CodecForm {
        BodyForm::Bins { code_bits: self.code_bits, bin_bits: self.bin_bits, ends }.into()
    }

    /// Checks the grids of a body. The caller has checked its length.
    pub fn check(&self, codec: CodecId, body: &[u8]) -> Result<(), CodecError> {
        (0..self.count()).try_for_each(|bin| self.grid(codec, body, bin).map(|_| ()))
    }

    /// The grid of a bin in a body.
    fn grid(&self, codec: CodecId, body: &[u8], bin: usize) -> Result<Grid, CodecError> {
        let (lo, step) = (take_f32(body, bin), take_f32(body, self.count() + bin));
        Grid::from_peer(codec, bin, lo, step, code_max(self.code_bits))
    }

    /// Decodes a body. The caller has checked its length.
    pub fn decode(
        &mut self,
        codec: CodecId,
        runner: &KernelRunner,
        body: &[u8],
        out: &mut [u8],
    ) -> Result<(), CodecError> {
        let packed = &body[self.table_bytes()..];
        self.grids.clear();
        for bin in 0..self.count() {
            self.grids.push(self.grid(codec, body, bin)?);
        }
        let (elements, width) = (out.len() / 4, self.width());
        let decoding = self.decoding(runner.level, elements);
        let piece = runner.piece(elements, BLOCK);
        let packed = packed.chunks(piece / bits::GROUP * width as usize);
        runner.each(out.chunks_mut(4 * piece).zip(packed), |(out, packed)| {
            let mut symbols = [0; BLOCK];
            let packed = packed.chunks(BLOCK / bits::GROUP * width as usize);
            for (block, packed) in out.chunks_mut(4 * BLOCK).zip(packed) {
                let symbols = &mut symbols[..block.len() / 4];
                bits::unpack_with(runner.level, packed, width, symbols);
                decoding.values(runner.level, symbols, block);
            }
        });
        Ok(())
    }

    /// Chooses the fastest way to decode this many symbols.
    fn decoding(&mut self, level: Level, elements: usize) -> Decoding<'_> {
        let width = self.width();
        let few = width <= 4;
        if !few && self.bin_bits <= 4 && (level.has_register_tables() || elements < 1 << width) {
            return Decoding::Computed(FewGrids::new(&self.grids, self.code_bits));
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

/// The grids of at most 16 bins.
#[derive(Clone, Copy, Debug)]
pub(super) struct FewGrids {
    pub los: [f32; FEW],
    pub steps: [f32; FEW],
    /// The bits of a code within its bin.
    pub code_bits: u32,
    /// Whether there are at most eight bins.
    pub are_eight: bool,
    /// Whether every value is exact in `f64`. A fused multiply-add in `f32` then gives the same bits.
    pub are_exact: bool,
}

impl FewGrids {
    pub fn new(grids: &[Grid], code_bits: u32) -> FewGrids {
        let (mut los, mut steps) = ([0.0; FEW], [0.0; FEW]);
        for (bin, grid) in grids.iter().enumerate() {
            (los[bin], steps[bin]) = (grid.lo as f32, grid.step as f32);
        }
        let are_exact = grids.iter().all(|grid| grid.is_exact(code_max(code_bits)));
        FewGrids { los, steps, code_bits, are_eight: grids.len() <= FEW / 2, are_exact }
    }
}

/// How symbols are decoded. All variants give the same values.
#[derive(Clone, Copy, Debug)]
enum Decoding<'a> {
    /// Looks values up in a table that fits a register.
    Few(&'a [f32; FEW]),
    /// Looks values up in a table in memory.
    Table(&'a [f32]),
    /// Computes values from grids in registers.
    Computed(FewGrids),
    /// Computes values from grids in memory, for tensors that are smaller than a table would be.
    Searched { grids: &'a [Grid], code_bits: u32 },
}

impl Decoding<'_> {
    fn values(&self, level: Level, symbols: &[u16], out: &mut [u8]) {
        match self {
            Decoding::Few(table) => simd::look_up_few(level, symbols, table, out),
            Decoding::Table(table) => simd::look_up(level, symbols, table, out),
            Decoding::Computed(grids) => simd::values_of_few(level, symbols, grids, out),
            Decoding::Searched { grids, code_bits } => {
                for (to, &symbol) in out.as_chunks_mut().0.iter_mut().zip(symbols) {
                    let grid = grids[usize::from(symbol) >> code_bits];
                    *to = grid.value(symbol & code_max(*code_bits)).to_ne_bytes();
                }
            }
        }
    }
}
