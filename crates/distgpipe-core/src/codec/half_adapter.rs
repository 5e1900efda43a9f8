//! Lets codecs for `F32` encode tensors of `F16` and `BF16`.
//!
//! Every `F16` and `BF16` value is also an `F32` value. So the adapter widens such a tensor before encoding, and
//! narrows the decoded values to the type in the frame's header: to the nearest number of that type, ties to even. The
//! body is that of the same values in `F32`, so the size of a body is the same for all three types.
//!
//! Decoded values may lie slightly outside the range of the original ones. Values beyond the range of the narrow type
//! become its largest number, so that finite values stay finite.

use super::half::{bf16_from_f32, f16_from_f32, f32_from_bf16, f32_from_f16};
use super::kernel_runner::KernelRunner;
use super::{check_out, Codec, CodecContext, CodecError, CodecForm, CodecId, Executor, TensorView};
use crate::wire::{DType, TensorMeta};
use std::sync::Arc;

/// A codec for `F32`, `F16` and `BF16`, made from one for `F32`.
pub(super) struct HalfPrecisionAdapter {
    inner: Box<dyn Codec>,
    /// The tensor in `F32`; a buffer that is reused.
    wide: Vec<u8>,
    runner: KernelRunner,
}

impl HalfPrecisionAdapter {
    pub fn around(inner: Box<dyn Codec>) -> Self {
        HalfPrecisionAdapter { inner, wide: Vec::new(), runner: KernelRunner::default() }
    }
}

/// The type that the inner codec gets.
fn wide(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::BF16 => DType::F32,
        other => other,
    }
}

impl Codec for HalfPrecisionAdapter {
    fn id(&self) -> CodecId {
        self.inner.id()
    }

    fn encoded_bytes(&self, dtype: DType, dims: &[usize]) -> usize {
        self.inner.encoded_bytes(wide(dtype), dims)
    }

    fn refuses_shape(&self, dims: &[usize]) -> bool {
        self.inner.refuses_shape(dims)
    }

    fn size_varies(&self) -> bool {
        self.inner.size_varies()
    }

    fn encode(
        &mut self,
        tensor: TensorView<'_>,
        context: &CodecContext<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        let dtype = wide(tensor.dtype);
        if dtype == tensor.dtype {
            return self.inner.encode(tensor, context, out);
        }
        let elements = tensor.elements()?;
        self.wide.resize(4 * elements, 0);
        let piece = self.runner.piece(elements, 1);
        let pieces = tensor.bytes.chunks(2 * piece).zip(self.wide.chunks_mut(4 * piece));
        self.runner.each(pieces, |(narrow, wide)| match tensor.dtype {
            DType::F16 => widen(narrow, wide, f32_from_f16),
            _ => widen(narrow, wide, f32_from_bf16),
        });
        self.inner.encode(TensorView { dtype, bytes: &self.wide, ..tensor }, context, out)
    }

    fn decode(&mut self, meta: &TensorMeta, body: &[u8], out: &mut [u8]) -> Result<(), CodecError> {
        let dtype = wide(meta.dtype);
        if dtype == meta.dtype {
            return self.inner.decode(meta, body, out);
        }
        // Checked before a buffer of twice the size is allocated.
        check_out(meta, out)?;
        let elements = out.len() / 2;
        self.wide.resize(4 * elements, 0);
        self.inner.decode(&TensorMeta { dtype, ..*meta }, body, &mut self.wide)?;
        let piece = self.runner.piece(elements, 1);
        let pieces = self.wide.chunks(4 * piece).zip(out.chunks_mut(2 * piece));
        self.runner.each(pieces, |(wide, narrow)| match meta.dtype {
            DType::F16 => narrow_to(wide, narrow, nearest_f16),
            _ => narrow_to(wide, narrow, nearest_bf16),
        });
        Ok(())
    }

    fn form(&self) -> Option<CodecForm> {
        self.inner.form()
    }

    fn check(&self, meta: &TensorMeta, body: &[u8]) -> Result<(), CodecError> {
        self.inner.check(&TensorMeta { dtype: wide(meta.dtype), ..*meta }, body)
    }

    fn wants_samples(&self) -> bool {
        self.inner.wants_samples()
    }

    fn kept_bytes_max(&self) -> u64 {
        self.inner.kept_bytes_max()
    }

    fn remembers(&self) -> bool {
        self.inner.remembers()
    }

    fn set_executor(&mut self, executor: Arc<dyn Executor>) {
        self.runner.set_executor(executor.clone());
        self.inner.set_executor(executor);
    }

    fn reset(&mut self) {
        self.inner.reset();
    }
}

fn widen(narrow: &[u8], wide: &mut [u8], value: impl Fn(u16) -> f32) {
    for (from, to) in narrow.chunks_exact(2).zip(wide.chunks_exact_mut(4)) {
        to.copy_from_slice(&value(u16::from_ne_bytes([from[0], from[1]])).to_ne_bytes());
    }
}

fn narrow_to(wide: &[u8], narrow: &mut [u8], nearest: impl Fn(f32) -> u16) {
    for (value, to) in super::floats(wide).zip(narrow.chunks_exact_mut(2)) {
        to.copy_from_slice(&nearest(value).to_ne_bytes());
    }
}

/// The nearest finite bfloat16 number. A NaN, which only a faulty peer sends, stays a NaN.
#[inline(always)]
fn nearest_bf16(value: f32) -> u16 {
    const LARGEST: f32 = f32::from_bits(0x7f7f_0000);
    if value.is_nan() {
        0x7fc0
    } else {
        bf16_from_f32(value.clamp(-LARGEST, LARGEST))
    }
}

/// The nearest finite half-precision number. A NaN stays a NaN.
#[inline(always)]
fn nearest_f16(value: f32) -> u16 {
    if value.is_nan() {
        0x7e00
    } else {
        f16_from_f32(value.clamp(-65504.0, 65504.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_too_large_for_the_narrow_type_becomes_its_largest_number() {
        for (value, bf16, f16) in [
            (1.0, 0x3f80, 0x3c00),
            (-f32::MAX, 0xff7f, 0xfbff),
            (65520.0, 0x4780, 0x7bff),
            (f32::INFINITY, 0x7f7f, 0x7bff),
            (f32::NAN, 0x7fc0, 0x7e00),
            // A NaN with all bits set would become −0 if it were rounded like a number.
            (f32::from_bits(0x7fff_ffff), 0x7fc0, 0x7e00),
            // Ties go to even.
            (1.0 + 2f32.powi(-8), 0x3f80, 0x3c04),
            (1.0 + 3.0 * 2f32.powi(-8), 0x3f82, 0x3c0c),
        ] {
            assert_eq!((nearest_bf16(value), nearest_f16(value)), (bf16, f16), "{value}");
        }
    }
}
