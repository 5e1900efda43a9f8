//! When to print a line of progress, and how much time is left.

use distgpipe::engine::boot_time;
use distgpipe::sync::lock;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

/// A line is printed at least this often.
const AT_LEAST_EVERY: Duration = Duration::from_secs(10);
/// A line is printed at most this often.
const AT_MOST_EVERY: Duration = Duration::from_secs(1);
/// A line is printed for every such share of the work.
const SHARES: u64 = 20;

/// How often a thread looks at the time.
const TICK: Duration = Duration::from_millis(100);
/// A gap between two looks that is this long means that the process did not run.
const GAP_MIN: Duration = Duration::from_secs(1);

/// A clock that stands still while this process is stopped or its machine sleeps. A thread of its own looks at the time, because
/// the others may wait for data or compute for as long as they like.
#[derive(Clone, Debug)]
pub struct RunningClock(Arc<Mutex<Ticks>>);

#[derive(Debug)]
struct Ticks {
    last: Duration,
    /// How long this process did not run since the clock was started.
    missed: Duration,
}

impl Ticks {
    fn tick(&mut self, now: Duration) -> Duration {
        let gap = now.saturating_sub(self.last);
        if gap >= GAP_MIN {
            self.missed += gap;
        }
        self.last = now;
        now.saturating_sub(self.missed)
    }
}

impl RunningClock {
    pub fn start() -> Self {
        let ticks = Arc::new(Mutex::new(Ticks { last: boot_time(), missed: Duration::ZERO }));
        let watched: Weak<_> = Arc::downgrade(&ticks);
        let body = move || {
            while let Some(ticks) = watched.upgrade() {
                lock(&ticks).tick(boot_time());
                drop(ticks);
                std::thread::sleep(TICK);
            }
        };
        // Without the thread, every pause between two readings counts as missed, so only estimates suffer.
        let _ = std::thread::Builder::new().name("running clock".to_owned()).spawn(body);
        RunningClock(ticks)
    }

    pub fn now(&mut self) -> Duration {
        // If this process was stopped, it may read the clock before the thread looks at it again.
        lock(&self.0).tick(boot_time())
    }
}

/// The pace of work that has a known number of steps, by a [`RunningClock`].
#[derive(Clone, Debug)]
pub struct Pace {
    total: u64,
    first: (u64, Duration),
    /// Step and time of the last line.
    last: (u64, Duration),
}

impl Pace {
    /// Work of `total` steps, of which `done` are done.
    pub fn new(total: u64, done: u64, now: Duration) -> Self {
        Pace { total, first: (done, now), last: (done, now) }
    }

    /// Whether a line is due now that `step` steps are done: after 10 s, or after 5 % of the steps but not within 1 s. If so, the
    /// next one is counted from here.
    pub fn is_due(&mut self, step: u64, now: Duration) -> bool {
        let (steps, passed) = (step.saturating_sub(self.last.0), now.saturating_sub(self.last.1));
        let due = passed >= AT_LEAST_EVERY || (steps.saturating_mul(SHARES) >= self.total && passed >= AT_MOST_EVERY);
        if due {
            self.last = (step, now);
        }
        due
    }

    /// Whether a line is due between two steps: after 10 s.
    pub fn is_late(&mut self, now: Duration) -> bool {
        self.is_due(self.last.0, now)
    }

    /// Seconds until all steps are done, if the rest is as fast as what was done; `None` before the first step.
    pub fn left_s(&self, step: u64, now: Duration) -> Option<f64> {
        let done = step.checked_sub(self.first.0).filter(|&done| done > 0)?;
        let each = now.saturating_sub(self.first.1).as_secs_f64() / done as f64;
        Some(each * self.total.saturating_sub(step) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The steps at which lines are printed, with a step every `each`.
    fn printed(total: u64, done: u64, each: Duration) -> Vec<u64> {
        let mut now = Duration::ZERO;
        let mut pace = Pace::new(total, done, now);
        let mut due = |step| {
            now += each;
            pace.is_due(step, now)
        };
        (done + 1..=total).filter(|&step| due(step)).collect()
    }

    #[test]
    fn lines_come_every_5_percent_but_not_more_than_one_a_second_nor_less_than_one_in_ten() {
        // 200 steps of 0.2 s: every 10 steps take 2 s.
        assert_eq!(printed(200, 0, Duration::from_millis(200)), (10..=200).step_by(10).collect::<Vec<_>>());
        // 200 steps of 10 ms: every 10 steps take 0.1 s.
        assert_eq!(printed(200, 0, Duration::from_millis(10)), [100, 200]);
        // 10,000 steps of 0.1 s: every 500 steps take 50 s.
        assert_eq!(
            printed(10_000, 9_000, Duration::from_millis(100)),
            (9_100..=10_000).step_by(100).collect::<Vec<_>>()
        );
        // A step of half a minute.
        assert_eq!(printed(3, 0, Duration::from_secs(30)), [1, 2, 3]);
    }

    #[test]
    fn the_clock_stands_still_while_the_process_does_not_run() {
        let seconds = Duration::from_secs_f64;
        let mut ticks = Ticks { last: seconds(100.0), missed: Duration::ZERO };
        assert_eq!(ticks.tick(seconds(100.5)), seconds(100.5));
        // It is stopped for 12 s, and reads the clock before the thread does.
        assert_eq!(ticks.tick(seconds(112.5)), seconds(100.5));
        assert_eq!(ticks.tick(seconds(112.6)), seconds(100.6));
    }

    #[test]
    fn the_time_left_is_that_of_the_steps_that_this_process_did() {
        let start = Duration::from_secs(7);
        let pace = Pace::new(100, 50, start);
        assert_eq!(pace.left_s(50, start), None);
        assert_eq!(pace.left_s(60, start + Duration::from_secs(5)), Some(20.0));
        assert_eq!(pace.left_s(100, start + Duration::from_secs(5)), Some(0.0));
    }
}
