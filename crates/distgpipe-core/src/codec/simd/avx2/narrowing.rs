//! Counts values by segment and keeps those of some segments, for order statistics: 8 values at a time.

use super::super::super::order_statistics::Pivots;
use super::super::{portable, Tally};
use super::memory::*;
use super::{level_of, load_table, look_up_16};
use std::arch::x86_64::*;

/// The segments of four vectors of values are bytes of one vector. This many of these vectors are counted together, so
/// that a count fits a byte.
const FOURS: usize = 64;

/// For every set of eight elements, their numbers, followed by anything.
pub static CHOSEN: [[u8; 8]; 256] = {
    let mut chosen = [[0; 8]; 256];
    let mut set = 0;
    while set < 256 {
        let (mut element, mut count) = (0, 0);
        while element < 8 {
            if set >> element & 1 == 1 {
                chosen[set][count] = element as u8;
                count += 1;
            }
            element += 1;
        }
        set += 1;
    }
    chosen
};

/// The pivots, level by level of a binary search. The last level has 16 of them.
struct PivotLevels {
    first: [__m256i; 4],
    last: [__m256; 2],
}

with_avx2! {
    #[inline]
    fn pivot_levels(pivots: &Pivots) -> PivotLevels {
        // `key >= pivot` is `key > pivot - 1`; no pivot is the smallest number.
        let table = pivots.table.map(|pivot| pivot.wrapping_sub(1));
        let last: [i32; 16] = level_of(&table, 5, 4);
        PivotLevels {
            first: std::array::from_fn(|level| load_i32s(&level_of(&table, 5, level as u32))),
            last: load_table(&last.map(|pivot| f32::from_bits(pivot as u32))),
        }
    }

    /// The segments of 8 keys.
    #[inline]
    fn segments(keys: __m256i, levels: &PivotLevels) -> __m256i {
        let mut segment = _mm256_setzero_si256();
        let descend = |segment: &mut __m256i, pivots: __m256i| {
            *segment = _mm256_sub_epi32(_mm256_add_epi32(*segment, *segment), _mm256_cmpgt_epi32(keys, pivots));
        };
        for level in &levels.first {
            let pivots = _mm256_permutevar8x32_epi32(*level, segment);
            descend(&mut segment, pivots);
        }
        let pivots = _mm256_castps_si256(look_up_16(levels.last, segment));
        descend(&mut segment, pivots);
        segment
    }

    /// The number of bytes in at most [`FOURS`] vectors that are at least `least`. The bytes are below 128.
    #[inline]
    fn count_at_least(least: u8, vectors: &[__m256i]) -> u64 {
        let less = _mm256_set1_epi8(least as i8 - 1);
        let mut counts = _mm256_setzero_si256();
        for vector in vectors {
            counts = _mm256_sub_epi8(counts, _mm256_cmpgt_epi8(*vector, less));
        }
        let sums = _mm256_sad_epu8(counts, _mm256_setzero_si256());
        let sums = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256::<1>(sums));
        (_mm_cvtsi128_si64(sums) + _mm_extract_epi64::<1>(sums)) as u64
    }

    pub fn narrow(bytes: &[u8], pivots: &Pivots, tally: &mut Tally, kept: &mut [u8]) -> usize {
        let levels = pivot_levels(pivots);
        let wanted = _mm256_set1_epi32(pivots.kept as i32);
        let (mut key_min, mut key_max) = (_mm256_set1_epi32(i32::MAX), _mm256_set1_epi32(i32::MIN));
        let mut length = 0;
        let (fours, rest) = bytes.as_chunks::<128>();
        for fours in fours.chunks(FOURS) {
            let mut segments_of = [_mm256_setzero_si256(); FOURS];
            for (together, four) in segments_of.iter_mut().zip(fours) {
                for vector in four.as_chunks().0 {
                    let bits = load(vector);
                    let keys = _mm256_xor_si256(bits, _mm256_srli_epi32::<1>(_mm256_srai_epi32::<31>(bits)));
                    (key_min, key_max) = (_mm256_min_epi32(key_min, keys), _mm256_max_epi32(key_max, keys));
                    let segment = segments(keys, &levels);
                    *together = _mm256_or_si256(_mm256_slli_epi32::<8>(*together), segment);
                    // The bit of the segment becomes the sign.
                    let keep = _mm256_slli_epi32::<31>(_mm256_srlv_epi32(wanted, segment));
                    let keep = _mm256_movemask_ps(_mm256_castsi256_ps(keep)) as u32;
                    let room = kept[4 * length..].first_chunk_mut().expect("room for 16 more than values");
                    store(_mm256_permutevar8x32_epi32(bits, each_choice(&CHOSEN, keep as u8)), room);
                    length += keep.count_ones() as usize;
                }
            }
            for segment in 0..=pivots.count {
                tally.at_least[segment] += count_at_least(segment as u8, &segments_of[..fours.len()]);
            }
        }
        for (min, max) in each_i32(key_min).into_iter().zip(each_i32(key_max)) {
            tally.key_min = tally.key_min.min(min);
            tally.key_max = tally.key_max.max(max);
        }
        length + portable::narrow(rest, pivots, tally, &mut kept[4 * length..])
    }

    /// The entry of a table for a set of eight elements, in 32-bit lanes.
    #[inline]
    pub fn each_choice(table: &[[u8; 8]; 256], set: u8) -> __m256i {
        _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(i64::from_le_bytes(table[usize::from(set)])))
    }
}
