//! Finds the best cut of a model, given the costs of layers, links, memory and the schedule.
//!
//! If links cost nothing and every partition has its own worker, a pipeline is as fast as its slowest partition. Over a
//! slow link it pays to cut where little data crosses, even if the partitions become uneven; and a client that runs the
//! first and the last partition pays for both. So the search rates a cut by the simulated time of a step, or by the
//! memory of the worker that needs most.
//!
//! If there are few cuts, all are tried. Otherwise dynamic programming gives cuts to start from (`starts`), and local
//! search improves each of them by moving its borders (`descent`).
//!
//! Not counted: the time that codecs take, the headers of messages, and memory that is used only within one layer's
//! backward pass.

mod descent;
mod estimate;
mod starts;

pub use estimate::{Estimate, PartitionEstimate, WorkerEstimate};

use crate::partition::{Balance, PartitionError};
use crate::placement::Placement;
use crate::schedule::compiled_plan::{Clocks, CompiledPlan, StepCosts};
use crate::schedule::{CheckError, Pass, Plan, Recompute, Request, Schedule, ScheduleError};
use crate::PartitionId;
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::str::FromStr;

/// Up to this many instructions of compiled plans, all cuts are tried: less than a second.
const EXHAUSTIVE_STEPS_MAX: u64 = 1 << 25;
/// The time to make and compile a plan, in instructions of it.
const PLAN_STEPS: u64 = 64;

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
    /// The number of sizes differs from the number of layers or skips.
    #[error("expected {expected} {what}, got {got}: make the sizes from the model that is cut")]
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
}

impl Problem {
    /// The best of all cuts if they can be tried within about a second, otherwise the best that local search finds.
    pub fn search(&self) -> Result<Found, BalanceError> {
        let mut search = Search::new(self)?;
        let cuts = cut_count(self.layers.len(), self.placement.partitions());
        let making = (PLAN_STEPS * search.plan_steps as u64).saturating_mul(self.plan_count_max(cuts));
        let work = cuts.saturating_mul(search.steps_a_cut()).saturating_add(making);
        search.find(if work <= EXHAUSTIVE_STEPS_MAX { Method::Exhaustive } else { Method::Descent })
    }

    /// The best cut by the given method, however long that takes.
    pub fn search_by(&self, method: Method) -> Result<Found, BalanceError> {
        Search::new(self)?.find(method)
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

/// The first layer of every partition but the first.
fn cuts_of(balance: &Balance) -> Vec<usize> {
    (1..balance.partitions()).map(|p| balance.range(PartitionId::new(p)).start).collect()
}

fn balance_of(cuts: &[usize], layers: usize) -> Result<Balance, PartitionError> {
    let ends = cuts.iter().copied().chain([layers]);
    let starts = [0].into_iter().chain(cuts.iter().copied());
    Balance::new(ends.zip(starts).map(|(end, start)| end - start).collect())
}

/// The rating of a cut; smaller is better. The fields are compared in order.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Score {
    /// Bytes above the limit, so that the search can improve cuts that do not fit.
    over_bytes: f64,
    objective: f64,
    /// The other objective, as a tie-breaker.
    other: f64,
}

impl Score {
    fn cmp(&self, other: &Self) -> Ordering {
        let by = |a: f64, b: f64| a.total_cmp(&b);
        by(self.over_bytes, other.over_bytes)
            .then_with(|| by(self.objective, other.objective))
            .then_with(|| by(self.other, other.other))
    }

    fn beats(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Less
    }
}

/// Pairs of partitions, other than neighbours, that skips connect.
type Edges = Vec<(PartitionId, PartitionId)>;

/// A plan with its compiled form.
struct CandidatePlan {
    plan: Plan,
    compiled: CompiledPlan,
    /// By sending and receiving partition of the forward pass: the indices of the forward and the backward edge in the
    /// compiled plan.
    edge_at: HashMap<(PartitionId, PartitionId), (usize, usize)>,
}

/// Rates cuts, and keeps the plans and the best cut so far.
struct Search<'a> {
    problem: &'a Problem,
    forward: Vec<f64>,
    backward: Vec<f64>,
    held: Vec<f64>,
    parameters: Vec<f64>,
    /// The plans so far. A plan depends on the cut only through the pairs of partitions that skips connect.
    plans: HashMap<Edges, CandidatePlan>,
    clocks: Clocks,
    best: Option<(Score, Vec<usize>)>,
    tried: usize,
    /// The work done so far in instructions, and the length of the longest plan.
    steps: u64,
    plan_steps: usize,
}

