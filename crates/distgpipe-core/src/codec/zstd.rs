//! `zstd(C)`, `zstd:LEVEL(C)`: the body of codec `C`, compressed without loss by zstd (level 1 unless given).
//!
//! ```text
//! body    0 u8 | C's body                         if it does not shrink
//!         1 u8 | chunks                           C's body, in order
//! chunk   form u8 | bytes of C's body u32 | bytes of the streams u32 | streams
//! stream  length u31, lowest bits first, then one bit | that many bytes: a zstd frame if the bit is set
//!
//! form    0   the bytes                           one stream
//!         2   values of two bytes                 a bitmap of those that are not 0; these, in one stream for each byte
//!         3   codes of three bits                 one stream, four bits a code
//!         4   values of four bytes                as those of two
//! ```
//!
//! Codes of neighbours are alike, many values are exactly 0, and the exponents of floats are few. [`Codec::body_parts`]
//! tells which bytes of a body are what. A chunk is at most 192 KiB of the body, however many threads there are, so the
//! bytes do not depend on them.
//!
//! Tensors of other types than floats, such as token ids and masks, are compressed as they are: the inner codec is
//! `raw` for them.
//!
//! A decoder accepts no more than the inner codec's body can have. A frame must state the size of its content, which is
//! known beforehand, and have no dictionary, no window beyond its content and no checksum (the frame of the transport
//! has one). So a peer cannot make the decoder allocate more than the inner codec would.

mod chunk;
mod planes;
#[cfg(test)]
mod tests;

use super::kernel_runner::KernelRunner;
use super::raw::Raw;
use super::{beginning, check_codec, check_out, number, parse_f32};
use super::{Arguments, BodyPart, Codec, CodecContext, CodecError, CodecId, Executor, Member, PartForm, TensorView};
use crate::wire::{DType, TensorMeta, DIMS_MAX};
use chunk::{Chunk, CodedChunk, Worker, CHUNK_BYTES};
use std::sync::Arc;

pub(super) const MEMBER: Member = Member {
    name: "zstd",
    id: CodecId::Zstd,
    examples: &[
        "zstd(raw)",
        "zstd(tile:4)",
        "zstd:3(sort:8)",
        "zstd(tile:3)",
        "zstd(bf16)",
        "zstd:19(f16)",
        "zstd(uniform:8)",
        "zstd(topk:0.1)",
        "zstd(svd:1)",
        "zstd(feedback(tile:4))",
        "zstd(delta(tile:4))",
    ],
    about: "zstd(C) or zstd:LEVEL(C), the body of codec C compressed without loss at level 1 (unless given) to 19",
    parse: |arguments| parse(arguments).map(|codec| Box::new(codec) as _),
};

const EXPECTED: &str =
    "zstd(C) or zstd:LEVEL(C) with C the codec to compress and LEVEL from 1 to 19 (1 unless given), \
                        such as zstd(tile:4) or zstd:3(raw)";
const LEVEL_DEFAULT: u32 = 1;
const LEVEL_MAX: u32 = 19;

/// The first byte of a body that did not shrink.
const STORED: u8 = 0;
/// The first byte of a body of chunks.
const CHUNKS: u8 = 1;

/// The parts of shorter bodies are compressed together: each stream costs a few bytes.
const PARTS_MIN: usize = 4096;

fn parse(arguments: Arguments<'_>) -> Result<Zstd, CodecError> {
    let given = arguments.parameter.unwrap_or("");
    let wrong = || CodecError::parameter("zstd", EXPECTED, given);
    let level = match arguments.parameter {
        None => Some(LEVEL_DEFAULT),
        Some(text) => number(text).filter(|level| (1..=LEVEL_MAX).contains(level)),
    };
    let (level, text) = level.zip(arguments.inner.filter(|text| !text.is_empty())).ok_or_else(wrong)?;
    let inner = parse_f32(text)?;
    if inner.id() == CodecId::Zstd {
        return Err(CodecError::CompressedInside { got: beginning(text) });
    }
    Ok(Zstd::new(level as i32, inner))
}

/// The codec `zstd(C)`: an encoder or a decoder.
pub struct Zstd {
    level: i32,
    inner: Inner,
    runner: KernelRunner,
    /// One for each thread.
    workers: Vec<Worker>,
    /// The inner codec's body.
    plain: Vec<u8>,
    chunks: Vec<Chunk>,
    coded: Vec<CodedChunk>,
}

