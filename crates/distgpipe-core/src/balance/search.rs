//! Rates cuts one after the other, and keeps the two best.

use super::{descent, Balance, BalanceError, Found, LayerCost, Method, PartitionError, Problem};
use crate::schedule::compiled_plan::{Clocks, CompiledPlan};
use crate::schedule::{Pass, Plan, Request};
use crate::PartitionId;
use std::cmp::Ordering;
use std::collections::HashMap;

/// The time to make and compile a plan, in instructions of it.
const PLAN_STEPS: u64 = 64;
/// The caller is asked whether to go on after this many instructions: every few milliseconds.
const ASK_STEPS: u64 = 1 << 18;

/// The first layer of every partition but the first.
pub(super) fn cuts_of(balance: &Balance) -> Vec<usize> {
    (1..balance.partitions()).map(|p| balance.range(PartitionId::new(p)).start).collect()
}

pub(super) fn balance_of(cuts: &[usize], layers: usize) -> Result<Balance, PartitionError> {
    let ends = cuts.iter().copied().chain([layers]);
    let starts = [0].into_iter().chain(cuts.iter().copied());
    Balance::new(ends.zip(starts).map(|(end, start)| end - start).collect())
}

/// The rating of a cut; smaller is better. The fields are compared in order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Score {
    /// How far layers that share a tensor are from being on one worker, so that the search can bring them there.
    pub apart: usize,
    /// Bytes above the limit, so that the search can improve cuts that do not fit.
    pub over_bytes: f64,
    pub objective: f64,
    /// The other objective, as a tie-breaker.
    pub other: f64,
}

impl Score {
    pub fn cmp(&self, other: &Self) -> Ordering {
        let by = |a: f64, b: f64| a.total_cmp(&b);
        (self.apart.cmp(&other.apart))
            .then_with(|| by(self.over_bytes, other.over_bytes))
            .then_with(|| by(self.objective, other.objective))
            .then_with(|| by(self.other, other.other))
    }

    pub fn beats(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Less
    }
}

/// Pairs of partitions, other than neighbours, that skips connect.
pub(super) type Edges = Vec<(PartitionId, PartitionId)>;

/// A plan with its compiled form.
pub(super) struct CandidatePlan {
    pub plan: Plan,
    pub compiled: CompiledPlan,
    /// By sending and receiving partition of the forward pass: the indices of the forward and the backward edge in the
    /// compiled plan.
    pub edge_at: HashMap<(PartitionId, PartitionId), (usize, usize)>,
}

/// Rates cuts, and keeps the plans and the two best cuts so far.
pub(super) struct Search<'a> {
    pub problem: &'a Problem,
    pub forward: Vec<f64>,
    pub backward: Vec<f64>,
    pub held: Vec<f64>,
    pub parameters: Vec<f64>,
    /// The plans so far. A plan depends on the cut only through the pairs of partitions that skips connect.
    pub plans: HashMap<Edges, CandidatePlan>,
    pub clocks: Clocks,
    best: Option<(Score, Vec<usize>)>,
    runner_up: Option<(Score, Vec<usize>)>,
    tried: usize,
    /// The work done so far in instructions, the work at which the caller was asked last, and the length of the longest
    /// plan.
    steps: u64,
    asked_at: u64,
    plan_steps: usize,
    /// Gets the number of cuts tried so far, and returns whether the search goes on.
    go_on: &'a mut dyn FnMut(usize) -> bool,
    /// Whether the caller, or a bound on the work, ended the search before it was complete.
    pub ended_early: bool,
}

