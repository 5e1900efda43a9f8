//! The thread that receives over all links of a process.

use super::checksum::BodyChecksum;
use super::{Link, Tags, INLINE_BYTES_MAX, PIECE_BYTES};
use crate::comm::abort::AbortFlag;
use crate::comm::arrivals::Receiving;
use crate::comm::link_codecs::Decoder;
use crate::comm::mailbox::Demand;
use crate::comm::transport::tcp::{Assembler, Frame};
use crate::comm::transport::{limits, Admit, Deliver, FINISH_FRAME};
use crate::engine::mpi::{sleep_precisely, Backoff, Mpi, MpiMessage};
use crate::failure::Fault;
use distgpipe_core::wire::{Header, Kind, WireError, HEADER_BYTES};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::xxh3_64;

/// What may arrive while a mailbox is full. Then the senders wait.
const OVERFLOW_BYTES_MAX: u64 = 64 << 20;

/// The pause between two looks for a message while the stage computes.
const NOT_AWAITED: Duration = Duration::from_millis(2);

/// The bytes of a checksum.
const CHECKSUM_BYTES: usize = 8;

pub(super) struct Receiver {
    pub mpi: &'static Mpi,
    pub tags: Tags,
    pub abort: AbortFlag,
    pub ends: BTreeMap<usize, ReceivingEnd>,
    pub demand: Arc<Demand>,
    pub closing: Arc<AtomicBool>,
    pub abandoned: Arc<AtomicBool>,
}

impl Receiver {
    pub fn run(mut self) {
        sleep_precisely();
        self.demand.wakes_this_thread();
        if let Err(fault) = self.pump() {
            if let Some(end) = self.ends.values().next() {
                end.link.fail(fault);
            }
        }
        if self.abort.failure().is_some() {
            self.drain();
        }
    }

    /// Delivers what arrives, until all peers have said goodbye or the run fails. The error is one of MPI.
    fn pump(&mut self) -> Result<(), Fault> {
        let (mut wait, mut overflow) = (Backoff::new(), 0);
        while !self.ends.values().all(|end| end.link.has_ended()) {
            if self.abort.failure().is_some() || self.abandoned.load(Ordering::Acquire) {
                return Ok(());
            }
            if self.ends.values().all(|end| (end.has_room)()) {
                overflow = 0;
            } else if overflow >= OVERFLOW_BYTES_MAX {
                wait.pause();
                continue;
            }
            let Some(message) = self.mpi.next(None, self.tags.header)? else {
                if self.demand.is_there() {
                    wait.pause();
                } else {
                    std::thread::park_timeout(NOT_AWAITED);
                    wait = Backoff::new();
                }
                continue;
            };
            match self.ends.get_mut(&message.from) {
                Some(end) => match end.take(message) {
                    Ok(bytes) => overflow += bytes,
                    Err(fault) => end.link.fail(fault),
                },
                // No rank of the run sends without a link.
                None => drop(message.take()?),
            }
            wait = Backoff::new();
        }
        Ok(())
    }

