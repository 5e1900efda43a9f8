//! The pipeline as a user holds it: built once, then stepped.

mod builder;
#[path = "pipeline/state_transfer.rs"]
mod state;

pub use builder::{BuildError, Builder};

use crate::codecs::Codecs;
use crate::engine;
use crate::failure::{Failure, Fault, POLL};
use crate::job::{forward_plan, Command, Purpose, Step, StepReport, Which};
use crate::launch::Team;
use crate::mailbox::{Message, Tag};
use crate::metrics::ClassCounts;
use crate::model::Model;
use crate::optim::Optim;
use crate::roster::Roster;
use crate::status::{blame, State};
use crate::trace::Span;
use crate::transport::{Timeouts, Traffic};
use crate::update::{clip_scale, global_norm, After, Exact, Part};
use crate::weights::WeightsError;
use distgpipe_core::balance::Found;
use distgpipe_core::microbatch::{MicroBatchError, MicroBatches};
use distgpipe_core::partition::Balance;
use distgpipe_core::schedule::Plan;
use distgpipe_core::wire::Kind;
use distgpipe_core::{MicroBatchId, PartitionId, WorkerId};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;
use tch::Tensor;

/// Rows of input and what should come out.
#[derive(Debug)]
pub struct Batch {
    /// The model's input tensors; the first dimension counts rows.
    pub inputs: Vec<Tensor>,
    /// Class numbers `[rows]`, or whatever the loss takes.
    pub target: Tensor,
    /// Which sample of the data set each row is, for codecs that remember samples; may be empty.
    pub samples: Vec<u64>,
}

impl Batch {
    /// A batch for a model with one input.
    pub fn new(input: Tensor, target: Tensor) -> Self {
        Batch { inputs: vec![input], target, samples: Vec::new() }
    }

    /// How many rows it has.
    pub fn rows(&self) -> usize {
        self.target.size().first().map_or(0, |&n| usize::try_from(n).unwrap_or(0))
    }
}

