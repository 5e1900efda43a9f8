//! The search for the best cut, compared with an exhaustive reference.
//!
//! The reference is independent of the search: it lists all cuts by recursion, makes the skip layout and the plan of
//! each, simulates it, and counts its memory along the plan's actions.

use distgpipe_core::balance::{
    BalanceError, LayerCost, Link, Method, Objective, Problem, Sent, Sizes, SkipSpan, WorkerEstimate,
};
use distgpipe_core::partition::{Balance, PartitionError};
use distgpipe_core::placement::Placement;
use distgpipe_core::schedule::{simulate, Costs, LinkCost, Op, Pass, Plan, Recompute, Request, Schedule};
use distgpipe_core::skip::{SkipLayout, SkipUse};
use distgpipe_core::{PartitionId, WorkerId};
use proptest::prelude::*;
use serde::Deserialize;

/// The costs of a cut, by the reference.
#[derive(Clone, Debug)]
struct Truth {
    balance: Balance,
    step_s: f64,
    memory: Vec<u64>,
}

impl Truth {
    fn of(problem: &Problem, balance: Balance) -> Self {
        let layout = layout(problem, &balance);
        let request = Request {
            placement: problem.placement.clone(),
            micro_batches: problem.micro_batches,
            recompute: problem.recompute,
            skips: layout.edges(),
            frozen: 0,
        };
        let plan = problem.schedule.plan(&request).unwrap();
        let step_s = simulate(&plan, &costs(problem, &balance, &layout)).unwrap().makespan;
        let memory = plan.placement().worker_ids().map(|worker| held(problem, &balance, &layout, &plan, worker));
        Truth { step_s, memory: memory.collect(), balance }
    }

    fn objective(&self, problem: &Problem) -> f64 {
        match problem.objective {
            Objective::Time => self.step_s,
            Objective::Memory => *self.memory.iter().max().unwrap() as f64,
        }
    }

    fn fits(&self, problem: &Problem) -> bool {
        problem.memory_limit_bytes.is_none_or(|limit| self.memory.iter().all(|&bytes| bytes <= limit))
    }
}

fn layout(problem: &Problem, balance: &Balance) -> SkipLayout {
    let mut uses = vec![SkipUse::default(); problem.layers.len()];
    for (i, skip) in problem.skips.iter().enumerate() {
        // Zero-padded, so that names sort by number.
        uses[skip.stash].stash.push(format!("{i:03}"));
        uses[skip.pop].pop.push(format!("{i:03}"));
    }
    SkipLayout::new(&uses, balance).unwrap()
}

fn costs(problem: &Problem, balance: &Balance, layout: &SkipLayout) -> Costs {
    let sum = |cost: fn(&LayerCost) -> f64| {
        let partition = |p| problem.layers[balance.range(PartitionId::new(p))].iter().map(cost).sum::<f64>();
        (0..balance.partitions()).map(partition).collect::<Vec<f64>>()
    };
    let mut costs = Costs::new(sum(|l| l.forward_s), sum(|l| l.backward_s));
    let Some(link) = problem.link else { return costs };
    for from in 0..balance.partitions() {
        for to in from + 1..balance.partitions() {
            let (from, to) = (PartitionId::new(from), PartitionId::new(to));
            for (key, others) in [
                ((from, to, Pass::Forward), &problem.sent.forward),
                ((to, from, Pass::Backward), &problem.sent.backward),
            ] {
                let sizes = problem.sent.links.get(&key).unwrap_or(others);
                let mut bytes = if to.0 == from.0 + 1 { sizes.outputs[balance.range(to).start - 1] } else { 0 };
                for portal in layout.portals().iter().filter(|portal| (portal.from, portal.to) == (from, to)) {
                    bytes += sizes.skips[portal.name.parse::<usize>().unwrap()];
                }
                let transfer = bytes as f64 / link.bytes_per_s;
                costs.links.insert(key, LinkCost { latency: link.latency_s, transfer });
            }
        }
    }
    costs
}

