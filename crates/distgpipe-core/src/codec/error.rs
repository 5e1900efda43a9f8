//! Why a codec cannot encode a tensor or decode a body.

use super::members::{beginning, names};
use super::{delta, CodecId};
use crate::wire::DType;
use thiserror::Error;

/// Why a tensor cannot be encoded, a body cannot be decoded, or a text names no codec.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CodecError {
    /// The text names a codec that does not exist.
    #[error("expected a codec out of: {}; got `{got}`", names())]
    UnknownName {
        /// The beginning of the text.
        got: String,
    },
    /// The codec exists, but not with these parameters.
    #[error("expected {expected}; got `{got}`")]
    Parameter {
        /// The name of the codec.
        codec: &'static str,
        /// The parameters that it takes.
        expected: &'static str,
        /// The beginning of the text.
        got: String,
    },
    /// A parenthesis is open.
    #[error("expected `)` at the end of `{got}`, after the codec that is wrapped, as in {codec}(tile:4)")]
    Unclosed {
        /// The name of the codec.
        codec: &'static str,
        /// The beginning of the text.
        got: String,
    },
    /// A wrapper was put around a codec that it cannot improve.
    #[error(
        "expected {codec}(C) with C a lossy codec that wraps no other, such as {codec}(tile:4); got `{codec}({got})`"
    )]
    Wrapped {
        /// The name of the wrapper.
        codec: &'static str,
        /// The beginning of what is between the parentheses.
        got: String,
    },
    /// A body that is compressed already would be compressed again, or a wrapper would have to decompress it.
    #[error("expected zstd outside every other codec and only once, such as zstd(tile:4) or zstd(feedback(tile:4)); got `{got}` inside another codec")]
    CompressedInside {
        /// The beginning of what is between the parentheses.
        got: String,
    },
    /// The codec does not take tensors of this element type.
    #[error("expected an F32, F16 or BF16 tensor for codec {codec}, got {got}: send this tensor raw")]
    DType {
        /// The codec that was asked to encode or decode.
        codec: CodecId,
        /// The element type of the tensor.
        got: DType,
    },
    /// The tensor has a NaN or an infinity, which a lossy codec would hide.
    #[error("expected finite values for codec {codec}, got a NaN or an infinity at element {at}: send this tensor raw, and find the layer that produced it")]
    NotFinite {
        /// The codec that was asked to encode.
        codec: CodecId,
        /// The index of the first such element.
        at: usize,
    },
    /// The values are finite but beyond what the codec represents.
    #[error("expected values in the range of codec {codec}, got one that is too large at element {at}, or too wide a range: send this tensor raw, or use bf16 or tile")]
    Overflow {
        /// The codec that was asked to encode.
        codec: CodecId,
        /// The index of the first such element; 0 if it is the range that is too wide.
        at: usize,
    },
    /// The codec has no encoding for tensors of this shape.
    #[error("expected a tensor of {expected} for codec {codec}, got {got:?}: send this tensor raw")]
    Shape {
        /// The codec that was asked to encode or decode.
        codec: CodecId,
        /// The shapes that it takes.
        expected: &'static str,
        /// The dimensions of the tensor.
        got: Vec<usize>,
    },
    /// The rank of the factors is higher than that of the matrix.
    #[error("expected a rank of at most {most} for matrices of a tensor of {dims:?}, got svd:{rank}: use svd:{most} or less on this link, or another codec")]
    Rank {
        /// The rank that the codec was made with.
        rank: usize,
        /// The smaller side of each matrix.
        most: usize,
        /// The dimensions of the tensor.
        dims: Vec<usize>,
    },
    /// A grid in a body has a NaN, an infinity or a negative step.
    #[error("expected a finite lo and a finite step of at least 0 in the table of a {codec} body, got another at entry {at}: the peer is faulty, or its codec has other parameters")]
    Grid {
        /// The codec that was asked to decode.
        codec: CodecId,
        /// The index of the entry in the table.
        at: usize,
    },
    /// A body decodes to a NaN or an infinity, which no encoder sends.
    #[error("expected finite values in a {codec} body, got a NaN or an infinity at value {at}: the peer is faulty, or its codec has other parameters")]
    Value {
        /// The codec that was asked to decode.
        codec: CodecId,
        /// The index of the value.
        at: usize,
    },
    /// The first byte of a body, which selects its form, has no meaning for this tensor.
    #[error("expected {expected} as the first byte of a {codec} body, got {got}: the peer is faulty, or runs another version of distgpipe")]
    FirstByte {
        /// The codec that was asked to decode.
        codec: CodecId,
        /// The bytes that it accepts.
        expected: &'static str,
        /// The byte in the body.
        got: u8,
    },
    /// The compressed chunks of a `zstd` body are not what an encoder sends.
    #[error("expected {expected} at byte {at} of the chunks of a zstd body, got something else: the peer is faulty, or runs another version of distgpipe")]
    Compressed {
        /// What an encoder sends there.
        expected: &'static str,
        /// Where the chunk or the stream begins.
        at: u64,
    },
    /// A `delta` body builds on rows that this end does not have.
    #[error("expected {expected} from a `delta` encoder, got {got}: a body was lost or decoded twice, or one end was restarted or has other parameters; restart the run, or reset the encoder, whose next body synchronizes both ends")]
    OutOfStep {
        /// The position of this end.
        expected: delta::StreamPosition,
        /// The position of the encoder.
        got: delta::StreamPosition,
    },
    /// The positions of the values in a `topk` body are not those of this tensor.
    #[error("expected at most {most} values with ascending positions below {elements} in a {codec} body, got others: the peer is faulty, or its codec has other parameters")]
    Positions {
        /// The codec that was asked to decode.
        codec: CodecId,
        /// The largest number of values that the body may have.
        most: u64,
        /// The number of elements of the tensor.
        elements: u64,
    },
    /// The exponent in a `tile` body is outside the range of an `f32`.
    #[error("expected an exponent from -162 to 114 in a tile body, got {got}: the peer is faulty, or its codec has other parameters")]
    Exponent {
        /// The exponent in the body.
        got: i32,
    },
    /// The bytes of a [`TensorView`](super::TensorView) do not match its dimensions.
    #[error("expected a view whose bytes hold {dtype} {dims:?}, got {got} bytes: make the tensor contiguous before viewing it")]
    ViewLength {
        /// The element type of the view.
        dtype: DType,
        /// The dimensions of the view.
        dims: Vec<usize>,
        /// The number of bytes in the view.
        got: usize,
    },
    /// The sender used another codec than this end decodes with.
    #[error("expected a body in codec {expected}, got {got}: give both ends of the link the same codec")]
    WrongCodec {
        /// The codec of this end.
        expected: CodecId,
        /// The codec in the frame's header.
        got: CodecId,
    },
    /// The length of a body does not match the codec and the tensor's shape.
    #[error("expected {expected} bytes for this tensor in codec {codec}, got {got}: the body is truncated, or the codec of the peer has other parameters")]
    BodyLength {
        /// The codec that was asked to decode.
        codec: CodecId,
        /// The length that the tensor's shape requires.
        expected: u64,
        /// The length of the body.
        got: u64,
    },
    /// The buffer for the decoded tensor has the wrong length.
    #[error("expected a buffer for the decoded tensor's {expected} bytes, got one of {got}: allocate what the header describes")]
    OutLength {
        /// The size of the decoded tensor in bytes.
        expected: u64,
        /// The size of the buffer in bytes.
        got: u64,
    },
    /// A byte of a `Bool` tensor is neither 0 nor 1, which would be undefined behaviour in libtorch.
    #[error("expected every byte of a Bool tensor to be 0 or 1, got {got} at element {at}: the peer is faulty")]
    NotBool {
        /// The index of the element.
        at: usize,
        /// The byte in the body.
        got: u8,
    },
}

impl CodecError {
    /// Whether the tensor is valid and only this codec cannot carry it, so that the link should send it
    /// [`raw`](super::raw).
    pub fn refuses_tensor(&self) -> bool {
        use CodecError::{DType, NotFinite, Overflow, Shape};
        matches!(self, DType { .. } | NotFinite { .. } | Overflow { .. } | Shape { .. })
    }

    pub(super) fn parameter(codec: &'static str, expected: &'static str, got: &str) -> Self {
        CodecError::Parameter { codec, expected, got: beginning(got) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_that_only_this_codec_cannot_carry_may_be_sent_raw() {
        let codec = CodecId::Sort;
        assert!(CodecError::NotFinite { codec, at: 0 }.refuses_tensor());
        assert!(CodecError::DType { codec, got: DType::I64 }.refuses_tensor());
        assert!(CodecError::Overflow { codec, at: 0 }.refuses_tensor());
        assert!(!CodecError::ViewLength { dtype: DType::F32, dims: vec![1], got: 3 }.refuses_tensor());
    }
}
