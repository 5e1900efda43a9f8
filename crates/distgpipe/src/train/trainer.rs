//! Runs a pipeline over epochs of data and tells what happened. Progress bars, log files and tables are observers of
//! the same events, and the [`RunSummary`] is one more reader of them.

use crate::checkpoint::{Checkpoint, CheckpointError, Checkpoints};
use crate::codecs::Codecs;
use crate::data::{DataError, Epoch, Loader};
use crate::metrics::ClassCounts;
use crate::pipeline::{Pipeline, StepError, StepOutcome};
use crate::rate::RateSchedule;
use crate::trace::{Phase, PhaseTimes};
use crate::transport::{Cut, CutTraffic};
use crate::update::Accumulation;
use distgpipe_core::schedule::Plan;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;
use tch::Tensor;

/// Why training ended before its time.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// A batch could not be loaded.
    #[error("loading: {0}")]
    Data(#[from] DataError),
    /// A step failed.
    #[error(transparent)]
    Step(#[from] StepError),
    /// The loss is no number any more.
    #[error("the loss or the gradients' norm of step {} is {loss}: lower the learning rate (--lr) or clip gradients (--clip-norm); if it is the first step since weights or a checkpoint were loaded, go back to earlier ones", step + 1)]
    Diverged {
        /// The step, from 0.
        step: u64,
        /// Its loss.
        loss: f64,
    },
    /// The batches are too short for the plan.
    #[error("expected batches of at least {micro_batches} rows, one per micro-batch of each replica, got one of {rows}: use larger batches (--batch), fewer micro-batches (--chunks) or fewer --replicas")]
    TooFewRows {
        /// Micro-batches of all replicas.
        micro_batches: usize,
        /// Rows of the shortest training batch.
        rows: usize,
    },
    /// A step to capture that will not come.
    #[error("expected a step to capture (--capture-step) from 1 to the run's last, {steps}; got {step}")]
    NoSuchStep {
        /// Which, from 1.
        step: u64,
        /// How many there are.
        steps: u64,
    },
    /// A checkpoint could not be written or gone on from.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// An observer could not go on.
    #[error("writing what happened: {0}")]
    Observer(#[from] std::io::Error),
}

/// How to train.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrainOptions {
    /// How often the data is gone through.
    pub epochs: u64,
    /// Ends after so many steps, if that is sooner.
    pub steps_max: Option<u64>,
    /// The largest learning rate.
    pub learning_rate: f64,
    /// How it rises and falls.
    pub rate: RateSchedule,
    /// Batches to an update of the parameters; fewer at the end of an epoch.
    pub accumulate: u64,
    /// The largest norm of all gradients together that an update is made with.
    pub clip_norm: Option<f64>,
    /// Steps at the start that times and speeds leave out: libtorch plans its kernels and memory then.
    pub warm_up_steps: u64,
    /// Of which step the observer is told what crossed the links.
    pub capture: Capture,
}

impl Default for TrainOptions {
    fn default() -> Self {
        TrainOptions {
            epochs: 1,
            steps_max: None,
            learning_rate: 0.01,
            rate: RateSchedule::default(),
            accumulate: 1,
            clip_norm: None,
            warm_up_steps: 2,
            capture: Capture::Nothing,
        }
    }
}

/// Of which step what crosses the links is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Capture {
    /// Of none.
    #[default]
    Nothing,
    /// Of the last one.
    LastStep,
    /// Of this one, from 0.
    Step(u64),
}

/// What happens.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A training step is done.
    StepDone(&'a StepDone<'a>),
    /// A batch of the test data is done.
    TestStepDone {
        /// What came of it.
        outcome: &'a StepOutcome,
    },
    /// What a step sent over links, before any codec; comes before that step is done.
    Captured {
        /// The step, from 0 over all epochs.
        step: u64,
        /// By name; see [`Pipeline::captured`].
        tensors: &'a BTreeMap<String, Tensor>,
    },
    /// An epoch is done, its test included.
    EpochDone(&'a EpochSummary),
    /// A checkpoint is on the disk.
    Saved {
        /// Steps that are behind it.
        step: u64,
        /// Where it is.
        path: &'a Path,
    },
}

