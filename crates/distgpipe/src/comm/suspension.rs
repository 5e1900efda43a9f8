//! Finds out that this process did not run for a while: it was stopped (SIGSTOP, Ctrl-Z), its machine slept, or it got no
//! processor time.
//!
//! Without this, a process that wakes up would take the time it missed for silence of its peers and blame them. Threads that
//! wait wake up at least every [`POLL`](crate::comm::abort::POLL); a much longer gap between two of these moments means that
//! the thread could not run. The clock counts the time in which the machine sleeps.

use crate::comm::abort::POLL;
use crate::engine;
use crate::sync::lock;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// A gap this much longer than [`POLL`] is a suspension.
const GAP_MIN: Duration = Duration::from_millis(700);

/// The last time that this process did not run.
#[derive(Clone, Copy, Debug)]
pub struct Suspension {
    /// How long it did not run.
    pub duration: Duration,
    /// When it ran again.
    pub ended: Instant,
}

/// The suspensions that the threads of a process have noticed.
#[derive(Debug)]
pub struct Suspensions(Mutex<Noticed>);

#[derive(Debug)]
struct Noticed {
    last: Option<Suspension>,
    /// Whether `last` has not been reported yet.
    news: bool,
}

/// Those of this process.
static OWN: Suspensions = Suspensions::new();

/// The last suspension of this process.
pub fn last() -> Option<Suspension> {
    OWN.lock().last
}

/// The last suspension of this process, if no earlier call has returned it.
pub fn news() -> Option<Suspension> {
    OWN.news()
}

impl Suspensions {
    const fn new() -> Self {
        Suspensions(Mutex::new(Noticed { last: None, news: false }))
    }

    fn lock(&self) -> MutexGuard<'_, Noticed> {
        lock(&self.0)
    }

    fn news(&self) -> Option<Suspension> {
        let mut noticed = self.lock();
        std::mem::take(&mut noticed.news).then_some(noticed.last).flatten()
    }

    /// Records a suspension that ends now. Several threads notice each; the first one counts.
    fn record(&self, duration: Duration) {
        let mut noticed = self.lock();
        if noticed.last.is_none_or(|last| last.ended.elapsed() >= GAP_MIN) {
            *noticed = Noticed { last: Some(Suspension { duration, ended: Instant::now() }), news: true };
        }
    }
}

/// Measures how long an operation has made no progress. Time in which this process did not run does not count.
///
/// The operation must return at least every [`POLL`], whether it made progress or not, and call
/// [`progress`](Self::progress) or [`elapsed`](Self::elapsed) then.
#[derive(Debug)]
pub struct IdleTimer {
    since: Instant,
    /// The last call, by the clock that runs while the machine sleeps.
    last: Duration,
    suspensions: &'static Suspensions,
}

impl Default for IdleTimer {
    fn default() -> Self {
        IdleTimer::new()
    }
}

impl IdleTimer {
    /// Starts at 0.
    pub fn new() -> Self {
        IdleTimer { since: Instant::now(), last: engine::boot_time(), suspensions: &OWN }
    }

    /// Starts at 0 again, after a time in which the operation was not tried.
    pub fn restart(&mut self) {
        (self.since, self.last) = (Instant::now(), engine::boot_time());
    }

    /// The operation has made progress.
    pub fn progress(&mut self) {
        self.tick();
        self.since = Instant::now();
    }

    /// The operation has made no progress. Returns how long that has been so.
    pub fn elapsed(&mut self) -> Duration {
        if self.tick() {
            self.since = Instant::now();
        }
        self.since.elapsed()
    }

    /// Returns whether this process did not run since the last call.
    fn tick(&mut self) -> bool {
        let now = engine::boot_time();
        let gap = now.saturating_sub(self.last);
        self.last = now;
        let suspended = gap > POLL + GAP_MIN;
        if suspended {
            self.suspensions.record(gap);
        }
        suspended
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Other tests of this process must not take its news.
    static OF_TEST: Suspensions = Suspensions::new();

    /// A pause of a thread that certainly counts as a suspension.
    pub const NOTICED: Duration = Duration::from_millis(900);

    fn timer() -> IdleTimer {
        IdleTimer { suspensions: &OF_TEST, ..IdleTimer::new() }
    }

    #[test]
    fn a_gap_between_two_calls_is_a_suspension_and_does_not_count() {
        let mut timer_a = timer();
        timer_a.since -= 3 * POLL;
        assert!(timer_a.elapsed() >= 3 * POLL, "a wait counts");
        assert!(OF_TEST.news().is_none());
        // As if this thread had been stopped a minute ago.
        timer_a.last = timer_a.last.saturating_sub(Duration::from_secs(60));
        timer_a.since -= Duration::from_secs(30);
        assert!(timer_a.elapsed() < Duration::from_secs(20), "a fresh limit");
        let mut timer_b = timer();
        timer_b.last = timer_b.last.saturating_sub(Duration::from_secs(59));
        timer_b.progress();
        let first = OF_TEST.news().expect("news");
        assert!(first.duration >= Duration::from_secs(60), "the thread that noticed it first counts: {first:?}");
        assert!(OF_TEST.news().is_none(), "it is reported once");
        assert_eq!(OF_TEST.lock().last.map(|last| last.duration), Some(first.duration));
    }
}
