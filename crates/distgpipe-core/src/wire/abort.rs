//! The notice that a worker failed.
//!
//! When a worker fails, all others are told and stop. The notice must get through when little else works, so encoding
//! it cannot fail: texts that are too long are truncated between two characters.

use super::message::{put_text, Fields, MessageError};

/// The body of an [`Abort`](super::Kind::Abort) frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AbortNotice {
    /// The worker that failed first; at most [`AbortNotice::NAME_BYTES_MAX`] bytes.
    pub worker: String,
    /// What it was doing; at most [`AbortNotice::NAME_BYTES_MAX`] bytes.
    pub phase: String,
    /// The error message; at most [`AbortNotice::MESSAGE_BYTES_MAX`] bytes.
    pub message: String,
}

impl AbortNotice {
    /// The largest length of `worker` and of `phase` in bytes.
    pub const NAME_BYTES_MAX: usize = 128;

    /// The largest length of `message` in bytes.
    pub const MESSAGE_BYTES_MAX: usize = 8 << 10;

    /// The largest length of an encoded notice in bytes.
    pub const BYTES_MAX: usize = 3 * 2 + 2 * Self::NAME_BYTES_MAX + Self::MESSAGE_BYTES_MAX;

    /// Encodes the notice as the body of a frame. Fields beyond their maximum are truncated between two characters.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        put_text(&mut out, &self.worker, Self::NAME_BYTES_MAX);
        put_text(&mut out, &self.phase, Self::NAME_BYTES_MAX);
        put_text(&mut out, &self.message, Self::MESSAGE_BYTES_MAX);
        out
    }

    /// Decodes the notice in the body of a frame.
    pub fn decode(body: &[u8]) -> Result<Self, MessageError> {
        let mut fields = Fields::new("AbortNotice", body);
        let worker = fields.text("worker", Self::NAME_BYTES_MAX)?;
        let phase = fields.text("phase", Self::NAME_BYTES_MAX)?;
        let message = fields.text("message", Self::MESSAGE_BYTES_MAX)?;
        fields.end()?;
        Ok(Self { worker, phase, message })
    }
}
