//! Trains a pipeline over epochs of data: steps, tests after epochs, writes checkpoints, and reports events.

mod recovery;

use crate::data::{DataError, Epoch, Loader};
use crate::driver::pipeline::{Batch, Pipeline, StepError, StepOutcome};
use crate::runtime::accumulation::Accumulation;
use crate::runtime::divergence::has_diverged;
use crate::train::best::{BestEpoch, TestMetric};
use crate::train::checkpoint::{Checkpoint, CheckpointError, Checkpoints};
use crate::train::control::RunControl;
use crate::train::evaluation::evaluate_all;
use crate::train::events::{Event, Observer, StepDone};
use crate::train::options::{Capture, SaveEvery, TrainOptions};
use crate::train::summary::{EpochSummary, EpochTotals, RunEnd, RunSummary, SummaryBuilder};
use crate::train::weights::WeightsError;
use recovery::RollbackPoint;
use serde::{Deserialize, Serialize};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// Why training ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// A batch could not be loaded.
    #[error("loading: {0}")]
    Data(#[from] DataError),
    /// A training or test step failed.
    #[error(transparent)]
    Step(#[from] StepError),
    /// The loss, or the norm of the gradients, is NaN or infinite.
    #[error("the loss or the gradient norm of step {} is {loss}: lower `Builder::learning_rate` or set `Builder::clip_norm`; if weights or a checkpoint were loaded just before, load earlier ones", step + 1)]
    Diverged {
        /// The step, from 0.
        step: u64,
        /// The loss or the norm.
        loss: f64,
    },
    /// The batches have too few rows for the plan.
    #[error("expected batches of at least {micro_batches} rows, one per micro-batch of each replica, got one of {rows}: raise `LoaderOptions::batch_rows`, or lower `Builder::micro_batches` or `Builder::replicas`")]
    TooFewRows {
        /// Micro-batches of all replicas.
        micro_batches: usize,
        /// Rows of the shortest training batch.
        rows: usize,
    },
    /// The run ends before the step to capture.
    #[error("`TrainOptions::capture`: expected a step from 1 to the run's last, {steps}; got {step}")]
    NoSuchStep {
        /// The step to capture, from 1.
        step: u64,
        /// Steps of the run.
        steps: u64,
    },
    /// [`TrainOptions::test_every`] is 0, or [`TrainOptions::best`] or [`TrainOptions::patience`] lacks what it compares.
    #[error("{option}: {needs}")]
    Best {
        /// The option that was set.
        option: &'static str,
        /// What it needs.
        needs: String,
    },
    /// A file of weights could not be written.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// A checkpoint could not be written, or the run cannot resume from it.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// An observer returned an error.
    #[error("an observer failed: {0}")]
    Observer(#[from] std::io::Error),
}

/// Trains a pipeline.
///
/// ```no_run
/// use distgpipe::data::Split;
/// use distgpipe::data::{Digits, Loader, LoaderOptions};
/// use distgpipe::model::zoo::Mlp;
/// use distgpipe::train::{Event, TrainOptions, Trainer};
/// use distgpipe::Pipeline;
/// use std::sync::Arc;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut pipeline = Pipeline::builder(Mlp::default().model()?).balance([2, 2]).micro_batches(4).build()?;
/// let digits = Digits::new(Split::Train, Default::default())?;
/// let train = Loader::new(Arc::new(digits), LoaderOptions::training(64, 0))?;
/// let summary = Trainer::new(&mut pipeline, train, None, TrainOptions::default())?.run(|event, run| {
///     if let Event::StepDone(done) = event {
///         println!("step {}: loss {:.3}", done.step, done.outcome.loss);
///         if done.outcome.loss < 0.1 {
///             run.stop();
///         }
///     }
///     Ok(())
/// })?;
/// println!("{:.0} samples/s", summary.samples_per_s_median.unwrap_or(0.0));
/// # Ok(())
/// # }
/// ```
pub struct Trainer<'a> {
    pipeline: &'a mut Pipeline,
    train: Loader,
    test: Option<Loader>,
    options: TrainOptions,
    /// Training steps of the whole run.
    steps: u64,
    /// The step to capture.
    capture: Option<u64>,
    progress: Progress,
    resumed_at: Option<u64>,
    saving: Option<CheckpointSchedule<'a>>,
    /// What the run goes back to when it loses a worker.
    rollback: Option<RollbackPoint>,
    /// How often the workers have been started again.
    restarts: u64,
    explosion: ExplosionWarning,
    /// Whether an observer wants the run to end.
    stop: bool,
}

/// How much of a run is done. A checkpoint keeps it, and the run resumes from it.
// The fields are in alphabetical order, as in the manifest of a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Batches of the epoch that are done.
    pub batch: u64,
    /// Whether the last epoch, which the end of the run cut short, has been tested. It is not among `epochs`, because a longer
    /// run continues it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    cut_short_tested: bool,
    /// The epoch in progress, from 0.
    pub epoch: u64,
    /// Batches of every epoch.
    pub epoch_batches: u64,
    epochs: Vec<EpochSummary>,
    /// Steps done, over all epochs.
    pub step: u64,
    totals: EpochTotals,
}

