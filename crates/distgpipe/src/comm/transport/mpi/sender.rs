//! The sending thread of a link.

use super::checksum::BodyChecksum;
use super::{control_frame, sending_failure, LargeBody, Link, INLINE_BYTES_MAX, PIECE_BYTES};
use crate::comm::abort::POLL;
use crate::comm::link_codecs::{EncodedBody, EncodedBytes, Encoder, MemoryReach};
use crate::comm::message::Message;
use crate::comm::traffic::MessageSize;
use crate::comm::transport::tcp::Framer;
use crate::comm::transport::{limits, Outgoing};
use crate::engine::mpi::{sleep_precisely, Backoff, GpuMemory, Outbound, Sendable};
use crate::engine::{self, TensorBytes};
use crate::failure::Fault;
use crate::sync::lock;
use distgpipe_core::wire::{Header, Kind};
use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use tch::Tensor;

/// The most messages that are on their way at the same time, and the most pieces, by their size: enough that the next frame begins while
/// the last one still ends, and so few that what the checksum has read is still in the cache when MPI copies it.
const MESSAGES_MAX: usize = 256;
const PIECES_MAX: usize = 8;

/// The messages of a link that are on their way. Only the sending thread uses them.
pub(super) type SharedOutbound = Arc<Mutex<Outbound>>;

impl Sendable for EncodedBytes {
    fn memory(&self) -> (*const u8, usize) {
        let bytes: &[u8] = self.as_ref();
        (bytes.as_ptr(), bytes.len())
    }
}

/// Sends what a stage has queued.
pub(super) struct Sender {
    /// A [`SendingEnd`], which tests may have wrapped.
    pub outgoing: Box<dyn Outgoing>,
    pub link: Arc<Link>,
    pub outbound: SharedOutbound,
}

impl Sender {
    pub fn run(mut self, queued: &Receiver<Message>) {
        sleep_precisely();
        let sent = self.pump(queued).and_then(|()| {
            let link = &self.link;
            link.mpi.send(link.rank, link.tags.header, &control_frame(Kind::Goodbye, &[]))
        });
        if let Err(fault) = sent {
            self.link.abort.fail(sending_failure(&self.link, fault));
        }
    }

