//! Tensor ↔ bytes.
//!
//! A link has one codec per direction and kind of tensor. A codec may keep state from tensor to tensor, so each
//! direction has its own: encoding happens at one end and decoding at the other, in the same order.
//!
//! | member | what it does |
//! | --- | --- |
//! | [`raw`] | the bytes as they are |
//! | [`half`] | two bytes a value: `f16`, `bf16` |
//! | [`uniform`] | one grid over the tensor's range |
//! | [`sort`] | a grid for each run of the sorted tensor |
//! | [`tile`] | a grid for every few neighbours |
//! | [`fast`] | as `sort`, by a sample |
//! | [`top_k`] | the values of largest magnitude and their places |
//! | [`power_svd`] | two thin factors instead of a matrix: `svd` |
//! | [`delta`] | another codec, on what changed since the sample's last visit |
//! | [`feedback`] | another codec, and what it lost is added to the next tensor |
//!
//! [`ALL`] lists them for `tests/codec_conformance.rs`, which every member has to pass. `docs/codecs.md` has the
//! formulas, says which to use when, and how to add one.
//!
//! A codec that loses something takes finite `F32` values, of [`parse`] `F16` and `BF16` too (`widened`), and refuses a tensor that has others
//! ([`CodecError::refuses_tensor`]): the link sends that one raw, and counts it. So no NaN ever becomes a number.
//! What a codec was made with (`Q`, `S`, `T`) is not on the wire, since both ends of a link are configured alike;
//! `decode` holds the body's length against it.

use crate::wire::{numbered, DType, Layout, TensorMeta, DIMS_MAX};
use std::sync::Arc;
use thiserror::Error;

pub mod bits;
#[path = "codec/executor.rs"]
pub mod crew;
pub mod delta;
pub mod fast;
pub mod feedback;
mod grid;
pub mod half;
#[path = "codec/kernel_runner.rs"]
mod hands;
#[path = "codec/wrapped.rs"]
mod inner;
#[path = "codec/order_statistics.rs"]
mod order;
#[path = "codec/channels_last.rs"]
mod planes;
pub mod power_svd;
pub mod raw;
mod rice;
#[path = "codec/quantile_bins.rs"]
mod runs;
#[allow(unsafe_code)]
mod simd;
pub mod sort;
mod spec;
#[path = "codec/lru_cache.rs"]
mod store;
pub mod tile;
pub mod top_k;
pub mod uniform;
#[path = "codec/half_adapter.rs"]
mod widened;

pub use crew::{Alone, Crew};
pub use spec::Spec;

numbered! {
    /// A codec's number in a frame's header.
    pub enum CodecId {
        /// [`raw`].
        Raw = 1,
        /// [`half`], IEEE.
        F16 = 2,
        /// [`half`], bfloat16.
        BF16 = 3,
        /// [`uniform`].
        Uniform = 4,
        /// [`sort`].
        Sort = 5,
        /// [`tile`].
        Tile = 6,
        /// [`fast`].
        Fast = 7,
        /// [`top_k`].
        TopK = 8,
        /// [`power_svd`].
        PowerSvd = 9,
        /// [`feedback`].
        Feedback = 10,
        /// [`delta`].
        Delta = 11,
    }
}

/// A tensor's memory.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// The type of the elements.
    pub dtype: DType,
    /// The dimensions, in the logical order.
    pub dims: &'a [usize],
    /// The order of the elements in `bytes`.
    pub layout: Layout,
    /// The elements, in the endianness of this machine.
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

/// What the encoder is told about a tensor beside its numbers, for codecs that keep something from one to the next.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// Which of the tensors that take turns on this link, the same in every step: the micro-batch in the upper 48 bits,
    /// the tensor's place in its message in the lower 16 ([`Context::place`]).
    pub slot: u64,
    /// The seed of whatever is random about this tensor; another for every tensor of a run.
    pub seed: u64,
    /// The samples in the tensor's rows, one number each; empty where the link does not know them.
    pub samples: &'a [u64],
    /// Whether the model learns from this tensor. What it does not learn from leaves no trace in a codec, so that an
    /// evaluation in between changes nothing.
    pub learning: bool,
}

impl Context<'_> {
    /// The tensor's place in its message, whichever micro-batch it is of.
    pub fn place(&self) -> u16 {
        self.slot as u16
    }
}

