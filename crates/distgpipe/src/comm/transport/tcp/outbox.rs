//! What a link has yet to send and what its peer has not acknowledged, and the socket that carries it at the moment.
//!
//! The encoder adds frames, the writer sends them, and the reader removes those that the peer has acknowledged. A frame keeps
//! its bytes from the first encoding on: codecs with memory encode a tensor once. When the frames that are kept exceed
//! [`KEPT_BYTES_MAX`], the encoder waits, and so does the stage as soon as its queue is full.
//!
//! Acknowledgements also keep the receiver's memory bounded. Its reader never waits for room in a mailbox, because it must
//! hear the heartbeats; instead it acknowledges nothing while a mailbox is full, until the sender waits. A sender that does not
//! wait is not one of ours, and loses the connection.

use super::frames::FrameBytes;
use crate::comm::abort::{AbortFlag, POLL};
use crate::comm::traffic::MessageSize;
use crate::comm::transport::byte_stream::ByteStream;
use crate::failure::Fault;
use crate::sync::lock;
use distgpipe_core::wire::{SendWindow, SequenceError};
use std::collections::VecDeque;
use std::net::Shutdown;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// The most bytes that are sent and not acknowledged; the last frame may exceed it.
pub(super) const KEPT_BYTES_MAX: u64 = 64 << 20;

/// A receiver acknowledges at the latest when it has received this many bytes.
const ACKNOWLEDGE_BYTES: u64 = 1 << 20;

/// An encoded frame.
pub(super) struct KeptFrame {
    /// The header and the body.
    pub bytes: FrameBytes,
    /// In the last frame of a message: the size of the message.
    pub message: Option<MessageSize>,
    /// Whether it has been written before.
    pub written: AtomicBool,
}

impl KeptFrame {
    pub fn new(bytes: FrameBytes, message: Option<MessageSize>) -> Self {
        KeptFrame { bytes, message, written: AtomicBool::new(false) }
    }
}

/// A frame as the writer sends it.
pub(super) struct FrameToSend {
    /// The connection that it is for.
    pub socket: Arc<Socket>,
    pub frame: Arc<KeptFrame>,
}

/// One of the connections that a link has had.
pub(super) struct Socket {
    pub epoch: u64,
    pub stream: ByteStream,
}

/// What the writer does next.
pub(super) enum Task {
    Send(FrameToSend),
    /// Send a heartbeat with this acknowledgement.
    Ping(Arc<Socket>, u64),
    /// Everything is sent, and the peer needs nothing any more.
    End,
}

pub(super) struct Outbox {
    state: Mutex<State>,
    changed: Condvar,
    abort: AbortFlag,
    /// Whether the mailboxes have room for what arrives.
    has_room: Box<dyn Fn() -> bool + Send + Sync>,
}

struct State {
    window: SendWindow,
    frames: VecDeque<Arc<KeptFrame>>,
    /// Whether the last frame has been added.
    complete: bool,
    /// `None` while the connection is broken.
    socket: Option<Arc<Socket>>,
    /// When the connection broke.
    broken_at: Option<Instant>,
    /// Why the writer gave the last connection up, if it did.
    fault: Option<Fault>,
    /// Whether the peer has said goodbye: it needs nothing any more.
    peer_ended: bool,
    /// Whether this end has closed the link and waits no longer.
    abandoned: bool,
    /// The last frame that has arrived.
    received: u64,
    /// Bytes that have arrived since the last acknowledgement, and the frame that it acknowledged.
    unacknowledged_bytes: u64,
    acknowledged: u64,
    acknowledged_at: Instant,
    /// Bytes that have arrived after the last frame that this end may have acknowledged.
    held_bytes: u64,
    /// Selects a bit of the next frame to flip, for tests.
    damage: Option<u64>,
}

