//! Between the ranks of an MPI program: frames as MPI messages, over whatever fabric the MPI library drives.
//!
//! ```text
//!  stage ──queue──► sender: encode, send ══ MPI ══► receiver: receive, verify, decode ──► mailbox of the receiving stage
//!                   one for each link               one for all links of the process
//!
//!  heartbeats: one thread of the process sends and hears those of all links, and abort notices
//! ```
//!
//! A frame with a small body is one message: header and body. One with a large body is a message with the header, messages with
//! the pieces of the body, and one with the checksum, which the sender computes while the pieces are on their way and the
//! receiver while they are in its cache. Pieces are sent from the memory of the tensor and received into that of the tensor. The next
//! frame begins while the last one is still on its way.
//!
//! If the library is CUDA-aware, a tensor on a GPU is sent from there, in larger pieces and without a checksum, which would take a copy
//! of it on the host. A raw tensor that comes from a GPU is received into the memory of the receiver's GPU. Bodies of codecs are
//! received on the host, where they are validated. Without such a library, all tensors go through host memory.
//!
//! | tag, plus four times the run | messages |
//! | --- | --- |
//! | [`Tags::header`] | headers, in the order of the frames of a link; goodbye is the last |
//! | [`Tags::body`] | pieces and checksums of large bodies, in the order of their headers |
//! | [`Tags::control`] | heartbeats and abort notices; an empty message says that the link is cut |
//!
//! MPI delivers what is sent, once and in order, so frames have no sequence numbers here. No call of MPI blocks, so threads poll: the
//! receiver often while its stage waits for a message, and seldom while it computes. A rank that has stopped is found by its missing
//! heartbeats.

mod checksum;
mod heartbeats;
mod receiver;
mod sender;

use super::queue::Queue;
use super::tcp::join_until;
use super::{tcp, LinkControl, LinkOptions, Outgoing};
use crate::comm::abort::AbortFlag;
use crate::comm::link_codecs::{Decoder, Encoder};
use crate::comm::mailbox::Demand;
use crate::comm::message::Message;
use crate::comm::traffic::Counters;
use crate::engine;
use crate::engine::mpi::{Mpi, Outbound};
use crate::failure::{Failure, Fault};
use crate::sync::lock;
use distgpipe_core::wire::{Header, Kind, WireError, HEADER_BYTES};
use heartbeats::{Heartbeats, Pulse};
use receiver::{Receiver, ReceivingEnd};
use sender::{Sender, SendingEnd};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, SyncSender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::xxh3_64;

/// Bodies up to this size travel with their header.
const INLINE_BYTES_MAX: usize = 16 << 10;

/// The size of a piece of a larger body: it fits the cache of a core, and a fabric is fast with it.
pub(crate) const PIECE_BYTES: usize = 256 << 10;

/// The size of a piece of a body that is sent from a GPU: each costs a copy between GPUs its start.
pub(crate) const GPU_PIECE_BYTES: usize = 4 << 20;

/// How a body comes that does not travel with its header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LargeBody {
    /// In pieces of [`PIECE_BYTES`], and then its checksum.
    Checked = 0,
    /// In pieces of [`GPU_PIECE_BYTES`], from the memory of a GPU.
    FromGpu = 1,
}

impl LargeBody {
    /// The first message of a frame with this header. It has a checksum of its own, because it is acted on before the body is there.
    fn head(self, header: &Header) -> Vec<u8> {
        let mut head = header.encode().to_vec();
        head.push(self as u8);
        head.extend_from_slice(&xxh3_64(&head).to_le_bytes());
        head
    }

