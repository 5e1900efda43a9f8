//! The kernels: the loops over every value of a tensor, once for each instruction set.
//!
//! `portable` has all of them in plain Rust. The kernels that the compiler vectorizes well are the portable ones
//! compiled again for more instructions; the others are written with intrinsics in `avx512` and `avx2`. Rust neither
//! reorders nor contracts floating-point operations, so every version gives the same bits, and the tests here compare
//! them.
//!
//! The best instruction set of the processor is used. The environment variable `DISTGPIPE_SIMD` (`portable`, `avx2`,
//! `avx512`) selects another one, so that all versions can be tested on one machine. It is read once. A value that is
//! unknown, or that the processor lacks, has no effect; [`simd_level`] says which instruction set is really in use, and
//! `tests/codec_simd.rs` fails if that is not the requested one.
//!
//! This is the only module of the crate with unsafe code.

use super::grid::Quantizer;
use super::order_statistics::Pivots;
use super::quantile_bins::{FewGrids, QuantileBins};
use super::tile::{Grids, Ranges};

/// Compiles the portable versions of the kernels that the compiler vectorizes well, by the macro that enables the
/// instructions of a level.
#[cfg(target_arch = "x86_64")]
macro_rules! portable_kernels {
    ($with:ident) => {
        $with! {
            pub fn symbols_of_many(bytes: &[u8], bins: &QuantileBins, bin_bits: u32, code_bits: u32, out: &mut [u16]) {
                portable::symbols_of_many(bytes, bins, bin_bits, code_bits, out);
            }

            pub fn look_up(symbols: &[u16], table: &[f32], out: &mut [u8]) {
                portable::look_up(symbols, table, out);
            }

            pub fn bf16s(bytes: &[u8], out: &mut [u8]) {
                portable::bf16s(bytes, out);
            }

            pub fn values_of_bf16s(bytes: &[u8], out: &mut [u8]) {
                portable::values_of_bf16s(bytes, out);
            }

            pub fn tile_grids(table: &[u8], exponent: i32, grids: &mut Grids) {
                portable::tile_grids(table, exponent, grids);
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod level;
pub(super) mod portable;

pub(super) use level::Level;
pub use level::{simd_level, SimdLevel, SimdLevelError, SIMD_VARIABLE};

/// Defines for each kernel a function that takes a [`Level`] in front of the kernel's arguments and calls its version
/// for that level.
macro_rules! dispatch {
    ($(
        $(#[$attribute:meta])*
        fn $name:ident $(<const $constant:ident: $kind:ty>)? ($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)?;
    )*) => {$(
        $(#[$attribute])*
        #[inline]
        pub(super) fn $name $(<const $constant: $kind>)? (level: Level, $($argument: $type),*) $(-> $result)? {
            match level.instructions() {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: a `Level` with these instructions is only made where the processor has them.
                SimdLevel::Avx2 => unsafe { avx2::$name $(::<$constant>)? ($($argument),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                SimdLevel::Avx512 => unsafe { avx512::$name $(::<$constant>)? ($($argument),*) },
                _ => portable::$name $(::<$constant>)? ($($argument),*),
            }
        }
    )*};
}

dispatch! {
    /// The extremes of some values.
    fn extremes(bytes: &[u8]) -> Extremes;
    /// Packs the lowest `W` bits of each code.
    fn pack<const W: usize>(codes: &[u16], out: &mut [u8]);
    /// Unpacks codes of `W` bits, as many as `out` has.
    fn unpack<const W: usize>(bytes: &[u8], out: &mut [u16]);
    /// Quantizes values on one grid.
    fn codes(bytes: &[u8], quantizer: Quantizer, out: &mut [u16]);
    /// The values of codes on one grid, from `lo` in steps of `step`.
    fn values(codes: &[u16], lo: f64, step: f64, out: &mut [u8]);
    /// The symbols of values in at most 16 bins.
    fn symbols_of_few<const S: u32>(bytes: &[u8], bins: &QuantileBins, code_bits: u32, out: &mut [u16]);
    /// The symbols of values in any number of bins.
    fn symbols_of_many(bytes: &[u8], bins: &QuantileBins, bin_bits: u32, code_bits: u32, out: &mut [u16]);
    /// The values of symbols in at most 16 bins.
    fn values_of_few(symbols: &[u16], grids: &FewGrids, out: &mut [u8]);
    /// Looks up the values of symbols in a table of 16.
    fn look_up_few(symbols: &[u16], table: &[f32; 16], out: &mut [u8]);
    /// Looks up the values of symbols in a table.
    fn look_up(symbols: &[u16], table: &[f32], out: &mut [u8]);
    /// Converts values to IEEE half precision.
    fn f16s(bytes: &[u8], out: &mut [u8]);
    /// Converts IEEE half precision to values.
    fn values_of_f16s(bytes: &[u8], out: &mut [u8]);
    /// Converts values to bfloat16.
    fn bf16s(bytes: &[u8], out: &mut [u8]);
    /// Converts bfloat16 to values.
    fn values_of_bf16s(bytes: &[u8], out: &mut [u8]);
    /// Counts values by segment, and copies the values of some segments to `kept`; returns how many were kept. `kept`
    /// must have room for [`KEPT_MORE`] more values than `bytes` has.
    fn narrow(bytes: &[u8], pivots: &Pivots, tally: &mut Tally, kept: &mut [u8]) -> usize;
    /// Writes a bitmap of the values of `N` bytes that are not 0, and these values to `kept`, which must have room for
    /// [`KEPT_MORE`] more values than `bytes` has; returns how many were kept.
    fn keep_values<const N: usize>(bytes: &[u8], mask: &mut [u8], kept: &mut [u32]) -> usize;
    /// Undoes [`keep_values`]. `values` must have [`KEPT_MORE`] more than are set in the bitmap.
    fn spread_values<const N: usize>(mask: &[u8], values: &[u32], out: &mut [u8]);
    /// Splits values of `N` bytes into byte planes, with the sign as the lowest bit of the last but one.
    fn split_planes<const N: usize>(values: &[u32], planes: [&mut [u8]; N]);
    /// Undoes [`split_planes`].
    fn join_planes<const N: usize>(planes: [&[u8]; N], values: &mut [u32]);
    /// Transposes a matrix of 32-bit numbers.
    fn transpose(from: &[u8], to: &mut [u8], shape: Transposition);
    /// The smallest and the largest value of each tile, 0.0 instead of −0.0. Returns whether a value is NaN, in which
    /// case the results are meaningless.
    fn tile_ends(bytes: &[u8], tile: usize, lo: &mut [f32], hi: &mut [f32]) -> bool;
    /// The grids of tiles, from their smallest and largest values.
    fn tile_ranges(exponent: i32, code_max: u16, ranges: &mut Ranges);
    /// Quantizes the values of tiles.
    fn tile_codes(bytes: &[u8], tile: usize, ranges: &Ranges, code_max: u16, out: &mut [u16]);
    /// Quantizes the values of tiles with stochastic rounding.
    fn tile_codes_stochastic(bytes: &[u8], tile: usize, ranges: &Ranges, noise: Noise, out: &mut [u16]);
    /// The values of the codes of tiles.
    fn tile_values(codes: &[u16], tile: usize, grids: &Grids, out: &mut [u8]);
    /// The grids of tiles, from their entries on the wire.
    fn tile_grids(table: &[u8], exponent: i32, grids: &mut Grids);
}

/// The number of values that [`narrow`] and [`keep_values`] may write beyond those that they keep.
pub(super) const KEPT_MORE: usize = 16;

/// The parameters of stochastic rounding to codes of at most `code_max`. The random number of an element depends on
/// `key` and on the element's index.
#[derive(Clone, Copy, Debug)]
pub(super) struct Noise {
    pub key: u32,
    pub code_max: u16,
}

/// The shape of the matrix that [`transpose`] reads: row `r` and column `c` of `from` become row `c` and column `r` of
/// `to`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transposition {
    pub rows: usize,
    pub columns: usize,
    /// The distance between rows of `from`, in numbers.
    pub from_stride: usize,
    /// The distance between rows of `to`, in numbers.
    pub to_stride: usize,
}

/// The counts of [`narrow`] over all calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tally {
    /// For each segment, the number of keys in it or in a later one.
    pub at_least: [u64; 32],
    pub key_min: i32,
    pub key_max: i32,
}

impl Default for Tally {
    fn default() -> Self {
        Tally { at_least: [0; 32], key_min: i32::MAX, key_max: i32::MIN }
    }
}

/// The extreme bit patterns of some floats, by comparisons for which processors have an instruction.
///
/// Non-negative floats are ordered like their bits. Negative ones are ordered the other way round, and as unsigned
/// numbers they are above all others.
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
    /// The extremes of both sets of floats.
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
        // The largest magnitudes of the non-negative and of the negative values.
        let positive = self.signed_max.max(0) as u32;
        let negative = if self.unsigned_max >> 31 == 1 { self.unsigned_max & 0x7fff_ffff } else { 0 };
        positive.max(negative)
    }

    /// The smallest and the largest value, with −0.0 below 0.0; 0 and 0 if there are no values.
    #[inline(always)]
    pub fn range(self) -> (f32, f32) {
        if self.signed_min > self.signed_max {
            return (0.0, 0.0);
        }
        // If all values have one sign, the signed minimum has the smallest magnitude.
        let lo = if self.unsigned_max >> 31 == 1 { self.unsigned_max } else { self.signed_min as u32 };
        let hi = if self.signed_max >= 0 { self.signed_max } else { self.signed_min };
        (f32::from_bits(lo), f32::from_bits(hi as u32))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{order_statistics, parse, CodecContext, CodecError, TensorView, ALL, BLOCK};
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

    /// Checks that a kernel gives the portable result at every level.
    fn agree<R: PartialEq + std::fmt::Debug>(kernel: impl Fn(Level) -> R) {
        let expected = kernel(Level::all_here()[0]);
        for level in Level::all_here() {
            assert_eq!(kernel(level), expected, "{level:?}");
        }
    }

    fn written<T: Clone>(length: usize, from: T, kernel: impl Fn(&mut [T])) -> Vec<T> {
        let mut out = vec![from; length];
        kernel(&mut out);
        out
    }

    proptest! {
        #[test]
        fn extremes_are_those_of_the_values(values in values()) {
            let bytes = memory(&values);
            agree(|level| extremes(level, &bytes));
            let found = extremes(Level::in_use(), &bytes);
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
            let quantizer = Quantizer { lo: lo - 1.0, per_step: f64::from(code_max) / (2.0 - lo), code_max };
            agree(|level| written(values.len(), 7, |out| codes(level, &bytes, quantizer, out)));
            let codes = written(values.len(), 7, |out| portable::codes(&bytes, quantizer, out));
            let step = 1.0 / quantizer.per_step;
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
            // Including values that are equal to pivots.
            let tied = keys.iter().cycle().take(if keys.is_empty() { 0 } else { ties });
            let values: Vec<f32> =
                bits.iter().map(|&bits| f32::from_bits(bits)).chain(tied.map(|&key| order_statistics::value(key))).collect();
            let bytes = memory(&values);
            agree(|level| {
                let (mut tally, mut room) = (Tally::default(), vec![0; bytes.len() + 4 * KEPT_MORE]);
                let length = narrow(level, &bytes, &pivots, &mut tally, &mut room);
                room.truncate(4 * length);
                (tally, room)
            });
        }

        #[test]
        fn values_and_planes_agree(words in prop::collection::vec(prop_oneof![Just(0u32), any::<u32>(), 0u32..300], 0..300)) {
            fn check<const N: usize>(bytes: &[u8]) {
                let count = bytes.len() / N;
                agree(|level| {
                    let (mut mask, mut kept) = (vec![7; count.div_ceil(8)], vec![7; count + KEPT_MORE]);
                    let length = keep_values::<N>(level, bytes, &mut mask, &mut kept);
                    let mut out = vec![7; bytes.len()];
                    spread_values::<N>(level, &mask, &kept, &mut out);
                    assert_eq!(&out, bytes);
                    let mut planes: [Vec<u8>; N] = std::array::from_fn(|_| vec![7; length]);
                    split_planes::<N>(level, &kept[..length], planes.each_mut().map(Vec::as_mut_slice));
                    let mut joined = vec![7; length];
                    join_planes::<N>(level, planes.each_ref().map(Vec::as_slice), &mut joined);
                    assert_eq!(joined, kept[..length]);
                    (mask, planes)
                });
            }
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            check::<4>(&bytes);
            check::<2>(&bytes);
        }

        #[test]
        fn transposing_agrees(rows in 1usize..40, columns in 1usize..40, more in 0usize..5, seed in any::<u32>()) {
            let (from_stride, to_stride) = (columns + more, rows + more);
            let from: Vec<u8> =
                (0..(rows * from_stride) as u32).flat_map(|at| (at.wrapping_mul(seed | 1)).to_ne_bytes()).collect();
            let shape = Transposition { rows, columns, from_stride, to_stride };
            agree(|level| written(4 * columns * to_stride, 7, |to| transpose(level, &from, to, shape)));
            let to = written(4 * columns * to_stride, 7, |to| transpose(Level::in_use(), &from, to, shape));
            for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
                let (from_at, to_at) = (row * from_stride + column, column * to_stride + row);
                prop_assert_eq!(&from[4 * from_at..4 * from_at + 4], &to[4 * to_at..4 * to_at + 4]);
            }
        }

        /// Values at the ends of the range of `f32`, where grids are clamped.
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
                    codec.encode(view, &CodecContext::default(), &mut body)?;
                    Ok::<_, CodecError>(body)
                });
            }
        }

        /// Where a computation with less precision would choose another code.
        #[test]
        fn values_in_the_middle_between_two_codes_have_the_same_bytes(
            step in 0.01f32..10.0,
            lo in prop_oneof![Just(0.0f32), -10.0f32..10.0],
            bits in 1u32..=12,
            codes in prop::collection::vec((any::<u16>(), -3i32..=3), 300),
        ) {
            let code_max = super::super::grid::code_max(bits);
            // A 16-bit float, so that it is the step of the grid.
            let step = f32::from_bits(step.to_bits() & !0x1fff);
            let end = lo + f32::from(code_max) * step;
            let mut values = Vec::new();
            for (at, (code, ulps)) in codes.into_iter().enumerate() {
                let middle = (f64::from(lo) + (f64::from(code % code_max) + 0.5) * f64::from(step)) as f32;
                let near = f32::from_bits(middle.to_bits().wrapping_add_signed(ulps));
                values.push(match at % 64 {
                    0 => lo,
                    1 => end,
                    _ => near.clamp(lo, end),
                });
            }
            let (bytes, dims) = (memory(&values), [values.len()]);
            for text in [format!("tile:{bits}"), format!("sort:{bits}+0"), format!("sort:{bits}+4")] {
                agree(|level| {
                    let mut codec = level.force(|| parse(&text).unwrap());
                    let view = TensorView { dtype: DType::F32, dims: &dims, layout: Layout::Contiguous, bytes: &bytes };
                    let mut body = Vec::new();
                    codec.encode(view, &CodecContext::default(), &mut body)?;
                    Ok::<_, CodecError>(body)
                });
            }
        }

        /// The bodies and decoded values of every codec, at every level and in both memory layouts.
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
            let texts = texts.chain(&["zstd(raw)", "zstd(bf16)", "zstd(tile:3)"]);
            for (text, layout) in texts.flat_map(|text| [(text, Layout::Contiguous), (text, Layout::ChannelsLast)]) {
                agree(|level| {
                    let mut codec = level.force(|| parse(text).unwrap());
                    let view = TensorView { dtype: DType::F32, dims: &dims, layout, bytes: &bytes };
                    let mut body = Vec::new();
                    codec.encode(view, &CodecContext { seed, ..CodecContext::default() }, &mut body)?;
                    let meta = TensorMeta { dtype: DType::F32, layout, shape: Shape::new(&dims).unwrap(), codec: codec.id() };
                    let mut out = vec![0; bytes.len()];
                    codec.decode(&meta, &body, &mut out)?;
                    Ok::<_, CodecError>((body, out))
                });
            }
        }
    }
}
