//! Estimates the step time and the memory of a cut.
//!
//! The time is the makespan of the plan. The memory of a worker is that of its parameters, their gradients and the
//! optimizer state, plus at its peak, for each micro-batch between forward and backward, what the layers hold and what
//! arrived from other workers. A micro-batch that will be recomputed holds only its input until then.

use super::search::{balance_of, cuts_of, CandidatePlan, Edges, Score, Search};
use super::{Balance, BalanceError, Objective, Problem, Sizes};
use crate::placement::Placement;
use crate::schedule::compiled_plan::{CompiledPlan, Held, StepCosts};
use crate::schedule::{simulate, Pass};
use crate::PartitionId;

/// The estimated costs of a partition for one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PartitionEstimate {
    /// Seconds for the forward pass.
    pub forward_s: f64,
    /// Seconds for the backward pass.
    pub backward_s: f64,
    /// Bytes sent to later partitions on other workers.
    pub forward_bytes: u64,
    /// Bytes sent to earlier partitions on other workers.
    pub backward_bytes: u64,
    /// Bytes of the partition's parameters.
    pub parameter_bytes: u64,
    /// The partition's share of its worker's memory in bytes, at the partition's own peak.
    pub memory_bytes: u64,
}

/// The estimated peak memory of a worker.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerEstimate {
    /// The worker's name in the placement.
    pub name: String,
    /// The peak of all its partitions together, in bytes.
    pub memory_bytes: u64,
}

/// The estimated costs of a cut.
#[derive(Clone, Debug, PartialEq)]
pub struct Estimate {
    /// The simulated time of a training step in seconds.
    pub step_s: f64,
    /// The fraction of all workers' time in which they do not compute.
    pub bubble: f64,
    /// The partitions, from the input on.
    pub partitions: Vec<PartitionEstimate>,
    /// The workers, by number.
    pub workers: Vec<WorkerEstimate>,
}

impl Estimate {
    /// The memory of the worker that needs most, in bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.workers.iter().map(|worker| worker.memory_bytes).max().unwrap_or(0)
    }
}

/// What a partition holds, in bytes.
struct Holds {
    /// Parameters, gradients and optimizer state.
    resident: f64,
    /// The autograd graph of one micro-batch.
    graph: f64,
    /// The input of one micro-batch from other workers. Input from a partition of the same worker is part of that
    /// partition's graph already.
    arrives: f64,
    /// The whole input of one micro-batch, which recomputation keeps.
    input: f64,
}

impl Holds {
    fn at(&self, held: &Held) -> f64 {
        let (kept, inputs, recomputed) = (f64::from(held.kept), f64::from(held.inputs), f64::from(held.recomputed));
        kept * (self.graph + self.arrives) + inputs * self.input + recomputed * (self.graph + self.input)
    }
}

/// The evaluation of a cut.
pub(super) struct Parts {
    pub score: Score,
    edges: Edges,
    costs: StepCosts,
    sent: Vec<f64>,
    holds: Vec<Holds>,
    by_worker: Vec<f64>,
}

/// The layers of each partition of a cut.
struct Spans<'a> {
    cuts: &'a [usize],
    layers: usize,
}

impl Spans<'_> {
    fn partition_of(&self, layer: usize) -> PartitionId {
        PartitionId::new(self.cuts.partition_point(|&cut| cut <= layer))
    }

    fn start(&self, p: usize) -> usize {
        p.checked_sub(1).map_or(0, |before| self.cuts[before])
    }

    fn end(&self, p: usize) -> usize {
        self.cuts.get(p).copied().unwrap_or(self.layers)
    }

    /// 0 if these layers are on one worker, else how far the cuts between them are from lying before or after all of them.
    fn layers_apart(&self, placement: &Placement, layers: &[usize]) -> usize {
        let worker = |&layer: &usize| placement.worker_of(self.partition_of(layer));
        let (Some(first), Some(last)) = (layers.iter().min(), layers.iter().max()) else { return 0 };
        if layers.iter().all(|layer| worker(layer) == worker(first)) {
            return 0;
        }
        let between = self.cuts.iter().filter(|&cut| (first + 1..=*last).contains(cut));
        between.map(|cut| (cut - first).min(last + 1 - cut)).sum()
    }

    /// The total over a partition's layers, from prefix sums.
    fn sum(&self, sums: &[f64], p: usize) -> f64 {
        sums[self.end(p)] - sums[self.start(p)]
    }
}

