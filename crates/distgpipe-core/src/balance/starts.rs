//! Cuts from which the local search starts.
//!
//! A step takes about the time of the slowest partition for every micro-batch, plus once the way of the first
//! micro-batch through all links. Given a bound on the slowest partition, dynamic programming finds the cut whose links
//! cost least, in time linear in the layers. A few bounds, from the tightest possible to none, give starts from the
//! most even cut to the one with the least traffic. The same is done with memory instead of time.
//!
//! A skip is counted at every border that it crosses, although it is sent only once. That is good enough for a start.

use super::search::{cuts_of, prefix_sums, Search};
use super::{Balance, BalanceError, Objective};
use crate::PartitionId;
use std::collections::VecDeque;

/// Bounds on the largest partition, as multiples of the tightest possible bound.
const SLACKS: [f64; 11] = [1.0, 1.02, 1.05, 1.1, 1.2, 1.35, 1.6, 2.0, 3.0, 5.0, f64::INFINITY];

/// The costs of partitions and borders.
struct StartCosts {
    /// For each partition, prefix sums of its costs over the layers.
    partitions: Vec<Vec<f64>>,
    /// For each border, by the layer that it is in front of: the time for which it occupies the busier direction of its
    /// link.
    occupied: Vec<Vec<f64>>,
    /// Likewise: the time of both directions together.
    both_ways: Vec<Vec<f64>>,
}

/// Cuts that are good in different ways. Fewer, if they take more than `steps_max` instructions of work.
pub(super) fn starts(search: &mut Search<'_>, steps_max: u64) -> Result<Vec<Vec<usize>>, BalanceError> {
    let (layers, partitions) = (search.layers(), search.partitions());
    let placement = &search.problem.placement;
    let count = |p| placement.partitions_of(placement.worker_of(PartitionId::new(p))).len();
    // The fraction of its worker that a partition may use.
    let alone = vec![1.0; partitions];
    let shared: Vec<f64> = (0..partitions).map(|p| 1.0 / count(p) as f64).collect();
    let mut shares = vec![shared];
    if shares[0] != alone {
        shares.push(alone);
        // One of a worker's partitions is large, and its others are small.
        for large in (0..partitions).filter(|&p| count(p) > 1) {
            let share = |p: usize| match p {
                p if p == large => 0.9,
                p if count(p) == 1 => 1.0,
                p => 0.1 / (count(p) - 1) as f64,
            };
            shares.push((0..partitions).map(share).collect());
        }
    }
    let weighs_memory = search.problem.objective == Objective::Memory || search.problem.memory_limit_bytes.is_some();
    let mut starts = vec![cuts_of(&Balance::even(layers, partitions)?)];
    for share in &shares {
        let costs = time_costs(search, share);
        within_bounds(search, &costs, steps_max, &mut starts);
        if weighs_memory {
            let costs = memory_costs(search, share);
            within_bounds(search, &costs, steps_max, &mut starts);
        }
    }
    starts.sort();
    starts.dedup();
    Ok(starts)
}

fn time_costs(search: &Search<'_>, share: &[f64]) -> StartCosts {
    let both: Vec<f64> = search.forward.iter().zip(&search.backward).map(|(f, b)| f + b).collect();
    let partitions = share.iter().map(|share| both.iter().map(|sum| sum / share).collect()).collect();
    let (occupied, both_ways) = borders(search);
    StartCosts { partitions, occupied, both_ways }
}

fn memory_costs(search: &Search<'_>, share: &[f64]) -> StartCosts {
    let problem = search.problem;
    let moments = search.plans.values().next().map(|plan| plan.compiled.moments()).unwrap_or_default();
    let live = |p: usize| {
        let own = moments.iter().flatten().flatten().filter(|held| held.partition.index() == p);
        f64::from(own.map(|held| held.kept + held.recomputed).max().unwrap_or(0))
    };
    let partition = |p: usize| {
        let (live, share) = (live(p), share[p]);
        let bytes = problem
            .layers
            .iter()
            .map(|layer| layer.parameter_bytes as f64 * (2.0 + problem.state_factor) + live * layer.held_bytes as f64);
        prefix_sums(bytes.map(|bytes| bytes / share))
    };
    let (occupied, both_ways) = borders(search);
    let free = occupied.iter().map(|border| vec![0.0; border.len()]).collect();
    StartCosts { partitions: (0..share.len()).map(partition).collect(), occupied: free, both_ways }
}

