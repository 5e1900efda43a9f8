//! A worker: builds its partitions, then does what the driver says until it is told to stop or the run fails.

use crate::coding::Coding;
use crate::engine::{self, Stream};
use crate::failure::{Failure, Fate, Fault};
use crate::job::{forward_plan, Command, Job, Purpose, Step, StepReport, Which};
use crate::layer::{Role, TensorSpec};
use crate::mailbox::{Mailbox, Message, Tag};
use crate::model::Model;
use crate::optim::{Optim, Optimizer, Slot};
use crate::partition::{Building, Partition};
use crate::ring::Ring;
use crate::roster::Roster;
use crate::stage::Stage;
use crate::status::{Doing, Status};
use crate::trace::{now_ns, Phase, Recorder};
use crate::transport::{Counters, Outgoing, Traffic};
use crate::update::{scale_gradients, squared_norms, After, Exact};
use distgpipe_core::schedule::Plan;
use distgpipe_core::skip::{SkipLayout, SkipUse};
use distgpipe_core::wire::Kind;
use distgpipe_core::WorkerId;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;
use tch::Tensor;

/// How often a worker looks whether its links have sent everything, before it reports what they carried.
const SETTLE: Duration = Duration::from_micros(100);

/// Everything a worker is made of.
pub struct Worker {
    /// What it was told.
    pub job: Job,
    /// Who takes part.
    pub roster: Arc<Roster>,
    /// The model; only its own part is built.
    pub model: Model,
    /// Where its messages arrive.
    pub mailbox: Arc<Mailbox>,
    /// The ways to the other workers.
    pub ports: BTreeMap<WorkerId, Box<dyn Outgoing>>,
    /// The way to the driver.
    pub driver: Box<dyn Outgoing>,
    /// Counters of its outgoing links.
    pub links: Vec<(WorkerId, Counters)>,
    /// What its links encode and decode with.
    pub coding: Coding,
    /// The run's fate in this process.
    pub fate: Fate,
    /// For the watchdog.
    pub status: Arc<Status>,
}

impl Worker {
    /// Works until told to stop. A failure of any kind, panics included, decides the run's fate and is returned.
    pub fn run(self) -> Result<(), Failure> {
        let fate = self.fate.clone();
        let status = self.status.clone();
        let name = self.roster.name(self.job.worker);
        let result = std::panic::catch_unwind(AssertUnwindSafe(|| self.work()));
        result
            .unwrap_or_else(|panic| {
                let phase = match status.read().doing {
                    Doing::Running(action) | Doing::Waiting(action) => action.to_string(),
                    Doing::Sharing => "sharing gradients".to_owned(),
                    Doing::Idle | Doing::Busy => "its work".to_owned(),
                };
                Err(Failure::new(&name, phase, Fault::Panic(panic_text(panic.as_ref()))))
            })
            .map_err(|failure| fate.fail(failure))
    }

    fn work(self) -> Result<(), Failure> {
        let worker = self.job.worker;
        let name = self.roster.name(worker);
        let failed = |phase: &'static str| {
            let name = name.clone();
            move |fault: Fault| Failure::new(name, phase, fault)
        };
        self.status.begin(Doing::Busy, 0);
        engine::attach_thread(self.job.threads, meter(worker));
        let mut active = Active::prepare(self).map_err(failed("building its partitions"))?;
        let ready = Message::text(Tag::control(Kind::Ready, 0, worker), "");
        active.stage.driver.send(ready).map_err(failed("reporting ready"))?;
        // Everybody learns of a failure before this worker's links are taken down, which may take a while.
        active.obey().map_err(|failure| active.stage.fate.fail(failure))
    }
}

/// The memory meter of a worker; 0 is everybody else's.
pub fn meter(worker: WorkerId) -> usize {
    worker.index() + 1
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text =
        panic.downcast_ref::<&str>().map(|s| (*s).to_owned()).or_else(|| panic.downcast_ref::<String>().cloned());
    let text = text.unwrap_or_else(|| "with something that is no text".to_owned());
    // tch unwraps libtorch's errors, whose C++ stack trace then comes escaped in the same line.
    let text = text.split("\\nException raised from").next().unwrap_or_default();
    text.lines().next().unwrap_or_default().to_owned()
}

/// A worker whose partitions are built.
struct Active {
    stage: Stage,
    /// Where there are replicas.
    ring: Option<Ring>,
    /// Forward-only plans, by number of micro-batches.
    evaluate: BTreeMap<usize, Plan>,
    optim: Optim,
    optimizer: Optimizer,
    /// The step whose gradients wait for [`Command::Update`].
    waiting: Option<u64>,
    links: Vec<(WorkerId, Counters)>,
    coding: Coding,
}

