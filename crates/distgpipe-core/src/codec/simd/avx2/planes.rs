//! Values that are not 0, and byte planes, for `zstd`: 8 values and 32 values at a time.

use super::super::portable;
use super::memory::*;
use super::{each_choice, CHOSEN};
use std::arch::x86_64::*;

/// For every set of eight elements, how many elements are below each.
static RANKS: [[u8; 8]; 256] = {
    let mut ranks = [[0; 8]; 256];
    let mut set = 0;
    while set < 256 {
        let mut at = 1;
        while at < 8 {
            ranks[set][at] = ranks[set][at - 1] + (set >> (at - 1) & 1) as u8;
            at += 1;
        }
        set += 1;
    }
    ranks
};

with_avx2! {
    pub fn keep_values<const N: usize>(bytes: &[u8], mask: &mut [u8], kept: &mut [u32]) -> usize {
        let (groups, rest) = bytes.as_chunks::<N>().0.as_chunks::<8>();
        let (masks, mask) = mask.split_at_mut(groups.len());
        let mut length = 0;
        for (group, mask) in groups.iter().zip(masks) {
            let values = load_group(group);
            let zero = _mm256_cmpeq_epi32(values, _mm256_setzero_si256());
            *mask = !_mm256_movemask_ps(_mm256_castsi256_ps(zero)) as u8;
            let room = kept[length..].first_chunk_mut().expect("room for 16 more than values");
            store_u32s(_mm256_permutevar8x32_epi32(values, each_choice(&CHOSEN, *mask)), room);
            length += mask.count_ones() as usize;
        }
        length + portable::keep_values::<N>(rest.as_flattened(), mask, &mut kept[length..])
    }

    pub fn spread_values<const N: usize>(mask: &[u8], values: &[u32], out: &mut [u8]) {
        let (groups, rest) = out.as_chunks_mut::<N>().0.as_chunks_mut::<8>();
        let (masks, mask) = mask.split_at(groups.len());
        let places = _mm256_set_epi32(128, 64, 32, 16, 8, 4, 2, 1);
        let mut next = 0;
        for (group, &mask) in groups.iter_mut().zip(masks) {
            let kept = load_u32s(values[next..].first_chunk().expect("8 more than are kept"));
            let spread = _mm256_permutevar8x32_epi32(kept, each_choice(&RANKS, mask));
            let set = _mm256_and_si256(_mm256_set1_epi32(mask.into()), places);
            store_group(_mm256_and_si256(spread, _mm256_cmpeq_epi32(set, places)), group);
            next += mask.count_ones() as usize;
        }
        portable::spread_values::<N>(mask, &values[next..], rest.as_flattened_mut());
    }

    /// Eight values of two or four bytes as 32-bit numbers.
    #[inline]
    fn load_group<const N: usize>(group: &[[u8; N]; 8]) -> __m256i {
        let bytes = group.as_flattened();
        match N {
            2 => _mm256_cvtepu16_epi32(load_sixteen_bytes(bytes.first_chunk().expect("16 bytes"))),
            _ => load(bytes.first_chunk().expect("32 bytes")),
        }
    }

    #[inline]
    fn store_group<const N: usize>(values: __m256i, group: &mut [[u8; N]; 8]) {
        let bytes = group.as_flattened_mut();
        match N {
            2 => store_sixteen_bytes(super::narrow_codes(values), bytes.first_chunk_mut().expect("16 bytes")),
            _ => store(values, bytes.first_chunk_mut().expect("32 bytes")),
        }
    }

    /// Moves the sign behind the bits that follow it: rotates the upper two bytes of each value by one bit.
    #[inline]
    fn move_sign<const N: usize>(values: __m256i) -> __m256i {
        let rotated = _mm256_or_si256(_mm256_slli_epi16::<1>(values), _mm256_srli_epi16::<15>(values));
        if N == 2 { rotated } else { _mm256_blend_epi16::<0b1010_1010>(values, rotated) }
    }

    /// Undoes [`move_sign`].
    #[inline]
    fn restore_sign<const N: usize>(values: __m256i) -> __m256i {
        let rotated = _mm256_or_si256(_mm256_srli_epi16::<1>(values), _mm256_slli_epi16::<15>(values));
        if N == 2 { rotated } else { _mm256_blend_epi16::<0b1010_1010>(values, rotated) }
    }

    pub fn split_planes<const N: usize>(values: &[u32], planes: [&mut [u8]; N]) {
        let mut planes = planes;
        let fours = values.as_chunks::<32>().0;
        let order = _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0);
        let bytes_of_lanes = _mm256_broadcastsi128_si256(_mm_set_epi8(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0));
        for (at, four) in fours.iter().enumerate() {
            // Each half of a vector: the first bytes of four values, their second bytes, and so on.
            let [a, b, c, d]: [__m256i; 4] = std::array::from_fn(|vector| {
                let values = load_u32s(&four.as_chunks().0[vector]);
                _mm256_shuffle_epi8(move_sign::<N>(values), bytes_of_lanes)
            });
            let (low, high) = (_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d));
            let (upper_low, upper_high) = (_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d));
            let all = [
                _mm256_unpacklo_epi64(low, high),
                _mm256_unpackhi_epi64(low, high),
                _mm256_unpacklo_epi64(upper_low, upper_high),
                _mm256_unpackhi_epi64(upper_low, upper_high),
            ];
            for (plane, bytes) in planes.iter_mut().zip(all) {
                store(_mm256_permutevar8x32_epi32(bytes, order), &mut plane.as_chunks_mut().0[at]);
            }
        }
        let done = 32 * fours.len();
        portable::split_planes::<N>(&values[done..], planes.map(|plane| &mut plane[done..]));
    }

    pub fn join_planes<const N: usize>(planes: [&[u8]; N], values: &mut [u32]) {
        let (fours, rest) = values.as_chunks_mut::<32>();
        let done = 32 * fours.len();
        for (at, four) in fours.iter_mut().enumerate() {
            let plane = |plane: usize| match planes.get(plane) {
                Some(plane) => load(&plane.as_chunks().0[at]),
                None => _mm256_setzero_si256(),
            };
            let (low, high) = (_mm256_unpacklo_epi8(plane(0), plane(1)), _mm256_unpackhi_epi8(plane(0), plane(1)));
            let (upper_low, upper_high) =
                (_mm256_unpacklo_epi8(plane(2), plane(3)), _mm256_unpackhi_epi8(plane(2), plane(3)));
            // Half `h` of vector `i` has the values `16 h + 4 i` to `16 h + 4 i + 3`.
            let [a, b, c, d] = [
                _mm256_unpacklo_epi16(low, upper_low),
                _mm256_unpackhi_epi16(low, upper_low),
                _mm256_unpacklo_epi16(high, upper_high),
                _mm256_unpackhi_epi16(high, upper_high),
            ].map(|values| restore_sign::<N>(values));
            let ordered = [
                _mm256_permute2x128_si256::<0x20>(a, b),
                _mm256_permute2x128_si256::<0x20>(c, d),
                _mm256_permute2x128_si256::<0x31>(a, b),
                _mm256_permute2x128_si256::<0x31>(c, d),
            ];
            for (values, to) in ordered.into_iter().zip(four.as_chunks_mut().0) {
                store_u32s(values, to);
            }
        }
        portable::join_planes::<N>(planes.map(|plane| &plane[done..]), rest);
    }
}
