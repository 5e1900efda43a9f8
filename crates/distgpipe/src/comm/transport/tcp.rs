//! Between processes, on one host or several: framed TCP.
//!
//! ```text
//!  stage ──queue──► writer thread ──socket──► reader thread ──► mailbox of the stage it is for
//!                   encode, checksum           verify, decode
//! ```
//!
//! Each connection has one writer and one reader thread, so encoding, sending and receiving overlap with computing.
//! The queue is bounded by what the plan sends in a step. A writer with nothing to send gives a sign of life every
//! [`HEARTBEAT`]; a reader that hears nothing for the silence time-out calls the peer dead.

#[path = "tcp/frames.rs"]
mod frames;

pub use frames::{read_frame, write_frame, Frame, Patience};

use super::queue::Queue;
use super::{Counters, Outgoing, Timeouts};
use crate::coding::{Coding, Decoder, Encoder};
use crate::failure::{Failure, Fate, Fault, POLL};
use crate::mailbox::Message;
use distgpipe_core::wire::{AbortNotice, Header, Kind, Limits};
use frames::Framer;
use std::io::{ErrorKind, Read};
use std::net::{Shutdown, TcpStream};
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often an idle writer says that it is alive.
pub const HEARTBEAT: Duration = Duration::from_millis(250);

/// Puts something around a sending end.
pub type Wrap = Box<dyn FnOnce(Box<dyn Outgoing>) -> Box<dyn Outgoing> + Send>;

/// Says from its header whether a frame may come.
pub type Admit = Box<dyn Fn(&Header) -> Result<(), Fault> + Send>;

/// What both ends of a connection hold each other to.
pub fn limits() -> Limits {
    // Traces of large plans travel in reports; embeddings of large models in one tensor.
    Limits { text_bytes_max: 64 << 20, body_bytes_max: 4 << 30, ..Limits::default() }
}

/// How long a frame that has been begun may still take after the run has failed.
const FINISH_FRAME: Duration = Duration::from_millis(1500);

/// What a connection needs to know besides its socket.
pub struct Options {
    /// The name of this end, for faults that are its own.
    pub here: String,
    /// The name of the other end.
    pub peer: String,
    /// The run's fate in this process.
    pub fate: Fate,
    /// When silence counts as death.
    pub timeouts: Timeouts,
    /// How many messages may wait to be sent.
    pub queue: usize,
    /// The memory meter that received tensors count on.
    pub meter: usize,
    /// The codecs of what is sent and received.
    pub coding: Coding,
    /// The text of a sign of life.
    pub heartbeat: Box<dyn Fn() -> String + Send>,
    /// Wraps the socket's sending end, to break it in tests.
    pub wrap: Wrap,
    /// Says from its header whether a message may come.
    pub admit: Admit,
    /// Takes what arrives.
    pub deliver: Box<dyn FnMut(Message) -> Result<(), Fault> + Send>,
    /// Takes the peer's signs of life.
    pub alive: Box<dyn FnMut(&str) + Send>,
}

/// A connection and its two threads.
pub struct Connection {
    queue: Option<SyncSender<Message>>,
    fate: Fate,
    counters: Counters,
    closing: Arc<AtomicBool>,
    writer: Option<JoinHandle<()>>,
    reader: Option<JoinHandle<()>>,
}

