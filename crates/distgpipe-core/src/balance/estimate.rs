//! What a cut costs: time by rehearsal, memory by what the order of the work has a worker hold.
//!
//! Memory of a worker: for its parameters their values, gradients and optimizer state; and at the fullest moment, for
//! each micro-batch between forward and backward, what its layers hold and what has arrived from other workers. Of a
//! micro-batch that will be computed again only the input is held, until it is.

use super::{balance_of, BalanceError, Edges, Rehearsed, Score, Search, Sizes};
use super::{Balance, Objective, Pass, StepCosts};
use crate::schedule::rehearse::{Held, Rehearsal};
use crate::schedule::simulate;
use crate::PartitionId;

/// What a partition costs for one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PartitionEstimate {
    /// Forward pass.
    pub forward_s: f64,
    /// Backward pass.
    pub backward_s: f64,
    /// What it sends to later partitions on other workers.
    pub forward_bytes: u64,
    /// What it sends to earlier partitions on other workers.
    pub backward_bytes: u64,
    /// Its learned tensors.
    pub parameter_bytes: u64,
    /// Its part of its worker's memory, at its own fullest moment.
    pub memory_bytes: u64,
}

/// What a worker holds at its fullest moment.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerEstimate {
    /// Its name.
    pub name: String,
    /// All its partitions together.
    pub memory_bytes: u64,
}

/// What a cut costs.
#[derive(Clone, Debug, PartialEq)]
pub struct Estimate {
    /// A step, simulated.
    pub step_s: f64,
    /// The part of all workers' time in which nothing is computed.
    pub bubble: f64,
    /// From the input on.
    pub partitions: Vec<PartitionEstimate>,
    /// By worker number.
    pub workers: Vec<WorkerEstimate>,
}

impl Estimate {
    /// The fullest worker's memory.
    pub fn memory_bytes(&self) -> u64 {
        self.workers.iter().map(|worker| worker.memory_bytes).max().unwrap_or(0)
    }
}

/// Bytes of a partition's part in its worker's memory.
struct Holds {
    /// Parameters, gradients, optimizer state.
    resident: f64,
    /// A micro-batch's graph.
    graph: f64,
    /// What arrives from other workers. What comes from a partition of the same worker is in that one's graph already.
    arrives: f64,
    /// All input, as recomputation keeps it.
    input: f64,
}

impl Holds {
    fn at(&self, held: &Held) -> f64 {
        let (kept, inputs, recomputed) = (f64::from(held.kept), f64::from(held.inputs), f64::from(held.recomputed));
        kept * (self.graph + self.arrives) + inputs * self.input + recomputed * (self.graph + self.input)
    }
}

/// A cut, taken apart.
pub(super) struct Parts {
    pub score: Score,
    edges: Edges,
    costs: StepCosts,
    sent: Vec<f64>,
    holds: Vec<Holds>,
    by_worker: Vec<f64>,
}