    /// Sends what is queued, until all sending ends of the queue are dropped and everything is sent, or the run fails.
    fn pump(&mut self, queued: &Receiver<Message>) -> Result<(), Fault> {
        let (mut wait, mut ended, mut waiting) = (Backoff::new(), false, (0, 0));
        loop {
            self.link.abort.check()?;
            // MPI goes on with what is on its way only when it is called.
            let (settled, left) = {
                let mut outbound = lock(&self.outbound);
                (outbound.settle()?, outbound.waiting())
            };
            if left != waiting {
                (wait, waiting) = (Backoff::new(), left);
            }
            let pause = match settled {
                true if ended => return Ok(()),
                true => POLL,
                false => wait.long(),
            };
            if ended {
                std::thread::sleep(pause);
                continue;
            }
            match queued.recv_timeout(pause) {
                Ok(mut message) => {
                    message.take_over()?;
                    self.outgoing.send(message)?;
                }
                Err(RecvTimeoutError::Disconnected) => ended = true,
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}

/// Encodes messages and sends their frames, used by the sending thread alone.
///
/// It returns while a frame may still be on its way, and the frame is the memory of its tensor: nothing changes that until the frame
/// has arrived. Stages do not change what they have sent, a share has been read before its sum comes back, and all else is answered
/// before the next command.
pub(super) struct SendingEnd {
    link: Arc<Link>,
    framer: Framer,
    outbound: SharedOutbound,
}

impl SendingEnd {
    pub fn new(link: Arc<Link>, encoder: Encoder, outbound: SharedOutbound) -> Self {
        SendingEnd { link, framer: Framer::new(limits(), encoder), outbound }
    }

    /// Waits until little enough is on its way for another piece of this size.
    fn wait_for_room(&self, piece_bytes: usize) -> Result<(), Fault> {
        let wait = Backoff::new();
        loop {
            let mut outbound = lock(&self.outbound);
            outbound.settle()?;
            let (bytes, messages) = outbound.waiting();
            drop(outbound);
            if bytes < PIECES_MAX * piece_bytes && messages < MESSAGES_MAX {
                return Ok(());
            }
            self.link.abort.check()?;
            wait.pause();
        }
    }
}

impl Outgoing for SendingEnd {
    fn send(&mut self, message: Message) -> Result<(), Fault> {
        let (payload_bytes, trains) = (message.payload_bytes(), message.trains());
        let mut wire_bytes = 0;
        for slot in 0..message.tensors.len().max(1) {
            self.link.abort.check()?;
            if self.link.is_cut() {
                return Err(Fault::Lost);
            }
            let reach = if self.link.mpi.reaches_gpus() { MemoryReach::Gpus } else { MemoryReach::Host };
            let (header, body) = self.framer.encode_once(&message, slot, reach)?;
            wire_bytes += match body {
                EncodedBody::Host(bytes) => self.transmit(header, bytes)?,
                EncodedBody::Gpu(tensor) => self.transmit_from_gpu(header, &tensor)?,
            };
        }
        self.link.counters.count_message(MessageSize { payload_bytes, wire_bytes, trains });
        self.link.counters.dequeued();
        Ok(())
    }
}

impl SendingEnd {
    /// Starts to send a frame. Returns its size.
    fn transmit(&self, mut header: Header, body: EncodedBytes) -> Result<u64, Fault> {
        self.wait_for_room(PIECE_BYTES)?;
        let bytes: &[u8] = body.as_ref();
        if bytes.len() <= INLINE_BYTES_MAX {
            header.seal(bytes);
            header.check(&limits())?;
            let mut frame = [&header.encode()[..], bytes].concat();
            if let Some(draw) = self.link.take_damage() {
                flip(&mut frame, draw);
            }
            return self.start(self.link.tags.header, frame);
        }
        header.body_bytes = bytes.len() as u64;
        header.check(&limits())?;
        let mut head = LargeBody::Checked.head(&header);
        let body = Arc::new(body);
        let (bytes, mut sent): (&[u8], Arc<dyn Sendable>) = ((*body).as_ref(), body.clone());
        if let Some(draw) = self.link.take_damage() {
            if draw % 2 == 0 {
                flip(&mut head, draw / 2);
            } else {
                let mut damaged = bytes.to_vec();
                flip(&mut damaged, draw / 2);
                sent = Arc::new(damaged);
            }
        }
        let mut size = self.start(self.link.tags.header, head)?;
        let mut checksum = BodyChecksum::new(&header);
        // Each piece is added while it is on its way.
        size += self.start_pieces(LargeBody::Checked, &sent, |piece| checksum.update(&bytes[piece]))?;
        size += self.start(self.link.tags.body, checksum.finish().to_le_bytes().to_vec())?;
        Ok(size)
    }

    /// Starts to send a frame whose body is the memory of a tensor on a GPU, which the library reaches. Returns its size.
    fn transmit_from_gpu(&self, mut header: Header, body: &Tensor) -> Result<u64, Fault> {
        header.body_bytes = (body.numel() * body.kind().elt_size_in_bytes()) as u64;
        // Damage is for tests, which are of the checksum.
        let goes_through_host = header.body_bytes <= PIECE_BYTES as u64 || self.link.has_damage();
        let memory = if goes_through_host { None } else { GpuMemory::of(body)? };
        let Some(memory) = memory else {
            let host = engine::on_host(body)?;
            let bytes = TensorBytes::new(&host);
            let bytes = bytes.ok_or_else(|| Fault::internal("a dense tensor in host memory", format!("{host:?}")))?;
            return self.transmit(header, EncodedBytes::Tensor(bytes));
        };
        self.wait_for_room(LargeBody::FromGpu.piece_bytes())?;
        header.check(&limits())?;
        let head = self.start(self.link.tags.header, LargeBody::FromGpu.head(&header))?;
        let memory: Arc<dyn Sendable> = Arc::new(memory);
        Ok(head + self.start_pieces(LargeBody::FromGpu, &memory, |_| {})?)
    }

    /// Starts to send a message. Returns its size.
    fn start(&self, tag: i32, bytes: Vec<u8>) -> Result<u64, Fault> {
        let size = bytes.len();
        let bytes: Arc<dyn Sendable> = Arc::new(bytes);
        lock(&self.outbound).start(tag, &bytes, 0..size)?;
        Ok(size as u64)
    }

    /// Starts to send the pieces of a body, and passes on where each is. Returns their size.
    fn start_pieces(
        &self,
        how: LargeBody,
        body: &Arc<dyn Sendable>,
        mut started: impl FnMut(Range<usize>),
    ) -> Result<u64, Fault> {
        let (_, size) = body.memory();
        for at in (0..size).step_by(how.piece_bytes()) {
            let piece = at..size.min(at + how.piece_bytes());
            self.wait_for_room(how.piece_bytes())?;
            lock(&self.outbound).start(self.link.tags.body, body, piece.clone())?;
            started(piece);
        }
        Ok(size as u64)
    }
}

/// Flips the bit that `draw` selects.
fn flip(bytes: &mut [u8], draw: u64) {
    let bit = usize::try_from(draw % (bytes.len() as u64 * 8)).unwrap_or(0);
    bytes[bit / 8] ^= 1 << (bit % 8);
}
