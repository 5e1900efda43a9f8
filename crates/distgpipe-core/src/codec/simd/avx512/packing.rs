//! Packing and unpacking of codes, 32 at a time.

use super::super::super::bits::packed_bytes;
use super::super::portable;
use super::memory::*;
use std::arch::x86_64::*;

/// The sources of the bytes of packed codes: two permutations whose results are combined.
struct Packing {
    first: [u8; 64],
    first_used: u64,
    second: [u8; 64],
    second_used: u64,
}

/// Each 64-bit lane has four codes in its lowest `4 W` bits; in odd lanes they are half a byte higher if `W` is odd. So
/// the first byte of an even lane is whole, and the first byte of the next odd lane completes its last byte.
const fn packing(width: usize) -> Packing {
    let mut packing = Packing { first: [0; 64], first_used: 0, second: [0; 64], second_used: 0 };
    let mut byte = 0;
    while byte < 4 * width {
        let (pair, within) = (byte / width, byte % width);
        if within < width.div_ceil(2) {
            packing.first[byte] = (pair * 16 + within) as u8;
            packing.first_used |= 1 << byte;
        }
        if within >= width / 2 {
            packing.second[byte] = (pair * 16 + 8 + within - width / 2) as u8;
            packing.second_used |= 1 << byte;
        }
        byte += 1;
    }
    packing
}

/// For each byte of the unpacked codes, the byte that it begins in, and the bit in its lane.
struct Unpacking {
    bytes: [u8; 64],
    shifts: [u8; 64],
}

const fn unpacking(width: usize) -> Unpacking {
    let mut unpacking = Unpacking { bytes: [0; 64], shifts: [0; 64] };
    let mut byte = 0;
    while byte < 64 {
        let (lane, within) = (byte / 8, byte % 8);
        let bit = lane * 4 * width;
        unpacking.bytes[byte] = (bit / 8 + within) as u8;
        unpacking.shifts[byte] = ((bit % 8 + within / 2 * width + within % 2 * 8) % 64) as u8;
        byte += 1;
    }
    unpacking
}

with_avx512! {
    /// Packs 32 codes into the lowest `4 W` bytes.
    #[inline]
    fn join<const W: usize>(codes: __m512i) -> __m512i {
        let Packing { first, first_used, second, second_used } = const { packing(W) };
        let mask = (1u64 << W) - 1;
        let masked = |value: __m512i, mask: u64| _mm512_and_si512(value, _mm512_set1_epi64(mask as i64));
        let both = mask | mask << 32;
        let high = _mm512_srlv_epi32(codes, _mm512_set1_epi32(16 - W as i32));
        let twos = _mm512_or_si512(masked(codes, both), masked(high, both << W));
        let mask = (1u64 << (2 * W)) - 1;
        let high = _mm512_srlv_epi64(twos, _mm512_set1_epi64(32 - 2 * W as i64));
        let fours = _mm512_or_si512(masked(twos, mask), masked(high, mask << (2 * W)));
        let shift = 4 * (W as i64 % 2);
        let fours = _mm512_sllv_epi64(fours, _mm512_set_epi64(shift, 0, shift, 0, shift, 0, shift, 0));
        _mm512_or_si512(
            _mm512_maskz_permutexvar_epi8(first_used, load(&first), fours),
            _mm512_maskz_permutexvar_epi8(second_used, load(&second), fours),
        )
    }

    pub fn pack<const W: usize>(codes: &[u16], out: &mut [u8]) {
        let (groups, rest) = codes.as_chunks::<32>();
        let mut at = 0;
        for group in groups {
            let bytes = join::<W>(load_packable(group));
            // Bytes written beyond these codes are overwritten by the next ones.
            match out[at..].first_chunk_mut() {
                Some(room) => store(bytes, room),
                None => store_front(bytes, &mut out[at..at + 4 * W]),
            }
            at += 4 * W;
        }
        portable::pack::<W>(rest, &mut out[at..]);
    }

    /// Unpacks 32 codes from the lowest `4 W` bytes.
    #[inline]
    fn split<const W: usize>(bytes: __m512i) -> __m512i {
        let Unpacking { bytes: from, shifts } = const { unpacking(W) };
        let lanes = _mm512_permutexvar_epi8(load(&from), bytes);
        let codes = _mm512_multishift_epi64_epi8(load(&shifts), lanes);
        _mm512_and_si512(codes, _mm512_set1_epi16(portable::mask(W) as i16))
    }

    pub fn unpack<const W: usize>(bytes: &[u8], out: &mut [u16]) {
        let (groups, rest) = out.as_chunks_mut::<32>();
        let mut at = 0;
        for group in groups {
            let from = match bytes[at..].first_chunk() {
                Some(from) => load(from),
                None => load_front(&bytes[at..]),
            };
            store_unpacked(split::<W>(from), group);
            at += 4 * W;
        }
        portable::unpack::<W>(&bytes[at..][..packed_bytes(rest.len(), W as u32)], rest);
    }
}
