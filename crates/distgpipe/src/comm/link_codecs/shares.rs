//! The gradients that replicas share, at one worker: tensors to bytes and back.
//!
//! The ring encodes and decodes shares itself, not the link: the sum of a share is encoded once, and its bytes go round.

use super::{dtype_of, LinkCodecs};
use crate::comm::message::EncodeOptions;
use crate::comm::traffic::{Counters, EncodingCost};
use crate::engine::{self, Layout, Stream};
use crate::failure::Fault;
use crate::runtime::trace::now_ns;
use distgpipe_core::codec::{Codec, CodecContext, TensorView};
use distgpipe_core::wire::{self, Shape, TensorMeta, HEADER_BYTES};
use std::sync::atomic::Ordering;
use tch::{Kind, Tensor};

/// Where a share is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hop {
    /// The number of the piece among those that a step sums.
    pub piece: u64,
    /// The round of the reduce-scatter; for the sum, the number of such rounds.
    pub round: usize,
}

/// The codecs of the shares that one worker sends and receives.
pub struct ShareCodecs {
    link_codecs: LinkCodecs,
    /// One for each round of the reduce-scatter, and one for the sum. They may keep state for each piece.
    encoders: Vec<Box<dyn Codec>>,
    /// Keeps no state: [`CodecPolicy::check`](crate::comm::codec_policy::CodecPolicy::check) refuses codecs whose decoder does.
    decoder: Box<dyn Codec>,
    /// The value of [`LinkCodecs::resets`] when the encoders were new.
    resets: u64,
    body: Vec<u8>,
    /// The counters of the link to the next replica.
    sent: Counters,
    /// The counters of the link from the previous replica.
    received: Counters,
}

impl ShareCodecs {
    /// The codecs of a worker among this many replicas; `None` if gradients are shared raw.
    pub fn new(link_codecs: &LinkCodecs, replicas: usize, sent: Counters, received: Counters) -> Option<Self> {
        let spec = &link_codecs.codecs.replicas;
        let codec = || spec.codec(link_codecs.executor.clone());
        (!spec.is_raw()).then(|| ShareCodecs {
            encoders: (0..replicas).map(|_| codec()).collect(),
            decoder: codec(),
            resets: link_codecs.resets.load(Ordering::Acquire),
            link_codecs: link_codecs.clone(),
            body: Vec::new(),
            sent,
            received,
        })
    }

    /// The encoding of a share, in host memory. `None` if the codec refuses the share, which then travels raw.
    pub fn encode(&mut self, share: &Tensor, hop: Hop, options: &EncodeOptions) -> Result<Option<Tensor>, Fault> {
        let resets = self.link_codecs.resets.load(Ordering::Acquire);
        if resets != self.resets {
            self.resets = resets;
            self.encoders.iter_mut().for_each(|codec| codec.reset());
        }
        let start = now_ns();
        let host = engine::on_host(share)?;
        let bytes = engine::bytes(&host).ok_or_else(|| Fault::internal("a dense share", format!("{host:?}")))?;
        let (dtype, dims) = (dtype_of(share.kind())?, [share.numel()]);
        let view = TensorView { dtype, dims: &dims, layout: wire::Layout::Contiguous, bytes };
        let context = CodecContext {
            slot: hop.piece << 16,
            seed: Stream::new(options.seed).at(hop.piece).at(hop.round as u64).seed(),
            samples: &[],
            training: options.training,
        };
        let codec = self.encoders.get_mut(hop.round).ok_or_else(|| Fault::internal("a round", format!("{hop:?}")))?;
        self.body.clear();
        match codec.encode(view, &context, &mut self.body) {
            Ok(()) => {
                let body = Tensor::f_from_slice(&self.body)?;
                self.sent.count_share(|traffic| traffic.encode_ns += now_ns().saturating_sub(start));
                Ok(Some(body))
            }
            Err(error) if error.refuses_tensor() => {
                let why = || format!("{dtype} {dims:?}: {error}");
                self.sent.count_share(|traffic| traffic.record_refusal(&error, why));
                Ok(None)
            }
            Err(source) => Err(Fault::Codec { tensor: "a share of gradients".to_owned(), source }),
        }
    }

    /// Decodes a share that has the size and type of `like`, into host memory near its device.
    pub fn decode(&mut self, body: &Tensor, like: &Tensor) -> Result<Tensor, Fault> {
        let start = now_ns();
        let host = engine::on_host(body)?;
        let bytes = engine::bytes(&host).ok_or_else(|| Fault::internal("a dense body", format!("{host:?}")))?;
        let (dtype, dims) = (dtype_of(like.kind())?, [like.numel()]);
        let max = self.decoder.encoded_bytes(dtype, &dims);
        if bytes.len() > max || !self.decoder.size_varies() && bytes.len() != max {
            let at_most = if self.decoder.size_varies() { "at most " } else { "" };
            let expected = format!("{at_most}{max} bytes for a share of {} gradients", like.numel());
            return Err(Fault::protocol(expected, bytes.len().to_string()));
        }
        let shape = Shape::new(&dims).map_err(Fault::invalid_model)?;
        let meta = TensorMeta { dtype, layout: wire::Layout::Contiguous, shape, codec: self.decoder.id() };
        let mut share = engine::empty_near(like.device(), &[like.numel() as i64], like.kind(), Layout::Contiguous)?;
        let into = engine::bytes_mut(&mut share).ok_or_else(|| Fault::internal("a dense tensor", "another"))?;
        let decoded = self.decoder.decode(&meta, bytes, into);
        decoded.map_err(|source| Fault::Codec { tensor: "a share of gradients".to_owned(), source })?;
        self.received.count_share_decoded(now_ns().saturating_sub(start));
        Ok(share)
    }

    /// Counts a share that is sent, as `tensor`, and takes this many bytes in memory.
    pub fn count(&self, tensor: &Tensor, raw_bytes: u64) {
        let is_encoded = tensor.kind() == Kind::Uint8;
        let body_bytes = if is_encoded { tensor.numel() as u64 } else { raw_bytes };
        self.sent.count_share(|traffic| {
            traffic.count(EncodingCost { raw_bytes, wire_bytes: HEADER_BYTES as u64 + body_bytes, encode_ns: 0 });
            // Empty shares, of fewer gradients than replicas, have nothing to encode.
            traffic.sent_raw += u64::from(!is_encoded && raw_bytes > 0);
        });
    }
}