    /// What [`head`](Self::head) has said behind the header.
    fn of(header: &[u8; HEADER_BYTES], rest: &[u8]) -> Result<Self, Fault> {
        let wrong = || Fault::protocol("how the body comes, and a checksum", format!("{} bytes", rest.len()));
        let (&how, checksum) = rest.split_first().ok_or_else(wrong)?;
        let got = checksum.try_into().map(u64::from_le_bytes).map_err(|_| wrong())?;
        let expected = xxh3_64(&[&header[..], &[how]].concat());
        match (got == expected, how) {
            (false, _) => Err(WireError::Checksum { expected, got }.into()),
            (true, 0) => Ok(LargeBody::Checked),
            (true, 1) => Ok(LargeBody::FromGpu),
            (true, other) => Err(Fault::protocol("a body with a checksum or from a GPU", other.to_string())),
        }
    }

    fn piece_bytes(self) -> usize {
        match self {
            LargeBody::Checked => PIECE_BYTES,
            LargeBody::FromGpu => GPU_PIECE_BYTES,
        }
    }
}

/// Tags that all libraries have.
const RUNS: u64 = 8000;

/// The tags of a run. Those of the runs before it are others, so what a failed run has left is not mistaken for its messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tags {
    /// Headers, with small bodies.
    pub header: i32,
    /// Pieces of large bodies.
    pub body: i32,
    /// Heartbeats and abort notices.
    pub control: i32,
}

impl Tags {
    /// The tag of what the driver sends to a rank between runs.
    pub const ORDERS: i32 = 3;

    /// Those of a run.
    pub fn of(run: u64) -> Self {
        let first = i32::try_from(run % RUNS).unwrap_or(0) * 4;
        Tags { header: first, body: first + 1, control: first + 2 }
    }
}

/// Receives and drops what a run has left.
pub fn discard(mpi: &Mpi, run: u64) -> Result<(), Fault> {
    let Tags { header, body, control } = Tags::of(run);
    for tag in [header, body, control] {
        while let Some(message) = mpi.next(None, tag)? {
            drop(message.take()?);
        }
    }
    Ok(())
}

/// A message on [`Tags::control`], or a goodbye.
pub fn control_frame(kind: Kind, body: &[u8]) -> Vec<u8> {
    let mut header = Header::new(kind);
    header.seal(body);
    [&header.encode()[..], body].concat()
}

/// What the threads of a link share.
struct Link {
    mpi: &'static Mpi,
    /// The peer's rank.
    rank: usize,
    tags: Tags,
    local: String,
    peer: String,
    abort: AbortFlag,
    timeouts: crate::comm::timeouts::Timeouts,
    counters: Counters,
    /// Whether the peer has said goodbye.
    peer_ended: AtomicBool,
    /// Whether the peer has not been heard for too long.
    silent: AtomicBool,
    /// Whether an injected fault has cut the link.
    cut: AtomicBool,
    /// Selects a bit of the next frame to flip, for tests.
    damage: Mutex<Option<u64>>,
}

impl Link {
    /// The run has failed because of this link.
    fn fail(&self, fault: Fault) {
        self.abort.fail(match fault {
            Fault::NoAnswer { .. } => Failure::new(&self.peer, "joining the run", fault),
            fault => tcp::connection_failure(&self.local, &self.peer, fault, &self.timeouts),
        });
    }

    fn has_ended(&self) -> bool {
        self.peer_ended.load(Ordering::Acquire)
    }

    fn is_cut(&self) -> bool {
        self.cut.load(Ordering::Acquire)
    }

    /// Ends the link as a failing network does: each end finds that the other is gone.
    fn cut(&self) {
        self.cut.store(true, Ordering::Release);
        let _ = self.mpi.post(self.rank, self.tags.control, Vec::new());
        self.fail(Fault::Lost);
    }

    fn take_damage(&self) -> Option<u64> {
        lock(&self.damage).take()
    }

    fn has_damage(&self) -> bool {
        lock(&self.damage).is_some()
    }

    fn damage_next(&self, draw: u64) {
        *lock(&self.damage) = Some(draw);
    }
}

/// A link of this process, as the rest of the crate sees it.
struct LinkEnd {
    link: Arc<Link>,
    queue: Option<SyncSender<Message>>,
    sender: Option<JoinHandle<()>>,
}

