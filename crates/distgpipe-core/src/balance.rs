//! Finds the best cut of a model, given the costs of layers, links, memory and the schedule.
//!
//! If links cost nothing and every partition has its own worker, a pipeline is as fast as its slowest partition. Over a
//! slow link it pays to cut where little data crosses, even if the partitions become uneven; and a client that runs the
//! first and the last partition pays for both. So the search rates a cut by the simulated time of a step, or by the
//! memory of the worker that needs most.
//!
//! If there are few cuts, all are tried. Otherwise dynamic programming gives cuts to start from (`starts`), and local
//! search improves each of them by moving its borders (`descent`). A search does a bounded amount of work, and its
//! caller can end it earlier.
//!
//! Costs that are measured have errors. [`Comparison`] decides whether repeated measurements show which of two cuts is
//! faster.
//!
//! A parameter that several layers share counts in each of them. Not counted: the time that codecs take, the headers of messages, and memory that is used only within one layer's
//! backward pass.

mod comparison;
mod descent;
mod estimate;
mod search;
mod starts;

pub use comparison::{Comparison, Verdict, EQUAL_WITHIN, SIGNIFICANCE};
pub use estimate::{Estimate, PartitionEstimate, WorkerEstimate};

use crate::partition::{Balance, PartitionError};
use crate::placement::Placement;
use crate::schedule::{CheckError, Pass, Recompute, Schedule, ScheduleError};
use crate::PartitionId;
use search::Search;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// Up to this many instructions of compiled plans, all cuts are tried: less than a second.
const EXHAUSTIVE_STEPS_MAX: u64 = 1 << 25;

/// Why the search returns no cut.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BalanceError {
    /// The model cannot be cut into this many partitions, or a cost is not a finite number of at least 0.
    #[error(transparent)]
    Partition(#[from] PartitionError),
    /// The schedule has no plan for this problem.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// The plan cannot be simulated.
    #[error(transparent)]
    Check(#[from] CheckError),
    /// The number of sizes or partitions differs from that of the problem.
    #[error("expected {expected} {what}, got {got}: make the sizes and the cut from the model and the placement of the problem")]
    Sizes {
        /// The list that has the wrong length.
        what: &'static str,
        /// The length that it should have.
        expected: usize,
        /// The length that it has.
        got: usize,
    },
    /// A skip ends before it starts, or beyond the model.
    #[error(
        "expected skips from a layer to a later one below {layers}, got {stash}>{pop}: derive them from the model"
    )]
    BadSkip {
        /// The layer that stashes the skip.
        stash: usize,
        /// The layer that pops the skip.
        pop: usize,
        /// The number of layers of the model.
        layers: usize,
    },
    /// The rate or the latency of the link is not possible.
    #[error("expected a link of more than 0 bytes a second and a latency of at least 0, got {bytes_per_s} bytes a second and {latency_s} s: leave the link out if it costs nothing")]
    BadLink {
        /// The rate of the link.
        bytes_per_s: f64,
        /// The latency of the link.
        latency_s: f64,
    },
    /// No cut that was tried has layers that share a tensor on one worker.
    #[error("expected a cut with which layers that share a tensor are on one worker, got none in {tried}: place the partitions of these layers on one worker")]
    Apart {
        /// The best cut that was found.
        balance: Balance,
        /// The number of cuts that were tried.
        tried: usize,
    },
    /// Every cut that was tried needs more memory than the limit.
    #[error("expected a cut with which no worker needs more than {limit_bytes} bytes, got none: the best of {tried} ({balance}) needs {needs_bytes} bytes on worker {worker}; allow that much, or use more workers, smaller micro-batches or recomputation")]
    OverLimit {
        /// The limit for any worker.
        limit_bytes: u64,
        /// The memory of the worker that needs most with the best cut.
        needs_bytes: u64,
        /// The name of that worker.
        worker: String,
        /// The best cut that was found.
        balance: Balance,
        /// The number of cuts that were tried.
        tried: usize,
    },
}

