//! A chunk of a body, its streams, and the frame of each stream. The documentation of [`zstd`](super) has the format.

use super::super::simd::Level;
use super::super::{CodecError, PartForm};
use super::planes::{self, Planes};
use std::ops::Range;
use zstd_safe::{CCtx, CParameter, DCtx};

/// The most bytes of a body in one chunk. It is divisible by the size of every value and by the three bytes that eight
/// codes take. Larger chunks compress hardly better, and smaller ones can be split over more threads.
pub(super) const CHUNK_BYTES: usize = 3 << 16;

/// The size of a chunk's head: form, bytes of the body, bytes of the streams.
const HEAD_BYTES: usize = 1 + 4 + 4;

/// The bit in the length of a stream that is set if the stream is compressed.
const FRAME: u32 = 1 << 31;

/// Shorter streams are stored: a frame needs about as many bytes.
const FRAME_MIN: usize = 32;

/// Exponents follow a distribution rather than repeat each other. With a tiny table and long matches, zstd finds little
/// to repeat and does little besides entropy coding, which is faster and smaller.
const PLANE_PARAMETERS: [CParameter; 3] =
    [CParameter::CompressionLevel(1), CParameter::HashLog(6), CParameter::MinMatch(7)];

/// A chunk of a body to encode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    pub form: PartForm,
    /// Where it begins in the body.
    pub start: usize,
    pub bytes: usize,
}

/// A chunk to decode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CodedChunk {
    pub form: PartForm,
    /// Where its streams are in the compressed body.
    pub streams: Range<usize>,
    /// The number of bytes that it decodes to.
    pub bytes: usize,
}

impl CodedChunk {
    /// Reads the head at the beginning of `body[at..]`, which must have the streams as well.
    pub fn read(body: &[u8], at: usize) -> Result<Self, CodecError> {
        let wrong = |expected| CodecError::Compressed { expected, at: at as u64 };
        let (head, streams) = body[at..].split_first_chunk().ok_or(wrong("the head of another chunk"))?;
        let &[form, a, b, c, d, e, f, g, h]: &[u8; HEAD_BYTES] = head;
        let form = form_of(form).ok_or(wrong("a form of 0, 2, 3 or 4"))?;
        let (bytes, length) = (u32::from_le_bytes([a, b, c, d]) as usize, u32::from_le_bytes([e, f, g, h]) as usize);
        if bytes == 0 || bytes > CHUNK_BYTES || bytes % value_bytes(form) != 0 {
            return Err(wrong("a chunk of 1 to 196608 bytes that are whole values"));
        }
        if length > streams.len() {
            return Err(wrong("the streams of a chunk"));
        }
        let start = at + HEAD_BYTES;
        Ok(CodedChunk { form, streams: start..start + length, bytes })
    }
}

fn number_of(form: PartForm) -> u8 {
    match form {
        PartForm::Bytes => 0,
        PartForm::Values16 => 2,
        PartForm::Codes3 => 3,
        PartForm::Values32 => 4,
    }
}

fn form_of(number: u8) -> Option<PartForm> {
    let forms = [PartForm::Bytes, PartForm::Values16, PartForm::Codes3, PartForm::Values32];
    forms.into_iter().find(|&form| number_of(form) == number)
}

fn value_bytes(form: PartForm) -> usize {
    match form {
        PartForm::Bytes | PartForm::Codes3 => 1,
        PartForm::Values16 => 2,
        PartForm::Values32 => 4,
    }
}

/// The contexts and buffers of one thread, all of them reused.
pub(super) struct Worker {
    simd: Level,
    /// At the codec's level.
    compressor: Option<CCtx<'static>>,
    /// For planes.
    plane_compressor: Option<CCtx<'static>>,
    decompressor: Option<DCtx<'static>>,
    planes: Planes,
    nibbles: Vec<u8>,
    frame: Vec<u8>,
    /// The chunks that this worker has encoded.
    pub out: Vec<u8>,
    /// Why this worker could not decode its chunks.
    pub error: Option<CodecError>,
}

impl Worker {
    /// A worker that uses these instructions.
    pub fn new(simd: Level) -> Self {
        let (compressor, plane_compressor, decompressor) = (None, None, None);
        let (planes, nibbles, frame, out) = Default::default();
        Worker { simd, compressor, plane_compressor, decompressor, planes, nibbles, frame, out, error: None }
    }

