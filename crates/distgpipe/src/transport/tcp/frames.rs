//! Messages as frames on a socket: one frame per tensor, or one for a text.

use crate::engine::{self, Layout};
use crate::failure::{Fate, Fault};
use crate::mailbox::{Message, Tag};
use distgpipe_core::codec::raw::Raw;
use distgpipe_core::codec::{Codec, CodecId, Context, TensorView};
use distgpipe_core::wire::{self, DType, Header, Kind, Limits, Shape, TensorMeta, HEADER_BYTES};
use std::cell::Cell;
use std::io::{self, Read, Write};
use std::time::{Duration, Instant};
use tch::Tensor;

/// How long a read or write may make no headway, and whose failure ends it.
pub struct Patience<'a> {
    fate: &'a Fate,
    limit: Duration,
    /// How long what has been begun may still take once the run has failed.
    grace: Duration,
    failed_at: Cell<Option<Instant>>,
    /// For a peer that has not shown its token: the end of all waiting, headway or not.
    deadline: Option<Instant>,
}

impl<'a> Patience<'a> {
    /// Gives up when the run fails or nothing moves for `limit`.
    pub fn new(fate: &'a Fate, limit: Duration) -> Self {
        Patience { fate, limit, grace: Duration::ZERO, failed_at: Cell::new(None), deadline: None }
    }

    /// Lets a frame that has been begun finish although the run has failed: the peer could make nothing of half a
    /// frame, nor of the cause that is sent after it.
    pub fn with_grace(self, grace: Duration) -> Self {
        Patience { grace, ..self }
    }

    /// Gives up after so long in any case.
    pub fn in_all(self, limit: Duration) -> Self {
        Patience { deadline: Some(Instant::now() + limit), ..self }
    }

    /// Between two frames: no grace is needed.
    fn check_boundary(&self) -> Result<(), Fault> {
        self.fate.check()
    }

    fn check(&self, since: Instant, doing: &str) -> Result<(), Fault> {
        if let Err(fault) = self.fate.check() {
            let failed_at = self.failed_at.get().unwrap_or_else(Instant::now);
            self.failed_at.set(Some(failed_at));
            if failed_at.elapsed() >= self.grace {
                return Err(fault);
            }
        }
        let late = self.deadline.is_some_and(|d| Instant::now() >= d);
        if late || since.elapsed() >= self.limit {
            return Err(Fault::TimedOut { what: doing.to_owned(), limit_s: self.limit.as_secs_f64() });
        }
        Ok(())
    }
}

fn would_wait(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted)
}

fn gone(error: &io::Error) -> bool {
    use io::ErrorKind::*;
    matches!(error.kind(), ConnectionReset | ConnectionAborted | BrokenPipe | NotConnected | UnexpectedEof)
}

/// Reads exactly so many bytes from a socket with a short read time-out.
fn read_exact(stream: &mut impl Read, mut into: &mut [u8], patience: &Patience<'_>) -> Result<(), Fault> {
    let mut since = Instant::now();
    while !into.is_empty() {
        match stream.read(into) {
            Ok(0) => return Err(Fault::Lost),
            Ok(n) => {
                into = &mut into[n..];
                since = Instant::now();
                if patience.deadline.is_some() {
                    patience.check(since, "saying who it is")?;
                }
            }
            Err(e) if would_wait(&e) => patience.check(since, "hearing any sign of life from it")?,
            Err(e) if gone(&e) => return Err(Fault::Lost),
            Err(e) => return Err(Fault::io("reading from it", e)),
        }
    }
    Ok(())
}

/// Writes all to a socket with a short write time-out.
fn write_all(stream: &mut impl Write, mut from: &[u8], patience: &Patience<'_>) -> Result<(), Fault> {
    let mut since = Instant::now();
    while !from.is_empty() {
        match stream.write(from) {
            Ok(0) => return Err(Fault::Lost),
            Ok(n) => {
                from = &from[n..];
                since = Instant::now();
            }
            Err(e) if would_wait(&e) => patience.check(since, "getting it to read what is sent")?,
            Err(e) if gone(&e) => return Err(Fault::Lost),
            Err(e) => return Err(Fault::io("writing to it", e)),
        }
    }
    Ok(())
}

/// Writes one frame whose header is sealed.
pub fn write_frame(
    stream: &mut impl Write,
    header: &Header,
    body: &[u8],
    patience: &Patience<'_>,
) -> Result<(), Fault> {
    write_all(stream, &header.encode(), patience)?;
    write_all(stream, body, patience)
}

/// A frame as it came: a tensor, or a body that is none.
pub struct Frame {
    /// Its header.
    pub header: Header,
    /// The body, if it is no tensor.
    pub body: Vec<u8>,
    /// The tensor, if it is one.
    pub tensor: Option<Tensor>,
}

