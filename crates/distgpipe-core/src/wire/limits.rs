//! How much a peer may make us hold.
//!
//! A length on the wire is a request for memory by somebody who may lie (law 4). Every such request is compared
//! with one of these numbers before anything is allocated. Both ends use the same [`Limits`]: a sender that checks
//! its own frames with [`Header::check`](super::Header::check) gets the error where the remedy is.

use super::Kind;

/// The largest that may come, for each sort of thing that comes. `Limits::default()` suits models of a few
/// gigabytes; raise a field on every worker of the run alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The body of one tensor, both as sent and as decoded: a codec that shrinks is no way around it.
    pub body_bytes_max: u64,
    /// The tensors of one message between partitions.
    pub tensors_per_message_max: u16,
    /// The tensors of one [`Kind::State`] message: parameters and optimizer state of a partition.
    pub state_tensors_max: u16,
    /// The body of `Ready`, `Command`, `Report`, `Abort`, `Ping` and `Goodbye`.
    pub text_bytes_max: u64,
    /// The body of a `Job`: model, partitions, plan, codecs, optimizer.
    pub job_bytes_max: u64,
    /// The body of `Hello`, `Welcome` and `Refuse`, which come from a peer that has not shown its token yet.
    pub handshake_bytes_max: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_bytes_max: 1 << 30,
            tensors_per_message_max: 64,
            state_tensors_max: 16_384,
            text_bytes_max: 1 << 20,
            job_bytes_max: 16 << 20,
            handshake_bytes_max: 4 << 10,
        }
    }
}

impl Limits {
    /// The most bytes the body of a frame of this kind may have, and the name of the field that says so.
    pub fn body_bytes_of(&self, kind: Kind) -> (u64, &'static str) {
        match kind {
            Kind::Hello | Kind::Welcome | Kind::Refuse => (self.handshake_bytes_max, "handshake_bytes_max"),
            Kind::Job => (self.job_bytes_max, "job_bytes_max"),
            Kind::Ready | Kind::Command | Kind::Report | Kind::Abort | Kind::Ping | Kind::Goodbye => {
                (self.text_bytes_max, "text_bytes_max")
            }
            Kind::Input
            | Kind::Target
            | Kind::Activation
            | Kind::Gradient
            | Kind::Output
            | Kind::State
            | Kind::Share => (self.body_bytes_max, "body_bytes_max"),
        }
    }

    /// The most frames one message of this kind may have, and the name of the field that says so; `None` for the
    /// kinds that are always one frame.
    pub fn slots_of(&self, kind: Kind) -> Option<(u16, &'static str)> {
        if kind == Kind::State {
            Some((self.state_tensors_max, "state_tensors_max"))
        } else if kind.carries_tensors() {
            Some((self.tensors_per_message_max, "tensors_per_message_max"))
        } else {
            None
        }
    }
}
