//! Executes one worker's actions, in the order the plan gives. It never decides order.

use crate::codecs::Codecs;
use crate::engine::{self, Stream};
use crate::failure::{Failure, Fate, Fault, POLL};
use crate::job::{Purpose, Step};
use crate::loss::Loss;
use crate::mailbox::{Handling, Mailbox, Message, Tag};
use crate::metrics::ClassCounts;
use crate::partition::Partition;
use crate::portal::Parcel;
use crate::recompute::{for_convolutions, Forward, Goal, InFlight, Score};
use crate::roster::Roster;
use crate::status::{Doing, Status};
use crate::trace::{now_ns, Phase, Recorder};
use crate::transport::faulty::{Scenario, WorkerFault};
use crate::transport::Outgoing;
use distgpipe_core::microbatch::MicroBatches;
use distgpipe_core::schedule::{Action, Op, Pass, Plan};
use distgpipe_core::wire::Kind;
use distgpipe_core::{MicroBatchId, PartitionId, WorkerId};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use tch::Tensor;

/// A worker's stage: its partitions and its ways to others.
pub struct Stage {
    /// The worker's number.
    pub id: WorkerId,
    /// Who the others are.
    pub roster: Arc<Roster>,
    /// Its name.
    pub name: String,
    /// The partitions it holds.
    pub partitions: BTreeMap<PartitionId, Partition>,
    /// Where its messages arrive.
    pub mailbox: Arc<Mailbox>,
    /// The ways to the other workers, by number.
    pub ports: BTreeMap<WorkerId, Box<dyn Outgoing>>,
    /// The way to the driver.
    pub driver: Box<dyn Outgoing>,
    /// The run's fate.
    pub fate: Fate,
    /// For the watchdog.
    pub status: Arc<Status>,
    /// Times and events.
    pub recorder: Recorder,
    /// Randomness of the run.
    pub stream: Stream,
    /// What the last partition computes.
    pub loss: Loss,
    /// Where it computes.
    pub device: tch::Device,
    /// Whether images lie channels-last.
    pub channels_last: bool,
    /// How what it sends is encoded.
    pub codecs: Codecs,
    /// What it sent in a step that captured that, by name.
    pub captured: Vec<(String, Tensor)>,
    /// What goes wrong on purpose.
    pub scenario: Scenario,
}

/// What a step found on this worker.
#[derive(Default)]
pub struct Outcome {
    scores: Vec<(usize, Score)>,
}

impl Outcome {
    /// Loss summed over rows, and right rows, if this worker has the last partition.
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

    /// What each class was taken for, if this worker has the last partition and the step evaluated.
    pub fn classes(&self) -> Option<ClassCounts> {
        let mut sum: Option<ClassCounts> = None;
        for counts in self.scores.iter().filter_map(|(_, score)| score.classes.as_ref()) {
            sum.get_or_insert_default().add(counts);
        }
        sum
    }
}

/// Tensors on their way between two partitions in this worker's hands.
type Key = (Pass, PartitionId, PartitionId, MicroBatchId);

/// A step being run.
struct Running<'a> {
    stage: &'a mut Stage,
    step: &'a Step,
    rows: MicroBatches,
    parcels: HashMap<Key, Vec<Option<Tensor>>>,
    in_flight: HashMap<(PartitionId, MicroBatchId), InFlight>,
    outcome: Outcome,
}

impl Stage {
    /// Runs this worker's part of a step.
    pub fn run(&mut self, plan: &Plan, step: &Step) -> Result<Outcome, Failure> {
        let name = self.name.clone();
        let starting = |fault| Failure::new(&name, "starting a step", fault);
        let rows = MicroBatches::split(step.rows, step.all_micro_batches)
            .map_err(|e| starting(Fault::protocol("a batch that can be cut", e.to_string())))?;
        if step.first.saturating_add(step.micro_batches) > step.all_micro_batches {
            let got = format!("{} from {} on", step.micro_batches, step.first);
            return Err(starting(Fault::protocol(format!("some of {} micro-batches", step.all_micro_batches), got)));
        }
        let role = self.roster.role_of(self.id);
        let mut running = Running {
            stage: self,
            step,
            rows,
            parcels: HashMap::new(),
            in_flight: HashMap::new(),
            outcome: Outcome::default(),
        };
        for (done, action) in plan.actions(role).iter().enumerate() {
            running.perform(plan, *action, done).map_err(|fault| Failure::new(&name, action.to_string(), fault))?;
        }
        Ok(running.outcome)
    }
}

