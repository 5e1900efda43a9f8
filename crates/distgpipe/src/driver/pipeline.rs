//! [`Pipeline`]: a model that runs on workers, built once and then stepped.
//!
//! | module | subject |
//! | --- | --- |
//! | `step` | one step, from the batch to the sum of the reports |
//! | `commands` | numbered commands to the workers |
//! | `watchdog` | waiting for the workers, and detecting a stall |
//! | `state_transfer` | parameters, buffers and optimizer state between driver and workers |
//! | `links` | what each link did in a step |
//! | `outcome` | the figures of a step, and its errors |

mod commands;
mod links;
mod outcome;
mod state_transfer;
mod step;
mod watchdog;

pub use links::{StepLink, StepWait};
pub use outcome::{StepError, StepOutcome, WorkerStep};

use crate::comm::abort::POLL;
use crate::comm::codec_policy::CodecPolicy;
use crate::comm::notice::Notify;
use crate::comm::protocol::{Command, Job, Purpose, TensorSet};
use crate::comm::timeouts::Timeouts;
use crate::comm::topology::Topology;
use crate::data::BatchDevices;
use crate::driver::builder::Builder;
use crate::driver::launch::{self, LaunchOptions, WorkerSet, Workers};
use crate::engine::{self, Device};
use crate::failure::Failure;
use crate::model::Model;
use crate::runtime::accumulation::AccumulationStep;
use crate::runtime::optimizer::Optim;
use crate::runtime::parameter_groups::{ParameterGroup, ParameterGroups};
use distgpipe_core::balance::Found;
use distgpipe_core::partition::Balance;
use distgpipe_core::schedule::Plan;
use distgpipe_core::{PartitionId, WorkerId};
pub(crate) use links::LinkTraffic;
use std::collections::BTreeMap;
use std::sync::Arc;
use step::StepRequest;
use tch::Tensor;

/// Rows of input, and the target of each row.
#[derive(Debug)]
pub struct Batch {
    /// The model's input tensors; the first dimension counts rows.
    pub inputs: Vec<Tensor>,
    /// Class numbers `[rows]`, or whatever the loss takes.
    pub target: Tensor,
    /// The number in the data set of each row's sample, for codecs that remember samples. May be empty.
    pub samples: Vec<u64>,
}

impl Batch {
    /// A batch for a model with one input.
    pub fn new(input: Tensor, target: Tensor) -> Self {
        Batch { inputs: vec![input], target, samples: Vec::new() }
    }

    /// The number of rows, which the target decides.
    pub fn rows(&self) -> usize {
        self.target.size().first().map_or(0, |&n| usize::try_from(n).unwrap_or(0))
    }
}

/// A model split into partitions that run on workers.
///
/// Steps run one at a time: each method returns when all workers have reported. Dropping the pipeline ends its workers.
pub struct Pipeline {
    workers: WorkerSet,
    /// Where the workers are, what they run, and who hears of it: to start them again.
    placed: Workers,
    job: Job,
    notify: Notify,
    topology: Arc<Topology>,
    balance: Balance,
    auto_balanced: Option<Found>,
    model: Model,
    timeouts: Timeouts,
    devices: Vec<Device>,
    threads: usize,
    /// The number of the next command.
    next_command: u64,
    /// The number of the next step.
    next_step: u64,
    /// Training steps so far. Names the random streams.
    batches_trained: u64,
    /// The plan of the last step if that had no backward pass. The watchdog needs it to find the cause of a stall.
    forward_plan: Option<Plan>,
    learning_rate: f64,
    clip_norm: Option<f64>,
    /// The batch that an update in progress needs next.
    next_part: Option<AccumulationStep>,
    optim: Optim,
    groups: Vec<ParameterGroup>,
    frozen: Vec<String>,
    parsed_groups: ParameterGroups,
    seed: u64,
    codecs: CodecPolicy,
    /// Whether a codec remembers samples.
    wants_samples: bool,
    /// Whether anything was loaded into the workers that are there.
    loaded: bool,
    /// Whether the workers keep what they send in the next step.
    capture: bool,
    /// What each link had carried by the end of the last step.
    pub(crate) link_traffic: LinkTraffic,
}

