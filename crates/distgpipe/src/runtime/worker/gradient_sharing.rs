//! What replicas exchange: their gradients before each update, and the first replica's parameters when a run starts.
//!
//! Each replica's gradient covers its part of the batch, so the sum over all replicas is the gradient of the batch. A thread of
//! its own sums the gradients bucket by bucket while the last backward passes still run: last layers first, as they become
//! final. The buckets and their order are fixed, so the bits do not depend on the timing.
//!
//! Layers of one worker that share a parameter add their gradients up before that.

use super::{failed, panic_message, BuiltWorker};
use crate::comm::abort::AbortFlag;
use crate::comm::message::EncodeOptions;
use crate::comm::protocol::{Purpose, StepCommand};
use crate::engine;
use crate::engine::cuda::{self, CudaStream};
use crate::failure::{Failure, Fault};
use crate::model::layer::Role;
use crate::runtime::all_reduce::{buckets, scatter, Exchange, RingAllReduce, ShareProgress};
use crate::runtime::clipping::AfterBackward;
use crate::runtime::gradient_watch::{watch, GradientWatch, ReadyGradients, WaitError};
use crate::runtime::partition::Partition;
use crate::runtime::trace::{now_ns, BackgroundRecorder, Phase};
use distgpipe_core::PartitionId;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::thread::JoinHandle;
use tch::Tensor;

/// The all-reduce of a step, on a thread of its own.
pub(super) struct RunningAllReduce {
    /// Where the stage tells which gradients are final.
    pub watch: GradientWatch,
    progress: Arc<ShareProgress>,
    thread: JoinHandle<Result<SharedGradients, Failure>>,
}

/// What the thread of an all-reduce returns.
struct SharedGradients {
    ring: RingAllReduce,
    /// The numbers of parameters that have no gradient here but in another replica, with the sum.
    missing: Vec<(usize, Tensor)>,
}

impl BuiltWorker {
    /// Adds the gradients of [tied](crate::model::ties) parameters, in the order of layers: the first leaf gets the sum.
    pub(super) fn add_shared_gradients(&mut self) -> Result<(), Fault> {
        let partitions = || self.stage.partitions.values();
        let mut shared = partitions().flat_map(Partition::shared).peekable();
        if shared.peek().is_none() {
            return Ok(());
        }
        let first: HashMap<&str, &Tensor> =
            partitions().flat_map(Partition::tensors).map(|(spec, tensor)| (&spec.name[..], tensor)).collect();
        for (spec, leaf) in shared {
            let (Some(gradient), Some(first)) = (engine::grad(leaf), first.get(&spec.name[..])) else { continue };
            match engine::grad(first) {
                Some(mut sum) => drop(tch::no_grad(|| sum.f_add_(&gradient))?),
                None => set_gradient(first, &gradient)?,
            }
            engine::clear_grad(leaf);
        }
        Ok(())
    }

    /// Starts to sum the gradients of a step over the replicas. `None` without replicas, and for a step whose gradients later
    /// batches are added to: the last of those batches shares them.
    pub(super) fn start_all_reduce(&mut self, step: &StepCommand) -> Result<Option<RunningAllReduce>, Fault> {
        if step.purpose != Purpose::Gradients && step.after == AfterBackward::Keep {
            return Ok(None);
        }
        let Some(mut ring) = self.ring.take() else { return Ok(None) };
        // The gradient of a tied parameter is final when those of all its leaves have been added up.
        let partitions = &self.stage.partitions;
        let tied: HashSet<&str> =
            partitions.values().flat_map(Partition::shared).map(|(spec, _)| &spec.name[..]).collect();
        let trained = partitions.iter().flat_map(|(id, partition)| partition.trained().map(move |named| (*id, named)));
        let parameters: Vec<(Option<PartitionId>, Tensor)> = trained
            .map(|(id, (spec, tensor))| ((!tied.contains(&spec.name[..])).then_some(id), tensor.shallow_clone()))
            .collect();
        let (topology, abort) = (&self.stage.topology, self.stage.abort.clone());
        let role = topology.role_of(self.stage.id);
        let (watch, mut ready) = watch(topology.plan(), role, &parameters, abort.clone());
        let progress = ShareProgress::new(self.stage.status.clone());
        let (name, number, meter) = (self.stage.name.clone(), step.number, self.meter.number());
        let (background, of_thread) = (self.link_codecs.background.clone(), progress.clone());
        let parameters: Vec<Tensor> = parameters.into_iter().map(|(_, parameter)| parameter).collect();
        let encoding = EncodeOptions {
            compress: self.stage.codecs.applies_in(step),
            training: step.purpose == Purpose::Train,
            seed: self.stage.stream.at(step.trained_batches).named("shares").at(u64::from(self.stage.id.0)).seed(),
            samples: Vec::new(),
        };
        // In the stage's own stream a gradient is final when the stage says so.
        let stream = cuda::index(self.stage.device).map(CudaStream::current).transpose()?;
        let sharing = move || {
            engine::attach_thread(1, meter);
            if let Some(stream) = stream {
                stream.enter().map_err(|fault| ended(&abort, &name, fault.into()))?;
            }
            let exchange = ring.begin(number, encoding, of_thread);
            let sum = ReplicaSum { exchange, step: number, background };
            let shared = tch::no_grad(|| sum.run(&parameters, &mut ready));
            shared.map(|missing| SharedGradients { ring, missing }).map_err(|error| ended(&abort, &name, error))
        };
        let thread = engine::spawn(format!("all-reduce of {}", self.stage.name), sharing)?;
        Ok(Some(RunningAllReduce { watch, progress, thread }))
    }

