//! Measures how fast a link delivers, from the moments at which bytes arrive.
//!
//! A read that returns fewer bytes than there is room for has emptied the socket's buffer. Within a frame the sender has
//! more to send, so whatever completes the frame after such a read arrives at the speed of the link, whatever the buffers
//! at both ends hold and however long the receiver was busy before:
//!
//! ```text
//!  bytes read   [ from the buffer: untimed ][ as they arrive: timed ............ ]
//!                                           ↑ buffer empty                       ↑ end of the frame
//! ```
//!
//! The first bytes after a pause are left out. They may pass a traffic shaper's bucket faster than its rate, or wait for
//! TCP's window to open. A link that only carries less than that at a time is not measured.

use crate::comm::arrivals::Delivered;
use std::time::{Duration, Instant};

/// A wait for a frame that is longer than this is a pause.
const PAUSE: Duration = Duration::from_millis(5);

/// The bytes after a pause that are not timed.
const UNTIMED_BYTES: u64 = 256 << 10;

/// A piece of a frame that is smaller than this is not timed: the clock of a single read decides its rate.
const PIECE_BYTES_MIN: u64 = 16 << 10;

/// The meter of one direction of a connection.
#[derive(Default)]
pub(super) struct RateMeter {
    /// When the reader began to wait for the frame that has not begun yet.
    waiting: Option<Instant>,
    /// Bytes since the last pause.
    bytes: u64,
    /// When the buffer was empty inside this frame, and what has arrived since.
    piece: Option<(Instant, u64)>,
    last: Option<Instant>,
}

impl RateMeter {
    /// The reader waits for the next frame from now on.
    pub fn wait(&mut self, now: Instant) {
        (self.waiting, self.piece) = (Some(now), None);
    }

    /// A read into `room` bytes has returned `bytes` of them.
    pub fn read(&mut self, now: Instant, bytes: usize, room: usize) {
        if self.waiting.take().is_some_and(|since| now.saturating_duration_since(since) > PAUSE) {
            self.bytes = 0;
        }
        self.bytes += bytes as u64;
        self.last = Some(now);
        match &mut self.piece {
            Some((_, timed)) => *timed += bytes as u64,
            None if bytes < room && self.bytes >= UNTIMED_BYTES => self.piece = Some((now, 0)),
            None => {}
        }
    }

    /// The frame has been read. Returns the piece of it that was timed.
    pub fn end_frame(&mut self) -> Option<Delivered> {
        let ((since, bytes), last) = self.piece.take().zip(self.last)?;
        let ns = u64::try_from(last.saturating_duration_since(since).as_nanos()).unwrap_or(u64::MAX);
        (bytes >= PIECE_BYTES_MIN).then_some(Delivered { bytes, ns })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A frame that begins to arrive after a pause, in pieces of 16 KiB.
    #[derive(Clone, Copy)]
    struct Arriving {
        pause: Duration,
        bytes: usize,
        /// How much of it is in the buffer when the reader looks.
        buffered: usize,
        bytes_per_s: f64,
    }

    fn play(meter: &mut RateMeter, now: &mut Instant, frame: Arriving) -> Option<Delivered> {
        meter.wait(*now);
        *now += frame.pause;
        let mut left = frame.bytes;
        if frame.buffered > 0 {
            meter.read(*now, frame.buffered, left);
            left -= frame.buffered;
        }
        while left > 0 {
            let next = left.min(16 << 10);
            *now += Duration::from_secs_f64(next as f64 / frame.bytes_per_s);
            meter.read(*now, next, left);
            left -= next;
        }
        meter.end_frame()
    }

    #[test]
    fn what_waited_in_the_buffer_is_not_timed() {
        let (mut meter, mut now) = (RateMeter::default(), Instant::now());
        let frame = Arriving { pause: Duration::from_secs(1), bytes: 4 << 20, buffered: 0, bytes_per_s: 5e6 };
        for buffered in [0, 300 << 10, 2 << 20] {
            let timed = play(&mut meter, &mut now, Arriving { buffered, ..frame }).unwrap();
            let rate = timed.bytes_per_s().unwrap();
            assert!((rate / 5e6 - 1.0).abs() < 0.01, "{buffered} in the buffer: {rate}");
        }
        let all = Arriving { buffered: frame.bytes, ..frame };
        assert_eq!(play(&mut meter, &mut now, all), None, "all of it was in the buffer");
    }

    /// A shaper lets the first 128 KiB after a pause pass at the speed of memory.
    #[test]
    fn small_frames_after_a_pause_are_not_timed_and_many_without_one_are() {
        let (mut meter, mut now) = (RateMeter::default(), Instant::now());
        let frame = Arriving { pause: Duration::from_millis(200), bytes: 200 << 10, buffered: 0, bytes_per_s: 1e9 };
        for _ in 0..100 {
            assert_eq!(play(&mut meter, &mut now, frame), None);
        }
        let mut all = Delivered::default();
        for _ in 0..20 {
            let without_pause = Arriving { pause: Duration::ZERO, bytes_per_s: 5e6, ..frame };
            if let Some(timed) = play(&mut meter, &mut now, without_pause) {
                all = Delivered { bytes: all.bytes + timed.bytes, ns: all.ns + timed.ns };
            }
        }
        let rate = all.bytes_per_s().unwrap();
        assert!((rate / 5e6 - 1.0).abs() < 0.01, "{rate}");
    }
}