/// The peak memory of a worker, action by action.
fn held(problem: &Problem, balance: &Balance, layout: &SkipLayout, plan: &Plan, worker: WorkerId) -> u64 {
    let placement = &problem.placement;
    let (mut now, mut most) = (0i64, 0i64);
    for partition in placement.partitions_of(worker) {
        let parameters: u64 = problem.layers[balance.range(partition)].iter().map(|l| l.parameter_bytes).sum();
        now += (parameters as f64 * (2.0 + problem.state_factor)) as i64;
    }
    let graph = |p: PartitionId| problem.layers[balance.range(p)].iter().map(|l| l.held_bytes as i64).sum::<i64>();
    let input = |p: PartitionId, own_too: bool| {
        let counts = |from: PartitionId| own_too || placement.worker_of(from) != worker;
        let before = p.0.checked_sub(1).map(PartitionId);
        let mut bytes = match before {
            None => problem.input_bytes,
            Some(before) if counts(before) => problem.in_memory.outputs[balance.range(p).start - 1],
            Some(_) => 0,
        };
        for portal in layout.incoming(p).into_iter().filter(|portal| counts(portal.from)) {
            bytes += problem.in_memory.skips[portal.name.parse::<usize>().unwrap()];
        }
        bytes as i64
    };
    for action in plan.actions(worker) {
        let p = action.partition;
        let again = plan.recomputes(p, action.micro_batch);
        now += match action.op {
            Op::Forward if again => input(p, true),
            Op::Forward => graph(p) + input(p, false),
            Op::Recompute => graph(p),
            Op::Backward if again => -graph(p) - input(p, true),
            Op::Backward => -graph(p) - input(p, false),
            Op::Send { .. } | Op::Receive { .. } => 0,
        };
        most = most.max(now);
    }
    most as u64
}

fn all_balances(layers: usize, partitions: usize) -> Vec<Vec<usize>> {
    if partitions == 1 {
        return vec![vec![layers]];
    }
    let first = 1..=layers - (partitions - 1);
    first
        .flat_map(|size| {
            all_balances(layers - size, partitions - 1).into_iter().map(move |rest| [vec![size], rest].concat())
        })
        .collect()
}

/// The best of all cuts within the memory limit.
fn brute_force(problem: &Problem) -> Option<Truth> {
    let all = all_balances(problem.layers.len(), problem.placement.partitions()).into_iter();
    let all = all.map(|sizes| Truth::of(problem, Balance::new(sizes).unwrap())).filter(|truth| truth.fits(problem));
    all.min_by(|a, b| a.objective(problem).total_cmp(&b.objective(problem)))
}

/// Checks that the search's estimate of its cut is that of the reference.
fn judged(problem: &Problem, method: Method) -> Result<Truth, BalanceError> {
    let found = problem.search_by(method)?;
    let truth = Truth::of(problem, found.balance.clone());
    assert!((found.estimate.step_s - truth.step_s).abs() <= 1e-9 * truth.step_s, "{found:?} {truth:?}");
    let memory: Vec<u64> = found.estimate.workers.iter().map(|worker: &WorkerEstimate| worker.memory_bytes).collect();
    let near = |(a, b): (&u64, &u64)| a.abs_diff(*b) <= 2;
    assert!(memory.iter().zip(&truth.memory).all(near), "{memory:?} {truth:?}");
    Ok(truth)
}

fn any_problem() -> impl Strategy<Value = Problem> {
    problems(4..13, "a,b a,b,c client,server,client a,a,b a,b,c,d a,b,a,b a,b,b,a a,b,c,a")
}

/// Enough layers that borders do not try every position, and few enough partitions that all cuts can be tried.
fn long_problem() -> impl Strategy<Value = Problem> {
    problems(130..220, "a,b,c client,server,client")
}

