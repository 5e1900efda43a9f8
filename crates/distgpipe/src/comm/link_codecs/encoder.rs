//! The sending end of a link: tensors to bytes.

use super::dtype::dtype_of;
use super::{CodecCache, LinkCodecs};
use crate::comm::message::Message;
use crate::comm::traffic::{Counters, EncodingCost, PartitionEdge};
use crate::engine::{self, Layout, TensorBytes};
use crate::failure::Fault;
use crate::runtime::trace::{now_ns, Phase};
use distgpipe_core::codec::raw::Raw;
use distgpipe_core::codec::{Codec, CodecContext, CodecError, CodecId, TensorView};
use distgpipe_core::wire::{self, Shape, TensorMeta, HEADER_BYTES};
use tch::Tensor;

/// The bytes of an encoded tensor.
pub(crate) enum EncodedBytes {
    Owned(Vec<u8>),
    /// Those of the tensor itself.
    Tensor(TensorBytes),
}

impl EncodedBytes {
    pub fn as_slice(&self) -> &[u8] {
        match self {
            EncodedBytes::Owned(bytes) => bytes,
            EncodedBytes::Tensor(bytes) => bytes.as_slice(),
        }
    }
}

fn bytes_of(tensor: &Tensor) -> Result<&[u8], Fault> {
    engine::bytes(tensor).ok_or_else(|| not_dense(tensor))
}

fn not_dense(tensor: &Tensor) -> Fault {
    Fault::internal("a dense tensor in host memory", format!("{tensor:?}"))
}

/// Encodes the tensors that one direction of a link sends.
pub struct Encoder {
    codecs: CodecCache,
    counters: Counters,
    body: Vec<u8>,
}

impl Encoder {
    /// An encoder that counts its tensors on `counters`.
    pub fn new(link_codecs: LinkCodecs, counters: Counters) -> Self {
        Encoder { codecs: CodecCache::new(link_codecs), counters, body: Vec::new() }
    }

    /// Encodes tensor `index` of a message and passes its description and its bytes to `then`.
    pub fn with_encoded<T>(
        &mut self,
        message: &Message,
        index: usize,
        tensor: &Tensor,
        then: impl FnOnce(TensorMeta, &[u8]) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        match self.encode_tensor(message, index, tensor)? {
            (meta, Some(host)) => then(meta, bytes_of(&host)?),
            (meta, None) => then(meta, &self.body),
        }
    }

    /// Encodes tensor `index` of a message into bytes of their own. A raw tensor between partitions is not copied: nothing changes
    /// it in place any more.
    pub(crate) fn encoded(
        &mut self,
        message: &Message,
        index: usize,
        tensor: &Tensor,
    ) -> Result<(TensorMeta, EncodedBytes), Fault> {
        let (meta, host) = self.encode_tensor(message, index, tensor)?;
        let bytes = match host {
            None => EncodedBytes::Owned(std::mem::take(&mut self.body)),
            Some(host) if message.tag.edge().is_some() => {
                EncodedBytes::Tensor(TensorBytes::new(&host).ok_or_else(|| not_dense(&host))?)
            }
            Some(host) => EncodedBytes::Owned(bytes_of(&host)?.to_vec()),
        };
        Ok((meta, bytes))
    }

    /// Encodes a tensor into `body`. If its encoding is its bytes in memory, it returns the tensor on this host instead.
    fn encode_tensor(
        &mut self,
        message: &Message,
        index: usize,
        tensor: &Tensor,
    ) -> Result<(TensorMeta, Option<Tensor>), Fault> {
        let start = now_ns();
        let tensor = engine::on_host(tensor)?;
        let bytes = bytes_of(&tensor)?;
        let dims: Vec<usize> = tensor.size().iter().map(|&d| usize::try_from(d).unwrap_or(0)).collect();
        let shape = Shape::new(&dims).map_err(Fault::invalid_model)?;
        let layout = match engine::layout(&tensor) {
            Some(Layout::ChannelsLast) => wire::Layout::ChannelsLast,
            _ => wire::Layout::Contiguous,
        };
        let view = TensorView { dtype: dtype_of(tensor.kind())?, dims: &dims, layout, bytes };
        let encoded = self.encode(message, index, view)?;
        let meta = TensorMeta { dtype: view.dtype, layout, shape, codec: encoded.unwrap_or(CodecId::Raw) };
        // Most raw tensors are sent from where they are, without a copy.
        let in_memory = encoded.is_none() && Raw.is_identity(view.dtype);
        let body = if in_memory { bytes } else { &self.body };
        if let Some(edge) = message.tag.edge() {
            let cost = EncodingCost {
                raw_bytes: bytes.len() as u64,
                wire_bytes: (HEADER_BYTES + body.len()) as u64,
                encode_ns: now_ns().saturating_sub(start),
            };
            self.counters.count_encoded(edge, cost);
            if encoded.is_some() {
                self.codecs.link_codecs.background.record(message.tag.step, Phase::Encode, &message.tag, start);
            }
        }
        Ok((meta, in_memory.then_some(tensor)))
    }

    /// Fills `body`, unless the raw encoding of the tensor is its bytes in memory. Returns the codec; `None` for raw.
    fn encode(&mut self, message: &Message, index: usize, view: TensorView<'_>) -> Result<Option<CodecId>, Fault> {
        self.body.clear();
        if let Some(edge) = message.tag.edge() {
            let encoded = match message.encoding.compress {
                true => self.encode_with_codec(edge, message, index, view)?,
                false => None,
            };
            if encoded.is_some() {
                return Ok(encoded);
            }
            if self.codecs.codec(edge).is_some() {
                self.counters.count_sent_raw(edge);
            }
        }
        if !Raw.is_identity(view.dtype) {
            let encoded = Raw.encode(view, &CodecContext::default(), &mut self.body);
            encoded.map_err(|source| Fault::Codec { tensor: message.tag.to_string(), source })?;
        }
        Ok(None)
    }

    /// Fills `body` with the edge's codec. Returns `None` if the edge has none, or if the codec refuses the tensor.
    fn encode_with_codec(
        &mut self,
        edge: PartitionEdge,
        message: &Message,
        index: usize,
        view: TensorView<'_>,
    ) -> Result<Option<CodecId>, Fault> {
        let Some(codec) = self.codecs.codec(edge) else { return Ok(None) };
        let options = &message.encoding;
        let context = CodecContext {
            slot: u64::from(message.tag.micro_batch) << 16 | index as u64,
            seed: options.seed.wrapping_add(index as u64),
            samples: &options.samples,
            training: options.training,
        };
        match codec.encode(view, &context, &mut self.body) {
            Ok(()) => Ok(Some(codec.id())),
            Err(error) if error.refuses_tensor() => {
                let kind = match error {
                    CodecError::DType { .. } => "type",
                    CodecError::NotFinite { .. } => "not finite",
                    CodecError::Overflow { .. } => "too large",
                    _ => "shape",
                };
                self.counters.record_refusal(edge, kind, || format!("{} {:?}: {error}", view.dtype, view.dims));
                Ok(None)
            }
            Err(source) => Err(Fault::Codec { tensor: message.tag.to_string(), source }),
        }
    }
}
