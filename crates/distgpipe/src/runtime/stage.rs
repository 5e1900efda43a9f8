//! Executes one worker's actions of a step, in the order of the plan. The stage never decides the order itself.

use crate::comm::abort::{AbortFlag, POLL};
use crate::comm::codec_policy::CodecPolicy;
use crate::comm::mailbox::Mailbox;
use crate::comm::message::{EncodeOptions, Message, Tag};
use crate::comm::protocol::{Purpose, StepCommand};
use crate::comm::status::{Activity, SharedStatus};
use crate::comm::topology::Topology;
use crate::comm::traffic::Counters;
use crate::comm::transport::faulty::{Scenario, WorkerFault};
use crate::comm::transport::Outgoing;
use crate::engine::{self, Stream, WatchedParameters};
use crate::failure::{Failure, Fault};
use crate::model::loss::LossFunction;
use crate::runtime::gradient_watch::GradientWatch;
use crate::runtime::graphs::WorkerGraphs;
use crate::runtime::micro_batch_pass::{for_convolutions, Forward, InFlight, Kept, LossTarget, Score};
use crate::runtime::partition::Partition;
use crate::runtime::portal::Parcel;
use crate::runtime::trace::{now_ns, Phase, Recorder};
use crate::train::metrics::ClassCounts;
use distgpipe_core::microbatch::MicroBatches;
use distgpipe_core::schedule::{Action, Op, Pass, Plan};
use distgpipe_core::wire::Kind;
use distgpipe_core::{MicroBatchId, PartitionId, WorkerId};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use tch::Tensor;

/// What a worker needs to run its actions: its partitions, its mailbox and its links.
pub struct Stage {
    /// The worker's number among all members of the run.
    pub id: WorkerId,
    /// All members of the run and their plan.
    pub topology: Arc<Topology>,
    /// The worker's name, as failures show it.
    pub name: String,
    /// The partitions that the plan places on this worker.
    pub partitions: BTreeMap<PartitionId, Partition>,
    /// Receives every message to this worker.
    pub mailbox: Arc<Mailbox>,
    /// The links to the other workers.
    pub outgoing: BTreeMap<WorkerId, Box<dyn Outgoing>>,
    /// The counters of the links, which record what this worker waits for.
    pub links: Vec<(WorkerId, Counters)>,
    /// The link to the driver.
    pub driver: Box<dyn Outgoing>,
    /// Set by the first failure of the run in this process.
    pub abort: AbortFlag,
    /// What the worker is doing, for the watchdog.
    pub status: Arc<SharedStatus>,
    /// The time of each phase, and single events in a traced run.
    pub recorder: Recorder,
    /// The random stream of all steps.
    pub stream: Stream,
    /// The loss that the last partition computes.
    pub loss: Arc<dyn LossFunction>,
    /// The device that holds the partitions.
    pub device: tch::Device,
    /// Whether images are converted to channels-last.
    pub channels_last: bool,
    /// Which codec carries which tensors.
    pub codecs: CodecPolicy,
    /// Copies of the tensors that the last capturing step sent, by name.
    pub captured: Vec<(String, Tensor)>,
    /// The faults that tests inject.
    pub scenario: Scenario,
    /// The CUDA graphs of its training passes, if it has any.
    pub graphs: Option<WorkerGraphs>,
}

/// The loss and score of a step, as far as this worker computed them.
#[derive(Default)]
pub struct Outcome {
    /// Rows and score of each micro-batch; empty unless this worker has the last partition.
    scores: Vec<(usize, Score)>,
}

impl Outcome {
    /// The loss summed over rows, and the number of rows classified correctly, if this worker has the last partition.
    pub fn totals(&self) -> Result<(Option<f64>, Option<u64>), Fault> {
        if self.scores.is_empty() {
            return Ok((None, None));
        }
        let (mut loss, mut correct) = (0.0, None);
        for (rows, score) in &self.scores {
            loss += f64::try_from(&score.loss)? * *rows as f64;
            if let Some(right) = &score.correct {
                *correct.get_or_insert(0) += u64::try_from(i64::try_from(right)?).unwrap_or(0);
            }
        }
        Ok((Some(loss), correct))
    }