impl Outbox {
    pub fn new(stream: ByteStream, abort: AbortFlag, has_room: Box<dyn Fn() -> bool + Send + Sync>) -> Self {
        let state = State {
            window: SendWindow::new(KEPT_BYTES_MAX),
            frames: VecDeque::new(),
            complete: false,
            socket: Some(Arc::new(Socket { epoch: 0, stream })),
            broken_at: None,
            fault: None,
            peer_ended: false,
            abandoned: false,
            received: 0,
            unacknowledged_bytes: 0,
            acknowledged: 0,
            acknowledged_at: Instant::now(),
            held_bytes: 0,
            damage: None,
        };
        Outbox { state: Mutex::new(state), changed: Condvar::new(), abort, has_room }
    }

    /// The sequence number of the next frame, and what it may acknowledge. Only the encoder adds frames.
    pub fn next_numbers(&self) -> (u64, u64) {
        let mut state = self.lock();
        (state.window.next_new(), self.to_acknowledge(&mut state))
    }

    /// Adds the next frame. Waits while too much is kept. Fails if the peer has ended the link.
    pub fn push(&self, mut frame: KeptFrame) -> Result<(), Fault> {
        let mut state = self.lock();
        while !state.window.has_room() && !state.peer_ended {
            self.abort.check()?;
            state = self.wait(state, POLL);
        }
        if state.peer_ended {
            return Err(Fault::Lost);
        }
        if let Some(draw) = state.damage.take() {
            let bit = usize::try_from(draw % (frame.bytes.len() as u64 * 8)).unwrap_or(0);
            frame.bytes.flip(bit);
        }
        state.window.push(frame.bytes.len() as u64);
        state.frames.push_back(Arc::new(frame));
        self.changed.notify_all();
        Ok(())
    }

    /// Adds the last frame, whether there is room or not.
    pub fn push_last(&self, frame: KeptFrame) {
        let mut state = self.lock();
        state.window.push(frame.bytes.len() as u64);
        state.frames.push_back(Arc::new(frame));
        state.complete = true;
        self.changed.notify_all();
    }

    /// Waits for something to do. `last_sent` is when the writer has sent something.
    pub fn next_task(&self, last_sent: Instant, heartbeat: Duration) -> Result<Task, Fault> {
        let mut state = self.lock();
        loop {
            self.abort.check()?;
            if state.is_over() {
                return Ok(Task::End);
            }
            if let Some(socket) = state.socket.clone() {
                let to_send = state.window.next_to_send();
                let silent = state.peer_ended || state.complete && to_send.is_none();
                let acknowledge = self.to_acknowledge(&mut state);
                let news = acknowledge > state.acknowledged
                    && (state.unacknowledged_bytes >= ACKNOWLEDGE_BYTES
                        || state.acknowledged_at.elapsed() >= heartbeat);
                if !silent && (news || to_send.is_none() && last_sent.elapsed() >= heartbeat) {
                    state.acknowledged = acknowledge;
                    state.acknowledged_at = Instant::now();
                    state.unacknowledged_bytes = 0;
                    return Ok(Task::Ping(socket, acknowledge));
                }
                if let Some(frame) = to_send.and_then(|at| state.frames.get(at)).cloned() {
                    // Before it is written: the acknowledgement may be faster than the writer. If the write fails, the
                    // next connection begins where the peer says.
                    state.window.mark_sent();
                    return Ok(Task::Send(FrameToSend { socket, frame }));
                }
            }
            state = self.wait(state, POLL);
        }
    }

    /// The peer has received everything up to this number.
    pub fn acknowledge(&self, number: u64) -> Result<(), SequenceError> {
        let mut state = self.lock();
        let dropped = state.window.acknowledge(number)?;
        if dropped > 0 {
            state.frames.drain(..dropped);
            self.changed.notify_all();
        }
        Ok(())
    }

