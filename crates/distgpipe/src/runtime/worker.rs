//! A worker: builds its partitions, then runs the driver's commands until [`Command::Finish`] or until the run fails.

mod gradient_sharing;
mod state_transfer;
mod step;

use crate::comm::abort::AbortFlag;
use crate::comm::link_codecs::LinkCodecs;
use crate::comm::mailbox::Mailbox;
use crate::comm::message::{Message, Tag};
use crate::comm::protocol::{Command, Job, StepReport};
use crate::comm::status::{Activity, SharedStatus};
use crate::comm::tensor_bounds::TensorBounds;
use crate::comm::topology::Topology;
use crate::comm::traffic::Counters;
use crate::comm::transport::Outgoing;
use crate::engine::cuda;
use crate::engine::{self, Meter, Stream};
use crate::failure::{Failure, Fault};
use crate::model::Model;
use crate::runtime::all_reduce::{RingAllReduce, RingOptions};
use crate::runtime::graphs::{GraphMode, WorkerGraphs};
use crate::runtime::optimizer::{Optim, Optimizer};
use crate::runtime::parameter_groups::{ParameterGroups, ParameterSettings};
use crate::runtime::partition::{Partition, PartitionOptions, WorkerTensors};
use crate::runtime::stage::Stage;
use crate::runtime::trace::Recorder;
use distgpipe_core::schedule::Plan;
use distgpipe_core::skip::{SkipLayout, SkipUse};
use distgpipe_core::wire::Kind;
use distgpipe_core::{PartitionId, WorkerId};
use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

/// A worker that has not built its partitions yet.
pub struct Worker {
    /// The settings of the run, with this worker's number.
    pub job: Job,
    /// All members of the run and their plan.
    pub topology: Arc<Topology>,
    /// The whole model as specs; the worker builds only the tensors of its own partitions.
    pub model: Model,
    /// Receives every message to this worker.
    pub mailbox: Arc<Mailbox>,
    /// How large the tensors of its peers may be, if they are in other processes.
    pub bounds: Arc<TensorBounds>,
    /// The links to the other workers.
    pub outgoing: BTreeMap<WorkerId, Box<dyn Outgoing>>,
    /// The link to the driver.
    pub driver: Box<dyn Outgoing>,
    /// The traffic counters of its outgoing links, for its reports.
    pub links: Vec<(WorkerId, Counters)>,
    /// The codecs at this worker's ends of its links.
    pub link_codecs: LinkCodecs,
    /// Counts the memory of its tensors.
    pub meter: Meter,
    /// Set by the first failure of any thread of the run in this process.
    pub abort: AbortFlag,
    /// What the worker is doing, for the watchdog.
    pub status: Arc<SharedStatus>,
}

impl Worker {
    /// Runs until the driver ends the run. Any failure, a panic included, sets the run's abort flag and is returned.
    pub fn run(self) -> Result<(), Failure> {
        let abort = self.abort.clone();
        let status = self.status.clone();
        let name = self.topology.name(self.job.worker);
        let result = std::panic::catch_unwind(AssertUnwindSafe(|| self.build_and_run()));
        result
            .unwrap_or_else(|panic| {
                let phase = match status.read().activity {
                    Activity::Running(action) | Activity::Waiting(action) => action.to_string(),
                    Activity::AllReduce => "sharing gradients".to_owned(),
                    Activity::Idle | Activity::Busy => "work between two actions".to_owned(),
                };
                Err(Failure::new(&name, phase, Fault::Panic(panic_message(panic.as_ref()))))
            })
            .map_err(|failure| abort.fail(failure))
    }

    fn build_and_run(self) -> Result<(), Failure> {
        let worker = self.job.worker;
        let name = self.topology.name(worker);
        self.status.begin(Activity::Busy, 0);
        engine::attach_thread(self.job.threads, self.meter.number());
        let mut built = BuiltWorker::build(self).map_err(failed(&name, "building its partitions"))?;
        let ready = Message::text(Tag::control(Kind::Ready, 0, worker), "");
        built.stage.driver.send(ready).map_err(failed(&name, "reporting ready"))?;
        // The abort flag is set before `built` is dropped, so that other threads see the failure at once: closing this
        // worker's links may take a while.
        built.run_commands().map_err(|failure| built.stage.abort.fail(failure))
    }
}

