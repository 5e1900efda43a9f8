//! Quantization grids: the evenly spaced values that `uniform`, `sort` and `tile` use.
//!
//! A grid is `lo + code · step` for `code` from 0 to `2^Q − 1`. Quantizing and dequantizing is done in `f64`, where the
//! product of code and step is exact and the sum keeps 53 bits; only the rounding of the decoded value to `f32` is
//! visible. The result does not depend on how many values are processed together, so all kernels give the same bits.

use super::{CodecError, CodecId};

/// The largest code of this many bits.
pub(super) const fn code_max(bits: u32) -> u16 {
    u16::MAX >> (16 - bits)
}

/// Evenly spaced values from `lo` upwards. `step` is at least 0, and both are finite.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Grid {
    pub lo: f64,
    pub step: f64,
}

impl Grid {
    /// The grid over a range, with `lo` and `step` representable as `f32`.
    ///
    /// The step is rounded to nearest, or upwards if the grid would otherwise end more than half a step below `hi`,
    /// which happens with denormal numbers. `None` if the step or the grid's end overflows an `f32`.
    pub fn over(lo: f32, hi: f32, code_max: u16) -> Option<Grid> {
        let exact = (f64::from(hi) - f64::from(lo)) / f64::from(code_max);
        let mut step = exact as f32;
        let reach = f64::from(lo) + (f64::from(code_max) + 0.5) * f64::from(step);
        if reach < f64::from(hi) {
            step = f32::from_bits(step.to_bits() + 1);
        }
        let grid = |step: f32| Grid { lo: lo.into(), step: step.into() };
        // At the end of the range of an `f32`, rounding the step up would make the last value infinite.
        if step.is_finite() && grid(step).end(code_max).is_infinite() {
            step = f32::from_bits(step.to_bits() - 1);
        }
        grid(step).end(code_max).is_finite().then_some(grid(step))
    }

    /// The grid in a received body; an error if not all of its values are finite.
    pub fn from_peer(codec: CodecId, at: usize, lo: f32, step: f32, code_max: u16) -> Result<Grid, CodecError> {
        let grid = Grid { lo: lo.into(), step: step.into() };
        // If `lo` or `step` is not finite, neither is the end.
        let valid = step >= 0.0 && grid.end(code_max).is_finite();
        valid.then_some(grid).ok_or(CodecError::Grid { codec, at })
    }

    /// The value of a code.
    #[inline(always)]
    pub fn value(self, code: u16) -> f32 {
        (self.lo + f64::from(code) * self.step) as f32
    }

    /// The value of a code, clamped to finite numbers: the last value of a grid whose step was rounded up may overflow.
    #[inline(always)]
    pub fn value_within(self, code: u16) -> f32 {
        let value = self.value(code);
        let value = if value < f32::MAX { value } else { f32::MAX };
        if value > f32::MIN {
            value
        } else {
            f32::MIN
        }
    }

    /// Whether `lo + code · step` needs no rounding in `f64`, for all codes up to `code_max`.
    pub fn is_exact(self, code_max: u16) -> bool {
        // A finite number that is not 0 is a multiple of 2 to the power of the place of its lowest bit.
        let exponent = |number: f64| (number.to_bits() >> 52 & 0x7ff) as i32 - 1023;
        let lowest = |number: f64| match number.to_bits() << 12 {
            _ if number == 0.0 => i32::MAX,
            0 => exponent(number),
            fraction => exponent(number) - 52 + (fraction >> 12).trailing_zeros() as i32,
        };
        let bound = self.lo.abs() + f64::from(code_max) * self.step.abs();
        // The bound was rounded, so sums may have one place more.
        bound == 0.0 || exponent(bound) + 1 - lowest(self.lo).min(lowest(self.step)) < 53
    }

    /// The quantizer of this grid.
    pub fn quantizer(self, code_max: u16) -> Quantizer {
        Quantizer { lo: self.lo, per_step: self.per_step(), code_max }
    }

    fn end(self, code_max: u16) -> f32 {
        self.value(code_max)
    }

    /// The reciprocal of the step; 0 if the step is 0, so that every code is 0.
    #[inline(always)]
    pub fn per_step(self) -> f64 {
        if self.step > 0.0 {
            1.0 / self.step
        } else {
            0.0
        }
    }
}

/// Converts values, from `lo` to half a step above the grid's end, to codes: `(value − lo) · per_step` rounded to
/// nearest, ties to even, at most `code_max`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Quantizer {
    pub lo: f64,
    pub per_step: f64,
    pub code_max: u16,
}

impl Quantizer {
    #[inline(always)]
    pub fn code(self, value: f32) -> u16 {
        // 1.5 · 2^52: numbers of this size have a spacing of 1, so the addition rounds and the lowest bits are the
        // code.
        const ROUND: f64 = 6755399441055744.0;
        let steps = (f64::from(value) - self.lo) * self.per_step;
        ((steps + ROUND).to_bits() as u32).min(self.code_max.into()) as u16
    }

    /// One of the two codes around a value, chosen by a `random` number from 0 to 1 such that the expected decoded
    /// value is the value. A value within [`NEAR`] of a code gets that code.
    #[inline(always)]
    pub fn code_stochastic(self, value: f32, random: f64) -> u16 {
        let code_max = f64::from(self.code_max);
        let steps = ((f64::from(value) - self.lo) * self.per_step).min(code_max).max(0.0);
        let below = steps as i32;
        let above = steps - f64::from(below);
        let up = above > NEAR && (above >= 1.0 - NEAR || above + random >= 1.0);
        below as u16 + u16::from(up)
    }
}

