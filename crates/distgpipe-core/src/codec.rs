//! Codecs turn tensors into bytes and back.
//!
//! Each direction of a link has one codec per kind of tensor. A codec may keep state from one tensor to the next, so
//! each direction has its own instance at either end: one end encodes, the other decodes in the same order.
//!
//! | member | what it sends |
//! | --- | --- |
//! | [`raw`] | the tensor's bytes |
//! | [`half`] | two bytes a value: `f16`, `bf16` |
//! | [`uniform`] | codes on one grid over the tensor's range |
//! | [`sort`] | codes on a grid for each quantile bin of the values |
//! | [`tile`] | codes on a grid for each block of neighbouring values |
//! | [`fast`] | as `sort`, with the bins estimated from a sample |
//! | [`top_k`] | the values of largest magnitude and their positions: `topk` |
//! | [`power_svd`] | two low-rank factors instead of each matrix: `svd` |
//! | [`delta`] | another codec's body of the change since the sample's last visit |
//! | [`feedback`] | another codec's body, with its last error added to the next tensor |
//! | [`zstd`] | another codec's body, compressed without loss |
//!
//! **To add a codec:** write one file in `codec/` that implements [`Codec`] and has a `MEMBER`, give it the next number in
//! [`CodecId`], and add one line to [`ALL`] (both in `members.rs`). `tests/codec_conformance.rs` then tests it, with
//! every text in its `examples`. `docs/codecs.md` has the formulas and says which codec to use when.
//!
//! A lossy codec takes finite `F32` values; [`parse`] wraps it so that it takes `F16` and `BF16` too. It refuses a
//! tensor with a NaN or an infinity ([`CodecError::refuses_tensor`]): the link then sends that tensor raw and counts
//! it, so a NaN never becomes a number. A codec's parameters (`Q`, `S`, `T`) are not on the wire, because both ends of
//! a link have the same configuration; `decode` checks the length of the body against them.
//!
//! The kernels in `simd` use the best instruction set of the processor; [`simd_level`] reports which one. Nothing on
//! the wire depends on it, nor on the [`Executor`] that a codec is given.
//!
//! | file | what it holds for several codecs |
//! | --- | --- |
//! | `members` | the registry: numbers, names, parsing |
//! | `error`, `checks` | [`CodecError`], and the checks before encoding and decoding |
//! | `executor`, `kernel_runner` | the threads of a link, and how a tensor is split over them |
//! | `simd` | kernels for each instruction set |
//! | [`bits`], `grid`, `floats` | packing of codes, quantization grids, `F32` values in memory |
//! | `quantile_bins`, `order_statistics` | the bins of `sort` and `fast`; the k-th smallest values |
//! | `channels_last` | channels-last tensors in logical order, for `tile` |
//! | `rice` | Golomb–Rice coded positions, for `topk` |
//! | `wrapped`, `lru_cache` | the codec inside a wrapper; bounded state |
//! | `body_part` | what the bytes of a body are, for `zstd` |
//! | `form` | the parameters of a codec, for kernels on a GPU |
//! | `half_adapter` | `F16` and `BF16` tensors for `F32` codecs |

use crate::wire::{DType, Layout, TensorMeta};
use std::sync::Arc;

pub mod bits;
mod body_part;
mod channels_last;
mod checks;
pub mod delta;
mod error;
pub mod executor;
pub mod fast;
pub mod feedback;
mod floats;
mod form;
mod grid;
pub mod half;
mod half_adapter;
mod kernel_runner;
mod lru_cache;
mod members;
mod order_statistics;
pub mod power_svd;
mod quantile_bins;
pub mod raw;
mod rice;
#[allow(unsafe_code)]
mod simd;
pub mod sort;
mod spec;
pub mod tile;
pub mod top_k;
pub mod uniform;
mod wrapped;
pub mod zstd;

pub use body_part::{BodyPart, PartForm};
pub use error::CodecError;
pub use executor::{Executor, SerialExecutor};
pub use form::{BinEnds, BodyForm, CodecForm};
pub use lru_cache::LruCache;
pub use members::{parse, CodecId, Member, ALL};
pub use simd::{simd_level, SimdLevel, SimdLevelError, SIMD_VARIABLE};
pub use spec::CodecSpec;

use checks::{check_body, check_codec, check_f32, check_meta, check_out, check_received, elements_of};
use floats::{floats, magnitude_max, push_f32, take_f32, BLOCK};
use members::{beginning, number, parse_f32, Arguments};

/// A tensor in memory.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// The type of the elements.
    pub dtype: DType,
    /// The dimensions, in logical order.
    pub dims: &'a [usize],
    /// The order of the elements in `bytes`.
    pub layout: Layout,
    /// The elements, in this machine's byte order.
    pub bytes: &'a [u8],
}

