//! Trains a pipeline over epochs of data: steps, tests after each epoch, writes checkpoints, and reports events.

use crate::data::{DataError, Epoch, Loader};
use crate::driver::pipeline::{Batch, Pipeline, StepError, StepOutcome};
use crate::runtime::accumulation::Accumulation;
use crate::runtime::divergence::has_diverged;
use crate::train::checkpoint::{Checkpoint, CheckpointError, Checkpoints};
use crate::train::events::{Event, Observer, StepDone};
use crate::train::options::{Capture, SaveEvery, TrainOptions};
use crate::train::summary::{EpochSummary, EpochTotals, RunSummary, SummaryBuilder};
use serde::{Deserialize, Serialize};
use std::time::Instant;

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
/// let summary = Trainer::new(&mut pipeline, train, None, TrainOptions::default())?.run(&mut |event: &Event<'_>| {
///     if let Event::StepDone(done) = event {
///         println!("step {}: loss {:.3}", done.step, done.outcome.loss);
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
    saving: Option<Saving<'a>>,
    explosion: ExplosionWarning,
}

/// How much of a run is done. A checkpoint keeps it, and the run resumes from it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Steps done, over all epochs.
    pub step: u64,
    /// The epoch in progress, from 0.
    pub epoch: u64,
    /// Batches of the epoch that are done.
    pub batch: u64,
    /// Batches of every epoch.
    pub epoch_batches: u64,
    totals: EpochTotals,
    epochs: Vec<EpochSummary>,
}

impl Progress {
    /// The start of the next epoch.
    fn next_epoch(&self) -> Progress {
        Progress { epoch: self.epoch + 1, batch: 0, totals: EpochTotals::default(), ..self.clone() }
    }
}