/// A training step.
#[derive(Debug)]
pub struct StepDone<'a> {
    /// The epoch, from 0.
    pub epoch: u64,
    /// The step, from 0 over all epochs.
    pub step: u64,
    /// Training steps of the whole run.
    pub steps: u64,
    /// The rate it was made with.
    pub learning_rate: f64,
    /// How long the batch was waited for.
    pub loading_s: f64,
    /// From asking for the batch to the last report.
    pub seconds: f64,
    /// What came of it.
    pub outcome: &'a StepOutcome,
}

/// Somebody who wants to know. A closure over events is one.
pub trait Observer {
    /// Something has happened. An error ends the run.
    fn on(&mut self, event: &Event<'_>) -> std::io::Result<()>;
}

impl<F: FnMut(&Event<'_>) -> std::io::Result<()>> Observer for F {
    fn on(&mut self, event: &Event<'_>) -> std::io::Result<()> {
        self(event)
    }
}

/// An epoch in figures.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EpochSummary {
    /// From 0.
    pub epoch: u64,
    /// Training steps.
    pub steps: u64,
    /// Mean over the rows, while they were being learned.
    pub train_loss: f64,
    /// The share of right rows, while they were being learned.
    pub train_accuracy: Option<f64>,
    /// Mean over the rows of the test data.
    pub test_loss: Option<f64>,
    /// The share of right rows of the test data.
    pub test_accuracy: Option<f64>,
    /// How many classes the test data has.
    pub test_classes: Option<usize>,
    /// Of class 1 where there are two classes, else the mean over the classes.
    pub test_f1: Option<f64>,
    /// The Matthews correlation of predictions and classes.
    pub test_matthews: Option<f64>,
    /// Rows over time, loading included, testing not.
    pub samples_per_s: f64,
    /// Of training.
    pub train_s: f64,
    /// Of testing.
    pub test_s: f64,
}

/// What a worker did in the measured steps.
#[derive(Clone, Debug, Serialize)]
pub struct WorkerSummary {
    /// Its name.
    pub name: String,
    /// Seconds per phase.
    pub phases_s: BTreeMap<&'static str, f64>,
    /// Seconds in steps, whatever it did in them.
    pub steps_s: f64,
    /// The most bytes that its tensors held at once; on a GPU, those of all workers on it.
    pub peak_bytes: u64,
    /// What the GPU's allocator took from the device for them at the most; absent on a CPU.
    pub reserved_bytes: Option<u64>,
}

/// What one direction of a link has carried in the whole run.
#[derive(Clone, Debug, Serialize)]
pub struct LinkSummary {
    /// The sending worker.
    pub from: String,
    /// The receiving worker.
    pub to: String,
    /// Messages.
    pub messages: u64,
    /// Bytes of the tensors as they lie in memory.
    pub payload_bytes: u64,
    /// Bytes that the socket carried, headers included; 0 between threads.
    pub wire_bytes: u64,
    /// Time spent encoding and writing.
    pub busy_s: f64,
    /// Wire bytes over the time spent writing them; absent between threads.
    pub bytes_per_s: Option<f64>,
    /// What it carried from partition to partition.
    pub cuts: Vec<CutSummary>,
}

