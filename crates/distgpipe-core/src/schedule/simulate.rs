//! Simulates a plan with given costs: makespan, bubbles, and the peak of live activations.
//!
//! The model: a worker executes one action at a time, in order. A send costs it nothing; a receive waits for the
//! message. Each direction of a link between two workers carries one message at a time, and communication overlaps with
//! computation:
//!
//! ```text
//! sender     [ 0F0 ][ 0F1 ]
//! link              [ transfer ][ transfer ]              transfers are serial
//!                               ~latency~   ~latency~     latencies overlap
//! receiver                                [ 1F0 ]
//! ```

use super::action::Message;
use super::check::check;
use super::walk::walk;
use super::{Action, CheckError, Op, Pass, Plan};
use crate::{PartitionId, WorkerId};
use std::collections::{BTreeMap, HashMap};

/// The cost of one message.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LinkCost {
    /// The time from the end of the transfer to the arrival. The latencies of several messages overlap.
    pub latency: f64,
    /// The time for which the message occupies its direction of the link.
    pub transfer: f64,
}

/// The costs of computations and messages, all in the same unit of time.
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    /// The forward of one micro-batch, for each partition.
    pub forward: Vec<f64>,
    /// The backward of one micro-batch, for each partition.
    pub backward: Vec<f64>,
    /// The recomputation of one micro-batch, for each partition.
    pub recompute: Vec<f64>,
    /// Messages, by sending partition, receiving partition and pass.
    pub links: BTreeMap<(PartitionId, PartitionId, Pass), LinkCost>,
    /// Every message that is not in `links`.
    pub other_links: LinkCost,
}

impl Costs {
    /// Costs of 1 for every forward, recomputation and backward, and of 0 for messages.
    pub fn equal(partitions: usize) -> Self {
        Self::new(vec![1.0; partitions], vec![1.0; partitions])
    }

    /// These costs, the forward's for recomputation, and 0 for messages.
    pub fn new(forward: Vec<f64>, backward: Vec<f64>) -> Self {
        Self { recompute: forward.clone(), forward, backward, links: BTreeMap::new(), other_links: LinkCost::default() }
    }

    fn check(&self, partitions: usize) -> Result<(), CheckError> {
        let wrong = |expected: String, got: String| Err(CheckError::Costs { expected, got });
        for (what, costs) in [("forward", &self.forward), ("backward", &self.backward), ("recompute", &self.recompute)]
        {
            if costs.len() != partitions {
                return wrong(format!("a {what} cost for each of {partitions} partitions"), costs.len().to_string());
            }
        }
        let links = self.links.values().chain([&self.other_links]).flat_map(|link| [link.latency, link.transfer]);
        let computes = [&self.forward, &self.backward, &self.recompute].into_iter().flatten().copied();
        match computes.chain(links).find(|cost| !(cost.is_finite() && *cost >= 0.0)) {
            Some(bad) => wrong("finite costs of at least 0".to_string(), bad.to_string()),
            None => Ok(()),
        }
    }

    fn compute(&self, action: Action) -> f64 {
        let partition = action.partition.index();
        match action.op {
            Op::Forward => self.forward[partition],
            Op::Recompute => self.recompute[partition],
            Op::Backward => self.backward[partition],
            Op::Send { .. } | Op::Receive { .. } => 0.0,
        }
    }

    fn link(&self, message: Message) -> LinkCost {
        *self.links.get(&(message.from, message.to, message.pass)).unwrap_or(&self.other_links)
    }
}

/// A computation, or a message in flight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Event {
    /// The worker that computes or sends.
    pub worker: WorkerId,
    /// The computation, or the send of the message.
    pub action: Action,
    /// The start of the computation, or of the transfer.
    pub start: f64,
    /// The end of the computation, or the arrival of the message.
    pub end: f64,
}

/// How one worker spends the step.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerUse {
    /// The name of the worker.
    pub name: String,
    /// The worker's partitions, from the input on.
    pub partitions: Vec<PartitionId>,
    /// The time spent computing.
    pub busy: f64,
    /// The fraction of the makespan in which the worker is idle.
    pub bubble: f64,
    /// The largest number of (partition, micro-batch) pairs whose whole graph is in memory at once: from the forward,
    /// or from the recomputation if there is one, to the end of the backward.
    pub live_peak: usize,
    /// The largest number of (partition, micro-batch) pairs of which only the input is in memory at once: from the
    /// forward to the recomputation.
    pub saved_inputs_peak: usize,
}

/// The result of a simulation.
#[derive(Clone, Debug, PartialEq)]
pub struct Simulation {
    /// The time from the start to the end of the last event.
    pub makespan: f64,
    /// The fraction of all workers' time in which they are idle: 1 − Σ busy / (workers × makespan); 0 if nothing takes
    /// time.
    pub bubble: f64,
    /// The workers, by number.
    pub workers: Vec<WorkerUse>,
    /// Every computation and message, ordered by start and then by worker.
    pub events: Vec<Event>,
}

