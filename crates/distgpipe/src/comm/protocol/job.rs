//! What a worker is told: the job once, then one command after the other; and what it answers.

use crate::codecs::Codecs;
use crate::engine::{Device, Devices, Precision};
use crate::failure::Fault;
use crate::loss::Loss;
use crate::metrics::ClassCounts;
use crate::model::Recipe;
use crate::optim::Optim;
use crate::roster::Roster;
use crate::trace::{PhaseTimes, Span};
use crate::transport::{Timeouts, Traffic};
use crate::update::{After, Exact};
use distgpipe_core::partition::Balance;
use distgpipe_core::schedule::{check, evaluate_plan, Mode, Plan, Request, ScheduleError};
use distgpipe_core::WorkerId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Everything a worker needs to know to take part in a run. Sent as JSON to workers in other processes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// The worker this copy is for.
    pub worker: WorkerId,
    /// How to make the model; absent in this process, where the model itself is at hand.
    pub recipe: Option<Recipe>,
    /// Which layers run together.
    pub balance: Balance,
    /// The training plan of each replica, as text.
    pub plan: String,
    /// How many replicas of the plan's workers there are.
    pub replicas: usize,
    /// Of weights and dropout.
    pub seed: u64,
    /// How parameters are stepped.
    pub optim: Optim,
    /// What the last partition computes.
    pub loss: Loss,
    /// How tensors are encoded on their way between workers.
    pub codecs: Codecs,
    /// Where to compute.
    pub devices: Devices,
    /// libtorch threads per worker.
    pub threads: usize,
    /// Whether images and convolution weights lie channels-last.
    pub channels_last: bool,
    /// What to compute in.
    pub precision: Precision,
    /// Whether single events are wanted.
    pub trace: bool,
    /// When silence counts as failure.
    pub timeouts: Timeouts,
    /// What shall go wrong, in the form of [`crate::transport::faulty`].
    pub faults: String,
    /// Where the other workers listen, by number; `None` for those in the driver's process.
    pub addresses: Vec<Option<String>>,
}

impl Job {
    /// Where this worker computes.
    pub fn device(&self) -> Device {
        self.devices.of(self.worker.0 as usize)
    }

    /// The members and their plan, if they and everything else that a peer may have sent wrongly are sound.
    pub fn roster(&self) -> Result<Roster, Fault> {
        let plan: Plan = self.plan.parse().map_err(|e| Fault::protocol("a plan", format!("{e}")))?;
        check(&plan).map_err(|e| Fault::protocol("a sound plan", e.to_string()))?;
        if plan.mode() != Mode::Train {
            return Err(Fault::protocol("a plan for training", "one for evaluation"));
        }
        if self.balance.partitions() != plan.partitions() {
            let expected = format!("a balance of {} partitions", plan.partitions());
            return Err(Fault::protocol(expected, self.balance.to_string()));
        }
        self.codecs.check(&plan).map_err(|e| Fault::protocol("codecs for the plan's links", e.to_string()))?;
        if !(1..=THREADS_MAX).contains(&self.threads) {
            return Err(Fault::protocol(format!("1 to {THREADS_MAX} threads"), self.threads.to_string()));
        }
        if !(1..=REPLICAS_MAX).contains(&self.replicas) {
            return Err(Fault::protocol(format!("1 to {REPLICAS_MAX} replicas"), self.replicas.to_string()));
        }
        Ok(Roster::new(plan, self.replicas))
    }
}

/// The forward-only plan on the same workers: made alike by the workers, who follow it, and by the driver, who watches.
pub fn forward_plan(plan: &Plan, micro_batches: usize) -> Result<Plan, ScheduleError> {
    let mut request = Request::new(plan.placement().clone(), micro_batches);
    request.skips = plan.skips().to_vec();
    evaluate_plan(&request)
}

/// More threads than any machine has cores; libtorch's pool ends the process at absurd numbers.
pub const THREADS_MAX: usize = 1024;

/// A bound on how many members a job can make a worker reckon with.
pub const REPLICAS_MAX: usize = 256;

