//! The sending end of a link: tensors to bytes.

use super::dtype::dtype_of;
use super::on_device::{self, Encoded};
use super::{CodecCache, Decoder, EdgeCodec, LinkCodecs};
use crate::comm::message::Message;
use crate::comm::traffic::{Counters, EncodingCost, PartitionEdge};
use crate::engine::{self, cuda, Layout, TensorBytes};
use crate::failure::Fault;
use crate::runtime::trace::{now_ns, Phase};
use distgpipe_core::codec::raw::Raw;
use distgpipe_core::codec::{Codec, CodecContext, CodecError, CodecId, TensorView};
use distgpipe_core::wire::{self, DType, Shape, TensorMeta, HEADER_BYTES};
use tch::Tensor;

/// The bytes of an encoded tensor.
pub(crate) enum EncodedBytes {
    Owned(Vec<u8>),
    /// Those of the tensor itself.
    Tensor(TensorBytes),
}

impl AsRef<[u8]> for EncodedBytes {
    fn as_ref(&self) -> &[u8] {
        match self {
            EncodedBytes::Owned(bytes) => bytes,
            EncodedBytes::Tensor(bytes) => bytes.as_slice(),
        }
    }
}

/// An encoded tensor where it is.
#[cfg(feature = "mpi")]
pub(crate) enum EncodedBody {
    Host(EncodedBytes),
    /// The bytes of a dense tensor on a GPU.
    Gpu(Tensor),
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
    #[cfg(test)]
    pub fn with_encoded<T>(
        &mut self,
        message: &Message,
        index: usize,
        tensor: &Tensor,
        then: impl FnOnce(TensorMeta, &[u8]) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        match self.encode_tensor(message, index, tensor, MemoryReach::Host)? {
            (meta, Some(memory)) => then(meta, bytes_of(&engine::on_host(&memory)?)?),
            (meta, None) => then(meta, &self.body),
        }
    }

    /// Encodes tensor `index` of a message, and decodes it as the other end would. A body that is made and read on one GPU stays there.
    pub fn round_trip(
        &mut self,
        message: &Message,
        index: usize,
        tensor: &Tensor,
        decoder: &mut Decoder,
    ) -> Result<Tensor, Fault> {
        match self.encode_tensor(message, index, tensor, MemoryReach::Gpus)? {
            (meta, Some(memory)) => decoder.decode_from(&message.tag, &meta, &memory),
            (meta, None) => decoder.decode(&message.tag, &meta, &self.body),
        }
    }

    /// Encodes tensor `index` of a message into bytes of their own. A raw tensor is not copied if it is `unchanging`: nothing changes
    /// its memory as long as the link needs it.
    pub(crate) fn encoded(
        &mut self,
        message: &Message,
        index: usize,
        tensor: &Tensor,
        unchanging: bool,
    ) -> Result<(TensorMeta, EncodedBytes), Fault> {
        let (meta, memory) = self.encode_tensor(message, index, tensor, MemoryReach::Host)?;
        let bytes = match memory.map(|memory| engine::on_host(&memory)).transpose()? {
            None => EncodedBytes::Owned(std::mem::take(&mut self.body)),
            Some(host) if unchanging => EncodedBytes::Tensor(TensorBytes::new(&host).ok_or_else(|| not_dense(&host))?),
            Some(host) => EncodedBytes::Owned(bytes_of(&host)?.to_vec()),
        };
        Ok((meta, bytes))
    }

    /// Encodes tensor `index` of a message for a transport that reads this memory. Nothing may change the tensor as long as the link
    /// needs it.
    #[cfg(feature = "mpi")]
    pub(crate) fn encoded_within(
        &mut self,
        reach: MemoryReach,
        message: &Message,
        index: usize,
        tensor: &Tensor,
    ) -> Result<(TensorMeta, EncodedBody), Fault> {
        if reach == MemoryReach::Gpus && tensor.device().is_cuda() {
            match self.encode_tensor(message, index, tensor, reach)? {
                (meta, Some(memory)) if memory.device().is_cuda() => return Ok((meta, EncodedBody::Gpu(memory))),
                (meta, Some(memory)) => {
                    let bytes = TensorBytes::new(&memory).ok_or_else(|| not_dense(&memory))?;
                    return Ok((meta, EncodedBody::Host(EncodedBytes::Tensor(bytes))));
                }
                (meta, None) => {
                    return Ok((meta, EncodedBody::Host(EncodedBytes::Owned(std::mem::take(&mut self.body)))))
                }
            }
        }
        let (meta, bytes) = self.encoded(message, index, tensor, true)?;
        Ok((meta, EncodedBody::Host(bytes)))
    }

