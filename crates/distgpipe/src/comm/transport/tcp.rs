//! Between processes, on one host or several: frames over TCP.
//!
//! ```text
//!  stage ──queue──► writer thread ──socket──► reader thread ──► mailbox of the receiving stage
//!                   encode, checksum           verify, decode
//! ```
//!
//! Each connection has one writer and one reader thread, so encoding, sending and receiving overlap with computing. The
//! plan bounds the queue. A writer with nothing to send sends a heartbeat every [`HEARTBEAT`]; a reader that receives
//! nothing for [`Timeouts::silence_s`] counts the peer as dead. `incoming` times what arrives, and reports a silence before
//! that.

mod deadline;
mod frames;
mod incoming;
mod rate;
mod reader;
mod writer;

pub use deadline::Deadline;
pub use frames::{read_frame, write_frame, Frame};
pub(crate) use frames::{write_all, Framer};

use super::queue::Queue;
use super::Outgoing;
use crate::comm::abort::{AbortFlag, POLL};
use crate::comm::link_codecs::{Decoder, Encoder, LinkCodecs};
use crate::comm::message::Message;
use crate::comm::notice::Notify;
use crate::comm::suspension;
use crate::comm::timeouts::Timeouts;
use crate::comm::traffic::Counters;
use crate::engine::{self, Meter};
use crate::failure::{Failure, Fault};
use distgpipe_core::wire::{Header, Limits};
use incoming::Incoming;
use reader::Reader;
use std::net::TcpStream;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, SyncSender};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use writer::{Socket, Writer};

/// How often an idle writer sends a heartbeat.
pub const HEARTBEAT: Duration = Duration::from_millis(250);

/// How long a frame in progress may still take after the run has failed.
const FINISH_FRAME: Duration = Duration::from_millis(1500);

/// Wraps the sending end of a socket.
pub type Wrap = Box<dyn FnOnce(Box<dyn Outgoing>) -> Box<dyn Outgoing> + Send>;

/// Decides from its header whether a frame is read.
pub type Admit = Box<dyn Fn(&Header) -> Result<(), Fault> + Send>;

/// Takes the messages that arrive.
pub type Deliver = Box<dyn FnMut(Message) -> Result<(), Fault> + Send>;

/// Takes the texts of the peer's heartbeats.
pub type OnHeartbeat = Box<dyn FnMut(&str) + Send>;

/// The limits that both ends of a connection hold each other to.
pub fn limits() -> Limits {
    // Reports contain the traces of large plans, and one tensor may be the embedding of a large model.
    Limits { text_bytes_max: 64 << 20, body_bytes_max: 4 << 30, ..Limits::default() }
}

/// What [`Connection::start`] needs besides the socket.
pub struct TcpOptions {
    /// The name of this end, for failures of its own.
    pub local: String,
    /// The name of the other end.
    pub peer: String,
    /// The abort flag of the run in this process.
    pub abort: AbortFlag,
    /// The time-outs of the run.
    pub timeouts: Timeouts,
    /// The most messages that may wait to be sent.
    pub queue: usize,
    /// The memory meter that received tensors count on.
    pub meter: Meter,
    /// The codecs of this worker's links.
    pub link_codecs: LinkCodecs,
    /// Makes the text of a heartbeat.
    pub heartbeat: Box<dyn Fn() -> String + Send>,
    /// Wraps the sending end of the socket, on the writer thread's side of the queue.
    pub wrap: Wrap,
    /// Decides from its header whether a frame is read.
    pub admit: Admit,
    /// Takes the messages that arrive.
    pub deliver: Deliver,
    /// Takes the texts of the peer's heartbeats.
    pub on_heartbeat: OnHeartbeat,
    /// Takes notices about the peer.
    pub notify: Notify,
}

/// A connection to another process, with its two threads.
pub struct Connection {
    queue: Option<SyncSender<Message>>,
    abort: AbortFlag,
    counters: Counters,
    closing: Arc<AtomicBool>,
    writer: Option<JoinHandle<()>>,
    reader: Option<JoinHandle<()>>,
}

