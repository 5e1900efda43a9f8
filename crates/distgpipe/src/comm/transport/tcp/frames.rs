//! Messages as frames on a socket: one frame per tensor, or one frame for a text.

use super::deadline::{Deadline, Waiting};
use super::incoming::FrameSource;
use crate::comm::link_codecs::{receive, Decoder, EncodedBytes, Encoder, FrameBody};
#[cfg(feature = "mpi")]
use crate::comm::link_codecs::{EncodedBody, MemoryReach};
use crate::comm::message::{Message, Tag};
use crate::comm::suspension::IdleTimer;
use crate::failure::Fault;
use distgpipe_core::wire::{BodyHasher, Header, Limits, HEADER_BYTES};
use std::io::{self, Read, Write};
use tch::Tensor;

/// Writes one frame whose header is sealed.
pub fn write_frame(
    stream: &mut impl Write,
    header: &Header,
    body: &[u8],
    deadline: &Deadline<'_>,
) -> Result<(), Fault> {
    write_all(stream, &header.encode(), deadline)?;
    write_all(stream, body, deadline)
}

/// A frame that has been read and verified.
pub struct Frame {
    /// The header, with the tag of the message.
    pub header: Header,
    /// The body of a frame without a tensor; empty otherwise.
    pub body: Vec<u8>,
    /// The decoded tensor. `None` for text and for an absent gradient.
    pub tensor: Option<Tensor>,
}

impl Frame {
    /// The body as UTF-8 text.
    pub fn text(&self) -> Result<&str, Fault> {
        std::str::from_utf8(&self.body).map_err(|e| Fault::malformed("a text", e))
    }
}

/// Reads one frame. Checks its header against the limits and with `admit` before anything is allocated for the body, and the
/// body against its checksum.
pub fn read_frame(
    stream: &mut impl FrameSource,
    limits: &Limits,
    deadline: &Deadline<'_>,
    decoder: &mut Decoder,
    admit: impl FnOnce(&Header) -> Result<(), Fault>,
) -> Result<Frame, Fault> {
    let header = read_header(stream, limits, deadline)?;
    admit(&header)?;
    read_body(stream, header, deadline, decoder)
}

/// Reads the header of a frame and checks it against the limits.
pub(super) fn read_header(
    stream: &mut impl FrameSource,
    limits: &Limits,
    deadline: &Deadline<'_>,
) -> Result<Header, Fault> {
    let mut head = [0; HEADER_BYTES];
    read_exact(stream, &mut head, deadline)?;
    Ok(Header::decode(&head, limits)?)
}

/// Reads, verifies and decodes the body that belongs to a header.
pub(super) fn read_body(
    stream: &mut impl FrameSource,
    header: Header,
    deadline: &Deadline<'_>,
    decoder: &mut Decoder,
) -> Result<Frame, Fault> {
    let arriving = Arriving { hash: BodyHasher::new(&header), stream, deadline };
    let Some(meta) = header.tensor else {
        let mut body = Vec::new();
        receive(arriving, header.body_bytes, &mut body)?;
        return Ok(Frame { header, body, tensor: None });
    };
    let tensor = decoder.read(&header, &meta, arriving)?;
    Ok(Frame { header, body: Vec::new(), tensor: Some(tensor) })
}

/// A body is read in pieces of this size, so that the processor still has each in its cache for the checksum.
const PIECE_BYTES: usize = 256 << 10;

/// The body of a frame on a socket.
struct Arriving<'a, S> {
    stream: &'a mut S,
    hash: BodyHasher,
    deadline: &'a Deadline<'a>,
}

impl<S: FrameSource> FrameBody for Arriving<'_, S> {
    fn read(&mut self, piece: &mut [u8]) -> Result<(), Fault> {
        for piece in piece.chunks_mut(PIECE_BYTES) {
            read_exact(self.stream, piece, self.deadline)?;
            self.hash.update(piece);
        }
        Ok(())
    }

    fn verify(self) -> Result<(), Fault> {
        self.stream.end_frame();
        Ok(self.hash.verify()?)
    }
}

