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

/// Tensors from this size on are compared with the free memory before they are allocated. The comparison takes much less time
/// than their transfer.
const LARGE_BYTES: u128 = 16 << 20;

/// Decodes the tensors that one direction of a link receives.
pub struct Decoder {
    /// `None` during the handshake, when no job is known: everything is raw then.
    codecs: Option<CodecCache>,
    raw: Raw,
    counters: Counters,
    body: Vec<u8>,
}

impl Decoder {
    /// A decoder that counts its tensors on `counters`.
    pub fn new(link_codecs: LinkCodecs, counters: Counters) -> Self {
        Decoder { codecs: Some(CodecCache::new(link_codecs)), raw: Raw, counters, body: Vec::new() }
    }

    /// A decoder for the frames before the job, which are all raw.
    pub fn raw() -> Self {
        Decoder { codecs: None, raw: Raw, counters: Counters::default(), body: Vec::new() }
    }

    /// The device that a tensor of this kind is copied to next. State tensors stay on the CPU.
    fn device(&self, kind: Kind) -> tch::Device {
        let computed = matches!(kind, Kind::Activation | Kind::Gradient | Kind::Input | Kind::Target | Kind::Share);
        self.codecs.as_ref().filter(|_| computed).map_or(tch::Device::Cpu, |codecs| codecs.link_codecs.device)
    }

    /// Reads and decodes the tensor of a frame whose header has been checked. `fill` reads the body from the connection and compares
    /// it with its checksum.
    pub fn read(
        &mut self,
        header: &Header,
        meta: &TensorMeta,
        fill: impl FnOnce(&mut [u8]) -> Result<(), Fault>,
    ) -> Result<Tensor, Fault> {
        if meta.codec == CodecId::Raw && Raw.is_identity(meta.dtype) {
            let mut tensor = empty(meta, self.device(header.kind))?;
            let bytes = bytes_of(&mut tensor)?;
            fill(bytes)?;
            return Ok(tensor);
        }
        let tag = Tag::of(header);
        // The body's size is checked against what the codec can produce before memory is allocated for it.
        let dims: Vec<usize> = meta.shape.dims().iter().map(|&d| usize::try_from(d).unwrap_or(usize::MAX)).collect();
        let codec = self.codec(&tag, meta.codec)?;
        let max = codec.encoded_bytes(meta.dtype, &dims) as u64;
        if header.body_bytes > max || !codec.size_varies() && header.body_bytes != max {
            let at_most = if codec.size_varies() { "at most " } else { "" };
            return Err(Fault::protocol(format!("{at_most}{max} bytes for {tag}"), header.body_bytes.to_string()));
        }
        if self.decodes_on_device(&tag, meta)? {
            let mut body = body_for(self.device(tag.kind), header.body_bytes)?;
            fill(bytes_of(&mut body)?)?;
            return self.decode_received(&tag, meta, &body);
        }
        let mut body = std::mem::take(&mut self.body);
        body.resize(usize::try_from(header.body_bytes).unwrap_or(usize::MAX), 0);
        fill(&mut body)?;
        let tensor = self.decode(&tag, meta, &body);
        self.body = body;
        tensor
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
    let elements = meta.shape.dims().iter().map(|&dim| u128::from(dim));
    let needs_bytes = elements.fold(kind.elt_size_in_bytes() as u128, u128::saturating_mul);
    // A header of a few bytes may announce a tensor of gigabytes.
    if needs_bytes >= LARGE_BYTES {
        engine::require_memory("a tensor from a peer", needs_bytes, "use smaller batches, or more micro-batches")?;
    }
    engine::empty_near(device, &dims, kind, layout)
}

/// Host memory for a body that is decoded on `device`.
fn body_for(device: tch::Device, bytes: u64) -> Result<Tensor, Fault> {
    let length = i64::try_from(bytes).unwrap_or(i64::MAX);
    if u128::from(bytes) >= LARGE_BYTES {
        engine::require_memory("a tensor from a peer", bytes.into(), "use smaller batches, or more micro-batches")?;
    }
    engine::empty_near(device, &[length], tch::Kind::Uint8, Layout::Contiguous)
}

/// The bytes of a new tensor.
fn bytes_of(tensor: &mut Tensor) -> Result<&mut [u8], Fault> {
    engine::bytes_mut(tensor).ok_or_else(|| Fault::internal("a dense tensor in host memory", "another"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use distgpipe_core::wire::{DType, Shape};

    /// At the driver too, whose process has no limit of its own.
    #[test]
    fn a_tensor_that_a_peer_announces_is_not_allocated_if_this_host_has_not_the_memory() {
        let shape = Shape::new(&[1 << 30, 1 << 14]).unwrap();
        let meta = TensorMeta { dtype: DType::F32, layout: wire::Layout::Contiguous, shape, codec: CodecId::Raw };
        let refused = empty(&meta, tch::Device::Cpu).unwrap_err().to_string();
        assert!(refused.contains("a tensor from a peer takes"), "{refused}");
    }
}