/// The links of this process to other ranks in one run, with their threads.
pub struct MpiLinks {
    links: BTreeMap<usize, LinkEnd>,
    /// Whether this end closes the links.
    closing: Arc<AtomicBool>,
    /// Whether nobody waits for the links any more.
    abandoned: Arc<AtomicBool>,
    receiver: Option<JoinHandle<()>>,
    heartbeats: Option<JoinHandle<()>>,
}

impl MpiLinks {
    /// Starts the threads of the links to these ranks. `demand` is that of the stage of this process.
    pub fn start(
        mpi: &'static Mpi,
        run: u64,
        options: Vec<(usize, LinkOptions)>,
        demand: Arc<Demand>,
    ) -> Result<Self, Fault> {
        let tags = Tags::of(run);
        let mut own = MpiLinks {
            links: BTreeMap::new(),
            closing: Arc::default(),
            abandoned: Arc::default(),
            receiver: None,
            heartbeats: None,
        };
        let (mut receiving, mut pulses, mut meter) = (BTreeMap::new(), Vec::new(), None);
        for (rank, end) in options {
            let counters = end.counters;
            if let Some(gpu) = engine::cuda::index(end.link_codecs.device()) {
                mpi.use_gpu(gpu);
            }
            let link = Arc::new(Link {
                mpi,
                rank,
                tags,
                local: end.local,
                peer: end.peer,
                abort: end.abort,
                timeouts: end.timeouts,
                counters: counters.clone(),
                peer_ended: AtomicBool::new(false),
                silent: AtomicBool::new(false),
                cut: AtomicBool::new(false),
                damage: Mutex::default(),
            });
            let encoder = Encoder::new(end.link_codecs.clone(), counters.clone());
            let (cut, damaged) = (link.clone(), link.clone());
            let control = LinkControl {
                cut: Box::new(move || cut.cut()),
                damage_next: Box::new(move |draw| damaged.damage_next(draw)),
            };
            let outbound = Arc::new(Mutex::new(Outbound::new(mpi, rank)));
            let sending: Box<dyn Outgoing> = Box::new(SendingEnd::new(link.clone(), encoder, outbound.clone()));
            let sender = Sender { outgoing: (end.wrap)(sending, control), link: link.clone(), outbound };
            let decoder = Decoder::new(end.link_codecs, counters);
            receiving.insert(rank, ReceivingEnd::new(link.clone(), decoder, end.admit, end.deliver, end.has_room));
            pulses.push(Pulse::new(link.clone(), end.heartbeat, end.on_heartbeat, end.notify));
            meter = Some(end.meter);
            let (queue, queued) = mpsc::sync_channel(end.queue.max(1));
            let name = format!("to {}", link.peer);
            let thread = tcp::spawn(name, &link.local, &link.abort, move || sender.run(&queued));
            let ended = LinkEnd { link, queue: Some(queue), sender: None };
            // If a thread does not start, those that have end with the links.
            own.links.insert(rank, ended);
            if let (Some(end), thread) = (own.links.get_mut(&rank), thread?) {
                end.sender = Some(thread);
            }
        }
        let Some(first) = own.links.values().next().map(|end| end.link.clone()) else { return Ok(own) };
        let (closing, abandoned) = (own.closing.clone(), own.abandoned.clone());
        let receiver = Receiver { mpi, tags, abort: first.abort.clone(), ends: receiving, demand, closing, abandoned };
        let meter = meter.map_or(0, |meter| meter.number());
        let body = move || {
            engine::attach_thread(1, meter);
            receiver.run();
        };
        own.receiver = Some(tcp::spawn("from other ranks".to_owned(), &first.local, &first.abort, body)?);
        let abandoned = own.abandoned.clone();
        let heartbeats = Heartbeats { mpi, tags, abort: first.abort.clone(), pulses, abandoned };
        let body = move || heartbeats.run();
        own.heartbeats = Some(tcp::spawn("heartbeats".to_owned(), &first.local, &first.abort, body)?);
        Ok(own)
    }