/// Everything the builder has checked and decided.
pub(super) struct Setup {
    pub topology: Arc<Topology>,
    pub balance: Balance,
    pub auto_balanced: Option<Found>,
    pub model: Model,
    pub job: Job,
    pub groups: ParameterGroups,
    pub learning_rate: f64,
    pub clip_norm: Option<f64>,
    pub notify: Notify,
}

impl Pipeline {
    /// Starts the workers and waits until they have built their partitions.
    pub(super) fn start(setup: Setup, workers: &Workers) -> Result<Self, Failure> {
        let Setup { topology, balance, auto_balanced, model, job, groups, learning_rate, clip_norm, notify } = setup;
        // A worker of another host opens its device there.
        let on_this_host = |worker: WorkerId| worker == WorkerId(0) || !workers.open_devices_elsewhere();
        let device = |worker: WorkerId| match job.devices.for_worker(worker.index()) {
            device if on_this_host(worker) => device.resolved(),
            device => device,
        };
        let devices = topology.members().map(device).collect();
        let options = LaunchOptions { workers, notify: notify.clone() };
        let mut pipeline = Pipeline {
            workers: launch::start(&job, &topology, &model, options)?,
            placed: workers.clone(),
            notify,
            topology,
            balance,
            auto_balanced,
            model,
            timeouts: job.timeouts,
            devices,
            threads: job.threads,
            next_command: 0,
            next_step: 0,
            batches_trained: 0,
            forward_plan: None,
            learning_rate,
            clip_norm,
            next_part: None,
            optim: job.optim,
            groups: job.groups.clone(),
            frozen: job.frozen.clone(),
            parsed_groups: groups,
            seed: job.seed,
            wants_samples: job.codecs.needs_sample_ids(),
            codecs: job.codecs.clone(),
            loaded: false,
            capture: false,
            link_traffic: LinkTraffic::default(),
            job,
        };
        pipeline.wait_ready()?;
        pipeline.synchronize_replicas()?;
        Ok(pipeline)
    }

    /// Whether the workers are processes, which can be lost and [started again](Self::restart).
    pub fn can_restart(&self) -> bool {
        // The ranks of an MPI program start and end together.
        !matches!(self.placed, Workers::Threads) && !self.placed.are_ranks()
    }

    /// Ends all workers and starts new ones: worker processes of this host are started again, and those that listen elsewhere
    /// are joined again. For a pipeline that has lost a worker. The new workers have initial parameters, buffers and optimizer
    /// state: load what they are to continue from. Faults that were injected for a test do not happen again.
    pub fn restart(&mut self) -> Result<(), Failure> {
        self.job.faults.clear();
        // Before the new ones start: a worker serves one run at a time.
        self.workers.end();
        let options = LaunchOptions { workers: &self.placed, notify: self.notify.clone() };
        self.workers = launch::start(&self.job, &self.topology, &self.model, options)?;
        (self.next_command, self.next_step, self.batches_trained) = (0, 0, 0);
        (self.forward_plan, self.next_part, self.capture) = (None, None, false);
        self.loaded = false;
        self.link_traffic = LinkTraffic::default();
        self.wait_ready()?;
        self.synchronize_replicas()
    }

    /// Whether parameters, buffers and optimizer state are those that [`restart`](Self::restart) gives new workers.
    pub(crate) fn has_initial_state(&self) -> bool {
        !self.loaded && self.next_step == 0 && self.batches_trained == 0
    }

    /// Who is told what the user should know while the run goes on.
    pub(crate) fn notify(&self) -> &Notify {
        &self.notify
    }

    /// The time-outs of the run.
    pub fn timeouts(&self) -> Timeouts {
        self.timeouts
    }

    /// Starts describing a pipeline for a model.
    pub fn builder(model: Model) -> Builder {
        Builder::new(model)
    }

    /// The training plan, which every replica follows.
    pub fn plan(&self) -> &Plan {
        self.topology.plan()
    }

    /// The run's workers: those of the plan, once for each replica.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Micro-batches per training batch, over all replicas. A training batch needs at least as many rows.
    pub fn micro_batches(&self) -> usize {
        self.topology.replicas() * self.plan().micro_batches()
    }