impl Progress {
    /// How a run with these options has ended, if it has nothing left to do.
    pub fn end(&self, options: &TrainOptions) -> Option<RunEnd> {
        let steps = options.steps(self.epoch_batches);
        // A run that is killed in the test of an epoch cut short has saved all of its steps, and has the test left to do.
        if self.step > steps || (self.step == steps && (self.batch == 0 || self.cut_short_tested)) {
            return Some(RunEnd::Complete);
        }
        self.is_out_of_patience(options).then_some(RunEnd::OutOfPatience)
    }

    /// The best epoch so far.
    fn best(&self, options: &TrainOptions) -> Option<BestEpoch> {
        BestEpoch::of(options.best?, &self.epochs, self.epoch_batches)
    }

    /// Whether the last test came too long after the best one.
    fn is_out_of_patience(&self, options: &TrainOptions) -> bool {
        let tested = self.epochs.iter().rev().find(|epoch| epoch.test_loss.is_some()).map_or(0, |epoch| epoch.epoch);
        let since_best = |best: BestEpoch| tested.saturating_sub(best.epoch);
        options.patience.zip(self.best(options)).is_some_and(|(patience, best)| since_best(best) >= patience)
    }

    /// The start of the next epoch.
    fn next_epoch(&self) -> Progress {
        Progress { epoch: self.epoch + 1, batch: 0, totals: EpochTotals::default(), ..self.clone() }
    }
}

/// Where and when to write checkpoints.
struct CheckpointSchedule<'a> {
    checkpoints: &'a Checkpoints,
    every: SaveEvery,
    settings: serde_json::Value,
    /// The step of the last checkpoint.
    last: u64,
    /// How many have failed since then, and the step after which to try again.
    failures: u64,
    again_at: u64,
    /// When to try a disk again that did not answer.
    again_after: Option<Instant>,
    /// A checkpoint that is the best and could not be marked.
    unmarked: Option<u64>,
}

impl CheckpointSchedule<'_> {
    /// Whether it is too early to try a disk again that did not answer: steps may be much shorter than its pauses.
    fn pauses(&self) -> bool {
        self.again_after.is_some_and(|moment| Instant::now() < moment)
    }

    /// Marks the best checkpoint, if that is due.
    fn mark(&mut self) -> Result<(), CheckpointError> {
        if let Some(step) = self.unmarked {
            self.checkpoints.mark_best(step)?;
            self.unmarked = None;
        }
        Ok(())
    }
}

impl<'a> Trainer<'a> {
    /// A trainer of this pipeline. Fails if the batches have too few rows for the plan, or if there is no step to capture.
    pub fn new(
        pipeline: &'a mut Pipeline,
        train: Loader,
        test: Option<Loader>,
        options: TrainOptions,
    ) -> Result<Self, TrainError> {
        let (micro_batches, rows) = (pipeline.micro_batches(), train.rows_min());
        if rows < micro_batches {
            return Err(TrainError::TooFewRows { micro_batches, rows });
        }
        check_tests(&options, test.is_some())?;
        let steps = options.steps(train.batches() as u64);
        let capture = match options.capture {
            Capture::Nothing => None,
            Capture::LastStep => steps.checked_sub(1),
            Capture::Step(step) if step < steps => Some(step),
            Capture::Step(step) => return Err(TrainError::NoSuchStep { step: step + 1, steps }),
        };
        let progress = Progress { epoch_batches: train.batches() as u64, ..Progress::default() };
        Ok(Trainer {
            pipeline,
            train,
            test,
            options,
            steps,
            capture,
            progress,
            resumed_at: None,
            saving: None,
            rollback: None,
            restarts: 0,
            explosion: ExplosionWarning::default(),
            stop: false,
        })
    }