    /// Predicted against actual classes, if this worker has the last partition and the step evaluated.
    pub fn classes(&self) -> Option<ClassCounts> {
        let mut sum: Option<ClassCounts> = None;
        for counts in self.scores.iter().filter_map(|(_, score)| score.classes.as_ref()) {
            sum.get_or_insert_default().add(counts);
        }
        sum
    }
}

/// Names the tensors between two partitions that this worker holds until an action needs them.
type ParcelKey = (Pass, PartitionId, PartitionId, MicroBatchId);

/// A step being run.
struct StepRun<'a> {
    stage: &'a mut Stage,
    step: &'a StepCommand,
    watch: Option<&'a GradientWatch>,
    rows: MicroBatches,
    parcels: HashMap<ParcelKey, Vec<Option<Tensor>>>,
    in_flight: HashMap<(PartitionId, MicroBatchId), InFlight>,
    outcome: Outcome,
    /// How many of this worker's actions are done.
    actions_done: usize,
}

impl Stage {
    /// Runs this worker's actions of a step, and tells `watch` which gradients are final. A failure names the action.
    pub fn run(&mut self, plan: &Plan, step: &StepCommand, watch: Option<&GradientWatch>) -> Result<Outcome, Failure> {
        let name = self.name.clone();
        let rows = split_rows(step).map_err(|fault| Failure::new(&name, "starting a step", fault))?;
        let role = self.topology.role_of(self.id);
        if let Some(graphs) = self.graphs.as_mut().filter(|_| step.purpose.runs_backward()) {
            graphs.begin_step(step).map_err(|fault| Failure::new(&name, "starting a step", fault))?;
        }
        let mut running = StepRun {
            stage: self,
            step,
            watch,
            rows,
            parcels: HashMap::new(),
            in_flight: HashMap::new(),
            outcome: Outcome::default(),
            actions_done: 0,
        };
        for action in plan.actions(role) {
            running.perform(plan, *action).map_err(|fault| Failure::new(&name, action.to_string(), fault))?;
            running.actions_done += 1;
        }
        let outcome = running.outcome;
        if let Some(graphs) = self.graphs.as_mut().filter(|_| step.purpose.runs_backward()) {
            graphs.end_step().map_err(|fault| Failure::new(&name, "ending a step", fault))?;
        }
        Ok(outcome)
    }

    /// Takes a message of another worker, and records what the wait for it was spent on.
    pub fn take_from(&self, sender: WorkerId, tag: &Tag) -> Result<Message, Fault> {
        match self.links.iter().find(|(worker, _)| *worker == sender) {
            Some((_, counters)) => counters.arrivals().waiting(|| self.mailbox.take(tag)),
            None => self.mailbox.take(tag),
        }
    }
}

/// The rows of each micro-batch, over all replicas.
fn split_rows(step: &StepCommand) -> Result<MicroBatches, Fault> {
    let &StepCommand { rows, all_micro_batches, first, micro_batches, .. } = step;
    let split = MicroBatches::split(rows, all_micro_batches).map_err(|_| {
        Fault::protocol(format!("a batch that splits into {all_micro_batches} micro-batches"), format!("{rows} rows"))
    })?;
    if first.saturating_add(micro_batches) > all_micro_batches {
        let got = format!("{micro_batches} micro-batches starting at number {first}");
        return Err(Fault::protocol(format!("some of {all_micro_batches} micro-batches"), got));
    }
    Ok(split)
}