    /// The number of layers in each partition.
    pub fn balance(&self) -> &Balance {
        &self.balance
    }

    /// The result of [`Builder::auto_balance`]: the estimated cost of the cut it chose.
    pub fn auto_balanced(&self) -> Option<&Found> {
        self.auto_balanced.as_ref()
    }

    /// Which codec encodes the tensors of which link.
    pub fn codecs(&self) -> &CodecPolicy {
        &self.codecs
    }

    /// The whole model. Its tensors are on the workers.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The optimizer that all workers use.
    pub fn optim(&self) -> Optim {
        self.optim
    }

    /// The groups of [`Builder::parameter_group`].
    pub fn parameter_groups(&self) -> &[ParameterGroup] {
        &self.groups
    }

    /// The patterns of [`Builder::freeze`].
    pub fn frozen(&self) -> &[String] {
        &self.frozen
    }

    /// The device of each worker, by worker number. For a worker of [`Workers::Remote`] it is the device that was asked for:
    /// [`Device::Auto`] stays so, because the worker's host decides.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Whether workers may record CUDA graphs in their first steps.
    pub(crate) fn records_graphs(&self) -> bool {
        self.job.graphs.mode.records_on(&self.devices)
    }

    /// The GPUs on which the workers of this process need the inputs and the targets of a batch. Where the replicas do not share a GPU,
    /// the batch stays on the host, and each of them copies its rows.
    pub(crate) fn batch_devices(&self) -> BatchDevices {
        let gpu = |partition: PartitionId| {
            let worker = self.plan().placement().worker_of(partition);
            let members = (0..self.topology.replicas()).map(|replica| self.topology.member(replica, worker));
            let of_member = |member: WorkerId| match self.devices.get(member.index()) {
                Some(Device::Cuda(index)) if member == WorkerId(0) || matches!(self.placed, Workers::Threads) => {
                    Some(*index)
                }
                _ => None,
            };
            let mut devices = members.map(of_member);
            let first = devices.next().flatten();
            first.filter(|_| devices.all(|device| device == first))
        };
        BatchDevices { inputs: gpu(PartitionId(0)), target: gpu(PartitionId::new(self.plan().partitions() - 1)) }
    }

    /// libtorch threads of each worker.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// The seed of initial weights and dropout.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The number of batches trained on so far. Together with the seed it decides all random numbers of the next step.
    pub fn batches_trained(&self) -> u64 {
        self.batches_trained
    }

    /// Continues with the random numbers of a run that has trained on this number of batches. Drops the gradients of an update
    /// in progress.
    pub fn set_batches_trained(&mut self, batches: u64) {
        self.batches_trained = batches;
        self.next_part = None;
    }

    /// Whether an update of several batches is in progress.
    pub fn in_update(&self) -> bool {
        self.next_part.is_some()
    }

    /// The learning rate that [`train_step`](Self::train_step) uses, and that a [`Trainer`](crate::train::Trainer)
    /// multiplies by the factor of its schedule.
    pub fn learning_rate(&self) -> f64 {
        self.learning_rate
    }

    /// Changes the [learning rate](Self::learning_rate) from the next step on.
    pub fn set_learning_rate(&mut self, learning_rate: f64) {
        self.learning_rate = learning_rate;
    }

    /// Scales the gradients of every later update down to this norm over all parameters, where theirs is larger.
    pub fn set_clip_norm(&mut self, norm_max: Option<f64>) {
        self.clip_norm = norm_max;
    }

    /// Forward pass, backward pass and update with one batch.
    pub fn train_step(&mut self, batch: &Batch) -> Result<StepOutcome, StepError> {
        self.train_part(batch, AccumulationStep::SINGLE)
    }

    /// Forward and backward pass with one of the batches of an update, and the update after the last of them. The
    /// gradient of the update is the mean over its batches.
    pub fn train_part(&mut self, batch: &Batch, part: AccumulationStep) -> Result<StepOutcome, StepError> {
        self.train_part_at(batch, part, self.learning_rate)
    }

    /// [`train_part`](Self::train_part) with a learning rate for this step only: the pipeline keeps its own.
    pub(crate) fn train_part_at(
        &mut self,
        batch: &Batch,
        part: AccumulationStep,
        learning_rate: f64,
    ) -> Result<StepOutcome, StepError> {
        let request = StepRequest { purpose: Purpose::Train, part, learning_rate };
        self.run(batch, request).map(|(outcome, _)| outcome)
    }