    /// Loads a checkpoint, so that [`run`](Self::run) continues the run that wrote it. The model, the seed, the optimizer,
    /// the parameter groups, the frozen parameters and the number of batches per epoch must be those of that run.
    pub fn resume(mut self, checkpoint: &Checkpoint) -> Result<Self, CheckpointError> {
        let (saved, here) = (&checkpoint.manifest().progress, self.progress.epoch_batches);
        if saved.epoch_batches != here {
            return Err(CheckpointError::Mismatch {
                what: "the number of batches per epoch",
                expected: saved.epoch_batches.to_string(),
                got: here.to_string(),
            });
        }
        // Only if that run had another number of batches per update.
        if saved.step < self.steps && !self.accumulation().position_of(saved.step).is_first() {
            return Err(CheckpointError::WithinUpdate { step: saved.step });
        }
        checkpoint.load(self.pipeline)?;
        self.resumed_at = Some(saved.step);
        // The trainer repeats the test for its summary, and a longer run tests the whole epoch.
        self.progress = Progress { cut_short_tested: false, ..saved.clone() };
        if let Some(saving) = &mut self.saving {
            saving.last = saved.step;
        }
        if self.options.restarts > 0 && self.pipeline.can_restart() {
            self.rollback = Some(RollbackPoint::Disk(checkpoint.path().to_owned(), self.progress.clone()));
        }
        Ok(self)
    }

    /// Writes checkpoints into a folder. Each keeps a copy of `settings` for the caller; the trainer does not read it.
    pub fn save_to(mut self, checkpoints: &'a Checkpoints, every: SaveEvery, settings: serde_json::Value) -> Self {
        let last = self.progress.step;
        let (failures, again_at, again_after, unmarked) = (0, 0, None, None);
        self.saving =
            Some(CheckpointSchedule { checkpoints, every, settings, last, failures, again_at, again_after, unmarked });
        self
    }