impl Default for Context<'_> {
    fn default() -> Self {
        Context { slot: 0, seed: 0, samples: &[], learning: true }
    }
}

/// Encodes the tensors of one direction of a link, or decodes them.
pub trait Codec: Send {
    /// The number that goes into the header.
    fn id(&self) -> CodecId;

    /// How many bytes a tensor of these dimensions takes on the wire: exactly, or at most if
    /// [`size_varies`](Codec::size_varies). `usize::MAX` if there is no such number.
    fn encoded_bytes(&self, dtype: DType, dims: &[usize]) -> usize;

    /// Whether it [refuses](CodecError::refuses_tensor) tensors of these dimensions, whatever their numbers.
    fn refuses_shape(&self, _dims: &[usize]) -> bool {
        false
    }

    /// Whether the size depends on more than the shape.
    fn size_varies(&self) -> bool {
        false
    }

    /// Whether the bytes on the wire are the tensor's memory and need no look, in either direction. A caller may then
    /// send from the tensor and receive into it, without calling [`encode`](Codec::encode) and
    /// [`decode`](Codec::decode). [`Header::check`](crate::wire::Header::check) has compared the lengths.
    fn is_identity(&self, _dtype: DType) -> bool {
        false
    }

    /// Appends the encoded tensor to `out`. After an error `out` is as it was; where the error
    /// [`refuses_tensor`](CodecError::refuses_tensor), the tensor can be sent raw instead.
    ///
    /// An error leaves the codec's memory as it was, too: to the other end the tensor was never encoded.
    fn encode(&mut self, tensor: TensorView<'_>, context: &Context<'_>, out: &mut Vec<u8>) -> Result<(), CodecError>;

    /// Decodes `body` into `out`, which is [`meta.decoded_bytes()`](TensorMeta::decoded_bytes) long, in the
    /// endianness of this machine. After an error the content of `out` has no meaning.
    fn decode(&mut self, meta: &TensorMeta, body: &[u8], out: &mut [u8]) -> Result<(), CodecError>;

    /// Whether [`Context::samples`] matters to it.
    fn wants_samples(&self) -> bool {
        false
    }

    /// Gives the codec threads to split large tensors over. Without, it works on the caller's alone. The bytes are the
    /// same either way.
    fn set_crew(&mut self, _crew: Arc<dyn Crew>) {}

