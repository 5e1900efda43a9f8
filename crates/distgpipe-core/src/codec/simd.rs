//! The loops over every value, each in as many versions as processors differ in.
//!
//! `portable` has them all as plain Rust. Those that a compiler turns into vector instructions by itself are compiled
//! again with more instructions allowed; the others are written with intrinsics in `avx512` and `avx2`. Rust neither
//! reorders nor contracts floating-point operations, so every version gives the same bits, and the tests here hold them
//! against each other.
//!
//! This is the only module of the crate with unsafe code.

use super::grid::Rounding;
use super::order::Pivots;
use super::runs::Runs;
use super::tile::{Grids, Ranges};

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub(super) mod portable;

/// The instructions that kernels may use. There is no way to make one that this processor does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Level(Instructions);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Instructions {
    Portable,
    /// AVX2 with F16C, BMI1 and BMI2: Haswell, Zen.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 with F, BW, DQ, VL, VBMI and VBMI2: Ice Lake, Zen 4.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    /// The most that this processor has.
    pub fn best() -> Level {
        #[cfg(test)]
        if let Some(level) = FORCED.get() {
            return level;
        }
        Level::detect()
    }

    #[cfg(all(target_arch = "x86_64", not(miri)))]
    fn detect() -> Level {
        use std::arch::is_x86_feature_detected as has;
        if !(has!("avx2") && has!("f16c") && has!("bmi1") && has!("bmi2")) {
            return Level(Instructions::Portable);
        }
        let wide = has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl");
        if wide && has!("avx512vbmi") && has!("avx512vbmi2") {
            Level(Instructions::Avx512)
        } else {
            Level(Instructions::Avx2)
        }
    }

    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    fn detect() -> Level {
        Level(Instructions::Portable)
    }
}

impl Level {
    /// Whether 16 numbers fit a register, so that looking one up is quicker than in memory.
    pub fn has_wide_registers(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self.0 == Instructions::Avx512;
        #[cfg(not(target_arch = "x86_64"))]
        false
    }
}

