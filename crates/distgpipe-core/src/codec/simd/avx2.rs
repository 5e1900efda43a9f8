//! The kernels for AVX2: 8 values at a time, as two vectors of 4 where they are computed in `f64`.

use super::super::grid::{self, Quantizer};
use super::super::quantile_bins::{FewGrids, QuantileBins};
use super::super::tile::{power_of_two, Grids, Ranges, ORDINARY_EXPONENT};
use super::{portable, Extremes, Noise, Transposition};
use std::arch::x86_64::*;

/// Enables the instructions of this level for functions.
macro_rules! with_avx2 {
    ($($(#[$attribute:meta])* $visible:vis fn $name:ident $(<const $constant:ident: $kind:ty>)?
        ($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? $body:block)*) => {$(
        $(#[$attribute])*
        #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
        $visible fn $name $(<const $constant: $kind>)? ($($argument: $type),*) $(-> $result)? $body
    )*};
}

mod memory;
mod narrowing;
mod packing;
mod planes;
mod single;

use memory::*;
pub use narrowing::narrow;
use narrowing::{each_choice, CHOSEN};
use packing::narrow_codes;
pub use packing::{pack, unpack};
pub use planes::{join_planes, keep_values, split_planes, spread_values};
use single::{is_ordinary, round_single, SingleRounding};

portable_kernels!(with_avx2);

/// 8 numbers in `f64`.
type Wide = [__m256d; 2];

with_avx2! {
    #[inline]
    fn widen(values: __m256) -> Wide {
        [_mm256_cvtps_pd(_mm256_castps256_ps128(values)), _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(values))]
    }

    /// Widens numbers in the order 0, 1, 4, 5 and 2, 3, 6, 7.
    #[inline]
    fn widen_interleaved(values: __m256) -> Wide {
        widen(_mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(_mm256_castps_pd(values))))
    }

    #[inline]
    fn widen_integers(numbers: __m256i) -> Wide {
        let high = _mm256_extracti128_si256::<1>(numbers);
        [_mm256_cvtepi32_pd(_mm256_castsi256_si128(numbers)), _mm256_cvtepi32_pd(high)]
    }

    #[inline]
    fn both(value: f64) -> Wide {
        [_mm256_set1_pd(value); 2]
    }

    /// The distances of 8 values from `lo`, in steps.
    #[inline]
    fn steps(values: Wide, lo: Wide, per_step: Wide) -> Wide {
        [
            _mm256_mul_pd(_mm256_sub_pd(values[0], lo[0]), per_step[0]),
            _mm256_mul_pd(_mm256_sub_pd(values[1], lo[1]), per_step[1]),
        ]
    }

    /// The values of 8 codes.
    #[inline]
    fn place(codes: __m256i, lo: Wide, step: Wide) -> __m256 {
        let [low, high] = widen_integers(codes);
        let low = _mm256_cvtpd_ps(_mm256_add_pd(_mm256_mul_pd(low, step[0]), lo[0]));
        let high = _mm256_cvtpd_ps(_mm256_add_pd(_mm256_mul_pd(high, step[1]), lo[1]));
        _mm256_set_m128(high, low)
    }

    /// Applies `code`, which returns 16-bit codes, to all values.
    #[inline]
    fn each_code(bytes: &[u8], out: &mut [u16], code: impl FnMut(__m256) -> __m128i) {
        let mut code = code;
        each(bytes, out, |vector, room| store_codes(code(load_values(vector)), room));
    }

    /// Applies `value`, which takes codes in 32-bit lanes, to all codes.
    #[inline]
    fn each_value(codes: &[u16], out: &mut [u8], value: impl Fn(__m256i) -> __m256) {
        each(codes, out, |vector, room| store_values(value(load_codes(vector)), room));
    }

    #[inline]
    pub fn codes(bytes: &[u8], quantizer: Quantizer, out: &mut [u16]) {
        let (lo, per_step) = (both(quantizer.lo), both(quantizer.per_step));
        let code_max = _mm_set1_epi16(quantizer.code_max as i16);
        each_code(bytes, out, |values| {
            let [low, high] = steps(widen(values), lo, per_step);
            _mm_min_epu16(_mm_packus_epi32(_mm256_cvtpd_epi32(low), _mm256_cvtpd_epi32(high)), code_max)
        });
    }

    pub fn values(codes: &[u16], lo: f64, step: f64, out: &mut [u8]) {
        let (lo, step) = (both(lo), both(step));
        each_value(codes, out, |codes| place(codes, lo, step));
    }

    /// Looks up 8 entries of a table of 16.
    #[inline]
    fn look_up_16(table: [__m256; 2], at: __m256i) -> __m256 {
        let (low, high) = (_mm256_permutevar8x32_ps(table[0], at), _mm256_permutevar8x32_ps(table[1], at));
        // The selector is the sign: bit 3 of the index.
        _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32::<28>(at)))
    }

    #[inline]
    fn load_table(table: &[f32; 16]) -> [__m256; 2] {
        let halves = table.as_chunks().0;
        [load_f32s(&halves[0]), load_f32s(&halves[1])]
    }

    pub fn symbols_of_few<const S: u32>(bytes: &[u8], bins: &QuantileBins, code_bits: u32, out: &mut [u16]) {
        let begins: &[f32; 16] = bins.begins.first_chunk().expect("16 at least");
        let levels: [__m256; 4] = std::array::from_fn(|level| load_f32s(&level_of(begins, S, level as u32)));
        let begins = load_table(begins);
        let (least, most) = (_mm256_set1_ps(bins.begins[0]), _mm256_set1_ps(bins.end));
        let per_steps: &[f64; 16] = bins.per_steps.first_chunk().expect("16 at least");
        let half = |shift: u32| load_table(&per_steps.map(|per_step| f32::from_bits((per_step.to_bits() >> shift) as u32)));
        let (lower, upper) = (half(0), half(32));
        let table = |table: [__m256; 2], at: __m256i| match S {
            0..=3 => _mm256_permutevar8x32_ps(table[0], at),
            _ => look_up_16(table, at),
        };
        let code_max = _mm_set1_epi16(grid::code_max(code_bits) as i16);
        let shift = _mm_cvtsi32_si128(code_bits as i32);
        let rounding = SingleRounding::new(grid::code_max(code_bits));
        let single = rounding.filter(|_| per_steps.iter().all(|&per_step| is_ordinary(per_step)));
        let singles = load_table(&per_steps.map(|per_step| per_step as f32));
        each_code(bytes, out, |values| {
            let values = _mm256_max_ps(_mm256_min_ps(values, most), least);
            let mut bin = _mm256_setzero_si256();
            for level in &levels[..S as usize] {
                let begun = _mm256_cmp_ps::<_CMP_GE_OQ>(values, _mm256_permutevar8x32_ps(*level, bin));
                bin = _mm256_sub_epi32(_mm256_add_epi32(bin, bin), _mm256_castps_si256(begun));
            }
            let bins = _mm_sll_epi16(narrow_codes(bin), shift);
            if let Some(rounding) = single {
                let (codes, doubt) = round_single(values, table(begins, bin), table(singles, bin));
                if rounding.is_sure(doubt) {
                    return _mm_or_si128(_mm_min_epu16(narrow_codes(codes), code_max), bins);
                }
            }
            // Each reciprocal is put together from its two halves, in the order of `widen_interleaved`.
            let (lower, upper) = (table(lower, bin), table(upper, bin));
            let per_step = [
                _mm256_castps_pd(_mm256_unpacklo_ps(lower, upper)),
                _mm256_castps_pd(_mm256_unpackhi_ps(lower, upper)),
            ];
            let [low, high] = steps(widen_interleaved(values), widen_interleaved(table(begins, bin)), per_step);
            let (low, high) = (_mm256_cvtpd_epi32(low), _mm256_cvtpd_epi32(high));
            let codes = _mm_packus_epi32(_mm_unpacklo_epi64(low, high), _mm_unpackhi_epi64(low, high));
            _mm_or_si128(_mm_min_epu16(codes, code_max), bins)
        });
    }

    pub fn values_of_few(symbols: &[u16], grids: &FewGrids, out: &mut [u8]) {
        let (los, steps) = (load_table(&grids.los), load_table(&grids.steps));
        let shift = _mm_cvtsi32_si128(grids.code_bits as i32);
        let mask = _mm256_set1_epi32(grid::code_max(grids.code_bits).into());
        let value = |symbols: __m256i, lo: __m256, step: __m256| {
            _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_and_si256(symbols, mask)), step, lo)
        };
        if grids.are_exact && grids.are_eight {
            return each_value(symbols, out, |symbols| {
                let bin = _mm256_srl_epi32(symbols, shift);
                let look_up = |table: [__m256; 2]| _mm256_permutevar8x32_ps(table[0], bin);
                value(symbols, look_up(los), look_up(steps))
            });
        }
        if grids.are_exact {
            return each_value(symbols, out, |symbols| {
                let bin = _mm256_srl_epi32(symbols, shift);
                value(symbols, look_up_16(los, bin), look_up_16(steps, bin))
            });
        }
        each_value(symbols, out, |symbols| {
            let bin = _mm256_srl_epi32(symbols, shift);
            place(_mm256_and_si256(symbols, mask), widen(look_up_16(los, bin)), widen(look_up_16(steps, bin)))
        });
    }

    pub fn look_up_few(symbols: &[u16], table: &[f32; 16], out: &mut [u8]) {
        let table = load_table(table);
        each_value(symbols, out, |symbols| look_up_16(table, symbols));
    }

    pub fn f16s(bytes: &[u8], out: &mut [u8]) {
        each(bytes, out, |vector, room| {
            store_sixteen_bytes(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(load_values(vector)), room);
        });
    }

    pub fn values_of_f16s(bytes: &[u8], out: &mut [u8]) {
        each(bytes, out, |vector, room| store_values(_mm256_cvtph_ps(load_sixteen_bytes(vector)), room));
    }
}