/// Why a step did not happen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    /// The batch is not what the model takes.
    #[error("the batch has {got}; the model takes {expected}")]
    Batch {
        /// What the model takes.
        expected: String,
        /// What it was given.
        got: String,
    },
    /// The learning rate is no number to learn with.
    #[error("the learning rate is {got}; it must be a finite number")]
    LearningRate {
        /// What it is.
        got: f64,
    },
    /// The norm to clip at is none.
    #[error("gradients are to be clipped at a norm of {got}; it must be a finite number above 0")]
    ClipNorm {
        /// What it is.
        got: f64,
    },
    /// The batch is not the one that the update needs next.
    #[error("the update needs batch {} of {} next, got {} of {}: finish the update that was begun", expected.index + 1, expected.of, got.index + 1, got.of)]
    Part {
        /// What comes next.
        expected: Part,
        /// What came.
        got: Part,
    },
    /// The batch cannot be cut into the plan's micro-batches.
    #[error(transparent)]
    MicroBatches(#[from] MicroBatchError),
    /// Tensors to load do not fit the model.
    #[error("cannot load: {0}")]
    Load(String),
    /// A file of weights cannot be read or written.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// A worker or link failed. The pipeline is of no more use; build a new one.
    #[error(transparent)]
    Failed(#[from] Failure),
}

/// What one worker did in a step.
#[derive(Clone, Debug)]
pub struct WorkerStep {
    /// Its name.
    pub name: String,
    /// Times, memory and links.
    pub report: StepReport,
}

/// What came of a step.
#[derive(Clone, Debug)]
pub struct StepOutcome {
    /// Rows of the batch.
    pub rows: usize,
    /// The mean loss over the rows.
    pub loss: f64,
    /// Rows whose class is right, for losses over classes.
    pub correct: Option<u64>,
    /// What each class was taken for, in evaluation with such a loss.
    pub classes: Option<ClassCounts>,
    /// The norm of all gradients before they were clipped, of a step that clipped them.
    pub gradient_norm: Option<f64>,
    /// From the first message to the last report.
    pub seconds: f64,
    /// Per worker.
    pub workers: Vec<WorkerStep>,
}

impl StepOutcome {
    /// The share of right rows.
    pub fn accuracy(&self) -> Option<f64> {
        self.correct.map(|c| c as f64 / self.rows.max(1) as f64)
    }

    /// What each link has carried since the run began: from, to, traffic.
    pub fn links(&self) -> Vec<(String, String, Traffic)> {
        let mut links = Vec::new();
        for worker in &self.workers {
            for (to, traffic) in &worker.report.links {
                if let Some(to) = self.workers.get(to.index()) {
                    links.push((worker.name.clone(), to.name.clone(), traffic.clone()));
                }
            }
        }
        links
    }

    /// The events of the step, if the pipeline traces.
    pub fn spans(&self) -> impl Iterator<Item = &Span> {
        self.workers.iter().flat_map(|w| &w.report.spans)
    }
}

/// A model cut into partitions that run on workers.
pub struct Pipeline {
    team: Team,
    roster: Arc<Roster>,
    balance: Balance,
    auto_balanced: Option<Found>,
    model: Model,
    timeouts: Timeouts,
    /// The number of the next command.
    command: u64,
    /// The number of the next step.
    step: u64,
    /// How many batches it has learned from.
    learned: u64,
    /// The forward-only plan that the workers follow, if it is not the training plan: for the watchdog.
    evaluating: Option<Plan>,
    learning_rate: f64,
    clip_norm: Option<f64>,
    /// What comes next of an update that was begun.
    begun: Option<Part>,
    optim: Optim,
    seed: u64,
    codecs: Codecs,
    /// Whether a codec remembers samples.
    wants_samples: bool,
    /// Whether the next step captures what it sends.
    capture: bool,
}

impl Pipeline {
    /// Starts describing a pipeline for a model.
    pub fn builder(model: Model) -> Builder {
        Builder::new(model)
    }

    /// The plan it trains by; every replica has its own.
    pub fn plan(&self) -> &Plan {
        self.roster.plan()
    }

    /// The workers: the plan's, once for each replica.
    pub fn roster(&self) -> &Roster {
        &self.roster
    }

    /// Into how many micro-batches a batch is cut to learn from, over all replicas; it needs as many rows.
    pub fn micro_batches(&self) -> usize {
        self.roster.replicas() * self.plan().micro_batches()
    }

    /// Which layers run together.
    pub fn balance(&self) -> &Balance {
        &self.balance
    }

    /// What the cut was found to cost, if it was found by measuring.
    pub fn auto_balanced(&self) -> Option<&Found> {
        self.auto_balanced.as_ref()
    }

    /// How what crosses links is encoded.
    pub fn codecs(&self) -> &Codecs {
        &self.codecs
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// How parameters are stepped.
    pub fn optim(&self) -> Optim {
        self.optim
    }

    /// The seed of weights and dropout.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// How many batches it has learned from. This and the seed are where its random streams are.
    pub fn learned(&self) -> u64 {
        self.learned
    }

    /// Goes on with random streams as if it had learned from so many batches. An update that was begun is given up.
    pub fn set_learned(&mut self, batches: u64) {
        self.learned = batches;
        self.begun = None;
    }

    /// Whether an update of several batches was begun and not finished.
    pub fn in_update(&self) -> bool {
        self.begun.is_some()
    }

    /// Changes the learning rate from the next step on.
    pub fn set_learning_rate(&mut self, learning_rate: f64) {
        self.learning_rate = learning_rate;
    }

    /// Scales the gradients of every further update down to this norm over all parameters where theirs is larger.
    pub fn set_clip_norm(&mut self, norm_max: Option<f64>) {
        self.clip_norm = norm_max;
    }

    /// Forward, backward and update with one batch.
    pub fn train_step(&mut self, batch: &Batch) -> Result<StepOutcome, StepError> {
        self.train_part(batch, Part::WHOLE)
    }

    /// Forward and backward with one of the batches that make an update, and the update after the last of them. The
    /// gradient is the mean over the batches.
    pub fn train_part(&mut self, batch: &Batch, part: Part) -> Result<StepOutcome, StepError> {
        self.run(batch, Purpose::Train, part).map(|(outcome, _)| outcome)
    }

    /// Loss and score of one batch, without learning. A batch with too few rows for all micro-batches of all replicas is
    /// cut into fewer, and one with fewer rows than replicas is left to the first of them.
    pub fn evaluate(&mut self, batch: &Batch) -> Result<StepOutcome, StepError> {
        self.run(batch, Purpose::Evaluate, Part::WHOLE).map(|(outcome, _)| outcome)
    }

    /// The model's output for one batch of inputs, as in evaluation.
    pub fn predict(&mut self, inputs: Vec<Tensor>) -> Result<Tensor, StepError> {
        let rows = inputs.first().and_then(|t| t.size().first().copied()).unwrap_or(0);
        let target = Tensor::zeros([rows], (tch::Kind::Int64, tch::Device::Cpu));
        let batch = Batch { inputs, target, samples: Vec::new() };
        let (_, outputs) = self.run(&batch, Purpose::Predict, Part::WHOLE)?;
        Tensor::f_cat(&outputs, 0).map_err(|e| self.failed("joining the outputs", e.into()).into())
    }

    /// The gradient of every parameter for one batch, by name; nothing is updated.
    pub fn gradients(&mut self, batch: &Batch) -> Result<(StepOutcome, BTreeMap<String, Tensor>), StepError> {
        let (outcome, _) = self.run(batch, Purpose::Gradients, Part::WHOLE)?;
        Ok((outcome, self.collect(Which::Gradients)?))
    }

    /// Copies of all parameters and buffers, by name.
    pub fn state(&mut self) -> Result<BTreeMap<String, Tensor>, StepError> {
        let mut all = BTreeMap::new();
        self.state_each(|name, tensor| {
            all.insert(name.to_owned(), tensor);
            Ok::<(), StepError>(())
        })?;
        Ok(all)
    }

    /// Has the next step keep copies of all that it sends over links, for [`captured`](Self::captured).
    pub fn capture_next(&mut self) {
        self.capture = true;
    }

    /// What the last step sent over links, as it was before any codec, if it was told to
    /// [keep it](Self::capture_next). The names are `activation.FROM-TO.MICRO_BATCH.INDEX` and `gradient.…`, with the
    /// numbers of partitions.
    pub fn captured(&mut self) -> Result<BTreeMap<String, Tensor>, StepError> {
        self.collect(Which::Captured)
    }

    /// Takes over parameters and buffers by name; each worker gets only its own. Every name must be the model's; what
    /// is not given stays as it is.
    pub fn load(&mut self, state: &BTreeMap<String, Tensor>) -> Result<(), StepError> {
        for spec in self.state_specs() {
            if let Some(tensor) = state.get(&spec.name).filter(|tensor| tensor.size() != spec.dims) {
                let why = format!("`{}` is {:?}, the model's is {:?}", spec.name, tensor.size(), spec.dims);
                return Err(StepError::Load(why));
            }
        }
        let names: Vec<String> = state.keys().cloned().collect();
        // Copies: the sender may go on changing his.
        self.load_from(&names, |name| {
            engine::copy(&state[name]).map_err(|fault| StepError::Load(format!("copying `{name}`: {fault}")))
        })
    }

    /// Has the codecs of all links forget what they remember of earlier tensors, as if the run had just begun.
    pub fn forget(&mut self) -> Result<(), StepError> {
        Ok(self.tell_all(&Command::Forget)?)
    }

    fn run(&mut self, batch: &Batch, purpose: Purpose, part: Part) -> Result<(StepOutcome, Vec<Tensor>), StepError> {
        self.check(batch)?;
        if !self.learning_rate.is_finite() {
            return Err(StepError::LearningRate { got: self.learning_rate });
        }
        let after = self.after(purpose, part)?;
        let learning = matches!(purpose, Purpose::Train | Purpose::Gradients);
        let (replicas, micro_batches) = self.share_out(learning, batch.rows());
        let rows = MicroBatches::split(batch.rows(), replicas * micro_batches)?;
        self.follow(purpose, micro_batches);
        let start = Instant::now();
        let number = self.next_command();
        let step = Step {
            number: self.step,
            learned: self.learned,
            purpose,
            rows: rows.rows(),
            all_micro_batches: rows.count(),
            first: 0,
            micro_batches,
            batches: part.of,
            fresh: learning && part.is_first(),
            after,
            samples: if self.wants_samples { batch.samples.clone() } else { Vec::new() },
            capture: std::mem::take(&mut self.capture),
        };
        self.step += 1;
        self.learned += u64::from(purpose == Purpose::Train);
        for worker in self.roster.members() {
            let replica = self.roster.replica_of(worker);
            let step = || Step { first: replica * micro_batches, ..step.clone() };
            let command = if replica < replicas { Command::Step(step()) } else { Command::Rest };
            self.command(number, worker, &command)?;
        }
        self.feed(batch, &rows, &step)?;
        let last = PartitionId::new(self.plan().partitions() - 1);
        let mut outputs = Vec::new();
        if purpose == Purpose::Predict {
            for m in rows.ids() {
                let message = self.wait(&Tag::between(Kind::Output, step.number, m, last, last))?;
                outputs.extend(message.tensors.into_iter().flatten().take(1).map(|t| t.to_device(tch::Device::Cpu)));
            }
        }
        let mut workers = Vec::new();
        for worker in self.roster.members() {
            let report = self.report(number, worker)?;
            workers.push(WorkerStep { name: self.roster.name(worker), report });
        }
        let gradient_norm = match after {
            After::Norms => Some(self.clipped_update(&mut workers)?),
            After::Keep | After::Update { .. } => None,
        };
        if purpose == Purpose::Train {
            self.begun = part.next();
        }
        // Only the last partition's workers have them. JSON has no NaN, so a loss that is none arrives as absent.
        let last = self.plan().placement().worker_of(last);
        let scored = || (0..replicas).filter_map(|r| workers.get(self.roster.member(r, last).index()));
        let loss_sum: f64 = scored().map(|w| w.report.loss_sum.unwrap_or(f64::NAN)).sum();
        let mut classes: Option<ClassCounts> = None;
        for counts in scored().filter_map(|w| w.report.classes.as_ref()) {
            classes.get_or_insert_default().add(counts);
        }
        let outcome = StepOutcome {
            rows: rows.rows(),
            loss: loss_sum / rows.rows() as f64,
            correct: scored().map(|w| w.report.correct).sum(),
            gradient_norm,
            classes,
            seconds: start.elapsed().as_secs_f64(),
            workers,
        };
        Ok((outcome, outputs))
    }

    /// How many replicas take part in a step with so many rows, and how many micro-batches each of them has.
    fn share_out(&self, learning: bool, rows: usize) -> (usize, usize) {
        let (replicas, micro_batches) = (self.roster.replicas(), self.plan().micro_batches());
        match rows / replicas {
            _ if learning => (replicas, micro_batches),
            0 => (1, micro_batches.min(rows)),
            each => (replicas, micro_batches.min(each)),
        }
    }

    /// What the workers do with the gradients of a step.
    fn after(&self, purpose: Purpose, part: Part) -> Result<After, StepError> {
        if matches!(purpose, Purpose::Evaluate | Purpose::Predict) {
            return Ok(After::Keep);
        }
        let expected = self.begun.unwrap_or(Part { index: 0, ..part });
        if part != expected || part.index >= part.of {
            return Err(StepError::Part { expected, got: part });
        }
        match self.clip_norm {
            _ if purpose == Purpose::Gradients || !part.is_last() => Ok(After::Keep),
            None => Ok(After::Update { learning_rate: self.learning_rate }),
            Some(norm) if norm.is_finite() && norm > 0.0 => Ok(After::Norms),
            Some(got) => Err(StepError::ClipNorm { got }),
        }
    }

    /// Has all workers, which wait with their gradients, scale them alike and update; gives the norm before.
    fn clipped_update(&mut self, workers: &mut [WorkerStep]) -> Result<f64, Failure> {
        let squares: BTreeMap<String, Exact> =
            workers.iter_mut().flat_map(|worker| std::mem::take(&mut worker.report.squared_norms)).collect();
        let norm = global_norm(&squares);
        let scale = self.clip_norm.map_or(1.0, |norm_max| clip_scale(norm, norm_max));
        let update = Command::Update { learning_rate: self.learning_rate, scale: Exact(scale) };
        let number = self.next_command();
        for worker in self.roster.members() {
            self.command(number, worker, &update)?;
        }
        for worker in self.roster.members() {
            let later = self.report(number, worker)?;
            if let Some(step) = workers.get_mut(worker.index()) {
                step.report.and_then(later);
            }
        }
        Ok(norm)
    }

    fn report(&self, number: u64, worker: WorkerId) -> Result<StepReport, Failure> {
        let message = self.wait(&Tag::control(Kind::Report, number, worker))?;
        serde_json::from_slice(&message.text)
            .map_err(|e| self.failed("reading a report", Fault::protocol("a report", e.to_string())))
    }

    /// Remembers the plan that the workers make for themselves where they do not learn.
    fn follow(&mut self, purpose: Purpose, micro_batches: usize) {
        let learning = matches!(purpose, Purpose::Train | Purpose::Gradients);
        if learning {
            self.evaluating = None;
        } else if self.evaluating.as_ref().is_none_or(|plan| plan.micro_batches() != micro_batches) {
            self.evaluating = forward_plan(self.plan(), micro_batches).ok();
        }
    }

    /// Sends each micro-batch's input to the first partition and its target to the last. They are views: nothing is
    /// copied unless a link carries them.
    fn feed(&mut self, batch: &Batch, rows: &MicroBatches, step: &Step) -> Result<(), StepError> {
        let (first, last) = (PartitionId(0), PartitionId::new(self.plan().partitions() - 1));
        for of_all in rows.ids() {
            let (replica, m) = (of_all.index() / step.micro_batches, of_all.index() % step.micro_batches);
            let (m, range) = (MicroBatchId::new(m), rows.range(of_all));
            let (from, len) = (range.start as i64, range.len() as i64);
            // Detached: a graph the user has behind his batch is his.
            let slice = |t: &Tensor| t.f_detach()?.f_narrow(0, from, len);
            let mut parts = vec![(Kind::Input, first, batch.inputs.iter().collect::<Vec<_>>())];
            if step.purpose != Purpose::Predict {
                parts.push((Kind::Target, last, vec![&batch.target]));
            }
            for (kind, partition, tensors) in parts {
                let tensors = tensors.into_iter().map(|t| slice(t).map(Some)).collect::<Result<Vec<_>, _>>();
                let tensors = tensors.map_err(|e| self.failed("cutting the batch", e.into()))?;
                let tag = Tag::between(kind, step.number, m, partition, partition);
                let worker = self.roster.member(replica, self.plan().placement().worker_of(partition));
                self.send(worker, Message::tensors(tag, tensors))?;
            }
        }
        Ok(())
    }

    fn check(&self, batch: &Batch) -> Result<(), StepError> {
        let rows = batch.rows() as i64;
        if rows == 0 {
            return Err(StepError::Batch { expected: "at least one".to_owned(), got: "no rows".to_owned() });
        }
        let fits = batch.inputs.len() == self.model.input.len()
            && batch.inputs.iter().zip(&self.model.input).all(|(tensor, spec)| {
                tensor.kind() == spec.kind
                    && tensor.size().split_first().is_some_and(|(r, dims)| *r == rows && dims == spec.dims)
            });
        if fits {
            return Ok(());
        }
        let expected: Vec<String> =
            self.model.input.iter().map(|s| format!("[{rows} rows] × {:?} of {:?}", s.dims, s.kind)).collect();
        let got: Vec<String> = batch.inputs.iter().map(|t| format!("{:?} of {:?}", t.size(), t.kind())).collect();
        Err(StepError::Batch {
            expected: expected.join(" and "),
            got: format!("inputs {}, target {:?}", got.join(" and "), batch.target.size()),
        })
    }

    fn next_command(&mut self) -> u64 {
        self.command += 1;
        self.command - 1
    }

    fn command(&mut self, number: u64, worker: WorkerId, command: &Command) -> Result<(), Failure> {
        let text = serde_json::to_vec(command)
            .map_err(|e| self.failed("writing a command", Fault::protocol("a command", e.to_string())))?;
        self.send(worker, Message::text(Tag::control(Kind::Command, number, worker), text))
    }

    fn send(&mut self, worker: WorkerId, message: Message) -> Result<(), Failure> {
        let sent = match self.team.ports.get_mut(&worker) {
            Some(port) => port.send(message),
            None => Err(Fault::Lost),
        };
        sent.map_err(|fault| {
            let name = self.roster.name(worker);
            self.team.fate.fail(Failure::new(name, "being told what to do", fault))
        })
    }

    /// Waits for a message of a worker, and watches meanwhile that somebody makes headway.
    fn wait(&self, tag: &Tag) -> Result<Message, Failure> {
        let mut seen: Vec<State> = Vec::new();
        let mut since = Instant::now();
        let watch = || {
            let now: Vec<State> = self.team.statuses.iter().map(|s| s.read()).collect();
            if now != seen {
                seen = now;
                since = Instant::now();
            } else if since.elapsed() >= self.timeouts.stall() {
                let plan = self.evaluating.as_ref().unwrap_or(self.plan());
                let (who, what) = blame(&self.roster, plan, &seen);
                let fault = Fault::Stalled { limit_s: self.timeouts.stall_s };
                return Err(Fault::Elsewhere(Failure::new(who, what, fault)));
            }
            Ok(())
        };
        let waited = self.team.mailbox.take_while(tag, watch);
        waited.map_err(|fault| self.failed("waiting for the workers", fault))
    }

    fn failed(&self, phase: &str, fault: Fault) -> Failure {
        self.team.fate.fail(Failure::new("the driver", phase, fault))
    }

    fn wait_ready(&self) -> Result<(), Failure> {
        for worker in self.roster.members() {
            self.wait(&Tag::control(Kind::Ready, 0, worker))?;
        }
        Ok(())
    }

    /// Has replicas start from the same parameters, whatever drew them.
    fn agree(&mut self) -> Result<(), Failure> {
        if self.roster.replicas() == 1 {
            return Ok(());
        }
        self.tell_all(&Command::Agree)
    }

    /// Gives everybody a command that has no result, and waits until it is done.
    fn tell_all(&mut self, command: &Command) -> Result<(), Failure> {
        let number = self.next_command();
        for worker in self.roster.members() {
            self.command(number, worker, command)?;
        }
        for worker in self.roster.members() {
            self.wait(&Tag::control(Kind::Report, number, worker))?;
        }
        Ok(())
    }

    fn finish(&mut self) {
        let number = self.next_command();
        for worker in self.roster.members() {
            // Whoever cannot be told any more is ended by the team.
            let _ = self.command(number, worker, &Command::Finish);
        }
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        if self.team.fate.failure().is_none() {
            self.finish();
        } else {
            // Writers and stages look at the run's fate this often; then they have told everybody.
            std::thread::sleep(POLL);
        }
    }
}
