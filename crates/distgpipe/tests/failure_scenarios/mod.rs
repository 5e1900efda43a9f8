//! Law 5, run by every kind of worker: the first failure wins, everybody is told, everybody ends, in bounded time.

use distgpipe::comm::codec_policy::CodecPolicy;
use distgpipe::comm::timeouts::Timeouts;
use distgpipe::model::zoo::Mlp;
use distgpipe::tch::{Device, Kind, Tensor};
use distgpipe::{Batch, BuildError, Builder, Failure, Pipeline, StepError, Workers};
use distgpipe_core::schedule::{Action, Plan};
use distgpipe_core::WorkerId;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// After a cause, or after a time-out that is one, everything must have ended within this. Most of it is for a busy machine; the
/// limits of [`PATIENT`] are longer.
pub const BOUND: Duration = Duration::from_secs(30);

/// For runs that are to reach a limit. A busy machine may not run a thread for a second.
pub const SHORT: Timeouts = Timeouts { stall_s: 2.0, silence_s: 5.0, connect_s: 60.0, reconnect_s: 2.0 };

/// For all others.
pub const PATIENT: Timeouts = Timeouts { stall_s: 60.0, silence_s: 60.0, connect_s: 60.0, reconnect_s: 60.0 };

pub fn batch() -> Batch {
    let x = Tensor::ones([6, 1, 8, 8], (Kind::Float, Device::Cpu));
    Batch::new(x, Tensor::zeros([6], (Kind::Int64, Device::Cpu)))
}

/// `[client, server, client]` with three micro-batches and this scenario.
pub fn pipeline(workers: Workers, scenario: &str) -> Pipeline {
    build(workers, scenario).unwrap_or_else(|e| panic!("{scenario}: {e}"))
}

fn build(workers: Workers, scenario: &str) -> Result<Pipeline, BuildError> {
    builder(workers, scenario).build()
}

/// One direction of the link has a codec, whose thread must end as well; the other is raw.
pub fn builder(workers: Workers, scenario: &str) -> Builder {
    of_width(16, workers, scenario)
}

fn of_width(width: i64, workers: Workers, scenario: &str) -> Builder {
    let waits = scenario.contains(":hang@") || scenario.contains(":stall@");
    let mut timeouts = if waits { SHORT } else { PATIENT };
    if scenario.contains(":cut@") {
        // Otherwise the connection would be restored, and nothing fail.
        timeouts.reconnect_s = 0.0;
    }
    let links = vec!["0-1=feedback(tile:8),raw".parse().unwrap()];
    Pipeline::builder(Mlp { hidden: vec![width, 16], dropout: 0.0, ..Mlp::default() }.model().unwrap())
        .device(distgpipe::engine::Device::Cpu)
        .threads(1)
        .place("client,server,client")
        .micro_batches(3)
        .workers(workers)
        .timeouts(timeouts)
        .faults(scenario)
        .codecs(CodecPolicy { links, ..CodecPolicy::default() })
}

/// Runs until it fails, drops the pipeline, and gives the failure and how long both took.
pub fn run_until_failure(workers: Workers, scenario: &str) -> (Failure, Duration) {
    until_failure(builder(workers, scenario), scenario)
}

/// The same of two replicas.
#[allow(dead_code)]
pub fn run_replicas_until_failure(workers: Workers, scenario: &str) -> (Failure, Duration) {
    until_failure(builder(workers, scenario).replicas(2), scenario)
}

/// The same with tensors of a megabyte between client and server.
#[allow(dead_code)]
pub fn run_wide_until_failure(workers: Workers, scenario: &str) -> (Failure, Duration) {
    until_failure(of_width(200_000, workers, scenario), scenario)
}

fn until_failure(builder: Builder, scenario: &str) -> (Failure, Duration) {
    let start = Instant::now();
    let mut pipeline = match builder.build() {
        Ok(pipeline) => pipeline,
        // Between processes the first messages are those of getting ready.
        Err(BuildError::Failed(failure)) => return (failure, start.elapsed()),
        Err(other) => panic!("{scenario}: {other}"),
    };
    let start = Instant::now();
    let result = pipeline.train_step(&batch()).and_then(|_| pipeline.train_step(&batch()));
    let failure = match result {
        Err(StepError::Failed(failure)) => failure,
        other => panic!("{scenario}: expected a failure, got {:?}", other.map(|o| o.loss)),
    };
    // Whoever comes later learns the same cause.
    match pipeline.train_step(&batch()) {
        Err(StepError::Failed(again)) => assert_eq!(again, failure, "{scenario}"),
        other => panic!("{scenario}: the next step gave {:?}", other.map(|o| o.loss)),
    }
    drop(pipeline);
    (failure, start.elapsed())
}

