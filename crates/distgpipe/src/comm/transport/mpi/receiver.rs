//! The thread that receives over all links of a process.

use super::checksum::BodyChecksum;
use super::{LargeBody, Link, Tags, INLINE_BYTES_MAX};
use crate::comm::abort::AbortFlag;
use crate::comm::arrivals::Receiving;
use crate::comm::link_codecs::{receive, Decoder, FrameBody};
use crate::comm::mailbox::Demand;
use crate::comm::transport::tcp::{Assembler, Frame};
use crate::comm::transport::{limits, Admit, Deliver, FINISH_FRAME};
use crate::engine::mpi::{sleep_precisely, Backoff, GpuMemory, Mpi, MpiMessage};
use crate::failure::Fault;
use distgpipe_core::wire::{BodyHasher, Header, Kind, WireError, HEADER_BYTES};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tch::Tensor;

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
        let arriving = Arriving::new(&link, &header, head, rest)?;
        (self.admit)(&header)?;
        let frame = match header.tensor {
            None => {
                let mut body = Vec::new();
                receive(arriving, header.body_bytes, &mut body)?;
                Frame { header, body, tensor: None }
            }
            Some(meta) => {
                let tensor = self.decoder.read(&header, &meta, arriving)?;
                Frame { header, body: Vec::new(), tensor: Some(tensor) }
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

/// The body of a frame.
struct Arriving<'a> {
    link: &'a Link,
    from: BodyFrom<'a>,
}

/// Where the body of a frame is.
enum BodyFrom<'a> {
    /// It came with the header. What is left of it, and its checksum.
    Inline(&'a [u8], Box<BodyHasher>),
    /// It follows in pieces.
    Pieces(PieceReceiver),
}

/// What has been received of a large body.
struct PieceReceiver {
    how: LargeBody,
    sum: BodyChecksum,
    bytes: u64,
    /// When the first piece had arrived, which may have waited for this thread.
    started: Option<Instant>,
}

impl<'a> Arriving<'a> {
    /// For a frame whose first message is this header and what came after it.
    fn new(link: &'a Link, header: &Header, head: &[u8; HEADER_BYTES], rest: &'a [u8]) -> Result<Self, Fault> {
        if header.body_bytes <= INLINE_BYTES_MAX as u64 {
            if rest.len() as u64 != header.body_bytes {
                return Err(WireError::BodyLength { expected: header.body_bytes, got: rest.len() as u64 }.into());
            }
            return Ok(Arriving { link, from: BodyFrom::Inline(rest, Box::new(BodyHasher::new(header))) });
        }
        let how = LargeBody::of(head, rest)?;
        let received = PieceReceiver { how, sum: BodyChecksum::new(header), bytes: 0, started: None };
        Ok(Arriving { link, from: BodyFrom::Pieces(received) })
    }
}

impl PieceReceiver {
    /// A piece of this length has been received.
    fn has(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
        self.started.get_or_insert_with(Instant::now);
    }
}

impl FrameBody for Arriving<'_> {
    fn read(&mut self, into: &mut [u8]) -> Result<(), Fault> {
        match &mut self.from {
            BodyFrom::Inline(rest, hash) => {
                let (piece, after) = rest.split_at_checked(into.len()).ok_or(Fault::Lost)?;
                into.copy_from_slice(piece);
                hash.update(piece);
                *rest = after;
            }
            BodyFrom::Pieces(received) => {
                for piece in into.chunks_mut(received.how.piece_bytes()) {
                    next_piece(self.link, piece.len())?.receive(piece)?;
                    if received.how == LargeBody::Checked {
                        received.sum.update(piece);
                    }
                    received.has(piece.len());
                }
            }
        }
        Ok(())
    }

    fn comes_from_a_gpu(&self) -> bool {
        self.link.mpi.reaches_gpus()
            && matches!(&self.from, BodyFrom::Pieces(received) if received.how == LargeBody::FromGpu)
    }

    fn read_on_gpu(&mut self, into: &Tensor) -> Result<(), Fault> {
        let wrong = || Fault::internal("a dense tensor on a GPU, and a body from one", format!("{into:?}"));
        let (BodyFrom::Pieces(received), Some(mut memory)) = (&mut self.from, GpuMemory::of(into)?) else {
            return Err(wrong());
        };
        let size = memory.bytes();
        for at in (0..size).step_by(received.how.piece_bytes()) {
            let bytes = received.how.piece_bytes().min(size - at);
            next_piece(self.link, bytes)?.receive_on_gpu(&mut memory, at)?;
            received.has(bytes);
        }
        Ok(())
    }

    fn verify(self) -> Result<(), Fault> {
        let arrivals = self.link.counters.arrivals();
        let received = match self.from {
            BodyFrom::Inline(_, hash) => {
                arrivals.begin(Receiving::Decoding);
                return Ok(hash.verify()?);
            }
            BodyFrom::Pieces(received) => received,
        };
        if let Some(took) = received.started.map(|start| start.elapsed()) {
            arrivals.count(received.bytes.saturating_sub(received.how.piece_bytes() as u64), took);
        }
        if received.how == LargeBody::FromGpu {
            arrivals.begin(Receiving::Decoding);
            return Ok(());
        }
        let mut checksum = [0; CHECKSUM_BYTES];
        next_piece(self.link, CHECKSUM_BYTES)?.receive(&mut checksum)?;
        arrivals.begin(Receiving::Decoding);
        let (expected, got) = (u64::from_le_bytes(checksum), received.sum.finish());
        match got == expected {
            true => Ok(()),
            false => Err(WireError::Checksum { expected, got }.into()),
        }
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