/// Where and when to write checkpoints.
struct Saving<'a> {
    checkpoints: &'a Checkpoints,
    every: SaveEvery,
    settings: serde_json::Value,
    /// The step of the last checkpoint.
    last: u64,
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
        let steps = options.epochs.saturating_mul(train.batches() as u64).min(options.steps_max.unwrap_or(u64::MAX));
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
            explosion: ExplosionWarning::default(),
        })
    }

    /// Loads a checkpoint, so that [`run`](Self::run) continues the run that wrote it. The model, the seed, the optimizer
    /// and the number of batches per epoch must be those of that run.
    pub fn resume(mut self, checkpoint: &Checkpoint) -> Result<Self, CheckpointError> {
        let (saved, here) = (&checkpoint.manifest().progress, self.progress.epoch_batches);
        if saved.epoch_batches != here {
            return Err(CheckpointError::Mismatch {
                what: "the number of batches per epoch",
                expected: saved.epoch_batches.to_string(),
                got: here.to_string(),
            });
        }
        // The last checkpoint of a shorter run may be at a step that is inside an update of this one.
        if saved.step < self.steps && !self.accumulation().part(saved.step).is_first() {
            return Err(CheckpointError::WithinUpdate { step: saved.step });
        }
        checkpoint.load(self.pipeline)?;
        self.resumed_at = Some(saved.step);
        self.progress = saved.clone();
        if let Some(saving) = &mut self.saving {
            saving.last = saved.step;
        }
        Ok(self)
    }

    /// Writes checkpoints into a folder. Each keeps a copy of `settings` for the caller; the trainer does not read it.
    pub fn save_to(mut self, checkpoints: &'a Checkpoints, every: SaveEvery, settings: serde_json::Value) -> Self {
        self.saving = Some(Saving { checkpoints, every, settings, last: self.progress.step });
        self
    }

    /// Training steps of the whole run, including those before the checkpoint it resumes from.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Trains to the end of the run, with a test after every epoch.
    pub fn run(mut self, observer: &mut dyn Observer) -> Result<RunSummary, TrainError> {
        let start = Instant::now();
        if let (Some(saving), Some(step)) = (&self.saving, self.resumed_at) {
            saving.checkpoints.retire_after(step)?;
        }
        let left = self.steps.saturating_sub(self.progress.step);
        let mut summary = SummaryBuilder::new(self.pipeline, self.resumed_at, self.options.warm_up_steps.min(left));
        // A run that ended inside an epoch saved that epoch without its test: test it again.
        let unfinished = left > 0 || self.progress.batch > 0;
        let mut batches = unfinished.then(|| self.batches(&self.progress));
        while let Some(epoch) = batches.take() {
            self.train_epoch(epoch, &mut summary, observer)?;
            let next = self.progress.next_epoch();
            // Created before the test, so that the loader prepares the first batches meanwhile.
            batches = (self.progress.step < self.steps).then(|| self.batches(&next));
            self.finish_epoch(next, &mut summary, observer)?;
        }
        Ok(summary.finish(self.progress.epochs, start.elapsed().as_secs_f64()))
    }

    /// Trains on the rest of an epoch, or to the last step of the run.
    fn train_epoch(
        &mut self,
        epoch: Epoch,
        summary: &mut SummaryBuilder,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        let left = usize::try_from(self.steps.saturating_sub(self.progress.step)).unwrap_or(usize::MAX);
        for batch in TimedBatches(epoch).take(left) {
            let step = self.progress.step;
            self.step(batch?, summary, observer)?;
            self.progress.step += 1;
            self.progress.batch += 1;
            // A whole epoch is saved after its test. One that the end of the run cuts short is saved as it is, so that a
            // longer run can continue it. Gradients of an update in progress are not saved.
            if self.progress.batch < self.progress.epoch_batches && self.accumulation().part(step).is_last() {
                self.save_if_due(observer)?;
            }
        }
        Ok(())
    }

    fn step(
        &mut self,
        timed: TimedBatch<Batch>,
        summary: &mut SummaryBuilder,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        let (step, accumulation) = (self.progress.step, self.accumulation());
        let factor = self.options.rate_schedule.factor(accumulation.update(step), accumulation.updates());
        let learning_rate = self.pipeline.learning_rate() * factor;
        let capture = self.capture == Some(step);
        if capture {
            self.pipeline.capture_next();
        }
        let outcome = self.pipeline.train_part_at(&timed.batch, accumulation.part(step), learning_rate)?;
        if capture {
            observer.on(&Event::Captured { step, tensors: &self.pipeline.captured()? })?;
        }
        check_finite(step, &outcome)?;
        if let Some(largest) = self.explosion.check(outcome.parameter_max()) {
            observer.on(&Event::WeightsExploding { step, largest })?;
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
        Ok(observer.on(&Event::StepDone(&done))?)
    }

    /// Tests, reports the epoch and moves on to the next.
    fn finish_epoch(
        &mut self,
        next: Progress,
        summary: &mut SummaryBuilder,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        let test = self.test(summary, observer)?;
        if let Some(loss) = test.as_ref().map(EpochTotals::loss).filter(|loss| !loss.is_finite()) {
            return Err(TrainError::Diverged { step: self.progress.step.saturating_sub(1), loss });
        }
        let epoch = self.progress.totals.summary(self.progress.epoch, test);
        observer.on(&Event::EpochDone(&epoch))?;
        let whole = self.progress.batch == self.progress.epoch_batches;
        self.progress = next;
        self.progress.epochs.push(epoch);
        if whole {
            self.save_if_due(observer)?;
        }
        Ok(())
    }

    fn accumulation(&self) -> Accumulation {
        Accumulation { every: self.options.accumulate, epoch_steps: self.train.batches() as u64, steps: self.steps }
    }

    fn batches(&self, from: &Progress) -> Epoch {
        self.train.epoch_from(from.epoch, usize::try_from(from.batch).unwrap_or(usize::MAX))
    }

    fn save_if_due(&mut self, observer: &mut dyn Observer) -> Result<(), TrainError> {
        let Some(saving) = &mut self.saving else { return Ok(()) };
        let step = self.progress.step;
        let due = match saving.every {
            SaveEvery::Epoch => self.progress.batch == 0,
            SaveEvery::Steps(steps) => step - saving.last >= steps,
        };
        if due || step == self.steps {
            let path = saving.checkpoints.save(self.pipeline, &self.progress, &saving.settings)?;
            saving.last = step;
            observer.on(&Event::Saved { step, path: &path })?;
        }
        Ok(())
    }

    fn test(
        &mut self,
        summary: &mut SummaryBuilder,
        observer: &mut dyn Observer,
    ) -> Result<Option<EpochTotals>, TrainError> {
        let Some(loader) = &self.test else { return Ok(None) };
        let mut totals = EpochTotals::new(loader.data().classes());
        for timed in TimedBatches(loader.epoch(0)) {
            let timed = timed?;
            let outcome = self.pipeline.evaluate(&timed.batch)?;
            totals.add(&outcome, timed.requested.elapsed().as_secs_f64());
            summary.set_links(&outcome);
            observer.on(&Event::TestStepDone { outcome: &outcome })?;
        }
        Ok(Some(totals))
    }
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
    use crate::data::Split;
    use crate::data::{Digits, LastBatch, LoaderOptions};
    use crate::model::zoo::Mlp;
    use crate::train::learning_rate::Decay;
    use std::sync::Arc;

    fn loader(options: LoaderOptions) -> Loader {
        Loader::new(Arc::new(Digits::new(Split::Train, Default::default()).unwrap()), options).unwrap()
    }

    fn pipeline(micro_batches: usize) -> Pipeline {
        let model = Mlp { hidden: vec![8], ..Mlp::default() }.model().unwrap();
        let builder = Pipeline::builder(model).device(crate::engine::Device::Cpu).threads(1);
        builder.balance([1, 1]).place("a,b").micro_batches(micro_batches).build().unwrap()
    }

    fn options(epochs: u64, steps_max: Option<u64>) -> TrainOptions {
        TrainOptions { epochs, steps_max, ..TrainOptions::default() }
    }

    #[test]
    fn the_summary_agrees_with_the_events() {
        let mut pipeline = pipeline(4);
        let test = loader(LoaderOptions::testing(500));
        let trainer =
            Trainer::new(&mut pipeline, loader(LoaderOptions::training(100, 0)), Some(test), options(3, Some(20)))
                .unwrap();
        assert_eq!(trainer.steps(), 20);
        let (mut losses, mut epochs, mut tests) = (Vec::new(), 0, 0);
        let summary = trainer
            .run(&mut |event: &Event<'_>| {
                match event {
                    Event::StepDone(done) => {
                        assert_eq!(done.step, losses.len() as u64);
                        losses.push(done.outcome.loss);
                    }
                    Event::TestStepDone { .. } => tests += 1,
                    Event::EpochDone(_) => epochs += 1,
                    Event::Captured { .. } | Event::Saved { .. } | Event::WeightsExploding { .. } => {
                        panic!("unexpected {event:?}")
                    }
                }
                Ok(())
            })
            .unwrap();
        // 14 steps, then the 6 that are left; 3 test batches after each.
        assert_eq!((losses.len(), epochs, tests), (20, 2, 6));
        assert_eq!(summary.epochs.iter().map(|e| e.steps).collect::<Vec<_>>(), [14, 6]);
        let mean = losses[14..].iter().sum::<f64>() / 6.0;
        assert!((summary.epochs[1].train_loss - mean).abs() < 1e-12);
        assert_eq!((summary.steps, summary.warm_up_steps), (20, 2));
        assert!(summary.samples_per_s_median.is_some_and(|rate| rate > 0.0));
        assert_eq!(
            summary.links.iter().map(|l| (&l.from[..], &l.to[..])).collect::<Vec<_>>(),
            [("a", "b"), ("b", "a")]
        );
        // Every step, training or testing, sends each micro-batch once; only training sends gradients back.
        assert_eq!((summary.links[0].messages, summary.links[1].messages), (26 * 4, 20 * 4));
        // 100 rows of 8 values in each direction. Tests count in the traffic of the run, and not in that of a step.
        assert_eq!(summary.links.iter().map(|link| link.bytes_per_step).collect::<Vec<_>>(), [3200.0; 2]);
        assert!(summary.links[0].payload_bytes > 20 * 3200 && summary.links[1].payload_bytes == 20 * 3200);
        assert!(summary.links.iter().all(|link| link.delivered_bytes_per_s.is_none()), "threads have no link");
        assert!(summary.workers.iter().all(|w| w.phases_s["forward"] > 0.0 && w.peak_bytes > 0 && w.steps_s > 0.0));
    }

    #[test]
    fn batches_with_fewer_rows_than_micro_batches_are_refused_before_the_first_step() {
        let mut pipeline = pipeline(40);
        // 1437 % 100 = 37 rows would be left for the last batch.
        let kept = LoaderOptions { last: LastBatch::Keep, ..LoaderOptions::training(100, 0) };
        let error = Trainer::new(&mut pipeline, loader(kept), None, options(1, None)).err().unwrap();
        assert!(matches!(error, TrainError::TooFewRows { micro_batches: 40, rows: 37 }), "{error}");
        assert!(Trainer::new(&mut pipeline, loader(LoaderOptions::training(100, 0)), None, options(1, None)).is_ok());
    }

    /// Reports travel as JSON, which has no NaN; a loss of NaN once arrived as 0 and training went on.
    #[test]
    fn a_loss_of_nan_ends_the_run() {
        let mut pipeline = pipeline(2);
        pipeline.set_learning_rate(1e30);
        let trainer =
            Trainer::new(&mut pipeline, loader(LoaderOptions::training(100, 0)), None, options(1, None)).unwrap();
        let error = trainer.run(&mut |_: &Event<'_>| Ok(()));
        assert!(matches!(error, Err(TrainError::Diverged { .. })), "{:?}", error.map(|summary| summary.epochs));
    }

    /// The trainer once overwrote the rate that the pipeline was built with.
    #[test]
    fn the_schedule_multiplies_the_pipelines_learning_rate_and_leaves_it_as_it_is() {
        let mut pipeline = pipeline(2);
        pipeline.set_learning_rate(0.04);
        let linear = TrainOptions { rate_schedule: Decay::Linear.into(), ..options(1, Some(4)) };
        let trainer = Trainer::new(&mut pipeline, loader(LoaderOptions::training(100, 0)), None, linear).unwrap();
        let mut rates = Vec::new();
        trainer
            .run(&mut |event: &Event<'_>| {
                if let Event::StepDone(done) = event {
                    rates.push(done.learning_rate);
                }
                Ok(())
            })
            .unwrap();
        assert_eq!(rates, [0.04, 0.04 * 0.75, 0.04 * 0.5, 0.04 * 0.25]);
        assert_eq!(pipeline.learning_rate(), 0.04);
    }

    #[test]
    fn exploding_weights_are_reported_once() {
        let mut warning = ExplosionWarning::default();
        let reported = [None, Some(1e6), Some(f64::NAN), Some(1.1e6), None, Some(1e15)].map(|max| warning.check(max));
        assert_eq!(reported, [None, None, None, Some(1.1e6), None, None]);
    }

    #[test]
    fn an_observer_that_fails_ends_the_run() {
        let mut pipeline = pipeline(1);
        let trainer =
            Trainer::new(&mut pipeline, loader(LoaderOptions::training(100, 0)), None, options(1, None)).unwrap();
        let mut seen = 0;
        let error = trainer.run(&mut |_: &Event<'_>| {
            seen += 1;
            Err(std::io::Error::other("disk full"))
        });
        assert!(matches!(error, Err(TrainError::Observer(_))));
        assert_eq!(seen, 1);
    }
}
