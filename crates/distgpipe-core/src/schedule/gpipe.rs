//! GPipe: all forwards, then all backwards (Huang et al., arXiv:1811.06965).
//!
//! In clock cycle i + j partition j runs the forward of micro-batch i:
//!
//! ```text
//! partition 0:  F0 F1 F2 F3 .  .  .  .  .  .  B3 B2 B1 B0
//! partition 1:  .  F0 F1 F2 F3 .  .  .  .  B3 B2 B1 B0 .
//! partition 2:  .  .  F0 F1 F2 F3 .  .  B3 B2 B1 B0 .  .     (idle time not to scale)
//! ```
//!
//! Backwards run in reverse order. The activations of the last forward are needed right away, which is why
//! `except-last` does not recompute them. Sorting by clock cannot deadlock, because every dependency goes to a later
//! clock.

use super::{Action, OrderInput};
use crate::{MicroBatchId, PartitionId};

/// The orders of all workers; see [`super::Order`].
pub(super) fn order(input: &OrderInput<'_>) -> Vec<Vec<Action>> {
    let mut orders = forward_order(input);
    // The backwards mirror the forwards.
    for order in &mut orders {
        let backwards: Vec<_> =
            order.iter().rev().map(|action| Action::backward(action.partition, action.micro_batch)).collect();
        order.extend(backwards);
    }
    orders
}

/// Forwards only, by clock. Within one clock the partition nearest to the input goes first, because the most other
/// partitions depend on it.
pub(super) fn forward_order(input: &OrderInput<'_>) -> Vec<Vec<Action>> {
    let partitions = input.placement.partitions();
    let mut orders = vec![Vec::new(); input.placement.workers()];
    for clock in 0..partitions + input.micro_batches - 1 {
        let first = (clock + 1).saturating_sub(input.micro_batches);
        for partition in first..partitions.min(clock + 1) {
            let action = Action::forward(PartitionId::new(partition), MicroBatchId::new(clock - partition));
            orders[input.placement.worker_of(action.partition).index()].push(action);
        }
    }
    orders
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::Placement;

    fn text(orders: &[Vec<Action>]) -> Vec<String> {
        let line = |order: &Vec<Action>| order.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        orders.iter().map(line).collect()
    }

    #[test]
    fn forwards_by_clock_then_backwards_newest_first() {
        let placement = Placement::one_worker_each(2);
        let orders = order(&OrderInput { placement: &placement, micro_batches: 3 });
        assert_eq!(text(&orders), ["0F0 0F1 0F2 0B2 0B1 0B0", "1F0 1F1 1F2 1B2 1B1 1B0"]);
    }

    #[test]
    fn a_client_with_both_ends_keeps_feeding_the_server() {
        let placement: Placement = "client,server,client".parse().unwrap();
        let orders = order(&OrderInput { placement: &placement, micro_batches: 3 });
        assert_eq!(text(&orders), ["0F0 0F1 0F2 2F0 2F1 2F2 2B2 2B1 2B0 0B2 0B1 0B0", "1F0 1F1 1F2 1B2 1B1 1B0"]);
    }
}
