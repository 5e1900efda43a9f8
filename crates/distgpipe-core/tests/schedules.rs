//! The conformance suite of the schedules: every schedule on every small pipeline.
//!
//! Soundness is tested exhaustively: 1 to 6 partitions × every placement on up to 4 workers × 1 to 12 micro-batches ×
//! every schedule. Then the checker itself is tested: plans are broken in ways that are certainly wrong, and it must
//! detect every one of them.

use distgpipe_core::placement::Placement;
use distgpipe_core::schedule::{
    check, evaluate_plan, simulate, Action, CheckError, Costs, LinkCost, Mode, Op, Pass, Plan, Recompute, Request,
    Schedule,
};
use distgpipe_core::{MicroBatchId, PartitionId, WorkerId};
use proptest::prelude::*;
use proptest::sample::Index;
use std::collections::HashMap;

/// Every placement of `partitions` on at most `workers` workers, up to renumbering the workers.
fn placements(partitions: usize, workers: usize) -> Vec<Placement> {
    fn extend(prefix: &mut Vec<usize>, partitions: usize, workers: usize, all: &mut Vec<Placement>) {
        if prefix.len() == partitions {
            all.push(Placement::from_workers(prefix).unwrap());
            return;
        }
        let used = prefix.iter().max().map_or(0, |max| max + 1);
        for worker in 0..workers.min(used + 1) {
            prefix.push(worker);
            extend(prefix, partitions, workers, all);
            prefix.pop();
        }
    }
    let mut all = Vec::new();
    extend(&mut Vec::new(), partitions, workers, &mut all);
    all
}

fn sound(plan: &Plan, what: impl Fn() -> String) {
    if let Err(error) = check(plan) {
        panic!("{}: {error}\n{plan}", what());
    }
}

#[test]
fn every_schedule_is_sound_on_every_small_pipeline() {
    let mut plans = 0;
    for partitions in 1..=6 {
        for placement in placements(partitions, 4) {
            for micro_batches in 1..=12 {
                let request = Request::new(placement.clone(), micro_batches);
                for schedule in Schedule::ALL {
                    let plan = schedule.plan(&request).unwrap();
                    sound(&plan, || format!("{schedule} {placement} × {micro_batches}"));
                    plans += 1;
                }
                sound(&evaluate_plan(&request).unwrap(), || format!("evaluate {placement} × {micro_batches}"));
            }
        }
    }
    // 1 + 2 + 5 + 15 + 51 + 187 placements: none is missing.
    assert_eq!(plans, 261 * 12 * 3);
}

#[test]
fn every_schedule_is_sound_with_skips_and_recomputation() {
    for partitions in 3..=5 {
        let ids = || (0..partitions).map(PartitionId::new);
        let all: Vec<_> =
            ids().flat_map(|from| ids().map(move |to| (from, to))).filter(|(from, to)| from < to).collect();
        let ends = vec![(PartitionId(0), PartitionId::new(partitions - 1))];
        for placement in placements(partitions, 4) {
            for micro_batches in [1, 2, 5, 6] {
                for recompute in [Recompute::Never, Recompute::ExceptLast, Recompute::Always] {
                    for skips in [&all, &ends] {
                        for frozen in [0, 1, partitions - 1] {
                            let (placement, skips) = (placement.clone(), skips.clone());
                            let request = Request { placement, micro_batches, recompute, skips, frozen };
                            for schedule in Schedule::ALL {
                                let plan = schedule.plan(&request).unwrap();
                                let what = || format!("{schedule} {request:?}");
                                sound(&plan, what);
                                recomputes_what_was_asked(&plan, recompute);
                                assert_eq!(plan.to_string().parse::<Plan>().as_ref(), Ok(&plan));
                            }
                        }
                    }
                }
            }
        }
    }
}

fn recomputes_what_was_asked(plan: &Plan, recompute: Recompute) {
    for partition in plan.placement().partition_ids() {
        for micro_batch in 0..plan.micro_batches() {
            let expected = match recompute {
                Recompute::Never => false,
                Recompute::ExceptLast => micro_batch + 1 < plan.micro_batches(),
                Recompute::Always => true,
            };
            let expected = expected && plan.has_backward(partition);
            assert_eq!(plan.recomputes(partition, MicroBatchId::new(micro_batch)), expected);
        }
    }
}