/// Reads the body of a frame that has arrived before, and discards it.
pub(super) fn discard_body(
    stream: &mut impl FrameSource,
    header: &Header,
    deadline: &Deadline<'_>,
) -> Result<(), Fault> {
    let (mut left, mut piece) = (header.body_bytes, [0; 1 << 16]);
    while left > 0 {
        let length = left.min(piece.len() as u64) as usize;
        read_exact(stream, &mut piece[..length], deadline)?;
        left -= length as u64;
    }
    stream.end_frame();
    Ok(())
}

/// Assembles messages from their frames.
#[derive(Default)]
pub struct Assembler {
    open: Option<(Message, u16)>,
}

impl Assembler {
    /// Adds the next frame; returns the message once it is complete.
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

/// Encodes messages as frames.
pub struct Framer {
    limits: Limits,
    encoder: Encoder,
}

impl Framer {
    /// Refuses messages beyond `limits`, which the peer would reject.
    pub fn new(limits: Limits, encoder: Encoder) -> Self {
        Framer { limits, encoder }
    }

    /// The frame of tensor `slot`, or of the text, with this sequence number and acknowledgement.
    pub fn encode(
        &mut self,
        message: &Message,
        slot: usize,
        (sequence, acknowledged): (u64, u64),
    ) -> Result<FrameBytes, Fault> {
        let (header, content) = header_of(message, slot)?;
        let mut header = Header { sequence, acknowledged, ..header };
        let tensor = match content {
            Content::Bytes(bytes) => return sealed(&mut header, bytes, &self.limits),
            Content::Tensor(tensor) => tensor,
        };
        // Between partitions, nothing changes a tensor in place any more. What is sent may have to be sent again, even after it has arrived.
        let unchanging = message.tag.edge().is_some();
        let (meta, body) = self.encoder.encoded(message, slot, tensor, unchanging)?;
        header.tensor = Some(meta);
        let bytes: &[u8] = body.as_ref();
        if bytes.len() <= COPIED_BYTES_MAX {
            return sealed(&mut header, bytes, &self.limits);
        }
        header.seal(bytes);
        header.check(&self.limits)?;
        Ok(FrameBytes { head: header.encode().to_vec(), body: Some(body) })
    }

