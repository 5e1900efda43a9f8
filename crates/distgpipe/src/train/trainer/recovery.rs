//! What a run goes back to when it loses a worker: its last checkpoint, or a copy of the state in the memory of this process.

use crate::driver::pipeline::{Pipeline, StepError};
use crate::engine;
use crate::failure::{Failure, Fault};
use crate::model::layer::TensorSpec;
use crate::train::checkpoint::{Checkpoint, CheckpointError};
use crate::train::events::{Event, Observer};
use crate::train::summary::SummaryBuilder;
use crate::train::{Progress, TrainError, Trainer};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tch::Tensor;

/// The pause between two attempts to start the workers again.
const REJOIN_PAUSE: Duration = Duration::from_millis(500);

/// The state that a run goes back to.
pub(super) enum RollbackPoint {
    /// That of new workers. Nothing has been loaded and no step done, so no worker has to send it.
    Start(Progress),
    Memory(Snapshot),
    /// A checkpoint's folder, and the progress in it.
    Disk(PathBuf, Progress),
}

impl RollbackPoint {
    pub fn progress(&self) -> &Progress {
        match self {
            RollbackPoint::Memory(snapshot) => &snapshot.progress,
            RollbackPoint::Start(progress) | RollbackPoint::Disk(_, progress) => progress,
        }
    }

    /// Loads the state into a pipeline that has just been restarted.
    pub fn load(&self, pipeline: &mut Pipeline) -> Result<(), TrainError> {
        match self {
            RollbackPoint::Start(_) => Ok(()),
            RollbackPoint::Memory(snapshot) => Ok(snapshot.load(pipeline)?),
            RollbackPoint::Disk(path, _) => Ok(Checkpoint::open(path)?.load(pipeline)?),
        }
    }
}

/// A copy of everything that a checkpoint has.
pub(super) struct Snapshot {
    progress: Progress,
    batches_trained: u64,
    state: BTreeMap<String, Tensor>,
    optimizer: BTreeMap<String, Tensor>,
}

impl Snapshot {
    /// The size of a pipeline's snapshot in bytes.
    pub fn bytes(pipeline: &Pipeline) -> u64 {
        let specs = [pipeline.state_specs(), pipeline.optimizer_specs()].concat();
        let bytes = |spec: &TensorSpec| spec.elements().saturating_mul(spec.kind.elt_size_in_bytes() as u64);
        specs.iter().map(bytes).fold(0, u64::saturating_add)
    }

    /// Checks that this process has the memory for a snapshot, and for a second one while it replaces the first.
    pub fn require_memory(pipeline: &Pipeline) -> Result<(), Fault> {
        let needs_bytes = 2 * u128::from(Self::bytes(pipeline));
        engine::require_memory(
            "a copy of the model and of the optimizer's state",
            needs_bytes,
            "save checkpoints instead",
        )
    }

    /// Copies the state of a pipeline. Resets its codecs, as a checkpoint does; see [`Pipeline::reset_codecs`].
    pub fn take(pipeline: &mut Pipeline, progress: &Progress) -> Result<Self, StepError> {
        pipeline.reset_codecs()?;
        let state = pipeline.state()?;
        let mut optimizer = BTreeMap::new();
        pipeline.optimizer_each(|name, tensor| {
            optimizer.insert(name.to_owned(), tensor);
            Ok::<(), StepError>(())
        })?;
        Ok(Snapshot { progress: progress.clone(), batches_trained: pipeline.batches_trained(), state, optimizer })
    }

    fn load(&self, pipeline: &mut Pipeline) -> Result<(), StepError> {
        pipeline.load_state(&self.state)?;
        let names: Vec<String> = self.optimizer.keys().cloned().collect();
        pipeline.load_optimizer_from(&names, |name| {
            engine::copy(&self.optimizer[name]).map_err(|fault| StepError::Load(format!("copying `{name}`: {fault}")))
        })?;
        pipeline.set_batches_trained(self.batches_trained);
        Ok(())
    }
}