/// Within this fraction of a step from a code, stochastic rounding chooses that code. So a value that was decoded from
/// a code, which has a rounding error, is encoded to the same code again.
pub(super) const NEAR: f64 = 1.0 / 1024.0;

/// The random number from 0 to 1 of an element. It depends on `key` and the element's index alone, so the order of
/// processing, the threads and the vector width do not matter. The mixing function is Wellons' `lowbias32`.
#[inline(always)]
pub(super) fn random(key: u32, element: u32) -> f64 {
    let mut mixed = element ^ key;
    mixed = (mixed ^ mixed >> 16).wrapping_mul(MIX[0]);
    mixed = (mixed ^ mixed >> 15).wrapping_mul(MIX[1]);
    mixed ^= mixed >> 16;
    f64::from(mixed >> 8) * RANDOM_UNIT
}

/// The multipliers of [`random`].
pub(super) const MIX: [u32; 2] = [0x7feb_352d, 0x846c_a68b];

/// The spacing of the random numbers.
pub(super) const RANDOM_UNIT: f64 = 1.0 / 16_777_216.0;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_range_without_end_has_no_grid() {
        assert!(Grid::over(f32::MIN, f32::MAX, 1).is_none());
        let widest = Grid::over(f32::MIN, f32::MAX, 3).unwrap();
        assert!(widest.value(3).is_finite());
        assert!(f64::from(widest.value(3)) > 0.999_999 * f64::from(f32::MAX));
    }

    #[test]
    fn a_step_below_the_smallest_number_does_not_vanish() {
        let smallest = f32::from_bits(1);
        let grid = Grid::over(0.0, smallest, 63).unwrap();
        assert_eq!(grid.step, f64::from(smallest));
        assert_eq!(grid.value(grid.quantizer(63).code(smallest)), smallest);
    }

    #[test]
    fn a_peer_cannot_describe_infinite_values() {
        let grid = |lo, step| Grid::from_peer(CodecId::Uniform, 0, lo, step, 255);
        assert!(grid(1.0, 0.5).is_ok());
        assert!(grid(-0.0, 0.0).is_ok());
        for (lo, step) in
            [(f32::NAN, 1.0), (0.0, f32::NAN), (f32::INFINITY, 0.0), (0.0, -1.0), (0.0, f32::MAX), (f32::MAX, 1e37)]
        {
            assert_eq!(grid(lo, step), Err(CodecError::Grid { codec: CodecId::Uniform, at: 0 }), "{lo} {step}");
        }
    }

    proptest! {
        #[test]
        fn rounding_by_addition_is_rounding(steps in -0.4f64..65535.4, max in 0u16..) {
            let got = Quantizer { lo: 1.0 - steps, per_step: 1.0, code_max: max }.code(1.0);
            // The rounded number is 1 − (1 − steps), which differs slightly from steps.
            let steps = 1.0 - (1.0 - steps);
            prop_assert_eq!(f64::from(got), steps.round_ties_even().clamp(0.0, f64::from(max)));
        }

        #[test]
        fn values_that_are_exact_in_f64_are_those_of_a_fused_multiply_add(
            lo in prop_oneof![-1.0f32..1.0, Just(0.0), any::<f32>()],
            step in prop_oneof![0.0f32..1.0, Just(0.0), any::<f32>()],
            bits in 1u32..=16,
            code in any::<u16>(),
        ) {
            prop_assume!(lo.is_finite() && step.is_finite());
            let (step, max) = (step.abs(), code_max(bits));
            let grid = Grid { lo: lo.into(), step: step.into() };
            let code = code & max;
            if grid.is_exact(max) {
                prop_assert_eq!(grid.value(code).to_bits(), f32::from(code).mul_add(step, lo).to_bits());
            }
            // Numbers of similar size are, or nothing would be gained.
            let similar = lo == 0.0 || (lo / 4096.0..lo * 4096.0).contains(&step);
            prop_assert!(!similar || bits > 12 || grid.is_exact(max));
        }

        #[test]
        fn a_value_is_half_a_step_from_its_code(a in any::<f32>(), b in any::<f32>(), at in 0.0f64..=1.0, bits in 1u32..=16) {
            prop_assume!(a.is_finite() && b.is_finite());
            let (lo, hi) = (a.min(b), a.max(b));
            let max = code_max(bits);
            let Some(grid) = Grid::over(lo, hi, max) else { return Ok(()) };
            let value = ((f64::from(lo) + at * (f64::from(hi) - f64::from(lo))) as f32).clamp(lo, hi);
            let back = grid.value(grid.quantizer(max).code(value));
            // The step was rounded to 24 bits, and so is the value.
            let rounding = f64::from(lo.abs().max(hi.abs())) * 2f64.powi(-23) + f64::from(f32::from_bits(1));
            let error = (f64::from(back) - f64::from(value)).abs();
            prop_assert!(error <= grid.step / 2.0 + rounding, "{} → {}: {} > {} / 2", value, back, error, grid.step);
        }
    }
}