#[test]
fn queues_of_the_stated_capacity_hold_every_message() {
    for placement in placements(5, 4) {
        let plan = Schedule::Interleaved.plan(&Request::new(placement.clone(), 4)).unwrap();
        for to in placement.worker_ids() {
            let sent: usize = placement.worker_ids().map(|from| plan.messages(from, to)).sum();
            assert_eq!(sent, plan.receives(to));
            assert_eq!(plan.messages(to, to), 0);
        }
    }
}

#[test]
fn gpipe_runs_all_forwards_first_and_backwards_newest_first() {
    for placement in placements(5, 4) {
        let plan = Schedule::GPipe.plan(&Request::new(placement.clone(), 4)).unwrap();
        for worker in placement.worker_ids() {
            let ops: Vec<Op> = plan.actions(worker).iter().filter(|a| a.is_compute()).map(|a| a.op).collect();
            assert!(ops.is_sorted(), "forwards, then backwards: {ops:?}");
            for partition in placement.partitions_of(worker) {
                let backwards = micro_batches(&plan, worker, partition, Op::Backward);
                assert_eq!(backwards, [3, 2, 1, 0]);
            }
        }
    }
}

fn micro_batches(plan: &Plan, worker: WorkerId, partition: PartitionId, op: Op) -> Vec<u32> {
    let own = plan.actions(worker).iter().filter(|action| action.partition == partition && action.op == op);
    own.map(|action| action.micro_batch.0).collect()
}

#[test]
fn one_f_one_b_keeps_its_memory_promise_on_every_placement() {
    for partitions in 1..=6 {
        for placement in placements(partitions, 4) {
            for count in [1, 2, 5, 12] {
                let plan = Schedule::OneFOneB.plan(&Request::new(placement.clone(), count)).unwrap();
                for partition in placement.partition_ids() {
                    let worker = placement.worker_of(partition);
                    let backwards = micro_batches(&plan, worker, partition, Op::Backward);
                    assert!(backwards.is_sorted(), "backwards in micro-batch order");
                    let (mut live, mut peak) = (0usize, 0);
                    for action in plan.actions(worker).iter().filter(|action| action.partition == partition) {
                        match action.op {
                            Op::Forward => live += 1,
                            Op::Backward => live -= 1,
                            _ => {}
                        }
                        peak = peak.max(live);
                    }
                    assert!(peak <= partitions - partition.index(), "{placement} × {count}: {peak} on {partition}");
                }
            }
        }
    }
}

/// The actions of the same worker that must precede an action. Written independently of the checker.
fn needs_here(plan: &Plan, action: Action) -> Vec<Action> {
    let Action { partition, op, micro_batch } = action;
    let forward = Action::forward(partition, micro_batch);
    let backward = Action::backward(partition, micro_batch);
    let worker = |partition| plan.placement().worker_of(partition);
    let input = |pass: Pass, from: PartitionId| {
        if worker(from) == worker(partition) {
            Action { partition: from, ..action }
        } else {
            Action { op: Op::Receive { pass, from }, ..action }
        }
    };
    match op {
        Op::Forward => plan.in_edges(partition).iter().map(|&from| input(Pass::Forward, from)).collect(),
        Op::Recompute => vec![forward],
        Op::Backward => {
            let mut needs: Vec<_> = plan.out_edges(partition).iter().map(|&from| input(Pass::Backward, from)).collect();
            needs.push(forward);
            if plan.recomputes(partition, micro_batch) {
                needs.push(Action::recompute(partition, micro_batch));
            }
            needs
        }
        Op::Send { pass: Pass::Forward, .. } => vec![forward],
        Op::Send { pass: Pass::Backward, .. } => vec![backward],
        Op::Receive { .. } => vec![],
    }
}

fn any_request(workers_min: usize) -> impl Strategy<Value = (Schedule, Request)> {
    let all: Vec<Placement> =
        (2..=5).flat_map(|n| placements(n, 4)).filter(|placement| placement.workers() >= workers_min).collect();
    let recompute = prop::sample::select(vec![Recompute::Never, Recompute::ExceptLast, Recompute::Always]);
    let schedule = prop::sample::select(Schedule::ALL.to_vec());
    (prop::sample::select(all), 1usize..6, recompute, schedule, any::<bool>(), 0usize..5).prop_map(
        |(placement, micro_batches, recompute, schedule, skip, frozen)| {
            let ends = (PartitionId(0), PartitionId::new(placement.partitions() - 1));
            let skips = if skip { vec![ends] } else { vec![] };
            let frozen = frozen % placement.partitions();
            (schedule, Request { placement, micro_batches, recompute, skips, frozen })
        },
    )
}