    /// Forgets all that was kept from earlier tensors. After the encoder has, the other end follows by itself.
    fn reset(&mut self) {}
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
    /// A codec that exists, with parameters that it does not have.
    #[error("expected {expected}; got `{codec}:{got}`")]
    Parameter {
        /// The codec's name.
        codec: &'static str,
        /// What may be written.
        expected: &'static str,
        /// The beginning of what came after the colon.
        got: String,
    },
    /// A wrapper around a codec that it has no use for.
    #[error("expected {codec}(C) with C a codec that loses something and wraps no other, such as {codec}(tile:4); got `{codec}({got})`")]
    Inner {
        /// The wrapper's name.
        codec: &'static str,
        /// The beginning of what is between the parentheses.
        got: String,
    },
    /// A type of elements that the codec does not take.
    #[error("expected an F32, F16 or BF16 tensor for codec {codec}, got {got}: send this one raw")]
    DType {
        /// The codec.
        codec: CodecId,
        /// The tensor's type.
        got: DType,
    },
    /// A NaN or an infinity, which a codec that rounds would hide.
    #[error("expected finite values for codec {codec}, got a NaN or an infinity at {at}: send this tensor raw, and look for the layer that made it")]
    NotFinite {
        /// The codec.
        codec: CodecId,
        /// Which element, the first of them.
        at: usize,
    },
    /// Finite values that the codec has no numbers for.
    #[error("expected values within what codec {codec} can hold, got one too large at {at}, or too wide a range: send this tensor raw, or use bf16 or tile")]
    Overflow {
        /// The codec.
        codec: CodecId,
        /// Which element, the first of them; 0 if it is the range.
        at: usize,
    },
    /// Dimensions that the codec cannot do anything with.
    #[error("expected a tensor of {expected} for codec {codec}, got {got:?}: send this one raw")]
    Shape {
        /// The codec.
        codec: CodecId,
        /// What it takes.
        expected: &'static str,
        /// The dimensions.
        got: Vec<usize>,
    },
    /// Factors of a higher rank than the matrix has.
    #[error("expected a rank of at most {most} for matrices of a tensor of {dims:?}, got svd:{rank}: use svd:{most} or less on this link, or another codec")]
    Rank {
        /// The codec's rank.
        rank: usize,
        /// The smaller side of each matrix.
        most: usize,
        /// The dimensions.
        dims: Vec<usize>,
    },
    /// A body that describes values which no encoder makes.
    #[error("expected a finite lo and a finite step of at least 0 in codec {codec}'s table, got another at {at}: the peer is faulty, or its codec has other parameters")]
    Grid {
        /// The codec.
        codec: CodecId,
        /// Which entry of the table.
        at: usize,
    },
    /// A value in a body that no encoder sends.
    #[error("expected finite values in codec {codec}'s body, got a NaN or an infinity at {at}: the peer is faulty, or its codec has other parameters")]
    Value {
        /// The codec.
        codec: CodecId,
        /// Which value.
        at: usize,
    },
    /// A first byte that means nothing for this tensor.
    #[error("expected {expected} as the first byte of codec {codec}'s body, got {got}: the peer is faulty, or its codec is of another version")]
    FirstByte {
        /// The codec.
        codec: CodecId,
        /// What it may be.
        expected: &'static str,
        /// What it is.
        got: u8,
    },
    /// A body that builds on what this end does not have.
    #[error("expected {expected} from a `delta` encoder, got {got}: a body was lost or decoded twice, or one end was restarted or has other parameters; reset the encoder, and the next body puts both ends in step")]
    OutOfStep {
        /// Where this end is.
        expected: delta::Step,
        /// Where the encoder was.
        got: delta::Step,
    },
    /// A body of `topk` whose values have no places, or places in another tensor.
    #[error("expected at most {most} values with ascending places below {elements} in codec {codec}'s body, got others: the peer is faulty, or its codec has other parameters")]
    Places {
        /// The codec.
        codec: CodecId,
        /// The most values there may be.
        most: u64,
        /// How many elements the tensor has.
        elements: u64,
    },
    /// A `tile` body scaled as no `f32` needs it.
    #[error("expected a tile body's exponent from -162 to 114, got {got}: the peer is faulty, or its codec has other parameters")]
    Exponent {
        /// The exponent.
        got: i32,
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

impl CodecError {
    /// Whether the tensor is sound and only this codec cannot carry it, so that it should be sent [`raw`].
    pub fn refuses_tensor(&self) -> bool {
        use CodecError::{DType, NotFinite, Overflow, Shape};
        matches!(self, DType { .. } | NotFinite { .. } | Overflow { .. } | Shape { .. })
    }

    fn parameter(codec: &'static str, expected: &'static str, got: &str) -> Self {
        CodecError::Parameter { codec, expected, got: beginning(got) }
    }
}

/// One member of the family, as users see it.
#[derive(Clone, Copy, Debug)]
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
    /// Makes it from what follows its name.
    parse: Parse,
}

type Parse = fn(Arguments<'_>) -> Result<Box<dyn Codec>, CodecError>;

/// What follows a codec's name: `name:parameter(inner)`, both of which may be missing.
#[derive(Clone, Copy, Debug)]
struct Arguments<'a> {
    parameter: Option<&'a str>,
    inner: Option<&'a str>,
}

impl<'a> Arguments<'a> {
    /// Of a codec that takes nothing.
    fn none(self, codec: &'static str, expected: &'static str) -> Result<(), CodecError> {
        match (self.parameter(codec, expected)?, self.parameter) {
            (_, None) => Ok(()),
            (got, _) => Err(CodecError::parameter(codec, expected, got)),
        }
    }

    /// The parameter of a codec that wraps no other; empty if there is none.
    fn parameter(self, codec: &'static str, expected: &'static str) -> Result<&'a str, CodecError> {
        match self.inner {
            None => Ok(self.parameter.unwrap_or("")),
            Some(inner) => Err(CodecError::parameter(codec, expected, &format!("({inner})"))),
        }
    }
}

/// Every codec there is.
pub const ALL: &[Member] = &[
    raw::MEMBER,
    half::F16,
    half::BF16,
    uniform::MEMBER,
    sort::MEMBER,
    tile::MEMBER,
    fast::MEMBER,
    top_k::MEMBER,
    power_svd::MEMBER,
    feedback::MEMBER,
    delta::MEMBER,
];

