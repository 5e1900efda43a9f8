//! One step: splits the batch, sends it to the workers, and gathers their reports.

use super::{Batch, Pipeline, StepError, StepOutcome, WorkerStep};
use crate::comm::message::{Message, Tag};
use crate::comm::protocol::{forward_plan, Command, Purpose, StepCommand};
use crate::failure::Failure;
use crate::runtime::accumulation::AccumulationStep;
use crate::runtime::clipping::{clip_scale, global_norm, AfterBackward, F64Bits};
use crate::train::metrics::ClassCounts;
use distgpipe_core::microbatch::MicroBatches;
use distgpipe_core::wire::Kind;
use distgpipe_core::{MicroBatchId, PartitionId};
use std::collections::BTreeMap;
use std::time::Instant;
use tch::Tensor;

/// What to do with a batch.
#[derive(Clone, Copy)]
pub(super) struct StepRequest {
    pub purpose: Purpose,
    /// The batch's place in its update; only [`Purpose::Train`] has updates of several batches.
    pub part: AccumulationStep,
    /// The learning rate of the update, if the step makes one.
    pub learning_rate: f64,
}

/// How a batch is split: over how many replicas, and into how many micro-batches in each of them.
#[derive(Clone, Copy)]
struct RowSplit {
    replicas: usize,
    micro_batches: usize,
}

impl Pipeline {
    /// Runs a step to its end. Returns its figures and, for [`Purpose::Predict`], the outputs of each micro-batch.
    pub(super) fn run(&mut self, batch: &Batch, request: StepRequest) -> Result<(StepOutcome, Vec<Tensor>), StepError> {
        self.check_batch(batch)?;
        if request.purpose == Purpose::Train && !request.learning_rate.is_finite() {
            return Err(StepError::LearningRate { got: request.learning_rate });
        }
        let after = self.after_backward(&request)?;
        let split = self.split_rows(&request, batch.rows());
        let rows = MicroBatches::split(batch.rows(), split.replicas * split.micro_batches)?;
        self.track_plan(&request, split.micro_batches);
        let start = Instant::now();
        self.workers.bounds.begin_step(rows.len(MicroBatchId(0)));
        let number = self.next_command();
        let step = self.next_step(batch, &request, after, &rows, split.micro_batches);
        for worker in self.topology.members() {
            let replica = self.topology.replica_of(worker);
            let own = || StepCommand { first: replica * split.micro_batches, ..step.clone() };
            let command = if replica < split.replicas { Command::Step(own()) } else { Command::SkipStep };
            self.send_command(number, worker, &command)?;
        }
        self.send_batch(batch, &rows, &step)?;
        let outputs = if request.purpose == Purpose::Predict { self.outputs(&rows, &step)? } else { Vec::new() };
        let mut workers = Vec::new();
        for worker in self.topology.members() {
            let report = self.wait_report(number, worker)?;
            workers.push(WorkerStep { name: self.topology.name(worker), report });
        }
        let gradient_norm = match after {
            AfterBackward::ReportNorms => Some(self.clipped_update(&mut workers, request.learning_rate)?),
            AfterBackward::Keep | AfterBackward::Update { .. } => None,
        };
        if request.purpose == Purpose::Train {
            self.next_part = request.part.next();
        }
        let seconds = start.elapsed().as_secs_f64();
        let links = self.link_traffic.step(&workers);
        let outcome = StepOutcome {
            gradient_norm,
            seconds,
            step_links: links,
            ..self.outcome(rows.rows(), split.replicas, workers)
        };
        Ok((outcome, outputs))
    }

