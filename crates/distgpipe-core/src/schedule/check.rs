//! Whether a plan is sound: whoever executes it computes everything once, with its inputs there, and
//! everybody arrives at the end.
//!
//! The rules, in the order in which they are applied:
//!
//! 1. Every action is one that the plan can have: known partition and micro-batch, on the partition's
//!    worker, messages only along an edge between two workers, no backward in evaluation.
//! 2. No action stands twice.
//! 3. None is missing: every forward and backward, and both ends of every message.
//! 4. Each worker's own order gives every action its inputs, and every recomputation stands between
//!    its forward and its backward.
//! 5. Walking all workers together, nobody waits for ever. Sends do not wait: queues hold a whole
//!    step's messages.

use super::action::Message;
use super::walk::walk;
use super::{Action, Mode, Op, Pass, Plan};
use crate::{MicroBatchId, PartitionId, WorkerId};
use std::collections::HashMap;
use std::fmt;

/// What is wrong with a plan. The last line shows where, with the action underlined.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    /// An action names something that the plan does not have, or stands where it can't.
    #[error("stray action `{action}`: expected {expected}, got {got}: remove it\n{at}")]
    Stray {
        /// The action.
        action: Action,
        /// What could stand there.
        expected: String,
        /// What does.
        got: String,
        /// Where.
        at: Excerpt,
    },
    /// An action stands on a worker that does not hold its partition.
    #[error("`{action}` on the wrong worker: expected it on `{expected}`, which holds its partition, got it on `{got}`: move it there\n{at}")]
    WrongWorker {
        /// The action.
        action: Action,
        /// The worker that holds the partition.
        expected: String,
        /// The worker that has the action.
        got: String,
        /// Where.
        at: Excerpt,
    },
    /// An action stands twice.
    #[error("`{action}` twice: expected it once, got it again: remove the second\n{at}")]
    Duplicate {
        /// The action.
        action: Action,
        /// Where it is the second time.
        at: Excerpt,
    },
    /// A forward or a backward is missing.
    #[error("missing `{action}`: expected it once on worker `{worker}`, got none: add it")]
    MissingCompute {
        /// The action.
        action: Action,
        /// Who should do it.
        worker: String,
    },
    /// A message is not sent.
    #[error("missing send `{action}`: expected it on worker `{worker}` after `{after}`, got none: add it\n{at}")]
    MissingSend {
        /// The action.
        action: Action,
        /// Who should send.
        worker: String,
        /// What produces the message.
        after: Action,
        /// The producer's surroundings.
        at: Excerpt,
    },
    /// A message is not received.
    #[error("missing receive `{action}`: expected it on worker `{worker}` before `{before}`, got none: add it\n{at}")]
    MissingReceive {
        /// The action.
        action: Action,
        /// Who should receive.
        worker: String,
        /// What uses the message.
        before: Action,
        /// The user's surroundings.
        at: Excerpt,
    },
    /// Something is used before it has been received.
    #[error("use before receive: expected `{receive}` before `{action}`, got it after: move the receive up\n{at}")]
    UseBeforeReceive {
        /// What uses it.
        action: Action,
        /// What receives it.
        receive: Action,
        /// Where it is used.
        at: Excerpt,
    },
    /// Something is sent before it has been computed.
    #[error("send before produce: expected `{producer}` before `{action}`, got it after: move the send down\n{at}")]
    SendBeforeProduce {
        /// The send.
        action: Action,
        /// What computes it.
        producer: Action,
        /// Where it is sent.
        at: Excerpt,
    },
    /// Something is used before the same worker has computed it.
    #[error("use before produce: expected `{producer}` before `{action}`, got it after: swap them\n{at}")]
    UseBeforeProduce {
        /// What uses it.
        action: Action,
        /// What computes it.
        producer: Action,
        /// Where it is used.
        at: Excerpt,
    },
    /// A recomputation is not between its forward and its backward.
    #[error("misplaced recomputation: expected `{action}` between `{forward}` and `{backward}`, got it outside: move it between them\n{at}")]
    MisplacedRecompute {
        /// The recomputation.
        action: Action,
        /// Its forward.
        forward: Action,
        /// Its backward.
        backward: Action,
        /// Where it stands.
        at: Excerpt,
    },
    /// Workers wait for each other in a circle.
    #[error("deadlock: expected every worker to finish, got {} waiting for each other:{}", .stuck.len(), join(.stuck))]
    Deadlock {
        /// Everybody who does not finish.
        stuck: Vec<Stuck>,
    },
    /// The costs of a simulation do not fit the plan.
    #[error("expected {expected}, got {got}: make the costs for this plan")]
    Costs {
        /// What a cost must be.
        expected: String,
        /// What it is.
        got: String,
    },
}