    /// Receives and drops what the others are still sending: they wait until it is received.
    fn drain(&self) {
        let start = Instant::now();
        while start.elapsed() < FINISH_FRAME && !self.abandoned.load(Ordering::Acquire) {
            let mut drained = false;
            for tag in [self.tags.header, self.tags.body] {
                if let Ok(Some(message)) = self.mpi.next(None, tag) {
                    drained = true;
                    if message.take().is_err() {
                        return;
                    }
                }
            }
            if !drained {
                if self.closing.load(Ordering::Acquire) && start.elapsed() >= FINISH_FRAME / 5 {
                    return;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

/// The receiving end of one link.
pub(super) struct ReceivingEnd {
    link: Arc<Link>,
    decoder: Decoder,
    assembler: Assembler,
    admit: Admit,
    deliver: Deliver,
    has_room: Box<dyn Fn() -> bool + Send + Sync>,
}

impl ReceivingEnd {
    pub fn new(
        link: Arc<Link>,
        decoder: Decoder,
        admit: Admit,
        deliver: Deliver,
        has_room: Box<dyn Fn() -> bool + Send + Sync>,
    ) -> Self {
        ReceivingEnd { link, decoder, assembler: Assembler::default(), admit, deliver, has_room }
    }

    /// Receives the frame that begins with this message, and delivers what it completes. Returns the size of its body.
    fn take(&mut self, message: MpiMessage<'_>) -> Result<u64, Fault> {
        let link = self.link.clone();
        let arrivals = link.counters.arrivals();
        arrivals.begin(Receiving::Frame);
        if message.bytes > HEADER_BYTES + INLINE_BYTES_MAX {
            let got = format!("{} bytes", message.bytes);
            drop(message.take()?);
            return Err(Fault::protocol(format!("at most {} bytes", HEADER_BYTES + INLINE_BYTES_MAX), got));
        }
        let bytes = message.take()?;
        let Some((head, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
            return Err(Fault::protocol("a frame", format!("{} bytes", bytes.len())));
        };
        let header = Header::decode(head, &limits())?;
        let arriving = Arriving::new(&header, head, rest)?;
        (self.admit)(&header)?;
        let frame = match header.tensor {
            None => {
                let mut body = vec![0; usize::try_from(header.body_bytes).unwrap_or(usize::MAX)];
                arriving.receive(&link, &header, &mut body)?;
                Frame { header, body, tensor: None }
            }
            Some(meta) => {
                let filled = self.decoder.read(&header, &meta, |body| arriving.receive(&link, &header, body));
                Frame { header, body: Vec::new(), tensor: Some(filled?) }
            }
        };
        if header.kind == Kind::Goodbye {
            link.peer_ended.store(true, Ordering::Release);
        } else if let Some(message) = self.assembler.add(frame)? {
            (self.deliver)(message)?;
        }
        arrivals.begin(Receiving::Nothing);
        Ok(header.body_bytes)
    }
}

/// Where the body of a frame is.
enum Arriving<'a> {
    /// It came with the header.
    Inline(&'a [u8]),
    /// It follows in pieces.
    InPieces,
}

impl<'a> Arriving<'a> {
    /// For a frame whose first message is this header and what came after it.
    fn new(header: &Header, head: &[u8; HEADER_BYTES], rest: &'a [u8]) -> Result<Self, Fault> {
        if header.body_bytes <= INLINE_BYTES_MAX as u64 {
            return Ok(Arriving::Inline(rest));
        }
        let expected = xxh3_64(head);
        match rest.try_into().map(u64::from_le_bytes) {
            Ok(got) if got == expected => Ok(Arriving::InPieces),
            Ok(got) => Err(WireError::Checksum { expected, got }.into()),
            Err(_) => Err(Fault::protocol("a header and its checksum", format!("{} bytes more", rest.len()))),
        }
    }

    /// Fills `body` and verifies it.
    fn receive(self, link: &Link, header: &Header, body: &mut [u8]) -> Result<(), Fault> {
        match self {
            Arriving::Inline(bytes) if bytes.len() == body.len() => body.copy_from_slice(bytes),
            Arriving::Inline(bytes) => {
                return Err(WireError::BodyLength { expected: body.len() as u64, got: bytes.len() as u64 }.into());
            }
            Arriving::InPieces => return receive_pieces(link, header, body),
        }
        link.counters.arrivals().begin(Receiving::Decoding);
        Ok(header.verify(body)?)
    }
}

/// Receives a large body and the checksum after it.
fn receive_pieces(link: &Link, header: &Header, body: &mut [u8]) -> Result<(), Fault> {
    let (mut sum, mut started) = (BodyChecksum::new(header), None);
    for piece in body.chunks_mut(PIECE_BYTES) {
        next_piece(link, piece.len())?.receive(piece)?;
        sum.update(piece);
        started.get_or_insert_with(Instant::now);
    }
    // The first piece may have waited for this thread.
    if let Some(took) = started.map(|start: Instant| start.elapsed()) {
        link.counters.arrivals().count(body.len().saturating_sub(PIECE_BYTES) as u64, took);
    }
    let mut checksum = [0; CHECKSUM_BYTES];
    next_piece(link, CHECKSUM_BYTES)?.receive(&mut checksum)?;
    link.counters.arrivals().begin(Receiving::Decoding);
    let (expected, got) = (u64::from_le_bytes(checksum), sum.finish());
    match got == expected {
        true => Ok(()),
        false => Err(WireError::Checksum { expected, got }.into()),
    }
}

/// The next message of a large body, which must have this length.
fn next_piece(link: &Link, bytes: usize) -> Result<MpiMessage<'_>, Fault> {
    let wait = Backoff::new();
    loop {
        match link.mpi.next(Some(link.rank), link.tags.body)? {
            Some(message) if message.bytes == bytes => return Ok(message),
            Some(message) => {
                let got = format!("{} bytes", message.bytes);
                drop(message.take()?);
                return Err(Fault::protocol(format!("a piece of {bytes} bytes"), got));
            }
            None => {
                link.abort.check()?;
                wait.pause();
            }
        }
    }
}
