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
        if !(has!("avx2") && has!("f16c") && has!("bmi1") && has!("bmi2") && has!("popcnt")) {
            return Level(Instructions::Portable);
        }
        let wide = has!("fma") && has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl");
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

#[cfg(test)]
mod tests {
    use super::super::{order, parse, CodecError, Context, TensorView, ALL, BLOCK};
    use super::*;
    use crate::wire::{DType, Layout, Shape, TensorMeta};
    use proptest::prelude::*;

    fn memory(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_ne_bytes()).collect()
    }

    fn values() -> impl Strategy<Value = Vec<f32>> {
        let finite = any::<f32>().prop_filter("finite", |value| value.is_finite());
        let one =
            prop_oneof![4 => -1.0f32..1.0, 2 => Just(0.0f32), 1 => Just(-0.0), 1 => -1e-40f32..1e-40, 1 => finite];
        prop::collection::vec(one, 1..400)
    }

    /// The result of a kernel at each level, which has to be that of the portable one.
    fn agree<R: PartialEq + std::fmt::Debug>(kernel: impl Fn(Level) -> R) {
        let expected = kernel(Level(Instructions::Portable));
        for level in Level::all_here() {
            assert_eq!(kernel(level), expected, "{level:?}");
        }
    }

    fn written<T: Clone>(length: usize, from: T, kernel: impl Fn(&mut [T])) -> Vec<T> {
        let mut out = vec![from; length];
        kernel(&mut out);
        out
    }

    #[test]
    fn this_processor_is_tested_at_its_best() {
        assert_eq!(Level::all_here().last(), Some(&Level::best()));
    }

    proptest! {
        #[test]
        fn extremes_are_those_of_the_values(values in values()) {
            let bytes = memory(&values);
            agree(|level| extremes(level, &bytes));
            let found = extremes(Level::best(), &bytes);
            let by_size = |a: &&f32, b: &&f32| a.total_cmp(b);
            let (lo, hi) = (values.iter().min_by(by_size).unwrap(), values.iter().max_by(by_size).unwrap());
            prop_assert_eq!(found.range().0.to_bits(), lo.to_bits());
            prop_assert_eq!(found.range().1.to_bits(), hi.to_bits());
            prop_assert_eq!(found.magnitude_max(), values.iter().map(|value| value.abs().to_bits()).max().unwrap());
        }

        #[test]
        fn rounding_agrees(values in values(), bits in 1u32..=16, lo in -2.0f64..0.0) {
            let values: Vec<f32> = values.into_iter().filter(|value| value.abs() < 1.0).collect();
            let bytes = memory(&values);
            let code_max = super::super::grid::code_max(bits);
            let rounding = Rounding { lo: lo - 1.0, per_step: f64::from(code_max) / (2.0 - lo), code_max };
            agree(|level| written(values.len(), 7, |out| codes(level, &bytes, rounding, out)));
            let codes = written(values.len(), 7, |out| portable::codes(&bytes, rounding, out));
            let step = 1.0 / rounding.per_step;
            agree(|level| written(bytes.len(), 7, |out| super::values(level, &codes, lo, step, out)));
        }

        #[test]
        fn halves_agree(values in values(), noise in prop::collection::vec(any::<u8>(), 0..300)) {
            let bytes = memory(&values);
            agree(|level| written(bytes.len() / 2, 7, |out| f16s(level, &bytes, out)));
            agree(|level| written(bytes.len() / 2, 7, |out| bf16s(level, &bytes, out)));
            let noise = &noise[..noise.len() / 2 * 2];
            agree(|level| written(2 * noise.len(), 7, |out| values_of_f16s(level, noise, out)));
            agree(|level| written(2 * noise.len(), 7, |out| values_of_bf16s(level, noise, out)));
        }

        #[test]
        fn narrowing_agrees(
            bits in prop::collection::vec(any::<u32>(), 0..700),
            ties in 0usize..200,
            mut keys in prop::collection::vec(any::<i32>(), 0..=31),
            kept in any::<u32>(),
        ) {
            keys.sort_unstable();
            keys.dedup();
            let mut pivots = Pivots { kept, ..Pivots::default() };
            keys.iter().for_each(|&key| pivots.push(key.into()).unwrap());
            // Values that are exactly pivots, too.
            let tied = keys.iter().cycle().take(if keys.is_empty() { 0 } else { ties });
            let values: Vec<f32> =
                bits.iter().map(|&bits| f32::from_bits(bits)).chain(tied.map(|&key| order::value(key))).collect();
            let bytes = memory(&values);
            agree(|level| {
                let (mut tally, mut room) = (Tally::default(), vec![0; bytes.len() + 4 * KEPT_MORE]);
                let length = narrow(level, &bytes, &pivots, &mut tally, &mut room);
                room.truncate(4 * length);
                (tally, room)
            });
        }

        #[test]
        fn transposing_agrees(rows in 1usize..40, columns in 1usize..40, more in 0usize..5, seed in any::<u32>()) {
            let (from_stride, to_stride) = (columns + more, rows + more);
            let from: Vec<u8> =
                (0..(rows * from_stride) as u32).flat_map(|at| (at.wrapping_mul(seed | 1)).to_ne_bytes()).collect();
            let shape = Transposition { rows, columns, from_stride, to_stride };
            agree(|level| written(4 * columns * to_stride, 7, |to| transpose(level, &from, to, shape)));
            let to = written(4 * columns * to_stride, 7, |to| transpose(Level::best(), &from, to, shape));
            for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
                let (from_at, to_at) = (row * from_stride + column, column * to_stride + row);
                prop_assert_eq!(&from[4 * from_at..4 * from_at + 4], &to[4 * to_at..4 * to_at + 4]);
            }
        }

        /// The ends of what an `f32` holds, where grids are clamped.
        #[test]
        fn tiles_of_the_largest_numbers_have_the_same_bytes(
            values in prop::collection::vec(prop_oneof![Just(f32::MIN), Just(f32::MAX), Just(0.0), any::<f32>()], 1..200),
            constant in prop::sample::select(&[f32::MIN, f32::MAX, -1.0][..]),
            bits in 1u32..=16,
        ) {
            let values: Vec<f32> = values.into_iter().filter(|value| value.is_finite()).collect();
            for values in [vec![constant; values.len()], values] {
                let (bytes, dims) = (memory(&values), [values.len()]);
                agree(|level| {
                    let mut codec = level.force(|| parse(&format!("tile:{bits}")).unwrap());
                    let view = TensorView { dtype: DType::F32, dims: &dims, layout: Layout::Contiguous, bytes: &bytes };
                    let mut body = Vec::new();
                    codec.encode(view, &Context::default(), &mut body)?;
                    Ok::<_, CodecError>(body)
                });
            }
        }

        /// Bodies and decoded values of every codec, at every level and in both orders of memory.
        #[test]
        fn every_codec_gives_the_same_bytes(
            values in prop_oneof![
                values(),
                (1usize..3 * BLOCK).prop_map(|n| (0..n as u32).map(|i| (i.wrapping_mul(2_654_435_761) as i32 as f32).max(-1e9)).collect::<Vec<_>>()),
            ],
            channels in 1usize..40,
            seed in any::<u64>(),
        ) {
            let values: Vec<f32> = values.into_iter().filter(|value| value.abs() < 1e30).collect();
            let pixels = values.len() / channels;
            let bytes = memory(&values[..channels * pixels]);
            let dims = [1, channels, pixels, 1];
            let texts = ALL.iter().filter(|member| member.id.number() <= 7).flat_map(|member| member.examples);
            for (text, layout) in texts.flat_map(|text| [(text, Layout::Contiguous), (text, Layout::ChannelsLast)]) {
                agree(|level| {
                    let mut codec = level.force(|| parse(text).unwrap());
                    let view = TensorView { dtype: DType::F32, dims: &dims, layout, bytes: &bytes };
                    let mut body = Vec::new();
                    codec.encode(view, &Context { seed, ..Context::default() }, &mut body)?;
                    let meta = TensorMeta { dtype: DType::F32, layout, shape: Shape::new(&dims).unwrap(), codec: codec.id() };
                    let mut out = vec![0; bytes.len()];
                    codec.decode(&meta, &body, &mut out)?;
                    Ok::<_, CodecError>((body, out))
                });
            }
        }
    }
}