    /// Waits until the gradients of each replica have been replaced by their sum. A training step also copies the first replica's
    /// buffers to the others, because the batch norms of each replica saw other rows.
    pub(super) fn finish_all_reduce(&mut self, step: &StepCommand, running: RunningAllReduce) -> Result<(), Failure> {
        let start = now_ns();
        let name = self.stage.name.clone();
        running.progress.begin_wait();
        running.watch.finish(self.float_tensors(|role| role == Role::Buffer && step.purpose == Purpose::Train));
        let shared = running.thread.join().unwrap_or_else(|panic| {
            Err(Failure::new(&name, "sharing gradients", Fault::Panic(panic_message(panic.as_ref()))))
        })?;
        let parameters: Vec<&Tensor> = self.parameters().collect();
        for (number, gradient) in &shared.missing {
            set_gradient(parameters[*number], gradient).map_err(failed(&name, "sharing gradients"))?;
        }
        self.ring = Some(shared.ring);
        self.stage.recorder.record(step.number, Phase::GradientWait, String::new, start);
        Ok(())
    }

    /// Overwrites the parameters and buffers of all replicas with those of the first. Initial values that another kind
    /// of machine drew may differ in their last bits.
    pub(super) fn broadcast_parameters(&mut self) -> Result<(), Fault> {
        let all = self.float_tensors(|_| true);
        let Some(ring) = &mut self.ring else { return Ok(()) };
        tch::no_grad(|| ring.broadcast(&self.stage.status, &all))
    }

    /// The floating-point tensors of some roles. Integer tensors, such as counters, are the same in all replicas.
    fn float_tensors(&self, wanted: impl Fn(Role) -> bool) -> Vec<Tensor> {
        let tensors = self.stage.partitions.values().flat_map(Partition::tensors);
        let floats = tensors.filter(|(spec, tensor)| wanted(spec.role) && engine::is_float(tensor));
        floats.map(|(_, tensor)| tensor.shallow_clone()).collect()
    }
}

/// Why the thread of an all-reduce ends without the sum. Its own failure ends the run; that of the stage is told by the stage.
fn ended(abort: &AbortFlag, name: &str, error: WaitError) -> Failure {
    match error {
        WaitError::Failed(fault) => abort.fail(Failure::new(name, "sharing gradients", fault)),
        WaitError::Abandoned => Failure::new(name, "sharing gradients", Fault::Lost),
    }
}

/// The sum of a step's gradients over the replicas.
struct ReplicaSum<'a> {
    exchange: Exchange<'a>,
    step: u64,
    background: BackgroundRecorder,
}

impl ReplicaSum<'_> {
    /// Replaces the gradients by their sums. Returns the sums of those that this replica does not have.
    fn run(mut self, parameters: &[Tensor], ready: &mut ReadyGradients) -> Result<Vec<(usize, Tensor)>, WaitError> {
        let order: Vec<usize> = (0..parameters.len()).rev().collect();
        let mut own = vec![1.0_f32; parameters.len()];
        let (mut absent, mut kept) = (Vec::new(), Vec::new());
        for bucket in buckets(order.iter().map(|&number| parameters[number].numel())) {
            let numbers = &order[bucket];
            ready.wait_for(numbers)?;
            let mut gradients = Vec::new();
            for &number in numbers {
                gradients.push(match engine::grad(&parameters[number]) {
                    Some(gradient) => gradient,
                    // A layer may use a parameter for some rows only, so that one replica has a gradient and another has none.
                    None => {
                        own[number] = 0.0;
                        let zeros = parameters[number].f_detach()?.f_zeros_like()?;
                        absent.push((number, zeros.shallow_clone()));
                        zeros
                    }
                });
            }
            let start = now_ns();
            kept.push((self.exchange.sum(&gradients)?, gradients));
            self.record(numbers, start);
            // Gradients may share memory with tensors that the backward pass still reads.
            if ready.all_are_final() {
                kept.drain(..).try_for_each(|(sum, gradients)| scatter(&sum, &gradients))?;
            }
        }
        let buffers = ready.wait_for_rest()?;
        kept.drain(..).try_for_each(|(sum, gradients)| scatter(&sum, &gradients))?;
        // How many replicas have a gradient for each parameter.
        let mut users = Tensor::f_from_slice(&own)?;
        if let Some(parameter) = parameters.first() {
            users = users.f_to_device(parameter.device())?;
        }
        self.exchange.zero_unless_first(&buffers)?;
        let rest: Vec<Tensor> = std::iter::once(&users).chain(&buffers).map(Tensor::shallow_clone).collect();
        self.exchange.replace(&rest)?;
        if absent.is_empty() {
            return Ok(absent);
        }
        let users = Vec::<f32>::try_from(users.f_to_device(tch::Device::Cpu)?)?;
        absent.retain(|(number, _)| users[*number] > 0.0);
        Ok(absent)
    }

    fn record(&self, numbers: &[usize], start: u64) {
        let what = match numbers {
            [first, .., last] => format!("parameters {last} to {first}"),
            _ => format!("parameter {}", numbers.first().copied().unwrap_or_default()),
        };
        self.background.record(self.step, Phase::AllReduce, &what, start);
    }
}

/// Gives a parameter that has no gradient this one.
fn set_gradient(parameter: &Tensor, value: &Tensor) -> Result<(), Fault> {
    // A backward pass over zeros makes libtorch allocate the gradient.
    engine::backward(&[(parameter.f_zeros_like()?.f_mul(parameter)?.f_sum(parameter.kind())?, None)], None)?;
    let mut gradient = engine::grad(parameter)
        .ok_or_else(|| Fault::internal("a gradient after the backward pass over a parameter", "none"))?;
    tch::no_grad(|| gradient.f_copy_(value))?;
    Ok(())
}
