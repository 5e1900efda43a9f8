//! Checks that a plan is sound: its workers compute everything exactly once, every action has its inputs, and every
//! worker finishes.
//!
//! The rules, in the order in which they are checked:
//!
//! 1. Every action is possible: its partition and micro-batch exist, it is on the partition's worker, messages go only
//!    along an edge between two workers, and neither evaluation nor a frozen partition has a backward.
//! 2. No action occurs twice.
//! 3. No action is missing: every forward and backward, and both ends of every message.
//! 4. The order of each worker gives every action its inputs, and every recomputation is between its forward and its
//!    backward.
//! 5. No worker waits forever. Sends never wait, because queues hold all messages of a step.

mod error;

pub use error::{CheckError, Excerpt, Stuck};

use super::action::Message;
use super::walk::walk;
use super::{Action, Mode, Op, Pass, Plan};
use crate::{MicroBatchId, PartitionId, WorkerId};
use std::collections::HashMap;

/// Checks that a plan is sound, and returns the first violation otherwise.
pub fn check(plan: &Plan) -> Result<(), CheckError> {
    let index = ActionIndex::new(plan)?;
    index.complete()?;
    index.ordered()?;
    walk(plan, |_, _| {}).map_err(|stuck| {
        let describe = |(worker, index): (WorkerId, usize)| {
            let action = plan.actions(worker)[index];
            let from = action.message().and_then(|message| plan.worker_of(message.from));
            let name = |worker| plan.placement().name(worker).to_string();
            Stuck {
                worker: name(worker),
                action,
                waits_for: from.map_or_else(String::new, name),
                at: Excerpt::new(plan, worker, index),
            }
        };
        CheckError::Deadlock { stuck: stuck.into_iter().map(describe).collect() }
    })
}

/// The index of every action in its worker's list.
struct ActionIndex<'a> {
    plan: &'a Plan,
    index: HashMap<Action, usize>,
}

impl<'a> ActionIndex<'a> {
    /// Builds the index; checks rules 1 and 2 on the way.
    fn new(plan: &'a Plan) -> Result<Self, CheckError> {
        let mut index = HashMap::new();
        for worker in plan.placement().worker_ids() {
            for (at, &action) in plan.actions(worker).iter().enumerate() {
                possible(plan, worker, action).map_err(|fault| fault.error(plan, worker, at))?;
                if index.insert(action, at).is_some() {
                    return Err(CheckError::Duplicate { action, at: Excerpt::new(plan, worker, at) });
                }
            }
        }
        Ok(Self { plan, index })
    }

    /// Checks rule 3: nothing is missing.
    fn complete(&self) -> Result<(), CheckError> {
        let plan = self.plan;
        for partition in plan.placement().partition_ids() {
            for micro_batch in (0..plan.micro_batches()).map(MicroBatchId::new) {
                self.has_compute(Action::forward(partition, micro_batch))?;
                if plan.has_backward(partition) {
                    self.has_compute(Action::backward(partition, micro_batch))?;
                }
            }
        }
        for from in plan.placement().partition_ids() {
            for &to in plan.out_edges(from).iter().filter(|&&to| !plan.same_worker(from, to)) {
                for micro_batch in (0..plan.micro_batches()).map(MicroBatchId::new) {
                    self.has_message(Message { pass: Pass::Forward, micro_batch, from, to })?;
                    if plan.has_backward(from) {
                        self.has_message(Message { pass: Pass::Backward, micro_batch, from: to, to: from })?;
                    }
                }
            }
        }
        Ok(())
    }

    fn has_compute(&self, action: Action) -> Result<(), CheckError> {
        if self.index.contains_key(&action) {
            return Ok(());
        }
        Err(CheckError::MissingCompute { action, worker: self.worker_name(action.partition) })
    }