/// Applies `work` to every `I` elements, with room for `O` results. The last elements are followed by zeros, whose
/// results are dropped.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
fn each<A: Copy + Default, B: Copy + Default, const I: usize, const O: usize>(
    from: &[A],
    to: &mut [B],
    mut work: impl FnMut(&[A; I], &mut [B; O]),
) {
    let (vectors, rest) = from.as_chunks();
    let (rooms, room) = to.as_chunks_mut();
    for (room, vector) in rooms.iter_mut().zip(vectors) {
        work(vector, room);
    }
    if !rest.is_empty() {
        let (mut vector, mut results) = ([A::default(); I], [B::default(); O]);
        vector[..rest.len()].copy_from_slice(rest);
        work(&vector, &mut results);
        room.copy_from_slice(&results[..room.len()]);
    }
}

/// One level of a binary search in a sorted table of `2^bits` entries: for every result of the levels before it, the
/// entry to compare with.
fn level_of<T: Copy, const N: usize, const L: usize>(table: &[T; N], bits: u32, level: u32) -> [T; L] {
    std::array::from_fn(|before| {
        let entry = if level < bits { (before << (bits - level)) | 1 << (bits - level - 1) } else { 0 };
        table[entry % N]
    })
}

with_avx2! {
    pub fn extremes(bytes: &[u8]) -> Extremes {
        // Two of each, because every minimum waits for the one before it.
        let mut min = [_mm256_set1_epi32(i32::MAX); 2];
        let mut max = [_mm256_set1_epi32(i32::MIN); 2];
        let mut unsigned = [_mm256_setzero_si256(); 2];
        let (pairs, rest) = bytes.as_chunks::<64>();
        for pair in pairs {
            for (at, vector) in pair.as_chunks().0.iter().enumerate() {
                let bits = load(vector);
                (min[at], max[at]) = (_mm256_min_epi32(min[at], bits), _mm256_max_epi32(max[at], bits));
                unsigned[at] = _mm256_max_epu32(unsigned[at], bits);
            }
        }
        let min = each_i32(_mm256_min_epi32(min[0], min[1]));
        let max = each_i32(_mm256_max_epi32(max[0], max[1]));
        let unsigned = each_i32(_mm256_max_epu32(unsigned[0], unsigned[1]));
        (0..8).fold(portable::extremes(rest), |extremes, at| {
            extremes.and(Extremes { signed_min: min[at], signed_max: max[at], unsigned_max: unsigned[at] as u32 })
        })
    }

    /// Reduces 8 vectors: element `i` of the result is the smallest element of vector `i`.
    #[inline]
    fn least_of_each(vectors: [__m256; 8]) -> __m256 {
        let pair = |at: usize| {
            let (a, b) = (vectors[at], vectors[at + 1]);
            _mm256_castps_pd(_mm256_min_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)))
        };
        let four = |at: usize| {
            let (a, b) = (pair(at), pair(at + 2));
            let (a, b) = (_mm256_unpacklo_pd(a, b), _mm256_unpackhi_pd(a, b));
            _mm256_min_ps(_mm256_castpd_ps(a), _mm256_castpd_ps(b))
        };
        let (a, b) = (four(0), four(4));
        _mm256_min_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b))
    }

    /// The minima of a tile over its vectors of 8 values, and its negated maxima, lane by lane. Sets the
    /// bits of `nan` in lanes with a NaN.
    #[inline]
    fn tile_extremes(tile: &[u8], nan: &mut __m256) -> (__m256, __m256) {
        let filler = *tile.first_chunk().unwrap_or(&[0; 4]);
        let first = _mm256_set1_ps(f32::from_ne_bytes(filler));
        let (mut lo, mut hi) = (first, first);
        let mut include = |a: __m256, b: __m256| {
            (lo, hi) = (_mm256_min_ps(a, lo), _mm256_max_ps(a, hi));
            (lo, hi) = (_mm256_min_ps(b, lo), _mm256_max_ps(b, hi));
            *nan = _mm256_or_ps(*nan, _mm256_cmp_ps::<_CMP_UNORD_Q>(a, b));
        };
        let (pairs, rest) = tile.as_chunks::<64>();
        for pair in pairs {
            let [a, b] = [0, 1].map(|half| load_values(&pair.as_chunks().0[half]));
            include(a, b);
        }
        for rest in rest.chunks(32) {
            let values = load_values_front(rest, filler);
            include(values, values);
        }
        (lo, _mm256_sub_ps(_mm256_setzero_ps(), hi))
    }

    pub fn tile_ends(bytes: &[u8], tile: usize, lo: &mut [f32], hi: &mut [f32]) -> bool {
        let mut nan = _mm256_setzero_ps();
        for (bytes, (lo, hi)) in bytes.chunks(4 * 8 * tile).zip(lo.chunks_mut(8).zip(hi.chunks_mut(8))) {
            let (mut los, mut his) = ([_mm256_setzero_ps(); 8], [_mm256_setzero_ps(); 8]);
            for (at, tile) in bytes.chunks(4 * tile).enumerate() {
                (los[at], his[at]) = tile_extremes(tile, &mut nan);
            }
            // Adding 0.0 turns −0.0 into 0.0.
            let zero = _mm256_setzero_ps();
            store_f32s_front(_mm256_add_ps(least_of_each(los), zero), lo);
            store_f32s_front(_mm256_sub_ps(zero, least_of_each(his)), hi);
        }
        _mm256_movemask_ps(nan) != 0
    }

    pub fn tile_ranges(exponent: i32, code_max: u16, ranges: &mut Ranges) {
        ranges.are_ordinary = exponent.unsigned_abs() <= ORDINARY_EXPONENT;
        let scale = _mm256_set1_pd(power_of_two(-exponent));
        let unscale = _mm256_set1_pd(power_of_two(exponent));
        let code_max = _mm256_set1_pd(code_max.into());
        for four in 0..ranges.count.div_ceil(4) {
            let lo = load_four_f32s(&ranges.lo.as_chunks().0[four]);
            let hi = load_four_f32s(&ranges.hi.as_chunks().0[four]);
            let scaled_lo = _mm256_mul_pd(_mm256_cvtps_pd(lo), scale);
            let scaled_hi = _mm256_mul_pd(_mm256_cvtps_pd(hi), scale);
            let lo = halves_below(scaled_lo);
            let distance = _mm256_sub_pd(scaled_hi, values_of_halves(lo));
            let nearest = halves(_mm256_div_pd(distance, code_max));
            let grid_lo = _mm256_mul_pd(values_of_halves(lo), unscale);
            // The smallest of three candidates whose grid reaches `hi` when the other end decodes it.
            let below = _mm_subs_epu16(nearest, _mm_set1_epi16(1));
            let above = _mm_add_epi16(nearest, _mm_set1_epi16(1));
            let reaches = |step: __m128i| {
                let step = _mm256_mul_pd(values_of_halves(step), unscale);
                let end = _mm256_cvtpd_ps(_mm256_add_pd(_mm256_mul_pd(step, code_max), grid_lo));
                let end = _mm_min_ps(end, _mm_set1_ps(f32::MAX));
                let end = _mm_max_ps(end, _mm_set1_ps(f32::MIN));
                let reached = _mm_castps_si128(_mm_cmpge_ps(end, hi));
                _mm_packs_epi32(reached, reached)
            };
            let step = _mm_blendv_epi8(above, nearest, reaches(nearest));
            let step = _mm_blendv_epi8(step, below, reaches(below));
            let grid_step = _mm256_mul_pd(values_of_halves(step), unscale);
            let positive = _mm256_cmp_pd::<_CMP_GT_OQ>(grid_step, _mm256_setzero_pd());
            let per_step = _mm256_and_pd(positive, _mm256_div_pd(_mm256_set1_pd(1.0), grid_step));
            ranges.wire_lo.as_chunks_mut().0[four] = four_halves(lo);
            ranges.wire_step.as_chunks_mut().0[four] = four_halves(step);
            store_f64s(grid_lo, &mut ranges.grid_lo.as_chunks_mut().0[four]);
            store_f64s(per_step, &mut ranges.per_step.as_chunks_mut().0[four]);
        }
    }

    #[inline]
    fn four_halves(halves: __m128i) -> [u16; 4] {
        let bits = _mm_cvtsi128_si64(halves) as u64;
        std::array::from_fn(|at| (bits >> (16 * at)) as u16)
    }

    /// The nearest 16-bit floats, rounded via `f32`, in the lower half of the vector.
    #[inline]
    fn halves(values: __m256d) -> __m128i {
        _mm_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_cvtpd_ps(values))
    }

    #[inline]
    fn values_of_halves(halves: __m128i) -> __m256d {
        _mm256_cvtps_pd(_mm_cvtph_ps(halves))
    }

    /// The largest 16-bit floats that do not exceed these values.
    #[inline]
    fn halves_below(values: __m256d) -> __m128i {
        let nearest = halves(values);
        // The bits are one less for a positive number, and one more for a negative one.
        let negative = _mm_srai_epi16::<15>(nearest);
        let next = _mm_sub_epi16(_mm_sub_epi16(nearest, _mm_set1_epi16(1)), _mm_slli_epi16::<1>(negative));
        let magnitude = _mm_and_si128(nearest, _mm_set1_epi16(0x7fff));
        let zero = _mm_cmpeq_epi16(magnitude, _mm_setzero_si128());
        let next = _mm_blendv_epi8(next, _mm_set1_epi16(0x8001u16 as i16), zero);
        let below = _mm256_castpd_ps(_mm256_cmp_pd::<_CMP_LE_OQ>(values_of_halves(nearest), values));
        // Every second of the 32-bit masks, and then masks of 16 bits.
        let (first, second) = (_mm256_castps256_ps128(below), _mm256_extractf128_ps::<1>(below));
        let below = _mm_castps_si128(_mm_shuffle_ps::<0b10_00_10_00>(first, second));
        _mm_blendv_epi8(next, nearest, _mm_packs_epi32(below, below))
    }

    pub fn tile_codes(bytes: &[u8], tile: usize, ranges: &Ranges, code_max: u16, out: &mut [u16]) {
        let rounding = SingleRounding::new(code_max).filter(|_| ranges.are_ordinary);
        for (at, (bytes, out)) in bytes.chunks(4 * tile).zip(out.chunks_mut(tile)).enumerate() {
            let quantizer = Quantizer { lo: ranges.grid_lo[at], per_step: ranges.per_step[at], code_max };
            if !rounding.is_some_and(|rounding| rounding.codes(bytes, quantizer, out)) {
                codes(bytes, quantizer, out);
            }
        }
    }

    pub fn tile_codes_stochastic(bytes: &[u8], tile: usize, ranges: &Ranges, noise: Noise, out: &mut [u16]) {
        let key = _mm256_set1_epi32(noise.key as i32);
        for (at, (bytes, out)) in bytes.chunks(4 * tile).zip(out.chunks_mut(tile)).enumerate() {
            let (lo, per_step) = (both(ranges.grid_lo[at]), both(ranges.per_step[at]));
            let mut elements = _mm256_add_epi32(_mm256_set1_epi32(ranges.first[at] as i32), eight_numbers());
            each_code(bytes, out, |values| {
                let random = widen_integers(random(_mm256_xor_si256(elements, key)));
                elements = _mm256_add_epi32(elements, _mm256_set1_epi32(8));
                let steps = steps(widen(values), lo, per_step);
                let low = round_stochastic(steps[0], random[0], noise.code_max);
                _mm_packus_epi32(low, round_stochastic(steps[1], random[1], noise.code_max))
            });
        }
    }

    #[inline]
    fn eight_numbers() -> __m256i {
        _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0)
    }

    /// The random number of each element, in 24 bits.
    #[inline]
    fn random(mixed: __m256i) -> __m256i {
        let mixed = _mm256_xor_si256(mixed, _mm256_srli_epi32::<16>(mixed));
        let mixed = _mm256_mullo_epi32(mixed, _mm256_set1_epi32(grid::MIX[0] as i32));
        let mixed = _mm256_xor_si256(mixed, _mm256_srli_epi32::<15>(mixed));
        let mixed = _mm256_mullo_epi32(mixed, _mm256_set1_epi32(grid::MIX[1] as i32));
        _mm256_srli_epi32::<8>(_mm256_xor_si256(mixed, _mm256_srli_epi32::<16>(mixed)))
    }

    #[inline]
    fn round_stochastic(steps: __m256d, random: __m256d, code_max: u16) -> __m128i {
        let one = _mm256_set1_pd(1.0);
        let steps = _mm256_max_pd(_mm256_min_pd(steps, _mm256_set1_pd(code_max.into())), _mm256_setzero_pd());
        let below = _mm256_floor_pd(steps);
        let above = _mm256_sub_pd(steps, below);
        let sum = _mm256_add_pd(above, _mm256_mul_pd(random, _mm256_set1_pd(grid::RANDOM_UNIT)));
        let chance = _mm256_cmp_pd::<_CMP_GE_OQ>(sum, one);
        let almost = _mm256_cmp_pd::<_CMP_GE_OQ>(above, _mm256_set1_pd(1.0 - grid::NEAR));
        let away = _mm256_cmp_pd::<_CMP_GT_OQ>(above, _mm256_set1_pd(grid::NEAR));
        let up = _mm256_and_pd(away, _mm256_or_pd(chance, almost));
        _mm256_cvtpd_epi32(_mm256_add_pd(below, _mm256_and_pd(up, one)))
    }

    pub fn tile_values(codes: &[u16], tile: usize, grids: &Grids, out: &mut [u8]) {
        let (least, most) = (_mm256_set1_ps(f32::MIN), _mm256_set1_ps(f32::MAX));
        for (at, (codes, out)) in codes.chunks(tile).zip(out.chunks_mut(4 * tile)).enumerate() {
            let (lo, step) = (both(grids.lo[at]), both(grids.step[at]));
            let value = |codes: __m256i| _mm256_max_ps(_mm256_min_ps(place(codes, lo, step), most), least);
            if grids.code_bits <= 3 {
                let table = value(eight_numbers());
                each_value(codes, out, |codes| _mm256_permutevar8x32_ps(table, codes));
            } else if grids.code_bits == 4 {
                let upper = _mm256_add_epi32(eight_numbers(), _mm256_set1_epi32(8));
                let table = [value(eight_numbers()), value(upper)];
                each_value(codes, out, |codes| look_up_16(table, codes));
            } else {
                each_value(codes, out, value);
            }
        }
    }
}

