//! Interleaved 1F1B: several partitions per worker (Narayanan et al., arXiv:2104.04473, section 2.2).
//!
//! With v partitions on each of W workers the bubble is v times smaller than that of 1F1B, at the price of v times as
//! many messages. Micro-batches go in groups of W: a worker runs its first partition for the whole group, then its
//! second, and so on.
//!
//! For a round-robin placement (partition p on worker p mod W, v > 1) and a number of micro-batches divisible by W this
//! is the order of Megatron-LM. For any other placement the list scheduler is used with the same preference for groups,
//! which cannot deadlock.

use super::list::{self, Policy};
use super::{one_f_one_b, Action, Op, OrderInput};
use crate::{MicroBatchId, PartitionId};

/// The orders of all workers; see [`super::Order`].
pub(super) fn order(input: &OrderInput<'_>) -> Vec<Vec<Action>> {
    let placement = input.placement;
    if placement.workers() == placement.partitions() {
        return one_f_one_b::order(input);
    }
    let workers = placement.workers();
    let round_robin = placement.partitions().is_multiple_of(workers)
        && placement
            .partition_ids()
            .all(|partition| placement.worker_of(partition).index() == partition.index() % workers);
    if round_robin && input.micro_batches.is_multiple_of(workers) {
        (0..workers).map(|rank| megatron(input, rank)).collect()
    } else {
        grouped(input)
    }
}

/// The order of one worker in Megatron-LM's `forward_backward_pipelining_with_interleaving`.
fn megatron(input: &OrderInput<'_>, rank: usize) -> Vec<Action> {
    let workers = input.placement.workers();
    let chunks = input.placement.partitions() / workers;
    let total = input.micro_batches * chunks;
    // The partition and the micro-batch of the worker's k-th forward or backward.
    let chunk = |k: usize| k / workers % chunks;
    let micro_batch = |k: usize| MicroBatchId::new(k / (workers * chunks) * workers + k % workers);
    let partition = |chunk: usize| PartitionId::new(chunk * workers + rank);
    let forward = |k: usize| Action::forward(partition(chunk(k)), micro_batch(k));
    let backward = |k: usize| Action::backward(partition(chunks - 1 - chunk(k)), micro_batch(k));

    let warm_up = total.min(2 * (workers - rank - 1) + (chunks - 1) * workers);
    let mut order: Vec<_> = (0..warm_up).map(forward).collect();
    for k in warm_up..total {
        order.extend([forward(k), backward(k - warm_up)]);
    }
    order.extend((total - warm_up..total).map(backward));
    order
}

/// The same preferences for any placement: backwards first, then groups of as many micro-batches as workers, and within
/// a group one partition after the other.
fn grouped(input: &OrderInput<'_>) -> Vec<Vec<Action>> {
    let partitions = input.placement.partitions();
    let group = input.placement.workers();
    let rank = |action: &Action| {
        let (here, micro_batch) = (action.partition.index(), action.micro_batch.index());
        match action.op {
            Op::Backward => (0, micro_batch / group, partitions - here, micro_batch),
            _ => (1, micro_batch / group, here, micro_batch),
        }
    };
    // Megatron's warm-up admits about twice as many micro-batches as 1F1B.
    let in_flight_max = |partition: PartitionId| 2 * (partitions - partition.index()) - 1;
    list::order(
        input,
        &Policy { in_flight_max: &in_flight_max, rank: &rank, message_ticks: one_f_one_b::MESSAGE_TICKS },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::Placement;
    use crate::schedule::{simulate, Costs, LinkCost, Request, Schedule};

    #[test]
    fn two_workers_with_two_partitions_each_follow_megatron() {
        let placement: Placement = "a,b,a,b".parse().unwrap();
        let orders = order(&OrderInput { placement: &placement, micro_batches: 4 });
        let text = |index: usize| orders[index].iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        // Warm-up of 4 and 2 forwards; micro-batches in groups of two.
        assert_eq!(text(0), "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3");
        assert_eq!(text(1), "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3");
    }

    #[test]
    fn other_placements_beat_one_f_one_b_on_a_slow_link() {
        for placement in ["client,server,client", "a,b,c,a", "c,b,a,b,c", "a,b,b,a,c,b", "a,b,a"] {
            let request = Request::new(placement.parse().unwrap(), 12);
            let mut costs = Costs::equal(request.placement.partitions());
            costs.other_links = LinkCost { latency: 2.0, transfer: 0.5 };
            let makespan = |schedule: Schedule| simulate(&schedule.plan(&request).unwrap(), &costs).unwrap().makespan;
            assert!(makespan(Schedule::Interleaved) < makespan(Schedule::OneFOneB), "{placement}");
        }
    }
}
