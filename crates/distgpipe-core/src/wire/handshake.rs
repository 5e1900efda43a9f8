//! The handshake: who connects, for which run, with which token.
//!
//! The dialling peer sends [`Hello`]; the answering peer checks it and sends [`Welcome`] or [`Refuse`]. The version in
//! the frame's header is checked before that, so a peer of another release gets a version error rather than a parse
//! error.
//!
//! A peer that connects again, because its connection broke, says so in its [`Hello`]: `epoch` is above 0, and `next` is the
//! first frame that it has not received. The [`Welcome`] says the same of the answering end, and both resume there.
//!
//! The token is sent in the clear. It keeps out strangers and stray processes of other runs, but gives no protection
//! against a peer that can listen on the network.

use super::message::{put_text, Fields, MessageError};
use crate::WorkerId;
use std::fmt;
use thiserror::Error;

/// The largest length of `build` in bytes.
pub const BUILD_BYTES_MAX: usize = 64;

/// The largest length of the reason in a [`Refuse`], in bytes.
pub const REASON_BYTES_MAX: usize = 512;

/// The role of a dialling peer in the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// The process that sends jobs and commands.
    Driver,
    /// A worker that opens a link to another worker.
    Worker(WorkerId),
    /// A process that measures the link, and sends no job.
    Probe,
}

/// The first message of a dialling peer.
#[derive(Clone, PartialEq, Eq)]
pub struct Hello {
    /// The id of the run that the peer belongs to.
    pub run: [u8; 16],
    /// The shared secret. It is never printed.
    pub token: [u8; 32],
    /// The role of the peer.
    pub role: Role,
    /// The number of this attempt to connect: 0 for the first connection of a link, and one more for each attempt after it.
    /// A higher epoch replaces the connection of a lower one.
    pub epoch: u64,
    /// The sequence number of the first frame that the peer has not received.
    pub next: u64,
    /// The peer's software version, for messages; truncated to [`BUILD_BYTES_MAX`] bytes when sent.
    pub build: String,
}

/// Why a [`Hello`] is rejected.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The token is wrong.
    #[error("the two ends have different tokens: start both with the same one")]
    Token,
    /// The token is right, but the peer belongs to another run.
    #[error("expected a peer of run {expected}, got one of run {got}: a process of an earlier run is still alive, or the address belongs to another run; stop that process, or use another port", expected = Hex(.expected), got = Hex(.got))]
    Run {
        /// The run of this end.
        expected: [u8; 16],
        /// The run of the peer.
        got: [u8; 16],
    },
}

impl Hello {
    /// The largest length of an encoded `Hello` in bytes.
    pub const BYTES_MAX: usize = 16 + 32 + 1 + 4 + 8 + 8 + 2 + BUILD_BYTES_MAX;

    /// Encodes the message as the body of a frame.
    pub fn encode(&self) -> Vec<u8> {
        let (role, worker) = match self.role {
            Role::Driver => (0, 0),
            Role::Worker(worker) => (1, worker.0),
            Role::Probe => (2, 0),
        };
        let mut out = Vec::with_capacity(Self::BYTES_MAX);
        out.extend_from_slice(&self.run);
        out.extend_from_slice(&self.token);
        out.push(role);
        out.extend_from_slice(&u32::to_le_bytes(worker));
        out.extend_from_slice(&self.epoch.to_le_bytes());
        out.extend_from_slice(&self.next.to_le_bytes());
        put_text(&mut out, &self.build, BUILD_BYTES_MAX);
        out
    }

    /// Decodes the message in the body of a frame.
    pub fn decode(body: &[u8]) -> Result<Self, MessageError> {
        let mut fields = Fields::new("Hello", body);
        let run = fields.array("run")?;
        let token = fields.array("token")?;
        let [role] = fields.array("role")?;
        let number = u32::from_le_bytes(fields.array("role")?);
        let role = match (role, number) {
            (0, 0) => Role::Driver,
            (1, number) => Role::Worker(WorkerId(number)),
            (2, 0) => Role::Probe,
            (0 | 2, got) => return Err(MessageError::NotZero { message: "Hello", field: "role", got }),
            (got, _) => return Err(MessageError::Unknown { message: "Hello", field: "role", expected_max: 2, got }),
        };
        let epoch = u64::from_le_bytes(fields.array("epoch")?);
        let next = u64::from_le_bytes(fields.array("next")?);
        let build = fields.text("build", BUILD_BYTES_MAX)?;
        fields.end()?;
        Ok(Self { run, token, role, epoch, next, build })
    }

