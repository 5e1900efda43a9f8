//! A plan compiled to a flat list of instructions, for its makespan and memory under many different costs.
//!
//! The search for the best cut evaluates the same plan thousands of times. Its dependencies do not depend on the costs,
//! so the plan is walked once and recorded with indices instead of names; each evaluation is then one pass over a list.
//! It gives the result of [`simulate`](super::simulate()) bit for bit.

use super::action::Message;
use super::check::check;
use super::walk::walk;
use super::{CheckError, Costs, Op, Pass, Plan};
use crate::{PartitionId, WorkerId};
use std::collections::HashMap;

/// A direction between two partitions on different workers.
pub(crate) type Edge = (PartitionId, PartitionId, Pass);

enum Instruction {
    Compute { worker: u32, cost: u32 },
    Send { worker: u32, edge: u32, link: u32, message: u32 },
    Receive { worker: u32, message: u32 },
}

/// What a worker has in memory of one of its partitions at some moment, in micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    pub partition: PartitionId,
    /// Whole graphs of forwards that are not recomputed.
    pub kept: u32,
    /// Inputs without their graph.
    pub inputs: u32,
    /// Whole graphs of recomputations, with their inputs.
    pub recomputed: u32,
}

/// The costs of the actions and messages of a plan.
pub(crate) struct StepCosts {
    /// The forwards of all partitions, then their recomputations, then their backwards.
    pub computes: Vec<f64>,
    /// For each of [`CompiledPlan::edges`], the time for which a message occupies its link.
    pub transfers: Vec<f64>,
    /// The time from the end of a transfer to the arrival of the message.
    pub latency: f64,
}

/// The compiled form of a plan.
pub(crate) struct CompiledPlan {
    instructions: Vec<Instruction>,
    edges: Vec<Edge>,
    workers: usize,
    links: usize,
    messages: usize,
    /// For each worker, the moments at which its memory may peak. Every other moment has no more of anything than one
    /// of these.
    moments: Vec<Vec<Vec<Held>>>,
}

/// Buffers for one evaluation, reused between evaluations.
#[derive(Default)]
pub(crate) struct Clocks {
    workers: Vec<f64>,
    links: Vec<f64>,
    arrivals: Vec<f64>,
}

impl CompiledPlan {
    pub(crate) fn new(plan: &Plan) -> Result<Self, CheckError> {
        check(plan)?;
        let partitions = plan.partitions();
        let mut edges: HashMap<Edge, u32> = HashMap::new();
        let mut links: HashMap<(WorkerId, WorkerId), u32> = HashMap::new();
        let mut messages: HashMap<Message, u32> = HashMap::new();
        let mut instructions = Vec::new();
        let walked = walk(plan, |id, action| {
            let worker = id.0;
            let partition = action.partition.index();
            let compute = |kind: usize| Instruction::Compute { worker, cost: (kind * partitions + partition) as u32 };
            instructions.push(match (action.op, action.message()) {
                (Op::Send { .. }, Some(message)) => {
                    let peer = plan.placement().worker_of(message.to);
                    Instruction::Send {
                        worker,
                        edge: numbered(&mut edges, (message.from, message.to, message.pass)),
                        link: numbered(&mut links, (id, peer)),
                        message: numbered(&mut messages, message),
                    }
                }
                (_, Some(message)) => Instruction::Receive { worker, message: numbered(&mut messages, message) },
                (Op::Recompute, None) => compute(1),
                (Op::Backward, None) => compute(2),
                (_, None) => compute(0),
            });
        });
        walked.expect("a checked plan walks to its end");
        let mut by_number: Vec<(u32, Edge)> = edges.into_iter().map(|(edge, number)| (number, edge)).collect();
        by_number.sort_unstable();
        Ok(CompiledPlan {
            instructions,
            edges: by_number.into_iter().map(|(_, edge)| edge).collect(),
            workers: plan.placement().workers(),
            links: links.len(),
            messages: messages.len(),
            moments: plan.placement().worker_ids().map(|worker| fullest_moments(plan, worker)).collect(),
        })
    }

    /// The edges that carry messages.
    pub(crate) fn edges(&self) -> &[Edge] {
        &self.edges
    }

    /// For each worker, the moments at which its memory may peak.
    pub(crate) fn moments(&self) -> &[Vec<Vec<Held>>] {
        &self.moments
    }

    /// The number of instructions, which is the work of one evaluation.
    pub(crate) fn len(&self) -> usize {
        self.instructions.len()
    }

    /// The time at which the last computation has ended and the last message has arrived.
    pub(crate) fn makespan(&self, costs: &StepCosts, clocks: &mut Clocks) -> f64 {
        let Clocks { workers, links, arrivals } = clocks;
        for (clock, len) in [(&mut *workers, self.workers), (&mut *links, self.links), (&mut *arrivals, self.messages)]
        {
            clock.clear();
            clock.resize(len, 0.0);
        }
        let mut end = 0.0f64;
        for instruction in &self.instructions {
            match *instruction {
                Instruction::Compute { worker, cost } => {
                    let now = &mut workers[worker as usize];
                    *now += costs.computes[cost as usize];
                    end = end.max(*now);
                }
                Instruction::Send { worker, edge, link, message } => {
                    let free = &mut links[link as usize];
                    *free = free.max(workers[worker as usize]) + costs.transfers[edge as usize];
                    let arrival = *free + costs.latency;
                    arrivals[message as usize] = arrival;
                    end = end.max(arrival);
                }
                Instruction::Receive { worker, message } => {
                    let now = &mut workers[worker as usize];
                    *now = now.max(arrivals[message as usize]);
                }
            }
        }
        end
    }

