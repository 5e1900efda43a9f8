//! Rounding to codes in `f32`, twice as many at a time as in `f64`, where it certainly gives the same codes.
//!
//! A code is `(value − lo) · per_step` to nearest, by definition with the rounding of `f64`. In `f32`, the difference
//! and the reciprocal have a relative error of 2^-24 each, so the result is off by less than `(code_max + 1) · 2^-23`.
//! If it is farther than that from the middle between two codes, both round to the same code. Few values are nearer;
//! these are computed in `f64`.

use super::super::super::grid::Quantizer;
use super::memory::*;
use super::{each, packing::join_codes};
use std::arch::x86_64::*;

/// The largest code for which few values are too near the middle between two codes.
const CODE_MAX: u16 = 4095;

/// 1.5 · 2^23: numbers of this size have a spacing of 1, so adding it rounds, and the lowest bits are the code.
const ROUND: f32 = 12_582_912.0;

/// How far from its code a value may be, in steps, for its rounding to be certain.
#[derive(Clone, Copy)]
pub struct SingleRounding {
    bound: f32,
    code_max: u16,
}

/// Whether an `f32` has the range for computing with this number and the values it belongs to: it is 0, or from 2^-100
/// to 2^100.
#[inline(always)]
pub fn is_ordinary(number: f64) -> bool {
    const END: f64 = (1u128 << 100) as f64;
    number == 0.0 || (1.0 / END..=END).contains(&number.abs())
}

with_avx2! {
    /// The codes of values in the lower halves of 32-bit lanes, and how far the values are from them, in steps. Both are
    /// meaningless if the distance is too large.
    #[inline]
    pub fn round_single(values: __m256, lo: __m256, per_step: __m256) -> (__m256i, __m256) {
        let distance = _mm256_sub_ps(values, lo);
        let rounded = _mm256_fmadd_ps(distance, per_step, _mm256_set1_ps(ROUND));
        let error = _mm256_fmsub_ps(distance, per_step, _mm256_sub_ps(rounded, _mm256_set1_ps(ROUND)));
        let codes = _mm256_and_si256(_mm256_castps_si256(rounded), _mm256_set1_epi32(0xffff));
        (codes, _mm256_andnot_ps(_mm256_set1_ps(-0.0), error))
    }
}

impl SingleRounding {
    /// `None` if the codes are too large.
    #[inline(always)]
    pub fn new(code_max: u16) -> Option<SingleRounding> {
        // Twice the largest error, relative to a spacing of 2^-22.
        let margin = (f32::from(code_max) + 1.0) / (1u32 << 22) as f32;
        (code_max <= CODE_MAX).then_some(SingleRounding { bound: 0.5 - margin, code_max })
    }

    /// Whether values at these distances from their codes are certain to have them. An invalid distance is not.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
    pub fn is_sure(self, distances: __m256) -> bool {
        _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_NLT_UQ>(distances, _mm256_set1_ps(self.bound))) == 0
    }

    /// Computes the codes of a tile, of which `lo` and `per_step` are ordinary; false if some are not certain, which are
    /// then meaningless in `out`.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
    pub fn codes(self, bytes: &[u8], quantizer: Quantizer, out: &mut [u16]) -> bool {
        let (lo, per_step) = (_mm256_set1_ps(quantizer.lo as f32), _mm256_set1_ps(quantizer.per_step as f32));
        let code_max = _mm256_set1_epi16(self.code_max as i16);
        let mut farthest = _mm256_setzero_ps();
        each(bytes, out, |sixteen: &[u8; 64], room| {
            let [low, high] = [0, 1].map(|half| {
                let values = load_values(&sixteen.as_chunks().0[half]);
                let (codes, distance) = round_single(values, lo, per_step);
                farthest = _mm256_max_ps(farthest, distance);
                codes
            });
            store_unpacked(_mm256_min_epu16(join_codes(low, high), code_max), room);
        });
        self.is_sure(farthest)
    }
}