/// The cost of each border in front of each layer: the busier direction, and both directions together.
fn borders(search: &Search<'_>) -> (Vec<Vec<f64>>, Vec<Vec<f64>>) {
    let (problem, layers) = (search.problem, search.layers());
    let crossing = |sizes: &super::Sizes| -> Vec<f64> {
        let mut bytes = vec![0.0; layers];
        for (cut, bytes) in bytes.iter_mut().enumerate().skip(1) {
            *bytes = sizes.outputs[cut - 1] as f64;
        }
        for (skip, &size) in problem.skips.iter().zip(&sizes.skips) {
            bytes[skip.stash + 1..=skip.pop].iter_mut().for_each(|bytes| *bytes += size as f64);
        }
        bytes
    };
    let (forward, backward) = (crossing(&problem.sent.forward), crossing(&problem.sent.backward));
    let border = |p: usize| {
        let (from, to) = (PartitionId::new(p), PartitionId::new(p + 1));
        let link = problem.link.filter(|_| problem.placement.worker_of(from) != problem.placement.worker_of(to));
        let Some(link) = link else { return (vec![0.0; layers], vec![0.0; layers]) };
        let busier = forward.iter().zip(&backward).map(|(f, b)| f.max(*b) / link.bytes_per_s);
        let both = forward.iter().zip(&backward).map(|(f, b)| (f + b) / link.bytes_per_s + 2.0 * link.latency_s);
        (busier.collect(), both.collect())
    };
    (0..search.partitions() - 1).map(border).unzip()
}

/// Adds, for each bound from the tightest possible on, the cut within it whose borders cost least.
fn within_bounds(search: &mut Search<'_>, costs: &StartCosts, steps_max: u64, starts: &mut Vec<Vec<usize>>) {
    let steps = (search.layers() * search.partitions()) as u64;
    let mut cheapest_within = |bound: f64| {
        search.count(steps);
        if search.must_end(steps_max) {
            return None;
        }
        cheapest_within(costs, bound)
    };
    let most = |all: &[Vec<f64>]| all.iter().flatten().copied().fold(0.0, f64::max);
    let (mut low, mut high) = (0.0, most(&costs.partitions) + most(&costs.occupied));
    // Fifty halvings exhaust the precision of the sums.
    for _ in 0..50 {
        let middle = low + (high - low) / 2.0;
        match cheapest_within(middle) {
            Some(_) => high = middle,
            None => low = middle,
        }
    }
    // Differences of prefix sums have rounding errors, so even the tightest bound needs some tolerance.
    starts.extend(SLACKS.iter().filter_map(|slack| cheapest_within(high * slack * (1.0 + 1e-9))));
}

/// Among the cuts whose partitions and borders all stay within a bound, the one whose borders cost least in total.
///
/// Legend: `best[j]` is the least total cost of the borders when the first j layers form p + 1 partitions. The last of
/// these starts at some layer i. Its earliest possible start only grows with j, so one monotonic queue of candidates,
/// the cheapest in front, serves all j.
fn cheapest_within(costs: &StartCosts, bound: f64) -> Option<Vec<usize>> {
    let layers = costs.partitions[0].len() - 1;
    let fits = |p: usize, i: usize, j: usize| {
        let sums: &[f64] = &costs.partitions[p];
        sums[j] - sums[i] <= bound
    };
    let mut best: Vec<f64> = (0..=layers).map(|j| if j > 0 && fits(0, 0, j) { 0.0 } else { f64::INFINITY }).collect();
    let mut choices = Vec::new();
    for p in 1..costs.partitions.len() {
        let (occupied, both_ways) = (&costs.occupied[p - 1], &costs.both_ways[p - 1]);
        let mut next = vec![f64::INFINITY; layers + 1];
        let mut chosen = vec![0; layers + 1];
        let mut queue: VecDeque<(usize, f64)> = VecDeque::new();
        for j in 1..=layers {
            let i = j - 1;
            if i > 0 && best[i].is_finite() && occupied[i] <= bound {
                let cost = best[i] + both_ways[i];
                while queue.back().is_some_and(|&(_, other)| other >= cost) {
                    queue.pop_back();
                }
                queue.push_back((i, cost));
            }
            while queue.front().is_some_and(|&(i, _)| !fits(p, i, j)) {
                queue.pop_front();
            }
            if let Some(&(i, cost)) = queue.front() {
                (next[j], chosen[j]) = (cost, i);
            }
        }
        best = next;
        choices.push(chosen);
    }
    if !best[layers].is_finite() {
        return None;
    }
    let mut end = layers;
    let mut cuts: Vec<usize> = choices
        .iter()
        .rev()
        .map(|chosen| {
            end = chosen[end];
            end
        })
        .collect();
    cuts.reverse();
    Some(cuts)
}