/// For `map_err`: the failure of the named worker in a phase.
fn failed<'a>(name: &'a str, phase: &'static str) -> impl FnOnce(Fault) -> Failure + 'a {
    move |fault| Failure::new(name, phase, fault)
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text =
        panic.downcast_ref::<&str>().map(|s| (*s).to_owned()).or_else(|| panic.downcast_ref::<String>().cloned());
    let text = text.unwrap_or_else(|| "with a payload that is not text".to_owned());
    // tch unwraps libtorch's errors, so the C++ stack trace follows escaped in the same line.
    let text = text.split("\\nException raised from").next().unwrap_or_default();
    text.lines().next().unwrap_or_default().to_owned()
}

/// A worker whose partitions are built.
struct BuiltWorker {
    stage: Stage,
    /// Absent in a run without replicas, and while a step's all-reduce uses it.
    ring: Option<RingAllReduce>,
    /// Forward-only plans that were used before, by number of micro-batches.
    forward_plans: BTreeMap<usize, Plan>,
    optimizer: Optimizer,
    /// How many updates this worker has made since it was built.
    updates: u64,
    /// The number of the step whose gradients wait for [`Command::Update`].
    deferred_step: Option<u64>,
    link_codecs: LinkCodecs,
    meter: Meter,
}

impl BuiltWorker {
    fn build(worker: Worker) -> Result<Self, Fault> {
        let Worker { job, topology, model, mailbox, bounds, mut outgoing, driver, links, .. } = worker;
        let Worker { link_codecs, meter, abort, status, .. } = worker;
        let device = job.device();
        let device = device.open().map_err(|e| Fault::Device { device: device.to_string(), source: e.into() })?;
        // Replicas share gradients while backward passes still run, and a graph tells nothing of a gradient before its end.
        let records = job.graphs.mode != GraphMode::Off && job.replicas == 1;
        if let Some(index) = cuda::index(device) {
            match records {
                true => cuda::unshared_stream(index)?,
                false => cuda::own_stream(index)?,
            }
            engine::set_cuda_math(job.tf32, job.cudnn_benchmark, job.cudnn_deterministic)?;
            cuda::backward_on_this_thread();
        }
        let members = 0..topology.plan().placement().workers();
        let sharing = members.filter(|&member| job.devices.for_worker(member) == job.device()).count();
        let graphs = match records {
            true => WorkerGraphs::new(job.graphs, topology.plan(), device, sharing)?,
            false => None,
        };
        let ring = RingAllReduce::new(RingOptions {
            topology: &topology,
            member: job.worker,
            device,
            mailbox: &mailbox,
            outgoing: &mut outgoing,
            links: &links,
            link_codecs: &link_codecs,
            reduce: job.reduce,
            abort: &abort,
        })?;
        let scenario = job.faults.parse().map_err(|e| Fault::invalid_job("the fault scenario", e))?;
        let stream = Stream::new(job.seed);
        let groups = ParameterGroups::new(&job.groups, &job.frozen).map_err(|e| Fault::invalid_job("the groups", e))?;
        let mut partitions = build_partitions(&job, &topology, &model, device, &abort)?;
        // The driver sends nothing of a step before it has heard that this worker is ready.
        bounds.set_model(&model, &job.balance)?;
        for partition in partitions.values_mut() {
            partition.freeze(|name| groups.freezes(name))?;
        }
        let trained = || partitions.values().flat_map(Partition::trained);
        let rule = |optim: Optim| match job.fused_optimizer {
            true => model.fused_update_rule(optim).map_err(|e| Fault::invalid_job("`Builder::fused_optimizer`", e)),
            false => Ok(model.update_rule(optim)),
        };
        let mut optimizer = Optimizer::new(rule(job.optim)?, trained().count());
        for (index, (spec, _)) in trained().enumerate() {
            let ParameterSettings { rate_factor, weight_decay } = groups.settings(&spec.name);
            let rule = weight_decay.map(|decay| rule(job.optim.with_weight_decay(decay))).transpose()?;
            optimizer.set_group(index, rate_factor, rule)?;
        }
        let stage = Stage {
            id: job.worker,
            name: topology.name(job.worker),
            topology,
            partitions,
            mailbox,
            outgoing,
            links,
            driver,
            abort,
            status,
            recorder: Recorder::new(job.worker.0, job.trace, job.phases, device),
            stream: stream.named("steps"),
            loss: model.loss_function(job.loss),
            device,
            channels_last: job.channels_last,
            codecs: job.codecs,
            captured: Vec::new(),
            scenario,
            graphs,
        };
        Ok(BuiltWorker {
            stage,
            ring,
            forward_plans: BTreeMap::new(),
            optimizer,
            updates: 0,
            deferred_step: None,
            link_codecs,
            meter,
        })
    }

