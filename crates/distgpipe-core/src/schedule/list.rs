//! A list scheduler: simulates the pipeline with actions of equal length, and records the order in which they run.
//!
//! At every tick each worker takes, among the actions whose inputs are ready, the one with the best rank. Every action
//! was possible at that time, so the recorded orders cannot deadlock, for any placement. Micro-batches stay in order
//! within a partition and pass.
//!
//! The scheduler always makes progress: nothing holds up the oldest unfinished micro-batch, because the limit on
//! micro-batches in flight counts only older ones.

use super::{Action, Op, OrderInput};
use crate::{MicroBatchId, PartitionId};

/// The parameters of the list scheduler, in which schedules differ.
pub(super) struct Policy<'a, Rank: Ord> {
    /// The largest number of micro-batches of a partition between forward and backward; at least 1.
    pub in_flight_max: &'a dyn Fn(PartitionId) -> usize,
    /// The priority of an action; the smallest goes first.
    pub rank: &'a dyn Fn(&Action) -> Rank,
    /// The number of ticks that a message between two workers takes.
    pub message_ticks: usize,
}

/// The orders of all workers; see [`super::Order`].
pub(super) fn order<Rank: Ord>(input: &OrderInput<'_>, policy: &Policy<'_, Rank>) -> Vec<Vec<Action>> {
    let held: Vec<Vec<PartitionId>> =
        input.placement.worker_ids().map(|worker| input.placement.partitions_of(worker)).collect();
    let mut orders = vec![Vec::new(); held.len()];
    let mut progress = Progress::new(input, policy.message_ticks);
    let mut left = 2 * input.placement.partitions() * input.micro_batches;
    let mut last_progress = 0;
    for now in 0.. {
        if left == 0 {
            break;
        }
        let taken: Vec<Option<Action>> = held
            .iter()
            .map(|own| {
                let ready =
                    own.iter().flat_map(|&partition| progress.ready(now, partition, (policy.in_flight_max)(partition)));
                ready.min_by_key(|action| (policy.rank)(action))
            })
            .collect();
        // Applied after all workers have chosen: results of this tick are available in the next.
        for (order, action) in orders.iter_mut().zip(taken) {
            let Some(action) = action else { continue };
            progress.finish(now + 1, action);
            order.push(action);
            left -= 1;
            last_progress = now;
        }
        assert!(now <= last_progress + policy.message_ticks, "the oldest micro-batch is never held up");
    }
    orders
}

/// The simulation so far: the tick at which each partition finished each of its micro-batches.
struct Progress<'a> {
    input: &'a OrderInput<'a>,
    message_ticks: usize,
    forwards: Vec<Vec<usize>>,
    backwards: Vec<Vec<usize>>,
}

impl<'a> Progress<'a> {
    fn new(input: &'a OrderInput<'a>, message_ticks: usize) -> Self {
        let none = || vec![Vec::with_capacity(input.micro_batches); input.placement.partitions()];
        Self { input, message_ticks, forwards: none(), backwards: none() }
    }

    /// The next forward and the next backward of a partition, if their inputs are ready.
    fn ready(&self, now: usize, partition: PartitionId, in_flight_max: usize) -> impl Iterator<Item = Action> {
        let here = partition.index();
        let (forward, backward) = (self.forwards[here].len(), self.backwards[here].len());
        let forward_ready = forward < self.input.micro_batches
            && forward - backward < in_flight_max
            && (here == 0 || self.arrived(now, &self.forwards, here - 1, partition, forward));
        let backward_ready = backward < forward
            && (here + 1 == self.backwards.len() || self.arrived(now, &self.backwards, here + 1, partition, backward));
        let forward = forward_ready.then(|| Action::forward(partition, MicroBatchId::new(forward)));
        let backward = backward_ready.then(|| Action::backward(partition, MicroBatchId::new(backward)));
        forward.into_iter().chain(backward)
    }

    /// Whether the result of partition `from` for a micro-batch has arrived at partition `to`.
    fn arrived(&self, now: usize, pass: &[Vec<usize>], from: usize, to: PartitionId, micro_batch: usize) -> bool {
        let placement = self.input.placement;
        let local = placement.worker_of(PartitionId::new(from)) == placement.worker_of(to);
        let ticks = if local { 0 } else { self.message_ticks };
        pass[from].get(micro_batch).is_some_and(|&finished| finished + ticks <= now)
    }

    fn finish(&mut self, at: usize, action: Action) {
        let pass = match action.op {
            Op::Backward => &mut self.backwards,
            _ => &mut self.forwards,
        };
        pass[action.partition.index()].push(at);
    }
}
