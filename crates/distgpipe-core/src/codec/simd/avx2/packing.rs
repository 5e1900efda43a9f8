//! Packing and unpacking of codes, 16 at a time. Without `pext` and `pdep`, which are slow before Zen 3.

use super::super::super::bits::GROUP;
use super::super::portable;
use super::memory::*;
use std::arch::x86_64::*;

/// For codes of at most 8 bits in 16-bit lanes: the bytes of each lane, and the factor that moves the code to its upper
/// end. A vector has two groups of eight codes.
const fn narrow_unpacking(width: usize) -> ([u8; 32], [u16; 16]) {
    let (mut bytes, mut factors) = ([0x80; 32], [0; 16]);
    let mut at = 0;
    while at < 16 {
        let (byte, shift) = (at % GROUP * width / 8, at % GROUP * width % 8);
        bytes[2 * at] = byte as u8;
        if byte < 7 {
            bytes[2 * at + 1] = byte as u8 + 1;
        }
        factors[at] = 1 << (16 - width - shift);
        at += 1;
    }
    (bytes, factors)
}

/// For codes of 9 to 15 bits in 32-bit lanes: the bytes of each lane, and the shift that moves the code to its lower end.
/// A vector has one group of eight codes.
const fn wide_unpacking(width: usize) -> ([u8; 32], [i32; 8]) {
    let (mut bytes, mut shifts) = ([0x80; 32], [0; 8]);
    let mut at = 0;
    while at < 8 {
        let first = at * width / 8;
        let mut byte = 0;
        while byte < 4 {
            if first + byte < 16 {
                bytes[4 * at + byte] = (first + byte) as u8;
            }
            byte += 1;
        }
        shifts[at] = (at * width % 8) as i32;
        at += 1;
    }
    (bytes, shifts)
}

with_avx2! {
    /// Puts each four codes into the lowest `4 W` bits of their 64-bit lane.
    #[inline]
    fn join_fours<const W: usize>(codes: __m256i) -> __m256i {
        let codes = _mm256_and_si256(codes, _mm256_set1_epi16(portable::mask(W) as i16));
        let odd = _mm256_sll_epi32(_mm256_srli_epi32::<16>(codes), _mm_cvtsi32_si128(W as i32));
        let pairs = _mm256_or_si256(_mm256_and_si256(codes, _mm256_set1_epi32(0xffff)), odd);
        let odd = _mm256_sll_epi64(_mm256_srli_epi64::<32>(pairs), _mm_cvtsi32_si128(2 * W as i32));
        _mm256_or_si256(_mm256_and_si256(pairs, _mm256_set1_epi64x(0xffff_ffff)), odd)
    }

    /// Packs as many codes of four bits as fill whole vectors; returns their number.
    #[inline]
    fn pack_nibbles(codes: &[u16], out: &mut [u8]) -> usize {
        let (vectors, _) = codes.as_chunks::<64>();
        for (codes, room) in vectors.iter().zip(out.as_chunks_mut().0) {
            let bytes = |at: usize| {
                let [low, high] = [at, at + 1].map(|at| {
                    _mm256_and_si256(load_packable(&codes.as_chunks().0[at]), _mm256_set1_epi16(15))
                });
                // The first of two codes is in the lower half of a byte.
                _mm256_maddubs_epi16(_mm256_packus_epi16(low, high), _mm256_set1_epi16(0x1001))
            };
            // Both steps of packing interleave the halves of vectors.
            let mixed = _mm256_packus_epi16(bytes(0), bytes(2));
            store(_mm256_permutevar8x32_epi32(mixed, _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0)), room);
        }
        64 * vectors.len()
    }

    pub fn pack<const W: usize>(codes: &[u16], out: &mut [u8]) {
        if W == 16 {
            for (to, code) in out.as_chunks_mut().0.iter_mut().zip(codes) {
                *to = code.to_le_bytes();
            }
            return;
        }
        let mut done = if W == 4 { pack_nibbles(codes, out) } else { 0 };
        for sixteen in codes[done..].as_chunks::<16>().0 {
            // Each group of eight codes is stored as 8 or 16 bytes, of which the next group overwrites all but `W`.
            let Some(room) = out[done / GROUP * W..].get_mut(..W + if W <= 8 { 8 } else { 16 }) else { break };
            let fours = join_fours::<W>(load_packable(sixteen));
            if W <= 8 {
                let odd = _mm256_sll_epi64(_mm256_unpackhi_epi64(fours, fours), _mm_cvtsi32_si128(4 * W as i32));
                let eights = _mm256_or_si256(fours, odd);
                for (at, eight) in [_mm256_castsi256_si128(eights), _mm256_extracti128_si256::<1>(eights)].into_iter().enumerate() {
                    room[at * W..][..8].copy_from_slice(&_mm_cvtsi128_si64(eight).to_le_bytes());
                }
            } else {
                for (at, eight) in [_mm256_castsi256_si128(fours), _mm256_extracti128_si256::<1>(fours)].into_iter().enumerate() {
                    let (low, high) = (_mm_cvtsi128_si64(eight) as u64, _mm_extract_epi64::<1>(eight) as u64);
                    let word = u128::from(low) | u128::from(high) << (4 * W);
                    room[at * W..][..16].copy_from_slice(&word.to_le_bytes());
                }
            }
            done += 16;
        }
        portable::pack::<W>(&codes[done..], &mut out[done / GROUP * W..]);
    }

    pub fn unpack<const W: usize>(bytes: &[u8], out: &mut [u16]) {
        if W == 16 {
            for (to, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                *to = u16::from_le_bytes(*bytes);
            }
            return;
        }
        let mut done = 0;
        if W <= 8 {
            let (places, factors) = const { narrow_unpacking(if W <= 8 { W } else { 8 }) };
            let (places, factors) = (load(&places), load_packable(&factors));
            for sixteen in out.as_chunks_mut::<16>().0 {
                let Some(from) = bytes[done / GROUP * W..].get(..W + 8) else { break };
                let [low, high] = [0, W].map(|at| i64::from_le_bytes(*from[at..].first_chunk().expect("8 bytes")));
                let spread = _mm256_shuffle_epi8(_mm256_set_epi64x(0, high, 0, low), places);
                let upper = _mm256_mullo_epi16(spread, factors);
                store_unpacked(_mm256_srl_epi16(upper, _mm_cvtsi32_si128(16 - W as i32)), sixteen);
                done += 16;
            }
        } else {
            let (places, shifts) = const { wide_unpacking(if W > 8 { W } else { 9 }) };
            let (places, shifts) = (load(&places), load_i32s(&shifts));
            let mask = _mm256_set1_epi32(portable::mask(W).into());
            for eight in out.as_chunks_mut::<8>().0 {
                let Some(from) = bytes[done / GROUP * W..].first_chunk() else { break };
                let spread = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load_sixteen_bytes(from)), places);
                store_codes(narrow_codes(_mm256_and_si256(_mm256_srlv_epi32(spread, shifts), mask)), eight);
                done += 8;
            }
        }
        portable::unpack::<W>(&bytes[done / GROUP * W..], &mut out[done..]);
    }

    /// Eight 32-bit numbers below 2^16 as 16-bit numbers.
    #[inline]
    pub fn narrow_codes(codes: __m256i) -> __m128i {
        _mm_packus_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256::<1>(codes))
    }

    /// Sixteen 32-bit numbers below 2^16 as 16-bit numbers.
    #[inline]
    pub fn join_codes(low: __m256i, high: __m256i) -> __m256i {
        _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high))
    }
}