    /// The command of the next step, for the first replica.
    fn next_step(
        &mut self,
        batch: &Batch,
        request: &StepRequest,
        after: AfterBackward,
        rows: &MicroBatches,
        micro_batches: usize,
    ) -> StepCommand {
        let step = StepCommand {
            number: self.next_step,
            trained_batches: self.batches_trained,
            purpose: request.purpose,
            rows: rows.rows(),
            all_micro_batches: rows.count(),
            first: 0,
            micro_batches,
            batches: request.part.of,
            fresh: request.purpose.runs_backward() && request.part.is_first(),
            after,
            samples: if self.wants_samples { batch.samples.clone() } else { Vec::new() },
            capture: std::mem::take(&mut self.capture),
        };
        self.next_step += 1;
        self.batches_trained += u64::from(request.purpose == Purpose::Train);
        step
    }

    /// Every replica takes part in a step with a backward pass, with all micro-batches of the plan. Other steps use
    /// fewer where the batch has too few rows.
    fn split_rows(&self, request: &StepRequest, rows: usize) -> RowSplit {
        let (replicas, micro_batches) = (self.topology.replicas(), self.plan().micro_batches());
        match rows / replicas {
            _ if request.purpose.runs_backward() => RowSplit { replicas, micro_batches },
            0 => RowSplit { replicas: 1, micro_batches: micro_batches.min(rows) },
            each => RowSplit { replicas, micro_batches: micro_batches.min(each) },
        }
    }

    /// What the workers do with their gradients once the step's backward pass is done.
    fn after_backward(&self, request: &StepRequest) -> Result<AfterBackward, StepError> {
        if !request.purpose.runs_backward() {
            return Ok(AfterBackward::Keep);
        }
        let part = request.part;
        let expected = self.next_part.unwrap_or(AccumulationStep { index: 0, ..part });
        if part != expected || part.index >= part.of {
            return Err(StepError::Accumulation { expected, got: part });
        }
        match self.clip_norm {
            _ if request.purpose == Purpose::Gradients || !part.is_last() => Ok(AfterBackward::Keep),
            None => Ok(AfterBackward::Update { learning_rate: request.learning_rate }),
            Some(norm) if norm.is_finite() && norm > 0.0 => Ok(AfterBackward::ReportNorms),
            Some(got) => Err(StepError::ClipNorm { got }),
        }
    }

    /// Makes the update of a clipped step: the workers have reported the norms of their gradients and wait. All scale by
    /// the same factor. Returns the norm before clipping.
    fn clipped_update(&mut self, workers: &mut [WorkerStep], learning_rate: f64) -> Result<f64, Failure> {
        let squares: BTreeMap<String, F64Bits> =
            workers.iter_mut().flat_map(|worker| std::mem::take(&mut worker.report.squared_norms)).collect();
        let norm = global_norm(&squares);
        let scale = self.clip_norm.map_or(1.0, |norm_max| clip_scale(norm, norm_max));
        let update = Command::Update { learning_rate, scale: F64Bits(scale) };
        let number = self.next_command();
        for worker in self.topology.members() {
            self.send_command(number, worker, &update)?;
        }
        for worker in self.topology.members() {
            let later = self.wait_report(number, worker)?;
            if let Some(step) = workers.get_mut(worker.index()) {
                step.report.append(later);
            }
        }
        Ok(norm)
    }

    /// Workers make a forward-only plan for steps without a backward pass. The watchdog needs the same one.
    fn track_plan(&mut self, request: &StepRequest, micro_batches: usize) {
        if request.purpose.runs_backward() {
            self.forward_plan = None;
        } else if self.forward_plan.as_ref().is_none_or(|plan| plan.micro_batches() != micro_batches) {
            self.forward_plan = forward_plan(self.plan(), micro_batches).ok();
        }
    }

