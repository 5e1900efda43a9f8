//! The kernels for AVX-512: 16 values at a time, as two vectors of 8 where they are computed in `f64`.

use super::super::grid::{self, Quantizer};
use super::super::order_statistics::Pivots;
use super::super::quantile_bins::{FewGrids, QuantileBins};
use super::super::tile::{power_of_two, Grids, Ranges, ORDINARY_EXPONENT};
use super::{portable, Extremes, Noise, Tally, Transposition};
use std::arch::x86_64::*;

/// Enables the instructions of this level for functions.
macro_rules! with_avx512 {
    ($($(#[$attribute:meta])* $visible:vis fn $name:ident $(<const $constant:ident: $kind:ty>)?
        ($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? $body:block)*) => {$(
        $(#[$attribute])*
        #[target_feature(enable = "fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,bmi1,bmi2,popcnt")]
        $visible fn $name $(<const $constant: $kind>)? ($($argument: $type),*) $(-> $result)? $body
    )*};
}

mod memory;
mod packing;
mod planes;

use memory::*;
pub use packing::{pack, unpack};
pub use planes::{join_planes, keep_values, split_planes, spread_values};

portable_kernels!(with_avx512);

/// 16 numbers in `f64`.
type Wide = [__m512d; 2];

with_avx512! {
    #[inline]
    fn widen(values: __m512) -> Wide {
        [_mm512_cvtps_pd(_mm512_castps512_ps256(values)), _mm512_cvtps_pd(_mm512_extractf32x8_ps::<1>(values))]
    }

    #[inline]
    fn both(value: f64) -> Wide {
        [_mm512_set1_pd(value); 2]
    }

    /// The distances of 16 values from `lo`, in steps.
    #[inline]
    fn steps(values: __m512, lo: Wide, per_step: Wide) -> Wide {
        let [low, high] = widen(values);
        [
            _mm512_mul_pd(_mm512_sub_pd(low, lo[0]), per_step[0]),
            _mm512_mul_pd(_mm512_sub_pd(high, lo[1]), per_step[1]),
        ]
    }

    /// The codes of 16 values, as 32-bit numbers.
    #[inline]
    fn round(values: __m512, lo: Wide, per_step: Wide, code_max: __m512i) -> __m512i {
        let [low, high] = steps(values, lo, per_step);
        let (low, high) = (_mm512_cvtpd_epi32(low), _mm512_cvtpd_epi32(high));
        _mm512_min_epi32(_mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high), code_max)
    }

    /// The values of 16 codes. The product with a code is exact, so a fused multiply-add gives the same result.
    #[inline]
    fn place(codes: __m512i, lo: Wide, step: Wide) -> __m512 {
        let low = _mm512_cvtepi32_pd(_mm512_castsi512_si256(codes));
        let high = _mm512_cvtepi32_pd(_mm512_extracti64x4_epi64::<1>(codes));
        let low = _mm512_cvtpd_ps(_mm512_fmadd_pd(low, step[0], lo[0]));
        let high = _mm512_cvtpd_ps(_mm512_fmadd_pd(high, step[1], lo[1]));
        _mm512_insertf32x8::<1>(_mm512_castps256_ps512(low), high)
    }

    /// Applies `code`, which returns 16-bit codes in 32-bit lanes, to all values.
    #[inline]
    fn each_code(bytes: &[u8], out: &mut [u16], code: impl Fn(__m512) -> __m512i) {
        let (vectors, rest) = bytes.as_chunks();
        let (rooms, room) = out.as_chunks_mut();
        for (room, vector) in rooms.iter_mut().zip(vectors) {
            store_codes(_mm512_cvtepi32_epi16(code(_mm512_castsi512_ps(load(vector)))), room);
        }
        if !rest.is_empty() {
            let codes = code(_mm512_castsi512_ps(load_front(rest)));
            store_codes_front(_mm512_cvtepi32_epi16(codes), room);
        }
    }

    /// Applies `value`, which takes codes in 32-bit lanes, to all codes.
    #[inline]
    fn each_value(codes: &[u16], out: &mut [u8], value: impl Fn(__m512i) -> __m512) {
        let (vectors, rest) = codes.as_chunks();
        let (rooms, room) = out.as_chunks_mut();
        for (room, vector) in rooms.iter_mut().zip(vectors) {
            store(_mm512_castps_si512(value(load_codes(vector))), room);
        }
        if !rest.is_empty() {
            store_front(_mm512_castps_si512(value(load_codes_front(rest))), room);
        }
    }

    #[inline]
    pub fn codes(bytes: &[u8], quantizer: Quantizer, out: &mut [u16]) {
        let (lo, per_step) = (both(quantizer.lo), both(quantizer.per_step));
        let code_max = _mm512_set1_epi32(quantizer.code_max.into());
        each_code(bytes, out, |values| round(values, lo, per_step, code_max));
    }

    pub fn values(codes: &[u16], lo: f64, step: f64, out: &mut [u8]) {
        let (lo, step) = (both(lo), both(step));
        each_value(codes, out, |codes| place(codes, lo, step));
    }

    pub fn symbols_of_few<const S: u32>(bytes: &[u8], bins: &QuantileBins, code_bits: u32, out: &mut [u16]) {
        let begins = load_f32s(bins.begins.first_chunk().expect("16 at least"));
        let (least, most) = (_mm512_set1_ps(bins.begins[0]), _mm512_set1_ps(bins.end));
        let per_steps = bins.per_steps.as_chunks().0;
        let (first, second) = (load_f64s(&per_steps[0]), load_f64s(&per_steps[1]));
        let code_max = _mm512_set1_epi32(grid::code_max(code_bits).into());
        let shift = _mm512_set1_epi32(code_bits as i32);
        each_code(bytes, out, |values| {
            let values = _mm512_max_ps(_mm512_min_ps(values, most), least);
            let mut bin = _mm512_setzero_si512();
            for bit in (0..S).rev() {
                let next = _mm512_or_si512(bin, _mm512_set1_epi32(1 << bit));
                let begun = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(values, _mm512_permutexvar_ps(next, begins));
                bin = _mm512_mask_mov_epi32(bin, begun, next);
            }
            let lo = widen(_mm512_permutexvar_ps(bin, begins));
            let low = _mm512_cvtepu32_epi64(_mm512_castsi512_si256(bin));
            let high = _mm512_cvtepu32_epi64(_mm512_extracti64x4_epi64::<1>(bin));
            let per_step = if S <= 3 {
                [_mm512_permutexvar_pd(low, first), _mm512_permutexvar_pd(high, first)]
            } else {
                [_mm512_permutex2var_pd(first, low, second), _mm512_permutex2var_pd(first, high, second)]
            };
            let codes = round(values, lo, per_step, code_max);
            _mm512_or_si512(codes, _mm512_sllv_epi32(bin, shift))
        });
    }

    pub fn values_of_few(symbols: &[u16], grids: &FewGrids, out: &mut [u8]) {
        let (los, steps) = (load_f32s(&grids.los), load_f32s(&grids.steps));
        let shift = _mm512_set1_epi32(grids.code_bits as i32);
        let mask = _mm512_set1_epi32(grid::code_max(grids.code_bits).into());
        let split = |symbols: __m512i| {
            let bin = _mm512_srlv_epi32(symbols, shift);
            let (lo, step) = (_mm512_permutexvar_ps(bin, los), _mm512_permutexvar_ps(bin, steps));
            (_mm512_and_si512(symbols, mask), lo, step)
        };
        if grids.are_exact {
            return each_value(symbols, out, |symbols| {
                let (codes, lo, step) = split(symbols);
                _mm512_fmadd_ps(_mm512_cvtepi32_ps(codes), step, lo)
            });
        }
        each_value(symbols, out, |symbols| {
            let (codes, lo, step) = split(symbols);
            place(codes, widen(lo), widen(step))
        });
    }

    pub fn look_up_few(symbols: &[u16], table: &[f32; 16], out: &mut [u8]) {
        let table = load_f32s(table);
        each_value(symbols, out, |symbols| _mm512_permutexvar_ps(symbols, table));
    }

    pub fn f16s(bytes: &[u8], out: &mut [u8]) {
        for (out, bytes) in out.chunks_mut(32).zip(bytes.chunks(64)) {
            let values = _mm512_castsi512_ps(load_front(bytes));
            let halves = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(values);
            store_front(_mm512_castsi256_si512(halves), out);
        }
    }

    pub fn values_of_f16s(bytes: &[u8], out: &mut [u8]) {
        for (out, bytes) in out.chunks_mut(64).zip(bytes.chunks(32)) {
            let values = _mm512_cvtph_ps(_mm512_castsi512_si256(load_front(bytes)));
            store_front(_mm512_castps_si512(values), out);
        }
    }
}

with_avx512! {
    pub fn extremes(bytes: &[u8]) -> Extremes {
        let (mut min, mut max) = (_mm512_set1_epi32(i32::MAX), _mm512_set1_epi32(i32::MIN));
        let mut unsigned = _mm512_setzero_si512();
        let (vectors, rest) = bytes.as_chunks();
        for vector in vectors {
            let bits = load(vector);
            (min, max) = (_mm512_min_epi32(min, bits), _mm512_max_epi32(max, bits));
            unsigned = _mm512_max_epu32(unsigned, bits);
        }
        portable::extremes(rest).and(Extremes {
            signed_min: _mm512_reduce_min_epi32(min),
            signed_max: _mm512_reduce_max_epi32(max),
            unsigned_max: _mm512_reduce_max_epu32(unsigned),
        })
    }

    /// Reduces 16 vectors: element `i` of the result is the smallest element of vector `i`.
    #[inline]
    fn least_of_each(vectors: [__m512; 16]) -> __m512 {
        let mut eight = [_mm512_setzero_pd(); 8];
        for (at, to) in eight.iter_mut().enumerate() {
            let (a, b) = (vectors[2 * at], vectors[2 * at + 1]);
            *to = _mm512_castps_pd(_mm512_min_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
        }
        let mut four = [_mm512_setzero_ps(); 4];
        for (at, to) in four.iter_mut().enumerate() {
            let (a, b) = (eight[2 * at], eight[2 * at + 1]);
            let (a, b) = (_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
            *to = _mm512_min_ps(_mm512_castpd_ps(a), _mm512_castpd_ps(b));
        }
        let a = least_of_quarters(four[0], four[1]);
        let b = least_of_quarters(four[2], four[3]);
        least_of_quarters(a, b)
    }

    #[inline]
    fn least_of_quarters(a: __m512, b: __m512) -> __m512 {
        _mm512_min_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b))
    }

    /// The minima of a tile over its vectors of 16 values, and its negated maxima, lane by lane. Sets the
    /// bits of `nan` for lanes with a NaN.
    #[inline]
    fn tile_extremes(tile: &[u8], nan: &mut u16) -> (__m512, __m512) {
        let (vectors, rest) = tile.as_chunks::<64>();
        let first = match vectors.first() {
            Some(first) => _mm512_castsi512_ps(load(first)),
            None => _mm512_broadcastss_ps(_mm512_castps512_ps128(_mm512_castsi512_ps(load_front(rest)))),
        };
        let (mut lo, mut hi) = (first, first);
        for vector in vectors {
            let values = _mm512_castsi512_ps(load(vector));
            (lo, hi) = (_mm512_min_ps(values, lo), _mm512_max_ps(values, hi));
            *nan |= _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(values, values);
        }
        if !rest.is_empty() {
            let present = first_bytes(rest.len() / 4) as u16;
            let values = _mm512_mask_mov_ps(first, present, _mm512_castsi512_ps(load_front(rest)));
            (lo, hi) = (_mm512_min_ps(values, lo), _mm512_max_ps(values, hi));
            *nan |= _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(values, values);
        }
        (lo, _mm512_sub_ps(_mm512_setzero_ps(), hi))
    }

    pub fn tile_ends(bytes: &[u8], tile: usize, lo: &mut [f32], hi: &mut [f32]) -> bool {
        let mut nan = 0;
        for (bytes, (lo, hi)) in bytes.chunks(4 * 16 * tile).zip(lo.chunks_mut(16).zip(hi.chunks_mut(16))) {
            let (mut los, mut his) = ([_mm512_setzero_ps(); 16], [_mm512_setzero_ps(); 16]);
            for (at, tile) in bytes.chunks(4 * tile).enumerate() {
                (los[at], his[at]) = tile_extremes(tile, &mut nan);
            }
            // Adding 0.0 turns −0.0 into 0.0.
            let zero = _mm512_setzero_ps();
            store_f32s_front(_mm512_add_ps(least_of_each(los), zero), lo);
            store_f32s_front(_mm512_sub_ps(zero, least_of_each(his)), hi);
        }
        nan != 0
    }

    pub fn tile_ranges(exponent: i32, code_max: u16, ranges: &mut Ranges) {
        ranges.are_ordinary = exponent.unsigned_abs() <= ORDINARY_EXPONENT;
        let scale = _mm512_set1_pd(power_of_two(-exponent));
        let unscale = _mm512_set1_pd(power_of_two(exponent));
        let code_max = _mm512_set1_pd(code_max.into());
        for at in (0..ranges.count).step_by(8) {
            let (lo, hi) = (load_eight(&ranges.lo, at), load_eight(&ranges.hi, at));
            let scaled_lo = _mm512_mul_pd(_mm512_cvtps_pd(lo), scale);
            let scaled_hi = _mm512_mul_pd(_mm512_cvtps_pd(hi), scale);
            let lo = halves_below(scaled_lo);
            let distance = _mm512_sub_pd(scaled_hi, values_of_halves(lo));
            let nearest = halves(_mm512_div_pd(distance, code_max));
            let grid_lo = _mm512_mul_pd(values_of_halves(lo), unscale);
            // The smallest of three candidates whose grid reaches `hi` when the other end decodes it.
            let below = _mm_subs_epu16(nearest, _mm_set1_epi16(1));
            let above = _mm_add_epi16(nearest, _mm_set1_epi16(1));
            let reaches = |step: __m128i| {
                let step = _mm512_mul_pd(values_of_halves(step), unscale);
                let end = _mm512_cvtpd_ps(_mm512_fmadd_pd(step, code_max, grid_lo));
                let end = _mm256_min_ps(end, _mm256_set1_ps(f32::MAX));
                let end = _mm256_max_ps(end, _mm256_set1_ps(f32::MIN));
                _mm256_cmp_ps_mask::<_CMP_GE_OQ>(end, hi)
            };
            let step = _mm_mask_mov_epi16(above, reaches(nearest), nearest);
            let step = _mm_mask_mov_epi16(step, reaches(below), below);
            let grid_step = _mm512_mul_pd(values_of_halves(step), unscale);
            let positive = _mm512_cmp_pd_mask::<_CMP_GT_OQ>(grid_step, _mm512_setzero_pd());
            let per_step = _mm512_maskz_div_pd(positive, _mm512_set1_pd(1.0), grid_step);
            let eight = at / 8;
            store_halves(lo, &mut ranges.wire_lo.as_chunks_mut().0[eight]);
            store_halves(step, &mut ranges.wire_step.as_chunks_mut().0[eight]);
            store_f64s(grid_lo, &mut ranges.grid_lo.as_chunks_mut().0[eight]);
            store_f64s(per_step, &mut ranges.per_step.as_chunks_mut().0[eight]);
        }
    }

    /// The nearest 16-bit floats, rounded via `f32`.
    #[inline]
    fn halves(values: __m512d) -> __m128i {
        _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm512_cvtpd_ps(values))
    }

    #[inline]
    fn values_of_halves(halves: __m128i) -> __m512d {
        _mm512_cvtps_pd(_mm256_cvtph_ps(halves))
    }

    /// The largest 16-bit floats that do not exceed these values.
    #[inline]
    fn halves_below(values: __m512d) -> __m128i {
        let nearest = halves(values);
        // The bits are one less for a positive number, and one more for a negative one.
        let negative = _mm_srai_epi16::<15>(nearest);
        let next = _mm_sub_epi16(_mm_sub_epi16(nearest, _mm_set1_epi16(1)), _mm_slli_epi16::<1>(negative));
        let zero = _mm_testn_epi16_mask(nearest, _mm_set1_epi16(0x7fff));
        let next = _mm_mask_mov_epi16(next, zero, _mm_set1_epi16(0x8001u16 as i16));
        let below = _mm512_cmp_pd_mask::<_CMP_LE_OQ>(values_of_halves(nearest), values);
        _mm_mask_mov_epi16(next, below, nearest)
    }

    pub fn tile_codes(bytes: &[u8], tile: usize, ranges: &Ranges, code_max: u16, out: &mut [u16]) {
        for (at, (bytes, out)) in bytes.chunks(4 * tile).zip(out.chunks_mut(tile)).enumerate() {
            codes(bytes, Quantizer { lo: ranges.grid_lo[at], per_step: ranges.per_step[at], code_max }, out);
        }
    }

    pub fn tile_codes_stochastic(bytes: &[u8], tile: usize, ranges: &Ranges, noise: Noise, out: &mut [u16]) {
        let key = _mm512_set1_epi32(noise.key as i32);
        for (at, (bytes, out)) in bytes.chunks(4 * tile).zip(out.chunks_mut(tile)).enumerate() {
            let (lo, per_step) = (both(ranges.grid_lo[at]), both(ranges.per_step[at]));
            for (sixteen, (bytes, out)) in bytes.chunks(64).zip(out.chunks_mut(16)).enumerate() {
                let first = ranges.first[at].wrapping_add(16 * sixteen as u32);
                let elements = _mm512_add_epi32(_mm512_set1_epi32(first as i32), sixteen_numbers());
                let random = widen_integers(random(_mm512_xor_si512(elements, key)));
                let steps = steps(_mm512_castsi512_ps(load_front(bytes)), lo, per_step);
                let low = round_stochastic(steps[0], random[0], noise.code_max);
                let high = round_stochastic(steps[1], random[1], noise.code_max);
                let codes = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
                store_codes_front(_mm512_cvtepi32_epi16(codes), out);
            }
        }
    }

    #[inline]
    fn sixteen_numbers() -> __m512i {
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)
    }

    #[inline]
    fn widen_integers(numbers: __m512i) -> Wide {
        let high = _mm512_extracti64x4_epi64::<1>(numbers);
        [_mm512_cvtepi32_pd(_mm512_castsi512_si256(numbers)), _mm512_cvtepi32_pd(high)]
    }

    /// The random number of each element, in 24 bits.
    #[inline]
    fn random(mixed: __m512i) -> __m512i {
        let mixed = _mm512_xor_si512(mixed, _mm512_srli_epi32::<16>(mixed));
        let mixed = _mm512_mullo_epi32(mixed, _mm512_set1_epi32(grid::MIX[0] as i32));
        let mixed = _mm512_xor_si512(mixed, _mm512_srli_epi32::<15>(mixed));
        let mixed = _mm512_mullo_epi32(mixed, _mm512_set1_epi32(grid::MIX[1] as i32));
        _mm512_srli_epi32::<8>(_mm512_xor_si512(mixed, _mm512_srli_epi32::<16>(mixed)))
    }

    #[inline]
    fn round_stochastic(steps: __m512d, random: __m512d, code_max: u16) -> __m256i {
        let steps = _mm512_max_pd(_mm512_min_pd(steps, _mm512_set1_pd(code_max.into())), _mm512_setzero_pd());
        let below = _mm512_cvttpd_epi32(steps);
        let above = _mm512_sub_pd(steps, _mm512_cvtepi32_pd(below));
        let sum = _mm512_add_pd(above, _mm512_mul_pd(random, _mm512_set1_pd(grid::RANDOM_UNIT)));
        let chance = _mm512_cmp_pd_mask::<_CMP_GE_OQ>(sum, _mm512_set1_pd(1.0));
        let almost = _mm512_cmp_pd_mask::<_CMP_GE_OQ>(above, _mm512_set1_pd(1.0 - grid::NEAR));
        let away = _mm512_cmp_pd_mask::<_CMP_GT_OQ>(above, _mm512_set1_pd(grid::NEAR));
        _mm256_mask_add_epi32(below, away & (chance | almost), below, _mm256_set1_epi32(1))
    }

    pub fn tile_values(codes: &[u16], tile: usize, grids: &Grids, out: &mut [u8]) {
        let (least, most) = (_mm512_set1_ps(f32::MIN), _mm512_set1_ps(f32::MAX));
        for (at, (codes, out)) in codes.chunks(tile).zip(out.chunks_mut(4 * tile)).enumerate() {
            let (lo, step) = (both(grids.lo[at]), both(grids.step[at]));
            if grids.code_bits <= 4 {
                let table = _mm512_max_ps(_mm512_min_ps(place(sixteen_numbers(), lo, step), most), least);
                each_value(codes, out, |codes| _mm512_permutexvar_ps(codes, table));
            } else {
                each_value(codes, out, |codes| _mm512_max_ps(_mm512_min_ps(place(codes, lo, step), most), least));
            }
        }
    }
}

