//! [`Builder`]: collects the settings of a pipeline, checks them, and starts it.

use crate::comm::codec_policy::{CodecPolicy, CodecPolicyError};
use crate::comm::notice::{Notice, Notify};
use crate::comm::protocol::{Job, REPLICAS_MAX};
use crate::comm::timeouts::Timeouts;
use crate::comm::topology::Topology;
use crate::comm::transport::faulty::{Scenario, ScenarioError};
use crate::driver::auto_balance::{AutoBalance, RunShape};
use crate::driver::launch::Workers;
use crate::driver::pipeline::{Batch, Pipeline, Setup, StepError};
use crate::driver::profile;
use crate::engine::{self, Device, Devices, Precision, Tf32, ThreadCountError};
use crate::failure::{Failure, Fault};
use crate::model::layer::{Role, ShapeError, TensorSpec};
use crate::model::loss::Loss;
use crate::model::ties::TieError;
use crate::model::Model;
use crate::runtime::all_reduce::{Reduce, REDUCE_MPI};
use crate::runtime::graphs::{GraphMode, GraphOptions};
use crate::runtime::optimizer::{NotFused, Optim};
use crate::runtime::parameter_groups::{ParameterGroup, ParameterGroupError, ParameterGroups};
use crate::runtime::trace::PhaseTiming;
use crate::train::weights::{fit, MissingTensors};
use distgpipe_core::balance::{BalanceError, Found};
use distgpipe_core::partition::{Balance, PartitionError};
use distgpipe_core::placement::{Placement, PlacementError};
use distgpipe_core::schedule::{check, CheckError, Mode, Plan, Recompute, Request, Schedule, ScheduleError};
use distgpipe_core::skip::{SkipError, SkipLayout, SkipUse};
use distgpipe_core::{MicroBatchId, PartitionId, WorkerId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

/// The learning rate of a pipeline whose builder sets none.
const LEARNING_RATE: f64 = 0.01;

/// Why a pipeline cannot be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The balance does not fit the model.
    #[error("balance: {0}")]
    Balance(#[from] PartitionError),
    /// Auto-balancing found no cut.
    #[error("auto-balance: {0}")]
    AutoBalance(#[from] Box<BalanceError>),
    /// The placement's text is not valid.
    #[error("placement: {0}")]
    Placement(#[from] PlacementError),
    /// Layers that share a tensor are on different workers.
    #[error(transparent)]
    Tied(#[from] Box<TieError>),
    /// The schedule has no plan for these settings.
    #[error("schedule: {0}")]
    Schedule(#[from] ScheduleError),
    /// [`Builder::plan`] was given an unsound plan.
    #[error("plan: {0}")]
    Plan(#[from] CheckError),
    /// Stashed and popped skips do not match.
    #[error("skips: {0}")]
    Skips(#[from] SkipError),
    /// The shapes of two layers do not fit together.
    #[error(transparent)]
    Shapes(#[from] ShapeError),
    /// The fault scenario's text is not valid.
    #[error(transparent)]
    Scenario(#[from] ScenarioError),
    /// The codec policy names links that the plan does not have.
    #[error("codecs: {0}")]
    CodecPolicy(#[from] CodecPolicyError),
    /// The number of threads is out of range.
    #[error("`Builder::threads`: {0}")]
    Threads(#[from] ThreadCountError),
    /// The number of replicas is out of range.
    #[error("`Builder::replicas`: expected 1 to {REPLICAS_MAX}, got {got}")]
    Replicas {
        /// The number asked for.
        got: usize,
    },
    /// [`GraphMode::On`] with replicas.
    #[error("`GraphMode::On`: {replicas} replicas run without CUDA graphs, because they share gradients while backward passes run: use `GraphMode::Auto`")]
    GraphsOfReplicas {
        /// The number of replicas.
        replicas: usize,
    },
    /// The workers or the codecs do not suit [`Builder::reduce`].
    #[error("`Builder::reduce`: {why}")]
    Reduce {
        /// What was expected.
        why: String,
    },
    /// The placement or plan and the balance have different numbers of partitions.
    #[error("the placement has {placement} partitions and the balance {balance}: give both the same number")]
    PartitionCount {
        /// Partitions of the placement or plan.
        placement: usize,
        /// Partitions of the balance.
        balance: usize,
    },
    /// Two layers, or two tensors, have one name.
    #[error("the model has two of {name}: give each its own name")]
    DuplicateName {
        /// `layer NAME` or `tensor NAME`.
        name: String,
    },
    /// The model has no specification from which another process could build it.
    #[error("the model has no `Model::spec` from which another process could build it: run the workers as threads, or name the model with `Model::with_spec` and give `distgpipe::worker_mode` a function that builds it")]
    NoModelSpec,
    /// [`Builder::plan`] was given a plan without backward passes.
    #[error("the plan is for evaluation: give `Builder::plan` one for training")]
    EvaluationPlan,
    /// [`Builder::plan`] was given a plan for a model with other skips.
    #[error(
        "the plan carries skips {got}, the model's cut needs {expected}: make the plan for this model and balance"
    )]
    PlanSkips {
        /// The skips between partitions that are not neighbours.
        expected: String,
        /// The skips that the plan carries.
        got: String,
    },
    /// [`Builder::plan`] was given a plan without backward passes of a partition that has parameters to train.
    #[error("the plan freezes the first {got} partitions, but only the first {expected} have nothing to train: freeze their parameters with `Builder::freeze`, or give their backward passes in the plan")]
    PlanFrozen {
        /// The partitions at the front without a parameter to train.
        expected: usize,
        /// The partitions that the plan freezes.
        got: usize,
    },
    /// Parameter groups or frozen parameters do not fit the model.
    #[error(transparent)]
    ParameterGroups(#[from] ParameterGroupError),
    /// libtorch has no fused kernel for the optimizer.
    #[error("`Builder::fused_optimizer`: {0}")]
    NotFused(#[from] NotFused),
    /// The model has its own loss or optimizer, and the builder was given another.
    #[error("the {what} is set twice: by `{of_model}` and by `{of_builder}`; use one of them")]
    SetTwice {
        /// `loss` or `optimizer`.
        what: &'static str,
        /// The method of the model that sets it.
        of_model: &'static str,
        /// The method of the builder that sets it.
        of_builder: &'static str,
    },
    /// A tensor that may cross a cut is too large, or of a type that links do not carry.
    #[error("auto-balance: {0}")]
    CutTensor(#[source] Fault),
    /// The weights that the model starts from could not be read.
    #[error("the weights of the model: {0}")]
    Weights(#[source] Box<StepError>),
    /// A worker could not be started.
    #[error(transparent)]
    Failed(#[from] Failure),
}

enum BalanceSource {
    Even,
    Given(Vec<usize>),
    Measured(Box<AutoBalance>),
}

/// Describes a pipeline; see [`Pipeline::builder`].
pub struct Builder {
    model: Model,
    balance: BalanceSource,
    placement: Option<String>,
    plan: Option<Plan>,
    micro_batches: usize,
    schedule: Schedule,
    recompute: Recompute,
    workers: Workers,
    threads: Option<usize>,
    learning_rate: f64,
    clip_norm: Option<f64>,
    /// What the user chose, to tell it from the defaults in the job.
    optim: Option<Optim>,
    loss: Option<Loss>,
    job: Job,
    notify: Notify,
}

impl Builder {
    pub(super) fn new(model: Model) -> Self {
        let job = Job {
            worker: WorkerId(0),
            model: model.spec.clone(),
            balance: Balance::even(1, 1).expect("one layer in one partition"),
            plan: String::new(),
            replicas: 1,
            seed: 0,
            optim: Optim::default(),
            groups: Vec::new(),
            frozen: Vec::new(),
            loss: Loss::default(),
            codecs: CodecPolicy::default(),
            devices: Device::Auto.into(),
            threads: 1,
            channels_last: true,
            precision: Precision::default(),
            tf32: Tf32::default(),
            cudnn_benchmark: false,
            cudnn_deterministic: false,
            fused_optimizer: false,
            graphs: GraphOptions::default(),
            phases: PhaseTiming::default(),
            reduce: Reduce::default(),
            trace: false,
            timeouts: Timeouts::default(),
            faults: String::new(),
            addresses: Vec::new(),
        };
        Builder {
            model,
            balance: BalanceSource::Even,
            placement: None,
            plan: None,
            micro_batches: 1,
            schedule: Schedule::OneFOneB,
            recompute: Recompute::Never,
            workers: Workers::Threads,
            threads: None,
            learning_rate: LEARNING_RATE,
            clip_norm: None,
            optim: None,
            loss: None,
            job,
            notify: Notify::default(),
        }
    }

    /// The number of layers in each partition. By default all partitions have about as many.
    pub fn balance(mut self, layers: impl Into<Vec<usize>>) -> Self {
        self.balance = BalanceSource::Given(layers.into());
        self
    }

    /// Measures the layers on this sample of one micro-batch, and chooses the cut into this many partitions with the
    /// shortest step. Links count as free; see [`auto_balance_with`](Self::auto_balance_with).
    pub fn auto_balance(self, partitions: usize, sample: Batch) -> Self {
        self.auto_balance_with(AutoBalance::new(partitions, sample))
    }

    /// The same by time or by memory, with the speed of links and a limit on memory.
    pub fn auto_balance_with(mut self, options: AutoBalance) -> Self {
        self.balance = BalanceSource::Measured(Box::new(options));
        self
    }

    /// The worker that runs each partition, such as `client,server,client`. By default each partition has its own worker.
    pub fn place(mut self, workers: impl Into<String>) -> Self {
        self.placement = Some(workers.into());
        self
    }

    /// Micro-batches per batch, in each replica; 1 by default. A training batch needs at least as many rows.
    pub fn micro_batches(mut self, count: usize) -> Self {
        self.micro_batches = count;
        self
    }

    /// The order in which each worker runs its forward and backward passes; 1F1B by default.
    pub fn schedule(mut self, schedule: Schedule) -> Self {
        self.schedule = schedule;
        self
    }

    /// Which micro-batches' activations are computed again in the backward pass instead of kept; none by default.
    pub fn recompute(mut self, recompute: Recompute) -> Self {
        self.recompute = recompute;
        self
    }

    /// A plan of your own instead of a schedule. [`build`](Self::build) checks it. It replaces the placement, the number
    /// of micro-batches and the recomputation.
    pub fn plan(mut self, plan: Plan) -> Self {
        self.plan = Some(plan);
        self
    }

    /// Where workers run: threads of this process by default.
    pub fn workers(mut self, workers: Workers) -> Self {
        self.workers = workers;
        self
    }

    /// Runs this many data-parallel copies of the pipeline; 1 by default. Each has the whole model with the same cut, and
    /// processes its part of each batch's rows. Before an update the replicas add up their gradients. The addresses of
    /// [`Workers::Remote`] list the workers of the first replica (without worker 0), then those of the second, and so on.
    pub fn replicas(mut self, count: usize) -> Self {
        self.job.replicas = count;
        self
    }

    /// How the replicas add up their gradients: in a [ring](Reduce::Ring) by default. [`Reduce::Mpi`] needs workers that are all the
    /// ranks of an MPI program, and gradients without a codec ([`CodecPolicy::replicas`]).
    pub fn reduce(mut self, reduce: Reduce) -> Self {
        self.job.reduce = reduce;
        self
    }

    /// The optimizer that updates the parameters; SGD with momentum 0.9 by default. Its learning rate is
    /// [`learning_rate`](Self::learning_rate). For an optimizer of your own, see [`Model::with_optimizer`].
    pub fn optimizer(mut self, optim: Optim) -> Self {
        self.optim = Some(optim);
        self.job.optim = optim;
        self
    }

    /// Gives the parameters whose names match a pattern a learning rate or weight decay of their own; repeatable. Where
    /// several groups match a parameter, each setting is that of the last one that has it. A pattern that matches no
    /// parameter is an error.
    ///
    /// ```
    /// use distgpipe::prelude::*;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let pipeline = Pipeline::builder(Mlp::default().model()?)
    ///     .optimizer(Optim::adamw())
    ///     .parameter_group(ParameterGroup::new("layers.0.*").rate_factor(0.1))
    ///     .parameter_group(ParameterGroup::new("*.bias").weight_decay(0.0))
    ///     .build()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn parameter_group(mut self, group: ParameterGroup) -> Self {
        self.job.groups.push(group);
        self
    }

    /// Excludes the parameters whose names match a pattern, such as `features.*`, from training; repeatable. They get no
    /// gradient, no update and no optimizer state. Partitions at the front without any other parameter keep no
    /// activations and receive no gradients. A pattern that matches nothing is an error, and so are patterns that leave
    /// nothing to train.
    ///
    /// As with PyTorch's `requires_grad = False`, frozen layers run in training mode: dropout draws, and batch norms
    /// normalize by the batch and update their running statistics.
    pub fn freeze(mut self, pattern: impl Into<String>) -> Self {
        self.job.frozen.push(pattern.into());
        self
    }

    /// The learning rate of every update; 0.01 by default. A [`Trainer`](crate::train::Trainer) multiplies it by the factor
    /// of its schedule. [`Pipeline::set_learning_rate`] changes it between steps.
    pub fn learning_rate(mut self, learning_rate: f64) -> Self {
        self.learning_rate = learning_rate;
        self
    }

    /// Scales the gradients of an update down to this norm over all parameters, where theirs is larger. No clipping by
    /// default. [`Pipeline::set_clip_norm`] changes it between steps.
    pub fn clip_norm(mut self, norm_max: f64) -> Self {
        self.clip_norm = Some(norm_max);
        self
    }

    /// The loss that training minimizes; cross-entropy by default. For a loss of your own, see [`Model::with_loss`].
    pub fn loss(mut self, loss: Loss) -> Self {
        self.loss = Some(loss);
        self.job.loss = loss;
        self
    }

    /// The codecs that encode tensors on links between workers; raw by default.
    pub fn codecs(mut self, codecs: CodecPolicy) -> Self {
        self.job.codecs = codecs;
        self
    }

    /// The seed of initial weights and dropout; 0 by default.
    pub fn seed(mut self, seed: u64) -> Self {
        self.job.seed = seed;
        self
    }

    /// The device that all workers compute on, or several that they take in turn, the workers of the first replica first.
    /// By default [`Device::Auto`]: each worker uses the first GPU of its host, or the CPU if there is none.
    /// [`Pipeline::devices`] says what they took.
    pub fn device(mut self, devices: impl Into<Devices>) -> Self {
        self.job.devices = devices.into();
        self
    }

    /// libtorch threads per worker, from 1 to [`engine::THREADS_MAX`]. The same number goes to all workers, because the
    /// last bits of sums depend on it.
    ///
    /// By default it is the number of cores of this host divided by the number of workers on one host. With
    /// [`Workers::Remote`] that is the largest number of workers at one address; loopback addresses count as this host. The
    /// driver does not know the cores of other hosts, so set the number where theirs differ. [`Pipeline::threads`] says
    /// what was taken.
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// Whether images and convolution weights lie channels-last, which is faster; on by default.
    pub fn channels_last(mut self, channels_last: bool) -> Self {
        self.job.channels_last = channels_last;
        self
    }

    /// The precision of the forward pass; 32-bit floats by default. With [`Precision::Bf16`] it runs under libtorch's
    /// autocast: tensors between partitions, and the result of [`Pipeline::predict`], have the type that the layers return.
    pub fn precision(mut self, precision: Precision) -> Self {
        self.job.precision = precision;
        self
    }

    /// Whether workers on GPUs record their training passes as CUDA graphs, and how many micro-batches of a worker a GPU may compute
    /// at a time. By default they do where it is possible. The numbers do not depend on it.
    pub fn graphs(mut self, graphs: GraphOptions) -> Self {
        self.job.graphs = graphs;
        self
    }

    /// Where GPUs may round the inputs of products to TF32; in convolutions by default. It changes results within the precision of
    /// TF32, and has no effect on a CPU. libtorch keeps this setting for the whole process: with several pipelines in one process, the
    /// last that was built decides.
    pub fn tf32(mut self, tf32: Tf32) -> Self {
        self.job.tf32 = tf32;
        self
    }

    /// Whether cuDNN measures its convolution algorithms for each new shape and takes the fastest; off by default. The algorithm, and
    /// with it the rounding, may then differ from run to run. No effect on a CPU. Like [`tf32`](Self::tf32), it applies to the whole
    /// process.
    pub fn cudnn_benchmark(mut self, benchmark: bool) -> Self {
        self.job.cudnn_benchmark = benchmark;
        self
    }

    /// Whether cuDNN takes only algorithms that give equal bits in every run; off by default. Others add in the order in which
    /// kernels happen to run.
    pub fn cudnn_deterministic(mut self, deterministic: bool) -> Self {
        self.job.cudnn_deterministic = deterministic;
        self
    }

    /// Whether the parameters are updated by libtorch's fused kernels, which exist for [`Optim::Sgd`], [`Optim::Adam`] and
    /// [`Optim::AdamW`]; off by default. They round differently, on a CPU too. Checkpoints do not depend on it.
    pub fn fused_optimizer(mut self, fused: bool) -> Self {
        self.job.fused_optimizer = fused;
        self
    }

    /// What the times of phases cover on a GPU; the launch of kernels by default.
    pub fn phases(mut self, timing: PhaseTiming) -> Self {
        self.job.phases = timing;
        self
    }

    /// Whether each step reports its trace events in [`StepOutcome::spans`](crate::StepOutcome::spans); off by default.
    pub fn trace(mut self, trace: bool) -> Self {
        self.job.trace = trace;
        self
    }

    /// Calls `handler` with what the user of the run should know before anything fails, such as a worker that has become silent.
    /// It is called on threads of the run and must not block. Without it, notices are dropped.
    pub fn on_notice(mut self, handler: impl Fn(&Notice) + Send + Sync + 'static) -> Self {
        self.notify = Notify::new(handler);
        self
    }

    /// After how long a stalled worker or a silent peer fails the run.
    pub fn timeouts(mut self, timeouts: Timeouts) -> Self {
        self.job.timeouts = timeouts;
        self
    }

    /// A scenario of faults to inject, for tests; see [`crate::comm::transport::faulty`].
    pub fn faults(mut self, scenario: impl Into<String>) -> Self {
        self.job.faults = scenario.into();
        self
    }

    /// Checks the settings, starts the workers, and returns when they have built their partitions.
    pub fn build(mut self) -> Result<Pipeline, BuildError> {
        let groups = self.check_settings()?;
        engine::start();
        let placement = self.placement.as_deref().map(str::parse::<Placement>).transpose()?;
        // The profiler computes with as many threads as the workers will.
        self.job.threads = self.resolve_threads(placement.as_ref())?;
        let (balance, auto_balanced) = self.resolve_balance(placement.as_ref(), &groups)?;
        let plan = self.resolve_plan(&balance, placement, &groups)?;
        if plan.partitions() != balance.partitions() {
            return Err(BuildError::PartitionCount { placement: plan.partitions(), balance: balance.partitions() });
        }
        self.model.check_ties(&balance, plan.placement())?;
        self.job.codecs.check(&plan)?;
        self.job.balance = balance.clone();
        self.job.plan = plan.to_string();
        let setup = Setup {
            topology: Arc::new(Topology::new(plan, self.job.replicas)),
            balance,
            auto_balanced,
            model: self.model,
            job: self.job,
            groups,
            learning_rate: self.learning_rate,
            clip_norm: self.clip_norm,
            notify: self.notify,
        };
        let weights = setup.model.weights.as_deref().map(|path| fit(path, &setup.model, MissingTensors::Refuse));
        let unreadable = |error: StepError| BuildError::Weights(Box::new(error));
        let weights = weights.transpose().map_err(|error| unreadable(error.into()))?;
        let mut pipeline = Pipeline::start(setup, &self.workers)?;
        if let Some(weights) = weights {
            weights.load(&mut pipeline).map_err(unreadable)?;
        }
        Ok(pipeline)
    }

    /// Checks what needs neither a placement nor a balance, and returns the parsed parameter groups.
    fn check_settings(&self) -> Result<ParameterGroups, BuildError> {
        let _: Scenario = self.job.faults.parse()?;
        self.threads.map(engine::check_threads).transpose()?;
        if !(1..=REPLICAS_MAX).contains(&self.job.replicas) {
            return Err(BuildError::Replicas { got: self.job.replicas });
        }
        if self.job.graphs.mode == GraphMode::On && self.job.replicas > 1 {
            return Err(BuildError::GraphsOfReplicas { replicas: self.job.replicas });
        }
        if self.job.reduce == Reduce::Mpi {
            self.check_reduce_mpi().map_err(|why| BuildError::Reduce { why })?;
        }
        if !matches!(self.workers, Workers::Threads) && self.model.spec.is_none() {
            return Err(BuildError::NoModelSpec);
        }
        if self.model.loss.is_some() && self.loss.is_some() {
            return Err(BuildError::SetTwice {
                what: "loss",
                of_model: "Model::with_loss",
                of_builder: "Builder::loss",
            });
        }
        if self.model.update_rule.is_some() && self.optim.is_some() {
            return Err(BuildError::SetTwice {
                what: "optimizer",
                of_model: "Model::with_optimizer",
                of_builder: "Builder::optimizer",
            });
        }
        if self.job.fused_optimizer {
            self.model.fused_update_rule(self.job.optim)?;
        }
        self.model.summary()?;
        self.check_names()?;
        let groups = ParameterGroups::new(&self.job.groups, &self.job.frozen)?;
        let tensors = self.model.tensors().into_iter();
        let parameters: Vec<String> =
            tensors.filter(|spec| spec.role == Role::Parameter).map(|spec| spec.name).collect();
        groups.check(&parameters, self.model.update_rule.is_some())?;
        Ok(groups)
    }

    fn check_reduce_mpi(&self) -> Result<(), String> {
        let codec = &self.job.codecs.replicas;
        if !codec.is_raw() {
            return Err(format!("MPI sums 32-bit values, so `CodecPolicy::replicas` must be raw; got {codec}"));
        }
        match &self.workers {
            #[cfg(feature = "mpi")]
            Workers::Mpi(ranks) if ranks.are_all() => Ok(()),
            _ => Err(REDUCE_MPI.to_owned()),
        }
    }

    /// The number of layers at the front that have nothing to train, if parameters are frozen.
    fn frozen_layers(&self, groups: &ParameterGroups) -> usize {
        if !groups.any_frozen() {
            return 0;
        }
        let trains = |spec: &TensorSpec| spec.role == Role::Parameter && !groups.freezes(&spec.name);
        self.model.layers.iter().take_while(|layer| !layer.tensors().iter().any(trains)).count()
    }

    /// Tensors and layers are addressed by name, so names must be unique. Only layers that tie a tensor share its name, and
    /// they must agree on what it is.
    fn check_names(&self) -> Result<(), BuildError> {
        let (mut layers, mut tensors) = (BTreeSet::new(), BTreeMap::new());
        let tied: BTreeSet<&String> = self.model.tied.iter().map(|(_, name)| name).collect();
        for layer in &self.model.layers {
            if !layers.insert(layer.name()) {
                return Err(BuildError::DuplicateName { name: format!("layer {}", layer.name()) });
            }
            for spec in layer.tensors() {
                let Some((user, before)) = tensors.insert(spec.name.clone(), (layer.name(), spec.clone())) else {
                    continue;
                };
                let same = (before.dims, before.kind, before.role) == (spec.dims, spec.kind, Role::Parameter);
                if !same || user == layer.name() || !tied.contains(&spec.name) {
                    return Err(BuildError::DuplicateName { name: format!("tensor {}", spec.name) });
                }
            }
        }
        Ok(())
    }

    /// The number of threads that was set, or the default for the workers of this placement.
    fn resolve_threads(&self, placement: Option<&Placement>) -> Result<usize, BuildError> {
        if let Some(threads) = self.threads {
            return Ok(engine::check_threads(threads)?);
        }
        let placement = self.plan.as_ref().map(Plan::placement).or(placement);
        // Without a placement each partition has its own worker.
        let workers = placement.map_or_else(
            || match &self.balance {
                BalanceSource::Even => 1,
                BalanceSource::Given(sizes) => sizes.len(),
                BalanceSource::Measured(options) => options.partitions,
            },
            Placement::workers,
        );
        let members = workers.saturating_mul(self.job.replicas);
        Ok(engine::default_threads(self.workers.most_on_one_host(members)))
    }

    /// The balance, and the estimate of its cost if it was measured.
    fn resolve_balance(
        &self,
        placement: Option<&Placement>,
        groups: &ParameterGroups,
    ) -> Result<(Balance, Option<Found>), BuildError> {
        let layers = self.model.layers.len();
        let partitions = self.plan.as_ref().map(Plan::partitions).or(placement.map(Placement::partitions));
        let (balance, found) = match &self.balance {
            BalanceSource::Even => (Balance::even(layers, partitions.unwrap_or(1))?, None),
            BalanceSource::Given(sizes) => (Balance::new(sizes.clone())?, None),
            BalanceSource::Measured(options) => {
                let found = self.measure_balance(options, placement, self.frozen_layers(groups))?;
                (found.balance.clone(), Some(found))
            }
        };
        balance.check(layers)?;
        Ok((balance, found))
    }

    /// Measures the layers and searches for the best cut.
    fn measure_balance(
        &self,
        options: &AutoBalance,
        placement: Option<&Placement>,
        frozen_layers: usize,
    ) -> Result<Found, BuildError> {
        let placement = self.plan.as_ref().map(Plan::placement).or(placement);
        // A given plan fits the skips of one cut only. Other cuts are estimated with the schedule, and with the plan's
        // recomputation as far as `Recompute` can express it.
        let recompute = self.plan.as_ref().map_or(self.recompute, |plan| {
            let last = MicroBatchId::new(plan.micro_batches() - 1);
            // Not the first partition, which may be frozen.
            let partition = PartitionId::new(plan.partitions() - 1);
            match [MicroBatchId(0), last].map(|micro_batch| plan.recomputes(partition, micro_batch)) {
                [_, true] => Recompute::Always,
                [true, false] => Recompute::ExceptLast,
                [false, false] => Recompute::Never,
            }
        });
        let run = RunShape {
            placement: placement.cloned().unwrap_or_else(|| Placement::one_worker_each(options.partitions.max(1))),
            schedule: self.schedule,
            micro_batches: self.plan.as_ref().map_or(self.micro_batches, Plan::micro_batches),
            recompute,
            codecs: &self.job.codecs,
            optim: self.job.optim,
            frozen_layers,
        };
        // Checked before measuring, which takes a while.
        Balance::even(self.model.layers.len(), options.partitions)?;
        if run.placement.partitions() != options.partitions {
            let placement = run.placement.partitions();
            return Err(BuildError::PartitionCount { placement, balance: options.partitions });
        }
        let measured = match &options.profile {
            Some(_) => None,
            None => {
                engine::set_cuda_math(self.job.tf32, self.job.cudnn_benchmark, self.job.cudnn_deterministic)
                    .map_err(BuildError::CutTensor)?;
                Some(profile::measure(&self.model, &options.sample, &profile::ProfileOptions::of(&self.job))?)
            }
        };
        let profile = measured.as_ref().or(options.profile.as_ref()).map_or(&[][..], Vec::as_slice);
        let (expected, got) = (self.model.layers.len(), profile.len());
        if got != expected {
            let wrong = format!("expected the costs of {expected} layers, got those of {got}: measure this model");
            return Err(BuildError::CutTensor(Fault::invalid_job("the profile", wrong)));
        }
        let (problem, start) = (options.problem(&self.model, profile, run)?, Instant::now());
        let mut go_on = |_| options.search_limit.is_none_or(|limit| start.elapsed() < limit);
        let found = problem.search_while(&mut go_on);
        if let Err(BalanceError::Apart { balance, .. }) = &found {
            self.model.check_ties(balance, &problem.placement)?;
        }
        Ok(found.map_err(Box::new)?)
    }

    /// The given plan, checked, or that of the schedule.
    fn resolve_plan(
        &mut self,
        balance: &Balance,
        placement: Option<Placement>,
        groups: &ParameterGroups,
    ) -> Result<Plan, BuildError> {
        let frozen_layers = self.frozen_layers(groups);
        let within = |p: &usize| balance.range(PartitionId::new(*p)).end <= frozen_layers;
        let frozen = (0..balance.partitions()).take_while(within).count();
        let uses: Vec<SkipUse> = self.model.layers.iter().map(|l| l.skips()).collect();
        let skips = SkipLayout::new(&uses, balance)?.edges();
        // Skips to the next partition travel with its activations.
        let skips: Vec<_> = skips.into_iter().filter(|(from, to)| to.0 > from.0 + 1).collect();
        let Some(plan) = self.plan.take() else {
            let placement = placement.unwrap_or_else(|| Placement::one_worker_each(balance.partitions()));
            let mut request = Request::new(placement, self.micro_batches);
            request.recompute = self.recompute;
            request.skips = skips;
            request.frozen = frozen;
            return Ok(self.schedule.plan(&request)?);
        };
        check(&plan)?;
        if plan.mode() != Mode::Train {
            return Err(BuildError::EvaluationPlan);
        }
        if plan.skips() != skips {
            let [expected, got] = [&skips[..], plan.skips()].map(|skips| format!("{skips:?}"));
            return Err(BuildError::PlanSkips { expected, got });
        }
        if plan.frozen() > frozen {
            return Err(BuildError::PlanFrozen { expected: frozen, got: plan.frozen() });
        }
        Ok(plan)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::zoo::Mlp;

    #[test]
    fn threads_default_to_the_cores_divided_by_the_workers() {
        let builder = || Pipeline::builder(Mlp::default().model().unwrap()).device(Device::Cpu);
        for (builder, workers) in [
            (builder(), 1),
            (builder().place("a,b,a"), 2),
            (builder().balance([1, 1, 2]), 3),
            (builder().place("a,b").replicas(2), 4),
        ] {
            let pipeline = builder.build().unwrap();
            assert_eq!(pipeline.topology().size(), workers);
            assert_eq!(pipeline.threads(), engine::default_threads(workers));
            assert_eq!(pipeline.devices(), vec![Device::Cpu; workers]);
        }
        assert_eq!(builder().threads(3).build().unwrap().threads(), 3);
    }

    #[test]
    fn the_default_device_is_what_auto_finds() {
        let pipeline = Pipeline::builder(Mlp::default().model().unwrap()).build().unwrap();
        assert_eq!(pipeline.devices(), [Device::Auto.resolved()]);
    }
}