/// The longest text for [`parse`], in bytes: whoever wraps codecs in codecs comes to an end.
const TEXT_BYTES_MAX: usize = 64;

/// The codec of this text: a name of [`ALL`], a colon and parameters if it has any, such as `sort:6+2`, and in
/// parentheses the codec that it wraps, such as `feedback(tile:4)`.
pub fn parse(text: &str) -> Result<Box<dyn Codec>, CodecError> {
    let codec = parse_f32(text)?;
    Ok(if codec.id() == CodecId::Raw { codec } else { Box::new(widened::Widened::around(codec)) })
}

/// The same, but for `F32` alone.
fn parse_f32(text: &str) -> Result<Box<dyn Codec>, CodecError> {
    let unknown = || CodecError::UnknownName { got: beginning(text) };
    if text.len() > TEXT_BYTES_MAX {
        return Err(unknown());
    }
    let (front, inner) = match text.split_once('(') {
        Some((front, rest)) => (front, Some(rest.strip_suffix(')').ok_or_else(unknown)?)),
        None => (text, None),
    };
    let (name, parameter) = match front.split_once(':') {
        Some((name, parameter)) => (name, Some(parameter)),
        None => (front, None),
    };
    let member = ALL.iter().find(|member| member.name == name).ok_or_else(unknown)?;
    (member.parse)(Arguments { parameter, inner })
}

/// So many values are treated at a time: they stay in the nearest cache, and their codes fill whole bytes.
const BLOCK: usize = 2048;

/// As much of a text as a message shows.
fn beginning(text: &str) -> String {
    text.chars().take(64).collect()
}

/// A number as people write it, without sign, spaces or leading zeros.
fn number(text: &str) -> Option<u32> {
    let number: u32 = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}

/// How many elements there are; `usize::MAX` if there is no such number.
fn elements_of(dims: &[usize]) -> usize {
    if dims.contains(&0) {
        return 0;
    }
    dims.iter().fold(1, |product: usize, &dim| product.saturating_mul(dim))
}

/// Whether a lossy codec may look at this tensor; how many elements it has.
fn check_f32(codec: CodecId, tensor: &TensorView<'_>) -> Result<usize, CodecError> {
    let elements = tensor.elements()?;
    if tensor.dtype != DType::F32 {
        return Err(CodecError::DType { codec, got: tensor.dtype });
    }
    Ok(elements)
}

/// Whether a header is one for this codec, with room for what its body decodes to.
fn check_meta(codec: CodecId, meta: &TensorMeta, out: &[u8]) -> Result<(), CodecError> {
    if meta.codec != codec {
        return Err(CodecError::WrongCodec { expected: codec, got: meta.codec });
    }
    if codec != CodecId::Raw && meta.dtype != DType::F32 {
        return Err(CodecError::DType { codec, got: meta.dtype });
    }
    let decoded = meta.decoded_bytes();
    if out.len() as u64 != decoded {
        return Err(CodecError::OutLength { expected: decoded, got: out.len() as u64 });
    }
    Ok(())
}

/// Whether a body is one for this codec and as long as it has to be, with room for what it decodes to; how many
/// elements that has.
fn check_body(codec: &impl Codec, meta: &TensorMeta, body: &[u8], out: &[u8]) -> Result<usize, CodecError> {
    let id = codec.id();
    check_meta(id, meta, out)?;
    let elements = out.len() / meta.dtype.size_bytes();
    let mut dims = [0; DIMS_MAX];
    dims.iter_mut().zip(meta.shape.dims()).for_each(|(to, &dim)| *to = dim as usize);
    let expected = codec.encoded_bytes(meta.dtype, &dims[..meta.shape.rank()]) as u64;
    if body.len() as u64 != expected {
        return Err(CodecError::BodyLength { codec: id, expected, got: body.len() as u64 });
    }
    Ok(elements)
}

/// The values in an `F32` tensor's memory.
#[inline(always)]
fn floats(bytes: &[u8]) -> impl Iterator<Item = f32> + '_ {
    bytes.chunks_exact(4).map(|bytes| f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
}