/// Asserts that a failure names the worker or link and the place, and came in time.
pub fn assert_named((failure, took): (Failure, Duration), scenario: &str, who: &str, phase: Option<Action>) {
    assert!(failure.worker.contains(who), "{scenario}: blamed {failure}");
    if let Some(action) = phase {
        assert_eq!(failure.phase, action.to_string(), "{scenario}: {failure}");
    }
    assert!(took <= BOUND, "{scenario}: took {took:?}: {failure}");
}

/// Asserts that the failure of a link is blamed on the right end, and came in time. `driver` is the worker in the driver's
/// process, which reports.
///
/// - `corrupt`: the receiver finds the damage, and names whoever sent it.
/// - `cut`: both ends see the other one gone, so the driver names the far end of its own connection.
/// - `stall`: the link is named, or the sender, whose heartbeats are held back too.
#[allow(dead_code)]
pub fn assert_link_named((failure, took): (Failure, Duration), scenario: &str, driver: &str) {
    let link = scenario.split(';').next_back().expect("a mishap");
    let (ends, fault) = link.split_once(':').expect("LINK:FAULT");
    let (from, to) = ends.split_once('>').expect("FROM>TO");
    match fault.split('@').next() {
        Some("corrupt") => assert_eq!(failure.worker, from, "{scenario}: {failure}"),
        Some("cut") => {
            let far = if from == driver { to } else { from };
            assert_eq!(failure.worker, far, "{scenario}: {failure}");
        }
        Some("stall") => {
            let named = [from.to_owned(), format!("the link {from} → {to}")];
            assert!(named.contains(&failure.worker), "{scenario}: {failure}");
        }
        other => panic!("{scenario}: {other:?}"),
    }
    assert!(took <= BOUND, "{scenario}: took {took:?}: {failure}");
}

/// The cause must not get lost behind, or inside, a large tensor that is under way when the peer fails. Calls `after` after each run.
#[allow(dead_code)]
pub fn check_large_messages(workers: impl Fn() -> Workers, after: impl Fn(&str)) {
    let model = Mlp { hidden: vec![300_000, 8], dropout: 0.0, ..Mlp::default() }.model().expect("a model");
    for scenario in ["server:panic@1F1", "server:error@1B0", "client:panic@2F1"] {
        let mut pipeline = Pipeline::builder(model.clone())
            .place("client,server,client")
            .micro_batches(3)
            .workers(workers())
            .faults(scenario)
            .build()
            .unwrap_or_else(|e| panic!("{scenario}: {e}"));
        let x = Tensor::ones([60, 1, 8, 8], (Kind::Float, Device::Cpu));
        let batch = Batch::new(x, Tensor::zeros([60], (Kind::Int64, Device::Cpu)));
        let failure = pipeline.train_step(&batch).expect_err("the scenario").to_string();
        let (who, action) =
            (scenario.split(':').next().expect("a worker"), scenario.rsplit('@').next().expect("an action"));
        assert!(failure.starts_with(&format!("{who} failed while running {action}")), "{scenario}: {failure}");
        drop(pipeline);
        after(scenario);
    }
}

/// Calls `check` for each scenario. Those that wait for a limit do so at the same time.
#[allow(dead_code)]
pub fn check_all<T: Sync>(scenarios: &[T], check: impl Fn(&T) + Sync) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                while let Some(scenario) = scenarios.get(next.fetch_add(1, Ordering::Relaxed)) {
                    check(scenario);
                }
            });
        }
    });
}

/// The plan of [`pipeline`].
pub fn plan() -> Plan {
    pipeline(Workers::Threads, "").plan().clone()
}

/// Every action of every worker, with the worker's name.
pub fn actions(plan: &Plan) -> Vec<(String, Action)> {
    let of = |w: WorkerId| plan.actions(w).iter().map(move |a| (plan.placement().name(w).to_owned(), *a));
    plan.placement().worker_ids().flat_map(of).collect()
}