/// What was carried from one partition to another in the whole run.
#[derive(Clone, Debug, Serialize)]
pub struct CutSummary {
    /// From where to where.
    #[serde(flatten)]
    pub cut: Cut,
    /// How it was encoded.
    pub codec: String,
    /// Tensors.
    pub tensors: u64,
    /// Their bytes as they lie in memory.
    pub raw_bytes: u64,
    /// Their bytes as encoded, frame headers included; 0 where they moved between threads as they were.
    pub wire_bytes: u64,
    /// Raw over wire bytes; absent where nothing was encoded.
    pub ratio: Option<f64>,
    /// Time spent encoding.
    pub encode_ms: f64,
    /// Time spent decoding.
    pub decode_ms: f64,
    /// Tensors that went raw although there is a codec: refused, in the warm-up, or in a raw evaluation.
    pub sent_raw: u64,
    /// Why tensors were refused: the first of each kind of reason.
    pub refusals: BTreeMap<String, String>,
}

/// A run in figures.
#[derive(Clone, Debug, Serialize)]
pub struct RunSummary {
    /// Epoch by epoch.
    pub epochs: Vec<EpochSummary>,
    /// How many steps were behind it when it went on from a checkpoint. Their epochs are in `epochs`; everything below is
    /// without them.
    pub resumed_at: Option<u64>,
    /// Training steps.
    pub steps: u64,
    /// Those of them that times and speeds leave out.
    pub warm_up_steps: u64,
    /// Rows over time of the median step; absent if no step was measured.
    pub samples_per_s_median: Option<f64>,
    /// Rows of all measured steps over their time.
    pub samples_per_s_mean: Option<f64>,
    /// Of training and testing.
    pub seconds: f64,
    /// How long batches were waited for.
    pub loading_s: f64,
    /// By worker number.
    pub workers: Vec<WorkerSummary>,
    /// Both directions of each.
    pub links: Vec<LinkSummary>,
}

impl RunSummary {
    /// The last epoch's, if there was one with a test.
    pub fn test_accuracy(&self) -> Option<f64> {
        self.epochs.last().and_then(|epoch| epoch.test_accuracy)
    }
}

/// Trains a pipeline.
///
/// ```no_run
/// use distgpipe::data::digits::Part;
/// use distgpipe::data::{Digits, Loader, LoaderOptions};
/// use distgpipe::models::Mlp;
/// use distgpipe::trainer::{Event, TrainOptions, Trainer};
/// use distgpipe::Pipeline;
/// use std::sync::Arc;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut pipeline = Pipeline::builder(Mlp::default().model()?).balance([2, 2]).micro_batches(4).build()?;
/// let digits = Digits::new(Part::Train, Default::default())?;
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
    steps: u64,
    capture: Option<u64>,
    progress: Progress,
    resumed_at: Option<u64>,
    saving: Option<Saving<'a>>,
}

/// How far a run is: where it goes on when it is resumed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Steps that are behind it, over all epochs.
    pub step: u64,
    /// The epoch, from 0.
    pub epoch: u64,
    /// Batches of the epoch that are done.
    pub batch: u64,
    /// Batches of every epoch.
    pub epoch_batches: u64,
    totals: Totals,
    epochs: Vec<EpochSummary>,
}

/// Where and when a run is saved.
struct Saving<'a> {
    checkpoints: &'a Checkpoints,
    every: SaveEvery,
    settings: serde_json::Value,
    /// The step of the last one.
    last: u64,
}

/// When a checkpoint is written, besides the end of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SaveEvery {
    /// After each epoch and its test.
    Epoch,
    /// After so many steps.
    Steps(u64),
}