impl Active {
    fn prepare(worker: Worker) -> Result<Self, Fault> {
        let Worker { job, roster, model, mailbox, ports, driver, links, coding, fate, status } = worker;
        let ring = Ring::of(&roster, job.worker);
        job.balance.check(model.layers.len()).map_err(|e| Fault::protocol("a balance that fits", e.to_string()))?;
        let uses: Vec<SkipUse> = model.layers.iter().map(|l| l.skips()).collect();
        let skips =
            SkipLayout::new(&uses, &job.balance).map_err(|e| Fault::protocol("skips that fit", e.to_string()))?;
        let device = job.device().open().map_err(|e| Fault::protocol("a device that works", e.to_string()))?;
        let scenario = job.faults.parse().map_err(|e| Fault::protocol("a fault scenario", format!("{e}")))?;
        let stream = Stream::new(job.seed);
        let how = Building {
            balance: &job.balance,
            skips: &skips,
            seed: stream.named("weights"),
            device,
            channels_last: job.channels_last,
            precision: job.precision,
        };
        let partitions = roster
            .plan()
            .placement()
            .partitions_of(roster.role_of(job.worker))
            .into_iter()
            .map(|p| Ok((p, Partition::build(&model, p, &how)?)))
            .collect::<Result<BTreeMap<_, _>, Fault>>()?;
        let parameters = partitions.values().map(|p| p.parameters().count()).sum();
        let stage = Stage {
            id: job.worker,
            name: roster.name(job.worker),
            roster,
            partitions,
            mailbox,
            ports,
            driver,
            fate,
            status,
            recorder: Recorder::new(job.worker.0, job.trace),
            stream: stream.named("steps"),
            loss: job.loss,
            device,
            channels_last: job.channels_last,
            codecs: job.codecs,
            captured: Vec::new(),
            scenario,
        };
        let optimizer = Optimizer::new(job.optim, parameters);
        let (optim, evaluate) = (job.optim, BTreeMap::new());
        Ok(Active { stage, ring, evaluate, optim, optimizer, waiting: None, links, coding })
    }