/// Makes for each kernel a function that takes a [`Level`] before the kernel's own arguments.
macro_rules! dispatch {
    ($(
        $(#[$attribute:meta])*
        fn $name:ident $(<const $constant:ident: $kind:ty>)? ($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)?;
    )*) => {$(
        $(#[$attribute])*
        #[inline]
        pub(super) fn $name $(<const $constant: $kind>)? (level: Level, $($argument: $type),*) $(-> $result)? {
            match level.0 {
                Instructions::Portable => portable::$name $(::<$constant>)? ($($argument),*),
                #[cfg(target_arch = "x86_64")]
                // SAFETY: a level with these instructions is only made where the processor has them.
                Instructions::Avx2 => unsafe { avx2::$name $(::<$constant>)? ($($argument),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                Instructions::Avx512 => unsafe { avx512::$name $(::<$constant>)? ($($argument),*) },
            }
        }
    )*};
}

dispatch! {
    /// What the smallest, the largest and the largest by magnitude follow from.
    fn extremes(bytes: &[u8]) -> Extremes;
    /// Packs codes of which only the lowest `W` bits count.
    fn pack<const W: usize>(codes: &[u16], out: &mut [u8]);
    /// Unpacks as many codes as there is room for.
    fn unpack<const W: usize>(bytes: &[u8], out: &mut [u16]);
    /// The codes of values on one grid.
    fn codes(bytes: &[u8], rounding: Rounding, out: &mut [u16]);
    /// The values of codes on one grid, from `lo` in steps of `step`.
    fn values(codes: &[u16], lo: f64, step: f64, out: &mut [u8]);
    /// The symbols of values among at most 16 runs.
    fn symbols_of_few<const S: u32>(bytes: &[u8], runs: &Runs, code_bits: u32, out: &mut [u16]);
    /// The symbols of values among any number of runs.
    fn symbols_of_many(bytes: &[u8], runs: &Runs, run_bits: u32, code_bits: u32, out: &mut [u16]);
    /// The values of symbols among at most 16 runs, given as their `lo` and `step`.
    fn values_of_few(symbols: &[u16], los: &[f32; 16], steps: &[f32; 16], code_bits: u32, out: &mut [u8]);
    /// The values of symbols from a table of 16.
    fn look_up_few(symbols: &[u16], table: &[f32; 16], out: &mut [u8]);
    /// The values of symbols from a table.
    fn look_up(symbols: &[u16], table: &[f32], out: &mut [u8]);
    /// Two bytes a value, IEEE.
    fn f16s(bytes: &[u8], out: &mut [u8]);
    /// The values of IEEE halves.
    fn values_of_f16s(bytes: &[u8], out: &mut [u8]);
    /// Two bytes a value, bfloat16.
    fn bf16s(bytes: &[u8], out: &mut [u8]);
    /// The values of bfloat16.
    fn values_of_bf16s(bytes: &[u8], out: &mut [u8]);
    /// Counts values by segment, and keeps those of some; gives how many were kept. The room has to be for
    /// [`KEPT_MORE`] more than there are values.
    fn narrow(bytes: &[u8], pivots: &Pivots, tally: &mut Tally, kept: &mut [u8]) -> usize;
    /// Writes a matrix of 32-bit numbers with its rows as columns.
    fn transpose(from: &[u8], to: &mut [u8], shape: Transposition);
    /// The ends of as many tiles as fit.
    fn tile_ends(bytes: &[u8], tile: usize, ranges: &mut Ranges);
    /// From the ends of tiles to their grids.
    fn tile_ranges(exponent: i32, code_max: u16, ranges: &mut Ranges);
    /// The codes of tiles.
    fn tile_codes(bytes: &[u8], tile: usize, ranges: &Ranges, code_max: u16, out: &mut [u16]);
    /// The codes of tiles with stochastic rounding; `key` and the number of the first element seed it.
    fn tile_codes_stochastic(bytes: &[u8], tile: usize, ranges: &Ranges, noise: Noise, out: &mut [u16]);
    /// The values of tiles.
    fn tile_values(codes: &[u16], tile: usize, grids: &Grids, out: &mut [u8]);
    /// From tiles' entries on the wire to their grids.
    fn tile_grids(table: &[u8], exponent: i32, grids: &mut Grids);
}

/// So many numbers [`narrow`] may write at a time, of which it keeps some.
pub(super) const KEPT_MORE: usize = 16;

/// Stochastic rounding: to codes of at most `code_max`, with random numbers out of `key` and the element's number.
#[derive(Clone, Copy, Debug)]
pub(super) struct Noise {
    pub key: u32,
    /// The number of the first element, modulo 2^32.
    pub first: u32,
    pub code_max: u16,
}

/// Which matrix [`transpose`] writes: row `r` and column `c` of `from` become row `c` and column `r` of `to`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transposition {
    pub rows: usize,
    pub columns: usize,
    /// How many numbers one row of `from` lies behind another.
    pub from_stride: usize,
    /// How many numbers one row of `to` lies behind another.
    pub to_stride: usize,
}

/// What [`narrow`] has counted, over all calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tally {
    /// How many keys are in a segment or one after it.
    pub at_least: [u64; 32],
    pub key_min: i32,
    pub key_max: i32,
}

impl Default for Tally {
    fn default() -> Self {
        Tally { at_least: [0; 32], key_min: i32::MAX, key_max: i32::MIN }
    }
}

/// The extreme bit patterns of some floats, compared in ways for which processors have one instruction.
///
/// Non-negative floats are ordered as their bits are, negative ones the other way round and, unsigned, above all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extremes {
    pub signed_min: i32,
    pub signed_max: i32,
    pub unsigned_max: u32,
}

impl Default for Extremes {
    fn default() -> Self {
        Extremes { signed_min: i32::MAX, signed_max: i32::MIN, unsigned_max: 0 }
    }
}

impl Extremes {
    /// Of these and others.
    #[inline(always)]
    pub fn and(self, other: Extremes) -> Extremes {
        Extremes {
            signed_min: self.signed_min.min(other.signed_min),
            signed_max: self.signed_max.max(other.signed_max),
            unsigned_max: self.unsigned_max.max(other.unsigned_max),
        }
    }

    /// The bits of the largest magnitude, 0 if there are no values.
    pub fn magnitude_max(self) -> u32 {
        // The largest of the non-negative ones, and of the negative ones.
        let positive = self.signed_max.max(0) as u32;
        let negative = if self.unsigned_max >> 31 == 1 { self.unsigned_max & 0x7fff_ffff } else { 0 };
        positive.max(negative)
    }

    /// The smallest and the largest, −0.0 below 0.0; 0 and 0 if there are no values.
    #[inline(always)]
    pub fn range(self) -> (f32, f32) {
        if self.signed_min > self.signed_max {
            return (0.0, 0.0);
        }
        // Where all are of one sign, the signed minimum has the smallest magnitude.
        let lo = if self.unsigned_max >> 31 == 1 { self.unsigned_max } else { self.signed_min as u32 };
        let hi = if self.signed_max >= 0 { self.signed_max } else { self.signed_min };
        (f32::from_bits(lo), f32::from_bits(hi as u32))
    }
}

#[cfg(test)]
thread_local! {
    static FORCED: std::cell::Cell<Option<Level>> = const { std::cell::Cell::new(None) };
}

#[cfg(test)]
impl Level {
    /// Every level that this processor has, the portable one first.
    pub fn all_here() -> Vec<Level> {
        let mut levels = vec![Level(Instructions::Portable)];
        #[cfg(target_arch = "x86_64")]
        match Level::detect().0 {
            Instructions::Portable => {}
            Instructions::Avx2 => levels.push(Level(Instructions::Avx2)),
            Instructions::Avx512 => levels.extend([Level(Instructions::Avx2), Level(Instructions::Avx512)]),
        }
        levels
    }

    /// Calls `then` with [`Level::best`] held to this one, on this thread: what codecs that are made in it use.
    pub fn force<R>(self, then: impl FnOnce() -> R) -> R {
        let before = FORCED.replace(Some(self));
        let result = then();
        FORCED.set(before);
        result
    }
}
