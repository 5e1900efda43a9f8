//! The codec inside a wrapper such as `feedback(tile:4)`.
//!
//! There are two instances, because a codec either encodes or decodes. At the sending end the second one decodes what
//! the first has encoded, so that the sender knows what the receiver gets. At the receiving end it decodes the bodies.

use super::{
    parse_f32, Arguments, BodyPart, Codec, CodecContext, CodecError, CodecForm, CodecId, Executor, TensorView,
};
use crate::wire::{DType, Shape, TensorMeta, DIMS_MAX};
use std::sync::Arc;

pub(super) struct WrappedCodec {
    encoder: Box<dyn Codec>,
    decoder: Box<dyn Codec>,
}

impl WrappedCodec {
    /// Makes the codec in a wrapper's parentheses. It must be lossy, or the wrapper would have nothing to correct, and
    /// must not be a wrapper itself, because each of two nested wrappers would mistake the other's corrections for
    /// values.
    pub fn parse(wrapper: &'static str, expected: &'static str, arguments: Arguments<'_>) -> Result<Self, CodecError> {
        let given = arguments.parameter.unwrap_or("");
        let inner = arguments.inner.filter(|text| !text.is_empty());
        let text = inner.ok_or_else(|| CodecError::parameter(wrapper, expected, given))?;
        let encoder = parse_f32(text)?;
        // The body is the same with `zstd` outside, and the sender need not decompress what it has compressed.
        if encoder.id() == CodecId::Zstd {
            return Err(CodecError::CompressedInside { got: super::beginning(text) });
        }
        if [CodecId::Raw, CodecId::Feedback, CodecId::Delta].contains(&encoder.id()) {
            return Err(CodecError::Wrapped { codec: wrapper, got: super::beginning(text) });
        }
        Ok(WrappedCodec { encoder, decoder: parse_f32(text)? })
    }

    pub fn encoded_bytes(&self, dtype: DType, dims: &[usize]) -> usize {
        self.encoder.encoded_bytes(dtype, dims)
    }

    pub fn refuses_shape(&self, dims: &[usize]) -> bool {
        self.encoder.refuses_shape(dims)
    }

    pub fn size_varies(&self) -> bool {
        self.encoder.size_varies()
    }

    pub fn body_parts(&self, dtype: DType, dims: &[usize], body: &[u8], each: &mut dyn FnMut(BodyPart)) {
        self.encoder.body_parts(dtype, dims, body, each);
    }

    pub fn form(&self) -> Option<CodecForm> {
        self.encoder.form()
    }

    /// Checks a body of this codec whose header names the wrapper.
    pub fn check(&self, meta: &TensorMeta, body: &[u8]) -> Result<(), CodecError> {
        self.decoder.check(&TensorMeta { codec: self.decoder.id(), ..*meta }, body)
    }

    /// Encodes a tensor without decoding it.
    pub fn encode(
        &mut self,
        tensor: TensorView<'_>,
        context: &CodecContext<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        self.encoder.encode(tensor, context, out)
    }

    /// Decodes a body of this codec whose header names the wrapper.
    pub fn decode(&mut self, meta: &TensorMeta, body: &[u8], out: &mut [u8]) -> Result<(), CodecError> {
        self.decoder.decode(&TensorMeta { codec: self.decoder.id(), ..*meta }, body, out)
    }

    /// Appends the encoded tensor to `out`, and sets `decoded` to what the other end will decode. An error leaves `out`
    /// unchanged.
    pub fn round_trip(
        &mut self,
        tensor: TensorView<'_>,
        context: &CodecContext<'_>,
        out: &mut Vec<u8>,
        decoded: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        let codec = self.encoder.id();
        let shape = Shape::new(tensor.dims).map_err(|_| CodecError::Shape {
            codec,
            expected: "as many dimensions and elements as a frame can describe",
            got: tensor.dims[..tensor.dims.len().min(DIMS_MAX + 1)].to_vec(),
        })?;
        let start = out.len();
        self.encoder.encode(tensor, context, out)?;
        decoded.resize(tensor.bytes.len(), 0);
        let meta = TensorMeta { dtype: tensor.dtype, layout: tensor.layout, shape, codec };
        self.decoder.decode(&meta, &out[start..], decoded).inspect_err(|_| out.truncate(start))
    }

    pub fn set_executor(&mut self, executor: Arc<dyn Executor>) {
        self.encoder.set_executor(executor.clone());
        self.decoder.set_executor(executor);
    }

    pub fn reset(&mut self) {
        self.encoder.reset();
        self.decoder.reset();
    }
}
