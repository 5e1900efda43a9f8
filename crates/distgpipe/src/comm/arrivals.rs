//! What the receiving end of a link sees: how fast the link delivers, and what its worker waits for.
//!
//! The sending end cannot measure either. `write` returns once the bytes are in the socket's buffer, long before a slow
//! link has carried them, and a worker that waits for a message does not know whether the message is late because the link
//! is slow or because nobody has sent it yet. The thread that receives knows what it is doing meanwhile:
//!
//! ```text
//!  receiving thread   idle ............ receiving ######### decoding ==== idle ......
//!  worker             computing | waits for the message                  | computing
//!                               └ peer ┘└── link ─────────┘└── codec ───┘
//! ```

use crate::sync::lock;
use serde::{Deserialize, Serialize};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// What the thread that receives over a link is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Receiving {
    /// Waiting for the first byte of the next frame.
    #[default]
    Nothing,
    /// Reading a frame that has begun to arrive.
    Frame,
    /// Verifying or decoding what has arrived. Between threads, encoding too.
    Decoding,
}

/// Bytes that were timed as they arrived while the link had more to deliver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Delivered {
    /// The number of bytes.
    pub bytes: u64,
    /// How long the link took for them, in nanoseconds.
    pub ns: u64,
}

/// A rate from fewer bytes than this says nothing.
const RATE_BYTES_MIN: u64 = 512 << 10;

impl Delivered {
    /// The rate at which the link delivers, in bytes per second. `None` if too little arrived in one go to measure it.
    pub fn bytes_per_s(&self) -> Option<f64> {
        (self.bytes >= RATE_BYTES_MIN && self.ns > 0).then(|| self.bytes as f64 / (self.ns as f64 / 1e9))
    }

    /// What was delivered after an earlier reading.
    pub fn since(&self, earlier: &Delivered) -> Delivered {
        Delivered { bytes: self.bytes.saturating_sub(earlier.bytes), ns: self.ns.saturating_sub(earlier.ns) }
    }
}

/// How long a worker waited for messages of one peer, by what it waited for, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkWait {
    /// The link was delivering a frame.
    pub link_ns: u64,
    /// What had arrived was being decoded. Between threads, or encoded.
    pub codec_ns: u64,
    /// Nothing was arriving: the peer had not sent it yet, or it was on its way.
    pub peer_ns: u64,
}

impl LinkWait {
    /// What was waited after an earlier reading.
    pub fn since(&self, earlier: &LinkWait) -> LinkWait {
        LinkWait {
            link_ns: self.link_ns.saturating_sub(earlier.link_ns),
            codec_ns: self.codec_ns.saturating_sub(earlier.codec_ns),
            peer_ns: self.peer_ns.saturating_sub(earlier.peer_ns),
        }
    }
}

/// The receiving end of one link, written by the thread that receives and by the worker that waits.
#[derive(Debug)]
pub struct Arrivals(Mutex<State>);

#[derive(Debug)]
struct State {
    doing: Receiving,
    since: Instant,
    /// Time in [`Receiving::Frame`] and [`Receiving::Decoding`] before `since`.
    frame: Duration,
    decoding: Duration,
    delivered: Delivered,
    waited: LinkWait,
}

/// The moment at which a worker began to wait.
#[derive(Clone, Copy, Debug)]
pub struct WaitStart {
    at: Instant,
    frame: Duration,
    decoding: Duration,
}

impl Default for Arrivals {
    fn default() -> Self {
        Arrivals(Mutex::new(State {
            doing: Receiving::Nothing,
            since: Instant::now(),
            frame: Duration::ZERO,
            decoding: Duration::ZERO,
            delivered: Delivered::default(),
            waited: LinkWait::default(),
        }))
    }
}

impl State {
    /// The time in [`Receiving::Frame`] and [`Receiving::Decoding`] until `now`.
    fn times(&self, now: Instant) -> (Duration, Duration) {
        let current = now.saturating_duration_since(self.since);
        match self.doing {
            Receiving::Nothing => (self.frame, self.decoding),
            Receiving::Frame => (self.frame + current, self.decoding),
            Receiving::Decoding => (self.frame, self.decoding + current),
        }
    }
}

impl Arrivals {
    /// Records what the receiving thread does from now on.
    pub fn begin(&self, doing: Receiving) {
        let (mut state, now) = (self.lock(), Instant::now());
        (state.frame, state.decoding) = state.times(now);
        (state.doing, state.since) = (doing, now);
    }

    /// Counts bytes that the link took this long to deliver.
    pub fn count(&self, bytes: u64, took: Duration) {
        let mut state = self.lock();
        state.delivered.bytes += bytes;
        state.delivered.ns += nanoseconds(took);
    }

    /// Records that the worker begins to wait for a message of this link.
    pub fn begin_wait(&self) -> WaitStart {
        let (state, at) = (self.lock(), Instant::now());
        let (frame, decoding) = state.times(at);
        WaitStart { at, frame, decoding }
    }

    /// Records that the wait is over, and what the link did meanwhile.
    pub fn end_wait(&self, start: WaitStart) {
        let (mut state, now) = (self.lock(), Instant::now());
        let (frame, decoding) = state.times(now);
        let (link, codec) = (frame.saturating_sub(start.frame), decoding.saturating_sub(start.decoding));
        let peer = now.saturating_duration_since(start.at).saturating_sub(link + codec);
        let waited = &mut state.waited;
        waited.link_ns += nanoseconds(link);
        waited.codec_ns += nanoseconds(codec);
        waited.peer_ns += nanoseconds(peer);
    }

    /// Records the wait of the worker for a message of this link, and what the link did meanwhile.
    pub fn waiting<T, E>(&self, take: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let start = self.begin_wait();
        let message = take()?;
        self.end_wait(start);
        Ok(message)
    }

    /// What was delivered and waited for since the run began.
    pub fn read(&self) -> (Delivered, LinkWait) {
        let state = self.lock();
        (state.delivered, state.waited)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A wait is split by what the receiving thread did during it, not before or after.
    #[test]
    fn a_wait_is_split_by_what_the_link_did() {
        let arrivals = Arrivals::default();
        let pause = Duration::from_millis(20);
        arrivals.begin(Receiving::Frame);
        std::thread::sleep(pause);
        let start = arrivals.begin_wait();
        std::thread::sleep(pause);
        arrivals.begin(Receiving::Decoding);
        std::thread::sleep(pause);
        arrivals.begin(Receiving::Nothing);
        std::thread::sleep(pause);
        arrivals.end_wait(start);
        arrivals.begin(Receiving::Frame);
        let (_, waited) = arrivals.read();
        let least = nanoseconds(pause);
        for part in [waited.link_ns, waited.codec_ns, waited.peer_ns] {
            assert!(part >= least, "{waited:?}");
        }
        let start = arrivals.begin_wait();
        std::thread::sleep(pause);
        arrivals.end_wait(start);
        let more = arrivals.read().1.since(&waited);
        assert!(more.link_ns >= least && (more.codec_ns, more.peer_ns) == (0, 0), "{more:?}");
    }

    #[test]
    fn a_rate_needs_enough_bytes() {
        assert_eq!(Delivered { bytes: RATE_BYTES_MIN - 1, ns: 10 }.bytes_per_s(), None);
        assert_eq!(Delivered { bytes: 1 << 20, ns: 0 }.bytes_per_s(), None);
        assert_eq!(Delivered { bytes: 1_000_000, ns: 200_000_000 }.bytes_per_s(), Some(5e6));
    }
}