    /// Runs the driver's commands in order until [`Command::Finish`].
    fn run_commands(&mut self) -> Result<(), Failure> {
        let name = self.stage.name.clone();
        for number in 0.. {
            self.stage.status.begin(Activity::Idle, 0);
            let tag = Tag::control(Kind::Command, number, self.stage.id);
            let message = self.stage.mailbox.take(&tag).map_err(failed(&name, "waiting for a command"))?;
            self.stage.status.begin(Activity::Busy, 0);
            let command: Command = serde_json::from_slice(&message.text)
                .map_err(|e| failed(&name, "reading a command")(Fault::malformed("a command", e)))?;
            match command {
                Command::Step(step) => {
                    let report = self.run_step(&step)?;
                    self.send_report(number, &report).map_err(failed(&name, "reporting"))?;
                }
                Command::SyncReplicas => {
                    self.broadcast_parameters().map_err(failed(&name, "receiving the first replica's parameters"))?;
                    self.acknowledge(number).map_err(failed(&name, "reporting"))?;
                }
                Command::SkipStep => {
                    self.discard_last_step();
                    let report = StepReport { links: self.link_traffic(), ..StepReport::default() };
                    self.send_report(number, &report).map_err(failed(&name, "reporting"))?;
                }
                Command::Update { learning_rate, scale } => {
                    let report =
                        self.deferred_update(learning_rate, scale).map_err(failed(&name, "updating its parameters"))?;
                    self.send_report(number, &report).map_err(failed(&name, "reporting"))?;
                }
                Command::Collect { set: which, names } => {
                    self.collect(number, which, names).map_err(failed(&name, "collecting its tensors"))?;
                }
                Command::Load { set: which, names } => {
                    self.load(number, which, &names).map_err(failed(&name, "loading tensors"))?;
                }
                Command::ResetCodecs => {
                    // No message is in flight between steps, so both ends of a link reset between the same two
                    // messages.
                    self.link_codecs.reset();
                    self.acknowledge(number).map_err(failed(&name, "reporting"))?;
                }
                Command::Finish => return Ok(()),
            }
        }
        Ok(())
    }

    fn send_report(&mut self, number: u64, report: &StepReport) -> Result<(), Fault> {
        let text = serde_json::to_vec(report)
            .map_err(|e| Fault::internal("a report that can be written as JSON", e.to_string()))?;
        self.stage.driver.send(Message::text(Tag::control(Kind::Report, number, self.stage.id), text))
    }

    /// Reports that a command without a result is done.
    fn acknowledge(&mut self, number: u64) -> Result<(), Fault> {
        self.stage.driver.send(Message::text(Tag::control(Kind::Report, number, self.stage.id), "null"))
    }
}

/// Builds the partitions that the plan places on this worker.
fn build_partitions(
    job: &Job,
    topology: &Topology,
    model: &Model,
    device: tch::Device,
    abort: &AbortFlag,
) -> Result<BTreeMap<PartitionId, Partition>, Fault> {
    job.balance.check(model.layers.len()).map_err(|e| Fault::invalid_job("the balance", e))?;
    // Otherwise several workers would train copies of a tied tensor, each its own.
    model.check_ties(&job.balance, topology.plan().placement()).map_err(|e| Fault::invalid_job("the placement", e))?;
    let uses: Vec<SkipUse> = model.layers.iter().map(|l| l.skips()).collect();
    let skips = SkipLayout::new(&uses, &job.balance).map_err(Fault::invalid_model)?;
    let options = PartitionOptions {
        balance: &job.balance,
        skips: &skips,
        seed: Stream::new(job.seed).named("weights"),
        device,
        channels_last: job.channels_last,
        precision: job.precision,
    };
    let placed = topology.plan().placement().partitions_of(topology.role_of(job.worker));
    let mut tensors = WorkerTensors::new(abort.clone());
    placed.into_iter().map(|p| Ok((p, Partition::build_on(&mut tensors, model, p, &options)?))).collect()
}
