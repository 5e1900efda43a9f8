//! The receiving end of a link: bytes to tensors.

use super::dtype::kind_of;
use super::{on_device, CodecCache, LinkCodecs};
use crate::comm::message::Tag;
use crate::comm::traffic::Counters;
use crate::engine::{self, Layout};
use crate::failure::Fault;
use crate::runtime::trace::{now_ns, Phase};
use distgpipe_core::codec::raw::Raw;
use distgpipe_core::codec::{Codec, CodecId};
use distgpipe_core::wire::{self, Header, Kind, TensorMeta};
use tch::Tensor;

/// The free memory is looked up each time when tensors of this size in sum have arrived, and for each that is as large. That takes
/// much less time than their transfer.
const LARGE_BYTES: u64 = 16 << 20;

/// A body is received in pieces of this size, each into memory that is touched when the one before has arrived: a header alone
/// costs its sender as much as it costs this end.
const PIECE_BYTES: usize = 4 << 20;
// MPI receives messages of the sizes that were sent, which are cut from the whole body.
#[cfg(feature = "mpi")]
const _: () = {
    use crate::comm::transport::mpi;
    assert!(PIECE_BYTES.is_multiple_of(mpi::PIECE_BYTES) && PIECE_BYTES.is_multiple_of(mpi::GPU_PIECE_BYTES));
};

/// A buffer beyond this size is freed as soon as a body needs much less.
const KEPT_BYTES_MAX: usize = 64 << 20;

/// The body of a frame, as it comes from a connection.
pub trait FrameBody {
    /// Fills `piece` with the next bytes of the body. Every piece but the last is 4 MiB long, or the piece is all of it.
    fn read(&mut self, piece: &mut [u8]) -> Result<(), Fault>;

    /// Whether the body comes from the memory of a GPU, and can be received into that of another.
    fn comes_from_a_gpu(&self) -> bool {
        false
    }

    /// Fills a tensor on a GPU, which has the size of the body, with [such](Self::comes_from_a_gpu) a body.
    fn read_on_gpu(&mut self, into: &Tensor) -> Result<(), Fault> {
        Err(Fault::internal("a tensor in host memory", format!("{into:?}")))
    }

    /// Compares the body, all of which has been read, with its checksum, if it has one.
    fn verify(self) -> Result<(), Fault>;
}

/// Fills memory that has been allocated for the whole body.
fn fill(mut body: impl FrameBody, into: &mut [u8]) -> Result<(), Fault> {
    body.read(into)?;
    body.verify()
}

/// Receives a body of this length. The buffer grows with what arrives.
pub(crate) fn receive(mut body: impl FrameBody, bytes: u64, into: &mut Vec<u8>) -> Result<(), Fault> {
    let too_long = || Fault::protocol("a body that fits into memory", format!("{bytes} bytes"));
    let length = usize::try_from(bytes).map_err(|_| too_long())?;
    into.truncate(length);
    // Pages that nobody has touched take no memory. Growing piece by piece would move what has arrived.
    into.try_reserve_exact(length - into.len()).map_err(|_| too_long())?;
    let mut at = 0;
    while at < length {
        let end = length.min(at + PIECE_BYTES);
        if into.len() < end {
            into.resize(end, 0);
        }
        body.read(&mut into[at..end])?;
        at = end;
    }
    body.verify()
}

/// Decodes the tensors that one direction of a link receives.
pub struct Decoder {
    /// `None` during the handshake, when no job is known: everything is raw then.
    codecs: Option<CodecCache>,
    raw: Raw,
    counters: Counters,
    body: Vec<u8>,
    /// Bytes that have arrived since the free memory was looked up.
    unchecked_bytes: u64,
}

impl Decoder {
    /// A decoder that counts its tensors on `counters`.
    pub fn new(link_codecs: LinkCodecs, counters: Counters) -> Self {
        Decoder { codecs: Some(CodecCache::new(link_codecs)), raw: Raw, counters, body: Vec::new(), unchecked_bytes: 0 }
    }

    /// A decoder for the frames before the job, which are all raw.
    pub fn raw() -> Self {
        Decoder { codecs: None, raw: Raw, counters: Counters::default(), body: Vec::new(), unchecked_bytes: 0 }
    }

    /// The device that a tensor of this kind is copied to next. State tensors stay on the CPU.
    fn device(&self, kind: Kind) -> tch::Device {
        let computed = matches!(kind, Kind::Activation | Kind::Gradient | Kind::Input | Kind::Target | Kind::Share);
        self.codecs.as_ref().filter(|_| computed).map_or(tch::Device::Cpu, |codecs| codecs.link_codecs.device)
    }