/// A plan in a form that can be modified.
struct Loose {
    header: String,
    names: Vec<String>,
    actions: Vec<Vec<Action>>,
}

impl Loose {
    fn new(plan: &Plan) -> Self {
        let text = plan.to_string();
        let header = text.lines().filter(|line| !line.contains(':')).map(|line| format!("{line}\n")).collect();
        let placement = plan.placement();
        Self {
            header,
            names: placement.worker_ids().map(|worker| placement.name(worker).to_string()).collect(),
            actions: placement.worker_ids().map(|worker| plan.actions(worker).to_vec()).collect(),
        }
    }

    fn plan(&self) -> Plan {
        let mut text = self.header.clone();
        for (name, actions) in self.names.iter().zip(&self.actions) {
            let actions: Vec<String> = actions.iter().map(ToString::to_string).collect();
            text.push_str(&format!("{name}: {}\n", actions.join(" ")));
        }
        text.parse().unwrap()
    }
}

/// Ways to break a plan. Each makes any plan unsound: see `damage`.
#[derive(Clone, Copy, Debug)]
enum Damage {
    Remove,
    Duplicate,
    SwapAcrossDependency,
    Retarget,
    OtherWorker,
    Replace,
    WaitTooEarly,
}

const DAMAGES: [Damage; 7] = [
    Damage::Remove,
    Damage::Duplicate,
    Damage::SwapAcrossDependency,
    Damage::Retarget,
    Damage::OtherWorker,
    Damage::Replace,
    Damage::WaitTooEarly,
];