impl Search<'_> {
    pub(super) fn parts(&mut self, cuts: &[usize]) -> Result<Parts, BalanceError> {
        let problem = self.problem;
        let (layers, partitions) = (self.layers(), self.partitions());
        let partition_of = |layer: usize| PartitionId::new(cuts.partition_point(|&cut| cut <= layer));
        let span = |p: usize| {
            let start = if p == 0 { 0 } else { cuts[p - 1] };
            (start, cuts.get(p).copied().unwrap_or(layers))
        };
        let skips: Vec<(PartitionId, PartitionId)> =
            problem.skips.iter().map(|skip| (partition_of(skip.stash), partition_of(skip.pop))).collect();
        let mut edges: Edges = skips.iter().copied().filter(|(from, to)| to.0 > from.0 + 1).collect();
        edges.sort_unstable();
        edges.dedup();
        self.plan(&edges)?;
        let Rehearsed { rehearsal, edge_at, .. } = &self.plans[&edges];

        let sum = |sums: &[f64], p: usize| sums[span(p).1] - sums[span(p).0];
        let mut computes = Vec::with_capacity(3 * partitions);
        for sums in [&self.forward, &self.forward, &self.backward] {
            computes.extend((0..partitions).map(|p| sum(sums, p).max(0.0)));
        }
        let mut sent = vec![0.0; rehearsal.edges().len()];
        let mut add = |from: PartitionId, to: PartitionId, size: &dyn Fn(&Sizes) -> u64| {
            let Some(&(forward, backward)) = edge_at.get(&(from, to)) else { return };
            sent[forward] += size(sizes(problem, (from, to, Pass::Forward))) as f64;
            sent[backward] += size(sizes(problem, (to, from, Pass::Backward))) as f64;
        };
        for (p, &cut) in cuts.iter().enumerate() {
            add(PartitionId::new(p), PartitionId::new(p + 1), &|sizes| sizes.outputs[cut - 1]);
        }
        for (i, &(from, to)) in skips.iter().enumerate().filter(|(_, (from, to))| from != to) {
            add(from, to, &|sizes| sizes.skips[i]);
        }
        let transfers = match problem.link {
            Some(link) => sent.iter().map(|bytes| bytes / link.bytes_per_s).collect(),
            None => vec![0.0; sent.len()],
        };
        let costs = StepCosts { computes, transfers, latency: problem.link.map_or(0.0, |link| link.latency_s) };
        let makespan = rehearsal.makespan(&costs, &mut self.clocks);

        let holds = (0..partitions).map(|p| {
            let here = PartitionId::new(p);
            let mut holds = Holds {
                resident: sum(&self.parameters, p) * (2.0 + problem.state_factor),
                graph: sum(&self.held, p),
                arrives: 0.0,
                input: 0.0,
            };
            let mut takes = |from: Option<PartitionId>, bytes: u64| {
                let foreign =
                    from.is_none_or(|from| problem.placement.worker_of(from) != problem.placement.worker_of(here));
                holds.arrives += if foreign { bytes as f64 } else { 0.0 };
                holds.input += bytes as f64;
            };
            match span(p).0.checked_sub(1) {
                Some(before) => takes(Some(PartitionId::new(p - 1)), problem.in_memory.outputs[before]),
                None => takes(None, problem.input_bytes),
            }
            for (&(from, to), &bytes) in skips.iter().zip(&problem.in_memory.skips) {
                if to == here && from != here {
                    takes(Some(from), bytes);
                }
            }
            holds
        });
        let holds: Vec<Holds> = holds.collect();
        let by_worker = memory(rehearsal, &holds);
        let memory = by_worker.iter().copied().fold(0.0, f64::max);
        let over_bytes = problem.memory_limit_bytes.map_or(0.0, |limit| (memory - limit as f64).max(0.0));
        let (objective, other) = match problem.objective {
            Objective::Time => (makespan, memory),
            Objective::Memory => (memory, makespan),
        };
        Ok(Parts { score: Score { over_bytes, objective, other }, edges, costs, sent, holds, by_worker })
    }

    pub(super) fn estimate(&mut self, balance: &Balance) -> Result<Estimate, BalanceError> {
        let parts = self.parts(&super::cuts_of(balance))?;
        debug_assert_eq!(balance_of(&super::cuts_of(balance), self.layers()).as_ref(), Ok(balance));
        let Rehearsed { plan, rehearsal, .. } = &self.plans[&parts.edges];
        let simulation = simulate(plan, &rehearsal.costs(&parts.costs))?;
        let placement = &self.problem.placement;
        let partitions = placement.partition_ids().map(|here| {
            let p = here.index();
            let bytes = |pass: Pass| {
                let mine = rehearsal.edges().iter().zip(&parts.sent);
                mine.filter(|((from, _, of), _)| (*from, *of) == (here, pass)).map(|(_, bytes)| bytes).sum::<f64>()
            };
            let moments = &rehearsal.moments()[placement.worker_of(here).index()];
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

fn sizes(problem: &super::Problem, edge: (PartitionId, PartitionId, Pass)) -> &Sizes {
    let others = match edge.2 {
        Pass::Forward => &problem.sent.forward,
        Pass::Backward => &problem.sent.backward,
    };
    problem.sent.links.get(&edge).unwrap_or(others)
}

/// What each worker holds at its fullest moment.
fn memory(rehearsal: &Rehearsal, holds: &[Holds]) -> Vec<f64> {
    let of = |moments: &Vec<Vec<Held>>| {
        let own = moments.iter().take(1).flatten().map(|held| holds[held.partition.index()].resident).sum::<f64>();
        let at = |moment: &Vec<Held>| moment.iter().map(|held| holds[held.partition.index()].at(held)).sum::<f64>();
        own + moments.iter().map(at).fold(0.0, f64::max)
    };
    rehearsal.moments().iter().map(of).collect()
}
