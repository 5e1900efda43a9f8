//! Loads and stores: whole vectors behind references, and parts of vectors at the end of a slice.

use super::super::super::tile::TILES;
use std::arch::x86_64::*;

with_avx512! {
    #[inline]
    pub fn load(from: &[u8; 64]) -> __m512i {
        // SAFETY: 64 bytes are readable behind the reference, and need not be aligned.
        unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
    }

    /// Loads up to 64 bytes, with zeros for those that are missing.
    #[inline]
    pub fn load_front(from: &[u8]) -> __m512i {
        // SAFETY: only as many bytes are read as the slice has.
        unsafe { _mm512_maskz_loadu_epi8(first_bytes(from.len()), from.as_ptr().cast()) }
    }

    #[inline]
    pub fn load_packable(from: &[u16; 32]) -> __m512i {
        // SAFETY: 64 bytes are readable behind the reference, and need not be aligned.
        unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
    }

    /// Loads 16 codes as 32-bit numbers.
    #[inline]
    pub fn load_codes(from: &[u16; 16]) -> __m512i {
        // SAFETY: 32 bytes are readable behind the reference, and need not be aligned.
        _mm512_cvtepu16_epi32(unsafe { _mm256_loadu_si256(from.as_ptr().cast()) })
    }

    /// Loads up to 16 codes as 32-bit numbers, with zeros for those that are missing.
    #[inline]
    pub fn load_codes_front(from: &[u16]) -> __m512i {
        // SAFETY: only as many codes are read as the slice has.
        let codes = unsafe { _mm256_maskz_loadu_epi16(first_bytes(from.len()) as u16, from.as_ptr().cast()) };
        _mm512_cvtepu16_epi32(codes)
    }

    #[inline]
    pub fn store(value: __m512i, to: &mut [u8; 64]) {
        // SAFETY: 64 bytes are writable behind the reference, and need not be aligned.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), value) }
    }

    /// Stores the first bytes of a vector, as many as fit.
    #[inline]
    pub fn store_front(value: __m512i, to: &mut [u8]) {
        // SAFETY: only as many bytes are written as the slice has.
        unsafe { _mm512_mask_storeu_epi8(to.as_mut_ptr().cast(), first_bytes(to.len()), value) }
    }

    #[inline]
    pub fn store_unpacked(value: __m512i, to: &mut [u16; 32]) {
        // SAFETY: 64 bytes are writable behind the reference, and need not be aligned.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), value) }
    }

    #[inline]
    pub fn store_codes(value: __m256i, to: &mut [u16; 16]) {
        // SAFETY: 32 bytes are writable behind the reference, and need not be aligned.
        unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), value) }
    }

    /// Stores the first of 16 codes, as many as fit.
    #[inline]
    pub fn store_codes_front(value: __m256i, to: &mut [u16]) {
        // SAFETY: only as many codes are written as the slice has.
        unsafe { _mm256_mask_storeu_epi16(to.as_mut_ptr().cast(), first_bytes(to.len()) as u16, value) }
    }

    /// A mask of the lowest `length` bits, at most 64.
    #[inline]
    pub fn first_bytes(length: usize) -> u64 {
        _bzhi_u64(u64::MAX, length.min(64) as u32)
    }

    #[inline]
    pub fn load_u32s(from: &[u32; 16]) -> __m512i {
        // SAFETY: 64 bytes are readable behind the reference, and need not be aligned.
        unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
    }

    #[inline]
    pub fn store_u32s(value: __m512i, to: &mut [u32; 16]) {
        // SAFETY: 64 bytes are writable behind the reference, and need not be aligned.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), value) }
    }

    #[inline]
    pub fn load_f32s(from: &[f32; 16]) -> __m512 {
        // SAFETY: 64 bytes are readable behind the reference, and need not be aligned.
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    }

    /// Loads eight numbers from index `at` on.
    #[inline]
    pub fn load_eight(from: &[f32; TILES], at: usize) -> __m256 {
        let from: &[f32; 8] = from[at..].first_chunk().expect("a multiple of eight");
        // SAFETY: 32 bytes are readable behind the reference, and need not be aligned.
        unsafe { _mm256_loadu_ps(from.as_ptr()) }
    }

    /// Stores the first numbers of a vector, as many as fit.
    #[inline]
    pub fn store_f32s_front(value: __m512, to: &mut [f32]) {
        // SAFETY: only as many numbers are written as the slice has.
        unsafe { _mm512_mask_storeu_ps(to.as_mut_ptr(), first_bytes(to.len()) as u16, value) }
    }

    #[inline]
    pub fn store_halves(value: __m128i, to: &mut [u16; 8]) {
        // SAFETY: 16 bytes are writable behind the reference, and need not be aligned.
        unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), value) }
    }

    #[inline]
    pub fn store_f64s(value: __m512d, to: &mut [f64; 8]) {
        // SAFETY: 64 bytes are writable behind the reference, and need not be aligned.
        unsafe { _mm512_storeu_pd(to.as_mut_ptr(), value) }
    }

    #[inline]
    pub fn load_f64s(from: &[f64; 8]) -> __m512d {
        // SAFETY: 64 bytes are readable behind the reference, and need not be aligned.
        unsafe { _mm512_loadu_pd(from.as_ptr()) }
    }

    #[inline]
    pub fn load_i32s(from: &[i32; 16]) -> __m512i {
        // SAFETY: 64 bytes are readable behind the reference, and need not be aligned.
        unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
    }
}