/// Simulates a plan. Returns an error if the plan is not sound or the costs do not fit it.
pub fn simulate(plan: &Plan, costs: &Costs) -> Result<Simulation, CheckError> {
    check(plan)?;
    costs.check(plan.partitions())?;
    let placement = plan.placement();
    let mut clock = vec![0.0f64; placement.workers()];
    let mut busy = vec![0.0f64; placement.workers()];
    let mut link_free: HashMap<(WorkerId, WorkerId), f64> = HashMap::new();
    let mut arrival: HashMap<Message, f64> = HashMap::new();
    let mut events = Vec::new();
    // The walk visits the messages of a sender in order, so the queue of a link needs no sorting.
    let walked = walk(plan, |worker, action| {
        let now = &mut clock[worker.index()];
        let (start, end) = match (action.op, action.message()) {
            (Op::Send { .. }, Some(message)) => {
                let cost = costs.link(message);
                let free = link_free.entry((worker, placement.worker_of(message.to))).or_insert(0.0);
                let start = free.max(*now);
                *free = start + cost.transfer;
                arrival.insert(message, *free + cost.latency);
                (start, *free + cost.latency)
            }
            (_, Some(message)) => {
                *now = now.max(arrival[&message]);
                return;
            }
            (_, None) => {
                let cost = costs.compute(action);
                let start = *now;
                *now += cost;
                busy[worker.index()] += cost;
                (start, *now)
            }
        };
        events.push(Event { worker, action, start, end });
    });
    walked.expect("a checked plan walks to its end");
    // The sort is stable: events of one worker with the same start stay in order.
    events.sort_by(|a, b| a.start.total_cmp(&b.start).then(a.worker.cmp(&b.worker)));

    let makespan = events.iter().map(|event| event.end).fold(0.0, f64::max);
    let idle = |busy: f64, workers: usize| {
        if makespan > 0.0 {
            1.0 - busy / (workers as f64 * makespan)
        } else {
            0.0
        }
    };
    let workers = placement.worker_ids().map(|worker| {
        let (live_peak, saved_inputs_peak) = peaks(plan, worker);
        let busy = busy[worker.index()];
        WorkerUse {
            name: placement.name(worker).to_string(),
            partitions: placement.partitions_of(worker),
            busy,
            bubble: idle(busy, 1),
            live_peak,
            saved_inputs_peak,
        }
    });
    let workers: Vec<WorkerUse> = workers.collect();
    let bubble = idle(workers.iter().map(|worker| worker.busy).sum(), workers.len());
    Ok(Simulation { makespan, bubble, workers, events })
}

