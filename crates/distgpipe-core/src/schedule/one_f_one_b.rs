//! 1F1B: a backward as soon as one is ready (PipeDream-Flush, Narayanan et al., arXiv:1806.03377).
//!
//! The bubble is that of GPipe, but partition p of n never has more than n − p micro-batches between forward and
//! backward, however many there are:
//!
//! ```text
//! partition 0:  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
//! partition 1:  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
//! partition 2:  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
//! ```
//!
//! With several partitions on a worker the order follows the simulated time, so that no worker waits for a message
//! while it could compute. The simulation assumes that messages take [`MESSAGE_TICKS`]: in an order made for free
//! links, a worker needs each result the moment it is computed, and on a real link it then waits for every micro-batch.
//! (`client,server,client`, 12 micro-batches, equal costs and a latency of one forward: makespan 53 instead of 62, with
//! 48 units of work on the client. On free links the assumption costs nothing.)

use super::list::{self, Policy};
use super::{Action, Op, OrderInput};
use crate::PartitionId;
use std::cmp::Reverse;

/// The assumed duration of a message, in units of one forward, where workers have several partitions.
pub(super) const MESSAGE_TICKS: usize = 2;

/// The orders of all workers; see [`super::Order`].
pub(super) fn order(input: &OrderInput<'_>) -> Vec<Vec<Action>> {
    let placement = input.placement;
    let partitions = placement.partitions();
    let waited_for = |from: PartitionId, to: Option<PartitionId>| {
        to.is_some_and(|to| to.index() < partitions && placement.worker_of(from) != placement.worker_of(to))
    };
    // Backwards go before forwards, because they free memory. Among forwards, those whose result another worker waits
    // for go first, the nearest to the input before others, because it needs no message itself; then the oldest
    // micro-batch.
    let rank = |action: &Action| {
        let here = action.partition;
        match action.op {
            Op::Backward => {
                let feeds = waited_for(here, here.0.checked_sub(1).map(PartitionId));
                (0, !feeds, action.micro_batch.0, Reverse(here.0))
            }
            _ => {
                let feeds = waited_for(here, Some(PartitionId(here.0 + 1)));
                (1, !feeds, if feeds { here.0 } else { action.micro_batch.0 }, Reverse(here.0))
            }
        }
    };
    let in_flight_max = |partition: PartitionId| partitions - partition.index();
    // With one partition per worker there is nothing to reorder: the limits in flight alone give the textbook order.
    let message_ticks = if placement.workers() == partitions { 0 } else { MESSAGE_TICKS };
    list::order(input, &Policy { in_flight_max: &in_flight_max, rank: &rank, message_ticks })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::Placement;
    use crate::schedule::{simulate, Costs, Request, Schedule};
    use crate::MicroBatchId;

    /// The textbook order: n − p − 1 forwards, then one forward and one backward in turns.
    fn textbook(partitions: usize, micro_batches: usize) -> Vec<Vec<Action>> {
        let line = |index: usize| {
            let partition = PartitionId::new(index);
            let warm_up = (partitions - index - 1).min(micro_batches);
            let forward = |i| Action::forward(partition, MicroBatchId::new(i));
            let backward = |i| Action::backward(partition, MicroBatchId::new(i));
            let mut order: Vec<_> = (0..warm_up).map(forward).collect();
            for i in warm_up..micro_batches {
                order.extend([forward(i), backward(i - warm_up)]);
            }
            order.extend((micro_batches - warm_up..micro_batches).map(backward));
            order
        };
        (0..partitions).map(line).collect()
    }

    #[test]
    fn one_partition_per_worker_gives_the_textbook_order() {
        for partitions in 1..8 {
            for micro_batches in 1..20 {
                let placement = Placement::one_worker_each(partitions);
                let orders = order(&OrderInput { placement: &placement, micro_batches });
                assert_eq!(orders, textbook(partitions, micro_batches), "{partitions} × {micro_batches}");
            }
        }
    }

    #[test]
    fn a_client_with_both_ends_is_never_idle_on_a_free_link_and_seldom_on_a_slow_one() {
        // Regression: when messages were assumed to be free, the client needed each result as soon as it was computed,
        // and the makespan below was 62.
        let micro_batches = 12;
        let request = Request::new("client,server,client".parse().unwrap(), micro_batches);
        let plan = Schedule::OneFOneB.plan(&request).unwrap();
        let mut costs = Costs::equal(3);
        assert_eq!(simulate(&plan, &costs).unwrap().workers[0].bubble, 0.0);
        costs.other_links.latency = 1.0;
        assert_eq!(simulate(&plan, &costs).unwrap().makespan, 53.0);
    }
}