    /// Reads and decodes the tensor of a frame whose header has been checked. Compares what body and tensor take with the free memory
    /// before anything is allocated for them.
    pub fn read(&mut self, header: &Header, meta: &TensorMeta, mut body: impl FrameBody) -> Result<Tensor, Fault> {
        let bytes = header.body_bytes;
        if meta.codec == CodecId::Raw && Raw.is_identity(meta.dtype) {
            let device = self.device(header.kind);
            // A ring that shares gradients takes them from the host.
            if device.is_cuda() && header.kind != Kind::Share && body.comes_from_a_gpu() {
                let tensor = on_device::empty(meta, device)?;
                body.read_on_gpu(&tensor)?;
                body.verify()?;
                return Ok(tensor);
            }
            self.require_memory(bytes)?;
            let mut tensor = empty(meta, device)?;
            fill(body, bytes_of(&mut tensor)?)?;
            return if header.kind == Kind::Share { Ok(tensor) } else { on_device::upload(tensor, device) };
        }
        let tag = Tag::of(header);
        // The body's size is checked against what the codec can produce before memory is allocated for it.
        let dims: Vec<usize> = meta.shape.dims().iter().map(|&d| usize::try_from(d).unwrap_or(usize::MAX)).collect();
        let codec = self.codec(&tag, meta.codec)?;
        let max = codec.encoded_bytes(meta.dtype, &dims) as u64;
        if bytes > max || !codec.size_varies() && bytes != max {
            let at_most = if codec.size_varies() { "at most " } else { "" };
            return Err(Fault::protocol(format!("{at_most}{max} bytes for {tag}"), bytes.to_string()));
        }
        if self.decodes_on_device(&tag, meta)? {
            self.require_memory(bytes)?;
            let mut received = body_for(self.device(tag.kind), bytes)?;
            fill(body, bytes_of(&mut received)?)?;
            return self.decode_received(&tag, meta, &received);
        }
        if self.body.capacity() > KEPT_BYTES_MAX && bytes < self.body.capacity() as u64 / 8 {
            self.body = Vec::new();
        }
        let has = self.body.capacity() as u64;
        self.require_memory(meta.decoded_bytes().saturating_add(bytes.saturating_sub(has)))?;
        let mut received = std::mem::take(&mut self.body);
        let decoded = receive(body, bytes, &mut received).and_then(|()| self.decode(&tag, meta, &received));
        self.body = received;
        decoded
    }

    /// How much of the buffer for bodies has been written to: the rest takes no memory.
    #[cfg(test)]
    pub(super) fn touched_bytes(&self) -> usize {
        self.body.len()
    }

    /// The size of the buffer for bodies.
    #[cfg(test)]
    pub(super) fn kept_bytes(&self) -> usize {
        self.body.capacity()
    }

    /// Checks that this process can get so much memory for what a peer sends. A header of a few bytes may announce gigabytes, and so
    /// may many small tensors.
    fn require_memory(&mut self, needs_bytes: u64) -> Result<(), Fault> {
        self.unchecked_bytes = self.unchecked_bytes.saturating_add(needs_bytes);
        if self.unchecked_bytes < LARGE_BYTES {
            return Ok(());
        }
        self.unchecked_bytes = 0;
        engine::require_memory("a tensor from a peer", needs_bytes.into(), "use smaller batches, or more micro-batches")
    }

    /// Decodes the tensor of a body that has arrived whole.
    pub fn decode(&mut self, tag: &Tag, meta: &TensorMeta, body: &[u8]) -> Result<Tensor, Fault> {
        if self.decodes_on_device(tag, meta)? {
            let mut copy = body_for(self.device(tag.kind), body.len() as u64)?;
            bytes_of(&mut copy)?.copy_from_slice(body);
            return self.decode_received(tag, meta, &copy);
        }
        let start = now_ns();
        let mut tensor = empty(meta, self.device(tag.kind))?;
        let bytes = bytes_of(&mut tensor)?;
        let decoded = self.codec(tag, meta.codec)?.decode(meta, body, bytes);
        decoded.map_err(|source| Fault::Codec { tensor: tag.to_string(), source })?;
        self.count(tag, meta, start);
        Ok(tensor)
    }

