//! The best cut when links, memory and the schedule count too.
//!
//! A pipeline is as fast as its slowest partition, which is all there is to say where links are free and every partition
//! has a worker of its own. Over a slow link a cut at a narrow place is worth an uneven one, and a client with the first
//! and the last partition pays for both. So a cut is judged here by what a step would take with it, simulated, or by
//! what its fullest worker would hold.
//!
//! Where all cuts can be tried, they are. Otherwise (`starts`) a dynamic programme gives cuts to begin from, and
//! (`descent`) each of them is improved by moving its borders for as long as that helps.
//!
//! What is not counted: the time of coding, the headers of messages, and memory that lives within one layer's backward.

mod descent;
mod estimate;
mod starts;

pub use estimate::{Estimate, PartitionEstimate, WorkerEstimate};

use crate::partition::{Balance, PartitionError};
use crate::placement::Placement;
use crate::schedule::rehearse::{Clocks, Rehearsal, StepCosts};
use crate::schedule::{CheckError, Pass, Plan, Recompute, Request, Schedule, ScheduleError};
use crate::PartitionId;
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::str::FromStr;

/// The most steps of rehearsals for which all cuts are tried: less than a second.
const EXHAUSTIVE_STEPS_MAX: u64 = 1 << 25;
/// Making a plan, in steps of its rehearsal.
const PLAN_STEPS: u64 = 64;

/// Why there is no cut.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BalanceError {
    /// The layers cannot be cut so, or a cost is none.
    #[error(transparent)]
    Partition(#[from] PartitionError),
    /// There is no plan to judge cuts by.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// A plan that cannot be simulated.
    #[error(transparent)]
    Check(#[from] CheckError),
    /// Sizes that are not those of the layers and skips.
    #[error("expected {expected} {what}, got {got}: make the sizes from the model that is cut")]
    Sizes {
        /// What is counted.
        what: &'static str,
        /// How many there should be.
        expected: usize,
        /// How many there are.
        got: usize,
    },
    /// A skip that ends before it starts, or beyond the model.
    #[error(
        "expected skips from a layer to a later one below {layers}, got {stash}>{pop}: derive them from the model"
    )]
    BadSkip {
        /// The layer that stashes it.
        stash: usize,
        /// The layer that pops it.
        pop: usize,
        /// Layers of the model.
        layers: usize,
    },
    /// A link that carries nothing, or takes forever.
    #[error("expected a link of more than 0 bytes a second and a latency of at least 0, got {bytes_per_s} bytes a second and {latency_s} s: leave the link out if it costs nothing")]
    BadLink {
        /// Its rate.
        bytes_per_s: f64,
        /// Its latency.
        latency_s: f64,
    },
    /// Every cut needs more memory than is allowed.
    #[error("expected a cut with which no worker needs more than {limit_bytes} bytes, got none: the best of {tried} ({balance}) needs {needs_bytes} bytes on worker {worker}; allow that much, or use more workers, smaller micro-batches or recomputation")]
    OverLimit {
        /// What is allowed.
        limit_bytes: u64,
        /// What the fullest worker of the best cut needs.
        needs_bytes: u64,
        /// That worker.
        worker: String,
        /// That cut.
        balance: Balance,
        /// How many cuts were tried.
        tried: usize,
    },
}

/// What one layer costs for one micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerCost {
    /// Forward pass.
    pub forward_s: f64,
    /// Backward pass.
    pub backward_s: f64,
    /// What its forward pass holds for the backward pass, its output included.
    pub held_bytes: u64,
    /// Its learned tensors.
    pub parameter_bytes: u64,
}

/// A skip tensor: the layer that stashes it and the later one that pops it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SkipSpan {
    /// Where it starts.
    pub stash: usize,
    /// Where it ends.
    pub pop: usize,
}

/// How large tensors are, for one micro-batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// The output of each layer.
    pub outputs: Vec<u64>,
    /// Each skip, in the order of [`Problem::skips`].
    pub skips: Vec<u64>,
}

/// How large tensors are on a link, after its codec.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Activations.
    pub forward: Sizes,
    /// Gradients.
    pub backward: Sizes,
    /// Other sizes for what one partition sends another, where that has a codec of its own.
    pub links: BTreeMap<(PartitionId, PartitionId, Pass), Sizes>,
}

/// What carries messages between two workers, in each direction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// How much it carries.
    pub bytes_per_s: f64,
    /// How long the last byte is on its way.
    pub latency_s: f64,
}

/// What a cut should make small.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Objective {
    /// The simulated time of a step.
    #[default]
    Time,
    /// The estimated memory of the fullest worker.
    Memory,
}

/// Everything a cut is judged by.
#[derive(Clone, Debug)]
pub struct Problem {
    /// From input to output.
    pub layers: Vec<LayerCost>,
    /// The skips.
    pub skips: Vec<SkipSpan>,
    /// The model's input.
    pub input_bytes: u64,
    /// Tensors as they lie in memory.
    pub in_memory: Sizes,
    /// Tensors as they travel.
    pub sent: Sent,
    /// Bytes that the optimizer keeps for each byte of parameters.
    pub state_factor: f64,
    /// Which worker runs which partition; says into how many the model is cut.
    pub placement: Placement,
    /// The order of the work.
    pub schedule: Schedule,
    /// Micro-batches per batch.
    pub micro_batches: usize,
    /// Which of them are computed again.
    pub recompute: Recompute,
    /// What is between any two workers; absent where that costs nothing.
    pub link: Option<Link>,
    /// What to make small.
    pub objective: Objective,
    /// The most that any worker may hold.
    pub memory_limit_bytes: Option<u64>,
}

