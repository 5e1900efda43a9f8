//! `raw`: the tensor's bytes, lossless. On a little-endian machine it takes no work.
//!
//! The wire is little-endian, so a big-endian machine reverses the bytes of every element. Received `Bool` tensors are
//! checked, because a `bool` that is neither 0 nor 1 is undefined behaviour in libtorch.

use super::{
    check_body, elements_of, BodyPart, Codec, CodecContext, CodecError, CodecId, Member, PartForm, TensorView,
};
use crate::wire::{DType, TensorMeta};

pub(super) const MEMBER: Member = Member {
    name: "raw",
    id: CodecId::Raw,
    examples: &["raw"],
    about: "the tensor's bytes, unencoded",
    parse: |arguments| arguments.none("raw", "raw, which has no parameter").map(|()| Box::new(Raw) as _),
};

/// The codec `raw`, which has no parameters and no state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Raw;

impl Codec for Raw {
    fn id(&self) -> CodecId {
        CodecId::Raw
    }

    fn encoded_bytes(&self, dtype: DType, dims: &[usize]) -> usize {
        elements_of(dims).saturating_mul(dtype.size_bytes())
    }

    fn is_lossless(&self) -> bool {
        true
    }

    fn body_parts(&self, dtype: DType, _: &[usize], body: &[u8], each: &mut dyn FnMut(BodyPart)) {
        each(BodyPart { form: PartForm::of(dtype), bytes: body.len() });
    }

    fn is_identity(&self, dtype: DType) -> bool {
        cfg!(target_endian = "little") && dtype != DType::Bool
    }

    fn encode(&mut self, tensor: TensorView<'_>, _: &CodecContext<'_>, out: &mut Vec<u8>) -> Result<(), CodecError> {
        tensor.elements()?;
        let start = out.len();
        out.extend_from_slice(tensor.bytes);
        to_or_from_little_endian(tensor.dtype, &mut out[start..]);
        Ok(())
    }

    fn decode(&mut self, meta: &TensorMeta, body: &[u8], out: &mut [u8]) -> Result<(), CodecError> {
        check_body(self, meta, body, out)?;
        if meta.dtype == DType::Bool {
            check_bools(body)?;
        }
        out.copy_from_slice(body);
        to_or_from_little_endian(meta.dtype, out);
        Ok(())
    }
}

fn check_bools(body: &[u8]) -> Result<(), CodecError> {
    match body.iter().position(|&byte| byte > 1) {
        None => Ok(()),
        Some(at) => Err(CodecError::NotBool { at, got: body[at] }),
    }
}

pub(super) fn to_or_from_little_endian(dtype: DType, bytes: &mut [u8]) {
    if cfg!(target_endian = "big") {
        for element in bytes.chunks_exact_mut(dtype.size_bytes()) {
            element.reverse();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Layout, Shape};

    #[test]
    fn a_bool_that_is_neither_is_refused() {
        let meta = TensorMeta {
            dtype: DType::Bool,
            layout: Layout::Contiguous,
            shape: Shape::new(&[3]).unwrap(),
            codec: CodecId::Raw,
        };
        let mut out = [9; 3];
        assert_eq!(Raw.decode(&meta, &[0, 1, 1], &mut out), Ok(()));
        assert_eq!(out, [0, 1, 1]);
        let refused = Raw.decode(&meta, &[0, 1, 2], &mut out);
        assert_eq!(refused, Err(CodecError::NotBool { at: 2, got: 2 }));
        // So a caller must not skip decoding.
        assert!(!Raw.is_identity(DType::Bool));
    }

    #[test]
    fn the_wire_is_little_endian() {
        let values = [1.5f32, -2.0];
        let memory: Vec<u8> = values.iter().flat_map(|v| v.to_ne_bytes()).collect();
        let wire: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let mut out = vec![7];
        let view = TensorView { dtype: DType::F32, dims: &[2], layout: Layout::Contiguous, bytes: &memory };
        Raw.encode(view, &CodecContext::default(), &mut out).unwrap();
        assert_eq!(out[1..], wire);
    }
}
