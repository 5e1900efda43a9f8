//! Between processes, on one host or several: frames over TCP.
//!
//! ```text
//!  stage ──queue──► encoder ──outbox──► writer ──socket──► reader ──► mailbox of the receiving stage
//!                   encode, checksum                       verify, decode
//! ```
//!
//! Each connection has three threads, so encoding, sending and receiving overlap with computing. The plan bounds the queue, and
//! a number of bytes the outbox. The writer sends a heartbeat every [`HEARTBEAT`] when it has nothing else to send,
//! however long the encoder takes; a reader that receives nothing for [`Timeouts::silence_s`] gives the socket up. `incoming`
//! times what arrives, and reports a silence before that.
//!
//! A connection outlives its socket: when the socket breaks, both ends keep what has not been acknowledged, and
//! resume on another one within [`Timeouts::reconnect_s`]. [`distgpipe_core::wire::durable`] has the rules.

mod deadline;
mod encoder;
mod frames;
mod incoming;
mod outbox;
mod rate;
mod reader;
mod reconnect;
mod writer;

pub use deadline::Deadline;
pub(crate) use frames::{read_exact, write_all};
pub use frames::{read_frame, write_frame, Frame};
pub(super) use frames::{Assembler, Framer};
pub(crate) use reconnect::proves_gone;
pub use reconnect::{Dial, Reconnect, Resume};

use super::byte_stream::ByteStream;
use super::queue::Queue;
use super::{limits, LinkControl, LinkOptions, HEARTBEAT};
use crate::comm::abort::AbortFlag;
use crate::comm::link_codecs::{Decoder, Encoder};
use crate::comm::message::Message;
use crate::comm::suspension;
use crate::comm::timeouts::Timeouts;
use crate::comm::traffic::Counters;
use crate::engine;
use crate::failure::{Failure, Fault};
use distgpipe_core::wire::{Hello, ReceiveWindow};
use encoder::{EncoderThread, EncodingEnd};
use incoming::Incoming;
use outbox::Outbox;
use reader::Reader;
use reconnect::Offers;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, SyncSender};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use writer::Writer;

/// What [`Connection::start`] needs besides the socket.
pub struct TcpOptions {
    /// This end of the link.
    pub link: LinkOptions,
    /// Where the next socket comes from when this one breaks.
    pub reconnect: Reconnect,
    /// Called with true when the connection breaks and this end waits for another one, and with false when that wait is over.
    pub on_reconnecting: Box<dyn Fn(bool) + Send>,
}

/// Processor time of the two threads that send.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SenderCpuTimes {
    pub encoder: Duration,
    pub writer: Duration,
}

/// A connection to another process, with its threads.
pub struct Connection {
    queue: Option<SyncSender<Message>>,
    abort: AbortFlag,
    counters: Counters,
    closing: Arc<AtomicBool>,
    outbox: Arc<Outbox>,
    offers: Offers,
    /// Whether another socket may replace the one that the peer has dialled.
    resumes: bool,
    encoder: Option<JoinHandle<()>>,
    writer: Option<JoinHandle<()>>,
    reader: Option<JoinHandle<()>>,
}