impl Connection {
    /// Takes over a socket whose handshake is done.
    pub fn start(stream: TcpStream, options: Options) -> Result<Self, Fault> {
        let doing = |e| Fault::io(format!("setting up the connection to {}", options.peer), e);
        stream.set_nodelay(true).map_err(doing)?;
        stream.set_read_timeout(Some(POLL)).map_err(doing)?;
        stream.set_write_timeout(Some(POLL)).map_err(doing)?;
        let sending = stream.try_clone().map_err(doing)?;
        let (queue, waiting) = mpsc::sync_channel(options.queue.max(1));
        let counters = Counters::default();
        let closing = Arc::new(AtomicBool::new(false));
        let broken = Arc::new(AtomicBool::new(false));
        let socket = Socket {
            stream: sending.try_clone().map_err(doing)?,
            framer: Framer::new(limits(), Encoder::new(options.coding.clone(), counters.clone())),
            counters: counters.clone(),
            fate: options.fate.clone(),
            silence: options.timeouts.silence(),
            broken: broken.clone(),
        };
        let writer = Writer {
            here: options.here,
            peer: options.peer.clone(),
            fate: options.fate.clone(),
            heartbeat: options.heartbeat,
            link: (options.wrap)(Box::new(socket)),
            counters: counters.clone(),
            broken,
            farewell: sending,
        };
        let reader = Reader {
            stream,
            peer: options.peer.clone(),
            fate: options.fate.clone(),
            silence: options.timeouts.silence(),
            closing: closing.clone(),
            decoder: Decoder::new(options.coding, counters.clone()),
            admit: options.admit,
            deliver: options.deliver,
            alive: options.alive,
        };
        let (here, fate) = (writer.here.clone(), options.fate.clone());
        let spawn = |name: String, body: Box<dyn FnOnce() + Send>| {
            let (here, fate) = (here.clone(), fate.clone());
            let guarded = move || {
                if std::panic::catch_unwind(AssertUnwindSafe(body)).is_err() {
                    fate.fail(Failure::new(here, "an I/O thread", Fault::Panic("see above".to_owned())));
                }
            };
            std::thread::Builder::new().name(name).spawn(guarded).map_err(|e| Fault::io("starting an I/O thread", e))
        };
        let meter = options.meter;
        let writer = spawn(format!("to {}", options.peer), Box::new(move || writer.run(waiting)))?;
        let reader = spawn(
            format!("from {}", options.peer),
            Box::new(move || {
                crate::engine::attach_thread(1, meter);
                reader.run();
            }),
        )?;
        Ok(Connection {
            queue: Some(queue),
            fate: options.fate,
            counters,
            closing,
            writer: Some(writer),
            reader: Some(reader),
        })
    }

    /// A sending end; as many as wanted share the connection.
    pub fn port(&self) -> Option<Queue> {
        self.queue.clone().map(|queue| Queue::new(queue, self.fate.clone(), self.counters.clone()))
    }

    /// What has been sent.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Says goodbye once all that is queued is sent, and waits until the other end has done so too. All sending ends
    /// must be gone by then, or the run has failed. Returns whether both threads ended in time.
    pub fn close(mut self, limit: Duration) -> bool {
        self.closing.store(true, Ordering::Release);
        self.queue = None;
        let deadline = Instant::now() + limit;
        [self.writer.take(), self.reader.take()].into_iter().flatten().all(|thread| join_until(thread, deadline))
    }
}

