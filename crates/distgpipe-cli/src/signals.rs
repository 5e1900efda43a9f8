//! Ctrl-C (SIGINT) and SIGTERM. The first one ends a training run as its last step would: the step in progress is finished, the
//! checkpoint and the log are written, and the report is printed. One that comes after the last step lets the run write its results.
//! A second one ends the process at once.

use crate::report::note;
use anyhow::Context;
use distgpipe::engine::{exit_at_once, spawn};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::iterator::Signals;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

/// After how long the user is told why the run has not ended yet.
const PATIENCE: Duration = Duration::from_secs(2);

/// What this process does about signals.
#[derive(Default)]
struct State {
    phase: Mutex<Phase>,
    /// The signal that asked the run to stop, or 0.
    received: AtomicI32,
}

impl State {
    fn phase(&self) -> MutexGuard<'_, Phase> {
        self.phase.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// How far the run is.
enum Phase {
    /// No step has been made. What was created so far is useless without one, and this removes it.
    Starting(Vec<Box<dyn FnOnce() + Send>>),
    /// Steps and tests are made.
    Training,
    /// The last step and test are done, and the results are written.
    Finishing,
}

impl Default for Phase {
    fn default() -> Self {
        Phase::Starting(Vec::new())
    }
}

static STATE: OnceLock<Arc<State>> = OnceLock::new();

/// Takes over the signals of this process. Until [`begin`], the first of them ends the process: there is nothing to finish yet.
pub fn watch() -> anyhow::Result<()> {
    let state = Arc::new(State::default());
    if STATE.set(state.clone()).is_err() {
        return Ok(());
    }
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("taking over SIGINT and SIGTERM")?;
    spawn("signals", move || {
        for signal in signals.forever() {
            let again = state.received.swap(signal, Ordering::SeqCst) != 0;
            if let Phase::Starting(leftovers) = &mut *state.phase() {
                leftovers.drain(..).for_each(|remove| remove());
                note(&format!("{}: ended at once, before the first step", name(signal)));
                exit_at_once(status(signal));
            }
            if again {
                note(&format!("{}: ended at once", name(signal)));
                exit_at_once(status(signal));
            }
            let state = state.clone();
            // Without this thread, the line is missing, and the run ends as it does with it.
            let _ = spawn("signals", move || {
                std::thread::sleep(PATIENCE);
                let doing = match *state.phase() {
                    Phase::Finishing => "writing the results",
                    _ => "finishing the step",
                };
                note(&format!("{}: {doing}; a second one ends the run at once", name(signal)));
            });
        }
    })?;
    Ok(())
}

/// Removes something if a signal ends the process before the first step.
pub fn if_never_begun(remove: impl FnOnce() + Send + 'static) {
    if let Some(state) = STATE.get() {
        if let Phase::Starting(leftovers) = &mut *state.phase() {
            leftovers.push(Box::new(remove));
        }
    }
}

/// From now on there is something to finish.
pub fn begin() -> Training {
    set(Phase::Training);
    Training
}

fn set(phase: Phase) {
    if let Some(state) = STATE.get() {
        *state.phase() = phase;
    }
}

/// While it exists, the first signal asks the run to stop. After that, the first one changes nothing.
pub struct Training;

impl Training {
    /// The signal that asked the run to stop.
    pub fn stop_requested(&self) -> Option<i32> {
        STATE.get().map(|state| state.received.load(Ordering::SeqCst)).filter(|&signal| signal != 0)
    }
}

impl Drop for Training {
    fn drop(&mut self) {
        set(Phase::Finishing);
    }
}

/// Lets a worker process that a driver started outlive the first signal, which a terminal sends to the driver as well: the
/// driver finishes the step, which needs the worker, and then ends it.
pub fn leave_first_to_driver() -> anyhow::Result<()> {
    for signal in [SIGINT, SIGTERM] {
        let received = Arc::new(AtomicBool::new(false));
        // In this order: the first signal sets the flag after the flag was found unset.
        flag::register_conditional_shutdown(signal, status(signal), received.clone())?;
        flag::register(signal, received)?;
    }
    Ok(())
}

fn name(signal: i32) -> &'static str {
    match signal {
        SIGINT => "SIGINT",
        _ => "SIGTERM",
    }
}

/// The exit status of a process that this signal ended.
fn status(signal: i32) -> i32 {
    128 + signal
}

/// The end of a run that a signal stopped, with its checkpoint and report complete.
#[derive(Debug)]
pub struct Interrupted {
    /// The signal that stopped the run.
    pub signal: i32,
    /// What was saved, and how to go on.
    pub message: String,
}

impl Interrupted {
    /// The exit status of the process.
    pub fn status(&self) -> i32 {
        status(self.signal)
    }
}

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stopped by {} {}", name(self.signal), self.message)
    }
}

impl std::error::Error for Interrupted {}
