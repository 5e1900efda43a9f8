//! The encoding of the fields of the handshake and the abort notice.
//!
//! These messages are read before a peer is trusted and while a run is failing. So the encoding is minimal: fixed
//! fields, strings with a length in front and a maximum, and nothing after the end. A peer cannot request more memory
//! than the bytes that it sends.

use crate::WorkerId;
use thiserror::Error;

/// Why a message cannot be decoded.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MessageError {
    /// The bytes end inside a field.
    #[error("expected {expected} bytes for `{field}` of {message}, got {got}: the message is truncated, or the peer runs another version of distgpipe")]
    Truncated {
        /// The name of the message.
        message: &'static str,
        /// The name of the field.
        field: &'static str,
        /// The bytes that the field needs.
        expected: usize,
        /// The bytes that are left.
        got: usize,
    },
    /// There are bytes after the last field.
    #[error("expected {message} to end after its last field, got {got} more bytes: the peer runs another version of distgpipe")]
    Trailing {
        /// The name of the message.
        message: &'static str,
        /// The number of extra bytes.
        got: usize,
    },
    /// A string is longer than its maximum.
    #[error("expected at most {expected_max} bytes for `{field}` of {message}, got {got}: the peer runs another version of distgpipe")]
    TooLong {
        /// The name of the message.
        message: &'static str,
        /// The name of the field.
        field: &'static str,
        /// The largest length in bytes.
        expected_max: usize,
        /// The length in the message.
        got: usize,
    },
    /// A string is not UTF-8.
    #[error("expected UTF-8 for `{field}` of {message}, got an invalid byte at {at}: the message is corrupt, or the peer is not distgpipe")]
    Utf8 {
        /// The name of the message.
        message: &'static str,
        /// The name of the field.
        field: &'static str,
        /// The offset of the first invalid byte in the field.
        at: usize,
    },
    /// A number has no meaning.
    #[error("expected `{field}` of {message} to be at most {expected_max}, got {got}: the peer runs another version of distgpipe")]
    Unknown {
        /// The name of the message.
        message: &'static str,
        /// The name of the field.
        field: &'static str,
        /// The largest valid number.
        expected_max: u8,
        /// The number in the message.
        got: u8,
    },
    /// There is a worker number although the message has no worker.
    #[error("expected 0 as the number in `{field}` of {message}, which has no worker, got {got}: the peer runs another version of distgpipe")]
    NotZero {
        /// The name of the message.
        message: &'static str,
        /// The name of the field.
        field: &'static str,
        /// The number in the message.
        got: u32,
    },
}

/// The longest prefix of `text` that has at most `bytes_max` bytes and ends between two characters.
pub(super) fn clip(text: &str, bytes_max: usize) -> &str {
    let mut end = text.len().min(bytes_max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Appends a string, truncated to its maximum, with its length in two bytes in front.
pub(super) fn put_text(out: &mut Vec<u8>, text: &str, bytes_max: usize) {
    let text = clip(text, bytes_max);
    let length = u16::try_from(text.len()).expect("maxima of fields fit 16 bits");
    out.extend_from_slice(&length.to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}

/// Reads the fields of one message in order.
pub(super) struct Fields<'a> {
    message: &'static str,
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    pub(super) fn new(message: &'static str, bytes: &'a [u8]) -> Self {
        Self { message, rest: bytes }
    }

    pub(super) fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], MessageError> {
        let Some((head, rest)) = self.rest.split_first_chunk() else {
            return Err(self.truncated(field, N));
        };
        self.rest = rest;
        Ok(*head)
    }

    pub(super) fn text(&mut self, field: &'static str, bytes_max: usize) -> Result<String, MessageError> {
        let length = usize::from(u16::from_le_bytes(self.array(field)?));
        if length > bytes_max {
            return Err(MessageError::TooLong { message: self.message, field, expected_max: bytes_max, got: length });
        }
        let Some((head, rest)) = self.rest.split_at_checked(length) else {
            return Err(self.truncated(field, length));
        };
        self.rest = rest;
        let text = std::str::from_utf8(head).map_err(|error| MessageError::Utf8 {
            message: self.message,
            field,
            at: error.valid_up_to(),
        })?;
        Ok(text.to_owned())
    }

    /// Reads an optional worker: a byte that is 1 if there is one, and its number, which is 0 if not.
    pub(super) fn optional_worker(&mut self, field: &'static str) -> Result<Option<WorkerId>, MessageError> {
        let [present] = self.array(field)?;
        let number = u32::from_le_bytes(self.array(field)?);
        match (present, number) {
            (0, 0) => Ok(None),
            (1, number) => Ok(Some(WorkerId(number))),
            (0, _) => Err(MessageError::NotZero { message: self.message, field, got: number }),
            (got, _) => Err(MessageError::Unknown { message: self.message, field, expected_max: 1, got }),
        }
    }

    pub(super) fn end(self) -> Result<(), MessageError> {
        if self.rest.is_empty() {
            return Ok(());
        }
        Err(MessageError::Trailing { message: self.message, got: self.rest.len() })
    }

    fn truncated(&self, field: &'static str, expected: usize) -> MessageError {
        MessageError::Truncated { message: self.message, field, expected, got: self.rest.len() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_clipped_between_characters() {
        assert_eq!(clip("grün", 10), "grün");
        assert_eq!(clip("grün", 4), "grü");
        assert_eq!(clip("grün", 3), "gr");
        assert_eq!(clip("🦀", 3), "");
        assert_eq!(clip("", 0), "");
    }
}