    /// Sends each micro-batch's inputs to the first partition and its targets to the last. They are views: nothing is
    /// copied unless a link carries them.
    fn send_batch(&mut self, batch: &Batch, rows: &MicroBatches, step: &StepCommand) -> Result<(), StepError> {
        let (first, last) = (PartitionId(0), PartitionId::new(self.plan().partitions() - 1));
        for of_all in rows.ids() {
            let (replica, m) = (of_all.index() / step.micro_batches, of_all.index() % step.micro_batches);
            let (m, range) = (MicroBatchId::new(m), rows.range(of_all));
            let (from, len) = (range.start as i64, range.len() as i64);
            // Detached: the backward pass must not run into a graph of the caller's.
            let slice = |t: &Tensor| t.f_detach()?.f_narrow(0, from, len);
            let mut parts = vec![(Kind::Input, first, batch.inputs.iter().collect::<Vec<_>>())];
            if step.purpose != Purpose::Predict {
                parts.push((Kind::Target, last, vec![&batch.target]));
            }
            for (kind, partition, tensors) in parts {
                let tensors = tensors.into_iter().map(|t| slice(t).map(Some)).collect::<Result<Vec<_>, _>>();
                let tensors = tensors.map_err(|e| self.fail("splitting the batch", e.into()))?;
                let tag = Tag::between(kind, step.number, m, partition, partition);
                let worker = self.topology.member(replica, self.plan().placement().worker_of(partition));
                let mut message = Message::tensors(tag, tensors);
                message.encoding.training = step.purpose == Purpose::Train;
                self.send(worker, message)?;
            }
        }
        Ok(())
    }

    /// Waits for the model's output for each micro-batch, in the order of rows.
    fn outputs(&self, rows: &MicroBatches, step: &StepCommand) -> Result<Vec<Tensor>, Failure> {
        let last = PartitionId::new(self.plan().partitions() - 1);
        let mut outputs = Vec::new();
        for m in rows.ids() {
            let message = self.wait(&Tag::between(Kind::Output, step.number, m, last, last))?;
            outputs.extend(message.tensors.into_iter().flatten().take(1).map(|t| t.to_device(tch::Device::Cpu)));
        }
        Ok(outputs)
    }

    /// Adds up the reports of the workers with the last partition: only they have a loss and counts.
    fn outcome(&self, rows: usize, replicas: usize, workers: Vec<WorkerStep>) -> StepOutcome {
        let last = self.plan().placement().worker_of(PartitionId::new(self.plan().partitions() - 1));
        let scored = || (0..replicas).filter_map(|r| workers.get(self.topology.member(r, last).index()));
        // JSON has no NaN, so a loss that is NaN arrives as absent.
        let loss_sum: f64 = scored().map(|w| w.report.loss_sum.unwrap_or(f64::NAN)).sum();
        let mut classes: Option<ClassCounts> = None;
        for counts in scored().filter_map(|w| w.report.classes.as_ref()) {
            classes.get_or_insert_default().add(counts);
        }
        StepOutcome {
            rows,
            loss: loss_sum / rows as f64,
            correct: scored().map(|w| w.report.correct).sum(),
            classes,
            gradient_norm: None,
            seconds: 0.0,
            step_links: Vec::new(),
            workers,
        }
    }

    fn check_batch(&self, batch: &Batch) -> Result<(), StepError> {
        let rows = batch.rows() as i64;
        if rows == 0 {
            return Err(StepError::Batch { expected: "at least one".to_owned(), got: "no rows".to_owned() });
        }
        let fits = batch.inputs.len() == self.model.input.len()
            && batch.inputs.iter().zip(&self.model.input).all(|(tensor, spec)| {
                tensor.kind() == spec.kind
                    && tensor.size().split_first().is_some_and(|(r, dims)| *r == rows && dims == spec.dims)
            });
        if fits {
            return Ok(());
        }
        let expected: Vec<String> =
            self.model.input.iter().map(|s| format!("[{rows} rows] × {:?} of {:?}", s.dims, s.kind)).collect();
        let got: Vec<String> = batch.inputs.iter().map(|t| format!("{:?} of {:?}", t.size(), t.kind())).collect();
        Err(StepError::Batch {
            expected: expected.join(" and "),
            got: format!("inputs {}, target {:?}", got.join(" and "), batch.target.size()),
        })
    }
}