impl Running<'_> {
    fn perform(&mut self, plan: &Plan, action: Action, done: usize) -> Result<(), Fault> {
        self.stage.fate.check()?;
        self.stage.status.begin(Doing::Running(action), done);
        self.mishap(action)?;
        let Action { partition, op, micro_batch } = action;
        match op {
            Op::Forward => self.forward(plan, action, done),
            Op::Recompute => {
                let start = now_ns();
                let held = self.stage.partitions.get_mut(&partition).ok_or_else(|| not_mine(action))?;
                let flight = self.in_flight.get_mut(&(partition, micro_batch)).ok_or_else(|| not_mine(action))?;
                flight.recompute(held)?;
                self.record(Phase::Recompute, action, start);
                Ok(())
            }
            Op::Backward => self.backward(action),
            Op::Send { pass, to } => self.send(plan, action, pass, to),
            Op::Receive { pass, from } => self.receive(action, pass, from, done),
        }
    }

    fn record(&mut self, phase: Phase, action: Action, start_ns: u64) {
        self.stage.recorder.record(self.step.number, phase, || action.to_string(), start_ns);
    }

    fn forward(&mut self, plan: &Plan, action: Action, done: usize) -> Result<(), Fault> {
        let Action { partition: p, micro_batch: m, .. } = action;
        let arrived = self.arrivals(action, done)?;
        let last = p.index() + 1 == plan.partitions();
        let goal = match self.step.purpose {
            Purpose::Predict => None,
            _ if !last => None,
            _ => Some(Goal {
                loss: self.stage.loss,
                target: self.target(action, done)?,
                share: self.rows.share(self.of_all(m)) / self.step.batches as f64,
            }),
        };
        self.stage.status.begin(Doing::Running(action), done);
        let start = now_ns();
        let stream = self.random(m);
        let partition = self.stage.partitions.get_mut(&p).ok_or_else(|| not_mine(action))?;
        let forward = Forward { partition, micro_batch: m, stream, arrived, goal };
        let made = match self.step.purpose {
            Purpose::Evaluate | Purpose::Predict => forward.evaluate()?,
            Purpose::Train | Purpose::Gradients => {
                let (made, flight) = forward.train(plan.recomputes(p, m))?;
                self.in_flight.insert((p, m), flight);
                made
            }
        };
        self.record(Phase::Forward, action, start);
        if let Some(score) = made.score {
            self.outcome.scores.push((self.rows.len(self.of_all(m)), score));
        }
        for (to, tensors) in made.parcels {
            if !last {
                self.parcels.insert((Pass::Forward, p, to, m), tensors.into_iter().map(Some).collect());
            } else if self.step.purpose == Purpose::Predict {
                let tag = Tag::between(Kind::Output, self.step.number, self.of_all(m), p, p);
                let tensors = tensors.into_iter().map(Some).collect();
                self.stage.driver.send(Message::tensors(tag, tensors))?;
            }
        }
        Ok(())
    }

    /// The input of a forward pass: from the driver, or from earlier partitions.
    fn arrivals(&mut self, action: Action, done: usize) -> Result<Vec<Parcel>, Fault> {
        let Action { partition: p, micro_batch: m, .. } = action;
        if p.index() == 0 {
            let tensors = self.take_from_driver(Kind::Input, action, done)?;
            return Ok(vec![(p, tensors)]);
        }
        let sources: Vec<PartitionId> =
            self.stage.partitions.get(&p).ok_or_else(|| not_mine(action))?.portals().sources().collect();
        sources
            .into_iter()
            .map(|from| {
                let tensors = self.parcels.remove(&(Pass::Forward, from, p, m)).ok_or_else(|| not_mine(action))?;
                let tensors: Option<Vec<Tensor>> = tensors.into_iter().collect();
                Ok((from, tensors.ok_or_else(|| Fault::protocol("activations", "an absent one"))?))
            })
            .collect()
    }

    fn target(&mut self, action: Action, done: usize) -> Result<Tensor, Fault> {
        let mut tensors = self.take_from_driver(Kind::Target, action, done)?;
        tensors.pop().ok_or_else(|| Fault::protocol("one target", "none"))
    }

    /// Input or target of a micro-batch.
    fn take_from_driver(&mut self, kind: Kind, action: Action, done: usize) -> Result<Vec<Tensor>, Fault> {
        let Action { partition: p, micro_batch: m, .. } = action;
        let start = now_ns();
        self.stage.status.begin(Doing::Waiting(action), done);
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
        let rows = i64::try_from(self.rows.len(self.of_all(m))).unwrap_or(0);
        if tensors.is_empty() || tensors.iter().any(|t| t.size().first() != Some(&rows)) {
            let got: Vec<_> = tensors.iter().map(Tensor::size).collect();
            return Err(Fault::protocol(format!("{rows} rows for {action}"), format!("{got:?}")));
        }
        self.record(Phase::Loading, action, start);
        Ok(tensors)
    }

    fn backward(&mut self, action: Action) -> Result<(), Fault> {
        let Action { partition: p, micro_batch: m, .. } = action;
        let start = now_ns();
        let flight = self.in_flight.remove(&(p, m)).ok_or_else(|| not_mine(action))?;
        let sinks: Vec<PartitionId> =
            self.stage.partitions.get(&p).ok_or_else(|| not_mine(action))?.portals().sinks().collect();
        let gradients = sinks
            .into_iter()
            .map(|from| self.parcels.remove(&(Pass::Backward, from, p, m)).ok_or_else(|| not_mine(action)))
            .collect::<Result<Vec<_>, _>>()?;
        for (to, tensors) in flight.backward(gradients)? {
            if p.index() > 0 {
                self.parcels.insert((Pass::Backward, p, to, m), tensors);
            }
        }
        self.record(Phase::Backward, action, start);
        Ok(())
    }

    fn send(&mut self, plan: &Plan, action: Action, pass: Pass, to: PartitionId) -> Result<(), Fault> {
        let Action { partition: p, micro_batch: m, .. } = action;
        let start = now_ns();
        let tensors = self.parcels.remove(&(pass, p, to, m)).ok_or_else(|| not_mine(action))?;
        let tag = Tag::between(kind_of(pass), self.step.number, m, p, to);
        if self.step.capture {
            self.capture(&tag, &tensors)?;
        }
        let handling = Handling {
            compress: self.stage.codecs.apply_to(self.step),
            learning: self.step.purpose == Purpose::Train,
            seed: self.random(m).named("codec").at(u64::from(p.0)).at(u64::from(to.0)).seed(),
            samples: self.step.samples.get(self.rows.range(self.of_all(m))).map(<[u64]>::to_vec).unwrap_or_default(),
        };
        let roster = &self.stage.roster;
        let receiver = roster.member(roster.replica_of(self.stage.id), plan.placement().worker_of(to));
        let port = self.stage.ports.get_mut(&receiver).ok_or_else(|| not_mine(action))?;
        port.send(Message { handling, ..Message::tensors(tag, tensors) })?;
        self.record(Phase::Send, action, start);
        Ok(())
    }

    /// A micro-batch's number among those of all replicas.
    fn of_all(&self, m: MicroBatchId) -> MicroBatchId {
        MicroBatchId::new(self.step.first + m.index())
    }

    /// The random stream of a micro-batch.
    fn random(&self, m: MicroBatchId) -> Stream {
        self.stage.stream.at(self.step.learned).at(u64::from(self.of_all(m).0))
    }

    /// Keeps copies of what is sent.
    fn capture(&mut self, tag: &Tag, tensors: &[Option<Tensor>]) -> Result<(), Fault> {
        let what = if tag.kind == Kind::Activation { "activation" } else { "gradient" };
        let micro_batch = self.of_all(MicroBatchId(tag.micro_batch));
        for (index, tensor) in tensors.iter().enumerate() {
            let Some(tensor) = tensor else { continue };
            let name = format!("{what}.{}-{}.{micro_batch}.{index}", tag.from, tag.to);
            let copy = engine::copy(&tensor.f_detach()?.f_to_device(tch::Device::Cpu)?)?;
            self.stage.captured.push((name, copy));
        }
        Ok(())
    }

    fn receive(&mut self, action: Action, pass: Pass, from: PartitionId, done: usize) -> Result<(), Fault> {
        let Action { partition: p, micro_batch: m, .. } = action;
        let start = now_ns();
        self.stage.status.begin(Doing::Waiting(action), done);
        let tag = Tag::between(kind_of(pass), self.step.number, m, from, p);
        let message = self.stage.mailbox.take(&tag)?;
        let rows = i64::try_from(self.rows.len(self.of_all(m))).unwrap_or(0);
        let device = self.stage.device;
        let tensors = message.tensors.into_iter().map(|tensor| match tensor {
            Some(t) if t.size().first() != Some(&rows) => {
                Err(Fault::protocol(format!("{rows} rows"), format!("a tensor {:?}", t.size())))
            }
            Some(t) if pass == Pass::Backward && !engine::is_float(&t) => {
                Err(Fault::protocol("gradients of floats", format!("{:?}", t.kind())))
            }
            Some(t) => Ok(Some(t.f_to_device(device)?)),
            None => Ok(None),
        });
        let tensors = tensors.collect::<Result<Vec<_>, Fault>>()?;
        self.parcels.insert((pass, from, p, m), tensors);
        self.record(Phase::ReceiveWait, action, start);
        Ok(())
    }

    /// What a test wants to go wrong here.
    fn mishap(&self, action: Action) -> Result<(), Fault> {
        match self.stage.scenario.of_worker(&self.stage.name, action) {
            None => Ok(()),
            Some(WorkerFault::Panic) => panic!("injected panic at {action}"),
            Some(WorkerFault::Error) => Err(Fault::Injected(format!("error at {action}"))),
            Some(WorkerFault::Kill) => crate::launch::kill_self(),
            Some(WorkerFault::Hang) => loop {
                self.stage.fate.check()?;
                std::thread::sleep(POLL);
            },
        }
    }
}

fn kind_of(pass: Pass) -> Kind {
    match pass {
        Pass::Forward => Kind::Activation,
        Pass::Backward => Kind::Gradient,
    }
}

/// The plan was checked before it was run, so this is for a plan that does not fit the partitions.
fn not_mine(action: Action) -> Fault {
    Fault::protocol(format!("what {action} needs to be here"), "nothing of that name")
}