    /// Appends a chunk of these bytes to `out`.
    pub fn encode(&mut self, level: i32, form: PartForm, bytes: &[u8]) {
        let start = self.out.len();
        // A part of a body that is not made of whole values would be a mistake of its codec, which costs bytes only.
        let form = if bytes.len().is_multiple_of(value_bytes(form)) { form } else { PartForm::Bytes };
        self.out.push(number_of(form));
        self.out.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
        self.out.extend_from_slice(&[0; 4]);
        match form {
            PartForm::Bytes => self.push_stream(level, bytes),
            PartForm::Codes3 => {
                planes::widen(bytes, &mut self.nibbles);
                let nibbles = std::mem::take(&mut self.nibbles);
                self.push_stream(level, &nibbles);
                self.nibbles = nibbles;
            }
            PartForm::Values16 => self.push_values::<2>(level, bytes),
            PartForm::Values32 => self.push_values::<4>(level, bytes),
        }
        let length = (self.out.len() - start - HEAD_BYTES) as u32;
        self.out[start + 5..start + HEAD_BYTES].copy_from_slice(&length.to_le_bytes());
    }

    fn push_values<const N: usize>(&mut self, level: i32, bytes: &[u8]) {
        self.planes.split::<N>(self.simd, bytes);
        let planes = std::mem::take(&mut self.planes);
        self.push_stream(level, &planes.mask);
        let length = planes.bytes.len() / N;
        (0..N).for_each(|plane| self.push_plane(&planes.bytes[plane * length..][..length]));
        self.planes = planes;
    }

    fn push_stream(&mut self, level: i32, bytes: &[u8]) {
        let compressor = self.compressor.get_or_insert_with(|| compressor(&[CParameter::CompressionLevel(level)]));
        push_stream(compressor, bytes, &mut self.frame, &mut self.out);
    }

    fn push_plane(&mut self, bytes: &[u8]) {
        let compressor = self.plane_compressor.get_or_insert_with(|| compressor(&PLANE_PARAMETERS));
        if is_noise(bytes) {
            return push(bytes, 0, &mut self.out);
        }
        push_stream(compressor, bytes, &mut self.frame, &mut self.out);
    }

    /// Decodes a chunk of `body` into `out`, which has as many bytes as the chunk says.
    pub fn decode(&mut self, chunk: &CodedChunk, body: &[u8], out: &mut [u8]) -> Result<(), CodecError> {
        let mut streams = Streams { body: &body[..chunk.streams.end], at: chunk.streams.start };
        match chunk.form {
            PartForm::Bytes => self.decode_stream(&mut streams, out)?,
            PartForm::Codes3 => {
                let mut nibbles = std::mem::take(&mut self.nibbles);
                nibbles.resize(planes::nibble_bytes(out.len()), 0);
                let decoded = self.decode_stream(&mut streams, &mut nibbles);
                let valid = decoded.is_ok() && planes::narrow(&nibbles, out);
                self.nibbles = nibbles;
                decoded?;
                if !valid {
                    return Err(streams.wrong("codes of three bits"));
                }
            }
            PartForm::Values16 => self.decode_values::<2>(&mut streams, out)?,
            PartForm::Values32 => self.decode_values::<4>(&mut streams, out)?,
        }
        if streams.at == streams.body.len() {
            return Ok(());
        }
        Err(streams.wrong("the end of a chunk"))
    }

    fn decode_values<const N: usize>(&mut self, streams: &mut Streams<'_>, out: &mut [u8]) -> Result<(), CodecError> {
        let count = out.len() / N;
        let mut planes = std::mem::take(&mut self.planes);
        planes.mask.resize(count.div_ceil(8), 0);
        let mut decode = || {
            self.decode_stream(streams, &mut planes.mask)?;
            let surplus = streams.wrong("a bitmap without bits beyond the last value");
            let kept = planes::kept(&planes.mask, count).ok_or(surplus)?;
            planes.bytes.resize(N * kept, 0);
            let bytes = &mut planes.bytes;
            (0..N).try_for_each(|plane| self.decode_stream(streams, &mut bytes[plane * kept..][..kept]))?;
            planes.join::<N>(self.simd, out);
            Ok(())
        };
        let result = decode();
        self.planes = planes;
        result
    }

