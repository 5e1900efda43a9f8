//! Loads and stores of whole vectors behind references.

use std::arch::x86_64::*;

with_avx2! {
    #[inline]
    pub fn load(from: &[u8; 32]) -> __m256i {
        // SAFETY: 32 bytes are readable behind the reference, and need not be aligned.
        unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
    }

    #[inline]
    pub fn load_values(from: &[u8; 32]) -> __m256 {
        _mm256_castsi256_ps(load(from))
    }

    /// Loads up to eight values, and repeats `filler` for those that are missing.
    #[inline]
    pub fn load_values_front(from: &[u8], filler: [u8; 4]) -> __m256 {
        let mut bytes = [filler; 8];
        bytes.as_flattened_mut()[..from.len()].copy_from_slice(from);
        load_values(bytes.as_flattened().first_chunk().expect("32 bytes"))
    }

    #[inline]
    pub fn load_sixteen_bytes(from: &[u8; 16]) -> __m128i {
        // SAFETY: 16 bytes are readable behind the reference, and need not be aligned.
        unsafe { _mm_loadu_si128(from.as_ptr().cast()) }
    }

    #[inline]
    pub fn load_packable(from: &[u16; 16]) -> __m256i {
        // SAFETY: 32 bytes are readable behind the reference, and need not be aligned.
        unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
    }

    /// Loads eight codes as 32-bit numbers.
    #[inline]
    pub fn load_codes(from: &[u16; 8]) -> __m256i {
        // SAFETY: 16 bytes are readable behind the reference, and need not be aligned.
        _mm256_cvtepu16_epi32(unsafe { _mm_loadu_si128(from.as_ptr().cast()) })
    }

    #[inline]
    pub fn load_i32s(from: &[i32; 8]) -> __m256i {
        // SAFETY: 32 bytes are readable behind the reference, and need not be aligned.
        unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
    }

    #[inline]
    pub fn load_u32s(from: &[u32; 8]) -> __m256i {
        // SAFETY: 32 bytes are readable behind the reference, and need not be aligned.
        unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
    }

    #[inline]
    pub fn store_u32s(value: __m256i, to: &mut [u32; 8]) {
        // SAFETY: 32 bytes are writable behind the reference, and need not be aligned.
        unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), value) }
    }

    #[inline]
    pub fn load_f32s(from: &[f32; 8]) -> __m256 {
        // SAFETY: 32 bytes are readable behind the reference, and need not be aligned.
        unsafe { _mm256_loadu_ps(from.as_ptr()) }
    }

    #[inline]
    pub fn load_four_f32s(from: &[f32; 4]) -> __m128 {
        // SAFETY: 16 bytes are readable behind the reference, and need not be aligned.
        unsafe { _mm_loadu_ps(from.as_ptr()) }
    }

    #[inline]
    pub fn store(value: __m256i, to: &mut [u8; 32]) {
        // SAFETY: 32 bytes are writable behind the reference, and need not be aligned.
        unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), value) }
    }

    #[inline]
    pub fn store_values(value: __m256, to: &mut [u8; 32]) {
        store(_mm256_castps_si256(value), to);
    }

    #[inline]
    pub fn store_sixteen_bytes(value: __m128i, to: &mut [u8; 16]) {
        // SAFETY: 16 bytes are writable behind the reference, and need not be aligned.
        unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), value) }
    }

    #[inline]
    pub fn store_unpacked(value: __m256i, to: &mut [u16; 16]) {
        // SAFETY: 32 bytes are writable behind the reference, and need not be aligned.
        unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), value) }
    }

    #[inline]
    pub fn store_codes(value: __m128i, to: &mut [u16; 8]) {
        // SAFETY: 16 bytes are writable behind the reference, and need not be aligned.
        unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), value) }
    }

    #[inline]
    pub fn store_f32s(value: __m256, to: &mut [f32; 8]) {
        // SAFETY: 32 bytes are writable behind the reference, and need not be aligned.
        unsafe { _mm256_storeu_ps(to.as_mut_ptr(), value) }
    }

    /// Stores the first numbers of a vector, as many as fit.
    #[inline]
    pub fn store_f32s_front(value: __m256, to: &mut [f32]) {
        match to.first_chunk_mut() {
            Some(to) => store_f32s(value, to),
            None => {
                let mut all = [0.0; 8];
                store_f32s(value, &mut all);
                to.copy_from_slice(&all[..to.len()]);
            }
        }
    }

    #[inline]
    pub fn store_f64s(value: __m256d, to: &mut [f64; 4]) {
        // SAFETY: 32 bytes are writable behind the reference, and need not be aligned.
        unsafe { _mm256_storeu_pd(to.as_mut_ptr(), value) }
    }

    #[inline]
    pub fn each_i32(vector: __m256i) -> [i32; 8] {
        let mut bytes = [0; 32];
        store(vector, &mut bytes);
        std::array::from_fn(|at| i32::from_ne_bytes(*bytes[4 * at..].first_chunk().expect("4 bytes")))
    }
}