impl<'a> Trainer<'a> {
    /// Checks that the data fits the plan.
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
        Ok(Trainer { pipeline, train, test, options, steps, capture, progress, resumed_at: None, saving: None })
    }

    /// Goes on from a checkpoint, as if the run had not been stopped.
    pub fn resume(mut self, checkpoint: &Checkpoint) -> Result<Self, CheckpointError> {
        let (was, here) = (&checkpoint.about().progress, self.progress.epoch_batches);
        if was.epoch_batches != here {
            return Err(CheckpointError::Differs {
                what: "batches per epoch",
                expected: was.epoch_batches.to_string(),
                got: here.to_string(),
            });
        }
        // A shorter run may have ended, and been saved, where this one would be in the middle of an update.
        if was.step < self.steps && !self.accumulation().part(was.step).is_first() {
            return Err(CheckpointError::WithinUpdate { step: was.step });
        }
        checkpoint.load(self.pipeline)?;
        self.resumed_at = Some(was.step);
        self.progress = was.clone();
        if let Some(saving) = &mut self.saving {
            saving.last = was.step;
        }
        Ok(self)
    }

    /// Writes checkpoints; `settings` is kept in them for whoever resumes.
    pub fn save_to(mut self, checkpoints: &'a Checkpoints, every: SaveEvery, settings: serde_json::Value) -> Self {
        self.saving = Some(Saving { checkpoints, every, settings, last: self.progress.step });
        self
    }

    /// Training steps of the whole run.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Trains, tests after every epoch, and sums up.
    pub fn run(mut self, observer: &mut dyn Observer) -> Result<RunSummary, TrainError> {
        let start = Instant::now();
        if let (Some(saving), Some(step)) = (&self.saving, self.resumed_at) {
            saving.checkpoints.set_aside_after(step)?;
        }
        let mut gathered = Gathered::new(&self);
        let accumulation = self.accumulation();
        self.pipeline.set_clip_norm(self.options.clip_norm);
        let mut now = std::mem::take(&mut self.progress);
        // An epoch that the end of a run had cut off is tested again.
        let mut batches = (now.step < self.steps || now.batch > 0).then(|| self.batches(&now));
        while let Some(epoch) = batches.take() {
            let left = usize::try_from(self.steps.saturating_sub(now.step)).unwrap_or(usize::MAX);
            for batch in AsksTimed(epoch).take(left) {
                let (batch, asked, loading_s) = batch?;
                let step = now.step;
                let (update, updates) = (accumulation.update(step), accumulation.updates());
                let learning_rate = self.options.learning_rate * self.options.rate.factor(update, updates);
                self.pipeline.set_learning_rate(learning_rate);
                let capture = self.capture == Some(step);
                if capture {
                    self.pipeline.capture_next();
                }
                let outcome = self.pipeline.train_part(&batch, accumulation.part(step))?;
                if capture {
                    observer.on(&Event::Captured { step, tensors: &self.pipeline.captured()? })?;
                }
                // What clipping saw is no number before the loss is none.
                let norm = outcome.gradient_norm.filter(|norm| !norm.is_finite());
                if let Some(loss) = norm.or(Some(outcome.loss)).filter(|figure| !figure.is_finite()) {
                    return Err(TrainError::Diverged { step, loss });
                }
                let seconds = asked.elapsed().as_secs_f64();
                now.totals.add(&outcome, seconds);
                let done = StepDone {
                    epoch: now.epoch,
                    step,
                    steps: self.steps,
                    learning_rate,
                    loading_s,
                    seconds,
                    outcome: &outcome,
                };
                gathered.add(&done);
                observer.on(&Event::StepDone(&done))?;
                now.step += 1;
                now.batch += 1;
                // A whole epoch is saved with its test. One that the end of the run cuts off is saved as it is, so that a
                // longer run can go on with it. Gradients that wait for more are not saved.
                if now.batch < now.epoch_batches && accumulation.part(step).is_last() {
                    self.save(&now, observer)?;
                }
            }
            let next = Progress { epoch: now.epoch + 1, batch: 0, ..now.clone() };
            // The next epoch's first batches are loaded while this one is tested.
            batches = (now.step < self.steps).then(|| self.batches(&next));
            let test = self.test(&mut gathered, observer)?;
            if let Some(loss) = test.as_ref().map(Totals::loss).filter(|loss| !loss.is_finite()) {
                return Err(TrainError::Diverged { step: now.step.saturating_sub(1), loss });
            }
            let summary = now.totals.epoch(now.epoch, test);
            observer.on(&Event::EpochDone(&summary))?;
            let whole = now.batch == now.epoch_batches;
            now = Progress { totals: Totals::default(), ..next };
            now.epochs.push(summary);
            if whole {
                self.save(&now, observer)?;
            }
        }
        Ok(gathered.finish(now.epochs, start.elapsed().as_secs_f64()))
    }

    fn accumulation(&self) -> Accumulation {
        Accumulation { every: self.options.accumulate, epoch_steps: self.train.batches() as u64, steps: self.steps }
    }

    fn batches(&self, from: &Progress) -> Epoch {
        self.train.epoch_from(from.epoch, usize::try_from(from.batch).unwrap_or(usize::MAX))
    }

    /// Writes a checkpoint if it is time.
    fn save(&mut self, now: &Progress, observer: &mut dyn Observer) -> Result<(), TrainError> {
        let Some(saving) = &mut self.saving else { return Ok(()) };
        let due = match saving.every {
            SaveEvery::Epoch => now.batch == 0,
            SaveEvery::Steps(steps) => now.step - saving.last >= steps,
        };
        if due || now.step == self.steps {
            let path = saving.checkpoints.save(self.pipeline, now, &saving.settings)?;
            saving.last = now.step;
            observer.on(&Event::Saved { step: now.step, path: &path })?;
        }
        Ok(())
    }

    fn test(&mut self, gathered: &mut Gathered, observer: &mut dyn Observer) -> Result<Option<Totals>, TrainError> {
        let Some(loader) = &self.test else { return Ok(None) };
        let mut totals = Totals { data_classes: loader.data().classes(), ..Totals::default() };
        for batch in AsksTimed(loader.epoch(0)) {
            let (batch, asked, _) = batch?;
            let outcome = self.pipeline.evaluate(&batch)?;
            totals.add(&outcome, asked.elapsed().as_secs_f64());
            gathered.links(&outcome);
            observer.on(&Event::TestStepDone { outcome: &outcome })?;
        }
        Ok(Some(totals))
    }
}

