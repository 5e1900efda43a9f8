//! The order of every action of every worker: generated, checked, simulated, drawn.
//!
//! A schedule is data (law 2 of the design). A member of the family decides one thing, in which order
//! each worker computes; `lower` adds the messages and recomputations that this order needs; the
//! result is a [`Plan`] that prints, parses, and can be [`check`]ed, [`simulate`]d and drawn without
//! running anything. The runtime only executes it.
//!
//! | member | order | paper |
//! | --- | --- | --- |
//! | [`Schedule::GPipe`] | all forwards, then all backwards, newest micro-batch first | Huang et al., arXiv:1811.06965 |
//! | [`Schedule::OneFOneB`] | a backward as soon as there is one; at most n − p micro-batches in flight on partition p of n | Narayanan et al., arXiv:1806.03377 |
//! | [`Schedule::Interleaved`] | 1F1B over several partitions per worker, in groups of micro-batches | Narayanan et al., arXiv:2104.04473 |
//!
//! Every member takes every placement: `client,server,client`, all on one worker, or workers in any
//! order. Skip connections never change the order, since a chain of neighbours already says more;
//! they only add messages.

mod action;
mod check;
mod gpipe;
mod interleaved;
mod list;
mod lower;
mod one_f_one_b;
mod plan;
#[path = "schedule/compiled_plan.rs"]
pub(crate) mod rehearse;
mod render;
mod simulate;
mod svg;
mod text;
mod walk;

pub use action::{Action, ActionParseError, Op, Pass};
pub use check::{check, CheckError, Excerpt, Stuck};
pub use plan::{Plan, ACTIONS_MAX, CELLS_MAX, PARTITIONS_MAX};
pub use simulate::{simulate, Costs, Event, LinkCost, Simulation, WorkerUse};
pub use text::PlanParseError;

use crate::placement::Placement;
use crate::PartitionId;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// Zero micro-batches were asked for.
    #[error("expected at least 1 micro-batch, got 0: use 1 to run the batch in one piece")]
    NoMicroBatches,
    /// A skip edge that does not go forward between two partitions.
    #[error("expected skip edges from a partition to a later one below {partitions}, got {from}>{to}: derive them from the model's skip layout")]
    BadSkip {
        /// Where the edge starts.
        from: PartitionId,
        /// Where it ends.
        to: PartitionId,
        /// Number of partitions.
        partitions: usize,
    },
    /// The plan would be larger than the limits that its readers rely on.
    #[error("expected a plan of at most {max} {what}, got {got}: use fewer micro-batches or partitions")]
    TooLarge {
        /// What there is too much of.
        what: &'static str,
        /// The limit.
        max: usize,
        /// What was asked for.
        got: usize,
    },
    /// A name that none of the choices has.
    #[error("expected one of {expected} as {what}, got `{got}`")]
    UnknownWord {
        /// What is being named.
        what: &'static str,
        /// The choices.
        expected: &'static str,
        /// The word, shortened if it is long.
        got: String,
    },
}

/// Which micro-batches drop their activations after the forward and compute them again before the
/// backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Recompute {
    /// None: fastest, most memory.
    #[default]
    Never,
    /// Every micro-batch but the last. GPipe runs the last one's backward first, so its activations
    /// are needed at once and dropping them would gain nothing.
    ExceptLast,
    /// All: least memory.
    Always,
}

/// Whether a plan trains or only evaluates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Forwards and backwards.
    Train,
    /// Forwards only.
    Evaluate,
}

/// The family of schedules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Schedule {
    /// All forwards, then all backwards, newest micro-batch first.
    #[default]
    #[serde(rename = "gpipe")]
    GPipe,
    /// One forward, one backward: the same bubble as GPipe with far fewer activations alive.
    #[serde(rename = "1f1b")]
    OneFOneB,
    /// 1F1B over several partitions per worker: a smaller bubble for more messages.
    #[serde(rename = "interleaved")]
    Interleaved,
}

/// What a plan is made for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Which worker runs which partition.
    pub placement: Placement,
    /// Micro-batches per batch.
    pub micro_batches: usize,
    /// Which micro-batches are recomputed. Evaluation ignores it.
    pub recompute: Recompute,
    /// Partition pairs that skip tensors travel between. Neighbours may be among them: what goes
    /// between neighbours travels with the activation anyway.
    pub skips: Vec<(PartitionId, PartitionId)>,
}

impl Request {
    /// A request without recomputation or skips.
    pub fn new(placement: Placement, micro_batches: usize) -> Self {
        Self { placement, micro_batches, recompute: Recompute::Never, skips: Vec::new() }
    }
}