    /// Training steps of the whole run, including those before the checkpoint it resumes from.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Trains to the end of the run, with a test after every epoch, or as [`TrainOptions::test_every`] says.
    ///
    /// Calls the observer for each event, on this thread: a slow observer slows training down. Through its second argument
    /// it can stop the run, evaluate and predict. An error of the observer ends the run; errors of your own fit into an
    /// [`std::io::Error`].
    pub fn run(
        mut self,
        mut observer: impl FnMut(&Event<'_>, &mut RunControl<'_>) -> Result<(), TrainError>,
    ) -> Result<RunSummary, TrainError> {
        let (start, observer): (_, &mut Observer<'_>) = (Instant::now(), &mut observer);
        if let (Some(saving), Some(step)) = (&self.saving, self.resumed_at) {
            saving.checkpoints.retire_after(step)?;
            // The run may have been killed between saving a checkpoint and marking it, or had another metric.
            match self.best() {
                Some(best) if saving.checkpoints.steps()?.contains(&best.step) => {
                    saving.checkpoints.mark_best(best.step)?
                }
                _ if self.options.best.is_some() => saving.checkpoints.unmark_best()?,
                _ => {}
            }
        }
        let left = self.steps.saturating_sub(self.progress.step);
        let mut summary = SummaryBuilder::new(
            self.pipeline,
            self.resumed_at,
            self.options.unmeasured(self.pipeline.records_graphs()).min(left),
        );
        let end = loop {
            match self.train(&mut summary, observer) {
                Ok(end) => break end,
                Err(error) => self.recover(error, &mut summary, observer)?,
            }
        };
        let mut summary = summary.finish(start.elapsed().as_secs_f64());
        (summary.end, summary.best) = (end, self.best());
        summary.epochs = self.progress.epochs;
        if end == RunEnd::Stopped && self.progress.batch > 0 {
            summary.epochs.push(self.progress.totals.summary(self.progress.epoch, None));
        }
        Ok(summary)
    }

    /// Trains from the progress of the run to its end, and saves it there.
    fn train(&mut self, summary: &mut SummaryBuilder, observer: &mut Observer<'_>) -> Result<RunEnd, TrainError> {
        if self.rollback.is_none() {
            self.keep_first_state(observer)?;
        }
        let finished = self.progress.end(&self.options) == Some(RunEnd::Complete);
        let mut batches = (!finished).then(|| self.batches(&self.progress));
        let end = loop {
            let Some(epoch) = batches.take() else { break RunEnd::Complete };
            if self.progress.is_out_of_patience(&self.options) {
                break RunEnd::OutOfPatience;
            }
            self.train_epoch(epoch, summary, observer)?;
            let trained = self.progress.step == self.steps;
            if self.stop && !(trained && self.test.is_none()) {
                break RunEnd::Stopped;
            }
            let next = self.progress.next_epoch();
            // Created before the test, so that the loader prepares the first batches meanwhile.
            batches = (!trained).then(|| self.batches(&next));
            let tested = self.finish_epoch(next, summary, observer)?;
            if self.stop && !(trained && tested) {
                break RunEnd::Stopped;
            }
        };
        if end != RunEnd::Complete && self.saving.as_ref().is_some_and(|saving| saving.last != self.progress.step) {
            self.save(observer)?;
        }
        Ok(end)
    }

    /// Tells the observer of an event.
    fn notify(&mut self, observer: &mut Observer<'_>, event: &Event<'_>) -> Result<(), TrainError> {
        observer(event, &mut RunControl { pipeline: self.pipeline, stop: &mut self.stop })
    }

    /// Trains on the rest of an epoch, or to the last step of the run, or until an observer stops it.
    fn train_epoch(
        &mut self,
        epoch: Epoch,
        summary: &mut SummaryBuilder,
        observer: &mut Observer<'_>,
    ) -> Result<(), TrainError> {
        let left = usize::try_from(self.steps.saturating_sub(self.progress.step)).unwrap_or(usize::MAX);
        for batch in TimedBatches(epoch).take(left) {
            let step = self.progress.step;
            self.step(batch?, summary, observer)?;
            self.progress.step += 1;
            self.progress.batch += 1;
            // Gradients of an update in progress are not saved.
            if !self.accumulation().position_of(step).is_last() {
                continue;
            }
            // A whole epoch is saved after its test. One that the end of the run cuts short is saved as it is, so that a
            // longer run can continue it.
            if self.progress.batch < self.progress.epoch_batches {
                self.save_if_due(observer)?;
            }
            if self.stop {
                break;
            }
        }
        Ok(())
    }

    fn step(
        &mut self,
        timed: TimedBatch<Batch>,
        summary: &mut SummaryBuilder,
        observer: &mut Observer<'_>,
    ) -> Result<(), TrainError> {
        let (step, accumulation) = (self.progress.step, self.accumulation());
        let (update, updates) = (accumulation.update(step), accumulation.updates());
        let factor = self.options.rate_schedule.factor_in_epochs(update, updates, accumulation.epoch_updates());
        let learning_rate = self.pipeline.learning_rate() * factor;
        let capture = self.capture == Some(step);
        if capture {
            self.pipeline.capture_next();
        }
        let outcome = self.pipeline.train_part_at(&timed.batch, accumulation.position_of(step), learning_rate)?;
        if capture {
            let tensors = self.pipeline.captured()?;
            self.notify(observer, &Event::Captured { step, tensors: &tensors })?;
        }
        check_finite(step, &outcome)?;
        if let Some(metric) =
            self.options.best.filter(|metric| *metric != TestMetric::Loss && outcome.correct.is_none())
        {
            return Err(no_metric(metric));
        }
        if let Some(largest) = self.explosion.check(outcome.parameter_max()) {
            self.notify(observer, &Event::WeightsExploding { step, largest })?;
        }
        let seconds = timed.requested.elapsed().as_secs_f64();
        self.progress.totals.add(&outcome, seconds);
        let done = StepDone {
            epoch: self.progress.epoch,
            step,
            steps: self.steps,
            learning_rate,
            loading_s: timed.loading_s,
            seconds,
            outcome: &outcome,
        };
        summary.add_step(&done);
        self.notify(observer, &Event::StepDone(&done))
    }

    /// Tests if that is due, reports the epoch and moves on to the next. Returns whether it did: an observer may stop the test.
    fn finish_epoch(
        &mut self,
        next: Progress,
        summary: &mut SummaryBuilder,
        observer: &mut Observer<'_>,
    ) -> Result<bool, TrainError> {
        let last = self.progress.step == self.steps;
        let due = last || (self.progress.epoch + 1).is_multiple_of(self.options.test_every);
        let test = if due { self.test(summary, observer)? } else { None };
        let tested = test.is_some();
        if self.stop && tested {
            return Ok(false);
        }
        if let Some(loss) = test.as_ref().map(EpochTotals::loss).filter(|loss| !loss.is_finite()) {
            return Err(TrainError::Diverged { step: self.progress.step.saturating_sub(1), loss });
        }
        let epoch = self.progress.totals.summary(self.progress.epoch, test);
        if let Some(metric) = self.options.best.filter(|metric| tested && metric.value_in(&epoch).is_none()) {
            return Err(no_metric(metric));
        }
        self.notify(observer, &Event::EpochDone(&epoch))?;
        let whole = self.progress.batch == self.progress.epoch_batches;
        if let Some(saving) = self.saving.as_ref().filter(|_| !whole) {
            let tested = Progress { cut_short_tested: true, ..self.progress.clone() };
            // Without it, a run that resumes here repeats the test.
            let _ = saving.checkpoints.replace_progress(&tested);
        }
        self.progress = next;
        self.progress.epochs.push(epoch);
        if whole && self.best().is_some_and(|best| best.step == self.progress.step) {
            self.save_best(observer)?;
        } else if whole {
            self.save_if_due(observer)?;
        }
        if self.saving.is_none() && self.rollback.is_some() && self.progress.step < self.steps {
            self.keep_state(observer)?;
        }
        Ok(true)
    }

    fn accumulation(&self) -> Accumulation {
        Accumulation { every: self.options.accumulate, epoch_steps: self.train.batches() as u64, steps: self.steps }
    }

    fn batches(&self, from: &Progress) -> Epoch {
        self.train.epoch_for(self.pipeline, from.epoch, usize::try_from(from.batch).unwrap_or(usize::MAX))
    }

    /// The best epoch so far.
    fn best(&self) -> Option<BestEpoch> {
        self.progress.best(&self.options)
    }

    fn save_if_due(&mut self, observer: &mut Observer<'_>) -> Result<(), TrainError> {
        let Some(saving) = &self.saving else { return Ok(()) };
        let step = self.progress.step;
        let due = match saving.every {
            SaveEvery::Epoch => self.progress.batch == 0,
            SaveEvery::Steps(steps) => step - saving.last >= steps,
        };
        let due = if saving.failures > 0 { step >= saving.again_at && !saving.pauses() } else { due };
        if due || step == self.steps {
            self.save(observer)?;
        }
        Ok(())
    }

    /// Saves the best epoch so far, due or not.
    fn save_best(&mut self, observer: &mut Observer<'_>) -> Result<(), TrainError> {
        self.save(observer)?;
        let Some(saving) = self.saving.as_mut().filter(|saving| saving.last == self.progress.step) else {
            return Ok(());
        };
        saving.unmarked = Some(self.progress.step);
        match saving.mark() {
            Ok(()) => Ok(()),
            Err(error) => self.save_failed(error, observer),
        }
    }

    fn save(&mut self, observer: &mut Observer<'_>) -> Result<(), TrainError> {
        let Some(saving) = &mut self.saving else { return Ok(()) };
        let step = self.progress.step;
        if step == self.steps || self.stop {
            // There is no later attempt.
            saving.checkpoints.wait_for_disk();
        }
        let marked = saving.mark();
        let path = match marked.and_then(|()| saving.checkpoints.save(self.pipeline, &self.progress, &saving.settings))
        {
            Ok(path) => path,
            Err(error) => return self.save_failed(error, observer),
        };
        (saving.last, saving.failures, saving.again_after) = (step, 0, None);
        if self.options.restarts > 0 && self.pipeline.can_restart() {
            self.rollback = Some(RollbackPoint::Disk(path.clone(), self.progress.clone()));
        }
        self.notify(observer, &Event::Saved { step, path: &path })
    }

    /// Goes on with the older checkpoint after an error of the disk, unless there have been too many in a row or nothing comes
    /// after it. Other errors end the run.
    fn save_failed(&mut self, error: CheckpointError, observer: &mut Observer<'_>) -> Result<(), TrainError> {
        let Some(saving) = &mut self.saving else { return Ok(()) };
        let (step, failures_max) = (self.progress.step, self.options.save_failures_max);
        // A worker that is lost meanwhile does not change when the next checkpoint is due.
        if !error.is_of_disk() {
            return Err(error.into());
        }
        // The best epoch is tried at any time.
        let early = saving.pauses();
        saving.failures += u64::from(!early);
        if saving.failures > failures_max || step == self.steps || self.stop {
            return Err(error.into());
        }
        // 1, 2, 4, … steps later.
        let doublings = saving.failures.saturating_sub(1).min(32);
        saving.again_at = step.saturating_add(1 << doublings);
        let pause = match error {
            CheckpointError::DiskStalled { .. } => {
                saving.checkpoints.disk_limit().saturating_mul(1 << doublings.min(16))
            }
            _ => Duration::ZERO,
        };
        if !early {
            saving.again_after = Instant::now().checked_add(pause);
        }
        let (failures, again_at, pause_s) = (saving.failures, saving.again_at, pause.as_secs_f64());
        self.notify(observer, &Event::SaveFailed { step, error: &error, failures, failures_max, again_at, pause_s })
    }

    fn test(
        &mut self,
        summary: &mut SummaryBuilder,
        observer: &mut Observer<'_>,
    ) -> Result<Option<EpochTotals>, TrainError> {
        let Some(loader) = &self.test else { return Ok(None) };
        let stop = &mut self.stop;
        let totals = evaluate_all(self.pipeline, loader, |pipeline, outcome| {
            summary.set_links(outcome);
            observer(&Event::TestStepDone { outcome }, &mut RunControl { pipeline, stop })?;
            Ok(if *stop { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        })?;
        Ok(Some(totals))
    }
}

/// Checks the options of tests: how often, and what they choose the best epoch by.
fn check_tests(options: &TrainOptions, tests: bool) -> Result<(), TrainError> {
    let lacks = |option, needs: &str| Err(TrainError::Best { option, needs: needs.to_owned() });
    if options.test_every == 0 {
        return lacks("`TrainOptions::test_every`", "expected 1 epoch or more, got 0");
    }
    match (options.best, options.patience) {
        (Some(_), _) if !tests => {
            lacks("`TrainOptions::best`", "it compares the tests of the epochs, so the trainer needs test data")
        }
        (None, Some(_)) => lacks("`TrainOptions::patience`", "set `TrainOptions::best`, the metric that must improve"),
        (_, Some(0)) => lacks("`TrainOptions::patience`", "expected 1 epoch or more, got 0"),
        _ => Ok(()),
    }
}

fn no_metric(metric: TestMetric) -> TrainError {
    let needs = format!("the loss of this model gives no {}: compare the loss instead", metric.name());
    TrainError::Best { option: "`TrainOptions::best`", needs }
}

/// The norm that clipping measures is not finite one step before the loss is not.
fn check_finite(step: u64, outcome: &StepOutcome) -> Result<(), TrainError> {
    let norm = outcome.gradient_norm.filter(|norm| !norm.is_finite());
    match norm.or(Some(outcome.loss)).filter(|figure| !figure.is_finite()) {
        Some(loss) => Err(TrainError::Diverged { step, loss }),
        None => Ok(()),
    }
}

/// Decides when to warn of exploding weights: once per run.
#[derive(Default)]
struct ExplosionWarning {
    given: bool,
}

impl ExplosionWarning {
    /// The value to warn of, if there has been no warning yet. NaN needs no warning: the next loss is NaN, which ends the
    /// run.
    fn check(&mut self, parameter_max: Option<f64>) -> Option<f64> {
        let largest = parameter_max.filter(|&largest| has_diverged(largest) && !largest.is_nan() && !self.given)?;
        self.given = true;
        Some(largest)
    }
}

/// A batch, and how long it took to load.
struct TimedBatch<T> {
    batch: T,
    /// When the trainer asked the loader for it.
    requested: Instant,
    /// Seconds until the loader returned it.
    loading_s: f64,
}

/// Batches with their loading times.
struct TimedBatches<I>(I);

impl<T, E, I: Iterator<Item = Result<T, E>>> Iterator for TimedBatches<I> {
    type Item = Result<TimedBatch<T>, E>;

    fn next(&mut self) -> Option<Self::Item> {
        let requested = Instant::now();
        let batch = self.0.next()?;
        Some(batch.map(|batch| TimedBatch { batch, requested, loading_s: requested.elapsed().as_secs_f64() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exploding_weights_are_reported_once() {
        let mut warning = ExplosionWarning::default();
        let reported = [None, Some(1e6), Some(f64::NAN), Some(1.1e6), None, Some(1e15)].map(|max| warning.check(max));
        assert_eq!(reported, [None, None, None, Some(1.1e6), None, None]);
    }
}