    /// This frame has arrived, and its message has been delivered if it is complete.
    pub fn received(&self, number: u64, bytes: u64) {
        let mut state = self.lock();
        state.received = number;
        state.unacknowledged_bytes = state.unacknowledged_bytes.saturating_add(bytes);
        state.held_bytes = state.held_bytes.saturating_add(bytes);
        if state.unacknowledged_bytes >= ACKNOWLEDGE_BYTES {
            self.changed.notify_all();
        }
    }

    /// Whether the peer may send another frame: it waits when so much of what it has sent is not acknowledged.
    pub fn check_window(&self) -> Result<(), Fault> {
        let mut state = self.lock();
        self.to_acknowledge(&mut state);
        match state.held_bytes {
            held if held < KEPT_BYTES_MAX => Ok(()),
            held => {
                let expected = format!("at most {KEPT_BYTES_MAX} bytes without acknowledgement");
                Err(Fault::protocol(expected, format!("another frame after {held}")))
            }
        }
    }

    /// The peer has said goodbye.
    pub fn peer_ended(&self) {
        self.lock().peer_ended = true;
        self.changed.notify_all();
    }

    /// Nobody waits for the link any more: its threads end.
    pub fn abandon(&self) {
        self.lock().abandoned = true;
        self.changed.notify_all();
    }

    /// Whether nothing is left to do for a link that is being closed.
    pub fn is_over(&self) -> bool {
        self.lock().is_over()
    }

    /// Gives a connection up, unless it has been replaced. The reader finds the end of the connection after what has arrived.
    pub fn break_socket(&self, socket: &Socket, fault: Fault) {
        let mut state = self.lock();
        if state.socket.as_ref().is_some_and(|current| current.epoch == socket.epoch) {
            state.socket = None;
            state.broken_at = Some(Instant::now());
            state.fault = Some(fault);
            let _ = socket.stream.shutdown(Shutdown::Both);
        }
    }

    /// Ends the current connection, as a failing network does.
    pub fn cut(&self) {
        if let Some(socket) = &self.lock().socket {
            let _ = socket.stream.shutdown(Shutdown::Both);
        }
    }

    /// Flips a bit of the next frame.
    pub fn damage_next(&self, draw: u64) {
        self.lock().damage = Some(draw);
    }

    /// The connection is broken, as the reader has found. Returns why the writer had given it up, if it had.
    pub fn broken(&self) -> Option<Fault> {
        let mut state = self.lock();
        if let Some(socket) = state.socket.take() {
            let _ = socket.stream.shutdown(Shutdown::Both);
            state.broken_at = Some(Instant::now());
        }
        state.fault.take()
    }

    /// Continues on another connection, with the frame that the peer expects next.
    pub fn resume(&self, socket: Socket, next: u64) -> Result<(), SequenceError> {
        let mut state = self.lock();
        let dropped = state.window.resume(next)?;
        state.frames.drain(..dropped);
        state.socket = Some(Arc::new(socket));
        (state.broken_at, state.fault) = (None, None);
        // What the last connection carried may not have arrived. The peer has learned what has arrived here.
        (state.acknowledged, state.held_bytes) = (0, 0);
        self.changed.notify_all();
        Ok(())
    }

    /// How long there has been no connection.
    pub fn broken_for(&self) -> Option<Duration> {
        self.lock().broken_at.map(|at| at.elapsed())
    }

    /// A handle on the current connection.
    pub fn stream(&self) -> Option<ByteStream> {
        self.lock().socket.as_ref().and_then(|socket| socket.stream.try_clone().ok())
    }

    /// Up to where this end may acknowledge.
    fn to_acknowledge(&self, state: &mut State) -> u64 {
        if (self.has_room)() {
            state.held_bytes = 0;
            state.received
        } else {
            state.acknowledged
        }
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, limit: Duration) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, limit).unwrap_or_else(|e| e.into_inner()).0
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl State {
    fn is_over(&self) -> bool {
        let all_sent = self.complete && self.window.next_to_send().is_none();
        self.abandoned || all_sent && (self.window.is_empty() || self.peer_ended)
    }
}