impl Frame {
    /// The body as text.
    pub fn text(&self) -> Result<String, Fault> {
        String::from_utf8(self.body.clone()).map_err(|_| Fault::protocol("UTF-8 text", "other bytes"))
    }
}

/// Reads one frame, checked against the limits, and by `admit`, before anything is allocated, and against its checksum
/// after.
pub fn read_frame(
    stream: &mut impl Read,
    limits: &Limits,
    patience: &Patience<'_>,
    admit: impl FnOnce(&Header) -> Result<(), Fault>,
) -> Result<Frame, Fault> {
    let mut head = [0; HEADER_BYTES];
    read_exact(stream, &mut head, patience)?;
    let header = Header::decode(&head, limits)?;
    admit(&header)?;
    let Some(meta) = header.tensor else {
        let length =
            usize::try_from(header.body_bytes).map_err(|_| Fault::protocol("a body that fits memory", "more"))?;
        let mut body = vec![0; length];
        read_exact(stream, &mut body, patience)?;
        header.verify(&body)?;
        return Ok(Frame { header, body, tensor: None });
    };
    let mut tensor = empty(&meta)?;
    let room = engine::bytes_mut(&mut tensor).ok_or_else(|| Fault::protocol("a dense tensor", "gaps"))?;
    let mut codec = decoder(meta.codec)?;
    if codec.is_identity(meta.dtype) {
        read_exact(stream, room, patience)?;
        header.verify(room)?;
    } else {
        let length =
            usize::try_from(header.body_bytes).map_err(|_| Fault::protocol("a body that fits memory", "more"))?;
        let mut body = vec![0; length];
        read_exact(stream, &mut body, patience)?;
        header.verify(&body)?;
        codec.decode(&meta, &body, room).map_err(|e| Fault::protocol("a valid body", e.to_string()))?;
    }
    Ok(Frame { header, body: Vec::new(), tensor: Some(tensor) })
}

fn decoder(id: CodecId) -> Result<Box<dyn Codec>, Fault> {
    match id {
        CodecId::Raw => Ok(Box::new(Raw)),
        // Their parameters are not in the header: a link that uses one has to bring its own.
        other => Err(Fault::protocol("a body in codec Raw", other.to_string())),
    }
}

/// A message of the connection itself.
pub fn control(kind: Kind, text: Vec<u8>) -> Message {
    Message::text(Tag { kind, step: 0, micro_batch: 0, from: 0, to: 0 }, text)
}

/// Puts the frames of a message together again.
#[derive(Default)]
pub struct Assembler {
    open: Option<(Message, u16)>,
}

impl Assembler {
    /// Takes the next frame; gives the message once it is complete.
    pub fn add(&mut self, frame: Frame) -> Result<Option<Message>, Fault> {
        let header = frame.header;
        let tag = Tag {
            kind: header.kind,
            step: header.step,
            micro_batch: header.micro_batch,
            from: header.from,
            to: header.to,
        };
        if !header.kind.carries_tensors() {
            return match &self.open {
                None => Ok(Some(Message::text(tag, frame.body))),
                Some((message, _)) => Err(Fault::protocol(format!("the rest of {}", message.tag), format!("{tag}"))),
            };
        }
        let (mut message, slots) = self.open.take().unwrap_or((Message::tensors(tag, Vec::new()), header.slots));
        if message.tag != tag || slots != header.slots || usize::from(header.slot) != message.tensors.len() {
            let expected = format!("tensor {} of {slots} of {}", message.tensors.len(), message.tag);
            return Err(Fault::protocol(expected, format!("tensor {} of {} of {tag}", header.slot, header.slots)));
        }
        message.tensors.push(frame.tensor);
        if message.tensors.len() == usize::from(slots) {
            return Ok(Some(message));
        }
        self.open = Some((message, slots));
        Ok(None)
    }
}

/// Turns messages into frames.
pub struct Encoder {
    limits: Limits,
    /// Whether all frames that were begun were written to their end.
    at_boundary: bool,
    codec: Box<dyn Codec>,
    scratch: Vec<u8>,
}

impl Encoder {
    /// An encoder that keeps to these limits, so that the error is where the remedy is.
    pub fn new(limits: Limits) -> Self {
        Encoder { limits, at_boundary: true, codec: Box::new(Raw), scratch: Vec::new() }
    }

    /// Writes a message; returns the bytes that went onto the wire.
    pub fn write(&mut self, stream: &mut impl Write, message: &Message, patience: &Patience<'_>) -> Result<u64, Fault> {
        let mut sent = 0;
        for slot in 0..slots(message) {
            patience.check_boundary()?;
            let mut begun = false;
            let written = self.with_frame(message, slot, |header, body| {
                begun = true;
                write_frame(stream, header, body, patience)?;
                Ok((HEADER_BYTES + body.len()) as u64)
            });
            self.at_boundary = written.is_ok() || !begun;
            sent += written?;
        }
        Ok(sent)
    }

    /// Whether another frame may follow.
    pub fn at_boundary(&self) -> bool {
        self.at_boundary
    }

