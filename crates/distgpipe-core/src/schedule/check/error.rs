//! What can be wrong with a plan, and the excerpt that shows where.

use super::{Action, Plan};
use crate::WorkerId;
use std::fmt;

/// What is wrong with a plan. The last line of the message shows where, with the action underlined.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    /// An action refers to something that the plan does not have, or is not allowed there.
    #[error("stray action `{action}`: expected {expected}, got {got}: remove it\n{at}")]
    Stray {
        /// The action in question.
        action: Action,
        /// What the plan allows.
        expected: String,
        /// What the action refers to.
        got: String,
        /// The action among its neighbours.
        at: Excerpt,
    },
    /// An action is on a worker that does not run its partition.
    #[error("`{action}` on the wrong worker: expected it on `{expected}`, which holds its partition, got it on `{got}`: move it there\n{at}")]
    WrongWorker {
        /// The action in question.
        action: Action,
        /// The worker that runs the partition.
        expected: String,
        /// The worker that has the action.
        got: String,
        /// The action among its neighbours.
        at: Excerpt,
    },
    /// An action occurs twice.
    #[error("`{action}` twice: expected it once, got it again: remove the second\n{at}")]
    Duplicate {
        /// The action in question.
        action: Action,
        /// The second occurrence among its neighbours.
        at: Excerpt,
    },
    /// A forward or a backward is missing.
    #[error("missing `{action}`: expected it once on worker `{worker}`, got none: add it")]
    MissingCompute {
        /// The action in question.
        action: Action,
        /// The worker that should execute it.
        worker: String,
    },
    /// A message is never sent.
    #[error("missing send `{action}`: expected it on worker `{worker}` after `{after}`, got none: add it\n{at}")]
    MissingSend {
        /// The action in question.
        action: Action,
        /// The worker that should send it.
        worker: String,
        /// The action that produces the message.
        after: Action,
        /// The producer among its neighbours.
        at: Excerpt,
    },
    /// A message is never received.
    #[error("missing receive `{action}`: expected it on worker `{worker}` before `{before}`, got none: add it\n{at}")]
    MissingReceive {
        /// The action in question.
        action: Action,
        /// The worker that should receive it.
        worker: String,
        /// The action that uses the message.
        before: Action,
        /// The user among its neighbours.
        at: Excerpt,
    },
    /// An action uses a message before it is received.
    #[error("use before receive: expected `{receive}` before `{action}`, got it after: move the receive up\n{at}")]
    UseBeforeReceive {
        /// The action that uses it.
        action: Action,
        /// The action that receives it.
        receive: Action,
        /// The use among its neighbours.
        at: Excerpt,
    },
    /// A message is sent before its content is computed.
    #[error("send before produce: expected `{producer}` before `{action}`, got it after: move the send down\n{at}")]
    SendBeforeProduce {
        /// The action that sends it.
        action: Action,
        /// The action that computes it.
        producer: Action,
        /// The send among its neighbours.
        at: Excerpt,
    },
    /// An action uses a result before the same worker has computed it.
    #[error("use before produce: expected `{producer}` before `{action}`, got it after: swap them\n{at}")]
    UseBeforeProduce {
        /// The action that uses it.
        action: Action,
        /// The action that computes it.
        producer: Action,
        /// The use among its neighbours.
        at: Excerpt,
    },
    /// A recomputation is not between its forward and its backward.
    #[error("misplaced recomputation: expected `{action}` between `{forward}` and `{backward}`, got it outside: move it between them\n{at}")]
    MisplacedRecompute {
        /// The recomputation that is misplaced.
        action: Action,
        /// The forward that it repeats.
        forward: Action,
        /// The backward that it is for.
        backward: Action,
        /// The action among its neighbours.
        at: Excerpt,
    },
    /// Workers wait for each other in a cycle.
    #[error("deadlock: expected every worker to finish, got {} waiting for each other:{}", .stuck.len(), join(.stuck))]
    Deadlock {
        /// Every worker that does not finish.
        stuck: Vec<Stuck>,
    },
    /// The costs of a simulation do not fit the plan.
    #[error("expected {expected}, got {got}: make the costs for this plan")]
    Costs {
        /// What the costs must be.
        expected: String,
        /// The cost that is wrong.
        got: String,
    },
}

/// A worker that waits forever.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stuck {
    /// The name of the worker.
    pub worker: String,
    /// The receive that never completes.
    pub action: Action,
    /// The worker that should have sent the message.
    pub waits_for: String,
    /// The action among its neighbours.
    pub at: Excerpt,
}

/// A few actions of one worker, with one of them underlined.
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
    pub(super) fn new(plan: &Plan, worker: WorkerId, index: usize) -> Self {
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