    /// Loss and score of one batch, without training. A batch with too few rows for all micro-batches of all replicas is
    /// split into fewer. A batch with fewer rows than replicas runs on the first replica alone.
    pub fn evaluate(&mut self, batch: &Batch) -> Result<StepOutcome, StepError> {
        self.run(batch, self.whole(Purpose::Evaluate)).map(|(outcome, _)| outcome)
    }

    /// The model's output for one batch of inputs, computed as in [`evaluate`](Self::evaluate).
    pub fn predict(&mut self, inputs: Vec<Tensor>) -> Result<Tensor, StepError> {
        let rows = inputs.first().and_then(|t| t.size().first().copied()).unwrap_or(0);
        let target = Tensor::zeros([rows], (tch::Kind::Int64, tch::Device::Cpu));
        let batch = Batch { inputs, target, samples: Vec::new() };
        let (_, outputs) = self.run(&batch, self.whole(Purpose::Predict))?;
        Tensor::f_cat(&outputs, 0).map_err(|e| self.fail("joining the outputs", e.into()).into())
    }

    /// The gradient of every parameter for one batch, by name, without an update.
    pub fn gradients(&mut self, batch: &Batch) -> Result<(StepOutcome, BTreeMap<String, Tensor>), StepError> {
        let (outcome, _) = self.run(batch, self.whole(Purpose::Gradients))?;
        Ok((outcome, self.collect(TensorSet::Gradients)?))
    }

    fn whole(&self, purpose: Purpose) -> StepRequest {
        StepRequest { purpose, part: AccumulationStep::SINGLE, learning_rate: self.learning_rate }
    }

    /// Copies of all parameters and buffers, by name. All of them must fit this process's memory; see
    /// [`state_each`](Self::state_each).
    pub fn state(&mut self) -> Result<BTreeMap<String, Tensor>, StepError> {
        let mut all = BTreeMap::new();
        self.state_each(|name, tensor| {
            all.insert(name.to_owned(), tensor);
            Ok::<(), StepError>(())
        })?;
        Ok(all)
    }

    /// Makes the workers keep copies of everything they send over links in the next step, for
    /// [`captured`](Self::captured).
    pub fn capture_next(&mut self) {
        self.capture = true;
    }

    /// The tensors that the last step sent over links, before any codec, if [`capture_next`](Self::capture_next) was
    /// called before it. The names are `activation.FROM-TO.MICRO_BATCH.INDEX` and `gradient.…`, where `FROM` and `TO` are
    /// partition numbers.
    pub fn captured(&mut self) -> Result<BTreeMap<String, Tensor>, StepError> {
        self.collect(TensorSet::Captured)
    }

    /// Sets parameters and buffers by name, as [`state`](Self::state) returns them. Each worker receives only its own. Every
    /// name must be one of the model's; tensors that are not named keep their values.
    pub fn load_state(&mut self, state: &BTreeMap<String, Tensor>) -> Result<(), StepError> {
        for spec in self.state_specs() {
            if let Some(tensor) = state.get(&spec.name).filter(|tensor| tensor.size() != spec.dims) {
                let why = format!("`{}` is {:?}, the model's is {:?}", spec.name, tensor.size(), spec.dims);
                return Err(StepError::Load(why));
            }
        }
        let names: Vec<String> = state.keys().cloned().collect();
        // Copies, because the caller may change its tensors while a worker thread still reads them.
        self.load_from(&names, |name| {
            engine::copy(&state[name]).map_err(|fault| StepError::Load(format!("copying `{name}`: {fault}")))
        })
    }

    /// Resets the codecs of all links to the state they had when the run began: they forget earlier tensors.
    pub fn reset_codecs(&mut self) -> Result<(), StepError> {
        Ok(self.broadcast(&Command::ResetCodecs)?)
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        if self.workers.abort.failure().is_none() {
            self.finish();
        } else {
            // Within this time every thread has seen the abort flag and has notified its peers.
            std::thread::sleep(POLL);
        }
    }
}