with_avx2! {
    pub fn transpose(from: &[u8], to: &mut [u8], shape: Transposition) {
        let Transposition { rows, columns, from_stride, to_stride } = shape;
        if rows < 8 || columns < 8 {
            return portable::transpose(from, to, shape);
        }
        // The columns of two cache lines at a time, which are then read once.
        for line in (0..columns).step_by(32) {
            for row in (0..rows).step_by(8) {
                // The last squares overlap the ones before them.
                let row = row.min(rows - 8);
                for column in (line..columns.min(line + 32)).step_by(8) {
                    let column = column.min(columns - 8);
                    let from = &from[4 * (row * from_stride + column)..][..4 * (7 * from_stride + 8)];
                    let to = &mut to[4 * (column * to_stride + row)..][..4 * (7 * to_stride + 8)];
                    let line = |at: usize| load_values(from[4 * at * from_stride..].first_chunk().expect("a row of 8"));
                    let square = transpose_square(std::array::from_fn(line));
                    for (at, line) in square.into_iter().enumerate() {
                        store_values(line, to[4 * at * to_stride..].first_chunk_mut().expect("a row of 8"));
                    }
                }
            }
        }
    }

    #[inline]
    fn transpose_square(rows: [__m256; 8]) -> [__m256; 8] {
        let mut pairs = [_mm256_setzero_pd(); 8];
        for at in (0..8).step_by(2) {
            pairs[at] = _mm256_castps_pd(_mm256_unpacklo_ps(rows[at], rows[at + 1]));
            pairs[at + 1] = _mm256_castps_pd(_mm256_unpackhi_ps(rows[at], rows[at + 1]));
        }
        let mut fours = [_mm256_setzero_ps(); 8];
        for at in (0..8).step_by(4) {
            fours[at] = _mm256_castpd_ps(_mm256_unpacklo_pd(pairs[at], pairs[at + 2]));
            fours[at + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(pairs[at], pairs[at + 2]));
            fours[at + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(pairs[at + 1], pairs[at + 3]));
            fours[at + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(pairs[at + 1], pairs[at + 3]));
        }
        // Half `h` of `fours[4 i + j]` is column `4 h + j` of the rows `4 i` to `4 i + 3`.
        let mut columns = [_mm256_setzero_ps(); 8];
        for at in 0..4 {
            columns[at] = _mm256_permute2f128_ps::<0x20>(fours[at], fours[at + 4]);
            columns[at + 4] = _mm256_permute2f128_ps::<0x31>(fours[at], fours[at + 4]);
        }
        columns
    }
}