impl Connection {
    /// Starts the threads of a connection on a socket whose handshake is done.
    pub fn start(stream: ByteStream, options: TcpOptions) -> Result<Self, Fault> {
        stream.set_up()?;
        let sending = stream.try_clone();
        let sending =
            sending.map_err(|e| Fault::io(format!("setting up the connection to {}", options.link.peer), e))?;
        let link = options.link;
        let (queue, queued) = mpsc::sync_channel(link.queue.max(1));
        let counters = link.counters;
        let closing = Arc::new(AtomicBool::new(false));
        let (local, peer, abort, meter) = (link.local, link.peer, link.abort, link.meter);
        let (timeouts, silence) = (link.timeouts, link.timeouts.silence());
        let outbox = Arc::new(Outbox::new(sending, abort.clone(), link.has_room));
        let offers = Offers::new(outbox.clone());
        let resumes = matches!(options.reconnect, Reconnect::Await) && !timeouts.reconnect().is_zero();
        let framer = Framer::new(limits(), Encoder::new(link.link_codecs.clone(), counters.clone()));
        let encoding = Box::new(EncodingEnd { framer, outbox: outbox.clone() });
        let (cut, damaged) = (outbox.clone(), outbox.clone());
        let control = LinkControl {
            cut: Box::new(move || cut.cut()),
            damage_next: Box::new(move |draw| damaged.damage_next(draw)),
        };
        let encoder = EncoderThread {
            local: local.clone(),
            abort: abort.clone(),
            link: (link.wrap)(encoding, control),
            outbox: outbox.clone(),
        };
        let writer = Writer {
            local: local.clone(),
            abort: abort.clone(),
            heartbeat: link.heartbeat,
            outbox: outbox.clone(),
            counters: counters.clone(),
            silence,
            stream: None,
            mid_frame: false,
        };
        let reader = Reader {
            stream: Incoming::new(stream, counters.clone(), peer.clone(), silence, link.notify.clone()),
            local: local.clone(),
            peer: peer.clone(),
            abort: abort.clone(),
            timeouts,
            closing: closing.clone(),
            decoder: Decoder::new(link.link_codecs, counters.clone()),
            admit: link.admit,
            deliver: link.deliver,
            on_heartbeat: link.on_heartbeat,
            on_reconnecting: options.on_reconnecting,
            notify: link.notify,
            counters: counters.clone(),
            outbox: outbox.clone(),
            reconnect: options.reconnect,
            offers: offers.clone(),
            epoch: 0,
            received: ReceiveWindow::default(),
            assembler: Assembler::default(),
        };
        let mut connection = Connection {
            queue: Some(queue),
            abort: abort.clone(),
            counters,
            closing,
            outbox,
            offers,
            resumes,
            encoder: None,
            writer: None,
            reader: None,
        };
        // If a thread does not start, those that have end with the connection.
        connection.encoder = Some(spawn(format!("encode for {peer}"), &local, &abort, move || encoder.run(queued))?);
        connection.writer = Some(spawn(format!("to {peer}"), &local, &abort, move || writer.run())?);
        let reader = spawn(format!("from {peer}"), &local, &abort, move || {
            engine::attach_thread(1, meter.number());
            reader.run();
        })?;
        connection.reader = Some(reader);
        Ok(connection)
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

    /// The processor time that the sending threads have used; zero once the connection is closed.
    pub(crate) fn sender_cpu_times(&self) -> SenderCpuTimes {
        let time = |thread: &Option<JoinHandle<()>>| thread.as_ref().map_or(Duration::ZERO, engine::cpu_time_of);
        SenderCpuTimes { encoder: time(&self.encoder), writer: time(&self.writer) }
    }

    /// How long the connection has been without a socket; `None` while it has one.
    pub fn broken_for(&self) -> Option<Duration> {
        self.outbox.broken_for()
    }

    /// Continues the connection on another socket, whose peer has shown its credentials and says in its hello that it connects
    /// again. Returns the stream if the connection does not: its hello is older than another, or it does not resume at all.
    pub fn offer(&self, stream: ByteStream, hello: &Hello) -> Result<(), ByteStream> {
        match self.resumes && !self.peer_has_ended() {
            true => self.offers.put(stream, hello),
            false => Err(stream),
        }
    }

    /// Sends what is queued, says goodbye, and waits for the other end to do the same. All sending ends must have been
    /// dropped, unless the run has failed. Returns whether all threads ended in time.
    pub fn close(mut self, limit: Duration) -> bool {
        self.closing.store(true, Ordering::Release);
        self.queue = None;
        let deadline = Instant::now() + limit;
        let threads = [self.encoder.take(), self.writer.take(), self.reader.take()];
        let mut ended = true;
        for thread in threads.into_iter().flatten() {
            ended &= join_until(thread, deadline);
        }
        if !ended {
            // A peer that goes on sending would keep the threads for ever.
            self.outbox.cut();
        }
        ended
    }
}

/// Threads that wait for a peer to come back end.
impl Drop for Connection {
    fn drop(&mut self) {
        self.closing.store(true, Ordering::Release);
        self.outbox.abandon();
    }
}

/// Whether a fault is one of the socket, so that the link can go on over another one.
fn is_cut(fault: &Fault) -> bool {
    matches!(fault, Fault::Lost | Fault::Io { .. } | Fault::Silent { .. } | Fault::NotReading { .. })
}

/// Starts a thread whose panic is a failure of this end.
pub(super) fn spawn(
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
pub(super) fn connection_failure(local: &str, peer: &str, fault: Fault, timeouts: &Timeouts) -> Failure {
    let given_up = match &fault {
        Fault::Reported(failure) => failure.is_lost_connection(),
        Fault::Refused { .. } | Fault::Busy { .. } => true,
        fault => is_cut(fault),
    };
    let patience = timeouts.silence() + timeouts.reconnect();
    let missed = suspension::last().filter(|last| {
        // The peer's clock began at the last heartbeat.
        given_up && last.duration + 2 * HEARTBEAT >= patience && last.ended.elapsed() < patience
    });
    match missed {
        Some(last) => Failure::suspended(local, last.duration, patience),
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
