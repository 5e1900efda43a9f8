//! The largest frames that are accepted.
//!
//! A length on the wire is a request for memory from a peer that may be malicious. Every such length is compared with
//! one of these limits before anything is allocated. Both ends have the same [`Limits`]: a sender checks its own frames
//! with [`Header::check`](super::Header::check), so that the error is reported at the end that can fix it.

use super::Kind;

/// The limits on frames, by kind. The defaults suit models of a few gigabytes. All workers of a run must have the same
/// limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of one tensor, both encoded and decoded. So a small body cannot decode to a huge tensor.
    pub body_bytes_max: u64,
    /// The number of tensors in one message between partitions. A [`Kind::State`] message has one.
    pub tensors_per_message_max: u16,
    /// Bytes of the body of `Ready`, `Command`, `Report`, `Abort`, `Ping` and `Goodbye`.
    pub text_bytes_max: u64,
    /// Bytes of the body of a `Job`: model, partitions, plan, codecs, optimizer.
    pub job_bytes_max: u64,
    /// Bytes of the body of `Hello`, `Welcome` and `Refuse`, which come from peers that are not authenticated yet.
    pub handshake_bytes_max: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_bytes_max: 1 << 30,
            tensors_per_message_max: 64,
            text_bytes_max: 1 << 20,
            job_bytes_max: 16 << 20,
            handshake_bytes_max: 4 << 10,
        }
    }
}

impl Limits {
    /// The largest body of a frame of this kind in bytes, and the name of the limit.
    pub fn body_bytes_of(&self, kind: Kind) -> (u64, &'static str) {
        match kind {
            Kind::Hello | Kind::Welcome | Kind::Refuse => (self.handshake_bytes_max, "handshake_bytes_max"),
            Kind::Job => (self.job_bytes_max, "job_bytes_max"),
            Kind::Ready | Kind::Command | Kind::Report | Kind::Abort | Kind::Ping | Kind::Goodbye | Kind::Probe => {
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

    /// The largest number of frames in one message of this kind, and the name of the limit; `None` for the kinds that
    /// are always one frame.
    pub fn slots_of(&self, kind: Kind) -> Option<(u16, &'static str)> {
        let several = kind.carries_tensors() && kind != Kind::State;
        several.then_some((self.tensors_per_message_max, "tensors_per_message_max"))
    }
}