/// The costs of one layer for one micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerCost {
    /// Seconds for the forward pass.
    pub forward_s: f64,
    /// Seconds for the backward pass.
    pub backward_s: f64,
    /// Bytes that the forward pass keeps for the backward pass, including the layer's output.
    pub held_bytes: u64,
    /// Bytes of the layer's parameters.
    pub parameter_bytes: u64,
}

/// A skip tensor: the layer that stashes it and the later one that pops it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SkipSpan {
    /// The index of the layer that stashes it.
    pub stash: usize,
    /// The index of the layer that pops it.
    pub pop: usize,
}

/// The sizes of tensors in bytes, for one micro-batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// The output of each layer.
    pub outputs: Vec<u64>,
    /// Each skip, in the order of [`Problem::skips`].
    pub skips: Vec<u64>,
}

/// The sizes of tensors on links, after encoding.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// The sizes of activations.
    pub forward: Sizes,
    /// The sizes of gradients.
    pub backward: Sizes,
    /// Sizes for a link with its own codec, by sending partition, receiving partition and pass.
    pub links: BTreeMap<(PartitionId, PartitionId, Pass), Sizes>,
}

/// The link between two workers, with these figures in each direction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// The bandwidth in bytes per second.
    pub bytes_per_s: f64,
    /// The time from sending a byte to its arrival.
    pub latency_s: f64,
}

/// What the search minimizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Objective {
    /// The simulated time of a step.
    #[default]
    Time,
    /// The estimated memory of the worker that needs most.
    Memory,
}

/// Everything that the costs of a cut depend on.
#[derive(Clone, Debug)]
pub struct Problem {
    /// The costs of the layers, from input to output.
    pub layers: Vec<LayerCost>,
    /// The skip connections of the model.
    pub skips: Vec<SkipSpan>,
    /// Groups of layers that must be on one worker, because they share a tensor.
    pub together: Vec<Vec<usize>>,
    /// Bytes of the model's input for one micro-batch.
    pub input_bytes: u64,
    /// The sizes of tensors in memory.
    pub in_memory: Sizes,
    /// The sizes of tensors on links.
    pub sent: Sent,
    /// Bytes that the optimizer keeps for each byte of parameters.
    pub state_factor: f64,
    /// Which worker runs which partition, and thereby the number of partitions.
    pub placement: Placement,
    /// The schedule that orders the work.
    pub schedule: Schedule,
    /// The number of micro-batches per batch.
    pub micro_batches: usize,
    /// Which micro-batches are recomputed.
    pub recompute: Recompute,
    /// The link between any two workers; `None` if communication costs nothing.
    pub link: Option<Link>,
    /// What the search minimizes.
    pub objective: Objective,
    /// The most memory that any worker may use.
    pub memory_limit_bytes: Option<u64>,
}

/// How the search goes through the cuts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Tries every possible cut.
    Exhaustive,
    /// Local search from several starts: moves borders as long as that improves the cut.
    Descent,
}

/// The result of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// The best cut that was found.
    pub balance: Balance,
    /// The estimated costs of that cut.
    pub estimate: Estimate,
    /// The cut with the same number of layers in each partition.
    pub even: Balance,
    /// The estimated costs of the even cut, for comparison.
    pub even_estimate: Estimate,
    /// The method that was used.
    pub method: Method,
    /// The number of cuts that were tried.
    pub tried: usize,
    /// The second best of the cuts that were tried, if it keeps to the memory limit.
    pub runner_up: Option<Balance>,
    /// Whether the method ran to its end. If not, `balance` is the best cut found until then.
    pub complete: bool,
}

impl Problem {
    /// The best of all cuts if they can be tried within about a second, otherwise the best that local search finds.
    pub fn search(&self) -> Result<Found, BalanceError> {
        self.search_while(&mut |_| true)
    }

    /// The same, but ends when `go_on` returns false. It is called every few milliseconds with the number of cuts that
    /// have been tried.
    pub fn search_while(&self, go_on: &mut dyn FnMut(usize) -> bool) -> Result<Found, BalanceError> {
        let mut search = Search::new(self, go_on)?;
        let cuts = cut_count(self.layers.len(), self.placement.partitions());
        let work = search.exhaustive_work(cuts, self.plan_count_max(cuts));
        search.find(if cuts == 1 || work <= EXHAUSTIVE_STEPS_MAX { Method::Exhaustive } else { Method::Descent })
    }