    /// Whether a tensor is decoded on the worker's GPU.
    fn decodes_on_device(&mut self, tag: &Tag, meta: &TensorMeta) -> Result<bool, Fault> {
        let device = self.device(tag.kind);
        Ok(device != tch::Device::Cpu && on_device::decodes(self.codec(tag, meta.codec)?, meta, device))
    }

    /// Decodes the tensor of a body that this process has encoded, from its memory on this host or on a GPU.
    pub(super) fn decode_from(&mut self, tag: &Tag, meta: &TensorMeta, body: &Tensor) -> Result<Tensor, Fault> {
        if body.device().is_cuda() && body.device() == self.device(tag.kind) && meta.codec == CodecId::Raw {
            return Ok(body.f_detach()?);
        }
        if body.device() == self.device(tag.kind) && self.decodes_on_device(tag, meta)? {
            return self.decode_on_device(tag, meta, body);
        }
        let host = engine::on_host(body)?;
        let bytes = engine::bytes(&host).ok_or_else(|| Fault::internal("a dense tensor in host memory", "another"))?;
        self.decode(tag, meta, bytes)
    }

    /// Decodes a body from a peer, in host memory, on the worker's GPU.
    fn decode_received(&mut self, tag: &Tag, meta: &TensorMeta, body: &Tensor) -> Result<Tensor, Fault> {
        let bytes = engine::bytes(body).unwrap_or_default();
        let checked = self.codec(tag, meta.codec)?.check(meta, bytes);
        checked.map_err(|source| Fault::Codec { tensor: tag.to_string(), source })?;
        self.decode_on_device(tag, meta, body)
    }

    /// Decodes a valid body on the worker's GPU.
    fn decode_on_device(&mut self, tag: &Tag, meta: &TensorMeta, body: &Tensor) -> Result<Tensor, Fault> {
        let start = now_ns();
        let device = self.device(tag.kind);
        let tensor = on_device::decode(self.codec(tag, meta.codec)?, meta, body, device)?;
        self.count(tag, meta, start);
        tensor.ok_or_else(|| Fault::internal("a codec with kernels", meta.codec.to_string()))
    }

    /// Counts a decoded tensor that has crossed an edge.
    fn count(&self, tag: &Tag, meta: &TensorMeta, start: u64) {
        if let Some((edge, codecs)) = tag.edge().zip(self.codecs.as_ref()) {
            self.counters.count_decoded(edge, now_ns().saturating_sub(start));
            if meta.codec != CodecId::Raw {
                codecs.link_codecs.background.record(tag.step, Phase::Decode, tag, start);
            }
        }
    }

    /// The codec for a frame that says codec `id` encoded it. Any frame may be raw; otherwise it must be the job's codec.
    fn codec(&mut self, tag: &Tag, id: CodecId) -> Result<&mut dyn Codec, Fault> {
        if id == CodecId::Raw {
            return Ok(&mut self.raw);
        }
        let codecs = tag.edge().zip(self.codecs.as_mut());
        match codecs.and_then(|(edge, codecs)| codecs.codec(edge)) {
            Some(edge) if edge.codec.id() == id => Ok(edge.codec.as_mut()),
            Some(edge) => Err(Fault::protocol(format!("{tag} in codec {} or raw", edge.codec.id()), id.to_string())),
            None => Err(Fault::protocol(format!("{tag} raw"), format!("codec {id}"))),
        }
    }
}

/// A tensor in host memory for the decoder to fill, from where the copy to `device` is fast.
fn empty(meta: &TensorMeta, device: tch::Device) -> Result<Tensor, Fault> {
    let dims: Vec<i64> = meta.shape.dims().iter().map(|&d| i64::try_from(d).unwrap_or(i64::MAX)).collect();
    let layout = match meta.layout {
        wire::Layout::ChannelsLast if dims.len() == 4 => Layout::ChannelsLast,
        _ => Layout::Contiguous,
    };
    let kind = kind_of(meta.dtype);
    engine::empty_near(device, &dims, kind, layout)
}

/// Host memory for a body that is decoded on `device`.
fn body_for(device: tch::Device, bytes: u64) -> Result<Tensor, Fault> {
    let length = i64::try_from(bytes).unwrap_or(i64::MAX);
    engine::empty_near(device, &[length], tch::Kind::Uint8, Layout::Contiguous)
}

/// The bytes of a new tensor.
fn bytes_of(tensor: &mut Tensor) -> Result<&mut [u8], Fault> {
    engine::bytes_mut(tensor).ok_or_else(|| Fault::internal("a dense tensor in host memory", "another"))
}
