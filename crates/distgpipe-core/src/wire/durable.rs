//! Links outlive their connections: which frames are sent again after a broken one, and which have arrived before.
//!
//! Each direction of a link numbers its frames from 1. The sender keeps every frame until the receiver has acknowledged it.
//! When both ends are connected again, each says which frame it expects next, and the other resumes there:
//!
//! ```text
//! sender      1 2 3 4 5 6 ✂            4 5 6 7 …
//! receiver    1 2 3 ✂  expects 4 ──►   4 5 6 7 …
//! ```
//!
//! Frames arrive in order on a connection, so a receiver expects one number at a time. A lower number is a duplicate, which
//! it discards without decoding, because codecs remember what they have decoded. A higher one is an error: the frames
//! between would be lost.
//!
//! These are the numbers alone. The runtime keeps the bytes of the frames, in the order of [`SendWindow`].

use std::collections::VecDeque;
use thiserror::Error;

/// Why a sequence number of the peer is wrong. The link cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SequenceError {
    /// Frames are missing before this one.
    #[error("expected frame {expected} of the link, got frame {got}: frames are missing, the peer is faulty")]
    Gap {
        /// The number of the next frame.
        expected: u64,
        /// The number that arrived.
        got: u64,
    },
    /// The peer acknowledges a frame that was never sent to it.
    #[error("expected an acknowledgement of at most frame {expected_max}, got one of frame {got}: the peer is faulty")]
    Acknowledged {
        /// The last frame that was sent.
        expected_max: u64,
        /// The number that was acknowledged.
        got: u64,
    },
    /// The peer wants to resume at a frame that is not kept any more, or that does not exist yet.
    #[error("expected the peer to resume at a frame from {expected_min} to {expected_max}, got {got}: it is not the peer of this link, or it has lost its state")]
    Resume {
        /// The first frame that is kept.
        expected_min: u64,
        /// The frame after the last one that was sent.
        expected_max: u64,
        /// The frame at which the peer wants to resume.
        got: u64,
    },
}

/// The sending end of one direction: which frames are kept, and which one is sent next.
#[derive(Clone, Debug)]
pub struct SendWindow {
    /// The sizes of the frames that are kept, of which the first has the number `first`.
    sizes: VecDeque<u64>,
    first: u64,
    /// The next frame to send, from `first` to one after the last that is kept.
    next: u64,
    /// The last frame that was sent, over all connections.
    sent: u64,
    bytes: u64,
    bytes_max: u64,
}

impl SendWindow {
    /// Keeps frames of up to `bytes_max` bytes, and always at least one.
    pub fn new(bytes_max: u64) -> Self {
        SendWindow { sizes: VecDeque::new(), first: 1, next: 1, sent: 0, bytes: 0, bytes_max }
    }

    /// Whether another frame may be added. The last frame that is may exceed the limit.
    pub fn has_room(&self) -> bool {
        self.bytes < self.bytes_max
    }

    /// The number of the frame that [`push`](Self::push) adds next.
    pub fn next_new(&self) -> u64 {
        self.first + self.sizes.len() as u64
    }

    /// Adds a frame of this size after the others.
    pub fn push(&mut self, bytes: u64) {
        self.sizes.push_back(bytes);
        self.bytes = self.bytes.saturating_add(bytes);
    }

    /// The position among the frames that are kept of the one to send next; `None` if all have been sent.
    pub fn next_to_send(&self) -> Option<usize> {
        (self.next < self.next_new()).then(|| (self.next - self.first) as usize)
    }

    /// Records that the frame to send next has been sent. Returns whether that was the first time.
    pub fn mark_sent(&mut self) -> bool {
        let first_time = self.next > self.sent;
        self.sent = self.sent.max(self.next);
        self.next = (self.next + 1).min(self.next_new());
        first_time
    }

    /// The peer has received everything up to this number. Returns how many frames at the front are kept no longer. An older
    /// acknowledgement than the last one changes nothing.
    pub fn acknowledge(&mut self, number: u64) -> Result<usize, SequenceError> {
        if number > self.sent {
            return Err(SequenceError::Acknowledged { expected_max: self.sent, got: number });
        }
        let dropped = (number + 1).saturating_sub(self.first) as usize;
        for size in self.sizes.drain(..dropped) {
            self.bytes = self.bytes.saturating_sub(size);
        }
        self.first += dropped as u64;
        self.next = self.next.max(self.first);
        Ok(dropped)
    }

    /// The peer is connected again and expects this frame next. Returns how many frames at the front are kept no longer.
    pub fn resume(&mut self, next: u64) -> Result<usize, SequenceError> {
        if next < self.first || next > self.sent + 1 {
            return Err(SequenceError::Resume { expected_min: self.first, expected_max: self.sent + 1, got: next });
        }
        let dropped = self.acknowledge(next - 1)?;
        self.next = next;
        Ok(dropped)
    }

    /// Whether the peer has acknowledged everything that was added.
    pub fn is_empty(&self) -> bool {
        self.sizes.is_empty()
    }

    /// The bytes of the frames that are kept.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// What to do with a frame that has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// It is the next one: decode it.
    New,
    /// It has arrived before: discard it.
    Duplicate,
}

/// The receiving end of one direction.
#[derive(Clone, Debug, Default)]
pub struct ReceiveWindow {
    last: u64,
}

impl ReceiveWindow {
    /// Decides about the frame with this number, from its header alone. The frame counts as received once
    /// [`complete`](Self::complete) is called.
    pub fn check(&self, number: u64) -> Result<Received, SequenceError> {
        match number.checked_sub(self.last) {
            Some(1) => Ok(Received::New),
            Some(0) | None => Ok(Received::Duplicate),
            Some(_) => Err(SequenceError::Gap { expected: self.next(), got: number }),
        }
    }

    /// The frame that was [new](Received::New) has arrived whole.
    pub fn complete(&mut self) {
        self.last += 1;
    }

    /// The number of the last frame that has arrived; 0 before the first.
    pub fn last(&self) -> u64 {
        self.last
    }

    /// The number of the frame that is expected next.
    pub fn next(&self) -> u64 {
        self.last + 1
    }
}
