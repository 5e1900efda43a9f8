//! What a [`Trainer`](crate::train::Trainer) reports while it runs. Progress bars, log files and tables are observers of
//! these events.

use crate::driver::pipeline::StepOutcome;
use crate::failure::{Failure, Fault};
use crate::train::checkpoint::CheckpointError;
use crate::train::control::RunControl;
use crate::train::summary::EpochSummary;
use crate::train::trainer::TrainError;
use std::collections::BTreeMap;
use std::path::Path;
use tch::Tensor;

/// An event of a training run.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A training step is done.
    StepDone(&'a StepDone<'a>),
    /// A batch of the test data is done.
    TestStepDone {
        /// The figures of the batch.
        outcome: &'a StepOutcome,
    },
    /// The tensors that a step sent over links, before any codec. Precedes that step's [`StepDone`](Event::StepDone).
    Captured {
        /// The step, counted from 0 over all epochs.
        step: u64,
        /// The tensors by name; see [`Pipeline::captured`](crate::Pipeline::captured).
        tensors: &'a BTreeMap<String, Tensor>,
    },
    /// A parameter has grown beyond [a bound](crate::runtime::divergence::PARAMETER_MAGNITUDE_MAX): the run most likely diverges, although
    /// its loss is still finite. Reported at most once per run, before that step's [`StepDone`](Event::StepDone).
    WeightsExploding {
        /// The step, counted from 0 over all epochs.
        step: u64,
        /// The largest absolute value of any parameter after the step.
        largest: f64,
    },
    /// The run has lost a worker, and starts all workers again.
    WorkerLost {
        /// What happened to the worker.
        failure: &'a Failure,
        /// The number of this restart, from 1.
        restart: u64,
        /// How many there may be.
        restarts: u64,
        /// The steps of the state that the run goes back to.
        step: u64,
    },
    /// A worker is not there yet. Sent for each attempt to start the workers again.
    Rejoining {
        /// Why the last attempt failed.
        failure: &'a Failure,
        /// How long the run has been trying, in seconds.
        seconds: f64,
        /// How long it tries, in seconds; see [`Timeouts::reconnect_s`](crate::Timeouts::reconnect_s).
        limit_s: f64,
    },
    /// All workers are there, and have the state of an earlier step. Later steps and tests are repeated.
    Restarted {
        /// Steps done.
        step: u64,
        /// Epochs done.
        epoch: u64,
    },
    /// The run has copied its state into the memory of this process for the first time, to restart from while it has no checkpoint:
    /// before the first step if it begins with loaded weights, otherwise after the first epoch. Reported once.
    StateKept {
        /// The size of the state.
        bytes: u64,
    },
    /// The run cannot keep its state in memory: the loss of a worker ends it unless it has a checkpoint by then. Reported once.
    StateNotKept {
        /// Why not.
        fault: &'a Fault,
    },
    /// A checkpoint could not be written. The run goes on with the older one.
    SaveFailed {
        /// Steps done.
        step: u64,
        /// What went wrong.
        error: &'a CheckpointError,
        /// How many have failed in a row.
        failures: u64,
        /// How many may fail in a row.
        failures_max: u64,
        /// The step after which the run tries again.
        again_at: u64,
        /// It tries no earlier than after this many seconds, while the disk does not answer; otherwise 0.
        pause_s: f64,
    },
    /// An epoch is done, and its test if one was due.
    EpochDone(&'a EpochSummary),
    /// A checkpoint is on the disk.
    Saved {
        /// Steps done when it was written.
        step: u64,
        /// The checkpoint's folder, such as `DIR/step-00000120`.
        path: &'a Path,
    },
}

/// A training step and its figures.
#[derive(Debug)]
#[non_exhaustive]
pub struct StepDone<'a> {
    /// The epoch, from 0.
    pub epoch: u64,
    /// The step, counted from 0 over all epochs.
    pub step: u64,
    /// Training steps of the whole run.
    pub steps: u64,
    /// The learning rate of the update that the step belongs to.
    pub learning_rate: f64,
    /// Seconds that the trainer waited for the batch.
    pub loading_s: f64,
    /// Seconds from requesting the batch to the last report, loading included.
    pub seconds: f64,
    /// The loss and other figures of the step.
    pub outcome: &'a StepOutcome,
}

/// Receives the events of a run, and may control it; see [`Trainer::run`](crate::Trainer::run).
pub(super) type Observer<'a> = dyn FnMut(&Event<'_>, &mut RunControl<'_>) -> Result<(), TrainError> + 'a;
