//! `f16`, `bf16`: two bytes a value in IEEE half precision or bfloat16, rounded to nearest, ties to even.
//!
//! | text | significant bits | largest | good for |
//! | --- | --- | --- | --- |
//! | `f16` | 11 | 65504 | activations |
//! | `bf16` | 8 | 3.4e38 | gradients, which need range more than precision |
//!
//! A tensor with a finite value that would round to infinity is refused with [`CodecError::Overflow`]: the link sends
//! it raw and counts it, and training continues with the right numbers.

use super::kernel_runner::KernelRunner;
use super::TensorView;
use super::{check_body, check_f32, check_received, elements_of, floats, simd};
use super::{
    Arguments, BodyForm, BodyPart, Codec, CodecContext, CodecError, CodecForm, CodecId, Executor, Member, PartForm,
};
use crate::wire::{DType, TensorMeta};
use std::sync::Arc;

pub(super) const F16: Member = Member {
    name: "f16",
    id: CodecId::F16,
    examples: &["f16"],
    about: "IEEE half precision, 2 bytes a value",
    parse: |arguments| parse("f16", arguments, HalfFormat::F16),
};

pub(super) const BF16: Member = Member {
    name: "bf16",
    id: CodecId::BF16,
    examples: &["bf16"],
    about: "bfloat16, the upper half of a float, 2 bytes a value",
    parse: |arguments| parse("bf16", arguments, HalfFormat::BF16),
};

const EXPECTED: &str = "f16 or bf16, which have no parameter";

fn parse(name: &'static str, arguments: Arguments<'_>, format: HalfFormat) -> Result<Box<dyn Codec>, CodecError> {
    arguments.none(name, EXPECTED).map(|()| Box::new(Half::new(format)) as _)
}

/// The codec `f16` or `bf16`.
#[derive(Clone, Debug)]
pub struct Half {
    format: HalfFormat,
    runner: KernelRunner,
}

impl Half {
    /// The codec for this format.
    pub fn new(format: HalfFormat) -> Self {
        Half { format, runner: KernelRunner::default() }
    }
}

/// A floating-point format of two bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HalfFormat {
    /// IEEE half precision: 5 bits of exponent.
    F16,
    /// bfloat16, the upper half of an `f32`: 8 bits of exponent.
    BF16,
}

impl HalfFormat {
    /// The smallest magnitude that rounds to infinity, as the bits of an `f32`.
    fn overflow_bits(self) -> u32 {
        match self {
            HalfFormat::F16 => 65520f32.to_bits(),
            HalfFormat::BF16 => 0x7f7f_8000,
        }
    }
}

impl Codec for Half {
    fn id(&self) -> CodecId {
        match self.format {
            HalfFormat::F16 => CodecId::F16,
            HalfFormat::BF16 => CodecId::BF16,
        }
    }

    fn encoded_bytes(&self, _dtype: DType, dims: &[usize]) -> usize {
        elements_of(dims).saturating_mul(2)
    }

    fn body_parts(&self, _: DType, _: &[usize], body: &[u8], each: &mut dyn FnMut(BodyPart)) {
        each(BodyPart { form: PartForm::Values16, bytes: body.len() });
    }

    fn encode(&mut self, tensor: TensorView<'_>, _: &CodecContext<'_>, out: &mut Vec<u8>) -> Result<(), CodecError> {
        check_f32(self.id(), &tensor)?;
        let limit = self.format.overflow_bits();
        if self.runner.extremes(self.id(), tensor.bytes)?.magnitude_max() >= limit {
            let at = floats(tensor.bytes).position(|value| value.to_bits() & 0x7fff_ffff >= limit);
            return Err(CodecError::Overflow { codec: self.id(), at: at.unwrap_or(0) });
        }
        let level = self.runner.level;
        self.runner.append(tensor.bytes, 16, out, |bytes, out| match self.format {
            HalfFormat::F16 => simd::f16s(level, bytes, out),
            HalfFormat::BF16 => simd::bf16s(level, bytes, out),
        });
        Ok(())
    }

    fn decode(&mut self, meta: &TensorMeta, body: &[u8], out: &mut [u8]) -> Result<(), CodecError> {
        let elements = check_body(self, meta, body, out)?;
        let piece = self.runner.piece(elements, 1);
        let level = self.runner.level;
        self.runner.each(body.chunks(2 * piece).zip(out.chunks_mut(4 * piece)), |(bytes, out)| match self.format {
            HalfFormat::F16 => simd::values_of_f16s(level, bytes, out),
            HalfFormat::BF16 => simd::values_of_bf16s(level, bytes, out),
        });
        Ok(())
    }

    fn form(&self) -> Option<CodecForm> {
        Some(BodyForm::Half(self.format).into())
    }

    fn check(&self, meta: &TensorMeta, body: &[u8]) -> Result<(), CodecError> {
        check_received(self, meta, body)
    }

    fn set_executor(&mut self, executor: Arc<dyn Executor>) {
        self.runner.set_executor(executor);
    }
}

