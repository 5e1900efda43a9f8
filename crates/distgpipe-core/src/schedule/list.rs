//! A list scheduler: runs the pipeline on paper with steps of equal length and notes who did what.
//!
//! At every tick each worker takes, of the actions whose inputs are there, the one with the best
//! rank. Whatever it takes was possible at that time, so the orders it notes cannot deadlock, for any
//! placement. Micro-batches stay in order within a partition and pass.
//!
//! It never gets stuck either: the oldest unfinished micro-batch is held up by nothing, because a
//! partition's limit only counts older ones.

use super::{Action, Op, Shape};
use crate::{MicroBatchId, PartitionId};

/// What distinguishes the schedules that are made this way.
pub(super) struct Policy<'a, Rank: Ord> {
    /// How many micro-batches of a partition may be between forward and backward; at least 1.
    pub in_flight_max: &'a dyn Fn(PartitionId) -> usize,
    /// The smallest rank goes first.
    pub rank: &'a dyn Fn(&Action) -> Rank,
    /// How many ticks a message between two workers takes.
    pub message_ticks: usize,
}

/// See [`super::Order`].
pub(super) fn order<Rank: Ord>(shape: &Shape<'_>, policy: &Policy<'_, Rank>) -> Vec<Vec<Action>> {
    let held: Vec<Vec<PartitionId>> =
        shape.placement.worker_ids().map(|worker| shape.placement.partitions_of(worker)).collect();
    let mut orders = vec![Vec::new(); held.len()];
    let mut paper = Paper::new(shape, policy.message_ticks);
    let mut left = 2 * shape.placement.partitions() * shape.micro_batches;
    let mut last_progress = 0;
    for now in 0.. {
        if left == 0 {
            break;
        }
        let taken: Vec<Option<Action>> = held
            .iter()
            .map(|own| {
                let ready =
                    own.iter().flat_map(|&partition| paper.ready(now, partition, (policy.in_flight_max)(partition)));
                ready.min_by_key(|action| (policy.rank)(action))
            })
            .collect();
        // Applied after all have chosen: what is computed in this tick is there in the next.
        for (order, action) in orders.iter_mut().zip(taken) {
            let Some(action) = action else { continue };
            paper.finish(now + 1, action);
            order.push(action);
            left -= 1;
            last_progress = now;
        }
        assert!(now <= last_progress + policy.message_ticks, "the oldest micro-batch is never held up");
    }
    orders
}

/// When each partition finished its micro-batches so far; by partition, then micro-batch.
struct Paper<'a> {
    shape: &'a Shape<'a>,
    message_ticks: usize,
    forwards: Vec<Vec<usize>>,
    backwards: Vec<Vec<usize>>,
}

impl<'a> Paper<'a> {
    fn new(shape: &'a Shape<'a>, message_ticks: usize) -> Self {
        let none = || vec![Vec::with_capacity(shape.micro_batches); shape.placement.partitions()];
        Self { shape, message_ticks, forwards: none(), backwards: none() }
    }

    /// The next forward and the next backward of a partition, where their inputs are there.
    fn ready(&self, now: usize, partition: PartitionId, in_flight_max: usize) -> impl Iterator<Item = Action> {
        let here = partition.index();
        let (forward, backward) = (self.forwards[here].len(), self.backwards[here].len());
        let forward_ready = forward < self.shape.micro_batches
            && forward - backward < in_flight_max
            && (here == 0 || self.arrived(now, &self.forwards, here - 1, partition, forward));
        let backward_ready = backward < forward
            && (here + 1 == self.backwards.len() || self.arrived(now, &self.backwards, here + 1, partition, backward));
        let forward = forward_ready.then(|| Action::forward(partition, MicroBatchId::new(forward)));
        let backward = backward_ready.then(|| Action::backward(partition, MicroBatchId::new(backward)));
        forward.into_iter().chain(backward)
    }

    /// Whether what partition `from` computes for a micro-batch has reached partition `to`.
    fn arrived(&self, now: usize, pass: &[Vec<usize>], from: usize, to: PartitionId, micro_batch: usize) -> bool {
        let placement = self.shape.placement;
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