    /// The header of such a frame, which is not sealed, and its body. The body may be the memory of the tensor, which must not change
    /// until the frame has arrived.
    #[cfg(feature = "mpi")]
    pub fn encode_once(
        &mut self,
        message: &Message,
        slot: usize,
        reach: MemoryReach,
    ) -> Result<(Header, EncodedBody), Fault> {
        let (header, content) = header_of(message, slot)?;
        match content {
            Content::Bytes(bytes) => Ok((header, EncodedBody::Host(EncodedBytes::Owned(bytes.to_vec())))),
            Content::Tensor(tensor) => {
                let (meta, body) = self.encoder.encoded_within(reach, message, slot, tensor)?;
                Ok((Header { tensor: Some(meta), ..header }, body))
            }
        }
    }
}

/// What the body of a frame is made of.
enum Content<'a> {
    Bytes(&'a [u8]),
    Tensor(&'a Tensor),
}

/// The header of the frame of tensor `slot`, or of the text, without what its encoding adds.
fn header_of(message: &Message, slot: usize) -> Result<(Header, Content<'_>), Fault> {
    let Tag { kind, step, micro_batch, from, to } = message.tag;
    let number = |n: usize| {
        u16::try_from(n)
            .map_err(|_| Fault::invalid_model(format!("{n} tensors in one message, at most 65535 are possible")))
    };
    let mut header = Header { step, micro_batch, from, to, ..Header::new(kind) };
    let Some(tensor) = message.tensors.get(slot) else {
        return Ok((header, Content::Bytes(&message.text)));
    };
    (header.slot, header.slots) = (number(slot)?, number(message.tensors.len())?);
    Ok((header, tensor.as_ref().map_or(Content::Bytes(&[]), Content::Tensor)))
}

/// A body up to this size is copied behind its header, so that one write sends both.
const COPIED_BYTES_MAX: usize = 64 << 10;

/// An encoded frame. A large body stays where it is.
pub(in crate::comm::transport) struct FrameBytes {
    head: Vec<u8>,
    body: Option<EncodedBytes>,
}

impl FrameBytes {
    /// A frame without a body.
    pub fn header(header: &Header) -> Self {
        FrameBytes { head: header.encode().to_vec(), body: None }
    }

    /// The bytes, in order.
    pub fn parts(&self) -> [&[u8]; 2] {
        let body: &[u8] = match &self.body {
            Some(body) => body.as_ref(),
            None => &[],
        };
        [&self.head, body]
    }

    pub fn len(&self) -> usize {
        self.parts().iter().map(|part| part.len()).sum()
    }

    /// Flips a bit, for tests. The tensor that was sent stays as it is.
    pub fn flip(&mut self, bit: usize) {
        self.head = self.parts().concat();
        self.body = None;
        if let Some(byte) = self.head.get_mut(bit / 8) {
            *byte ^= 1 << (bit % 8);
        }
    }
}

/// The header, sealed and checked, and the body.
fn sealed(header: &mut Header, body: &[u8], limits: &Limits) -> Result<FrameBytes, Fault> {
    header.seal(body);
    header.check(limits)?;
    let mut head = Vec::with_capacity(HEADER_BYTES + body.len());
    head.extend_from_slice(&header.encode());
    head.extend_from_slice(body);
    Ok(FrameBytes { head, body: None })
}

/// Fills `into` from a socket with a short read time-out.
pub(crate) fn read_exact(stream: &mut impl Read, mut into: &mut [u8], deadline: &Deadline<'_>) -> Result<(), Fault> {
    let mut idle = IdleTimer::new();
    while !into.is_empty() {
        let read = stream.read(into);
        // Whatever came of it: if this process did not run meanwhile, the end of the connection is not the peer's fault.
        let idle_for = idle.elapsed();
        match read {
            Ok(0) => return Err(Fault::Lost),
            Ok(n) => {
                into = &mut into[n..];
                idle.restart();
                deadline.check_after_progress()?;
            }
            Err(e) if timed_out(&e) => deadline.check(idle_for, Waiting::ForData)?,
            Err(e) if disconnected(&e) => return Err(Fault::Lost),
            Err(e) => return Err(Fault::io("reading from the socket", e)),
        }
    }
    Ok(())
}

/// Writes all bytes to a socket with a short write time-out.
pub(crate) fn write_all(stream: &mut impl Write, mut from: &[u8], deadline: &Deadline<'_>) -> Result<(), Fault> {
    let mut idle = IdleTimer::new();
    while !from.is_empty() {
        let written = stream.write(from);
        let idle_for = idle.elapsed();
        match written {
            Ok(0) => return Err(Fault::Lost),
            Ok(n) => {
                from = &from[n..];
                idle.restart();
            }
            Err(e) if timed_out(&e) => deadline.check(idle_for, Waiting::ToSend)?,
            Err(e) if disconnected(&e) => return Err(Fault::Lost),
            Err(e) => return Err(Fault::io("writing to the socket", e)),
        }
    }
    Ok(())
}

pub(super) fn timed_out(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted)
}

fn disconnected(error: &io::Error) -> bool {
    use io::ErrorKind::*;
    matches!(error.kind(), ConnectionReset | ConnectionAborted | BrokenPipe | NotConnected | UnexpectedEof)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::abort::AbortFlag;
    use crate::comm::suspension::{self, tests::NOTICED};
    use std::time::{Duration, Instant};

    /// A socket that ends in this way, after a time in which this process did not run.
    struct Ended(fn() -> io::Result<usize>);

    impl Ended {
        fn end(&self) -> io::Result<usize> {
            std::thread::sleep(NOTICED);
            (self.0)()
        }
    }

    impl Read for Ended {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            self.end()
        }
    }

    impl Write for Ended {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            self.end()
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Such a process once blamed the peer that had given it up.
    #[test]
    fn a_connection_that_ended_while_this_process_was_suspended_shows_the_suspension() {
        let abort = AbortFlag::default();
        let deadline = Deadline::new(&abort, Duration::from_secs(60));
        let endings: [fn() -> io::Result<usize>; 2] = [|| Ok(0), || Err(io::ErrorKind::ConnectionReset.into())];
        for ending in endings {
            let reading = || read_exact(&mut Ended(ending), &mut [0; 8], &deadline);
            let writing = || write_all(&mut Ended(ending), &[0; 8], &deadline);
            for end in [&reading as &dyn Fn() -> Result<(), Fault>, &writing] {
                let start = Instant::now();
                assert!(matches!(end(), Err(Fault::Lost)));
                assert!(suspension::last().is_some_and(|last| last.ended > start));
            }
        }
    }
}
