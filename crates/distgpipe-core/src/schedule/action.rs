//! One action of one worker, and its short text.
//!
//! | text | meaning |
//! | --- | --- |
//! | `2F0` | partition 2 runs the forward of micro-batch 0 |
//! | `2R0` | partition 2 recomputes that forward for its activations |
//! | `2B0` | partition 2 runs the backward of micro-batch 0 |
//! | `0F0>1` | partition 0 sends its forward tensors of micro-batch 0 to partition 1 |
//! | `1F0<0` | partition 1 receives them |
//! | `1B0>0` | partition 1 sends their gradients back to partition 0 |
//! | `0B0<1` | partition 0 receives these gradients |
//!
//! One message carries all tensors (the activation and the skips) that go from one partition to another for one
//! micro-batch in one pass. Messages exist only between different workers.

use crate::{MicroBatchId, PartitionId};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The direction of a pass through the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    /// From the input to the loss.
    Forward,
    /// From the loss to the input.
    Backward,
}

/// The operation of an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Op {
    /// Runs the forward of the partition.
    Forward,
    /// Runs the forward again to restore the activations that were dropped.
    Recompute,
    /// Runs the backward of the partition.
    Backward,
    /// Hands a message to a link, without waiting for its arrival.
    Send {
        /// The pass whose tensors are sent.
        pass: Pass,
        /// The partition that receives them.
        to: PartitionId,
    },
    /// Waits for a message.
    Receive {
        /// The pass whose tensors are received.
        pass: Pass,
        /// The partition that sends them.
        from: PartitionId,
    },
}

/// One action of one worker: an operation for one partition and one micro-batch.
///
/// ```
/// use distgpipe_core::schedule::{Action, Op, Pass};
/// use distgpipe_core::{MicroBatchId, PartitionId};
/// let action: Action = "1B0>0".parse()?;
/// assert_eq!(action.partition, PartitionId(1));
/// assert_eq!(action.op, Op::Send { pass: Pass::Backward, to: PartitionId(0) });
/// assert_eq!(action.to_string(), "1B0>0");
/// # Ok::<(), distgpipe_core::schedule::ActionParseError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Action {
    /// The partition that acts.
    pub partition: PartitionId,
    /// What the partition does.
    pub op: Op,
    /// The micro-batch that it is for.
    pub micro_batch: MicroBatchId,
}

/// Why a text is not an action.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ActionParseError {
    /// The text does not have the form of an action.
    #[error("expected an action such as `2F0`, `2R0`, `2B0`, `0F0>1` or `1F0<0`, got `{got}`")]
    Form {
        /// The beginning of the text.
        got: String,
    },
}

/// Identifies a message at both of its ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Message {
    pub pass: Pass,
    pub micro_batch: MicroBatchId,
    pub from: PartitionId,
    pub to: PartitionId,
}

impl Action {
    /// The forward of a micro-batch.
    pub fn forward(partition: PartitionId, micro_batch: MicroBatchId) -> Self {
        Self { partition, op: Op::Forward, micro_batch }
    }

    /// The recomputation of a micro-batch.
    pub fn recompute(partition: PartitionId, micro_batch: MicroBatchId) -> Self {
        Self { partition, op: Op::Recompute, micro_batch }
    }

    /// The backward of a micro-batch.
    pub fn backward(partition: PartitionId, micro_batch: MicroBatchId) -> Self {
        Self { partition, op: Op::Backward, micro_batch }
    }

    /// Whether the worker computes in this action, rather than sending or waiting.
    pub fn is_compute(&self) -> bool {
        matches!(self.op, Op::Forward | Op::Recompute | Op::Backward)
    }

    /// The message that this action sends or waits for.
    pub(super) fn message(&self) -> Option<Message> {
        let micro_batch = self.micro_batch;
        match self.op {
            Op::Send { pass, to } => Some(Message { pass, micro_batch, from: self.partition, to }),
            Op::Receive { pass, from } => Some(Message { pass, micro_batch, from, to: self.partition }),
            Op::Forward | Op::Recompute | Op::Backward => None,
        }
    }
}

impl Message {
    pub(super) fn send(self) -> Action {
        let op = Op::Send { pass: self.pass, to: self.to };
        Action { partition: self.from, op, micro_batch: self.micro_batch }
    }