impl Search<'_> {
    /// Evaluates a cut, given as the first layer of every partition but the first.
    pub(super) fn parts(&mut self, cuts: &[usize]) -> Result<Parts, BalanceError> {
        let problem = self.problem;
        let spans = Spans { cuts, layers: self.layers() };
        let skips: Edges =
            problem.skips.iter().map(|skip| (spans.partition_of(skip.stash), spans.partition_of(skip.pop))).collect();
        let mut edges: Edges = skips.iter().copied().filter(|(from, to)| to.0 > from.0 + 1).collect();
        edges.sort_unstable();
        edges.dedup();
        self.plan(&edges)?;
        let candidate = &self.plans[&edges];
        let sent = sent_bytes(problem, &spans, &skips, candidate);
        let costs = self.step_costs(&spans, &sent);
        let makespan = candidate.compiled.makespan(&costs, &mut self.clocks);
        let holds: Vec<Holds> = (0..self.partitions()).map(|p| self.holds(&spans, &skips, p)).collect();
        let by_worker = memory(&candidate.compiled, &holds);
        let memory = by_worker.iter().copied().fold(0.0, f64::max);
        let over_bytes = problem.memory_limit_bytes.map_or(0.0, |limit| (memory - limit as f64).max(0.0));
        let (objective, other) = match problem.objective {
            Objective::Time => (makespan, memory),
            Objective::Memory => (memory, makespan),
        };
        let apart = problem.together.iter().map(|layers| spans.layers_apart(&problem.placement, layers)).sum();
        Ok(Parts { score: Score { apart, over_bytes, objective, other }, edges, costs, sent, holds, by_worker })
    }

    /// The times of computations and messages, given the bytes of each edge of the compiled plan.
    fn step_costs(&self, spans: &Spans<'_>, sent: &[f64]) -> StepCosts {
        let partitions = self.partitions();
        let mut computes = Vec::with_capacity(3 * partitions);
        for sums in [&self.forward, &self.forward, &self.backward] {
            computes.extend((0..partitions).map(|p| spans.sum(sums, p).max(0.0)));
        }
        let link = self.problem.link;
        let transfers = match link {
            Some(link) => sent.iter().map(|bytes| bytes / link.bytes_per_s).collect(),
            None => vec![0.0; sent.len()],
        };
        StepCosts { computes, transfers, latency: link.map_or(0.0, |link| link.latency_s) }
    }

    fn holds(&self, spans: &Spans<'_>, skips: &Edges, p: usize) -> Holds {
        let (problem, here) = (self.problem, PartitionId::new(p));
        let mut holds = Holds {
            resident: spans.sum(&self.parameters, p) * (2.0 + problem.state_factor),
            graph: spans.sum(&self.held, p),
            arrives: 0.0,
            input: 0.0,
        };
        let mut takes = |from: Option<PartitionId>, bytes: u64| {
            let foreign =
                from.is_none_or(|from| problem.placement.worker_of(from) != problem.placement.worker_of(here));
            holds.arrives += if foreign { bytes as f64 } else { 0.0 };
            holds.input += bytes as f64;
        };
        match spans.start(p).checked_sub(1) {
            Some(before) => takes(Some(PartitionId::new(p - 1)), problem.in_memory.outputs[before]),
            None => takes(None, problem.input_bytes),
        }
        for (&(from, to), &bytes) in skips.iter().zip(&problem.in_memory.skips) {
            if to == here && from != here {
                takes(Some(from), bytes);
            }
        }
        holds
    }

    pub(super) fn estimate(&mut self, balance: &Balance) -> Result<Estimate, BalanceError> {
        let parts = self.parts(&cuts_of(balance))?;
        debug_assert_eq!(balance_of(&cuts_of(balance), self.layers()).as_ref(), Ok(balance));
        let CandidatePlan { plan, compiled, .. } = &self.plans[&parts.edges];
        let simulation = simulate(plan, &compiled.costs(&parts.costs))?;
        let placement = &self.problem.placement;
        let partitions = placement.partition_ids().map(|here| {
            let p = here.index();
            let bytes = |pass: Pass| {
                let mine = compiled.edges().iter().zip(&parts.sent);
                mine.filter(|((from, _, of), _)| (*from, *of) == (here, pass)).map(|(_, bytes)| bytes).sum::<f64>()
            };
            let moments = &compiled.moments()[placement.worker_of(here).index()];
            let own = moments.iter().flatten().filter(|held| held.partition == here);
            let most = own.map(|held| parts.holds[p].at(held)).fold(0.0, f64::max);
            PartitionEstimate {
                forward_s: parts.costs.computes[p],
                backward_s: parts.costs.computes[2 * placement.partitions() + p],
                forward_bytes: bytes(Pass::Forward) as u64,
                backward_bytes: bytes(Pass::Backward) as u64,
                parameter_bytes: self.problem.layers[balance.range(here)].iter().map(|l| l.parameter_bytes).sum(),
                memory_bytes: (parts.holds[p].resident + most) as u64,
            }
        });
        Ok(Estimate {
            step_s: simulation.makespan,
            bubble: simulation.bubble,
            partitions: partitions.collect(),
            workers: placement
                .worker_ids()
                .map(|worker| WorkerEstimate {
                    name: placement.name(worker).to_owned(),
                    memory_bytes: parts.by_worker[worker.index()] as u64,
                })
                .collect(),
        })
    }
}