/// Batches, with when each was asked for and how long it took to come.
struct AsksTimed<I>(I);

impl<T, E, I: Iterator<Item = Result<T, E>>> Iterator for AsksTimed<I> {
    type Item = Result<(T, Instant, f64), E>;

    fn next(&mut self) -> Option<Self::Item> {
        let asked = Instant::now();
        let batch = self.0.next()?;
        Some(batch.map(|batch| (batch, asked, asked.elapsed().as_secs_f64())))
    }
}

/// Sums over an epoch.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Totals {
    steps: u64,
    rows: usize,
    loss_sum: f64,
    correct: Option<u64>,
    /// Of the data set.
    data_classes: Option<usize>,
    classes: Option<ClassCounts>,
    seconds: f64,
}

impl Totals {
    fn add(&mut self, outcome: &StepOutcome, seconds: f64) {
        self.steps += 1;
        self.rows += outcome.rows;
        self.loss_sum += outcome.loss * outcome.rows as f64;
        self.correct = outcome.correct.map(|correct| correct + self.correct.unwrap_or(0));
        if let Some(classes) = &outcome.classes {
            self.classes.get_or_insert_default().add(classes);
        }
        self.seconds += seconds;
    }

    fn f1(&self) -> Option<f64> {
        self.classes.as_ref().map(|counts| counts.f1(self.data_classes.unwrap_or(counts.actual.len())))
    }

    fn matthews(&self) -> Option<f64> {
        self.classes.as_ref().map(ClassCounts::matthews)
    }

    fn per_row(&self, sum: f64) -> f64 {
        sum / self.rows.max(1) as f64
    }

    fn loss(&self) -> f64 {
        self.per_row(self.loss_sum)
    }

    fn accuracy(&self) -> Option<f64> {
        self.correct.map(|correct| self.per_row(correct as f64))
    }

