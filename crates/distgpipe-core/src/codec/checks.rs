//! The checks that a codec makes before it encodes or decodes.

use super::{Codec, CodecError, CodecId, TensorView};
use crate::wire::{DType, TensorMeta, DIMS_MAX};

/// The number of elements of a tensor with these dimensions; `usize::MAX` if the product overflows.
pub(super) fn elements_of(dims: &[usize]) -> usize {
    if dims.contains(&0) {
        return 0;
    }
    dims.iter().fold(1, |product: usize, &dim| product.saturating_mul(dim))
}

/// Checks that a tensor to encode is `F32` and that its bytes match its dimensions; returns its number of elements.
pub(super) fn check_f32(codec: CodecId, tensor: &TensorView<'_>) -> Result<usize, CodecError> {
    let elements = tensor.elements()?;
    if tensor.dtype != DType::F32 {
        return Err(CodecError::DType { codec, got: tensor.dtype });
    }
    Ok(elements)
}

/// Checks that a header names this codec and a type it decodes to, and that `out` is as long as the decoded tensor.
pub(super) fn check_meta(codec: CodecId, meta: &TensorMeta, out: &[u8]) -> Result<(), CodecError> {
    check_codec(codec, meta)?;
    if codec != CodecId::Raw && meta.dtype != DType::F32 {
        return Err(CodecError::DType { codec, got: meta.dtype });
    }
    check_out(meta, out)
}

/// Checks that a header names this codec.
pub(super) fn check_codec(codec: CodecId, meta: &TensorMeta) -> Result<(), CodecError> {
    if meta.codec == codec {
        return Ok(());
    }
    Err(CodecError::WrongCodec { expected: codec, got: meta.codec })
}

/// Checks that `out` is as long as the decoded tensor.
pub(super) fn check_out(meta: &TensorMeta, out: &[u8]) -> Result<(), CodecError> {
    let decoded = meta.decoded_bytes();
    if out.len() as u64 == decoded {
        return Ok(());
    }
    Err(CodecError::OutLength { expected: decoded, got: out.len() as u64 })
}

/// [`check_meta`] for a codec whose bodies have a fixed length, which is checked too; returns the number of elements.
pub(super) fn check_body(codec: &impl Codec, meta: &TensorMeta, body: &[u8], out: &[u8]) -> Result<usize, CodecError> {
    check_meta(codec.id(), meta, out)?;
    check_length(codec, meta, body)?;
    Ok(out.len() / meta.dtype.size_bytes())
}

/// As [`check_body`], for a body of `F32` values that this crate does not decode.
pub(super) fn check_received(codec: &impl Codec, meta: &TensorMeta, body: &[u8]) -> Result<(), CodecError> {
    check_codec(codec.id(), meta)?;
    if meta.dtype != DType::F32 {
        return Err(CodecError::DType { codec: codec.id(), got: meta.dtype });
    }
    check_length(codec, meta, body)
}

fn check_length(codec: &impl Codec, meta: &TensorMeta, body: &[u8]) -> Result<(), CodecError> {
    let mut dims = [0; DIMS_MAX];
    dims.iter_mut().zip(meta.shape.dims()).for_each(|(to, &dim)| *to = dim as usize);
    let expected = codec.encoded_bytes(meta.dtype, &dims[..meta.shape.rank()]) as u64;
    if body.len() as u64 != expected {
        return Err(CodecError::BodyLength { codec: codec.id(), expected, got: body.len() as u64 });
    }
    Ok(())
}