impl Connection {
    /// Starts the threads of a connection on a socket whose handshake is done.
    pub fn start(stream: TcpStream, options: TcpOptions) -> Result<Self, Fault> {
        let doing = |e| Fault::io(format!("setting up the connection to {}", options.peer), e);
        stream.set_nodelay(true).map_err(doing)?;
        stream.set_read_timeout(Some(POLL)).map_err(doing)?;
        stream.set_write_timeout(Some(POLL)).map_err(doing)?;
        let (sending, last) = (stream.try_clone().map_err(doing)?, stream.try_clone().map_err(doing)?);
        let (queue, queued) = mpsc::sync_channel(options.queue.max(1));
        let counters = Counters::default();
        let closing = Arc::new(AtomicBool::new(false));
        let mid_frame = Arc::new(AtomicBool::new(false));
        let (local, peer, abort, meter) = (options.local, options.peer, options.abort, options.meter);
        let silence = options.timeouts.silence();
        let socket = Socket {
            stream: sending,
            framer: Framer::new(limits(), Encoder::new(options.link_codecs.clone(), counters.clone())),
            counters: counters.clone(),
            abort: abort.clone(),
            silence,
            mid_frame: mid_frame.clone(),
        };
        let writer = Writer {
            local: local.clone(),
            peer: peer.clone(),
            abort: abort.clone(),
            heartbeat: options.heartbeat,
            link: (options.wrap)(Box::new(socket)),
            counters: counters.clone(),
            mid_frame,
            stream: last,
            silence,
        };
        let reader = Reader {
            stream: Incoming::new(stream, counters.clone(), peer.clone(), silence, options.notify),
            local: local.clone(),
            peer: peer.clone(),
            abort: abort.clone(),
            silence,
            closing: closing.clone(),
            decoder: Decoder::new(options.link_codecs, counters.clone()),
            admit: options.admit,
            deliver: options.deliver,
            on_heartbeat: options.on_heartbeat,
        };
        let writer = spawn(format!("to {peer}"), &local, &abort, move || writer.run(queued))?;
        let reader = spawn(format!("from {peer}"), &local, &abort, move || {
            engine::attach_thread(1, meter.number());
            reader.run();
        })?;
        Ok(Connection { queue: Some(queue), abort, counters, closing, writer: Some(writer), reader: Some(reader) })
    }

    /// A sending end; any number of them share the connection. `None` once the connection is closed.
    pub fn outgoing(&self) -> Option<Queue> {
        self.queue.clone().map(|queue| Queue::new(queue, self.abort.clone(), self.counters.clone()))
    }

    /// Whether the peer has said goodbye, or the connection has failed.
    pub fn peer_has_ended(&self) -> bool {
        self.reader.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Counts what this end sends.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Sends what is queued, says goodbye, and waits for the other end to do the same. All sending ends must have been
    /// dropped, unless the run has failed. Returns whether both threads ended in time.
    pub fn close(mut self, limit: Duration) -> bool {
        self.closing.store(true, Ordering::Release);
        self.queue = None;
        let deadline = Instant::now() + limit;
        [self.writer.take(), self.reader.take()].into_iter().flatten().all(|thread| join_until(thread, deadline))
    }
}

/// Starts a thread whose panic is a failure of this end.
fn spawn(
    name: String,
    local: &str,
    abort: &AbortFlag,
    body: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, Fault> {
    let (local, abort) = (local.to_owned(), abort.clone());
    let guarded = move || {
        if std::panic::catch_unwind(AssertUnwindSafe(body)).is_err() {
            let fault = Fault::Panic("the panic message is on standard error".to_owned());
            abort.fail(Failure::new(local, "sending or receiving", fault));
        }
    };
    Ok(engine::spawn(name, guarded)?)
}

/// The failure of the connection to `peer`, as the worker `local` sees it. If this process did not run for so long that the
/// peer must have given it up, that is the cause.
fn connection_failure(local: &str, peer: &str, fault: Fault, silence: Duration) -> Failure {
    let given_up = match &fault {
        Fault::Lost | Fault::Io { .. } | Fault::Silent { .. } | Fault::NotReading { .. } => true,
        Fault::Reported(failure) => failure.is_lost_connection(),
        _ => false,
    };
    let missed = suspension::last().filter(|last| {
        // The peer's clock began at the last heartbeat.
        given_up && last.duration + 2 * HEARTBEAT >= silence && last.ended.elapsed() < silence
    });
    match missed {
        Some(last) => Failure::suspended(local, last.duration, silence),
        None => Failure::connection(peer, fault),
    }
}

/// Joins a thread and returns true if it ends before `deadline`; otherwise leaves it to end with the process.
pub fn join_until(thread: JoinHandle<()>, deadline: Instant) -> bool {
    while !thread.is_finished() {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    // Stages and I/O threads report their panics through the run's abort flag.
    let _ = thread.join();
    true
}