/// What a step is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// Forward, backward, update.
    Train,
    /// Forward and backward; gradients stay to be looked at, nothing is updated.
    Gradients,
    /// Forward, with loss and score.
    Evaluate,
    /// Forward; the output goes to the driver.
    Predict,
}

/// One step.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Step {
    /// Its number: names messages.
    pub number: u64,
    /// How many batches were learned from before: names random streams, so that evaluating in between changes nothing.
    pub learned: u64,
    /// What it is for.
    pub purpose: Purpose,
    /// Rows of the batch, over all replicas.
    pub rows: usize,
    /// Into how many micro-batches they are cut, over all replicas.
    pub all_micro_batches: usize,
    /// The first of them that is this replica's.
    pub first: usize,
    /// How many from there on are.
    pub micro_batches: usize,
    /// How many batches make the update; each counts for as much.
    pub batches: u64,
    /// Whether gradients of earlier batches are forgotten first.
    pub fresh: bool,
    /// What becomes of the gradients.
    pub after: After,
    /// The samples in the rows, if a codec of the run wants to know them.
    pub samples: Vec<u64>,
    /// Whether the workers keep copies of what they send, for [`Which::Captured`].
    pub capture: bool,
}

/// Which tensors of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Which {
    /// Learned tensors and buffers.
    State,
    /// What the optimizer remembers of each parameter; see [`crate::optim::Slot`].
    Optimizer,
    /// The gradients that the last [`Purpose::Gradients`] step left.
    Gradients,
    /// What was sent over links in the last step that captured it, before any codec.
    Captured,
}

/// What the driver asks for.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Command {
    /// Run a step; answered by a [`StepReport`].
    Step(Step),
    /// Take over the parameters and buffers of the first replica; answered by an empty report.
    Agree,
    /// Sit out a step that has no rows for this replica; answered by a [`StepReport`].
    Rest,
    /// Move the parameters by the gradients that the last step left and reported the norms of ([`After::Norms`]);
    /// answered by a [`StepReport`] of what that took.
    Update {
        /// How far.
        learning_rate: f64,
        /// What the gradients are multiplied by first.
        scale: Exact,
    },
    /// Send tensors; answered by their names, then the tensors one by one.
    Collect {
        /// What they are.
        which: Which,
        /// Which of them; absent for all.
        names: Option<Vec<String>>,
    },
    /// Take over tensors of these names, which follow one by one; answered by an empty report.
    Load {
        /// What they are: [`Which::State`] or [`Which::Optimizer`].
        which: Which,
        /// Which of them.
        names: Vec<String>,
    },
    /// Have the codecs of all links forget what they remember; answered by an empty report.
    Forget,
    /// The run is over.
    Finish,
}

/// What one worker says of a step.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct StepReport {
    /// Sum over rows of the loss; the worker with the last partition has it.
    pub loss_sum: Option<f64>,
    /// Rows whose class is right.
    pub correct: Option<u64>,
    /// What each class was taken for, in evaluation.
    pub classes: Option<ClassCounts>,
    /// Squared norms of its gradients by name, if [`After::Norms`] asks for them.
    pub squared_norms: BTreeMap<String, Exact>,
    /// Time per phase.
    pub phases: PhaseTimes,
    /// From the command to the report.
    pub step_ns: u64,
    /// The most bytes that tensors held; see [`crate::engine::peak_bytes`].
    pub peak_bytes: u64,
    /// What the GPU's allocator took for them; see [`crate::engine::reserved_bytes`].
    pub reserved_bytes: Option<u64>,
    /// What each outgoing link has carried since the run began.
    pub links: Vec<(WorkerId, Traffic)>,
    /// Single events, if wanted.
    pub spans: Vec<Span>,
}

impl StepReport {
    /// With what the worker did in the same step after this report.
    pub fn and_then(&mut self, later: StepReport) {
        self.phases = self.phases.plus(&later.phases);
        self.step_ns += later.step_ns;
        self.peak_bytes = self.peak_bytes.max(later.peak_bytes);
        self.spans.extend(later.spans);
    }
}