/// Joins a thread if it ends by then; otherwise leaves it to end with the process.
pub fn join_until(thread: JoinHandle<()>, deadline: Instant) -> bool {
    while !thread.is_finished() {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    // Stages and I/O threads report their panics through the run's fate.
    let _ = thread.join();
    true
}

/// The socket itself, used by the writer thread.
struct Socket {
    stream: TcpStream,
    framer: Framer,
    counters: Counters,
    fate: Fate,
    silence: Duration,
    /// Set while a frame is under way: what is written then would be taken for its rest.
    broken: Arc<AtomicBool>,
}

impl Outgoing for Socket {
    fn send(&mut self, message: Message) -> Result<(), Fault> {
        let start = Instant::now();
        let patience = Patience::new(&self.fate, self.silence).with_grace(FINISH_FRAME);
        self.broken.store(true, Ordering::Release);
        let wire = self.framer.write(&mut self.stream, &message, &patience);
        // An error of the run's own comes from between two frames, unless the grace was used up.
        self.broken.store(wire.is_err() && !self.framer.at_boundary(), Ordering::Release);
        self.counters.count(message.carries_tensors(), message.payload_bytes(), wire?, start.elapsed());
        Ok(())
    }

    fn send_damaged(&mut self, message: Message, seed: u64) -> Result<(), Fault> {
        let patience = Patience::new(&self.fate, self.silence).with_grace(FINISH_FRAME);
        self.framer.write_damaged(&mut self.stream, &message, seed, &patience)
    }

    fn cut(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

struct Writer {
    here: String,
    peer: String,
    fate: Fate,
    heartbeat: Box<dyn Fn() -> String + Send>,
    link: Box<dyn Outgoing>,
    counters: Counters,
    broken: Arc<AtomicBool>,
    /// The bare socket, for the last words.
    farewell: TcpStream,
}

impl Writer {
    fn run(mut self, waiting: Receiver<Message>) {
        match self.pump(&waiting) {
            Ok(()) => self.last_words(Kind::Goodbye, &[]),
            Err(fault) => {
                let first = self.fate.fail(self.blame(fault));
                self.last_words(Kind::Abort, &first.notice().encode());
            }
        }
    }

    fn pump(&mut self, waiting: &Receiver<Message>) -> Result<(), Fault> {
        let mut last = Instant::now();
        loop {
            self.fate.check()?;
            match waiting.recv_timeout(POLL) {
                Ok(message) => {
                    self.link.send(message)?;
                    self.counters.sent();
                    last = Instant::now();
                }
                Err(RecvTimeoutError::Timeout) if last.elapsed() >= HEARTBEAT => {
                    let ping = frames::control(Kind::Ping, (self.heartbeat)().into_bytes());
                    self.link.send(ping)?;
                    last = Instant::now();
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return self.fate.check(),
            }
        }
    }

    /// Whose fault it is that sending failed. A peer that has closed may have said why: the reader finds its last words
    /// in the socket, and is given the time to.
    fn blame(&self, fault: Fault) -> Failure {
        if !matches!(fault, Fault::Lost | Fault::TimedOut { .. }) {
            return Failure::new(&self.here, "sending", fault);
        }
        let deadline = Instant::now() + 4 * POLL;
        while self.fate.failure().is_none() && Instant::now() < deadline {
            std::thread::sleep(POLL / 10);
        }
        Failure::new(&self.peer, "talking to it", fault)
    }

    /// Best effort: the peer may be gone already.
    fn last_words(&mut self, kind: Kind, body: &[u8]) {
        let undecided = Fate::default();
        let patience = Patience::new(&undecided, Duration::from_millis(500));
        let mut header = Header::new(kind);
        header.seal(body);
        if !self.broken.load(Ordering::Acquire) {
            let _ = write_frame(&mut self.farewell, &header, body, &patience);
        }
        // Only this direction: a socket that is closed with unread input takes back what it has sent.
        let _ = self.farewell.shutdown(Shutdown::Write);
    }
}

struct Reader {
    stream: TcpStream,
    peer: String,
    fate: Fate,
    silence: Duration,
    closing: Arc<AtomicBool>,
    decoder: Decoder,
    admit: Admit,
    deliver: Box<dyn FnMut(Message) -> Result<(), Fault> + Send>,
    alive: Box<dyn FnMut(&str) + Send>,
}

impl Reader {
    fn run(mut self) {
        if let Err(fault) = self.pump() {
            // A peer that has heard our goodbye may close without one of its own.
            if self.closing.load(Ordering::Acquire) && matches!(fault, Fault::Lost) {
                return;
            }
            self.fate.fail(Failure::new(&self.peer, "talking to it", fault));
            self.drain();
        }
    }

    /// Reads on until the peer has closed, so that our last words, which the writer is sending, are not taken back.
    fn drain(&mut self) {
        let deadline = Instant::now() + FINISH_FRAME;
        let mut rest = [0; 1 << 16];
        while Instant::now() < deadline {
            match self.stream.read(&mut rest) {
                Ok(0) => return,
                Ok(_) => {}
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(_) => return,
            }
        }
    }

    fn pump(&mut self) -> Result<(), Fault> {
        let limits = limits();
        let mut assembler = frames::Assembler::default();
        loop {
            let patience = Patience::new(&self.fate, self.silence);
            let frame = read_frame(&mut self.stream, &limits, &patience, &mut self.decoder, &self.admit)?;
            match frame.header.kind {
                Kind::Goodbye => return Ok(()),
                Kind::Ping => (self.alive)(&frame.text()?),
                Kind::Abort => {
                    let notice = AbortNotice::decode(&frame.body)
                        .map_err(|e| Fault::protocol("an abort notice", e.to_string()))?;
                    return Err(Fault::Elsewhere(notice.into()));
                }
                _ => {
                    if let Some(message) = assembler.add(frame)? {
                        (self.deliver)(message)?;
                    }
                }
            }
        }
    }
}
