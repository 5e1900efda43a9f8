//! Values that are not 0, for `zstd`: 16 at a time. Byte planes are as fast with AVX2.

use super::super::portable;
use super::memory::*;
use std::arch::x86_64::*;

pub use super::super::avx2::{join_planes, split_planes};

with_avx512! {
    pub fn keep_values<const N: usize>(bytes: &[u8], mask: &mut [u8], kept: &mut [u32]) -> usize {
        let (groups, rest) = bytes.as_chunks::<N>().0.as_chunks::<16>();
        let (masks, mask) = mask.split_at_mut(2 * groups.len());
        let mut length = 0;
        for (group, mask) in groups.iter().zip(masks.as_chunks_mut().0) {
            let bytes = group.as_flattened();
            let values = match N {
                2 => _mm512_cvtepu16_epi32(_mm512_castsi512_si256(load_front(bytes))),
                _ => load(bytes.first_chunk().expect("64 bytes")),
            };
            let present = _mm512_test_epi32_mask(values, values);
            *mask = present.to_le_bytes();
            let room = kept[length..].first_chunk_mut().expect("room for 16 more than values");
            store_u32s(_mm512_maskz_compress_epi32(present, values), room);
            length += present.count_ones() as usize;
        }
        length + portable::keep_values::<N>(rest.as_flattened(), mask, &mut kept[length..])
    }

    pub fn spread_values<const N: usize>(mask: &[u8], values: &[u32], out: &mut [u8]) {
        let (groups, rest) = out.as_chunks_mut::<N>().0.as_chunks_mut::<16>();
        let (masks, mask) = mask.split_at(2 * groups.len());
        let mut next = 0;
        for (group, mask) in groups.iter_mut().zip(masks.as_chunks().0) {
            let present = u16::from_le_bytes(*mask);
            let kept = load_u32s(values[next..].first_chunk().expect("16 more than are kept"));
            let spread = _mm512_maskz_expand_epi32(present, kept);
            let bytes = group.as_flattened_mut();
            match N {
                2 => store_front(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(spread)), bytes),
                _ => store(spread, bytes.first_chunk_mut().expect("64 bytes")),
            }
            next += present.count_ones() as usize;
        }
        portable::spread_values::<N>(mask, &values[next..], rest.as_flattened_mut());
    }
}