/// A worker that waits for ever.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stuck {
    /// Its name.
    pub worker: String,
    /// The receive that never ends.
    pub action: Action,
    /// Who should have sent.
    pub waits_for: String,
    /// Where it stands.
    pub at: Excerpt,
}

/// A few actions of one worker with one of them underlined, for people.
#[derive(Clone, PartialEq, Eq)]
pub struct Excerpt {
    line: String,
    underline: String,
}

impl fmt::Display for Excerpt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "  {}\n  {}", self.line, self.underline)
    }
}

impl fmt::Debug for Excerpt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.line)
    }
}

impl Excerpt {
    fn new(plan: &Plan, worker: WorkerId, index: usize) -> Self {
        const NEIGHBOURS: usize = 4;
        let actions = plan.actions(worker);
        let (first, last) = (index.saturating_sub(NEIGHBOURS), (index + NEIGHBOURS).min(actions.len() - 1));
        let mut line = format!("{}:", plan.placement().name(worker));
        let mut underline = String::new();
        if first > 0 {
            line.push_str(" …");
        }
        for (offset, action) in actions[first..=last].iter().enumerate() {
            line.push(' ');
            let action = action.to_string();
            if first + offset == index {
                underline = format!("{}{}", " ".repeat(line.chars().count()), "^".repeat(action.len()));
            }
            line.push_str(&action);
        }
        if last + 1 < actions.len() {
            line.push_str(" …");
        }
        Self { line, underline }
    }
}

fn join(stuck: &[Stuck]) -> String {
    let line = |Stuck { worker, action, waits_for, at }: &Stuck| {
        format!("\n`{worker}` is stuck on `{action}`, waiting for `{waits_for}`\n{at}")
    };
    stuck.iter().map(line).collect()
}

/// Whether a plan is sound; the first thing that is wrong with it otherwise.
pub fn check(plan: &Plan) -> Result<(), CheckError> {
    let places = Places::new(plan)?;
    places.complete()?;
    places.ordered()?;
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

/// Where every action stands in its worker's list.
struct Places<'a> {
    plan: &'a Plan,
    index: HashMap<Action, usize>,
}

impl<'a> Places<'a> {
    /// Rules 1 and 2.
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

    /// Rule 3.
    fn complete(&self) -> Result<(), CheckError> {
        let plan = self.plan;
        for partition in plan.placement().partition_ids() {
            for micro_batch in (0..plan.micro_batches()).map(MicroBatchId::new) {
                self.has_compute(Action::forward(partition, micro_batch))?;
                if plan.mode() == Mode::Train {
                    self.has_compute(Action::backward(partition, micro_batch))?;
                }
            }
        }
        for from in plan.placement().partition_ids() {
            for &to in plan.out_edges(from).iter().filter(|&&to| !plan.same_worker(from, to)) {
                for micro_batch in (0..plan.micro_batches()).map(MicroBatchId::new) {
                    self.has_message(Message { pass: Pass::Forward, micro_batch, from, to })?;
                    if plan.mode() == Mode::Train {
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

    /// Both ends; the forwards and backwards are known to be there.
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

    /// Rule 4.
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
                    // When a receive may stand is a matter between workers: rule 5.
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

    /// Both are on one worker, and rule 3 found both.
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

/// What rule 1 found, before it is known where.
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

/// Rule 1 for one action.
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