/// The segments of four vectors of values are bytes of one vector. This many of these vectors are counted together, so
/// that a count fits a byte.
const FOURS: usize = 32;

with_avx512! {
    /// The segments of 16 keys, given the table of pivots.
    #[inline]
    fn segments(keys: __m512i, low: __m512i, high: __m512i) -> __m512i {
        let mut segment = _mm512_setzero_si512();
        for bit in (0..5).rev() {
            let next = _mm512_or_si512(segment, _mm512_set1_epi32(1 << bit));
            let begun = _mm512_cmpge_epi32_mask(keys, _mm512_permutex2var_epi32(low, next, high));
            segment = _mm512_mask_mov_epi32(segment, begun, next);
        }
        segment
    }

    /// The number of bytes in at most [`FOURS`] vectors that are at least `least`.
    #[inline]
    fn count_at_least(least: u8, vectors: &[__m512i]) -> u64 {
        let (least, one) = (_mm512_set1_epi8(least as i8), _mm512_set1_epi8(1));
        let mut counts = _mm512_setzero_si512();
        for vector in vectors {
            counts = _mm512_mask_add_epi8(counts, _mm512_cmpge_epu8_mask(*vector, least), counts, one);
        }
        _mm512_reduce_add_epi64(_mm512_sad_epu8(counts, _mm512_setzero_si512())) as u64
    }

    pub fn narrow(bytes: &[u8], pivots: &Pivots, tally: &mut Tally, kept: &mut [u8]) -> usize {
        let table = pivots.table.as_chunks().0;
        let (low, high) = (load_i32s(&table[0]), load_i32s(&table[1]));
        let wanted = _mm512_set1_epi32(pivots.kept as i32);
        let (mut key_min, mut key_max) = (_mm512_set1_epi32(i32::MAX), _mm512_set1_epi32(i32::MIN));
        let mut length = 0;
        let (fours, rest) = bytes.as_chunks::<256>();
        for fours in fours.chunks(FOURS) {
            let mut segments_of = [_mm512_setzero_si512(); FOURS];
            for (together, four) in segments_of.iter_mut().zip(fours) {
                for vector in four.as_chunks().0 {
                    let bits = load(vector);
                    let keys = _mm512_xor_si512(bits, _mm512_srli_epi32::<1>(_mm512_srai_epi32::<31>(bits)));
                    (key_min, key_max) = (_mm512_min_epi32(key_min, keys), _mm512_max_epi32(key_max, keys));
                    let segment = segments(keys, low, high);
                    *together = _mm512_or_si512(_mm512_slli_epi32::<8>(*together), segment);
                    let keep = _mm512_test_epi32_mask(_mm512_sllv_epi32(_mm512_set1_epi32(1), segment), wanted);
                    let room = kept[4 * length..].first_chunk_mut().expect("room for 16 more than values");
                    store(_mm512_maskz_compress_epi32(keep, bits), room);
                    length += keep.count_ones() as usize;
                }
            }
            for segment in 0..=pivots.count {
                tally.at_least[segment] += count_at_least(segment as u8, &segments_of[..fours.len()]);
            }
        }
        tally.key_min = tally.key_min.min(_mm512_reduce_min_epi32(key_min));
        tally.key_max = tally.key_max.max(_mm512_reduce_max_epi32(key_max));
        length + portable::narrow(rest, pivots, tally, &mut kept[4 * length..])
    }
}