impl StepRun<'_> {
    fn perform(&mut self, plan: &Plan, action: Action) -> Result<(), Fault> {
        self.stage.abort.check()?;
        self.set_status(Activity::Running(action));
        self.inject_fault(action)?;
        if let Some(graphs) = &mut self.stage.graphs {
            graphs.enter_lane(action.micro_batch)?;
        }
        match action.op {
            Op::Forward => self.forward(plan, action),
            Op::Recompute => self.recompute(action),
            Op::Backward => self.backward(plan, action),
            Op::Send { pass, to } => self.send(plan, action, pass, to),
            Op::Receive { pass, from } => self.receive(action, pass, from),
        }
    }

    fn set_status(&self, doing: Activity) {
        self.stage.status.begin(doing, self.actions_done);
    }

    fn record(&mut self, phase: Phase, action: Action, start_ns: u64) {
        self.stage.recorder.record(self.step.number, phase, || action.to_string(), start_ns);
    }

    fn forward(&mut self, plan: &Plan, action: Action) -> Result<(), Fault> {
        let Action { partition: p, micro_batch: m, .. } = action;
        let arrived = self.take_input(action)?;
        let last = p.index() + 1 == plan.partitions();
        let goal = match self.step.purpose {
            Purpose::Predict => None,
            _ if !last => None,
            _ => Some(LossTarget {
                loss: self.stage.loss.clone(),
                target: self.take_target(action)?,
                share: self.rows.share(self.global_id(m)) / self.step.batches as f64,
            }),
        };
        self.set_status(Activity::Running(action));
        let start = now_ns();
        let stream = self.random_stream(m);
        let partition = self.stage.partitions.get_mut(&p).ok_or_else(|| missing(action))?;
        let forward = Forward { partition, micro_batch: m, stream, arrived, goal };
        let output = if !self.step.purpose.runs_backward() {
            forward.evaluate()?
        } else {
            let kept = match plan.has_backward(p) {
                true if plan.recomputes(p, m) => Kept::Input,
                true => Kept::Activations,
                false => Kept::Nothing,
            };
            let needs_gradient = |from| plan.has_backward(from);
            let (output, in_flight) = match &mut self.stage.graphs {
                Some(graphs) => graphs.forward(p, forward, kept, needs_gradient)?,
                None => forward.train(kept, needs_gradient)?,
            };
            self.in_flight.extend(in_flight.map(|in_flight| ((p, m), in_flight)));
            output
        };
        self.record(Phase::Forward, action, start);
        if let Some(score) = output.score {
            self.outcome.scores.push((self.rows.len(self.global_id(m)), score));
        }
        for (to, tensors) in output.parcels {
            let tensors = tensors.into_iter().map(Some).collect();
            if !last {
                self.parcels.insert((Pass::Forward, p, to, m), tensors);
            } else if self.step.purpose == Purpose::Predict {
                let tag = Tag::between(Kind::Output, self.step.number, self.global_id(m), p, p);
                self.stage.driver.send(Message::tensors(tag, tensors))?;
            }
        }
        Ok(())
    }

    fn recompute(&mut self, action: Action) -> Result<(), Fault> {
        let Action { partition: p, micro_batch: m, .. } = action;
        let start = now_ns();
        let partition = self.stage.partitions.get_mut(&p).ok_or_else(|| missing(action))?;
        let in_flight = self.in_flight.get_mut(&(p, m)).ok_or_else(|| missing(action))?;
        match &mut self.stage.graphs {
            Some(graphs) => graphs.recompute(p, m, partition, in_flight)?,
            None => in_flight.recompute(partition)?,
        }
        self.record(Phase::Recompute, action, start);
        Ok(())
    }

    /// The input of a forward pass: from the driver for the first partition, else from earlier partitions.
    fn take_input(&mut self, action: Action) -> Result<Vec<Parcel>, Fault> {
        let Action { partition: p, micro_batch: m, .. } = action;
        if p.index() == 0 {
            let tensors = self.receive_from_driver(Kind::Input, action)?;
            return Ok(vec![(p, tensors)]);
        }
        let sources: Vec<PartitionId> =
            self.stage.partitions.get(&p).ok_or_else(|| missing(action))?.portals().sources().collect();
        sources
            .into_iter()
            .map(|from| {
                let tensors = self.parcels.remove(&(Pass::Forward, from, p, m)).ok_or_else(|| missing(action))?;
                let tensors: Option<Vec<Tensor>> = tensors.into_iter().collect();
                let absent = || Fault::protocol(format!("activations from partition {from}"), "an absent tensor");
                Ok((from, tensors.ok_or_else(absent)?))
            })
            .collect()
    }

    fn take_target(&mut self, action: Action) -> Result<Tensor, Fault> {
        let mut tensors = self.receive_from_driver(Kind::Target, action)?;
        tensors.pop().ok_or_else(|| Fault::protocol("a target", "none"))
    }

    /// Waits for a micro-batch's input or target from the driver.
    fn receive_from_driver(&mut self, kind: Kind, action: Action) -> Result<Vec<Tensor>, Fault> {
        let Action { partition: p, micro_batch: m, .. } = action;
        let start = now_ns();
        self.set_status(Activity::Waiting(action));
        let tag = Tag::between(kind, self.step.number, m, p, p);
        let message = self.stage.mailbox.take(&tag)?;
        let channels_last = self.stage.channels_last && kind == Kind::Input;
        let device = self.stage.device;
        let tensors = message.tensors.into_iter().flatten().map(|tensor| {
            let tensor = tensor.f_to_device(device)?;
            if channels_last {
                for_convolutions(tensor)
            } else {
                Ok(tensor)
            }
        });
        let tensors = tensors.collect::<Result<Vec<_>, Fault>>()?;
        let rows = self.row_count(m);
        if tensors.is_empty() || tensors.iter().any(|t| t.size().first() != Some(&rows)) {
            let got: Vec<_> = tensors.iter().map(Tensor::size).collect();
            return Err(Fault::protocol(format!("tensors of {rows} rows"), format!("{got:?}")));
        }
        self.record(Phase::Loading, action, start);
        Ok(tensors)
    }

    fn backward(&mut self, plan: &Plan, action: Action) -> Result<(), Fault> {
        let Action { partition: p, micro_batch: m, .. } = action;
        let start = now_ns();
        let in_flight = self.in_flight.remove(&(p, m)).ok_or_else(|| missing(action))?;
        let sinks: Vec<PartitionId> =
            self.stage.partitions.get(&p).ok_or_else(|| missing(action))?.portals().sinks().collect();
        let gradients = sinks
            .into_iter()
            .map(|from| self.parcels.remove(&(Pass::Backward, from, p, m)).ok_or_else(|| missing(action)))
            .collect::<Result<Vec<_>, _>>()?;
        let finishes = self.watch.and_then(|watch| watch.finishes(p, m).map(|partition| (watch, partition)));
        let parcels = match finishes {
            Some((watch, partition)) => {
                let ready = watch.parameter_is_final(partition);
                let watched = WatchedParameters { parameters: &partition.parameters, ready: &ready };
                let parcels = in_flight.backward(gradients, Some(&watched))?;
                watch.partition_is_final(partition);
                parcels
            }
            None => match &mut self.stage.graphs {
                Some(graphs) => {
                    let partition = self.stage.partitions.get_mut(&p).ok_or_else(|| missing(action))?;
                    graphs.backward(p, m, partition, in_flight, gradients)?
                }
                None => in_flight.backward(gradients, None)?,
            },
        };
        for (to, tensors) in parcels {
            if p.index() > 0 && plan.has_backward(to) {
                self.parcels.insert((Pass::Backward, p, to, m), tensors);
            }
        }
        self.record(Phase::Backward, action, start);
        Ok(())
    }

    fn send(&mut self, plan: &Plan, action: Action, pass: Pass, to: PartitionId) -> Result<(), Fault> {
        let Action { partition: p, micro_batch: m, .. } = action;
        let start = now_ns();
        let tensors = self.parcels.remove(&(pass, p, to, m)).ok_or_else(|| missing(action))?;
        let tag = Tag::between(message_kind(pass), self.step.number, m, p, to);
        if self.step.capture {
            self.capture(&tag, &tensors)?;
        }
        let encoding = EncodeOptions {
            compress: self.stage.codecs.applies_in(self.step),
            training: self.step.purpose == Purpose::Train,
            seed: self.random_stream(m).named("codec").at(u64::from(p.0)).at(u64::from(to.0)).seed(),
            samples: self.step.samples.get(self.rows.range(self.global_id(m))).map(<[u64]>::to_vec).unwrap_or_default(),
        };
        let topology = &self.stage.topology;
        let receiver = topology.member(topology.replica_of(self.stage.id), plan.placement().worker_of(to));
        let outgoing = self.stage.outgoing.get_mut(&receiver).ok_or_else(|| missing(action))?;
        outgoing.send(Message::tensors(tag, tensors).encoded_with(encoding))?;
        self.record(Phase::Send, action, start);
        Ok(())
    }

    /// The number of a micro-batch among those of all replicas.
    fn global_id(&self, m: MicroBatchId) -> MicroBatchId {
        MicroBatchId::new(self.step.first + m.index())
    }

    fn row_count(&self, m: MicroBatchId) -> i64 {
        i64::try_from(self.rows.len(self.global_id(m))).unwrap_or(0)
    }

    fn random_stream(&self, m: MicroBatchId) -> Stream {
        self.stage.stream.at(self.step.trained_batches).at(u64::from(self.global_id(m).0))
    }

    /// Keeps copies of the tensors of a message, under the names that [`TensorSet::Captured`] reports.
    ///
    /// [`TensorSet::Captured`]: crate::comm::protocol::TensorSet::Captured
    fn capture(&mut self, tag: &Tag, tensors: &[Option<Tensor>]) -> Result<(), Fault> {
        let direction = if tag.kind == Kind::Activation { "activation" } else { "gradient" };
        let micro_batch = self.global_id(MicroBatchId(tag.micro_batch));
        for (index, tensor) in tensors.iter().enumerate() {
            let Some(tensor) = tensor else { continue };
            let name = format!("{direction}.{}-{}.{micro_batch}.{index}", tag.from, tag.to);
            let copy = engine::copy(&tensor.f_detach()?.f_to_device(tch::Device::Cpu)?)?;
            self.stage.captured.push((name, copy));
        }
        Ok(())
    }

    fn receive(&mut self, action: Action, pass: Pass, from: PartitionId) -> Result<(), Fault> {
        let Action { partition: p, micro_batch: m, .. } = action;
        let start = now_ns();
        self.set_status(Activity::Waiting(action));
        let tag = Tag::between(message_kind(pass), self.step.number, m, from, p);
        let topology = &self.stage.topology;
        let sender = topology.member(topology.replica_of(self.stage.id), topology.plan().placement().worker_of(from));
        let message = self.stage.take_from(sender, &tag)?;
        let rows = self.row_count(m);
        let device = self.stage.device;
        let tensors = message.tensors.into_iter().map(|tensor| match tensor {
            Some(t) if t.size().first() != Some(&rows) => {
                Err(Fault::protocol(format!("a tensor of {rows} rows"), format!("{:?}", t.size())))
            }
            Some(t) if pass == Pass::Backward && !engine::is_float(&t) => {
                Err(Fault::protocol("a gradient of a floating-point type", format!("{:?}", t.kind())))
            }
            Some(t) => Ok(Some(t.f_to_device(device)?)),
            None => Ok(None),
        });
        let tensors = tensors.collect::<Result<Vec<_>, Fault>>()?;
        self.parcels.insert((pass, from, p, m), tensors);
        self.record(Phase::ReceiveWait, action, start);
        Ok(())
    }

    /// Applies the fault that the scenario names for this action, if any.
    fn inject_fault(&self, action: Action) -> Result<(), Fault> {
        match self.stage.scenario.of_worker(&self.stage.name, action) {
            None => Ok(()),
            Some(WorkerFault::Panic) => panic!("injected panic at {action}"),
            Some(WorkerFault::Error) => Err(Fault::Injected(format!("error at {action}"))),
            Some(WorkerFault::Kill) => engine::kill_worker_process(),
            Some(WorkerFault::Hang) => loop {
                self.stage.abort.check()?;
                std::thread::sleep(POLL);
            },
        }
    }
}

fn message_kind(pass: Pass) -> Kind {
    match pass {
        Pass::Forward => Kind::Activation,
        Pass::Backward => Kind::Gradient,
    }
}

/// An action needs a partition, link or tensor that this worker does not have. A plan is checked before it runs, but
/// not against the model's skips, which a driver may have left out of the plan.
fn missing(action: Action) -> Fault {
    Fault::invalid_job("the plan", format!("{action} needs a partition, link or tensor that this worker does not have"))
}