    /// Checks that a message is sent and received. The forwards and backwards are known to exist.
    fn has_message(&self, message: Message) -> Result<(), CheckError> {
        let compute = |partition| match message.pass {
            Pass::Forward => Action::forward(partition, message.micro_batch),
            Pass::Backward => Action::backward(partition, message.micro_batch),
        };
        let action = message.send();
        if !self.index.contains_key(&action) {
            let after = compute(message.from);
            let worker = self.worker_name(message.from);
            return Err(CheckError::MissingSend { action, worker, after, at: self.excerpt(after) });
        }
        let action = message.receive();
        if !self.index.contains_key(&action) {
            let before = compute(message.to);
            let worker = self.worker_name(message.to);
            return Err(CheckError::MissingReceive { action, worker, before, at: self.excerpt(before) });
        }
        Ok(())
    }

    /// Checks rule 4: the order within each worker.
    fn ordered(&self) -> Result<(), CheckError> {
        for worker in self.plan.placement().worker_ids() {
            for &action in self.plan.actions(worker) {
                let Action { partition, op, micro_batch } = action;
                match op {
                    Op::Forward => self.after_inputs(action, Pass::Forward)?,
                    Op::Backward => {
                        self.after_producer(action, Action::forward(partition, micro_batch))?;
                        self.after_inputs(action, Pass::Backward)?;
                    }
                    Op::Recompute => self.between(action)?,
                    Op::Send { pass, .. } => {
                        let producer = match pass {
                            Pass::Forward => Action::forward(partition, micro_batch),
                            Pass::Backward => Action::backward(partition, micro_batch),
                        };
                        if !self.before(producer, action) {
                            let at = self.excerpt(action);
                            return Err(CheckError::SendBeforeProduce { action, producer, at });
                        }
                    }
                    // The position of a receive depends on the other workers: rule 5.
                    Op::Receive { .. } => {}
                }
            }
        }
        Ok(())
    }

    fn after_inputs(&self, action: Action, pass: Pass) -> Result<(), CheckError> {
        let Action { partition, micro_batch, .. } = action;
        let sources = match pass {
            Pass::Forward => self.plan.in_edges(partition),
            Pass::Backward => self.plan.out_edges(partition),
        };
        for &from in sources {
            if self.plan.same_worker(from, partition) {
                self.after_producer(action, Action { partition: from, ..action })?;
                continue;
            }
            let receive = Message { pass, micro_batch, from, to: partition }.receive();
            if !self.before(receive, action) {
                return Err(CheckError::UseBeforeReceive { action, receive, at: self.excerpt(action) });
            }
        }
        Ok(())
    }

    fn after_producer(&self, action: Action, producer: Action) -> Result<(), CheckError> {
        if self.before(producer, action) {
            return Ok(());
        }
        Err(CheckError::UseBeforeProduce { action, producer, at: self.excerpt(action) })
    }

    fn between(&self, action: Action) -> Result<(), CheckError> {
        let forward = Action::forward(action.partition, action.micro_batch);
        let backward = Action::backward(action.partition, action.micro_batch);
        if self.before(forward, action) && self.before(action, backward) {
            return Ok(());
        }
        Err(CheckError::MisplacedRecompute { action, forward, backward, at: self.excerpt(action) })
    }

    /// Whether one action comes before another. Both are on one worker and exist by rule 3.
    fn before(&self, first: Action, second: Action) -> bool {
        self.index[&first] < self.index[&second]
    }

    fn excerpt(&self, action: Action) -> Excerpt {
        Excerpt::new(self.plan, self.plan.placement().worker_of(action.partition), self.index[&action])
    }

    fn worker_name(&self, partition: PartitionId) -> String {
        let placement = self.plan.placement();
        placement.name(placement.worker_of(partition)).to_string()
    }
}

/// A violation of rule 1, before its location is added.
enum Fault {
    Stray { action: Action, expected: String, got: String },
    WrongWorker { action: Action, expected: WorkerId },
}

impl Fault {
    fn error(self, plan: &Plan, worker: WorkerId, index: usize) -> CheckError {
        let at = Excerpt::new(plan, worker, index);
        let name = |worker| plan.placement().name(worker).to_string();
        match self {
            Self::Stray { action, expected, got } => CheckError::Stray { action, expected, got, at },
            Self::WrongWorker { action, expected } => {
                CheckError::WrongWorker { action, expected: name(expected), got: name(worker), at }
            }
        }
    }
}