/// What a schedule sees: enough to order the work, and no more.
struct Shape<'a> {
    placement: &'a Placement,
    micro_batches: usize,
}

/// For every worker its forwards and backwards in order. Every member of the family is one such
/// function; its orders must be free of deadlock when every worker waits for what it needs.
type Order = fn(&Shape<'_>) -> Vec<Vec<Action>>;

impl Schedule {
    /// Every member.
    pub const ALL: [Self; 3] = [Self::GPipe, Self::OneFOneB, Self::Interleaved];

    /// The plan of one training step.
    pub fn plan(&self, request: &Request) -> Result<Plan, ScheduleError> {
        let order: Order = match self {
            Self::GPipe => gpipe::order,
            Self::OneFOneB => one_f_one_b::order,
            Self::Interleaved => interleaved::order,
        };
        plan(request, Mode::Train, order)
    }
}

/// The plan of one evaluation step: forwards only, in the order that fills the pipeline.
pub fn evaluate_plan(request: &Request) -> Result<Plan, ScheduleError> {
    plan(request, Mode::Evaluate, gpipe::forward_order)
}

fn plan(request: &Request, mode: Mode, order: Order) -> Result<Plan, ScheduleError> {
    let recompute = match mode {
        Mode::Train => request.recompute,
        Mode::Evaluate => Recompute::Never,
    };
    let empty = Plan::empty(request.placement.clone(), request.micro_batches, mode, &request.skips)?;
    let order = order(&Shape { placement: &request.placement, micro_batches: request.micro_batches });
    Ok(lower::lower(empty, order, recompute))
}

/// `Display` and `FromStr` of an enum whose members are words.
macro_rules! words {
    ($type:ident, $what:literal, $expected:literal, $($word:literal => $member:ident),+) => {
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(match self { $(Self::$member => $word),+ })
            }
        }

        impl FromStr for $type {
            type Err = ScheduleError;

            fn from_str(text: &str) -> Result<Self, ScheduleError> {
                match text {
                    $($word => Ok(Self::$member),)+
                    _ => Err(ScheduleError::UnknownWord {
                        what: $what,
                        expected: $expected,
                        got: text.chars().take(40).collect(),
                    }),
                }
            }
        }
    };
}

words!(Recompute, "recomputation", "`never`, `except-last`, `always`",
    "never" => Never, "except-last" => ExceptLast, "always" => Always);
words!(Mode, "mode", "`train`, `evaluate`", "train" => Train, "evaluate" => Evaluate);
words!(Schedule, "schedule", "`gpipe`, `1f1b`, `interleaved`",
    "gpipe" => GPipe, "1f1b" => OneFOneB, "interleaved" => Interleaved);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_round_trip_and_equal_their_serde_form() {
        fn same<T>(value: T)
        where
            T: fmt::Display + FromStr<Err = ScheduleError> + Serialize + PartialEq + fmt::Debug,
        {
            assert_eq!(value.to_string().parse::<T>().as_ref(), Ok(&value));
            assert_eq!(serde_json::to_string(&value).unwrap(), format!("\"{value}\""));
        }
        Schedule::ALL.into_iter().for_each(same);
        [Recompute::Never, Recompute::ExceptLast, Recompute::Always].into_iter().for_each(same);
        [Mode::Train, Mode::Evaluate].into_iter().for_each(same);
        let error = "zb".parse::<Schedule>().unwrap_err();
        assert_eq!(error.to_string(), "expected one of `gpipe`, `1f1b`, `interleaved` as schedule, got `zb`");
    }

    #[test]
    fn impossible_requests_are_refused() {
        let placement = Placement::one_worker_each(3);
        let plan = |micro_batches, skips: &[(u32, u32)]| {
            let skips = skips.iter().map(|&(from, to)| (PartitionId(from), PartitionId(to))).collect();
            let request = Request { skips, ..Request::new(placement.clone(), micro_batches) };
            Schedule::GPipe.plan(&request)
        };
        assert_eq!(plan(0, &[]).unwrap_err(), ScheduleError::NoMicroBatches);
        for skip in [(0, 3), (2, 0), (1, 1)] {
            assert!(matches!(plan(1, &[skip]).unwrap_err(), ScheduleError::BadSkip { partitions: 3, .. }));
        }
        assert!(matches!(plan(usize::MAX, &[]).unwrap_err(), ScheduleError::TooLarge { .. }));
        let skips = plan(1, &[(0, 2), (0, 1), (0, 2)]).unwrap().skips().to_vec();
        assert_eq!(skips, [(PartitionId(0), PartitionId(2))]);
    }
}