    /// The same costs in the form that [`simulate`](super::simulate()) takes.
    pub(crate) fn costs(&self, costs: &StepCosts) -> Costs {
        let partitions = costs.computes.len() / 3;
        let kind = |kind: usize| costs.computes[kind * partitions..(kind + 1) * partitions].to_vec();
        let mut all = Costs { recompute: kind(1), ..Costs::new(kind(0), kind(2)) };
        for (&edge, &transfer) in self.edges.iter().zip(&costs.transfers) {
            all.links.insert(edge, super::LinkCost { latency: costs.latency, transfer });
        }
        all
    }
}

fn numbered<K: std::hash::Hash + Eq>(numbers: &mut HashMap<K, u32>, key: K) -> u32 {
    let next = numbers.len() as u32;
    *numbers.entry(key).or_insert(next)
}

fn fullest_moments(plan: &Plan, worker: WorkerId) -> Vec<Vec<Held>> {
    let own = plan.placement().partitions_of(worker);
    let mut held: Vec<Held> =
        own.iter().map(|&partition| Held { partition, kept: 0, inputs: 0, recomputed: 0 }).collect();
    let mut fullest: Vec<Vec<Held>> = Vec::new();
    for action in plan.actions(worker) {
        let Some(at) = own.iter().position(|&partition| partition == action.partition) else { continue };
        let again = plan.recomputes(action.partition, action.micro_batch);
        match action.op {
            Op::Forward if !plan.has_backward(action.partition) => {}
            Op::Forward if again => held[at].inputs += 1,
            Op::Forward => held[at].kept += 1,
            Op::Recompute => {
                note_moment(&mut fullest, &held);
                held[at].inputs -= 1;
                held[at].recomputed += 1;
            }
            Op::Backward => {
                note_moment(&mut fullest, &held);
                if again {
                    held[at].recomputed -= 1;
                } else {
                    held[at].kept -= 1;
                }
            }
            Op::Send { .. } | Op::Receive { .. } => {}
        }
    }
    note_moment(&mut fullest, &held);
    fullest
}

/// Adds a moment unless another has at least as much of everything; drops those that have no more than the new one.
fn note_moment(fullest: &mut Vec<Vec<Held>>, moment: &[Held]) {
    let covers = |a: &[Held], b: &[Held]| {
        let more = |(a, b): (&Held, &Held)| {
            // A recomputed graph is in memory with its input, so it counts as at least the input alone.
            a.kept >= b.kept && a.recomputed >= b.recomputed && a.recomputed + a.inputs >= b.recomputed + b.inputs
        };
        a.iter().zip(b).all(more)
    };
    if !fullest.iter().any(|other| covers(other, moment)) {
        fullest.retain(|other| !covers(moment, other));
        fullest.push(moment.to_vec());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{simulate, Recompute, Request, Schedule};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_rehearsal_ends_when_the_simulation_does(
            costs in prop::collection::vec(0.0f64..10.0, 40),
            place in prop::sample::select(vec!["a,b,c,d", "a,b,a", "a,b,a,b", "a", "c,b,a,b,c", "a,a,b"]),
            micro_batches in 1usize..9,
            recompute in prop::sample::select(vec![Recompute::Never, Recompute::ExceptLast, Recompute::Always]),
            schedule in prop::sample::select(Schedule::ALL.to_vec()),
            skip in any::<bool>(),
        ) {
            let mut request = Request::new(place.parse().unwrap(), micro_batches);
            request.recompute = recompute;
            let partitions = request.placement.partitions();
            if skip && partitions > 2 {
                request.skips = vec![(PartitionId(0), PartitionId(2))];
            }
            let plan = schedule.plan(&request).unwrap();
            let compiled = CompiledPlan::new(&plan).unwrap();
            let given = StepCosts {
                computes: costs[..3 * partitions].to_vec(),
                transfers: costs[20..20 + compiled.edges().len()].to_vec(),
                latency: costs[39],
            };
            let simulation = simulate(&plan, &compiled.costs(&given)).unwrap();
            prop_assert_eq!(compiled.makespan(&given, &mut Clocks::default()), simulation.makespan);
            // For workers with one partition, the moments agree with the simulation's counts.
            for (worker, moments) in simulation.workers.iter().zip(compiled.moments()) {
                let live = moments.iter().map(|held| held.iter().map(|h| h.kept + h.recomputed).sum::<u32>());
                prop_assert_eq!(live.max().unwrap() as usize, worker.live_peak);
            }
        }
    }
}