    /// The best cut by the given method, however long that takes.
    pub fn search_by(&self, method: Method) -> Result<Found, BalanceError> {
        Search::new(self, &mut |_| true)?.find(method)
    }

    /// The estimated costs of one cut, which must have as many partitions as the placement.
    pub fn estimate(&self, balance: &Balance) -> Result<Estimate, BalanceError> {
        balance.check(self.layers.len())?;
        let (expected, got) = (self.placement.partitions(), balance.partitions());
        if expected != got {
            return Err(BalanceError::Sizes { what: "partitions", expected, got });
        }
        Search::new(self, &mut |_| true)?.estimate(balance)
    }

    /// An upper bound on the number of plans for this many cuts. A plan depends on which pairs of partitions, other
    /// than neighbours, skips connect.
    fn plan_count_max(&self, cuts: u64) -> u64 {
        let partitions = self.placement.partitions();
        match (partitions * (partitions - 1) / 2).saturating_sub(partitions - 1) {
            _ if self.skips.is_empty() => 1,
            pairs if pairs < 64 => cuts.min(1 << pairs),
            _ => cuts,
        }
    }

    fn check(&self) -> Result<(), BalanceError> {
        let (layers, partitions) = (self.layers.len(), self.placement.partitions());
        Balance::even(layers, partitions)?;
        for (layer, cost) in self.layers.iter().enumerate() {
            for got in [cost.forward_s, cost.backward_s] {
                if !(got.is_finite() && got >= 0.0) {
                    return Err(PartitionError::BadCost { layer, got }.into());
                }
            }
        }
        let sent = [&self.in_memory, &self.sent.forward, &self.sent.backward];
        for sizes in sent.into_iter().chain(self.sent.links.values()) {
            let counts = [
                ("sizes of outputs", layers, sizes.outputs.len()),
                ("sizes of skips", self.skips.len(), sizes.skips.len()),
            ];
            for (what, expected, got) in counts {
                if expected != got {
                    return Err(BalanceError::Sizes { what, expected, got });
                }
            }
        }
        if let Some(&SkipSpan { stash, pop }) =
            self.skips.iter().find(|skip| skip.stash >= skip.pop || skip.pop >= layers)
        {
            return Err(BalanceError::BadSkip { stash, pop, layers });
        }
        if let Some(&got) = self.together.iter().flatten().find(|&&layer| layer >= layers) {
            return Err(BalanceError::Sizes { what: "layers", expected: got + 1, got: layers });
        }
        match self.link {
            Some(Link { bytes_per_s, latency_s })
                if !(bytes_per_s.is_finite() && bytes_per_s > 0.0 && latency_s.is_finite() && latency_s >= 0.0) =>
            {
                Err(BalanceError::BadLink { bytes_per_s, latency_s })
            }
            _ => Ok(()),
        }
    }
}

/// The number of cuts: the binomial coefficient `layers − 1` over `partitions − 1`.
fn cut_count(layers: usize, partitions: usize) -> u64 {
    let (places, cuts) = (layers as u64 - 1, partitions as u64 - 1);
    let mut count = 1u64;
    for i in 0..cuts.min(places - cuts) {
        // The division is exact at every step.
        match count.checked_mul(places - i) {
            Some(product) => count = product / (i + 1),
            None => return u64::MAX,
        }
    }
    count
}

impl fmt::Display for Objective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Time => "time",
            Self::Memory => "memory",
        })
    }
}

impl FromStr for Objective {
    type Err = ScheduleError;

    fn from_str(text: &str) -> Result<Self, ScheduleError> {
        match text {
            "time" => Ok(Self::Time),
            "memory" => Ok(Self::Memory),
            _ => Err(ScheduleError::UnknownWord {
                what: "objective",
                expected: "`time`, `memory`",
                got: text.chars().take(40).collect(),
            }),
        }
    }
}
