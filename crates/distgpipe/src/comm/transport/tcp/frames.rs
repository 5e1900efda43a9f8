//! Messages as frames on a socket: one frame per tensor, or one for a text.

use crate::coding::{Decoder, Encoder};
use crate::failure::{Fate, Fault};
use crate::mailbox::{Message, Tag};
use distgpipe_core::wire::{Header, Kind, Limits, HEADER_BYTES};
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
    decoder: &mut Decoder,
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
    let tensor = decoder.read(&header, &meta, |body| read_exact(stream, body, patience))?;
    Ok(Frame { header, body: Vec::new(), tensor: Some(tensor) })
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
        let tag = Tag::of(&header);
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
pub struct Framer {
    limits: Limits,
    /// Whether all frames that were begun were written to their end.
    at_boundary: bool,
    encoder: Encoder,
}

impl Framer {
    /// Keeps to these limits, so that the error is where the remedy is.
    pub fn new(limits: Limits, encoder: Encoder) -> Self {
        Framer { limits, at_boundary: true, encoder }
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
        let Framer { limits, encoder, .. } = self;
        encoder.with_encoded(message, slot, tensor, |meta, body| {
            header.tensor = Some(meta);
            header.seal(body);
            header.check(limits)?;
            then(&header, body)
        })
    }
}

fn slots(message: &Message) -> usize {
    message.tensors.len().max(1)
}
