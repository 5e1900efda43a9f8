//! One step of a worker: it runs its actions of the plan, updates its parameters, and reports.

use super::gradient_sharing::RunningAllReduce;
use super::{failed, BuiltWorker};
use crate::comm::protocol::{forward_plan, Purpose, StepCommand, StepReport};
use crate::comm::status::Activity;
use crate::comm::traffic::Traffic;
use crate::engine;
use crate::engine::cuda::{self, CudaStream};
use crate::failure::{Failure, Fault};
use crate::runtime::clipping::{scale_gradients, squared_norms, AfterBackward, F64Bits};
use crate::runtime::divergence::{is_check_due, parameter_max};
use crate::runtime::graphs::WorkerGraphs;
use crate::runtime::partition::Partition;
use crate::runtime::trace::{now_ns, Phase};
use distgpipe_core::schedule::Plan;
use distgpipe_core::WorkerId;
use std::time::Duration;
use tch::Tensor;

/// How often a worker checks whether its links have sent everything, before it reports their traffic.
const LINKS_POLL: Duration = Duration::from_micros(100);

impl BuiltWorker {
    pub(super) fn run_step(&mut self, step: &StepCommand) -> Result<StepReport, Failure> {
        let start = now_ns();
        let name = self.stage.name.clone();
        self.discard_last_step();
        self.check(step).map_err(failed(&name, "starting a step"))?;
        let mut sharing = None;
        let outcome = if step.purpose.runs_backward() {
            if step.fresh {
                self.clear_gradients().map_err(failed(&name, "starting a step"))?;
            }
            sharing = self.start_all_reduce(step).map_err(failed(&name, "starting a step"))?;
            let topology = self.stage.topology.clone();
            self.stage.run(topology.plan(), step, sharing.as_ref().map(|sharing| &sharing.watch))?
        } else {
            let plan = self.take_forward_plan(step.micro_batches).map_err(failed(&name, "starting a step"))?;
            let outcome = self.stage.run(&plan, step, None)?;
            self.forward_plans.insert(step.micro_batches, plan);
            outcome
        };
        let topology = &self.stage.topology;
        self.stage.status.begin(Activity::Busy, topology.plan().actions(topology.role_of(self.stage.id)).len());
        let finished = self.after_backward(step, sharing)?;
        let (loss_sum, correct) = outcome.totals().map_err(failed(&name, "adding up the loss"))?;
        self.wait_for_links().map_err(failed(&name, "sending"))?;
        // Steps do not overlap on the GPU either: tensors of CUDA graphs are overwritten in the next one.
        if let Some(index) = cuda::index(self.stage.device) {
            CudaStream::current(index).and_then(CudaStream::synchronize).map_err(failed(&name, "computing"))?;
        }
        let (phases, mut spans) = self.stage.recorder.take();
        spans.append(&mut self.link_codecs.background.take());
        Ok(StepReport {
            loss_sum,
            correct,
            classes: outcome.classes(),
            phases,
            step_ns: now_ns() - start,
            peak_bytes: engine::peak_bytes(self.stage.device, self.meter.number()),
            reserved_bytes: engine::reserved_bytes(self.stage.device),
            links: self.link_traffic(),
            spans,
            graphs: self.stage.graphs.as_mut().and_then(WorkerGraphs::take_report),
            ..finished
        })
    }

    /// Drops what the last step left: captured tensors, and gradients that still wait for an update.
    pub(super) fn discard_last_step(&mut self) {
        self.stage.captured.clear();
        self.deferred_step = None;
    }

    fn check(&self, step: &StepCommand) -> Result<(), Fault> {
        if step.batches == 0 {
            return Err(Fault::protocol("an update over at least 1 batch", "an update over 0 batches"));
        }
        let micro_batches = self.stage.topology.plan().micro_batches();
        if step.purpose.runs_backward() && step.micro_batches != micro_batches {
            let expected = format!("a training step of {micro_batches} micro-batches");
            return Err(Fault::protocol(expected, step.micro_batches.to_string()));
        }
        Ok(())
    }

    /// The forward-only plan for this number of micro-batches, made at its first use. The caller puts it back.
    fn take_forward_plan(&mut self, micro_batches: usize) -> Result<Plan, Fault> {
        if let Some(plan) = self.forward_plans.remove(&micro_batches) {
            return Ok(plan);
        }
        forward_plan(self.stage.topology.plan(), micro_batches)
            .map_err(|e| Fault::invalid_job("the plan for evaluation", e))
    }