with_avx512! {
    pub fn transpose(from: &[u8], to: &mut [u8], shape: Transposition) {
        let Transposition { rows, columns, from_stride, to_stride } = shape;
        for row in (0..rows).step_by(16) {
            for column in (0..columns).step_by(16) {
                let (height, width) = (16.min(rows - row), 16.min(columns - column));
                let from = &from[4 * (row * from_stride + column)..];
                let to = &mut to[4 * (column * to_stride + row)..];
                if height == 16 && width == 16 {
                    let mut square = [_mm512_setzero_ps(); 16];
                    for (line, from) in square.iter_mut().zip(from.chunks(4 * from_stride)) {
                        *line = _mm512_castsi512_ps(load(from.first_chunk().expect("a row of 16")));
                    }
                    for (line, to) in transpose_square(square).iter().zip(to.chunks_mut(4 * to_stride)) {
                        store(_mm512_castps_si512(*line), to.first_chunk_mut().expect("a row of 16"));
                    }
                    continue;
                }
                let mut square = [_mm512_setzero_ps(); 16];
                for (line, from) in square[..height].iter_mut().zip(from.chunks(4 * from_stride)) {
                    *line = _mm512_castsi512_ps(load_front(&from[..4 * width]));
                }
                for (line, to) in transpose_square(square)[..width].iter().zip(to.chunks_mut(4 * to_stride)) {
                    store_front(_mm512_castps_si512(*line), &mut to[..4 * height]);
                }
            }
        }
    }

    #[inline]
    fn transpose_square(rows: [__m512; 16]) -> [__m512; 16] {
        let mut pairs = [_mm512_setzero_pd(); 16];
        for at in (0..16).step_by(2) {
            pairs[at] = _mm512_castps_pd(_mm512_unpacklo_ps(rows[at], rows[at + 1]));
            pairs[at + 1] = _mm512_castps_pd(_mm512_unpackhi_ps(rows[at], rows[at + 1]));
        }
        let mut fours = [_mm512_setzero_ps(); 16];
        for at in (0..16).step_by(4) {
            fours[at] = _mm512_castpd_ps(_mm512_unpacklo_pd(pairs[at], pairs[at + 2]));
            fours[at + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(pairs[at], pairs[at + 2]));
            fours[at + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(pairs[at + 1], pairs[at + 3]));
            fours[at + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(pairs[at + 1], pairs[at + 3]));
        }
        // Quarter `q` of `fours[4 i + j]` is column `4 q + j` of the rows `4 i` to `4 i + 3`.
        let mut columns = [_mm512_setzero_ps(); 16];
        for at in 0..4 {
            let even = _mm512_shuffle_f32x4::<0x88>(fours[at], fours[at + 4]);
            let odd = _mm512_shuffle_f32x4::<0xdd>(fours[at], fours[at + 4]);
            let more_even = _mm512_shuffle_f32x4::<0x88>(fours[at + 8], fours[at + 12]);
            let more_odd = _mm512_shuffle_f32x4::<0xdd>(fours[at + 8], fours[at + 12]);
            columns[at] = _mm512_shuffle_f32x4::<0x88>(even, more_even);
            columns[at + 4] = _mm512_shuffle_f32x4::<0x88>(odd, more_odd);
            columns[at + 8] = _mm512_shuffle_f32x4::<0xdd>(even, more_even);
            columns[at + 12] = _mm512_shuffle_f32x4::<0xdd>(odd, more_odd);
        }
        columns
    }
}