    /// Encodes a tensor into `body`. If the encoding is the memory of a tensor, on this host or on a GPU, it returns that tensor instead.
    fn encode_tensor(
        &mut self,
        message: &Message,
        index: usize,
        tensor: &Tensor,
        reach: MemoryReach,
    ) -> Result<(TensorMeta, Option<Tensor>), Fault> {
        let start = now_ns();
        if let Some(gpu) = cuda::index(tensor.device()) {
            cuda::own_stream(gpu)?;
            cuda::keep_for_stream(tensor)?;
        }
        let dims: Vec<usize> = tensor.size().iter().map(|&d| usize::try_from(d).unwrap_or(0)).collect();
        let shape = Shape::new(&dims).map_err(Fault::invalid_model)?;
        let dtype = dtype_of(tensor.kind())?;
        let layout = match engine::layout(tensor) {
            Some(Layout::ChannelsLast) => wire::Layout::ChannelsLast,
            _ => wire::Layout::Contiguous,
        };
        let meta = |codec: CodecId| TensorMeta { dtype, layout, shape, codec };
        let raw_bytes = (tensor.numel() * dtype.size_bytes()) as u64;
        let on_device = self.encode_on_device(message, index, tensor)?;
        if let OnDevice::Encoded(codec, body) = on_device {
            self.count(message, raw_bytes, body.numel(), Some(codec), start);
            return Ok((meta(codec), Some(body)));
        }
        let refused = matches!(on_device, OnDevice::Refused);
        if reach == MemoryReach::Gpus && Raw.is_identity(dtype) && (refused || !self.has_codec(message)) {
            self.count_sent_raw(message);
            self.count(message, raw_bytes, raw_bytes as usize, None, start);
            return Ok((meta(CodecId::Raw), Some(on_device::dense(tensor)?)));
        }
        let tensor = engine::on_host(tensor)?;
        let view = TensorView { dtype, dims: &dims, layout, bytes: bytes_of(&tensor)? };
        let encoded = if refused { None } else { self.encode_with_codec(message, index, view)? };
        // Most raw tensors are sent from where they are, without a copy.
        let in_memory = encoded.is_none() && Raw.is_identity(dtype);
        if encoded.is_none() {
            self.encode_raw(message, view)?;
        }
        let wire_bytes = if in_memory { view.bytes.len() } else { self.body.len() };
        self.count(message, raw_bytes, wire_bytes, encoded, start);
        Ok((meta(encoded.unwrap_or(CodecId::Raw)), in_memory.then_some(tensor)))
    }

    /// Counts an encoded tensor that crosses an edge.
    fn count(&self, message: &Message, raw_bytes: u64, body_bytes: usize, codec: Option<CodecId>, start: u64) {
        let Some(edge) = message.tag.edge() else { return };
        let wire_bytes = (HEADER_BYTES + body_bytes) as u64;
        let encode_ns = now_ns().saturating_sub(start);
        self.counters.count_encoded(edge, EncodingCost { raw_bytes, wire_bytes, encode_ns });
        if codec.is_some() {
            self.codecs.link_codecs.background.record(message.tag.step, Phase::Encode, &message.tag, start);
        }
    }

