//! How a message gets from one worker to another. Members of the family:
//!
//! - [`memory`]: to a thread of this process; the tensors move, nothing is copied
//! - [`loopback`]: to a thread of this process, encoded and decoded by the link's codec as over a network
//! - [`tcp`]: to another process, on this host or another
//! - `mpi`: to another rank of an MPI program, with the feature `mpi`
//! - [`faulty`]: wraps any of them and injects faults, for tests
//!
//! A member implements [`Outgoing`] for its sending end. Its receiving end puts what arrives into the receiver's
//! [`Mailbox`](crate::comm::mailbox::Mailbox); if it comes from another process, through
//! [`Delivery`](crate::comm::admission::Delivery), which rejects what the plan does not contain.
//!
//! To add a transport: write its file here and add it to the list above; take the sending end's
//! [`Encoder`](crate::comm::link_codecs::Encoder), the receiving end's [`Decoder`](crate::comm::link_codecs::Decoder) and
//! the [`Counters`](crate::comm::traffic::Counters) as arguments; check the [`AbortFlag`](crate::comm::abort::AbortFlag)
//! in every wait; choose the transport where [`launch`](crate::driver::launch) links threads, or where `driver/wiring.rs` connects
//! processes; and add it to the transports that `tests/failures.rs` and `tests/transparency.rs` run.

pub mod byte_stream;
pub mod faulty;
pub mod loopback;
pub mod memory;
#[cfg(feature = "mpi")]
pub mod mpi;
mod queue;
mod silence;
pub mod tcp;
pub mod tls;

pub use queue::Queue;

use crate::comm::abort::AbortFlag;
use crate::comm::link_codecs::LinkCodecs;
use crate::comm::message::Message;
use crate::comm::notice::Notify;
use crate::comm::timeouts::Timeouts;
use crate::comm::traffic::Counters;
use crate::engine::Meter;
use crate::failure::Fault;
use distgpipe_core::wire::{Header, Limits};
use std::time::Duration;

/// The sending end of a link.
pub trait Outgoing: Send {
    /// Sends a message, or queues it for the link's thread. Blocks only while that queue is full, and fails if the link is
    /// broken or the run has failed. Errors of the link's thread set the run's abort flag instead.
    fn send(&mut self, message: Message) -> Result<(), Fault>;
}

/// How often an idle link between processes carries a heartbeat.
pub const HEARTBEAT: Duration = Duration::from_millis(250);

/// How long a frame in progress may still take after the run has failed.
const FINISH_FRAME: Duration = Duration::from_millis(1500);

/// Wraps the sending end of a link between processes.
pub type Wrap = Box<dyn FnOnce(Box<dyn Outgoing>, LinkControl) -> Box<dyn Outgoing> + Send>;

/// Decides from its header whether a frame is read.
pub type Admit = Box<dyn Fn(&Header) -> Result<(), Fault> + Send>;

/// Takes the messages that arrive.
pub type Deliver = Box<dyn FnMut(Message) -> Result<(), Fault> + Send>;

/// Takes the texts of the peer's heartbeats.
pub type OnHeartbeat = Box<dyn FnMut(&str) + Send>;

/// The limits that both ends of a link between processes hold each other to.
pub fn limits() -> Limits {
    // Reports contain the traces of large plans, and one tensor may be the embedding of a large model.
    Limits { text_bytes_max: 64 << 20, body_bytes_max: 4 << 30, ..Limits::default() }
}

/// One end of a link between processes.
pub struct LinkOptions {
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
    /// Counts what this end sends, and times what arrives.
    pub counters: Counters,
    /// Makes the text of a heartbeat.
    pub heartbeat: Box<dyn Fn() -> String + Send>,
    /// Wraps the sending end of the link, on the encoder's side of the queue.
    pub wrap: Wrap,
    /// Decides from its header whether a frame is read.
    pub admit: Admit,
    /// Takes the messages that arrive.
    pub deliver: Deliver,
    /// Whether the mailboxes have room for what arrives. The sender is held up while they have none.
    pub has_room: Box<dyn Fn() -> bool + Send + Sync>,
    /// Takes the texts of the peer's heartbeats.
    pub on_heartbeat: OnHeartbeat,
    /// Takes notices about the peer.
    pub notify: Notify,
}

/// Acts on what carries a link between processes, for injected faults.
pub struct LinkControl {
    /// Ends the connection, as a failing network does.
    pub cut: Box<dyn Fn() + Send>,
    /// Flips a bit of the next frame, which the argument selects.
    pub damage_next: Box<dyn Fn(u64) + Send>,
}