impl<'a> Search<'a> {
    pub fn new(problem: &'a Problem, go_on: &'a mut dyn FnMut(usize) -> bool) -> Result<Self, BalanceError> {
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
            runner_up: None,
            tried: 0,
            steps: 0,
            asked_at: 0,
            plan_steps: 0,
            go_on,
            ended_early: false,
        };
        // So that an impossible schedule is an error before any cut is tried.
        search.plan(&Vec::new())?;
        Ok(search)
    }

    pub fn partitions(&self) -> usize {
        self.problem.placement.partitions()
    }

    pub fn layers(&self) -> usize {
        self.problem.layers.len()
    }

    /// The approximate work of rating a cut, in instructions.
    fn steps_a_cut(&self) -> u64 {
        let placed = self.problem.skips.len() + self.problem.together.iter().map(Vec::len).sum::<usize>();
        (self.plan_steps + 4 * placed + 8 * self.partitions()) as u64
    }

    /// The work of trying all of this many cuts, with at most this many plans, in instructions.
    pub fn exhaustive_work(&self, cuts: u64, plans: u64) -> u64 {
        let making = (PLAN_STEPS * self.plan_steps as u64).saturating_mul(plans);
        cuts.saturating_mul(self.steps_a_cut()).saturating_add(making)
    }

    /// Counts work other than the rating of cuts.
    pub fn count(&mut self, steps: u64) {
        self.steps = self.steps.saturating_add(steps);
    }

    /// The work done so far, in instructions.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Whether the search must end: more than `steps_max` instructions have been executed, or the caller says so.
    pub fn must_end(&mut self, steps_max: u64) -> bool {
        if self.steps - self.asked_at >= ASK_STEPS {
            self.asked_at = self.steps;
            self.ended_early |= !(self.go_on)(self.tried);
        }
        self.ended_early |= self.steps >= steps_max;
        self.ended_early
    }

    pub fn find(&mut self, method: Method) -> Result<Found, BalanceError> {
        let (layers, partitions) = (self.layers(), self.partitions());
        match method {
            Method::Exhaustive => self.exhaustive()?,
            Method::Descent => descent::descend(self)?,
        }
        let (score, cuts) = self.best.clone().expect("both methods try at least the even cut");
        let balance = balance_of(&cuts, layers)?;
        if score.apart > 0 {
            return Err(BalanceError::Apart { balance, tried: self.tried });
        }
        let estimate = self.estimate(&balance)?;
        if let Some(limit_bytes) = self.problem.memory_limit_bytes.filter(|_| score.over_bytes > 0.0) {
            let worst = estimate.workers.iter().max_by_key(|worker| worker.memory_bytes);
            let (worker, needs_bytes) =
                worst.map_or((String::new(), 0), |worker| (worker.name.clone(), worker.memory_bytes));
            return Err(BalanceError::OverLimit { limit_bytes, needs_bytes, worker, balance, tried: self.tried });
        }
        let even = Balance::even(layers, partitions)?;
        let even_estimate = self.estimate(&even)?;
        let runner_up = self.runner_up.take().filter(|(score, _)| score.apart == 0 && score.over_bytes == 0.0);
        Ok(Found {
            balance,
            estimate,
            even,
            even_estimate,
            method,
            tried: self.tried,
            runner_up: runner_up.map(|(_, cuts)| balance_of(&cuts, layers)).transpose()?,
            complete: !self.ended_early,
        })
    }

    fn exhaustive(&mut self) -> Result<(), BalanceError> {
        let (layers, count) = (self.layers(), self.partitions() - 1);
        let mut cuts: Vec<usize> = (1..=count).collect();
        loop {
            if self.must_end(u64::MAX) {
                // The result is never worse than the even cut.
                return self.score(&cuts_of(&Balance::even(layers, count + 1)?)).map(drop);
            }
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

    /// Rates a cut, and keeps it if it is one of the two best so far.
    pub fn score(&mut self, cuts: &[usize]) -> Result<Score, BalanceError> {
        let parts = self.parts(cuts)?;
        let score = parts.score;
        self.tried += 1;
        self.steps += self.steps_a_cut();
        let beats = |kept: &Option<(Score, Vec<usize>)>| kept.as_ref().is_none_or(|(kept, _)| score.beats(kept));
        if beats(&self.best) {
            self.runner_up = self.best.replace((score, cuts.to_vec()));
        } else if beats(&self.runner_up) && self.best.as_ref().is_none_or(|(_, best)| best != cuts) {
            self.runner_up = Some((score, cuts.to_vec()));
        }
        Ok(score)
    }

    pub fn plan(&mut self, edges: &Edges) -> Result<&CandidatePlan, BalanceError> {
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
pub(super) fn prefix_sums(costs: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut sum = 0.0;
    let mut sums = vec![sum];
    sums.extend(costs.map(|cost| {
        sum += cost;
        sum
    }));
    sums
}
