//! The codec within a wrapper such as `feedback(tile:4)`.
//!
//! There are two of it, because one codec is either an encoder or a decoder: at the sending end the second decodes what
//! the first has made, so that the sender knows what the receiver has; at the receiving end it decodes what comes.

use super::{parse_f32, Arguments, Codec, CodecError, CodecId, Context, Crew, TensorView};
use crate::wire::{DType, Shape, TensorMeta, DIMS_MAX};
use std::sync::Arc;

pub(super) struct Inner {
    encoder: Box<dyn Codec>,
    decoder: Box<dyn Codec>,
}

impl Inner {
    /// The codec in a wrapper's parentheses. One that loses nothing has nothing for the wrapper to do, and two wrappers
    /// in each other would both take the other's corrections for values.
    pub fn parse(wrapper: &'static str, expected: &'static str, arguments: Arguments<'_>) -> Result<Self, CodecError> {
        let given = arguments.parameter.unwrap_or("");
        let text = arguments.inner.ok_or_else(|| CodecError::parameter(wrapper, expected, given))?;
        let encoder = parse_f32(text)?;
        if [CodecId::Raw, CodecId::Feedback, CodecId::Delta].contains(&encoder.id()) {
            return Err(CodecError::Inner { codec: wrapper, got: super::beginning(text) });
        }
        Ok(Inner { encoder, decoder: parse_f32(text)? })
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

    /// Encodes as any codec does.
    pub fn encode(
        &mut self,
        tensor: TensorView<'_>,
        context: &Context<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        self.encoder.encode(tensor, context, out)
    }

    /// Decodes a body of the wrapper's that is one of this codec's.
    pub fn decode(&mut self, meta: &TensorMeta, body: &[u8], out: &mut [u8]) -> Result<(), CodecError> {
        self.decoder.decode(&TensorMeta { codec: self.decoder.id(), ..*meta }, body, out)
    }

    /// Encodes a tensor and gives what the other end will make of it. After an error `out` is as it was.
    pub fn round_trip(
        &mut self,
        tensor: TensorView<'_>,
        context: &Context<'_>,
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

    pub fn set_crew(&mut self, crew: Arc<dyn Crew>) {
        self.encoder.set_crew(crew.clone());
        self.decoder.set_crew(crew);
    }

    pub fn reset(&mut self) {
        self.encoder.reset();
        self.decoder.reset();
    }
}