    fn decode_stream(&mut self, streams: &mut Streams<'_>, out: &mut [u8]) -> Result<(), CodecError> {
        let at = streams.at;
        let wrong = |expected| CodecError::Compressed { expected, at: at as u64 };
        let (stream, is_frame) = streams.next()?;
        if !is_frame {
            let stored = stream.len() == out.len();
            stored.then(|| out.copy_from_slice(stream)).ok_or(wrong("a stored stream of the length of its values"))?;
            return Ok(());
        }
        if content_bytes(stream) != Some(out.len() as u64) {
            return Err(wrong(
                "a zstd frame of one segment, without dictionary and checksum, of the length of its values",
            ));
        }
        // `decompress` would take more frames, such as skippable ones.
        if zstd_safe::find_frame_compressed_size(stream) != Ok(stream.len()) {
            return Err(wrong("one whole zstd frame and nothing else"));
        }
        let decompressor = self.decompressor.get_or_insert_with(DCtx::create);
        match decompressor.decompress(out, stream) {
            Ok(length) if length == out.len() => Ok(()),
            _ => Err(wrong("a valid zstd frame")),
        }
    }
}

fn compressor(parameters: &[CParameter]) -> CCtx<'static> {
    let mut compressor = CCtx::create();
    parameters.iter().for_each(|&parameter| {
        compressor.set_parameter(parameter).expect("within the limits of zstd");
    });
    compressor
}

/// Appends a stream of these bytes: compressed if that is shorter.
fn push_stream(compressor: &mut CCtx<'_>, bytes: &[u8], frame: &mut Vec<u8>, out: &mut Vec<u8>) {
    frame.clear();
    if bytes.len() >= FRAME_MIN {
        frame.reserve(zstd_safe::compress_bound(bytes.len()));
        if compressor.compress2(frame, bytes).is_ok_and(|length| length < bytes.len()) {
            return push(frame, FRAME, out);
        }
    }
    push(bytes, 0, out);
}

fn push(stream: &[u8], flag: u32, out: &mut Vec<u8>) {
    out.extend_from_slice(&(stream.len() as u32 | flag).to_le_bytes());
    out.extend_from_slice(stream);
}

/// The streams of a chunk that have not been read yet.
struct Streams<'a> {
    /// The compressed body up to the end of the chunk.
    body: &'a [u8],
    at: usize,
}

impl<'a> Streams<'a> {
    fn wrong(&self, expected: &'static str) -> CodecError {
        CodecError::Compressed { expected, at: self.at as u64 }
    }

    /// The next stream, and whether it is a frame.
    fn next(&mut self) -> Result<(&'a [u8], bool), CodecError> {
        let missing = self.wrong("another stream");
        let (length, rest) = self.body[self.at..].split_first_chunk().ok_or(missing.clone())?;
        let length = u32::from_le_bytes(*length);
        let stream = rest.get(..(length & !FRAME) as usize).ok_or(missing)?;
        self.at += 4 + stream.len();
        Ok((stream, length & FRAME != 0))
    }
}

/// The size of a frame's content, if the frame has the only header that encoders send: its window is its content (a
/// single segment), and it has no dictionary and no checksum.
fn content_bytes(frame: &[u8]) -> Option<u64> {
    let (head, rest) = frame.split_first_chunk::<5>()?;
    let &[a, b, c, d, descriptor] = head;
    if u32::from_le_bytes([a, b, c, d]) != zstd_safe::MAGICNUMBER || descriptor & 0x3f != 0x20 {
        return None;
    }
    match descriptor >> 6 {
        0 => rest.first().map(|&bytes| bytes.into()),
        1 => rest.first_chunk().map(|&bytes| u64::from(u16::from_le_bytes(bytes)) + 256),
        2 => rest.first_chunk().map(|&bytes| u32::from_le_bytes(bytes).into()),
        _ => rest.first_chunk().map(|&bytes| u64::from_le_bytes(bytes)),
    }
}

/// Whether a sample of the bytes is spread so evenly over all 256 that zstd would save less than 2 %. The low bytes of
/// floats are, and trying to compress them takes most of the time.
fn is_noise(bytes: &[u8]) -> bool {
    const SAMPLE: usize = 2048;
    if bytes.len() < SAMPLE {
        return false;
    }
    let stride = bytes.len() / SAMPLE;
    let mut counts = [0u32; 256];
    bytes.iter().step_by(stride).take(SAMPLE).for_each(|&byte| counts[usize::from(byte)] += 1);
    let squares: u32 = counts.iter().map(|count| count * count).sum();
    // The expected sum for independent, uniform bytes is n + n(n − 1)/256, with a standard deviation of 1 %.
    let expected = SAMPLE + SAMPLE * (SAMPLE - 1) / 256;
    squares as usize <= expected + expected / 25
}