/// Breaks the plan, or returns false if this way does not apply to it.
fn damage(kind: Damage, plan: &Plan, loose: &mut Loose, at: Index, to: Index, other: u32) -> bool {
    let wanted = |action: &Action| match kind {
        // A plan without a recomputation is sound too: the activations are then kept.
        Damage::Remove | Damage::Replace => action.op != Op::Recompute,
        Damage::Duplicate | Damage::OtherWorker => true,
        Damage::SwapAcrossDependency => !needs_here(plan, *action).is_empty(),
        Damage::Retarget => matches!(action.op, Op::Send { .. } | Op::Receive { .. }),
        // A gradient arrives only after the partition's own forward.
        Damage::WaitTooEarly => matches!(action.op, Op::Receive { pass: Pass::Backward, .. }),
    };
    let places: Vec<(usize, usize)> = (0..loose.actions.len())
        .flat_map(|worker| (0..loose.actions[worker].len()).map(move |index| (worker, index)))
        .filter(|&(worker, index)| wanted(&loose.actions[worker][index]))
        .collect();
    if places.is_empty() {
        return false;
    }
    let (worker, index) = places[at.index(places.len())];
    let workers = loose.actions.len();
    let list = &mut loose.actions[worker];
    let action = list[index];
    match kind {
        Damage::Remove => {
            list.remove(index);
        }
        Damage::Duplicate => list.insert(to.index(list.len() + 1), action),
        Damage::SwapAcrossDependency => {
            let needs = needs_here(plan, action);
            let need = needs[to.index(needs.len())];
            let before = list.iter().position(|&other| other == need).unwrap();
            assert!(before < index, "the plan was sound");
            list.remove(index);
            list.insert(before, action);
        }
        Damage::Retarget => {
            let moved = |id: PartitionId| PartitionId((id.0 + 1 + other % 6) % 7);
            list[index].op = match action.op {
                Op::Send { pass, to } => Op::Send { pass, to: moved(to) },
                Op::Receive { pass, from } => Op::Receive { pass, from: moved(from) },
                op => op,
            };
        }
        Damage::OtherWorker => {
            list.remove(index);
            let list = &mut loose.actions[(worker + 1 + other as usize % (workers - 1)) % workers];
            list.insert(to.index(list.len() + 1), action);
        }
        Damage::Replace => {
            let all = plan.micro_batches() as u32;
            let changed = match other % 3 {
                0 => {
                    Action { micro_batch: MicroBatchId((action.micro_batch.0 + 1 + other % all) % (all + 1)), ..action }
                }
                1 => Action { partition: PartitionId((action.partition.0 + 1 + other % 6) % 7), ..action },
                _ => {
                    let op = [Op::Forward, Op::Backward].into_iter().find(|&op| op != action.op).unwrap();
                    Action { op, ..action }
                }
            };
            assert_ne!(changed, action);
            list[index] = changed;
        }
        Damage::WaitTooEarly => {
            list.remove(index);
            list.insert(0, action);
        }
    }
    true
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn every_damage_is_caught(
        (schedule, request) in any_request(2),
        kind in prop::sample::select(DAMAGES.to_vec()),
        at in any::<Index>(),
        to in any::<Index>(),
        other in any::<u32>(),
    ) {
        let plan = schedule.plan(&request).unwrap();
        let mut loose = Loose::new(&plan);
        prop_assert_eq!(&loose.plan(), &plan);
        prop_assert_eq!(check(&plan), Ok(()));
        if damage(kind, &plan, &mut loose, at, to, other) {
            let damaged = loose.plan();
            let Err(error) = check(&damaged) else {
                return Err(TestCaseError::fail(format!("{kind:?} went through:\n{damaged}")));
            };
            let fits = match kind {
                Damage::Duplicate => matches!(error, CheckError::Duplicate { .. }),
                Damage::OtherWorker => matches!(error, CheckError::WrongWorker { .. }),
                Damage::WaitTooEarly => matches!(error, CheckError::Deadlock { .. }),
                Damage::Remove => matches!(
                    error,
                    CheckError::MissingCompute { .. } | CheckError::MissingSend { .. } | CheckError::MissingReceive { .. }
                ),
                Damage::SwapAcrossDependency => matches!(
                    error,
                    CheckError::UseBeforeProduce { .. }
                        | CheckError::UseBeforeReceive { .. }
                        | CheckError::SendBeforeProduce { .. }
                        | CheckError::MisplacedRecompute { .. }
                ),
                Damage::Retarget | Damage::Replace => true,
            };
            prop_assert!(fits, "{:?}: {}", kind, error);
            // The simulator rejects what the checker rejects, for the same reason.
            prop_assert_eq!(simulate(&damaged, &Costs::equal(plan.partitions())).unwrap_err(), error);
        }
    }

    #[test]
    fn the_simulation_runs_everything_once_and_after_what_it_needs(
        (schedule, request) in any_request(1),
        costs in prop::collection::vec(0.0f64..3.0, 15),
        latency in 0.0f64..2.0,
        transfer in 0.0f64..2.0,
    ) {
        let plan = schedule.plan(&request).unwrap();
        let n = plan.partitions();
        let mut all = Costs::new(costs[..n].to_vec(), costs[5..5 + n].to_vec());
        all.recompute = costs[10..10 + n].to_vec();
        all.other_links = LinkCost { latency, transfer };
        let simulation = simulate(&plan, &all).unwrap();
        let times: HashMap<Action, (f64, f64)> =
            simulation.events.iter().map(|event| (event.action, (event.start, event.end))).collect();
        prop_assert_eq!(times.len(), simulation.events.len());
        prop_assert_eq!(plan.mode(), Mode::Train);
        let mut links: HashMap<(WorkerId, WorkerId), Vec<f64>> = HashMap::new();
        for worker in plan.placement().worker_ids() {
            let mut now = 0.0;
            for &action in plan.actions(worker) {
                if let Op::Receive { pass, from } = action.op {
                    let send = Action { partition: from, op: Op::Send { pass, to: action.partition }, ..action };
                    now = f64::max(now, times[&send].1);
                    continue;
                }
                let (start, end) = times[&action];
                for need in needs_here(&plan, action) {
                    if let Some(&(_, done)) = times.get(&need) {
                        prop_assert!(start >= done, "{} starts before {} ends", action, need);
                    }
                }
                prop_assert!(start >= now, "{} starts before its worker is there", action);
                if let Op::Send { to, .. } = action.op {
                    links.entry((worker, plan.placement().worker_of(to))).or_default().push(start);
                } else {
                    // A worker waits only for messages.
                    prop_assert_eq!(start, now);
                    now = end;
                }
            }
        }
        for starts in links.values() {
            prop_assert!(starts.windows(2).all(|pair| pair[1] - pair[0] >= transfer - 1e-9), "one message at a time");
        }
        let busy: f64 = simulation.workers.iter().map(|worker| worker.busy).sum();
        let whole = simulation.workers.len() as f64 * simulation.makespan;
        prop_assert!((simulation.bubble - (1.0 - busy / whole)).abs() < 1e-9);
    }
}