impl TensorView<'_> {
    /// The number of elements, or an error if `bytes` is not as long as `dims` and `dtype` say.
    pub fn elements(&self) -> Result<usize, CodecError> {
        let elements = self.dims.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim));
        let expected = elements.and_then(|elements| elements.checked_mul(self.dtype.size_bytes()));
        match elements {
            Some(elements) if expected == Some(self.bytes.len()) => Ok(elements),
            _ => Err(CodecError::ViewLength { dtype: self.dtype, dims: self.dims.to_vec(), got: self.bytes.len() }),
        }
    }
}

/// What an encoder is told about a tensor besides its values. Codecs with state or randomness use it.
#[derive(Clone, Copy, Debug)]
pub struct CodecContext<'a> {
    /// Identifies the tensor among those that the link carries in a step, and is the same in every step: the
    /// micro-batch in the upper 48 bits, the tensor's index in its message in the lower 16
    /// ([`CodecContext::tensor_index`]).
    pub slot: u64,
    /// The seed for everything random about this tensor. It differs for every tensor of a run.
    pub seed: u64,
    /// The sample in each row of the tensor, by its number in the data set; empty where the link does not know them.
    pub samples: &'a [u64],
    /// Whether the model is trained on this tensor. Other tensors leave a codec's state unchanged, so that an
    /// evaluation between two steps has no effect on training.
    pub training: bool,
}

impl CodecContext<'_> {
    /// The tensor's index in its message, the same for all micro-batches.
    pub fn tensor_index(&self) -> u16 {
        self.slot as u16
    }
}

impl Default for CodecContext<'_> {
    fn default() -> Self {
        CodecContext { slot: 0, seed: 0, samples: &[], training: true }
    }
}

/// Encodes the tensors of one direction of a link, or decodes them. One instance does only one of the two.
pub trait Codec: Send {
    /// The number that goes into the frame's header.
    fn id(&self) -> CodecId;

    /// The size of an encoded tensor of these dimensions in bytes: exact, or an upper bound if
    /// [`size_varies`](Codec::size_varies). `usize::MAX` if it does not fit a `usize`.
    fn encoded_bytes(&self, dtype: DType, dims: &[usize]) -> usize;

    /// Whether the codec [refuses](CodecError::refuses_tensor) every tensor of these dimensions.
    fn refuses_shape(&self, _dims: &[usize]) -> bool {
        false
    }

    /// Whether the encoded size depends on more than the shape.
    fn size_varies(&self) -> bool {
        false
    }

    /// Whether every tensor of every type is decoded bit for bit.
    fn is_lossless(&self) -> bool {
        false
    }

    /// Describes the parts of a body that this codec has encoded, from a tensor of this type and these dimensions, in
    /// order. [`zstd`] compresses the parts apart, and what is left as bytes of which nothing is known.
    fn body_parts(&self, _dtype: DType, _dims: &[usize], _body: &[u8], _each: &mut dyn FnMut(BodyPart)) {}

    /// Whether a body is the tensor's memory and needs no check in either direction. A caller may then send from the
    /// tensor's memory and receive into it, without [`encode`](Codec::encode) and [`decode`](Codec::decode).
    /// [`Header::check`](crate::wire::Header::check) has compared the lengths.
    fn is_identity(&self, _dtype: DType) -> bool {
        false
    }

    /// Appends the encoded tensor to `out`. If the error [`refuses_tensor`](CodecError::refuses_tensor), the tensor can
    /// be sent raw instead.
    ///
    /// An error leaves both `out` and the codec's state unchanged: for the other end the tensor was never encoded.
    fn encode(
        &mut self,
        tensor: TensorView<'_>,
        context: &CodecContext<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), CodecError>;

    /// Decodes `body` into `out`, which is [`meta.decoded_bytes()`](TensorMeta::decoded_bytes) long, in this machine's
    /// byte order. After an error the content of `out` is unspecified.
    fn decode(&mut self, meta: &TensorMeta, body: &[u8], out: &mut [u8]) -> Result<(), CodecError>;

    /// The form of this codec's bodies, if other code may make and read them. A decoder of that form must call
    /// [`check`](Codec::check) first.
    fn form(&self) -> Option<CodecForm> {
        None
    }

    /// Checks a body as [`decode`](Codec::decode) does, without decoding it. For codecs with a [`form`](Codec::form) only.
    fn check(&self, _meta: &TensorMeta, _body: &[u8]) -> Result<(), CodecError> {
        Ok(())
    }

    /// Whether the codec uses [`CodecContext::samples`].
    fn wants_samples(&self) -> bool {
        false
    }

    /// How many bytes each end keeps of earlier tensors at most, where the text of the codec says so.
    fn kept_bytes_max(&self) -> u64 {
        0
    }

    /// Whether what it does to a tensor depends on earlier ones, until [`reset`](Codec::reset).
    fn remembers(&self) -> bool {
        false
    }

    /// Gives the codec threads to split large tensors over. Without them it works on the calling thread. The bytes are
    /// the same either way.
    fn set_executor(&mut self, _executor: Arc<dyn Executor>) {}

    /// Drops all state from earlier tensors. The decoder at the other end notices it from the next body.
    fn reset(&mut self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

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