/// The bits of the largest magnitude, which are ordered as magnitudes are; an error if one is not finite.
fn magnitude_max(codec: CodecId, bytes: &[u8]) -> Result<u32, CodecError> {
    const INFINITY: u32 = 0x7f80_0000;
    let magnitudes = || floats(bytes).map(|value| value.to_bits() & 0x7fff_ffff);
    // Signed, because plain x86-64 compares only those side by side.
    let max = magnitudes().fold(0, |max, magnitude| i32::max(max, magnitude as i32)) as u32;
    if max < INFINITY {
        return Ok(max);
    }
    let at = magnitudes().position(|magnitude| magnitude >= INFINITY);
    Err(CodecError::NotFinite { codec, at: at.unwrap_or(0) })
}

fn push_f32(out: &mut Vec<u8>, value: f32) {
    out.extend_from_slice(&value.to_le_bytes());
}

/// The number at place `at` of a table of the wire; the caller has checked the table's length.
fn take_f32(table: &[u8], at: usize) -> f32 {
    let bytes = &table[4 * at..4 * at + 4];
    f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
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
        assert_eq!(
            error.to_string(),
            "expected a codec out of: raw, f16, bf16, uniform, sort, tile, fast, topk, svd, feedback, delta; got `zip`"
        );
    }

    #[test]
    fn wrong_parameters_are_told_the_right_ones() {
        let told = |text: &str| match parse(text) {
            Ok(_) => panic!("{text} is no codec"),
            Err(error) => error.to_string(),
        };
        assert_eq!(told("raw:1"), "expected raw, which has no parameter; got `raw:1`");
        assert_eq!(told("f16:8"), "expected f16 or bf16, which have no parameter; got `f16:8`");
        assert_eq!(
            told("uniform:17"),
            "expected uniform:Q with Q from 1 to 16 bits, such as uniform:8; got `uniform:17`"
        );
        assert!(told("sort")
            .ends_with("such as sort:6+2, or sort:16, sort:12, sort:8, sort:4 for 12+4, 9+3, 6+2, 3+1; got `sort:`"));
        for text in [
            "uniform",
            "uniform:",
            "uniform:0",
            "uniform:+8",
            "uniform:08",
            "uniform: 8",
            "uniform:8+2",
            "uniform:99999999999",
            "sort:6",
            "sort:0+4",
            "sort:12+5",
            "sort:6+",
            "sort:+2",
            "sort:6+2+1",
            "sort:6-2",
            "sort:4294967295+1",
            "tile",
            "tile:0",
            "tile:17",
            "tile:4/0",
            "tile:4/4097",
            "tile:4/",
            "tile:/64",
            "tile:4/64/2",
            "tile:~4",
            "tile:4~~",
            "tile:4~/64",
            "fast:6",
            "fast:6+2/15",
            "fast:6+2/",
            "fast:8/1048577",
            "topk",
            "topk:",
            "topk:0",
            "topk:0.0",
            "topk:1.1",
            "topk:2",
            "topk:.5",
            "topk:0.",
            "topk:+0.5",
            "topk:1e-2",
            "topk:0.0000000001",
            "topk:0.5.5",
            "svd",
            "svd:0",
            "svd:4097",
            "svd:08",
            "svd:8/2",
        ] {
            let name = text.split(':').next().unwrap();
            assert!(told(text).starts_with(&format!("expected {name}:")), "{}", told(text));
        }
    }

    #[test]
    fn what_only_the_codec_cannot_carry_may_be_sent_raw() {
        let codec = CodecId::Sort;
        assert!(CodecError::NotFinite { codec, at: 0 }.refuses_tensor());
        assert!(CodecError::DType { codec, got: DType::I64 }.refuses_tensor());
        assert!(CodecError::Overflow { codec, at: 0 }.refuses_tensor());
        assert!(!CodecError::ViewLength { dtype: DType::F32, dims: vec![1], got: 3 }.refuses_tensor());
    }

    #[test]
    fn a_view_counts_its_elements() {
        let view = |dims, bytes| TensorView { dtype: DType::F32, dims, layout: Layout::Contiguous, bytes };
        assert_eq!(view(&[2, 3], &[0; 24]).elements(), Ok(6));
        assert_eq!(view(&[], &[0; 4]).elements(), Ok(1));
        assert_eq!(view(&[0, 3], &[]).elements(), Ok(0));
        assert!(view(&[2, 3], &[0; 23]).elements().is_err());
        assert!(view(&[usize::MAX, 2], &[]).elements().is_err());
        assert!(view(&[usize::MAX / 2], &[]).elements().is_err());
    }
}
