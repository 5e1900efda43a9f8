//! Tensor ↔ bytes.
//!
//! A link has one codec per direction and kind of tensor. A codec may keep state from tensor to tensor, so each
//! direction has its own: encoding happens at one end and decoding at the other, in the same order.
//!
//! | member | what it does |
//! | --- | --- |
//! | [`raw`] | the bytes as they are |
//!
//! [`ALL`] lists them for `tests/codec_conformance.rs`, which every member has to pass.

use crate::wire::{numbered, DType, TensorMeta};
use thiserror::Error;

pub mod raw;

numbered! {
    /// A codec's number in a frame's header.
    pub enum CodecId {
        /// [`raw`].
        Raw = 1,
    }
}

/// A tensor's memory.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// The type of the elements.
    pub dtype: DType,
    /// The dimensions, in the logical order.
    pub dims: &'a [usize],
    /// The elements in the order and the endianness of this machine's memory.
    pub bytes: &'a [u8],
}

impl TensorView<'_> {
    /// How many elements there are, or an error if `bytes` is not as long as `dims` and `dtype` say.
    pub fn elements(&self) -> Result<usize, CodecError> {
        let elements = self.dims.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim));
        let expected = elements.and_then(|elements| elements.checked_mul(self.dtype.size_bytes()));
        match elements {
            Some(elements) if expected == Some(self.bytes.len()) => Ok(elements),
            _ => Err(CodecError::ViewLength { dtype: self.dtype, dims: self.dims.to_vec(), got: self.bytes.len() }),
        }
    }
}

/// Encodes the tensors of one direction of a link, or decodes them.
pub trait Codec: Send {
    /// The number that goes into the header.
    fn id(&self) -> CodecId;

    /// How many bytes a tensor of so many elements takes on the wire: exact for a codec whose size does not depend on
    /// the values, the most it can be otherwise. `usize::MAX` if there is no such number.
    fn encoded_bytes(&self, dtype: DType, elements: usize) -> usize;

    /// Whether the bytes on the wire are the tensor's memory and need no look, in either direction. A caller may then
    /// send from the tensor and receive into it, without calling [`encode`](Codec::encode) and
    /// [`decode`](Codec::decode). [`Header::check`](crate::wire::Header::check) has compared the lengths.
    fn is_identity(&self, _dtype: DType) -> bool {
        false
    }

    /// Appends the encoded tensor to `out`. After an error `out` is as it was.
    fn encode(&mut self, tensor: TensorView<'_>, out: &mut Vec<u8>) -> Result<(), CodecError>;

    /// Decodes `body` into `out`, which is [`meta.decoded_bytes()`](TensorMeta::decoded_bytes) long, in the
    /// endianness of this machine. After an error the content of `out` has no meaning.
    fn decode(&mut self, meta: &TensorMeta, body: &[u8], out: &mut [u8]) -> Result<(), CodecError>;
}

/// Why a tensor cannot be encoded, or bytes are no encoded tensor.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CodecError {
    /// A codec that does not exist.
    #[error("expected a codec out of: {}; got `{got}`", names())]
    UnknownName {
        /// The beginning of the text.
        got: String,
    },
    /// A view whose parts do not fit each other.
    #[error("expected a view whose bytes hold {dtype} {dims:?}, got {got} bytes: make the tensor contiguous before viewing it")]
    ViewLength {
        /// The type of the elements.
        dtype: DType,
        /// The dimensions.
        dims: Vec<usize>,
        /// The length of the bytes.
        got: usize,
    },
    /// The sender used another codec than this end decodes with.
    #[error("expected a body in codec {expected}, got {got}: give both ends of the link the same codec")]
    WrongCodec {
        /// The codec here.
        expected: CodecId,
        /// The codec in the header.
        got: CodecId,
    },
    /// A body that is not as long as the codec makes it.
    #[error("expected {expected} bytes for this tensor in codec {codec}, got {got}: the body was cut short, or the peer encodes otherwise")]
    BodyLength {
        /// The codec.
        codec: CodecId,
        /// The right length.
        expected: u64,
        /// The length of the body.
        got: u64,
    },
    /// Room for another tensor than the one that came.
    #[error("expected room for the decoded tensor's {expected} bytes, got {got}: allocate what the header describes")]
    OutLength {
        /// The size of the decoded tensor.
        expected: u64,
        /// The size of the room.
        got: u64,
    },
    /// A byte that is no truth value; libtorch may not be shown one.
    #[error("expected every byte of a Bool tensor to be 0 or 1, got {got} at {at}: the peer is faulty")]
    NotBool {
        /// Which element.
        at: usize,
        /// The byte.
        got: u8,
    },
}

/// One member of the family, as users see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Member {
    /// What [`parse`] calls it.
    pub name: &'static str,
    /// Its number in the header.
    pub id: CodecId,
    /// Whether every bit comes back.
    pub lossless: bool,
    /// Texts for [`parse`] that between them use every parameter it has.
    pub examples: &'static [&'static str],
    /// What it does, in a line.
    pub about: &'static str,
}

/// Every codec there is.
pub const ALL: &[Member] = &[raw::MEMBER];

/// The codec of this name: `raw`.
pub fn parse(text: &str) -> Result<Box<dyn Codec>, CodecError> {
    match text {
        "raw" => Ok(Box::new(raw::Raw)),
        _ => Err(CodecError::UnknownName { got: text.chars().take(64).collect() }),
    }
}

fn names() -> String {
    let names: Vec<_> = ALL.iter().map(|member| member.name).collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_codec_is_told_what_there_is() {
        let Err(error) = parse("zip") else {
            panic!("there is no codec zip");
        };
        assert_eq!(error.to_string(), "expected a codec out of: raw; got `zip`");
    }

    #[test]
    fn a_view_counts_its_elements() {
        let view = |dims, bytes| TensorView { dtype: DType::F32, dims, bytes };
        assert_eq!(view(&[2, 3], &[0; 24]).elements(), Ok(6));
        assert_eq!(view(&[], &[0; 4]).elements(), Ok(1));
        assert_eq!(view(&[0, 3], &[]).elements(), Ok(0));
        assert!(view(&[2, 3], &[0; 23]).elements().is_err());
        assert!(view(&[usize::MAX, 2], &[]).elements().is_err());
        assert!(view(&[usize::MAX / 2], &[]).elements().is_err());
    }
}