/// Checks rule 1 for one action.
fn possible(plan: &Plan, worker: WorkerId, action: Action) -> Result<(), Fault> {
    let stray = |expected: String, got: String| Err(Fault::Stray { action, expected, got });
    let partitions = plan.partitions();
    let Some(expected) = plan.worker_of(action.partition) else {
        return stray(format!("a partition below {partitions}"), format!("partition {}", action.partition));
    };
    if action.micro_batch.index() >= plan.micro_batches() {
        let expected = format!("a micro-batch below {}", plan.micro_batches());
        return stray(expected, format!("micro-batch {}", action.micro_batch));
    }
    if expected != worker {
        return Err(Fault::WrongWorker { action, expected });
    }
    let backward = match (action.op, action.message()) {
        (_, Some(message)) => message.pass == Pass::Backward,
        (op, None) => op != Op::Forward,
    };
    if backward && plan.mode() == Mode::Evaluate {
        return stray("forwards only in evaluation".to_string(), "a part of the backward".to_string());
    }
    // A gradient belongs to the backward of the partition that receives it.
    let of = match action.message() {
        Some(message) if message.pass == Pass::Backward => message.to,
        _ => action.partition,
    };
    if backward && !plan.has_backward(of) {
        return stray(
            format!("forwards only in partition {of}, which is frozen"),
            "a part of its backward".to_string(),
        );
    }
    let Some(message) = action.message() else {
        return Ok(());
    };
    let (upper, lower) = match message.pass {
        Pass::Forward => (message.from, message.to),
        Pass::Backward => (message.to, message.from),
    };
    let edge = upper.index() < partitions && plan.out_edges(upper).binary_search(&lower).is_ok();
    if !edge {
        let got = format!("no such edge as {} to {}", message.from, message.to);
        return stray("a message between neighbours or along a skip".to_string(), got);
    }
    if plan.same_worker(upper, lower) {
        return stray(
            "messages between different workers only".to_string(),
            format!("two partitions of `{}`", plan.placement().name(worker)),
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "\
distgpipe plan 1
mode train
partitions 3
micro_batches 1
placement a b a
skips 0>2
a: 0F0 0F0>1 2F0<1 2F0 2R0 2B0 2B0>1 0B0<1 0B0
b: 1F0<0 1F0 1F0>2 1B0<2 1B0 1B0>0
";

    fn error(from: &str, to: &str) -> String {
        assert!(GOOD.contains(from), "{from}");
        let plan: Plan = GOOD.replacen(from, to, 1).parse().unwrap();
        check(&plan).unwrap_err().to_string()
    }

    #[test]
    fn every_rule_names_its_breach() {
        assert_eq!(check(&GOOD.parse().unwrap()), Ok(()));
        for (from, to, expected) in [
            ("0F0 ", "0F0 3F0 ", "stray action `3F0`: expected a partition below 3, got partition 3"),
            ("0F0 ", "0F0 0F1 ", "stray action `0F1`: expected a micro-batch below 1, got micro-batch 1"),
            (
                "0F0 ",
                "0F0 1F0 ",
                "`1F0` on the wrong worker: expected it on `b`, which holds its partition, got it on `a`",
            ),
            (
                "0F0 ",
                "0F0 0F0>2 ",
                "stray action `0F0>2`: expected messages between different workers only, got two partitions of `a`",
            ),
            ("0F0 ", "0F0 0F0>9 ", "no such edge as 0 to 9"),
            ("0F0 ", "0F0 0B0>1 ", "no such edge as 0 to 1"),
            ("0F0 ", "0F0 2F0>1 ", "no such edge as 2 to 1"),
            ("mode train", "mode evaluate", "stray action `2R0`: expected forwards only in evaluation"),
            ("0F0 ", "0F0 0F0 ", "`0F0` twice"),
            ("0F0>1 ", "0F0>1 0F0>1 ", "`0F0>1` twice"),
            ("0F0 ", "", "missing `0F0`: expected it once on worker `a`"),
            (" 1B0 ", " ", "missing `1B0`"),
            ("0F0>1 ", "", "missing send `0F0>1`: expected it on worker `a` after `0F0`"),
            ("1B0<2 ", "", "missing receive `1B0<2`: expected it on worker `b` before `1B0`"),
            ("1F0<0 1F0", "1F0 1F0<0", "use before receive: expected `1F0<0` before `1F0`"),
            ("0F0 0F0>1", "0F0>1 0F0", "send before produce: expected `0F0` before `0F0>1`"),
            ("2F0 2R0 2B0", "2R0 2F0 2B0", "misplaced recomputation: expected `2R0` between `2F0` and `2B0`"),
            ("2F0 2R0 2B0", "2F0 2B0 2R0", "misplaced recomputation"),
            ("2F0 2R0 2B0", "2B0 2F0 2R0", "use before produce: expected `2F0` before `2B0`"),
            ("0F0 0F0>1 2F0<1 2F0", "2F0<1 2F0 0F0 0F0>1", "use before produce: expected `0F0` before `2F0`"),
            ("0F0 0F0>1 2F0<1 2F0 2R0 2B0 2B0>1 0B0<1", "0B0<1 0F0 0F0>1 2F0<1 2F0 2R0 2B0 2B0>1", "deadlock"),
        ] {
            let got = error(from, to);
            assert!(got.contains(expected), "{from} → {to}\n     got: {got}\nexpected: {expected}");
        }
    }

    #[test]
    fn a_frozen_partition_has_neither_backwards_nor_gradients() {
        let frozen =
            GOOD.replace("skips 0>2", "skips 0>2\nfrozen 1").replace(" 0B0<1 0B0", "").replace("1B0 1B0>0", "1B0");
        assert_eq!(check(&frozen.parse().unwrap()), Ok(()));
        for (from, to, expected) in [
            ("2B0>1", "2B0>1 0B0", "stray action `0B0`: expected forwards only in partition 0, which is frozen"),
            ("0F0>1", "0F0>1 0R0", "stray action `0R0`"),
            ("1B0\n", "1B0 1B0>0\n", "stray action `1B0>0`: expected forwards only in partition 0"),
            ("2B0>1", "2B0>1 0B0<1", "stray action `0B0<1`"),
            (" 1B0\n", "\n", "missing `1B0`"),
            ("frozen 1\n", "", "missing `0B0`"),
        ] {
            assert!(frozen.contains(from), "{from}");
            let got = check(&frozen.replacen(from, to, 1).parse().unwrap()).unwrap_err().to_string();
            assert!(got.contains(expected), "{from} → {to}\n     got: {got}\nexpected: {expected}");
        }
    }

    #[test]
    fn the_bad_step_is_underlined_among_its_neighbours() {
        assert_eq!(
            error("2R0 ", "2B0 "),
            "`2B0` twice: expected it once, got it again: remove the second\n\
             \x20 a: … 0F0>1 2F0<1 2F0 2B0 2B0 2B0>1 0B0<1 0B0\n\
             \x20                          ^^^"
        );
    }

    #[test]
    fn a_deadlock_names_every_worker_and_where_it_is_stuck() {
        let plan = "\
distgpipe plan 1
mode evaluate
partitions 3
micro_batches 1
placement a b a
a: 2F0<1 0F0 0F0>1 2F0
b: 1F0<0 1F0 1F0>2
";
        let error = check(&plan.parse().unwrap()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "deadlock: expected every worker to finish, got 2 waiting for each other:\n\
             `a` is stuck on `2F0<1`, waiting for `b`\n\
             \x20 a: 2F0<1 0F0 0F0>1 2F0\n\
             \x20    ^^^^^\n\
             `b` is stuck on `1F0<0`, waiting for `a`\n\
             \x20 b: 1F0<0 1F0 1F0>2\n\
             \x20    ^^^^^"
        );
    }
}
