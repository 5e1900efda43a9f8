//! Law 5 between threads: at every action of a step, and at every message of every link.

mod mishaps;

use distgpipe::core::WorkerId;
use distgpipe::{BuildError, Pipeline, Workers};
use mishaps::{actions, assert_named, plan, run_until_failure};

#[test]
fn a_worker_that_panics_or_errs_at_any_action_is_named_and_ends_all() {
    for (worker, action) in actions(&plan()) {
        for fault in ["panic", "error", "kill"] {
            let scenario = format!("{worker}:{fault}@{action}");
            assert_named(run_until_failure(Workers::Threads, &scenario), &scenario, &worker, Some(action));
        }
    }
}

#[test]
fn a_worker_that_hangs_at_any_action_is_named_although_others_wait_longer() {
    for (worker, action) in actions(&plan()) {
        let scenario = format!("{worker}:hang@{action}");
        assert_named(run_until_failure(Workers::Threads, &scenario), &scenario, &worker, Some(action));
    }
}

#[test]
fn a_broken_link_is_found_at_any_message() {
    let plan = plan();
    let (client, server) = (WorkerId(0), WorkerId(1));
    for (from, to, a, b) in [("client", "server", client, server), ("server", "client", server, client)] {
        for message in 0..plan.messages(a, b) {
            for fault in ["corrupt", "cut", "stall"] {
                let scenario = format!("{from}>{to}:{fault}@{message}");
                assert_named(run_until_failure(Workers::Threads, &scenario), &scenario, from, None);
            }
        }
    }
}

#[test]
fn delays_change_nothing_but_the_time() {
    let losses = |scenario: &str| -> Vec<f64> {
        let mut pipeline = mishaps::pipeline(Workers::Threads, scenario);
        (0..3).map(|_| pipeline.train_step(&mishaps::batch()).unwrap().loss).collect()
    };
    let quiet = losses("");
    for seed in 0..5 {
        assert_eq!(losses(&format!("seed={seed};client>server:delay=20@0;server>client:delay=20@0")), quiet);
    }
}

#[test]
fn an_unused_pipeline_ends_at_once() {
    let start = std::time::Instant::now();
    drop(mishaps::pipeline(Workers::Threads, ""));
    assert!(start.elapsed() < mishaps::BOUND);
}

#[test]
fn what_cannot_be_built_says_why() {
    let model = || distgpipe::models::Mlp::default().model().unwrap();
    let text = |result: Result<Pipeline, BuildError>| result.err().expect("an error").to_string();
    let e = text(Pipeline::builder(model()).balance([1, 1]).build());
    assert!(e.contains("balance") && e.contains('4'), "{e}");
    let e = text(Pipeline::builder(model()).place("a,b,c,d,e").build());
    assert!(e.contains("balance") && e.contains('5') && e.contains('4'), "{e}");
    let e = text(Pipeline::builder(model()).place("a,b").balance([1, 1, 2]).build());
    assert!(e.contains("placement") && e.contains("balance"), "{e}");
    let e = text(Pipeline::builder(model()).micro_batches(0).build());
    assert!(e.contains("micro"), "{e}");
    let e = text(Pipeline::builder(model()).faults("nonsense").build());
    assert!(e.contains("nonsense"), "{e}");
    let e = text(Pipeline::builder(model()).threads(0).build());
    assert!(e.contains("threads"), "{e}");
}

#[test]
fn a_batch_that_does_not_fit_is_refused_and_the_pipeline_lives_on() {
    use distgpipe::tch::{Device, Kind, Tensor};
    let mut pipeline = mishaps::pipeline(Workers::Threads, "");
    let wrong = distgpipe::Batch::new(
        Tensor::ones([6, 3, 8, 8], (Kind::Float, Device::Cpu)),
        Tensor::zeros([6], (Kind::Int64, Device::Cpu)),
    );
    let e = pipeline.train_step(&wrong).unwrap_err().to_string();
    assert!(e.contains("[1, 8, 8]") && e.contains("[6, 3, 8, 8]"), "{e}");
    let few = distgpipe::Batch::new(
        Tensor::ones([2, 1, 8, 8], (Kind::Float, Device::Cpu)),
        Tensor::zeros([2], (Kind::Int64, Device::Cpu)),
    );
    let e = pipeline.train_step(&few).unwrap_err().to_string();
    assert!(e.contains('2') && e.contains('3'), "{e}");
    assert_eq!(pipeline.evaluate(&few).unwrap().rows, 2, "evaluation takes fewer rows than micro-batches");
    pipeline.train_step(&mishaps::batch()).unwrap();
}