    /// Does one command after the other, to the last.
    fn obey(&mut self) -> Result<(), Failure> {
        let (worker, name) = (self.stage.id, self.stage.name.clone());
        let failed = |phase: &'static str| {
            let name = name.clone();
            move |fault: Fault| Failure::new(name, phase, fault)
        };
        for number in 0.. {
            self.stage.status.begin(Doing::Idle, 0);
            let tag = Tag::control(Kind::Command, number, worker);
            let message = self.stage.mailbox.take(&tag).map_err(failed("waiting for a command"))?;
            self.stage.status.begin(Doing::Busy, 0);
            let command: Command = serde_json::from_slice(&message.text)
                .map_err(|e| failed("reading a command")(Fault::protocol("a command", e.to_string())))?;
            match command {
                Command::Step(step) => {
                    let report = self.step(&step)?;
                    self.report(number, &report).map_err(failed("reporting"))?;
                }
                Command::Agree => {
                    self.agree().map_err(failed("taking over the first replica's parameters"))?;
                    self.done(number).map_err(failed("reporting"))?;
                }
                Command::Rest => {
                    self.stage.captured.clear();
                    self.waiting = None;
                    let report = StepReport { links: self.carried(), ..StepReport::default() };
                    self.report(number, &report).map_err(failed("reporting"))?;
                }
                Command::Update { learning_rate, scale } => {
                    let report = self.late_update(learning_rate, scale).map_err(failed("updating its parameters"))?;
                    self.report(number, &report).map_err(failed("reporting"))?;
                }
                Command::Collect { which, names } => {
                    self.collect(number, which, names).map_err(failed("collecting its tensors"))?;
                }
                Command::Load { which, names } => {
                    self.load(number, which, &names).map_err(failed("loading tensors"))?;
                }
                Command::Forget => {
                    // Between steps nothing is under way on any link, so both ends forget between the same two messages.
                    self.coding.forget();
                    self.done(number).map_err(failed("reporting"))?;
                }
                Command::Finish => return Ok(()),
            }
        }
        Ok(())
    }

    fn step(&mut self, step: &Step) -> Result<StepReport, Failure> {
        let start = now_ns();
        let (name, roster) = (self.stage.name.clone(), self.stage.roster.clone());
        let failed = |phase: &'static str| move |fault: Fault| Failure::new(name, phase, fault);
        self.stage.captured.clear();
        self.waiting = None;
        if step.batches == 0 {
            return Err(failed("starting a step")(Fault::protocol("an update of 1 batch or more", "one of none")));
        }
        let learning = matches!(step.purpose, Purpose::Train | Purpose::Gradients);
        let outcome = if learning {
            if step.fresh {
                self.clear_gradients();
            }
            if step.micro_batches != roster.plan().micro_batches() {
                let expected = format!("{} micro-batches", roster.plan().micro_batches());
                return Err(failed("starting a step")(Fault::protocol(expected, step.micro_batches.to_string())));
            }
            self.stage.run(roster.plan(), step)?
        } else {
            let plan = self.forward_plan(step.micro_batches).map_err(failed.clone()("starting a step"))?;
            let outcome = self.stage.run(&plan, step)?;
            self.evaluate.insert(step.micro_batches, plan);
            outcome
        };
        self.stage.status.begin(Doing::Busy, roster.plan().actions(roster.role_of(self.stage.id)).len());
        let mut squared_norms = BTreeMap::new();
        if step.purpose == Purpose::Train {
            self.commit(step).map_err(failed.clone()("updating its batch norms"))?;
        } else {
            self.stage.partitions.values_mut().for_each(|p| p.norms().discard());
        }
        // Gradients that more are to be added to are shared with those.
        if step.purpose == Purpose::Gradients || step.after != After::Keep {
            self.share(step).map_err(failed.clone()("sharing gradients"))?;
        }
        if step.purpose == Purpose::Train {
            squared_norms = self.learn(step).map_err(failed.clone()("updating its parameters"))?;
        }
        let (loss_sum, correct) = outcome.totals().map_err(failed("adding up the loss"))?;
        // What this worker has sent must have crossed before anybody's step is over, so this delays nothing.
        while !self.links.iter().all(|(_, counters)| counters.settled()) {
            self.stage.fate.check().map_err(|fault| Failure::new(&self.stage.name, "sending", fault))?;
            std::thread::sleep(SETTLE);
        }
        let (phases, mut spans) = self.stage.recorder.take();
        spans.append(&mut self.coding.beside.take());
        Ok(StepReport {
            loss_sum,
            correct,
            classes: outcome.classes(),
            squared_norms,
            phases,
            step_ns: now_ns() - start,
            peak_bytes: engine::peak_bytes(self.stage.device, meter(self.stage.id)),
            reserved_bytes: engine::reserved_bytes(self.stage.device),
            links: self.carried(),
            spans,
        })
    }

    /// What each outgoing link has carried.
    fn carried(&self) -> Vec<(WorkerId, Traffic)> {
        self.links.iter().map(|(to, counters)| (*to, counters.read())).collect()
    }

    fn forward_plan(&mut self, micro_batches: usize) -> Result<Plan, Fault> {
        if let Some(plan) = self.evaluate.remove(&micro_batches) {
            return Ok(plan);
        }
        forward_plan(self.stage.roster.plan(), micro_batches)
            .map_err(|e| Fault::protocol("a plan for evaluation", e.to_string()))
    }

    fn clear_gradients(&mut self) {
        self.parameters().for_each(engine::clear_grad);
    }

    fn parameters(&self) -> impl Iterator<Item = &Tensor> {
        self.stage.partitions.values().flat_map(Partition::parameters)
    }

    /// Commits the batch norms.
    fn commit(&mut self, step: &Step) -> Result<(), Fault> {
        let start = now_ns();
        for partition in self.stage.partitions.values_mut() {
            partition.norms().commit()?;
        }
        self.stage.recorder.record(step.number, Phase::Optimizer, String::new, start);
        Ok(())
    }

    /// Gives all replicas the sum of their gradients, each of which is of its part of the batch, and the buffers of the
    /// first of them, where they learn: batch norms saw other rows in each.
    fn share(&mut self, step: &Step) -> Result<(), Fault> {
        let Some(ring) = &self.ring else { return Ok(()) };
        let parameters: Vec<Tensor> = self.parameters().map(Tensor::shallow_clone).collect();
        let (mut gradients, mut used) = (Vec::new(), Vec::new());
        for parameter in &parameters {
            let own = engine::grad(parameter);
            used.push(if own.is_some() { 1.0_f32 } else { 0.0 });
            // A layer may use one for some rows and not for others.
            gradients.push(own.map_or_else(|| parameter.f_detach()?.f_zeros_like(), Ok)?);
        }
        // How many replicas used each.
        let users = Tensor::f_from_slice(&used)?.f_to_device(self.stage.device)?;
        let buffers = self.floats(|role| role == Role::Buffer && step.purpose == Purpose::Train);
        let all: Vec<Tensor> = gradients.iter().chain([&users]).chain(&buffers).map(Tensor::shallow_clone).collect();
        tch::no_grad(|| {
            ring.leave_to_first(&buffers)?;
            ring.add_up(&mut self.stage, step.number, &all)
        })?;
        if used.contains(&0.0) {
            let users = Vec::<f32>::try_from(users.f_to_device(tch::Device::Cpu)?)?;
            for (i, parameter) in parameters.iter().enumerate().filter(|&(i, _)| used[i] == 0.0 && users[i] > 0.0) {
                // Makes a gradient to write into.
                engine::backward(&[(parameter.f_zeros_like()?.f_mul(parameter)?.f_sum(parameter.kind())?, None)])?;
                let mut gradient = engine::grad(parameter).ok_or_else(|| Fault::protocol("a gradient", "none"))?;
                tch::no_grad(|| gradient.f_copy_(&gradients[i]))?;
            }
        }
        Ok(())
    }

    /// Takes over the parameters and buffers of the first replica: first values that were drawn by another kind of machine
    /// may differ in their last bits.
    fn agree(&mut self) -> Result<(), Fault> {
        let Some(ring) = &self.ring else { return Ok(()) };
        let all = self.floats(|_| true);
        tch::no_grad(|| ring.leave_to_first(&all).and_then(|()| ring.add_up(&mut self.stage, 0, &all)))?;
        // It belongs to no step.
        self.stage.recorder.take();
        Ok(())
    }

    /// Floating tensors of some roles. Others, such as counters, do not depend on the rows.
    fn floats(&self, wanted: impl Fn(Role) -> bool) -> Vec<Tensor> {
        let tensors = self.stage.partitions.values().flat_map(Partition::tensors);
        let floats = tensors.filter(|(spec, tensor)| wanted(spec.role) && engine::is_float(tensor));
        floats.map(|(_, tensor)| tensor.shallow_clone()).collect()
    }

    /// Does with the gradients what the step says; gives their norms if it wants them.
    fn learn(&mut self, step: &Step) -> Result<BTreeMap<String, Exact>, Fault> {
        let start = now_ns();
        let norms = match step.after {
            After::Keep => BTreeMap::new(),
            After::Update { learning_rate } => self.update(learning_rate).map(|()| BTreeMap::new())?,
            After::Norms => {
                self.waiting = Some(step.number);
                let tensors = self.stage.partitions.values().flat_map(Partition::tensors);
                let parameters = tensors.filter(|(spec, _)| spec.role == Role::Parameter);
                squared_norms(parameters.map(|(spec, tensor)| (spec.name.as_str(), tensor)))?
            }
        };
        self.stage.recorder.record(step.number, Phase::Optimizer, String::new, start);
        Ok(norms)
    }

    /// The end of a step that stopped before its update.
    fn late_update(&mut self, learning_rate: f64, scale: Exact) -> Result<StepReport, Fault> {
        let start = now_ns();
        let step = self.waiting.take().ok_or_else(|| Fault::protocol("a step before its update", "an update alone"))?;
        scale_gradients(self.parameters(), scale.0)?;
        self.update(learning_rate)?;
        self.stage.recorder.record(step, Phase::Optimizer, String::new, start);
        let (phases, spans) = self.stage.recorder.take();
        let peak_bytes = engine::peak_bytes(self.stage.device, meter(self.stage.id));
        Ok(StepReport { phases, spans, peak_bytes, step_ns: now_ns() - start, ..StepReport::default() })
    }

    fn update(&mut self, learning_rate: f64) -> Result<(), Fault> {
        let parameters = self.stage.partitions.values().flat_map(Partition::parameters);
        self.optimizer.step(parameters, learning_rate)?;
        self.clear_gradients();
        Ok(())
    }

    fn report(&mut self, number: u64, report: &StepReport) -> Result<(), Fault> {
        let text = serde_json::to_vec(report).map_err(|e| Fault::protocol("a report", e.to_string()))?;
        self.stage.driver.send(Message::text(Tag::control(Kind::Report, number, self.stage.id), text))
    }

    fn collect(&mut self, number: u64, which: Which, wanted: Option<Vec<String>>) -> Result<(), Fault> {
        let wanted: Option<BTreeSet<String>> = wanted.map(|names| names.into_iter().collect());
        let wants = |name: &str| wanted.as_ref().is_none_or(|wanted| wanted.contains(name));
        let captured = match which {
            Which::Captured => std::mem::take(&mut self.stage.captured),
            _ => Vec::new(),
        };
        let (mut names, mut tensors): (Vec<_>, Vec<_>) = captured.into_iter().unzip();
        for (spec, tensor) in self.stage.partitions.values().flat_map(Partition::tensors) {
            let found = match which {
                _ if !wants(&spec.name) => None,
                Which::State => Some(tensor.f_detach()?),
                Which::Gradients if spec.role == Role::Parameter => engine::grad(tensor),
                Which::Gradients | Which::Captured | Which::Optimizer => None,
            };
            if let Some(tensor) = found {
                names.push(spec.name.clone());
                tensors.push(tensor);
            }
        }
        if which == Which::Optimizer {
            for (index, slot, parameter, spec) in self.remembered().filter(|(_, _, _, spec)| wants(&spec.name)) {
                names.push(spec.name);
                tensors.push(self.optimizer.remembered(index, slot, parameter)?);
            }
        }
        let text = serde_json::to_vec(&names).map_err(|e| Fault::protocol("names", e.to_string()))?;
        let worker = self.stage.id;
        self.stage.driver.send(Message::text(Tag::control(Kind::Report, number, worker), text))?;
        for (i, tensor) in tensors.into_iter().enumerate() {
            // A copy: the driver must not see the next step change it, whatever the transport. Made when it is sent, so
            // that there are no more of them than the way to the driver holds.
            let copy = engine::copy(&tensor.f_to_device(tch::Device::Cpu)?)?;
            self.stage.driver.send(Message::tensors(Tag::part(Kind::State, number, worker, i), vec![Some(copy)]))?;
        }
        Ok(())
    }

    /// What the optimizer remembers: of the parameter of which number what, the parameter, and the name it goes by.
    fn remembered(&self) -> impl Iterator<Item = (usize, Slot, &Tensor, TensorSpec)> {
        let tensors = self.stage.partitions.values().flat_map(Partition::tensors);
        let parameters = tensors.filter(|(spec, _)| spec.role == Role::Parameter);
        let slots = self.optim.slots().iter();
        parameters.enumerate().flat_map(move |(index, (spec, parameter))| {
            slots.clone().map(move |&slot| (index, slot, parameter, slot.spec(spec)))
        })
    }

    fn load(&mut self, number: u64, which: Which, names: &[String]) -> Result<(), Fault> {
        if which == Which::Optimizer {
            return self.load_optimizer(number, names);
        }
        let own: BTreeMap<&str, &Tensor> = self
            .stage
            .partitions
            .values()
            .flat_map(Partition::tensors)
            .map(|(spec, tensor)| (spec.name.as_str(), tensor))
            .collect();
        for (i, name) in names.iter().enumerate() {
            let value = self.arrived(number, i)?;
            let tensor =
                own.get(name.as_str()).ok_or_else(|| Fault::protocol("a tensor of this worker", name.clone()))?;
            if value.size() != tensor.size() {
                return Err(Fault::protocol(format!("{name} {:?}", tensor.size()), format!("{:?}", value.size())));
            }
            tch::no_grad(|| tensor.shallow_clone().f_copy_(&value))?;
        }
        self.done(number)
    }

    fn load_optimizer(&mut self, number: u64, names: &[String]) -> Result<(), Fault> {
        let own = self
            .remembered()
            .map(|(index, slot, parameter, spec)| (spec.name.clone(), (index, slot, parameter.shallow_clone(), spec)));
        let own: BTreeMap<_, _> = own.collect();
        for (i, name) in names.iter().enumerate() {
            let value = self.arrived(number, i)?;
            let (index, slot, parameter, spec) =
                own.get(name).ok_or_else(|| Fault::protocol("what this worker's optimizer remembers", name.clone()))?;
            if value.size() != spec.dims {
                return Err(Fault::protocol(format!("{name} {:?}", spec.dims), format!("{:?}", value.size())));
            }
            self.optimizer.remember(*index, *slot, parameter, &value)?;
        }
        self.done(number)
    }

    /// The tensor of this number that a command to load brings.
    fn arrived(&self, number: u64, i: usize) -> Result<Tensor, Fault> {
        let mut message = self.stage.mailbox.take(&Tag::part(Kind::State, number, self.stage.id, i))?;
        message.tensors.pop().flatten().ok_or_else(|| Fault::protocol("a tensor", "none"))
    }

    /// Reports that a command without a result is done.
    fn done(&mut self, number: u64) -> Result<(), Fault> {
        self.stage.driver.send(Message::text(Tag::control(Kind::Report, number, self.stage.id), "null"))
    }
}
