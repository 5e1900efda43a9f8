//! The settings of a run, as the driver sends them to one worker.

use crate::comm::codec_policy::CodecPolicy;
use crate::comm::timeouts::Timeouts;
use crate::comm::topology::Topology;
use crate::engine::{self, Device, Devices, Precision, Tf32};
use crate::failure::Fault;
use crate::model::loss::Loss;
use crate::model::ModelSpec;
use crate::runtime::all_reduce::Reduce;
use crate::runtime::graphs::{GraphOptions, LANES_MAX};
use crate::runtime::optimizer::Optim;
use crate::runtime::parameter_groups::ParameterGroup;
use crate::runtime::trace::PhaseTiming;
use distgpipe_core::partition::Balance;
use distgpipe_core::schedule::{check, evaluate_plan, Mode, Plan, PlanParseError, Request, ScheduleError};
use distgpipe_core::WorkerId;
use serde::{Deserialize, Serialize};

/// The settings that a worker needs to take part in a run. Workers in other processes receive it as JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// The worker this copy is for.
    pub worker: WorkerId,
    /// How to build the model. `None` for workers in the driver's process, which get the model itself.
    #[serde(rename = "recipe")]
    pub model: Option<ModelSpec>,
    /// How many consecutive layers each partition has.
    pub balance: Balance,
    /// The training plan of each replica, in the text form of [`Plan`].
    pub plan: String,
    /// The number of data-parallel replicas of the plan's workers: 1 to [`REPLICAS_MAX`].
    pub replicas: usize,
    /// How the replicas sum their gradients.
    #[serde(default, skip_serializing_if = "is_default")]
    pub reduce: Reduce,
    /// Seeds initial weights, dropout and stochastic rounding.
    pub seed: u64,
    /// The optimizer and its settings.
    pub optim: Optim,
    /// The parameters that have their own learning rate or weight decay.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<ParameterGroup>,
    /// Patterns of the parameters that are not trained; see [`crate::runtime::parameter_groups`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub frozen: Vec<String>,
    /// The loss that the worker of the last partition computes.
    pub loss: Loss,
    /// The codecs of the links between workers.
    pub codecs: CodecPolicy,
    /// The devices of the workers; see [`Job::device`].
    pub devices: Devices,
    /// libtorch threads per worker: 1 to [`engine::THREADS_MAX`].
    pub threads: usize,
    /// Whether images and convolution weights use the channels-last memory format.
    pub channels_last: bool,
    /// The floating-point type of the forward pass.
    pub precision: Precision,
    /// Whether workers on GPUs record their passes as CUDA graphs.
    #[serde(default, skip_serializing_if = "is_default")]
    pub graphs: GraphOptions,
    /// Where GPUs use TF32.
    #[serde(default, skip_serializing_if = "is_default")]
    pub tf32: Tf32,
    /// Whether cuDNN measures its algorithms for each new shape.
    #[serde(default, skip_serializing_if = "is_default")]
    pub cudnn_benchmark: bool,
    /// Whether cuDNN takes only algorithms that give equal bits in every run.
    #[serde(default, skip_serializing_if = "is_default")]
    pub cudnn_deterministic: bool,
    /// Whether parameters are updated by libtorch's fused kernels.
    #[serde(default, skip_serializing_if = "is_default")]
    pub fused_optimizer: bool,
    /// What the times of phases cover on a GPU.
    #[serde(default, skip_serializing_if = "is_default")]
    pub phases: PhaseTiming,
    /// Whether reports contain single events ([`Span`](crate::runtime::trace::Span)), for a trace.
    pub trace: bool,
    /// The time-outs of the run.
    pub timeouts: Timeouts,
    /// Faults to inject, for tests; see [`crate::comm::transport::faulty`] for the format.
    pub faults: String,
    /// The address of each member of the run; `None` for those in the driver's process.
    pub addresses: Vec<Option<String>>,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl Job {
    /// The device of this worker.
    pub fn device(&self) -> Device {
        self.devices.for_worker(self.worker.0 as usize)
    }

    /// Checks the settings, which may come from another process, and returns the members of the run with their plan.
    pub fn topology(&self) -> Result<Topology, Fault> {
        let plan: Plan = self.plan.parse().map_err(|e: PlanParseError| Fault::invalid_job("the plan", e))?;
        check(&plan).map_err(|e| Fault::invalid_job("the plan", e))?;
        if plan.mode() != Mode::Train {
            return Err(Fault::invalid_job("the plan", "expected a plan for training, got one for evaluation"));
        }
        if self.balance.partitions() != plan.partitions() {
            let text = format!("expected {} partitions, as in the plan, got {}", plan.partitions(), self.balance);
            return Err(Fault::invalid_job("`Builder::balance`", text));
        }
        self.codecs.check(&plan).map_err(|e| Fault::invalid_job("`Builder::codecs`", e))?;
        engine::check_threads(self.threads).map_err(|e| Fault::invalid_job("`Builder::threads`", e))?;
        if let Some(streams) = self.graphs.streams.filter(|streams| !(1..=LANES_MAX).contains(streams)) {
            let text = format!("expected 1 to {LANES_MAX} streams, got {streams}");
            return Err(Fault::invalid_job("`Builder::graphs`", text));
        }
        if !(1..=REPLICAS_MAX).contains(&self.replicas) {
            let text = format!("expected 1 to {REPLICAS_MAX}, got {}", self.replicas);
            return Err(Fault::invalid_job("`Builder::replicas`", text));
        }
        if self.reduce == Reduce::Mpi && !self.codecs.replicas.is_raw() {
            let text =
                format!("MPI sums 32-bit values, so `CodecPolicy::replicas` must be raw; got {}", self.codecs.replicas);
            return Err(Fault::invalid_job("`Builder::reduce`", text));
        }
        Ok(Topology::new(plan, self.replicas))
    }
}

/// The forward-only plan on the workers of `plan`. The workers run it, and the driver derives the same one for its
/// watchdog.
pub fn forward_plan(plan: &Plan, micro_batches: usize) -> Result<Plan, ScheduleError> {
    let mut request = Request::new(plan.placement().clone(), micro_batches);
    request.skips = plan.skips().to_vec();
    evaluate_plan(&request)
}

/// The most replicas a run may have. It bounds the memory that a job from the network can make a worker allocate.
pub const REPLICAS_MAX: usize = 256;