    /// Encodes a tensor on its GPU, if it is on one and the edge's codec has kernels.
    fn encode_on_device(&mut self, message: &Message, index: usize, tensor: &Tensor) -> Result<OnDevice, Fault> {
        if tensor.device() == tch::Device::Cpu || !message.encoding.compress {
            return Ok(OnDevice::Unsupported);
        }
        let edge = message.tag.edge().and_then(|edge| Some((edge, self.codecs.codec(edge)?)));
        let Some((edge, EdgeCodec { codec, residuals })) = edge else { return Ok(OnDevice::Unsupported) };
        let context = context(message, index);
        let values = match on_device::encode(codec.as_ref(), tensor, &context, residuals)? {
            Encoded::Unsupported => return Ok(OnDevice::Unsupported),
            Encoded::Body(body) => return Ok(OnDevice::Encoded(codec.id(), body)),
            Encoded::Refused(values) => engine::on_host(&values)?,
        };
        // The codec on the CPU says why. It has no residuals, so it must not add them.
        let dims: Vec<usize> = values.size().iter().map(|&d| usize::try_from(d).unwrap_or(0)).collect();
        let bytes = bytes_of(&values)?;
        let view = TensorView { dtype: DType::F32, dims: &dims, layout: wire::Layout::Contiguous, bytes };
        self.body.clear();
        if let Err(error) = codec.encode(view, &CodecContext { training: false, ..context }, &mut self.body) {
            let dtype = dtype_of(tensor.kind())?;
            record_refusal(&self.counters, edge, dtype, &dims, &error);
        }
        Ok(OnDevice::Refused)
    }

    /// Whether the message's edge has a codec that is to encode it.
    fn has_codec(&mut self, message: &Message) -> bool {
        message.encoding.compress && message.tag.edge().is_some_and(|edge| self.codecs.codec(edge).is_some())
    }

    /// Counts a tensor that is sent raw although its edge has a codec.
    fn count_sent_raw(&mut self, message: &Message) {
        if let Some(edge) = message.tag.edge().filter(|&edge| self.codecs.codec(edge).is_some()) {
            self.counters.count_sent_raw(edge);
        }
    }

    /// Fills `body` with the raw encoding of a tensor, unless that is its bytes in memory.
    fn encode_raw(&mut self, message: &Message, view: TensorView<'_>) -> Result<(), Fault> {
        self.body.clear();
        self.count_sent_raw(message);
        if !Raw.is_identity(view.dtype) {
            let encoded = Raw.encode(view, &CodecContext::default(), &mut self.body);
            encoded.map_err(|source| Fault::Codec { tensor: message.tag.to_string(), source })?;
        }
        Ok(())
    }

    /// Fills `body` with the codec of the message's edge. Returns `None` if the tensor is to be sent raw: the edge has no codec, or the
    /// codec refuses the tensor.
    fn encode_with_codec(
        &mut self,
        message: &Message,
        index: usize,
        view: TensorView<'_>,
    ) -> Result<Option<CodecId>, Fault> {
        self.body.clear();
        let Some(edge) = message.tag.edge().filter(|_| message.encoding.compress) else { return Ok(None) };
        let Some(EdgeCodec { codec, .. }) = self.codecs.codec(edge) else { return Ok(None) };
        match codec.encode(view, &context(message, index), &mut self.body) {
            Ok(()) => Ok(Some(codec.id())),
            Err(error) if error.refuses_tensor() => {
                record_refusal(&self.counters, edge, view.dtype, view.dims, &error);
                Ok(None)
            }
            Err(source) => Err(Fault::Codec { tensor: message.tag.to_string(), source }),
        }
    }
}

/// The memory from which a raw tensor is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryReach {
    /// That of the host, where tensors of GPUs are copied to.
    Host,
    /// That of the host and of GPUs.
    Gpus,
}

/// What became of a tensor on its GPU.
enum OnDevice {
    /// It must be encoded on the CPU.
    Unsupported,
    /// It must be sent raw.
    Refused,
    /// The codec and the body, in the GPU's memory.
    Encoded(CodecId, Tensor),
}

fn context(message: &Message, index: usize) -> CodecContext<'_> {
    let options = &message.encoding;
    CodecContext {
        slot: u64::from(message.tag.micro_batch) << 16 | index as u64,
        seed: options.seed.wrapping_add(index as u64),
        samples: &options.samples,
        training: options.training,
    }
}

fn record_refusal(counters: &Counters, edge: PartitionEdge, dtype: DType, dims: &[usize], error: &CodecError) {
    counters.record_refusal(edge, error, || format!("{dtype} {dims:?}: {error}"));
}