fn problems(layers: std::ops::Range<usize>, places: &str) -> impl Strategy<Value = Problem> {
    let places: Vec<String> = places.split(' ').map(str::to_owned).collect();
    let layer = (0.0f64..1.0, 0.0f64..2.0, 0u64..2000, 0u64..2000, 0u64..5000, 0u64..5000);
    let layers = prop::collection::vec(layer, layers);
    let skips = prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0u64..5000), 0..3);
    let link = prop::option::of((prop::sample::select(vec![500.0, 5000.0, 50_000.0]), 0.0f64..0.5));
    let how = (
        prop::sample::select(places),
        prop::sample::select(Schedule::ALL.to_vec()),
        1usize..7,
        prop::sample::select(vec![Recompute::Never, Recompute::ExceptLast, Recompute::Always]),
        any::<bool>(),
        prop::option::of(0.0f64..1.0),
    );
    (layers, skips, link, how).prop_map(
        |(layers, skips, link, (place, schedule, micro_batches, recompute, time, limit))| {
            let count = layers.len();
            let spans = skips.iter().map(|(a, b, _)| (a.index(count), b.index(count)));
            let spans =
                spans.map(|(a, b)| if a < b { (a, b) } else { (b.min(count - 2), a.max(b.min(count - 2) + 1)) });
            let outputs: Vec<u64> = layers.iter().map(|layer| layer.4).collect();
            let forward = Sizes { outputs, skips: skips.iter().map(|skip| skip.2).collect() };
            let backward = Sizes { outputs: layers.iter().map(|layer| layer.5).collect(), ..forward.clone() };
            let half = Sizes {
                outputs: forward.outputs.iter().map(|bytes| bytes / 2).collect(),
                skips: forward.skips.iter().map(|bytes| bytes / 4).collect(),
            };
            let first = (PartitionId(0), PartitionId(1), Pass::Forward);
            let mut problem = Problem {
                layers: layers
                    .iter()
                    .map(|&(forward_s, backward_s, held_bytes, parameter_bytes, ..)| LayerCost {
                        forward_s,
                        backward_s,
                        held_bytes,
                        parameter_bytes,
                    })
                    .collect(),
                skips: spans.map(|(stash, pop)| SkipSpan { stash, pop }).collect(),
                together: Vec::new(),
                input_bytes: 700,
                in_memory: forward.clone(),
                sent: Sent { forward, backward, links: [(first, half)].into() },
                state_factor: 1.0,
                placement: place.parse::<Placement>().unwrap(),
                schedule,
                micro_batches,
                recompute,
                link: link.map(|(bytes_per_s, latency_s)| Link { bytes_per_s, latency_s }),
                objective: if time { Objective::Time } else { Objective::Memory },
                memory_limit_bytes: None,
            };
            // Between what the best cut needs and twice that, so that some cuts fit and others do not.
            if let Some(room) = limit.filter(|_| time) {
                let by_memory = Problem { objective: Objective::Memory, ..problem.clone() };
                let least = by_memory.search_by(Method::Exhaustive).unwrap().estimate.memory_bytes();
                problem.memory_limit_bytes = Some(least + (room * least as f64) as u64 + 1);
            }
            problem
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn trying_all_cuts_finds_what_brute_force_does(problem in any_problem()) {
        let best = brute_force(&problem).unwrap();
        let found = judged(&problem, Method::Exhaustive).unwrap();
        prop_assert!(found.fits(&problem));
        prop_assert!(found.objective(&problem) <= best.objective(&problem) * (1.0 + 1e-9), "{:?} {:?}", found, best);
    }

    #[test]
    fn the_descent_is_within_a_twentieth_of_the_best(problem in any_problem()) {
        let best = brute_force(&problem).unwrap();
        let found = judged(&problem, Method::Descent).unwrap();
        prop_assert!(found.fits(&problem));
        prop_assert!(found.objective(&problem) <= best.objective(&problem) * 1.05, "{:?} {:?}", found, best);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// The exhaustive search agrees with the reference (see above) and is fast enough here.
    #[test]
    fn the_descent_is_within_a_twentieth_of_the_best_of_long_models(problem in long_problem()) {
        let best = judged(&problem, Method::Exhaustive).unwrap();
        let found = judged(&problem, Method::Descent).unwrap();
        prop_assert!(found.fits(&problem));
        prop_assert!(found.objective(&problem) <= best.objective(&problem) * 1.05, "{:?} {:?}", found, best);
    }
}

/// Reads measured costs in the form that `distgpipe models NAME --profile --json` prints.
#[derive(Deserialize)]
struct Measured {
    rows: u64,
    input: Vec<Vec<u64>>,
    layers: Vec<MeasuredLayer>,
}

#[derive(Deserialize)]
struct MeasuredLayer {
    output: Vec<Vec<u64>>,
    parameters: u64,
    forward_s: f64,
    backward_s: f64,
    held_bytes: u64,
}

fn measured(text: &str) -> Problem {
    let measured: Measured = serde_json::from_str(text).unwrap();
    let bytes =
        |shapes: &Vec<Vec<u64>>| shapes.iter().map(|dims| 4 * measured.rows * dims.iter().product::<u64>()).sum();
    let sizes =
        Sizes { outputs: measured.layers.iter().map(|layer| bytes(&layer.output)).collect(), skips: Vec::new() };
    let layer = |layer: &MeasuredLayer| LayerCost {
        forward_s: layer.forward_s,
        backward_s: layer.backward_s,
        held_bytes: layer.held_bytes,
        parameter_bytes: 4 * layer.parameters,
    };
    Problem {
        layers: measured.layers.iter().map(layer).collect(),
        skips: Vec::new(),
        together: Vec::new(),
        input_bytes: bytes(&measured.input),
        in_memory: sizes.clone(),
        sent: Sent { forward: sizes.clone(), backward: sizes, ..Sent::default() },
        state_factor: 1.0,
        placement: Placement::one_worker_each(2),
        schedule: Schedule::OneFOneB,
        micro_batches: 4,
        recompute: Recompute::Never,
        link: None,
        objective: Objective::Time,
        memory_limit_bytes: None,
    }
}

/// Compares both methods with all cuts, for every link and placement, by time and by memory.
fn holds_for(text: &str) {
    let model = measured(text);
    for link in [None, Some(125e6), Some(12.5e6)] {
        let link = link.map(|bytes_per_s| Link { bytes_per_s, latency_s: 1e-3 });
        for place in ["w0,w1", "w0,w1,w2", "client,server,client", "w0,w1,w2,w3"] {
            for objective in [Objective::Time, Objective::Memory] {
                // Links do not affect memory.
                if objective == Objective::Memory && link.is_some() {
                    continue;
                }
                let problem = Problem { link, placement: place.parse().unwrap(), objective, ..model.clone() };
                let best = brute_force(&problem).unwrap();
                let case = format!("{place} {link:?} {objective:?}: best {}", best.balance);
                for method in [Method::Exhaustive, Method::Descent] {
                    let found = judged(&problem, method).unwrap();
                    let ratio = found.objective(&problem) / best.objective(&problem);
                    let most = if method == Method::Exhaustive { 1.0 + 1e-9 } else { 1.05 };
                    assert!(ratio <= most, "{case}, {method:?} {} is {ratio} of it", found.balance);
                }
            }
        }
    }
}

#[test]
fn mobilenet_v2_is_cut_within_a_twentieth_of_the_best() {
    holds_for(include_str!("balance/mobilenet_v2.json"));
}

#[test]
fn resnet_101_is_cut_within_a_twentieth_of_the_best() {
    holds_for(include_str!("balance/resnet101.json"));
}

/// Twenty layers of a millisecond each, with a small output after the third.
fn waisted() -> Problem {
    let mut problem = measured(include_str!("balance/mobilenet_v2.json"));
    problem.layers.iter_mut().for_each(|layer| {
        *layer = LayerCost { forward_s: 1e-3, backward_s: 1e-3, held_bytes: 1 << 20, parameter_bytes: 1 << 10 };
    });
    for sizes in [&mut problem.sent.forward, &mut problem.sent.backward] {
        sizes.outputs = vec![1 << 20; 20];
        sizes.outputs[2] = 1 << 10;
    }
    problem
}

#[test]
fn a_slow_link_is_cut_where_it_is_narrow() {
    let even = waisted().search().unwrap();
    assert_eq!(even.balance.to_string(), "10,10");
    let link = Some(Link { bytes_per_s: 1e6, latency_s: 0.0 });
    let narrow = Problem { link, ..waisted() }.search().unwrap();
    assert_eq!(narrow.balance.to_string(), "3,17");
    let first = &narrow.estimate.partitions[0];
    assert_eq!((first.forward_bytes, first.backward_bytes), (1 << 10, 0));
    assert!(narrow.estimate.step_s < narrow.even_estimate.step_s);
    // A client with both ends pays for both: together they take as long as the server's part.
    let placement: Placement = "client,server,client".parse().unwrap();
    let split = Problem { placement, ..waisted() }.search().unwrap();
    assert_eq!(split.balance.sizes()[1], 10, "{}", split.balance);
}

/// Each layer's output is used again seven layers later, so skips connect different partitions in almost every cut,
/// which then needs its own plan.
fn entangled(workers: usize, micro_batches: usize) -> Problem {
    let mut problem = waisted();
    problem.skips = (0..13).map(|stash| SkipSpan { stash, pop: stash + 7 }).collect();
    for sizes in [&mut problem.in_memory, &mut problem.sent.forward, &mut problem.sent.backward] {
        sizes.skips = vec![1 << 10; 13];
    }
    let placement = Placement::one_worker_each(workers);
    Problem { placement, micro_batches, ..problem }
}

/// Regression: with skips, most of the work is making plans, which was not counted.
#[test]
fn all_cuts_are_tried_only_if_their_plans_are_soon_made() {
    let many_plans = entangled(6, 32);
    assert_eq!(many_plans.search().unwrap().method, Method::Descent);
    assert_eq!(Problem { micro_batches: 1, ..many_plans }.search().unwrap().method, Method::Exhaustive);
    let one_plan = Problem { placement: Placement::one_worker_each(6), micro_batches: 32, ..waisted() };
    assert_eq!(one_plan.search().unwrap().method, Method::Exhaustive);
}

/// Regression: every one of some seventy starts was rated, however long that took.
#[test]
fn a_descent_whose_time_is_spent_scores_no_more_starts() {
    let found = entangled(12, 1000).search_by(Method::Descent).unwrap();
    assert!((2..40).contains(&found.tried), "{}", found.tried);
    assert!(found.estimate.step_s <= found.even_estimate.step_s);
}

/// Layers that share a tensor, such as the two ends of a language model.
#[test]
fn layers_that_share_a_tensor_stay_on_one_worker() {
    let sharing = |together: &[usize], place: &str| Problem {
        together: vec![together.to_vec()],
        placement: place.parse().unwrap(),
        ..waisted()
    };
    for method in [Method::Exhaustive, Method::Descent] {
        let cut = |problem: Problem| problem.search_by(method).map(|found| found.balance.to_string());
        assert_eq!(cut(sharing(&[0, 19], "a,b,a")), cut(sharing(&[], "a,b,a")), "the ends are on one worker anyway");
        // Free, the cut is 10,10.
        assert_eq!(cut(sharing(&[5, 9, 12], "a,b")).unwrap(), "13,7");
        assert_eq!(cut(sharing(&[8, 16], "a,b")).unwrap(), "8,12");
        let error = sharing(&[0, 19], "a,b").search_by(method).unwrap_err();
        assert!(matches!(error, BalanceError::Apart { .. }), "{error}");
        assert!(error.to_string().contains("place the partitions of these layers on one worker"), "{error}");
    }
    let beyond = sharing(&[0, 20], "a,b").search().unwrap_err();
    assert!(matches!(beyond, BalanceError::Sizes { .. }), "{beyond}");
}

#[test]
fn a_limit_that_no_cut_meets_says_what_the_best_needs() {
    let by_memory = Problem { objective: Objective::Memory, ..waisted() };
    let least = by_memory.search().unwrap().estimate;
    let limit = |limit| Problem { memory_limit_bytes: Some(limit), ..waisted() };
    assert_eq!(limit(least.memory_bytes()).search().unwrap().estimate.memory_bytes(), least.memory_bytes());
    for method in [Method::Exhaustive, Method::Descent] {
        let error = limit(least.memory_bytes() - 1).search_by(method).unwrap_err();
        assert!(matches!(&error, BalanceError::OverLimit { needs_bytes, .. } if *needs_bytes == least.memory_bytes()));
        assert!(error.to_string().contains("allow that much"), "{error}");
    }
}

#[test]
fn what_does_not_fit_together_is_refused() {
    let refused = |change: fn(&mut Problem)| {
        let mut problem = waisted();
        change(&mut problem);
        problem.search().unwrap_err()
    };
    assert!(matches!(refused(|p| p.layers.truncate(1)), BalanceError::Partition(_)));
    for cost in [f64::NAN, -1.0, f64::INFINITY] {
        let mut problem = waisted();
        problem.layers[3].forward_s = cost;
        let error = problem.search().unwrap_err();
        assert!(matches!(error, BalanceError::Partition(PartitionError::BadCost { layer: 3, .. })), "{error}");
    }
    assert!(matches!(refused(|p| p.micro_batches = 0), BalanceError::Schedule(_)));
    assert!(matches!(
        refused(|p| p.sent.backward.outputs.truncate(3)),
        BalanceError::Sizes { expected: 20, got: 3, .. }
    ));
    let skip = refused(|p| {
        p.skips.push(SkipSpan { stash: 4, pop: 4 });
        [&mut p.in_memory, &mut p.sent.forward, &mut p.sent.backward].into_iter().for_each(|s| s.skips.push(1));
    });
    assert!(matches!(skip, BalanceError::BadSkip { stash: 4, pop: 4, layers: 20 }));
    for bytes_per_s in [0.0, -1.0, f64::NAN] {
        let link = Some(Link { bytes_per_s, latency_s: 0.0 });
        let error = Problem { link, ..waisted() }.search().unwrap_err();
        assert!(matches!(error, BalanceError::BadLink { .. }), "{error}");
    }
    let whole = Problem { placement: Placement::one_worker_each(1), ..waisted() }.search().unwrap();
    assert_eq!((whole.balance.to_string(), whole.tried), ("20".to_owned(), 1));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn the_runner_up_is_the_second_best_of_all_cuts(problem in any_problem()) {
        let found = problem.search_by(Method::Exhaustive);
        prop_assume!(found.is_ok());
        let found = found.unwrap();
        let all = all_balances(problem.layers.len(), problem.placement.partitions()).into_iter();
        let all = all.map(|sizes| Truth::of(&problem, Balance::new(sizes).unwrap())).filter(|truth| truth.fits(&problem));
        let mut objectives: Vec<f64> = all.map(|truth| truth.objective(&problem)).collect();
        objectives.sort_by(f64::total_cmp);
        match found.runner_up {
            None => prop_assert!(objectives.len() < 2),
            Some(cut) => {
                prop_assert_ne!(&cut, &found.balance);
                let second = Truth::of(&problem, cut).objective(&problem);
                prop_assert!((second - objectives[1]).abs() <= 1e-9 * second, "{second} {objectives:?}");
            }
        }
        prop_assert!(found.complete);
    }

    #[test]
    fn a_cut_is_estimated_as_the_search_estimates_it(problem in any_problem()) {
        let Ok(found) = problem.search() else { return Ok(()) };
        prop_assert_eq!(problem.estimate(&found.balance).unwrap(), found.estimate);
        prop_assert_eq!(problem.estimate(&found.even).unwrap(), found.even_estimate);
    }
}

#[test]
fn a_cut_of_another_model_or_placement_is_not_estimated() {
    let problem = waisted();
    let partitions = problem.placement.partitions();
    for cut in [Balance::even(19, partitions).unwrap(), Balance::even(20, partitions + 1).unwrap()] {
        assert!(problem.estimate(&cut).is_err(), "{cut}");
    }
}

/// Layers of different costs, each partition on its own worker.
fn long(layers: usize, partitions: usize) -> Problem {
    let costs = (0..layers).map(|i| LayerCost {
        forward_s: 1.0 + (i * i % 7) as f64,
        backward_s: 2.0 + (i % 5) as f64,
        held_bytes: 100,
        parameter_bytes: 1000,
    });
    let sizes = Sizes { outputs: vec![64; layers], skips: Vec::new() };
    Problem {
        layers: costs.collect(),
        in_memory: sizes.clone(),
        sent: Sent { forward: sizes.clone(), backward: sizes, ..Sent::default() },
        placement: Placement::one_worker_each(partitions),
        ..waisted()
    }
}

#[test]
fn a_search_that_its_caller_ends_returns_the_best_cut_so_far() {
    for problem in [long(3000, 6), long(300, 3)] {
        let mut asked = 0;
        let found = problem
            .search_while(&mut |_| {
                asked += 1;
                false
            })
            .unwrap();
        assert!(asked > 0 && !found.complete, "asked {asked} times");
        assert!(found.estimate.step_s <= found.even_estimate.step_s);
        let whole = problem.search().unwrap();
        assert!(whole.tried > found.tried && whole.estimate.step_s <= found.estimate.step_s);
    }
}

/// With thousands of borders there are hundreds of millions of moves, most of which lead nowhere. They were all listed.
#[test]
fn a_search_over_thousands_of_partitions_is_bounded() {
    let found = long(3000, 2000).search().unwrap();
    assert!(!found.complete && found.tried < 10_000, "{}", found.tried);
    assert!(found.estimate.step_s <= found.even_estimate.step_s);
    let only = long(3000, 3000).search().unwrap();
    assert_eq!((only.tried, only.complete, only.runner_up), (1, true, None));
}
