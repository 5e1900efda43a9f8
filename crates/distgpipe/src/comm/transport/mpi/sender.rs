//! The sending thread of a link.

use super::checksum::BodyChecksum;
use super::{control_frame, sending_failure, Link, INLINE_BYTES_MAX, PIECE_BYTES};
use crate::comm::link_codecs::Encoder;
use crate::comm::message::Message;
use crate::comm::traffic::MessageSize;
use crate::comm::transport::queue::pump;
use crate::comm::transport::tcp::Framer;
use crate::comm::transport::{limits, Outgoing};
use crate::engine::mpi::sleep_precisely;
use crate::failure::Fault;
use distgpipe_core::wire::{Header, Kind};
use std::borrow::Cow;
use std::sync::mpsc::Receiver;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// Sends what a stage has queued.
pub(super) struct Sender {
    /// A [`SendingEnd`], which tests may have wrapped.
    pub outgoing: Box<dyn Outgoing>,
    pub link: Arc<Link>,
}

impl Sender {
    pub fn run(mut self, queued: &Receiver<Message>) {
        sleep_precisely();
        let link = &self.link;
        let sent = pump(queued, &link.abort, self.outgoing.as_mut())
            .and_then(|()| link.mpi.send(link.rank, link.tags.header, &control_frame(Kind::Goodbye, &[])));
        if let Err(fault) = sent {
            link.abort.fail(sending_failure(link, fault));
        }
    }
}

/// Encodes messages and sends their frames, used by the sending thread alone.
pub(super) struct SendingEnd {
    link: Arc<Link>,
    framer: Framer,
}

impl SendingEnd {
    pub fn new(link: Arc<Link>, encoder: Encoder) -> Self {
        SendingEnd { link, framer: Framer::new(limits(), encoder) }
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
            let link = &self.link;
            wire_bytes += self.framer.with_frame(&message, slot, |header, body| transmit(link, header, body))?;
        }
        self.link.counters.count_message(MessageSize { payload_bytes, wire_bytes, trains });
        self.link.counters.dequeued();
        Ok(())
    }
}

/// Sends a frame. Returns its size.
fn transmit(link: &Link, mut header: Header, body: &[u8]) -> Result<u64, Fault> {
    let Link { mpi, rank, tags, .. } = link;
    if body.len() <= INLINE_BYTES_MAX {
        header.seal(body);
        header.check(&limits())?;
        let mut frame = [&header.encode()[..], body].concat();
        if let Some(draw) = link.take_damage() {
            flip(&mut frame, draw);
        }
        mpi.send(*rank, tags.header, &frame)?;
        return Ok(frame.len() as u64);
    }
    header.body_bytes = body.len() as u64;
    header.check(&limits())?;
    // The checksum of header and body comes last, so the header has one of its own: what it says is acted on before that.
    let mut head = header.encode().to_vec();
    head.extend_from_slice(&xxh3_64(&head).to_le_bytes());
    let mut sent = Cow::Borrowed(body);
    if let Some(draw) = link.take_damage() {
        match draw % 2 {
            0 => flip(&mut head, draw / 2),
            _ => flip(sent.to_mut(), draw / 2),
        }
    }
    mpi.send(*rank, tags.header, &head)?;
    let mut checksum = BodyChecksum::new(&header);
    mpi.send_pieces(*rank, tags.body, &sent, PIECE_BYTES, |place| checksum.update(&body[place]))?;
    let checksum = checksum.finish().to_le_bytes();
    mpi.send(*rank, tags.body, &checksum)?;
    Ok((head.len() + body.len() + checksum.len()) as u64)
}

/// Flips the bit that `draw` selects.
fn flip(bytes: &mut [u8], draw: u64) {
    let bit = usize::try_from(draw % (bytes.len() as u64 * 8)).unwrap_or(0);
    bytes[bit / 8] ^= 1 << (bit % 8);
}
