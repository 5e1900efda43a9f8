//! Ctrl-C (SIGINT) and SIGTERM. The first one ends a training run as its last step would: the step in progress is finished, the
//! checkpoint and the log are written, and the report is printed. One that comes after the last step lets the run write its results.
//! A second one ends the process at once.

use crate::files::answer_of_disk;
use crate::mpi;
use crate::report::note;
use anyhow::Context;
use distgpipe::engine::{exit_at_once, spawn};
use distgpipe::sync::lock;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::iterator::Signals;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

/// What this process does about signals.
#[derive(Default)]
struct State {
    phase: Mutex<Phase>,
    /// The signal that asked the run to stop, or 0.
    received: AtomicI32,
    checkpoints: Mutex<CheckpointHooks>,
}

impl State {
    fn phase(&self) -> MutexGuard<'_, Phase> {
        lock(&self.phase)
    }

    /// Ends the process without finishing anything. `when` completes the line about it.
    fn end_at_once(&self, signal: i32, when: &str) -> ! {
        let mut hooks = lock(&self.checkpoints);
        let command = hooks.resume_command.as_ref().and_then(|command| command());
        if command.is_none() {
            let created = std::mem::take(&mut hooks.created);
            answer_of_disk(move || created.into_iter().for_each(|remove| remove()));
        }
        note(&format!("{}: ended at once{when}", name(signal)));
        if let Some(command) = command {
            note(&format!("to resume from the newest checkpoint: {command}"));
        }
        mpi::exit(status(signal))
    }
}

/// What the end of the process needs to know of the checkpoints.
#[derive(Default)]
struct CheckpointHooks {
    /// Each removes something that is useless without a checkpoint.
    created: Vec<Box<dyn FnOnce() + Send>>,
    /// The command that resumes from the newest checkpoint, if there is one.
    resume_command: Option<Box<dyn Fn() -> Option<String> + Send>>,
}

/// How far the run is.
#[derive(Clone, Copy, Default)]
enum Phase {
    /// No step has been made.
    #[default]
    Starting,
    /// Steps and tests are made.
    Training,
    /// The last step and test are done, and the results are written.
    Finishing,
}

static STATE: OnceLock<Arc<State>> = OnceLock::new();

/// Takes over the signals of this process. Until [`begin`], the first of them ends the process: there is nothing to finish yet.
pub fn watch() -> anyhow::Result<()> {
    let state = Arc::new(State::default());
    if STATE.set(state.clone()).is_err() {
        return Ok(());
    }
    let mut signals = both()?;
    spawn("signals", move || {
        for signal in signals.forever() {
            let again = state.received.swap(signal, Ordering::SeqCst) != 0;
            // Held until the process has ended, so that no step begins meanwhile.
            let phase = state.phase();
            let doing = match *phase {
                Phase::Starting => state.end_at_once(signal, ", before the first step"),
                _ if again => state.end_at_once(signal, ""),
                Phase::Training => "finishing the step",
                Phase::Finishing => "writing the results",
            };
            drop(phase);
            note(&format!("{}: {doing}; a second one ends the run at once", name(signal)));
            mpi::end_if_a_worker_is_silent();
        }
    })?;
    Ok(())
}

fn both() -> anyhow::Result<Signals> {
    Signals::new([SIGINT, SIGTERM]).context("taking over SIGINT and SIGTERM")
}

/// Removes something if a signal ends the process at once and there is no checkpoint.
pub fn if_nothing_saved(remove: impl FnOnce() + Send + 'static) {
    if let Some(state) = STATE.get() {
        lock(&state.checkpoints).created.push(Box::new(remove));
    }
}

/// Prints this command if a signal ends the process at once.
pub fn resume_with(command: impl Fn() -> Option<String> + Send + 'static) {
    if let Some(state) = STATE.get() {
        lock(&state.checkpoints).resume_command = Some(Box::new(command));
    }
}

/// Ends a worker that serves drivers at the first signal. `last_line` makes the last line of its log, with the signal's name.
pub fn end_worker(last_line: impl Fn(&str) -> String + Send + 'static) -> anyhow::Result<()> {
    let mut signals = both()?;
    spawn("signals", move || {
        if let Some(signal) = signals.forever().next() {
            note(&last_line(name(signal)));
            exit_at_once(status(signal));
        }
    })?;
    Ok(())
}

/// Ends the process at once if a signal has asked the run to stop and the step in progress cannot be finished. `why` completes the line
/// about it.
#[cfg(feature = "mpi")]
pub fn end_if_stopping(why: &str) {
    let Some(state) = STATE.get() else { return };
    let signal = state.received.load(Ordering::SeqCst);
    // Held until the process has ended, so that no step begins meanwhile.
    let phase = state.phase();
    if signal != 0 && matches!(*phase, Phase::Training) {
        state.end_at_once(signal, why);
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

    /// The step that was in progress when the signal came is done. What is left is to save it and to write the results.
    pub fn finish(&self) {
        set(Phase::Finishing);
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

/// Lets a worker that ends with its driver outlive all signals: a scheduler sends them to every process of a job, also twice, and the
/// driver, which saves a checkpoint then, needs the worker for it.
#[cfg(feature = "mpi")]
pub fn leave_to_driver() -> anyhow::Result<()> {
    for signal in [SIGINT, SIGTERM] {
        flag::register(signal, Arc::new(AtomicBool::new(false)))?;
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
