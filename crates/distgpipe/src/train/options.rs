//! How long and how to train.

use crate::runtime::accumulation::Accumulation;
use crate::runtime::graphs::STEPS_UNTIL_RECORDED;
use crate::train::best::TestMetric;
use crate::train::learning_rate::RateSchedule;

/// How to train: how long, and with which schedule. The optimizer, the learning rate and clipping belong to the pipeline;
/// see [`Builder`](crate::Builder).
///
/// Fields may be added in later versions: end a literal with `..TrainOptions::default()`.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainOptions {
    /// Passes over the training data.
    pub epochs: u64,
    /// Ends the run after this many steps, if that is sooner. A run that would end inside an update of several batches ends
    /// after that update, so that a longer run can continue it.
    pub steps_max: Option<u64>,
    /// The factor by which each update multiplies the pipeline's learning rate; see
    /// [`Builder::learning_rate`](crate::Builder::learning_rate).
    pub rate_schedule: RateSchedule,
    /// Batches per update of the parameters. The last update of an epoch may have fewer.
    pub accumulate: u64,
    /// Steps at the start of the run that times and speeds leave out, because libtorch still plans its kernels and memory. If workers
    /// record CUDA graphs, at least the steps until they have done so are left out; see [`Builder::graphs`](crate::Builder::graphs).
    pub warm_up_steps: u64,
    /// The step of which the observer receives everything that crossed the links.
    pub capture: Capture,
    /// Tests after every so many epochs, and after the last one. Has no effect without test data.
    pub test_every: u64,
    /// The metric of the tests that decides which epoch is the best. Its checkpoint is kept beside the newest ones; see
    /// [`Checkpoints::best`](crate::Checkpoints::best). Only whole epochs count. Needs test data.
    pub best: Option<TestMetric>,
    /// Ends the run at a test that comes this many epochs or more after the best one. Needs [`best`](Self::best).
    pub patience: Option<u64>,
    /// How often the run may go on by itself after it has lost a worker that is a process. It starts the workers again, goes
    /// back to its last checkpoint and repeats the steps since then, with the same results. A run without checkpoints keeps
    /// its state in the memory of this process instead, after each epoch, if it fits. With 0, the default, the loss of a worker
    /// ends the run.
    pub restarts: u64,
    /// How many checkpoints in a row may fail because of the disk before the run ends. It goes on with the older checkpoint
    /// meanwhile, and tries again after the next updates.
    pub save_failures_max: u64,
}

impl Default for TrainOptions {
    fn default() -> Self {
        TrainOptions {
            epochs: 1,
            steps_max: None,
            rate_schedule: RateSchedule::default(),
            accumulate: 1,
            warm_up_steps: 2,
            capture: Capture::Nothing,
            test_every: 1,
            best: None,
            patience: None,
            restarts: 0,
            save_failures_max: 5,
        }
    }
}

impl TrainOptions {
    /// Steps that times and speeds leave out, if workers record CUDA graphs or not.
    pub(super) fn unmeasured(&self, records_graphs: bool) -> u64 {
        let until_recorded = if records_graphs { STEPS_UNTIL_RECORDED } else { 0 };
        self.warm_up_steps.max(until_recorded)
    }

    /// Training steps of a whole run with epochs of so many batches: whole updates.
    pub(super) fn steps(&self, epoch_batches: u64) -> u64 {
        let updates = Accumulation { every: self.accumulate, epoch_steps: epoch_batches, steps: 0 };
        let steps_max = self.steps_max.map_or(u64::MAX, |steps| updates.whole_updates(steps));
        self.epochs.saturating_mul(epoch_batches).min(steps_max)
    }
}

/// The step of which everything that crosses the links is captured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Capture {
    /// No step is captured.
    #[default]
    Nothing,
    /// Captures the last step of the run.
    LastStep,
    /// Captures the step of this number, counted from 0 over all epochs.
    Step(u64),
}

/// When a checkpoint is written, besides the end of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SaveEvery {
    /// After each epoch, and its test if one is due.
    Epoch,
    /// Every N steps, at the next finished update.
    Steps(u64),
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The library left out two steps, and the slow third one, which records, was part of the means.
    #[test]
    fn the_step_that_records_graphs_is_not_measured() {
        let options = TrainOptions::default();
        assert_eq!((options.unmeasured(false), options.unmeasured(true)), (2, 3));
        let longer = TrainOptions { warm_up_steps: 10, ..options };
        assert_eq!((longer.unmeasured(false), longer.unmeasured(true)), (10, 10));
    }
}