    fn epoch(&self, epoch: u64, test: Option<Totals>) -> EpochSummary {
        EpochSummary {
            epoch,
            steps: self.steps,
            train_loss: self.loss(),
            train_accuracy: self.accuracy(),
            test_loss: test.as_ref().map(Totals::loss),
            test_accuracy: test.as_ref().and_then(Totals::accuracy),
            test_classes: test.as_ref().and_then(|test| test.data_classes),
            test_f1: test.as_ref().and_then(Totals::f1),
            test_matthews: test.as_ref().and_then(Totals::matthews),
            samples_per_s: rate(self.rows, self.seconds).unwrap_or(0.0),
            train_s: self.seconds,
            test_s: test.map_or(0.0, |test| test.seconds),
        }
    }
}

fn rate(rows: usize, seconds: f64) -> Option<f64> {
    (seconds > 0.0).then(|| rows as f64 / seconds)
}

/// The summary while it is being made.
struct Gathered {
    summary: RunSummary,
    plan: Plan,
    codecs: Codecs,
    phases: Vec<PhaseTimes>,
    /// Rows and seconds of each measured step.
    measured: Vec<(usize, f64)>,
}

impl Gathered {
    fn new(trainer: &Trainer<'_>) -> Self {
        let roster = trainer.pipeline.roster();
        let worker = |worker| WorkerSummary {
            name: roster.name(worker),
            phases_s: BTreeMap::new(),
            steps_s: 0.0,
            peak_bytes: 0,
            reserved_bytes: None,
        };
        let summary = RunSummary {
            epochs: Vec::new(),
            resumed_at: trainer.resumed_at,
            steps: 0,
            warm_up_steps: trainer.options.warm_up_steps.min(trainer.steps.saturating_sub(trainer.progress.step)),
            samples_per_s_median: None,
            samples_per_s_mean: None,
            seconds: 0.0,
            loading_s: 0.0,
            workers: roster.members().map(worker).collect(),
            links: Vec::new(),
        };
        Gathered {
            summary,
            plan: trainer.pipeline.plan().clone(),
            codecs: trainer.pipeline.codecs().clone(),
            phases: vec![PhaseTimes::default(); roster.size()],
            measured: Vec::new(),
        }
    }

    fn add(&mut self, done: &StepDone<'_>) {
        let measured = self.summary.steps >= self.summary.warm_up_steps;
        self.summary.steps += 1;
        for (i, worker) in done.outcome.workers.iter().enumerate() {
            let summary = &mut self.summary.workers[i];
            summary.peak_bytes = summary.peak_bytes.max(worker.report.peak_bytes);
            summary.reserved_bytes = summary.reserved_bytes.max(worker.report.reserved_bytes);
            if measured {
                summary.steps_s += worker.report.step_ns as f64 / 1e9;
                self.phases[i] = self.phases[i].plus(&worker.report.phases);
            }
        }
        if measured {
            self.summary.loading_s += done.loading_s;
            self.measured.push((done.outcome.rows, done.seconds));
        }
        self.links(done.outcome);
    }

    /// The counters run since the start, so the last reading is the sum.
    fn links(&mut self, outcome: &StepOutcome) {
        self.summary.links.clear();
        for (from, worker) in outcome.workers.iter().enumerate() {
            for (to, traffic) in &worker.report.links {
                let busy_s = traffic.busy_ns as f64 / 1e9;
                let encoding_s = traffic.sent.iter().map(|(_, sent)| sent.encode_ns).sum::<u64>() as f64 / 1e9;
                let writing_s = busy_s - encoding_s;
                let there = outcome.workers.get(to.index()).map(|worker| &worker.report);
                let back = there.and_then(|report| report.links.iter().find(|(peer, _)| peer.index() == from));
                let decoded = back.map_or(&[][..], |(_, traffic)| &traffic.decoded_ns);
                self.summary.links.push(LinkSummary {
                    from: worker.name.clone(),
                    to: self.summary.workers.get(to.index()).map(|worker| worker.name.clone()).unwrap_or_default(),
                    messages: traffic.messages,
                    payload_bytes: traffic.payload_bytes,
                    wire_bytes: traffic.wire_bytes,
                    busy_s,
                    bytes_per_s: (traffic.wire_bytes > 0 && writing_s > 0.0)
                        .then(|| traffic.wire_bytes as f64 / writing_s),
                    cuts: traffic.sent.iter().map(|(cut, sent)| self.cut(*cut, sent, decoded)).collect(),
                });
            }
        }
    }

