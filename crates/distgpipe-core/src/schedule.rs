//! Schedules: the order of every action of every worker, as data.
//!
//! A schedule decides one thing: the order in which each worker computes. `lower` adds the messages and recomputations
//! that this order needs. The result is a [`Plan`], which can be printed, parsed, [`check`](check())ed,
//! [`simulate`](simulate())d and drawn without running anything. The runtime only executes it.
//!
//! | schedule | order | paper |
//! | --- | --- | --- |
//! | [`Schedule::GPipe`] | all forwards, then all backwards, newest micro-batch first | Huang et al., arXiv:1811.06965 |
//! | [`Schedule::OneFOneB`] | a backward as soon as one is ready; at most n − p micro-batches in flight on partition p of n | Narayanan et al., arXiv:1806.03377 |
//! | [`Schedule::Interleaved`] | 1F1B over several partitions per worker, in groups of micro-batches | Narayanan et al., arXiv:2104.04473 |
//!
//! Every schedule works with every placement: `client,server,client`, all partitions on one worker, or workers in any
//! order. Skip connections only add messages. They never change the order, because the chain of neighbouring partitions
//! constrains it more than they do.
//!
//! **To add a schedule:** write one file in `schedule/` with a function of the type `Order`, and give it a variant of
//! [`Schedule`], a line in [`Schedule::ALL`], one in [`Schedule::plan`] and a word in `words!` below.
//! `tests/schedules.rs` then tests it with every placement.

mod action;
mod check;
pub(crate) mod compiled_plan;
mod gpipe;
mod interleaved;
mod list;
mod lower;
mod one_f_one_b;
mod plan;
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

/// Why a plan cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// The request has zero micro-batches.
    #[error("expected at least 1 micro-batch, got 0: use 1 to run the batch in one piece")]
    NoMicroBatches,
    /// A skip edge does not go from a partition to a later one.
    #[error("expected skip edges from a partition to a later one below {partitions}, got {from}>{to}: derive them from the model's skip layout")]
    BadSkip {
        /// The partition where the edge starts.
        from: PartitionId,
        /// The partition where it ends.
        to: PartitionId,
        /// The number of partitions.
        partitions: usize,
    },
    /// No partition would have a backward pass.
    #[error("expected fewer frozen partitions than the {partitions} of the plan, got {got}: the last partition computes the loss and always has a backward pass")]
    AllFrozen {
        /// The number of frozen partitions.
        got: usize,
        /// The number of partitions.
        partitions: usize,
    },
    /// The plan would exceed the limits on the size of plans.
    #[error("expected a plan of at most {max} {what}, got {got}: use fewer micro-batches or partitions")]
    TooLarge {
        /// The quantity that is too large.
        what: &'static str,
        /// The limit on that quantity.
        max: usize,
        /// The value that the request needs.
        got: usize,
    },
    /// A word is not one of the choices.
    #[error("expected one of {expected} as {what}, got `{got}`")]
    UnknownWord {
        /// What the word names.
        what: &'static str,
        /// The words to choose from.
        expected: &'static str,
        /// The beginning of the word.
        got: String,
    },
}

/// Which micro-batches drop their activations after the forward and recompute them before the backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Recompute {
    /// No micro-batch: the fastest choice, with the most memory.
    #[default]
    Never,
    /// Every micro-batch but the last. GPipe runs the backward of the last one right after its forward, so dropping its
    /// activations would save nothing.
    ExceptLast,
    /// Every micro-batch: the least memory.
    Always,
}

/// Whether a plan trains or only evaluates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Runs forwards and backwards.
    Train,
    /// Runs the forwards only.
    Evaluate,
}

/// The schedules that make plans for training.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Schedule {
    /// All forwards, then all backwards, newest micro-batch first.
    #[default]
    #[serde(rename = "gpipe")]
    GPipe,
    /// One forward, one backward: the bubble of GPipe with far fewer activations in memory.
    #[serde(rename = "1f1b")]
    OneFOneB,
    /// 1F1B over several partitions per worker: a smaller bubble for more messages.
    #[serde(rename = "interleaved")]
    Interleaved,
}

/// What a plan is made from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Which worker runs which partition.
    pub placement: Placement,
    /// The number of micro-batches per batch.
    pub micro_batches: usize,
    /// Which micro-batches are recomputed. Plans for evaluation ignore it.
    pub recompute: Recompute,
    /// The pairs of partitions that skip tensors go between. Pairs of neighbours are allowed and have no effect: their
    /// skips travel with the activation.
    pub skips: Vec<(PartitionId, PartitionId)>,
    /// The number of partitions at the front, fewer than all, that have nothing to train. They run forwards only, and
    /// receive no gradients. Plans for evaluation ignore it.
    pub frozen: usize,
}

impl Request {
    /// A request without recomputation, skips or frozen partitions.
    pub fn new(placement: Placement, micro_batches: usize) -> Self {
        Self { placement, micro_batches, recompute: Recompute::Never, skips: Vec::new(), frozen: 0 }
    }
}

/// The input of a schedule: what the order of the work may depend on.
struct OrderInput<'a> {
    placement: &'a Placement,
    micro_batches: usize,
}

/// Returns the forwards and backwards of every worker in order. Every schedule is one such function. Its orders must be
/// free of deadlock when every worker waits for its inputs.
type Order = fn(&OrderInput<'_>) -> Vec<Vec<Action>>;

impl Schedule {
    /// Every schedule, in the order of the table above.
    pub const ALL: [Self; 3] = [Self::GPipe, Self::OneFOneB, Self::Interleaved];

    /// Makes the plan of one training step.
    pub fn plan(&self, request: &Request) -> Result<Plan, ScheduleError> {
        let order: Order = match self {
            Self::GPipe => gpipe::order,
            Self::OneFOneB => one_f_one_b::order,
            Self::Interleaved => interleaved::order,
        };
        plan(request, Mode::Train, order)
    }
}

/// Makes the plan of one evaluation step: forwards only, in the order that fills the pipeline.
pub fn evaluate_plan(request: &Request) -> Result<Plan, ScheduleError> {
    plan(request, Mode::Evaluate, gpipe::forward_order)
}

fn plan(request: &Request, mode: Mode, order: Order) -> Result<Plan, ScheduleError> {
    let (recompute, frozen) = match mode {
        Mode::Train => (request.recompute, request.frozen),
        Mode::Evaluate => (Recompute::Never, 0),
    };
    let empty = Plan::empty(request.placement.clone(), request.micro_batches, mode, &request.skips)?;
    let empty = empty.with_frozen(frozen)?;
    let mut order = order(&OrderInput { placement: &request.placement, micro_batches: request.micro_batches });
    // An order stays free of deadlock without these backwards, because only backwards of earlier partitions, which are
    // frozen too, depend on them.
    order.iter_mut().for_each(|actions| actions.retain(|action| empty.computes(action)));
    Ok(lower::lower(empty, order, recompute))
}

/// Implements `Display` and `FromStr` for an enum whose variants are words.
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