impl Trainer<'_> {
    /// Decides what the run goes back to if it loses a worker before its first checkpoint.
    pub(super) fn keep_first_state(&mut self, observer: &mut Observer<'_>) -> Result<(), TrainError> {
        if self.options.restarts == 0 || !self.pipeline.can_restart() {
            return Ok(());
        }
        let initial = self.pipeline.has_initial_state();
        // Nothing is kept, and a checkpoint replaces it.
        if initial && self.saving.is_some() {
            self.rollback = Some(RollbackPoint::Start(self.progress.clone()));
            return Ok(());
        }
        if let Err(fault) = Snapshot::require_memory(self.pipeline) {
            return self.notify(observer, &Event::StateNotKept { fault: &fault });
        }
        if initial {
            self.rollback = Some(RollbackPoint::Start(self.progress.clone()));
            return Ok(());
        }
        self.keep_state(observer)
    }

    /// Copies the state into the memory of this process, to go back to it.
    pub(super) fn keep_state(&mut self, observer: &mut Observer<'_>) -> Result<(), TrainError> {
        let snapshot = RollbackPoint::Memory(Snapshot::take(self.pipeline, &self.progress)?);
        if let Some(RollbackPoint::Memory(_)) = self.rollback.replace(snapshot) {
            return Ok(());
        }
        let bytes = Snapshot::bytes(self.pipeline);
        self.notify(observer, &Event::StateKept { bytes })
    }

    /// Starts the workers again after an error that is the loss of one, and goes back to the last state that was saved. Returns
    /// the error if it is another, or if the run has been restarted too often.
    pub(super) fn recover(
        &mut self,
        mut error: TrainError,
        summary: &mut SummaryBuilder,
        observer: &mut Observer<'_>,
    ) -> Result<(), TrainError> {
        loop {
            let restarts = self.options.restarts;
            let Some(failure) = lost_worker(&error).filter(|_| self.restarts < restarts).cloned() else {
                return Err(error);
            };
            let Some(rollback) = self.rollback.take() else { return Err(error) };
            self.restarts += 1;
            let (restart, step) = (self.restarts, rollback.progress().step);
            self.notify(observer, &Event::WorkerLost { failure: &failure, restart, restarts, step })?;
            let restarted = self.rejoin(failure, observer).and_then(|()| rollback.load(self.pipeline));
            let progress = rollback.progress().clone();
            self.rollback = Some(rollback);
            match restarted {
                Ok(()) => {
                    summary.restarted(self.progress.step.saturating_sub(progress.step));
                    self.progress = progress;
                    let (step, epoch) = (self.progress.step, self.progress.epoch);
                    return self.notify(observer, &Event::Restarted { step, epoch });
                }
                Err(again) => error = again,
            }
        }
    }

    /// Starts the workers again. A worker on another host may take a while to be there.
    fn rejoin(&mut self, lost: Failure, observer: &mut Observer<'_>) -> Result<(), TrainError> {
        let (start, limit) = (Instant::now(), self.pipeline.timeouts().reconnect());
        loop {
            let Err(failure) = self.pipeline.restart() else { return Ok(()) };
            if start.elapsed() >= limit {
                return Err(StepError::from(failure).into());
            }
            let (seconds, limit_s) = (start.elapsed().as_secs_f64(), limit.as_secs_f64());
            self.notify(observer, &Event::Rejoining { failure: &failure, seconds, limit_s })?;
            if self.stop {
                return Err(StepError::from(lost).into());
            }
            std::thread::sleep(REJOIN_PAUSE);
        }
    }
}

/// The failure behind an error, if it is the loss of a worker, which a new one can replace.
fn lost_worker(error: &TrainError) -> Option<&Failure> {
    match error {
        TrainError::Step(StepError::Failed(failure))
        | TrainError::Checkpoint(CheckpointError::Step(StepError::Failed(failure))) => Some(failure),
        _ => None,
    }
    .filter(|failure| failure.is_lost_connection())
}