    /// What follows the plan's last action: batch norms, gradients of replicas, parameters. Returns a report of
    /// gradient norms and parameters alone.
    fn after_backward(&mut self, step: &StepCommand, sharing: Option<RunningAllReduce>) -> Result<StepReport, Failure> {
        let name = self.stage.name.clone();
        if step.purpose == Purpose::Train {
            self.commit_batch_norms(step).map_err(failed(&name, "updating its batch norms"))?;
        } else {
            self.stage.partitions.values_mut().for_each(|p| p.norms().discard());
        }
        // Gradients that later batches are added to are added up once, after the last of those batches.
        if step.purpose == Purpose::Gradients || step.after != AfterBackward::Keep {
            self.add_shared_gradients().map_err(failed(&name, "adding up the gradients of tied parameters"))?;
        }
        if let Some(sharing) = sharing {
            self.finish_all_reduce(step, sharing)?;
        }
        if step.purpose == Purpose::Train {
            return self.apply_gradients(step).map_err(failed(&name, "updating its parameters"));
        }
        Ok(StepReport::default())
    }

    fn commit_batch_norms(&mut self, step: &StepCommand) -> Result<(), Fault> {
        let start = now_ns();
        for partition in self.stage.partitions.values_mut() {
            partition.norms().commit()?;
        }
        self.stage.recorder.record(step.number, Phase::Optimizer, String::new, start);
        Ok(())
    }

    /// Does with the gradients what the step's [`AfterBackward`] says.
    fn apply_gradients(&mut self, step: &StepCommand) -> Result<StepReport, Fault> {
        let start = now_ns();
        let mut report = StepReport::default();
        match step.after {
            AfterBackward::Keep => {}
            AfterBackward::Update { learning_rate } => report.parameter_max = self.update_parameters(learning_rate)?,
            AfterBackward::ReportNorms => {
                self.deferred_step = Some(step.number);
                let parameters = self.stage.partitions.values().flat_map(Partition::trained);
                report.squared_norms = squared_norms(parameters.map(|(spec, tensor)| (spec.name.as_str(), tensor)))?;
            }
        }
        self.stage.recorder.record(step.number, Phase::Optimizer, String::new, start);
        Ok(report)
    }

    /// Finishes a step that stopped before its update: scales the gradients, then updates the parameters.
    pub(super) fn deferred_update(&mut self, learning_rate: f64, scale: F64Bits) -> Result<StepReport, Fault> {
        let start = now_ns();
        let step = self.deferred_step.take().ok_or_else(|| {
            Fault::protocol("an update after a step that reported its norms", "an update without one")
        })?;
        scale_gradients(self.parameters(), scale.0)?;
        let parameter_max = self.update_parameters(learning_rate)?;
        self.stage.recorder.record(step, Phase::Optimizer, String::new, start);
        let (phases, spans) = self.stage.recorder.take();
        let peak_bytes = engine::peak_bytes(self.stage.device, self.meter.number());
        Ok(StepReport { parameter_max, phases, spans, peak_bytes, step_ns: now_ns() - start, ..StepReport::default() })
    }

    /// Updates the parameters and clears their gradients. Returns the largest magnitude among the new parameters, if it
    /// is time to check them.
    fn update_parameters(&mut self, learning_rate: f64) -> Result<Option<F64Bits>, Fault> {
        let parameters = self.stage.partitions.values().flat_map(Partition::trained);
        self.optimizer.step(parameters.map(|(_, parameter)| parameter), learning_rate)?;
        self.clear_gradients()?;
        self.updates += 1;
        let max = if is_check_due(self.updates) { parameter_max(self.parameters())? } else { None };
        Ok(max.map(F64Bits))
    }

    fn clear_gradients(&mut self) -> Result<(), Fault> {
        self.stage.partitions.values().for_each(Partition::clear_gradients);
        self.stage.graphs.as_mut().map_or(Ok(()), WorkerGraphs::clear_gradients)
    }

    /// The parameters that this worker trains.
    pub(super) fn parameters(&self) -> impl Iterator<Item = &Tensor> {
        self.stage.partitions.values().flat_map(Partition::trained).map(|(_, parameter)| parameter)
    }

    /// Waits until the links have sent everything, so that the report has the traffic of the whole step. This delays no
    /// other worker: the step cannot end anywhere before these messages have arrived.
    fn wait_for_links(&self) -> Result<(), Fault> {
        while !self.stage.links.iter().all(|(_, counters)| counters.settled()) {
            self.stage.abort.check()?;
            std::thread::sleep(LINKS_POLL);
        }
        Ok(())
    }

    /// The traffic of each outgoing link since the run began.
    pub(super) fn link_traffic(&self) -> Vec<(WorkerId, Traffic)> {
        self.stage.links.iter().map(|(to, counters)| (*to, counters.read())).collect()
    }
}