/// The codec whose bodies are compressed.
struct Inner {
    floats: Box<dyn Codec>,
    others: Raw,
}

impl Inner {
    fn codec(&self, dtype: DType) -> &dyn Codec {
        match dtype {
            DType::F32 | DType::F16 | DType::BF16 => &*self.floats,
            _ => &self.others,
        }
    }

    fn codec_mut(&mut self, dtype: DType) -> &mut dyn Codec {
        match dtype {
            DType::F32 | DType::F16 | DType::BF16 => &mut *self.floats,
            _ => &mut self.others,
        }
    }
}

impl Zstd {
    fn new(level: i32, floats: Box<dyn Codec>) -> Self {
        let inner = Inner { floats, others: Raw };
        let (runner, workers, plain) = (KernelRunner::default(), Vec::new(), Vec::new());
        Zstd { level, inner, runner, workers, plain, chunks: Vec::new(), coded: Vec::new() }
    }

    /// Cuts a body of the inner codec into `self.chunks`.
    fn cut(&mut self, dtype: DType, dims: &[usize], body: &[u8]) {
        let chunks = &mut self.chunks;
        chunks.clear();
        let mut start = 0;
        let mut push = |part: BodyPart| {
            let end = body.len().min(start + part.bytes);
            while start < end {
                let bytes = CHUNK_BYTES.min(end - start);
                chunks.push(Chunk { form: part.form, start, bytes });
                start += bytes;
            }
        };
        if body.len() >= PARTS_MIN {
            self.inner.codec(dtype).body_parts(dtype, dims, body, &mut push);
        }
        push(BodyPart { form: PartForm::Bytes, bytes: body.len() });
    }

    /// The number of chunks for each worker, of `chunks` chunks of a tensor with this many elements.
    fn share(&mut self, elements: usize, chunks: usize) -> usize {
        let workers = elements.div_ceil(self.runner.piece(elements, 1)).clamp(1, chunks.max(1));
        let level = self.runner.level;
        self.workers.resize_with(self.workers.len().max(workers), || Worker::new(level));
        chunks.div_ceil(workers).max(1)
    }

    /// Appends the compressed body to `out`, or the body itself if that is not longer.
    fn compress(&mut self, tensor: &TensorView<'_>, body: &[u8], out: &mut Vec<u8>) {
        self.cut(tensor.dtype, tensor.dims, body);
        let share = self.share(tensor.bytes.len() / tensor.dtype.size_bytes(), self.chunks.len());
        let (level, groups) = (self.level, self.chunks.chunks(share));
        let workers = &mut self.workers[..groups.len()];
        self.runner.each(groups.zip(workers.iter_mut()), |(chunks, worker)| {
            worker.out.clear();
            for chunk in chunks {
                worker.encode(level, chunk.form, &body[chunk.start..chunk.start + chunk.bytes]);
            }
        });
        let compressed: usize = workers.iter().map(|worker| worker.out.len()).sum();
        if compressed < body.len() {
            out.reserve(1 + compressed);
            out.push(CHUNKS);
            workers.iter().for_each(|worker| out.extend_from_slice(&worker.out));
        } else {
            out.reserve(1 + body.len());
            out.push(STORED);
            out.extend_from_slice(body);
        }
    }

    /// Reads the heads of all chunks into `self.coded`; returns the length of the inner codec's body.
    fn read_heads(&mut self, meta: &TensorMeta, chunks: &[u8]) -> Result<usize, CodecError> {
        let mut dims = [0; DIMS_MAX];
        dims.iter_mut().zip(meta.shape.dims()).for_each(|(to, &dim)| *to = usize::try_from(dim).unwrap_or(usize::MAX));
        let inner = self.inner.codec(meta.dtype);
        let most = inner.encoded_bytes(meta.dtype, &dims[..meta.shape.rank()]);
        self.coded.clear();
        let (mut at, mut bytes) = (0, 0);
        while at < chunks.len() {
            let chunk = CodedChunk::read(chunks, at)?;
            (at, bytes) = (chunk.streams.end, bytes + chunk.bytes);
            if bytes > most {
                break;
            }
            self.coded.push(chunk);
        }
        if bytes > most || bytes < most && !inner.size_varies() {
            return Err(CodecError::BodyLength { codec: inner.id(), expected: most as u64, got: bytes as u64 });
        }
        Ok(bytes)
    }