    pub(super) fn receive(self) -> Action {
        let op = Op::Receive { pass: self.pass, from: self.from };
        Action { partition: self.to, op, micro_batch: self.micro_batch }
    }
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
        })
    }
}

fn letter(pass: Pass) -> char {
    match pass {
        Pass::Forward => 'F',
        Pass::Backward => 'B',
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { partition, op, micro_batch } = self;
        match *op {
            Op::Forward => write!(f, "{partition}F{micro_batch}"),
            Op::Recompute => write!(f, "{partition}R{micro_batch}"),
            Op::Backward => write!(f, "{partition}B{micro_batch}"),
            Op::Send { pass, to } => write!(f, "{partition}{}{micro_batch}>{to}", letter(pass)),
            Op::Receive { pass, from } => {
                write!(f, "{partition}{}{micro_batch}<{from}", letter(pass))
            }
        }
    }
}

impl FromStr for Action {
    type Err = ActionParseError;

    fn from_str(text: &str) -> Result<Self, ActionParseError> {
        parse(text).ok_or_else(|| ActionParseError::Form { got: text.chars().take(40).collect() })
    }
}

fn parse(text: &str) -> Option<Action> {
    let (partition, rest) = number(text)?;
    let letter = rest.chars().next()?;
    let (micro_batch, rest) = number(rest.get(letter.len_utf8()..)?)?;
    let pass = match letter {
        'F' => Some(Pass::Forward),
        'B' => Some(Pass::Backward),
        'R' => None,
        _ => return None,
    };
    let op = if rest.is_empty() {
        match pass {
            Some(Pass::Forward) => Op::Forward,
            Some(Pass::Backward) => Op::Backward,
            None => Op::Recompute,
        }
    } else {
        let pass = pass?;
        let (other, end) = number(rest.get(1..)?)?;
        let other = PartitionId(other);
        match (rest.as_bytes().first()?, end) {
            (b'>', "") => Op::Send { pass, to: other },
            (b'<', "") => Op::Receive { pass, from: other },
            _ => return None,
        }
    };
    Some(Action { partition: PartitionId(partition), op, micro_batch: MicroBatchId(micro_batch) })
}

/// The number at the start of a text, and the rest of it.
fn number(text: &str) -> Option<(u32, &str)> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, rest) = text.split_at_checked(digits)?;
    Some((number.parse().ok()?, rest))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Any action with ids below the bounds.
    pub(in super::super) fn any_action(partitions: u32, micro_batches: u32) -> impl Strategy<Value = Action> {
        let pass = prop_oneof![Just(Pass::Forward), Just(Pass::Backward)];
        let op = (0..5, pass, 0..partitions).prop_map(|(kind, pass, other)| match kind {
            0 => Op::Forward,
            1 => Op::Recompute,
            2 => Op::Backward,
            3 => Op::Send { pass, to: PartitionId(other) },
            _ => Op::Receive { pass, from: PartitionId(other) },
        });
        (0..partitions, op, 0..micro_batches).prop_map(|(partition, op, micro_batch)| Action {
            partition: PartitionId(partition),
            op,
            micro_batch: MicroBatchId(micro_batch),
        })
    }

    proptest! {
        #[test]
        fn text_round_trips(action in any_action(u32::MAX, u32::MAX)) {
            prop_assert_eq!(action.to_string().parse::<Action>(), Ok(action));
        }

        #[test]
        fn arbitrary_text_never_panics(text in ".*", near in "[0-9]{0,11}[FBRX]?[0-9]{0,3}[<>é]?[0-9]{0,2}") {
            let _ = text.parse::<Action>();
            let _ = near.parse::<Action>();
        }
    }

    #[test]
    fn what_is_not_an_action_is_refused() {
        for bad in [
            "",
            "F0",
            "0F",
            "0f0",
            "0F0>",
            "0F0=1",
            "0R0>1",
            "0F0>1x",
            "0F0 ",
            "+0F0",
            "4294967296F0",
            "é",
            "0é0",
            "0F0é1",
        ] {
            let error = bad.parse::<Action>().unwrap_err();
            assert!(error.to_string().contains(&format!("got `{bad}`")), "{error}");
        }
    }
}