/// The nearest half-precision number, ties to even. The value must not be a NaN.
#[inline(always)]
pub(super) fn f16_from_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = (bits >> 16 & 0x8000) as u16;
    let magnitude = bits & 0x7fff_ffff;
    // Rebias the exponent from 127 to 15, and round off 13 bits: add half of the last kept bit, minus one if it is
    // even.
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + (magnitude >> 13 & 1)) >> 13;
    // Below 2^-14 the spacing is 2^-24, the same as that of `f32` from 0.5 on, so the addition rounds.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let half = if magnitude < 113 << 23 { subnormal } else { normal.min(0x7c00) };
    sign | half as u16
}

/// Converts a half-precision number.
#[inline(always)]
pub fn f32_from_f16(half: u16) -> f32 {
    let sign = u32::from(half & 0x8000) << 16;
    let magnitude = u32::from(half & 0x7fff) << 13;
    let normal = magnitude + (112 << 23);
    // NaNs become quiet, as in hardware conversions.
    let special = (magnitude + (224 << 23)) | if half & 0x3ff == 0 { 0 } else { 0x0040_0000 };
    // Subtracting the implicit leading one normalizes.
    let subnormal = (f32::from_bits(magnitude + (113 << 23)) - f32::from_bits(113 << 23)).to_bits();
    let bits = match half & 0x7c00 {
        0 => subnormal,
        0x7c00 => special,
        _ => normal,
    };
    f32::from_bits(sign | bits)
}

#[inline(always)]
pub(super) fn bf16_from_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

/// Converts a bfloat16 number.
#[inline(always)]
pub fn f32_from_bf16(half: u16) -> f32 {
    f32::from_bits(u32::from(half) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Layout;
    use proptest::prelude::*;

    /// The value according to the standard.
    fn f16_by_definition(half: u16) -> f64 {
        let (exponent, fraction) = (i32::from(half >> 10 & 31), f64::from(half & 0x3ff));
        let magnitude = match exponent {
            0 => fraction * 2f64.powi(-24),
            31 if fraction == 0.0 => f64::INFINITY,
            31 => f64::NAN,
            _ => (1024.0 + fraction) * 2f64.powi(exponent - 25),
        };
        if half & 0x8000 == 0 {
            magnitude
        } else {
            -magnitude
        }
    }

    #[test]
    fn every_half_means_what_the_standard_says_and_comes_back() {
        for half in 0..=u16::MAX {
            let (value, expected) = (f32_from_f16(half), f16_by_definition(half));
            assert!(f64::from(value) == expected || value.is_nan() && expected.is_nan(), "{half:04x}: {value}");
            if !value.is_nan() {
                assert_eq!(f16_from_f32(value), half);
            }
        }
    }

    #[test]
    fn halfway_goes_to_the_even_one() {
        // Every midpoint between two neighbours, and the values next to it in `f32`.
        for half in 0..0x7bff_u16 {
            let (low, high) = (f16_by_definition(half), f16_by_definition(half + 1));
            let middle = ((low + high) / 2.0) as f32;
            let even = half + (half & 1);
            assert_eq!(f16_from_f32(middle), even, "{middle}");
            assert_eq!(f16_from_f32(-middle), even | 0x8000, "{middle}");
            assert_eq!(f16_from_f32(f32::from_bits(middle.to_bits() - 1)), half);
            assert_eq!(f16_from_f32(f32::from_bits(middle.to_bits() + 1)), half + 1);
        }
        assert_eq!(f16_from_f32(65519.996), 0x7bff);
        assert_eq!(f16_from_f32(65520.0), 0x7c00);
        for half in [0u16, 1, 0x3f80, 0x3f81, 0x7f7e] {
            let middle = f32::from_bits(u32::from(half) << 16 | 0x8000);
            assert_eq!(bf16_from_f32(middle), half + (half & 1));
            assert_eq!(bf16_from_f32(f32::from_bits(middle.to_bits() - 1)), half);
            assert_eq!(bf16_from_f32(f32::from_bits(middle.to_bits() + 1)), half + 1);
        }
    }

    #[test]
    fn what_would_become_infinite_is_refused() {
        for (mut codec, largest, over) in [
            (Half::new(HalfFormat::F16), 65519.996f32, 65520.0f32),
            (Half::new(HalfFormat::BF16), f32::from_bits(0x7f7f_7fff), f32::from_bits(0x7f7f_8000)),
        ] {
            let mut encode = |values: [f32; 3]| {
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
                let mut out = Vec::new();
                let view = TensorView { dtype: DType::F32, dims: &[3], layout: Layout::Contiguous, bytes: &bytes };
                codec.encode(view, &CodecContext::default(), &mut out).map(|()| out.len())
            };
            assert_eq!(encode([1.0, -largest, largest]), Ok(6));
            let refused = encode([1.0, 2.0, -over]);
            assert_eq!(refused, Err(CodecError::Overflow { codec: codec.id(), at: 2 }));
            assert!(refused.unwrap_err().refuses_tensor());
        }
    }

    proptest! {
        #[test]
        fn the_nearest_half_is_taken(magnitude in 0..65520f32.to_bits(), negative in any::<bool>()) {
            let value = f32::from_bits(magnitude | u32::from(negative) << 31);
            let got = f16_from_f32(value);
            let error = |half: u16| (f16_by_definition(half) - f64::from(value)).abs();
            for other in [got.wrapping_sub(1), got.wrapping_add(1)] {
                prop_assert!(error(got) <= error(other) || error(other).is_nan());
            }
        }
    }
}