    /// The sending end of the link to a rank, and its counters; any number of sending ends share it.
    pub fn outgoing(&self, rank: usize) -> Option<(Queue, Counters)> {
        let end = self.links.get(&rank)?;
        let (queue, link) = (end.queue.clone()?, &end.link);
        Some((Queue::new(queue, link.abort.clone(), link.counters.clone()), link.counters.clone()))
    }

    /// The ranks that this process has a link to.
    pub fn ranks(&self) -> impl Iterator<Item = usize> + '_ {
        self.links.keys().copied()
    }

    /// Whether a rank has said goodbye.
    pub fn has_ended(&self, rank: usize) -> bool {
        self.links.get(&rank).is_none_or(|end| end.link.has_ended())
    }

    /// Whether a rank has not been heard for too long.
    pub fn is_silent(&self, rank: usize) -> bool {
        self.links.get(&rank).is_some_and(|end| end.link.silent.load(Ordering::Acquire))
    }

    /// Sends what is queued, says goodbye, and waits for the other ranks to do the same. All sending ends must have been
    /// dropped, unless the run has failed. Returns whether all threads ended in time.
    pub fn close(mut self, limit: Duration) -> bool {
        self.closing.store(true, Ordering::Release);
        let deadline = Instant::now() + limit;
        self.links.values_mut().for_each(|end| end.queue = None);
        let senders: Vec<JoinHandle<()>> = self.links.values_mut().filter_map(|end| end.sender.take()).collect();
        let mut ended = true;
        for thread in senders.into_iter().chain(self.receiver.take()) {
            ended &= join_until(thread, deadline);
        }
        // Those who still wait for this end hear its heartbeats until here.
        self.abandoned.store(true, Ordering::Release);
        let thread = self.heartbeats.take();
        thread.is_none_or(|thread| join_until(thread, deadline.max(Instant::now() + Duration::from_millis(200))))
            && ended
    }
}

/// Threads that wait for another rank end.
impl Drop for MpiLinks {
    fn drop(&mut self) {
        self.closing.store(true, Ordering::Release);
        self.abandoned.store(true, Ordering::Release);
    }
}

/// The failure of this end while it sends.
fn sending_failure(link: &Link, fault: Fault) -> Failure {
    match fault {
        Fault::Lost => Failure::connection(&link.peer, fault),
        fault => Failure::new(&link.local, "sending", fault),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A receiver acts on the first message of a large body before the body is there.
    #[test]
    fn the_first_message_of_a_large_body_is_verified() {
        let header = Header { to: 1, body_bytes: 1 << 20, ..Header::new(Kind::Activation) };
        let read = |head: &[u8]| {
            let (header, rest) = head.split_first_chunk::<HEADER_BYTES>().expect("a header");
            LargeBody::of(header, rest)
        };
        for how in [LargeBody::Checked, LargeBody::FromGpu] {
            let head = how.head(&header);
            assert_eq!(read(&head).expect("intact"), how);
            for bit in 0..head.len() * 8 {
                let mut damaged = head.clone();
                damaged[bit / 8] ^= 1 << (bit % 8);
                let refused = read(&damaged).expect_err("damaged").to_string();
                assert!(refused.contains("checksum"), "bit {bit}: {refused}");
            }
            for length in HEADER_BYTES..head.len() {
                let refused = read(&head[..length]).expect_err("cut").to_string();
                assert!(refused.contains("how the body comes, and a checksum"), "{length} bytes: {refused}");
            }
        }
        let mut unknown = header.encode().to_vec();
        unknown.push(2);
        unknown.extend_from_slice(&xxh3_64(&unknown).to_le_bytes());
        let refused = read(&unknown).expect_err("unknown").to_string();
        assert!(refused.contains("a body with a checksum or from a GPU"), "{refused}");
    }
}