/// How cuts are looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Every cut is tried.
    Exhaustive,
    /// From several starts, borders are moved for as long as that helps.
    Descent,
}

/// The best cut that was found.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// The cut.
    pub balance: Balance,
    /// What it costs.
    pub estimate: Estimate,
    /// The cut with as many layers each.
    pub even: Balance,
    /// What that costs.
    pub even_estimate: Estimate,
    /// How it was found.
    pub method: Method,
    /// How many cuts were tried.
    pub tried: usize,
}

impl Problem {
    /// The best cut: among all if they can be tried quickly, otherwise the best of a descent.
    pub fn search(&self) -> Result<Found, BalanceError> {
        let mut search = Search::new(self)?;
        let cuts = cut_count(self.layers.len(), self.placement.partitions());
        let making = (PLAN_STEPS * search.plan_steps as u64).saturating_mul(self.plan_count_max(cuts));
        let work = cuts.saturating_mul(search.steps_a_cut()).saturating_add(making);
        search.find(if work <= EXHAUSTIVE_STEPS_MAX { Method::Exhaustive } else { Method::Descent })
    }

    /// The best cut by one method, whatever that takes.
    pub fn search_by(&self, method: Method) -> Result<Found, BalanceError> {
        Search::new(self)?.find(method)
    }

    /// How many plans so many cuts need at most: one for each set of pairs, beyond neighbours, that skips can connect.
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

/// How many cuts there are: `layers − 1` over `partitions − 1`.
fn cut_count(layers: usize, partitions: usize) -> u64 {
    let (places, cuts) = (layers as u64 - 1, partitions as u64 - 1);
    let mut count = 1u64;
    for i in 0..cuts.min(places - cuts) {
        // Divides without rest at every step.
        match count.checked_mul(places - i) {
            Some(product) => count = product / (i + 1),
            None => return u64::MAX,
        }
    }
    count
}

/// Where partitions begin, but for the first.
fn cuts_of(balance: &Balance) -> Vec<usize> {
    (1..balance.partitions()).map(|p| balance.range(PartitionId::new(p)).start).collect()
}

fn balance_of(cuts: &[usize], layers: usize) -> Result<Balance, PartitionError> {
    let ends = cuts.iter().copied().chain([layers]);
    let starts = [0].into_iter().chain(cuts.iter().copied());
    Balance::new(ends.zip(starts).map(|(end, start)| end - start).collect())
}

/// How good a cut is; smaller is better, the first difference counts.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Score {
    /// Bytes above the limit: cuts that do not fit still differ in how far they are off.
    over_bytes: f64,
    objective: f64,
    /// The other objective, among equals.
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

/// Partition pairs beyond neighbours that skips go between.
type Edges = Vec<(PartitionId, PartitionId)>;

/// A plan, and where each message's size is looked up.
struct Rehearsed {
    plan: Plan,
    rehearsal: Rehearsal,
    /// By sending and receiving partition of the forward pass: the numbers of the forward and the backward edge.
    edge_at: HashMap<(PartitionId, PartitionId), (usize, usize)>,
}

/// Judges cuts; remembers the plans and the best.
struct Search<'a> {
    problem: &'a Problem,
    forward: Vec<f64>,
    backward: Vec<f64>,
    held: Vec<f64>,
    parameters: Vec<f64>,
    /// A plan depends on the cut only through the pairs that skips connect.
    plans: HashMap<Edges, Rehearsed>,
    clocks: Clocks,
    best: Option<(Score, Vec<usize>)>,
    tried: usize,
    /// How much work has been done, and the longest plan so far.
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
        // Made here once, so that an impossible schedule is an error before anything is tried.
        search.plan(&Vec::new())?;
        Ok(search)
    }

    fn partitions(&self) -> usize {
        self.problem.placement.partitions()
    }

    fn layers(&self) -> usize {
        self.problem.layers.len()
    }

    /// About how much work it is to judge a cut.
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
            // The next one in order: the last border that can still move does, those after it follow closely.
            let Some(i) = (0..count).rev().find(|&i| cuts[i] < layers - count + i) else {
                return Ok(());
            };
            cuts[i] += 1;
            for j in i + 1..count {
                cuts[j] = cuts[j - 1] + 1;
            }
        }
    }

    /// Judges a cut, and keeps it if it is the best so far.
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

    fn plan(&mut self, edges: &Edges) -> Result<&Rehearsed, BalanceError> {
        if !self.plans.contains_key(edges) {
            let problem = self.problem;
            let request = Request {
                placement: problem.placement.clone(),
                micro_batches: problem.micro_batches,
                recompute: problem.recompute,
                skips: edges.clone(),
            };
            let plan = problem.schedule.plan(&request)?;
            let rehearsal = Rehearsal::new(&plan)?;
            self.plan_steps = self.plan_steps.max(rehearsal.len());
            self.steps += PLAN_STEPS * rehearsal.len() as u64;
            let number = |edge| rehearsal.edges().iter().position(|&other| other == edge);
            let ends = rehearsal.edges().iter().filter(|(_, _, pass)| *pass == Pass::Forward);
            let edge_at = ends
                .filter_map(|&(from, to, _)| {
                    Some(((from, to), (number((from, to, Pass::Forward))?, number((to, from, Pass::Backward))?)))
                })
                .collect();
            self.plans.insert(edges.clone(), Rehearsed { plan, rehearsal, edge_at });
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