/// The peaks of whole graphs and of saved inputs in a worker's memory. They depend on its order alone, not on times.
fn peaks(plan: &Plan, worker: WorkerId) -> (usize, usize) {
    let (mut live, mut inputs) = (0usize, 0usize);
    let (mut live_peak, mut inputs_peak) = (0, 0);
    for action in plan.actions(worker) {
        match action.op {
            Op::Forward if !plan.has_backward(action.partition) => {}
            Op::Forward if plan.recomputes(action.partition, action.micro_batch) => inputs += 1,
            Op::Forward => live += 1,
            Op::Recompute => {
                inputs -= 1;
                live += 1;
            }
            Op::Backward => live -= 1,
            Op::Send { .. } | Op::Receive { .. } => {}
        }
        live_peak = live_peak.max(live);
        inputs_peak = inputs_peak.max(inputs);
    }
    (live_peak, inputs_peak)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::Placement;
    use crate::schedule::{evaluate_plan, Recompute, Request, Schedule};

    fn plan(schedule: Schedule, placement: Placement, micro_batches: usize) -> Plan {
        schedule.plan(&Request::new(placement, micro_batches)).unwrap()
    }

    #[test]
    fn gpipe_has_the_bubble_of_the_paper() {
        for partitions in 1..9 {
            for micro_batches in 1..33 {
                let plan = plan(Schedule::GPipe, Placement::one_worker_each(partitions), micro_batches);
                let simulation = simulate(&plan, &Costs::equal(partitions)).unwrap();
                let (n, m) = (partitions as f64, micro_batches as f64);
                assert!((simulation.bubble - (n - 1.0) / (m + n - 1.0)).abs() < 1e-12, "{n} {m}");
                assert_eq!(simulation.makespan, 2.0 * (m + n - 1.0));
                assert!(simulation.workers.iter().all(|worker| worker.live_peak == micro_batches));
            }
        }
    }

    #[test]
    fn one_f_one_b_has_gpipes_bubble_and_fewer_live_activations() {
        for partitions in 1..9 {
            for micro_batches in 1..33 {
                let plan = plan(Schedule::OneFOneB, Placement::one_worker_each(partitions), micro_batches);
                let simulation = simulate(&plan, &Costs::equal(partitions)).unwrap();
                assert_eq!(simulation.makespan, 2.0 * (micro_batches + partitions - 1) as f64);
                for (partition, worker) in simulation.workers.iter().enumerate() {
                    assert_eq!(worker.live_peak, micro_batches.min(partitions - partition));
                }
            }
        }
    }

    #[test]
    fn interleaving_makes_the_bubble_smaller() {
        for workers in 2..6 {
            for chunks in 2..4 {
                for rounds in 1..5 {
                    let micro_batches = rounds * workers;
                    let round_robin: Vec<_> = (0..workers * chunks).map(|partition| partition % workers).collect();
                    let placement = Placement::from_workers(&round_robin).unwrap();
                    let interleaved = plan(Schedule::Interleaved, placement, micro_batches);
                    let interleaved = simulate(&interleaved, &Costs::equal(workers * chunks)).unwrap();
                    // The same model in as many partitions as workers: each takes as long as `chunks` of the others.
                    let plain = plan(Schedule::OneFOneB, Placement::one_worker_each(workers), micro_batches);
                    let costs = vec![chunks as f64; workers];
                    let plain = simulate(&plain, &Costs::new(costs.clone(), costs)).unwrap();
                    assert!(interleaved.bubble < plain.bubble, "{workers} {chunks} {micro_batches}");
                    // Bubble time is (W − 1)(forward + backward) / v.
                    let expected = 2.0 * (chunks * micro_batches + workers - 1) as f64;
                    assert_eq!(interleaved.makespan, expected, "{workers} {chunks} {micro_batches}");
                }
            }
        }
    }

    #[test]
    fn a_link_carries_one_message_at_a_time_while_workers_compute() {
        let request = Request::new(Placement::one_worker_each(2), 3);
        let plan = evaluate_plan(&request).unwrap();
        let mut costs = Costs::equal(2);
        costs.links.insert((PartitionId(0), PartitionId(1), Pass::Forward), LinkCost { latency: 10.0, transfer: 2.0 });
        let simulation = simulate(&plan, &costs).unwrap();
        let messages: Vec<_> = simulation
            .events
            .iter()
            .filter(|event| !event.action.is_compute())
            .map(|event| (event.start, event.end))
            .collect();
        assert_eq!(messages, [(1.0, 13.0), (3.0, 15.0), (5.0, 17.0)]);
        assert_eq!(simulation.makespan, 18.0);
        assert_eq!(simulation.workers[1].busy, 3.0);
        assert_eq!(simulation.workers[1].live_peak, 0);
    }

    #[test]
    fn recomputation_trades_live_graphs_for_inputs() {
        let request = |recompute| Request { recompute, ..Request::new(Placement::one_worker_each(2), 4) };
        let peak = |recompute| {
            let plan = Schedule::GPipe.plan(&request(recompute)).unwrap();
            let worker = simulate(&plan, &Costs::equal(2)).unwrap().workers[0].clone();
            (worker.live_peak, worker.saved_inputs_peak, worker.busy)
        };
        assert_eq!(peak(Recompute::Never), (4, 0, 8.0));
        assert_eq!(peak(Recompute::ExceptLast), (1, 3, 11.0));
        assert_eq!(peak(Recompute::Always), (1, 4, 12.0));
    }

    #[test]
    fn frozen_partitions_keep_no_activations_and_only_run_forward() {
        for schedule in Schedule::ALL {
            let request =
                Request { frozen: 2, recompute: Recompute::Always, ..Request::new(Placement::one_worker_each(3), 4) };
            let simulation = simulate(&schedule.plan(&request).unwrap(), &Costs::equal(3)).unwrap();
            let use_of = |worker: &WorkerUse| (worker.busy, worker.live_peak, worker.saved_inputs_peak);
            assert_eq!(simulation.workers.iter().map(use_of).take(2).collect::<Vec<_>>(), [(4.0, 0, 0); 2]);
            assert_eq!(simulation.workers[2].busy, 12.0);
            assert!(simulation
                .events
                .iter()
                .all(|event| event.action.op != Op::Backward || event.worker == WorkerId(2)));
        }
    }

    #[test]
    fn bad_costs_and_plans_are_refused() {
        let plan = plan(Schedule::GPipe, Placement::one_worker_each(2), 1);
        assert!(matches!(simulate(&plan, &Costs::equal(3)), Err(CheckError::Costs { .. })));
        for bad in [f64::NAN, f64::INFINITY, -1.0] {
            let mut costs = Costs::equal(2);
            costs.other_links.latency = bad;
            assert!(matches!(simulate(&plan, &costs), Err(CheckError::Costs { .. })));
            assert!(simulate(&plan, &Costs::new(vec![1.0, bad], vec![1.0; 2])).is_err());
        }
        let free = simulate(&plan, &Costs::new(vec![0.0; 2], vec![0.0; 2])).unwrap();
        assert_eq!((free.makespan, free.bubble), (0.0, 0.0));
        let broken: Plan = plan.to_string().replace("0F0>1", "").parse().unwrap();
        assert!(matches!(simulate(&broken, &Costs::equal(2)), Err(CheckError::MissingSend { .. })));
    }
}
