//! Walks through a plan as its workers would execute it: each in its own order, waiting only where it receives.
//!
//! The checker asks whether every worker finishes, and the simulator asks when. Both use this walk, so they cannot
//! disagree about what can run.

use super::action::Message;
use super::{Action, Op, Plan};
use crate::WorkerId;
use std::collections::{HashMap, HashSet};

/// Calls `visit` for every action after those that it depends on, and for each worker's actions in order. If some
/// workers never finish, returns these workers with the index of the action that each is stuck on.
pub(super) fn walk(plan: &Plan, mut visit: impl FnMut(WorkerId, Action)) -> Result<(), Vec<(WorkerId, usize)>> {
    let mut next: Vec<usize> = vec![0; plan.placement().workers()];
    let mut sent: HashSet<Message> = HashSet::new();
    let mut waiting: HashMap<Message, WorkerId> = HashMap::new();
    let mut runnable: Vec<WorkerId> = plan.placement().worker_ids().rev().collect();
    while let Some(worker) = runnable.pop() {
        while let Some(&action) = plan.actions(worker).get(next[worker.index()]) {
            match (action.op, action.message()) {
                (Op::Receive { .. }, Some(message)) if !sent.contains(&message) => {
                    waiting.insert(message, worker);
                    break;
                }
                (Op::Send { .. }, Some(message)) => {
                    sent.insert(message);
                    runnable.extend(waiting.remove(&message));
                }
                _ => {}
            }
            visit(worker, action);
            next[worker.index()] += 1;
        }
    }
    let unfinished = |&worker: &WorkerId| next[worker.index()] < plan.actions(worker).len();
    let stuck: Vec<_> =
        plan.placement().worker_ids().filter(unfinished).map(|worker| (worker, next[worker.index()])).collect();
    if stuck.is_empty() {
        Ok(())
    } else {
        Err(stuck)
    }
}
