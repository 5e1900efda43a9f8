//! From what the user says to a running pipeline.

use super::{Batch, Pipeline};
use crate::auto_balance::{AutoBalance, Run};
use crate::codecs::{Codecs, CodecsError};
use crate::engine::{self, Devices, Precision};
use crate::failure::Failure;
use crate::job::{Job, REPLICAS_MAX};
use crate::launch::{self, Workers};
use crate::layer::ShapeError;
use crate::loss::Loss;
use crate::model::Model;
use crate::optim::Optim;
use crate::profile;
use crate::roster::Roster;
use crate::transport::faulty::{Scenario, ScenarioError};
use crate::transport::Timeouts;
use distgpipe_core::balance::{BalanceError, Found};
use distgpipe_core::partition::{Balance, PartitionError};
use distgpipe_core::placement::{Placement, PlacementError};
use distgpipe_core::schedule::{check, CheckError, Mode, Plan, Recompute, Request, Schedule, ScheduleError};
use distgpipe_core::skip::{SkipError, SkipLayout, SkipUse};
use distgpipe_core::{MicroBatchId, PartitionId, WorkerId};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Why a pipeline cannot be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The balance does not fit the model.
    #[error("balance: {0}")]
    Balance(#[from] PartitionError),
    /// No cut can be found by measuring.
    #[error("auto-balance: {0}")]
    AutoBalance(#[from] Box<BalanceError>),
    /// The placement is not one.
    #[error("placement: {0}")]
    Placement(#[from] PlacementError),
    /// The schedule cannot be made.
    #[error("schedule: {0}")]
    Schedule(#[from] ScheduleError),
    /// A given plan is unsound.
    #[error("plan: {0}")]
    Plan(#[from] CheckError),
    /// Stashes and pops do not match.
    #[error("skips: {0}")]
    Skips(#[from] SkipError),
    /// The layers do not fit each other.
    #[error(transparent)]
    Shapes(#[from] ShapeError),
    /// The fault scenario is not one.
    #[error(transparent)]
    Scenario(#[from] ScenarioError),
    /// The codecs do not fit the links.
    #[error("codecs: {0}")]
    Codecs(#[from] CodecsError),
    /// Two settings contradict each other.
    #[error("{0}")]
    Settings(String),
    /// A worker could not be started.
    #[error(transparent)]
    Failed(#[from] Failure),
}

enum Cut {
    Even,
    Given(Vec<usize>),
    Measured(Box<AutoBalance>),
}

/// Describes a pipeline; see [`Pipeline::builder`].
pub struct Builder {
    model: Model,
    cut: Cut,
    placement: Option<String>,
    plan: Option<Plan>,
    micro_batches: usize,
    schedule: Schedule,
    recompute: Recompute,
    workers: Workers,
    learning_rate: f64,
    job: Job,
}

impl Builder {
    pub(super) fn new(model: Model) -> Self {
        let job = Job {
            worker: WorkerId(0),
            recipe: model.recipe.clone(),
            balance: Balance::even(1, 1).expect("one layer in one partition"),
            plan: String::new(),
            replicas: 1,
            seed: 0,
            optim: Optim::default(),
            loss: Loss::default(),
            codecs: Codecs::default(),
            devices: Devices::default(),
            threads: 1,
            channels_last: true,
            precision: Precision::default(),
            trace: false,
            timeouts: Timeouts::default(),
            faults: String::new(),
            addresses: Vec::new(),
        };
        Builder {
            model,
            cut: Cut::Even,
            placement: None,
            plan: None,
            micro_batches: 1,
            schedule: Schedule::OneFOneB,
            recompute: Recompute::Never,
            workers: Workers::Threads,
            learning_rate: 0.01,
            job,
        }
    }

    /// How many layers each partition has.
    pub fn balance(mut self, layers: impl Into<Vec<usize>>) -> Self {
        self.cut = Cut::Given(layers.into());
        self
    }

    /// Cuts into so many partitions with which a step is quick, measured on this sample of one micro-batch. Links count
    /// as free; see [`auto_balance_with`](Self::auto_balance_with).
    pub fn auto_balance(self, partitions: usize, sample: Batch) -> Self {
        self.auto_balance_with(AutoBalance::new(partitions, sample))
    }

    /// The same, by time or by memory, with what links cost and how much memory there is.
    pub fn auto_balance_with(mut self, how: AutoBalance) -> Self {
        self.cut = Cut::Measured(Box::new(how));
        self
    }

    /// Which worker runs each partition, such as `client,server,client`; by default each has a worker of its own.
    pub fn place(mut self, workers: impl Into<String>) -> Self {
        self.placement = Some(workers.into());
        self
    }

    /// Into how many micro-batches a batch is cut.
    pub fn micro_batches(mut self, count: usize) -> Self {
        self.micro_batches = count;
        self
    }

    /// The order of the work.
    pub fn schedule(mut self, schedule: Schedule) -> Self {
        self.schedule = schedule;
        self
    }

    /// Which activations are computed again instead of kept.
    pub fn recompute(mut self, recompute: Recompute) -> Self {
        self.recompute = recompute;
        self
    }

    /// A plan of your own instead of a schedule; it is checked first, and brings its placement and micro-batches.
    pub fn plan(mut self, plan: Plan) -> Self {
        self.plan = Some(plan);
        self
    }

    /// Whether workers are threads, processes or elsewhere.
    pub fn workers(mut self, workers: Workers) -> Self {
        self.workers = workers;
        self
    }

    /// How many replicas of all workers share each batch. Each has the whole model, cut in the same way, and its own part
    /// of the rows; before an update they add up their gradients. Remote workers are those of the first replica beside
    /// worker 0, then those of the second, and so on.
    pub fn replicas(mut self, count: usize) -> Self {
        self.job.replicas = count;
        self
    }

    /// How parameters are stepped.
    pub fn optimizer(mut self, optim: Optim, learning_rate: f64) -> Self {
        self.job.optim = optim;
        self.learning_rate = learning_rate;
        self
    }

    /// What is made small.
    pub fn loss(mut self, loss: Loss) -> Self {
        self.job.loss = loss;
        self
    }

    /// How tensors are encoded on their way between workers; raw unless said otherwise.
    pub fn codecs(mut self, codecs: Codecs) -> Self {
        self.job.codecs = codecs;
        self
    }

    /// The seed of weights and dropout.
    pub fn seed(mut self, seed: u64) -> Self {
        self.job.seed = seed;
        self
    }

    /// Where workers compute: all on one device, or on several in turn, those of the first replica first.
    pub fn device(mut self, devices: impl Into<Devices>) -> Self {
        self.job.devices = devices.into();
        self
    }

    /// libtorch threads per worker.
    pub fn threads(mut self, threads: usize) -> Self {
        self.job.threads = threads;
        self
    }

    /// Whether images lie channels-last, which is faster; on by default.
    pub fn channels_last(mut self, channels_last: bool) -> Self {
        self.job.channels_last = channels_last;
        self
    }

    /// What the workers compute in; 32-bit floats by default. With [`Precision::Bf16`] every forward pass is under libtorch's
    /// autocast: what crosses between partitions, and what [`Pipeline::predict`] gives, is of the type the layers make.
    pub fn precision(mut self, precision: Precision) -> Self {
        self.job.precision = precision;
        self
    }

    /// Whether each step reports its single events.
    pub fn trace(mut self, trace: bool) -> Self {
        self.job.trace = trace;
        self
    }

    /// When silence counts as failure.
    pub fn timeouts(mut self, timeouts: Timeouts) -> Self {
        self.job.timeouts = timeouts;
        self
    }

    /// What shall go wrong, in the form of [`crate::transport::faulty`]; for tests.
    pub fn faults(mut self, scenario: impl Into<String>) -> Self {
        self.job.faults = scenario.into();
        self
    }

    /// Checks everything and starts the workers.
    pub fn build(mut self) -> Result<Pipeline, BuildError> {
        let _: Scenario = self.job.faults.parse()?;
        if self.job.threads == 0 {
            return Err(BuildError::Settings("threads: a worker needs at least 1".to_owned()));
        }
        if !(1..=REPLICAS_MAX).contains(&self.job.replicas) {
            let text = format!("replicas: expected 1 to {REPLICAS_MAX}, got {}", self.job.replicas);
            return Err(BuildError::Settings(text));
        }
        if !matches!(self.workers, Workers::Threads) && self.model.recipe.is_none() {
            let text =
                "a model of your own layers has no recipe by which another process could make it: run the workers \
                        as threads, or give the model a `recipe` and serve it from a worker program that knows it";
            return Err(BuildError::Settings(text.to_owned()));
        }
        self.model.summary()?;
        self.check_names()?;
        engine::start();
        let placement = self.placement.as_deref().map(str::parse::<Placement>).transpose()?;
        let partitions = self.plan.as_ref().map(Plan::partitions).or(placement.as_ref().map(Placement::partitions));
        let (balance, auto_balanced) = self.cut(partitions, placement.as_ref())?;
        let uses: Vec<SkipUse> = self.model.layers.iter().map(|l| l.skips()).collect();
        let skips = SkipLayout::new(&uses, &balance)?.edges();
        let beyond_neighbours: Vec<_> = skips.into_iter().filter(|(from, to)| to.0 > from.0 + 1).collect();
        let plan = match self.plan.take() {
            Some(plan) => {
                check(&plan)?;
                if plan.mode() != Mode::Train {
                    let text = "the plan is one for evaluation: a pipeline is built from one for training";
                    return Err(BuildError::Settings(text.to_owned()));
                }
                if plan.skips() != beyond_neighbours {
                    return Err(BuildError::Settings(format!(
                        "the plan carries skips {:?}, the model's cut needs {beyond_neighbours:?}",
                        plan.skips()
                    )));
                }
                plan
            }
            None => {
                let placement = placement.unwrap_or_else(|| Placement::one_worker_each(balance.partitions()));
                let mut request = Request::new(placement, self.micro_batches);
                request.recompute = self.recompute;
                request.skips = beyond_neighbours;
                self.schedule.plan(&request)?
            }
        };
        if plan.partitions() != balance.partitions() {
            let text = format!(
                "the placement has {} partitions and the balance {}: give both the same number",
                plan.partitions(),
                balance.partitions()
            );
            return Err(BuildError::Settings(text));
        }
        self.job.codecs.check(&plan)?;
        self.job.balance = balance.clone();
        self.job.plan = plan.to_string();
        let roster = Arc::new(Roster::new(plan, self.job.replicas));
        let team = launch::start(&self.job, &roster, &self.model, &self.workers)?;
        let mut pipeline = Pipeline {
            team,
            roster,
            balance,
            auto_balanced,
            model: self.model,
            timeouts: self.job.timeouts,
            command: 0,
            step: 0,
            learned: 0,
            evaluating: None,
            learning_rate: self.learning_rate,
            clip_norm: None,
            begun: None,
            optim: self.job.optim,
            seed: self.job.seed,
            wants_samples: self.job.codecs.want_samples(),
            codecs: self.job.codecs,
            capture: false,
        };
        pipeline.wait_ready()?;
        pipeline.agree()?;
        Ok(pipeline)
    }

    /// Layers and tensors go by their names, so no two may share one.
    fn check_names(&self) -> Result<(), BuildError> {
        let mut names = BTreeSet::new();
        for layer in &self.model.layers {
            let layer_name = format!("layer {}", layer.name());
            let tensors = layer.tensors().into_iter().map(|spec| format!("tensor {}", spec.name));
            for name in std::iter::once(layer_name).chain(tensors) {
                if let Some(name) = names.replace(name) {
                    return Err(BuildError::Settings(format!(
                        "the model has two of {name}: each needs a name of its own"
                    )));
                }
            }
        }
        Ok(())
    }

    /// The cut, and what was found with it if it is a measured one.
    fn cut(
        &self,
        partitions: Option<usize>,
        placement: Option<&Placement>,
    ) -> Result<(Balance, Option<Found>), BuildError> {
        let layers = self.model.layers.len();
        let (balance, found) = match &self.cut {
            Cut::Even => (Balance::even(layers, partitions.unwrap_or(1))?, None),
            Cut::Given(sizes) => (Balance::new(sizes.clone())?, None),
            Cut::Measured(how) => {
                let found = self.measured_cut(how, placement)?;
                (found.balance.clone(), Some(found))
            }
        };
        balance.check(layers)?;
        Ok((balance, found))
    }

    /// Measures the layers and finds the cut.
    fn measured_cut(&self, how: &AutoBalance, placement: Option<&Placement>) -> Result<Found, BuildError> {
        let placement = self.plan.as_ref().map(Plan::placement).or(placement);
        // A given plan fits the skips of one cut only. Others are judged by the schedule, as far as the plan says how.
        let recompute = self.plan.as_ref().map_or(self.recompute, |plan| {
            let last = MicroBatchId::new(plan.micro_batches() - 1);
            match [MicroBatchId(0), last].map(|micro_batch| plan.recomputes(PartitionId(0), micro_batch)) {
                [_, true] => Recompute::Always,
                [true, false] => Recompute::ExceptLast,
                [false, false] => Recompute::Never,
            }
        });
        let run = Run {
            placement: placement.cloned().unwrap_or_else(|| Placement::one_worker_each(how.partitions.max(1))),
            schedule: self.schedule,
            micro_batches: self.plan.as_ref().map_or(self.micro_batches, Plan::micro_batches),
            recompute,
            codecs: &self.job.codecs,
            optim: self.job.optim,
        };
        // Before the measuring, which takes a while.
        Balance::even(self.model.layers.len(), how.partitions)?;
        if run.placement.partitions() != how.partitions {
            return Err(BuildError::Settings(format!(
                "the placement has {} partitions and the balance {}: give both the same number",
                run.placement.partitions(),
                how.partitions
            )));
        }
        let profile = profile::measure(&self.model, &how.sample, &profile::Options::of(&self.job))?;
        let problem = how.problem(&self.model, &profile, run)?;
        Ok(problem.search().map_err(Box::new)?)
    }
}
