//! The sending thread of a link.

use super::checksum::BodyChecksum;
use super::{control_frame, sending_failure, Link, INLINE_BYTES_MAX, PIECE_BYTES};
use crate::comm::abort::POLL;
use crate::comm::link_codecs::{EncodedBytes, Encoder};
use crate::comm::message::Message;
use crate::comm::traffic::MessageSize;
use crate::comm::transport::tcp::Framer;
use crate::comm::transport::{limits, Outgoing};
use crate::engine::mpi::{sleep_precisely, Backoff, Outbound};
use crate::failure::Fault;
use distgpipe_core::wire::{Header, Kind};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use xxhash_rust::xxh3::xxh3_64;

/// The most that is on its way at the same time: enough that the next frame begins while the last one still ends.
const ON_THEIR_WAY_MAX: (usize, usize) = (64 << 20, 256);

/// The messages of a link that are on their way. Only the sending thread uses them.
pub(super) type SharedOutbound = Arc<Mutex<Outbound<EncodedBytes>>>;

fn lock(outbound: &SharedOutbound) -> MutexGuard<'_, Outbound<EncodedBytes>> {
    outbound.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Waits until little enough is on its way.
    fn wait_for_room(&self) -> Result<(), Fault> {
        let wait = Backoff::new();
        loop {
            let mut outbound = lock(&self.outbound);
            outbound.settle()?;
            let ((bytes, messages), (bytes_max, messages_max)) = (outbound.waiting(), ON_THEIR_WAY_MAX);
            drop(outbound);
            if bytes < bytes_max && messages < messages_max {
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
            let (header, body) = self.framer.encode_once(&message, slot)?;
            wire_bytes += self.transmit(header, body)?;
        }
        self.link.counters.count_message(MessageSize { payload_bytes, wire_bytes, trains });
        self.link.counters.dequeued();
        Ok(())
    }
}

impl SendingEnd {
    /// Starts to send a frame. Returns its size.
    fn transmit(&self, mut header: Header, body: EncodedBytes) -> Result<u64, Fault> {
        self.wait_for_room()?;
        let tags = self.link.tags;
        let start = |tag: i32, bytes: Vec<u8>| {
            let whole = 0..bytes.len();
            lock(&self.outbound).start(tag, &Arc::new(EncodedBytes::Owned(bytes)), whole)
        };
        let bytes: &[u8] = body.as_ref();
        if bytes.len() <= INLINE_BYTES_MAX {
            header.seal(bytes);
            header.check(&limits())?;
            let mut frame = [&header.encode()[..], bytes].concat();
            if let Some(draw) = self.link.take_damage() {
                flip(&mut frame, draw);
            }
            let size = frame.len() as u64;
            start(tags.header, frame)?;
            return Ok(size);
        }
        header.body_bytes = bytes.len() as u64;
        header.check(&limits())?;
        // The checksum of header and body comes last, so the header has one of its own: what it says is acted on before that.
        let mut head = header.encode().to_vec();
        head.extend_from_slice(&xxh3_64(&head).to_le_bytes());
        let body = Arc::new(body);
        let (bytes, mut sent): (&[u8], _) = ((*body).as_ref(), body.clone());
        if let Some(draw) = self.link.take_damage() {
            if draw % 2 == 0 {
                flip(&mut head, draw / 2);
            } else {
                let mut damaged = bytes.to_vec();
                flip(&mut damaged, draw / 2);
                sent = Arc::new(EncodedBytes::Owned(damaged));
            }
        }
        let head_bytes = head.len();
        start(tags.header, head)?;
        let mut checksum = BodyChecksum::new(&header);
        for at in (0..bytes.len()).step_by(PIECE_BYTES) {
            let piece = at..bytes.len().min(at + PIECE_BYTES);
            self.wait_for_room()?;
            lock(&self.outbound).start(tags.body, &sent, piece.clone())?;
            // While the piece is on its way.
            checksum.update(&bytes[piece]);
        }
        let checksum = checksum.finish().to_le_bytes().to_vec();
        let size = head_bytes + bytes.len() + checksum.len();
        start(tags.body, checksum)?;
        Ok(size as u64)
    }
}

/// Flips the bit that `draw` selects.
fn flip(bytes: &mut [u8], draw: u64) {
    let bit = usize::try_from(draw % (bytes.len() as u64 * 8)).unwrap_or(0);
    bytes[bit / 8] ^= 1 << (bit % 8);
}