    fn cut(&self, cut: Cut, sent: &CutTraffic, decoded: &[(Cut, u64)]) -> CutSummary {
        let decode_ns = decoded.iter().find(|(other, _)| *other == cut).map_or(0, |(_, ns)| *ns);
        CutSummary {
            cut,
            codec: self.codecs.of(&self.plan, cut.pass, cut.from, cut.to).to_string(),
            tensors: sent.tensors,
            raw_bytes: sent.raw_bytes,
            wire_bytes: sent.wire_bytes,
            ratio: (sent.wire_bytes > 0).then(|| sent.raw_bytes as f64 / sent.wire_bytes as f64),
            encode_ms: sent.encode_ns as f64 / 1e6,
            decode_ms: decode_ns as f64 / 1e6,
            sent_raw: sent.sent_raw,
            refusals: sent.refusals.clone(),
        }
    }

    fn finish(mut self, epochs: Vec<EpochSummary>, seconds: f64) -> RunSummary {
        (self.summary.epochs, self.summary.seconds) = (epochs, seconds);
        for (worker, phases) in self.summary.workers.iter_mut().zip(&self.phases) {
            worker.phases_s = Phase::ALL.iter().map(|&phase| (phase.name(), phases.of(phase) as f64 / 1e9)).collect();
        }
        let (rows, time) = self.measured.iter().fold((0, 0.0), |(r, s), (rows, seconds)| (r + rows, s + seconds));
        self.summary.samples_per_s_mean = rate(rows, time);
        let mut rates: Vec<f64> = self.measured.iter().filter_map(|&(rows, seconds)| rate(rows, seconds)).collect();
        rates.sort_by(f64::total_cmp);
        self.summary.samples_per_s_median = rates.get(rates.len() / 2).copied();
        self.summary
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::digits::Part;
    use crate::data::{Digits, LastBatch, LoaderOptions};
    use crate::models::Mlp;
    use std::sync::Arc;

    fn loader(options: LoaderOptions) -> Loader {
        Loader::new(Arc::new(Digits::new(Part::Train, Default::default()).unwrap()), options).unwrap()
    }

    fn pipeline(micro_batches: usize) -> Pipeline {
        let model = Mlp { hidden: vec![8], ..Mlp::default() }.model().unwrap();
        Pipeline::builder(model).balance([1, 1]).place("a,b").micro_batches(micro_batches).build().unwrap()
    }

    fn options(epochs: u64, steps_max: Option<u64>) -> TrainOptions {
        TrainOptions { epochs, steps_max, ..TrainOptions::default() }
    }

    #[test]
    fn the_summary_is_what_the_events_said() {
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
                    Event::Captured { .. } | Event::Saved { .. } => panic!("nobody asked"),
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
    fn a_loss_that_is_no_number_ends_the_run() {
        let mut pipeline = pipeline(2);
        let wild = TrainOptions { learning_rate: 1e30, ..options(1, None) };
        let trainer = Trainer::new(&mut pipeline, loader(LoaderOptions::training(100, 0)), None, wild).unwrap();
        let error = trainer.run(&mut |_: &Event<'_>| Ok(()));
        assert!(matches!(error, Err(TrainError::Diverged { .. })), "{:?}", error.map(|summary| summary.epochs));
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