    /// Checks whether to accept this peer. The token is compared first and in constant time, so a stranger learns
    /// neither how much of it was right nor which run this is.
    pub fn check(&self, run: &[u8; 16], token: &[u8; 32]) -> Result<(), HandshakeError> {
        if !same_secret(&self.token, token) {
            return Err(HandshakeError::Token);
        }
        if self.run != *run {
            return Err(HandshakeError::Run { expected: *run, got: self.run });
        }
        Ok(())
    }
}

impl fmt::Debug for Hello {
    /// Omits the token, because more people read logs than may join the run.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hello")
            .field("run", &format_args!("{}", Hex(&self.run)))
            .field("token", &format_args!("(secret)"))
            .field("role", &self.role)
            .field("epoch", &self.epoch)
            .field("next", &self.next)
            .field("build", &self.build)
            .finish()
    }
}

/// The answer that accepts a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// The number of the answering worker; `None` if it is the driver, or a worker that has no job yet.
    pub worker: Option<WorkerId>,
    /// The sequence number of the first frame that the answering end has not received.
    pub next: u64,
    /// The software version of the answering peer, as in [`Hello`].
    pub build: String,
}

impl Welcome {
    /// The largest length of an encoded `Welcome` in bytes.
    pub const BYTES_MAX: usize = 1 + 4 + 8 + 2 + BUILD_BYTES_MAX;

    /// Encodes the message as the body of a frame.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(Self::BYTES_MAX);
        out.push(u8::from(self.worker.is_some()));
        out.extend_from_slice(&self.worker.map_or(0, |worker| worker.0).to_le_bytes());
        out.extend_from_slice(&self.next.to_le_bytes());
        put_text(&mut out, &self.build, BUILD_BYTES_MAX);
        out
    }

    /// Decodes the message in the body of a frame.
    pub fn decode(body: &[u8]) -> Result<Self, MessageError> {
        let mut fields = Fields::new("Welcome", body);
        let worker = fields.optional_worker("worker")?;
        let next = u64::from_le_bytes(fields.array("next")?);
        let build = fields.text("build", BUILD_BYTES_MAX)?;
        fields.end()?;
        Ok(Self { worker, next, build })
    }
}

/// The answer that rejects a peer. The connection is closed after it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refuse {
    /// The reason, and what to do about it; truncated to [`REASON_BYTES_MAX`] bytes when sent.
    pub reason: String,
}

impl Refuse {
    /// The largest length of an encoded `Refuse` in bytes.
    pub const BYTES_MAX: usize = 2 + REASON_BYTES_MAX;

    /// Encodes the message as the body of a frame.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(Self::BYTES_MAX);
        put_text(&mut out, &self.reason, REASON_BYTES_MAX);
        out
    }

    /// Decodes the message in the body of a frame.
    pub fn decode(body: &[u8]) -> Result<Self, MessageError> {
        let mut fields = Fields::new("Refuse", body);
        let reason = fields.text("reason", REASON_BYTES_MAX)?;
        fields.end()?;
        Ok(Self { reason })
    }
}

/// Compares in constant time.
fn same_secret(a: &[u8; 32], b: &[u8; 32]) -> bool {
    let difference = a.iter().zip(b).fold(0, |acc, (a, b)| {
        // Without the barrier the compiler might see that the rest cannot change the result, and return early.
        std::hint::black_box(acc | (a ^ b))
    });
    difference == 0
}

struct Hex<'a>(&'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Hello {
        let (epoch, next) = (0, 1);
        let role = Role::Worker(WorkerId(3));
        Hello { run: [0xab; 16], token: [0x5e; 32], role, epoch, next, build: "distgpipe 0.1.0".into() }
    }

    #[test]
    fn the_right_token_and_run_are_let_in() {
        assert_eq!(hello().check(&[0xab; 16], &[0x5e; 32]), Ok(()));
    }

    #[test]
    fn a_token_wrong_in_any_bit_is_refused() {
        for bit in 0..256 {
            let mut token = [0x5e; 32];
            token[bit / 8] ^= 1 << (bit % 8);
            let refused = hello().check(&[0xab; 16], &token);
            assert_eq!(refused, Err(HandshakeError::Token), "bit {bit}");
        }
    }

    #[test]
    fn a_stranger_does_not_learn_the_run() {
        let refused = hello().check(&[1; 16], &[2; 32]);
        assert_eq!(refused, Err(HandshakeError::Token));
    }

    #[test]
    fn another_run_is_named() {
        let error = hello().check(&[1; 16], &[0x5e; 32]).unwrap_err().to_string();
        assert!(error.contains(&"01".repeat(16)), "{error}");
        assert!(error.contains(&"ab".repeat(16)), "{error}");
    }

    #[test]
    fn the_token_is_not_printed() {
        let text = format!("{:?} {:#?}", hello(), hello());
        assert!(text.contains("(secret)"), "{text}");
        assert!(!text.contains("5e") && !text.contains("94"), "{text}");
    }
}
