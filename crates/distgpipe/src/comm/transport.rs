//! How a message gets from one worker to another. Members of the family:
//!
//! - [`memory`]: to a thread of this process; the tensors move, nothing is copied
//! - [`loopback`]: to a thread of this process, encoded and decoded by the link's codec as over a network
//! - [`tcp`]: to another process, on this host or another
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
mod queue;
pub mod tcp;
pub mod tls;

use crate::comm::message::Message;
use crate::failure::Fault;

/// The sending end of a link.
pub trait Outgoing: Send {
    /// Sends a message, or queues it for the link's thread. Blocks only while that queue is full, and fails if the link is
    /// broken or the run has failed. Errors of the link's thread set the run's abort flag instead.
    fn send(&mut self, message: Message) -> Result<(), Fault>;
}