    /// Decompresses the chunks of `self.coded` into `out`, which is as long as they say.
    fn decompress(&mut self, elements: usize, chunks: &[u8], out: &mut [u8]) -> Result<(), CodecError> {
        let share = self.share(elements, self.coded.len());
        let groups = self.coded.chunks(share);
        let workers = &mut self.workers[..groups.len()];
        let mut rest = out;
        let rooms = groups.clone().map(|group| {
            let (room, after) = std::mem::take(&mut rest).split_at_mut(group.iter().map(|chunk| chunk.bytes).sum());
            rest = after;
            room
        });
        self.runner.each(groups.clone().zip(rooms).zip(workers.iter_mut()), |((group, mut room), worker)| {
            let each = group.iter().try_for_each(|chunk| {
                let (out, after) = std::mem::take(&mut room).split_at_mut(chunk.bytes);
                room = after;
                worker.decode(chunk, chunks, out)
            });
            worker.error = each.err();
        });
        workers.iter_mut().find_map(|worker| worker.error.take()).map_or(Ok(()), Err)
    }
}

impl Codec for Zstd {
    fn id(&self) -> CodecId {
        CodecId::Zstd
    }

    fn encoded_bytes(&self, dtype: DType, dims: &[usize]) -> usize {
        self.inner.codec(dtype).encoded_bytes(dtype, dims).saturating_add(1)
    }

    fn refuses_shape(&self, dims: &[usize]) -> bool {
        self.inner.floats.refuses_shape(dims)
    }

    fn size_varies(&self) -> bool {
        true
    }

    fn is_lossless(&self) -> bool {
        self.inner.floats.is_lossless()
    }

    fn encode(
        &mut self,
        tensor: TensorView<'_>,
        context: &CodecContext<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        let inner = self.inner.codec_mut(tensor.dtype);
        if inner.is_identity(tensor.dtype) {
            tensor.elements()?;
            self.compress(&tensor, tensor.bytes, out);
            return Ok(());
        }
        self.plain.clear();
        inner.encode(tensor, context, &mut self.plain)?;
        let plain = std::mem::take(&mut self.plain);
        self.compress(&tensor, &plain, out);
        self.plain = plain;
        Ok(())
    }

    fn decode(&mut self, meta: &TensorMeta, body: &[u8], out: &mut [u8]) -> Result<(), CodecError> {
        check_codec(self.id(), meta)?;
        check_out(meta, out)?;
        let inner = self.inner.codec(meta.dtype);
        let (inner_meta, is_identity) = (TensorMeta { codec: inner.id(), ..*meta }, inner.is_identity(meta.dtype));
        match body.split_first() {
            Some((&STORED, body)) => self.inner.codec_mut(meta.dtype).decode(&inner_meta, body, out),
            Some((&CHUNKS, chunks)) => {
                let bytes = self.read_heads(meta, chunks)?;
                let elements = out.len() / meta.dtype.size_bytes();
                if is_identity {
                    return self.decompress(elements, chunks, out);
                }
                let mut plain = std::mem::take(&mut self.plain);
                plain.resize(bytes, 0);
                let decoded = self.decompress(elements, chunks, &mut plain);
                let decoded = decoded.and_then(|()| self.inner.codec_mut(meta.dtype).decode(&inner_meta, &plain, out));
                self.plain = plain;
                decoded
            }
            Some((&got, _)) => Err(CodecError::FirstByte { codec: self.id(), expected: "0 or 1", got }),
            None => Err(CodecError::BodyLength { codec: self.id(), expected: 1, got: 0 }),
        }
    }

    fn wants_samples(&self) -> bool {
        self.inner.floats.wants_samples()
    }

    fn kept_bytes_max(&self) -> u64 {
        self.inner.floats.kept_bytes_max()
    }

    fn remembers(&self) -> bool {
        self.inner.floats.remembers()
    }

    fn set_executor(&mut self, executor: Arc<dyn Executor>) {
        self.inner.floats.set_executor(executor.clone());
        self.runner.set_executor(executor);
    }

    fn reset(&mut self) {
        self.inner.floats.reset();
    }
}