impl<'a> Search<'a> {
    fn new(problem: &'a Problem) -> Result<Self, BalanceError> {
        problem.check()?;
        let sums = |cost: fn(&LayerCost) -> f64| prefix_sums(problem.layers.iter().map(cost));
        let mut search = Search {
            problem,
            forward: sums(|layer| layer.forward_s),
            backward: sums(|layer| layer.backward_s),
            held: sums(|layer| layer.held_bytes as f64),
            parameters: sums(|layer| layer.parameter_bytes as f64),
            plans: HashMap::new(),
            clocks: Clocks::default(),
            best: None,
            tried: 0,
            steps: 0,
            plan_steps: 0,
        };
        // So that an impossible schedule is an error before any cut is tried.
        search.plan(&Vec::new())?;
        Ok(search)
    }

    fn partitions(&self) -> usize {
        self.problem.placement.partitions()
    }

    fn layers(&self) -> usize {
        self.problem.layers.len()
    }

    /// The approximate work of rating a cut, in instructions.
    fn steps_a_cut(&self) -> u64 {
        (self.plan_steps + 4 * self.problem.skips.len() + 8 * self.partitions()) as u64
    }

    fn find(&mut self, method: Method) -> Result<Found, BalanceError> {
        let (layers, partitions) = (self.layers(), self.partitions());
        match method {
            Method::Exhaustive => self.exhaustive()?,
            Method::Descent => descent::descend(self)?,
        }
        let (score, cuts) = self.best.clone().expect("both methods try at least the even cut");
        let balance = balance_of(&cuts, layers)?;
        let estimate = self.estimate(&balance)?;
        if let Some(limit_bytes) = self.problem.memory_limit_bytes.filter(|_| score.over_bytes > 0.0) {
            let worst = estimate.workers.iter().max_by_key(|worker| worker.memory_bytes);
            let (worker, needs_bytes) =
                worst.map_or((String::new(), 0), |worker| (worker.name.clone(), worker.memory_bytes));
            return Err(BalanceError::OverLimit { limit_bytes, needs_bytes, worker, balance, tried: self.tried });
        }
        let even = Balance::even(layers, partitions)?;
        let even_estimate = self.estimate(&even)?;
        Ok(Found { balance, estimate, even, even_estimate, method, tried: self.tried })
    }

    fn exhaustive(&mut self) -> Result<(), BalanceError> {
        let (layers, count) = (self.layers(), self.partitions() - 1);
        let mut cuts: Vec<usize> = (1..=count).collect();
        loop {
            self.score(&cuts)?;
            // The next cut in lexicographic order: the last border that can still move does, and those after it follow
            // closely.
            let Some(i) = (0..count).rev().find(|&i| cuts[i] < layers - count + i) else {
                return Ok(());
            };
            cuts[i] += 1;
            for j in i + 1..count {
                cuts[j] = cuts[j - 1] + 1;
            }
        }
    }

    /// Rates a cut, and keeps it if it is the best so far.
    fn score(&mut self, cuts: &[usize]) -> Result<Score, BalanceError> {
        let parts = self.parts(cuts)?;
        let score = parts.score;
        self.tried += 1;
        self.steps += self.steps_a_cut();
        if self.best.as_ref().is_none_or(|(best, _)| score.beats(best)) {
            self.best = Some((score, cuts.to_vec()));
        }
        Ok(score)
    }

    fn plan(&mut self, edges: &Edges) -> Result<&CandidatePlan, BalanceError> {
        if !self.plans.contains_key(edges) {
            let problem = self.problem;
            let request = Request {
                placement: problem.placement.clone(),
                micro_batches: problem.micro_batches,
                recompute: problem.recompute,
                skips: edges.clone(),
                frozen: 0,
            };
            let plan = problem.schedule.plan(&request)?;
            let compiled = CompiledPlan::new(&plan)?;
            self.plan_steps = self.plan_steps.max(compiled.len());
            self.steps += PLAN_STEPS * compiled.len() as u64;
            let number = |edge| compiled.edges().iter().position(|&other| other == edge);
            let ends = compiled.edges().iter().filter(|(_, _, pass)| *pass == Pass::Forward);
            let edge_at = ends
                .filter_map(|&(from, to, _)| {
                    Some(((from, to), (number((from, to, Pass::Forward))?, number((to, from, Pass::Backward))?)))
                })
                .collect();
            self.plans.insert(edges.clone(), CandidatePlan { plan, compiled, edge_at });
        }
        Ok(&self.plans[edges])
    }
}

/// `sums[j] - sums[i]` is the cost of layers `i..j`.
fn prefix_sums(costs: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut sum = 0.0;
    let mut sums = vec![sum];
    sums.extend(costs.map(|cost| {
        sum += cost;
        sum
    }));
    sums
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
