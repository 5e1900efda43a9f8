//! Lowers the order of computations to a plan: adds the messages and recomputations that it needs.
//!
//! A receive comes right before its use and a send right after its producer, so that every worker waits as late, and
//! keeps the others waiting as briefly, as the order allows. A recomputation comes before the receive of its gradient,
//! so that it runs while the gradient is in flight:
//!
//! ```text
//! worker of partition 1:  1F0<0 1F0 1F0>2   …   1R0 1B0<2 1B0 1B0>0
//!                                               ^^^ needs no gradient: overlaps with the wait
//! ```
//!
//! If partition 0 is frozen, it has no backward, and `1B0>0` is left out too.

use super::action::Message;
use super::{Action, Op, Pass, Plan, Recompute};

/// Makes the plan for an order, which has the forwards and backwards of every worker.
pub(super) fn lower(plan: Plan, order: Vec<Vec<Action>>, recompute: Recompute) -> Plan {
    let actions = order
        .into_iter()
        .map(|computes| {
            let mut actions = Vec::new();
            computes.into_iter().for_each(|compute| surround(&plan, compute, recompute, &mut actions));
            actions
        })
        .collect();
    plan.with_actions(actions)
}

/// Appends one forward or backward with its messages and its recomputation.
fn surround(plan: &Plan, compute: Action, recompute: Recompute, actions: &mut Vec<Action>) {
    let Action { partition, op, micro_batch } = compute;
    let (pass, sources, targets) = match op {
        Op::Forward => (Pass::Forward, plan.in_edges(partition), plan.out_edges(partition)),
        Op::Backward => (Pass::Backward, plan.out_edges(partition), plan.in_edges(partition)),
        _ => unreachable!("a schedule orders forwards and backwards only, got {compute}"),
    };
    let again = match recompute {
        Recompute::Never => false,
        Recompute::ExceptLast => micro_batch.index() + 1 < plan.micro_batches(),
        Recompute::Always => true,
    };
    if op == Op::Backward && again {
        actions.push(Action::recompute(partition, micro_batch));
    }
    for &from in sources.iter().filter(|&&source| !plan.same_worker(source, partition)) {
        actions.push(Message { pass, micro_batch, from, to: partition }.receive());
    }
    actions.push(compute);
    let needed = |target| pass == Pass::Forward || plan.has_backward(target);
    for &to in targets.iter().filter(|&&target| needed(target) && !plan.same_worker(target, partition)) {
        actions.push(Message { pass, micro_batch, from: partition, to }.send());
    }
}

#[cfg(test)]
mod tests {
    use crate::placement::Placement;
    use crate::schedule::{Request, Schedule};
    use crate::{MicroBatchId, PartitionId, WorkerId};

    #[test]
    fn messages_surround_their_use_and_recompute_overlaps_the_wait() {
        let placement: Placement = "client,server,client".parse().unwrap();
        let request = Request {
            recompute: super::Recompute::Always,
            skips: vec![(PartitionId(0), PartitionId(2)), (PartitionId(0), PartitionId(1))],
            ..Request::new(placement, 1)
        };
        let plan = Schedule::GPipe.plan(&request).unwrap();
        let text = |worker| {
            let actions: Vec<_> = plan.actions(WorkerId(worker)).iter().map(ToString::to_string).collect();
            actions.join(" ")
        };
        // The skip from 0 to 2 stays on the client.
        assert_eq!(text(0), "0F0 0F0>1 2F0<1 2F0 2R0 2B0 2B0>1 0R0 0B0<1 0B0");
        assert_eq!(text(1), "1F0<0 1F0 1F0>2 1R0 1B0<2 1B0 1B0>0");
        assert_eq!(plan.messages(WorkerId(0), WorkerId(1)), 2);
        assert_eq!(plan.messages(WorkerId(1), WorkerId(0)), 2);
        assert_eq!(plan.receives(WorkerId(0)), 2);
        assert_eq!(plan.in_edges(PartitionId(2)), [PartitionId(0), PartitionId(1)]);
        assert!(plan.recomputes(PartitionId(1), MicroBatchId(0)));
        assert!(!plan.recomputes(PartitionId(1), MicroBatchId(1)));
    }

    #[test]
    fn frozen_partitions_run_forward_only_and_receive_no_gradients() {
        let request = Request {
            recompute: super::Recompute::Always,
            skips: vec![(PartitionId(0), PartitionId(2))],
            frozen: 1,
            ..Request::new(Placement::one_worker_each(3), 1)
        };
        let plan = Schedule::OneFOneB.plan(&request).unwrap();
        let text = |worker| {
            let actions: Vec<_> = plan.actions(WorkerId(worker)).iter().map(ToString::to_string).collect();
            actions.join(" ")
        };
        assert_eq!(text(0), "0F0 0F0>1 0F0>2");
        assert_eq!(text(1), "1F0<0 1F0 1F0>2 1R0 1B0<2 1B0");
        assert_eq!(text(2), "2F0<0 2F0<1 2F0 2R0 2B0 2B0>1");
        assert!(!plan.has_backward(PartitionId(0)) && plan.has_backward(PartitionId(1)));
        assert!(!plan.recomputes(PartitionId(0), MicroBatchId(0)));
    }
}