    /// Writes a message whose first frame has one bit flipped on the way.
    pub fn write_damaged(
        &mut self,
        stream: &mut impl Write,
        message: &Message,
        seed: u64,
        patience: &Patience<'_>,
    ) -> Result<(), Fault> {
        self.with_frame(message, 0, |header, body| {
            let mut bytes = header.encode().to_vec();
            bytes.extend_from_slice(body);
            let bit = usize::try_from(seed % (bytes.len() as u64 * 8)).unwrap_or(0);
            bytes[bit / 8] ^= 1 << (bit % 8);
            write_all(stream, &bytes, patience)
        })
    }

    /// Lends the sealed frame of one tensor, or of the text, to `then`.
    fn with_frame<T>(
        &mut self,
        message: &Message,
        slot: usize,
        then: impl FnOnce(&Header, &[u8]) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        let Tag { kind, step, micro_batch, from, to } = message.tag;
        let number = |n: usize| u16::try_from(n).map_err(|_| Fault::protocol("at most 65535 tensors", n.to_string()));
        let mut header = Header { step, micro_batch, from, to, ..Header::new(kind) };
        let Some(tensor) = message.tensors.get(slot) else {
            header.seal(&message.text);
            header.check(&self.limits)?;
            return then(&header, &message.text);
        };
        (header.slot, header.slots) = (number(slot)?, number(message.tensors.len())?);
        let Some(tensor) = tensor else {
            header.seal(&[]);
            return then(&header, &[]);
        };
        let tensor = dense(tensor)?;
        let dtype = dtype_of(tensor.kind())?;
        let dims: Vec<usize> = tensor.size().iter().map(|&d| usize::try_from(d).unwrap_or(0)).collect();
        let layout = match engine::layout(&tensor) {
            Some(Layout::ChannelsLast) => wire::Layout::ChannelsLast,
            _ => wire::Layout::Contiguous,
        };
        let shape = Shape::new(&dims).map_err(|e| Fault::protocol("a shape that can be sent", e.to_string()))?;
        header.tensor = Some(TensorMeta { dtype, layout, shape, codec: self.codec.id() });
        let bytes = engine::bytes(&tensor).ok_or_else(|| Fault::protocol("a dense CPU tensor", "another"))?;
        if self.codec.is_identity(dtype) {
            header.seal(bytes);
            header.check(&self.limits)?;
            return then(&header, bytes);
        }
        self.scratch.clear();
        self.codec
            .encode(TensorView { dtype, dims: &dims, layout, bytes }, &Context::default(), &mut self.scratch)
            .map_err(|e| Fault::protocol("a tensor the codec takes", e.to_string()))?;
        header.seal(&self.scratch);
        header.check(&self.limits)?;
        then(&header, &self.scratch)
    }
}

fn slots(message: &Message) -> usize {
    message.tensors.len().max(1)
}

/// The tensor on the CPU, without gaps, in the layout it has.
fn dense(tensor: &Tensor) -> Result<Tensor, Fault> {
    let tensor = if tensor.device() == tch::Device::Cpu {
        tensor.shallow_clone()
    } else {
        tensor.f_to_device(tch::Device::Cpu)?
    };
    match engine::layout(&tensor) {
        Some(_) => Ok(tensor),
        None => Ok(tensor.f_contiguous()?),
    }
}

fn empty(meta: &TensorMeta) -> Result<Tensor, Fault> {
    let dims: Vec<i64> = meta.shape.dims().iter().map(|&d| i64::try_from(d).unwrap_or(i64::MAX)).collect();
    let layout = match meta.layout {
        wire::Layout::ChannelsLast if dims.len() == 4 => Layout::ChannelsLast,
        _ => Layout::Contiguous,
    };
    engine::empty(&dims, kind_of(meta.dtype), layout)
}

/// Both ways in one table.
const KINDS: [(DType, tch::Kind); 10] = [
    (DType::F32, tch::Kind::Float),
    (DType::F64, tch::Kind::Double),
    (DType::F16, tch::Kind::Half),
    (DType::BF16, tch::Kind::BFloat16),
    (DType::I64, tch::Kind::Int64),
    (DType::I32, tch::Kind::Int),
    (DType::U8, tch::Kind::Uint8),
    (DType::Bool, tch::Kind::Bool),
    (DType::I16, tch::Kind::Int16),
    (DType::I8, tch::Kind::Int8),
];

fn dtype_of(kind: tch::Kind) -> Result<DType, Fault> {
    let found = KINDS.iter().find(|(_, k)| *k == kind);
    found.map(|(d, _)| *d).ok_or_else(|| Fault::protocol("an element type that can be sent", format!("{kind:?}")))
}

fn kind_of(dtype: DType) -> tch::Kind {
    KINDS.iter().find(|(d, _)| *d == dtype).map_or(tch::Kind::Float, |(_, k)| *k)
}