/// The bytes that a micro-batch sends over each edge of the compiled plan.
fn sent_bytes(problem: &Problem, spans: &Spans<'_>, skips: &Edges, candidate: &CandidatePlan) -> Vec<f64> {
    let CandidatePlan { compiled, edge_at, .. } = candidate;
    let mut sent = vec![0.0; compiled.edges().len()];
    let mut add = |from: PartitionId, to: PartitionId, size: &dyn Fn(&Sizes) -> u64| {
        let Some(&(forward, backward)) = edge_at.get(&(from, to)) else { return };
        sent[forward] += size(sizes(problem, (from, to, Pass::Forward))) as f64;
        sent[backward] += size(sizes(problem, (to, from, Pass::Backward))) as f64;
    };
    for (p, &cut) in spans.cuts.iter().enumerate() {
        add(PartitionId::new(p), PartitionId::new(p + 1), &|sizes| sizes.outputs[cut - 1]);
    }
    for (i, &(from, to)) in skips.iter().enumerate().filter(|(_, (from, to))| from != to) {
        add(from, to, &|sizes| sizes.skips[i]);
    }
    sent
}

/// The sizes of tensors on one link, which may have a codec of its own.
fn sizes(problem: &Problem, edge: (PartitionId, PartitionId, Pass)) -> &Sizes {
    let others = match edge.2 {
        Pass::Forward => &problem.sent.forward,
        Pass::Backward => &problem.sent.backward,
    };
    problem.sent.links.get(&edge).unwrap_or(others)
}

/// The peak memory of each worker in bytes.
fn memory(compiled: &CompiledPlan, holds: &[Holds]) -> Vec<f64> {
    let of = |moments: &Vec<Vec<Held>>| {
        let own = moments.iter().take(1).flatten().map(|held| holds[held.partition.index()].resident).sum::<f64>();
        let at = |moment: &Vec<Held>| moment.iter().map(|held| holds[held.partition.index()].at(held)).sum::<f64>();
        own + moments.iter().map(at).fold(0.0, f64::max)
    };
    compiled.moments().iter().map(of).collect()
}
