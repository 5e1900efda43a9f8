//! Law 5 between threads: at every action of a step, and at every message of every link.

mod failure_scenarios;
mod soundness;

use distgpipe::engine::Devices;
use distgpipe::failure::Fault;
use distgpipe::model::zoo::Mlp;
use distgpipe::tch::{Device, Kind, Tensor};
use distgpipe::{Batch, BuildError, Context, Layer, LayerTensors, Loss, Model, Pipeline, Recompute, StepError};
use distgpipe::{SampleShape, ShapeError, SkipShapes, Workers};
use distgpipe_core::schedule::{evaluate_plan, Request};
use distgpipe_core::WorkerId;
use failure_scenarios::{actions, assert_named, check_all, plan, run_replicas_until_failure, run_until_failure};
use std::sync::Arc;

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
    check_all(&actions(&plan()), |(worker, action)| {
        let scenario = format!("{worker}:hang@{action}");
        assert_named(run_until_failure(Workers::Threads, &scenario), &scenario, worker, Some(*action));
    });
}

#[test]
fn a_broken_link_is_found_at_any_message() {
    let plan = plan();
    let (client, server) = (WorkerId(0), WorkerId(1));
    let mut scenarios = Vec::new();
    for (from, to, a, b) in [("client", "server", client, server), ("server", "client", server, client)] {
        for message in 0..plan.messages(a, b) {
            scenarios.extend(FAULTS.map(|fault| (from, format!("{from}>{to}:{fault}@{message}"))));
        }
    }
    check_all(&scenarios, |(from, scenario)| {
        assert_named(run_until_failure(Workers::Threads, scenario), scenario, from, None);
    });
}

/// What may happen to a message.
const FAULTS: [&str; 3] = ["corrupt", "cut", "stall"];

/// Each worker opens its own device.
#[test]
fn a_missing_device_is_blamed_on_the_worker_that_uses_it() {
    for (devices, worker) in [("cpu,cuda:99", "server"), ("cuda:99,cpu", "client")] {
        let devices: Devices = devices.parse().unwrap();
        let built = failure_scenarios::builder(Workers::Threads, "").device(devices).build();
        let said = match built.map(|mut pipeline| pipeline.train_step(&failure_scenarios::batch())) {
            Err(error) => error.to_string(),
            Ok(step) => step.unwrap_err().to_string(),
        };
        assert!(said.starts_with(&format!("{worker} failed")) && said.contains("cuda:99"), "{said}");
    }
}

/// Of two replicas, too: those of the other wait for its gradients, and are not to blame.
#[test]
fn a_failure_in_a_replica_is_named() {
    let numbered: Vec<_> = actions(&plan()).into_iter().enumerate().collect();
    check_all(&numbered, |(i, (worker, action))| {
        let (replica, fault) = (i % 2, ["error", "hang", "panic"][i % 3]);
        let (name, scenario) = (format!("{worker}/{replica}"), format!("{worker}/{replica}:{fault}@{action}"));
        let failed = run_replicas_until_failure(Workers::Threads, &scenario);
        assert_named(failed, &scenario, &name, Some(*action));
    });
}

/// Two shares go each way in a step.
#[test]
fn a_broken_ring_is_found_at_any_message() {
    let mut scenarios = Vec::new();
    for (from, to) in [("client/0", "client/1"), ("client/1", "client/0"), ("server/0", "server/1")] {
        for message in 0..4 {
            scenarios.extend(FAULTS.map(|fault| (from, format!("{from}>{to}:{fault}@{message}"))));
        }
    }
    check_all(&scenarios, |(from, scenario)| {
        assert_named(run_replicas_until_failure(Workers::Threads, scenario), scenario, from, None);
    });
}

#[test]
fn delays_change_nothing_but_the_time() {
    let losses = |scenario: &str| -> Vec<f64> {
        let mut pipeline = failure_scenarios::pipeline(Workers::Threads, scenario);
        let losses: Vec<f64> = (0..3).map(|_| pipeline.train_step(&failure_scenarios::batch()).unwrap().loss).collect();
        soundness::assert_pipeline_sound(scenario, &losses, &mut pipeline, &failure_scenarios::batch());
        losses
    };
    let quiet = losses("");
    for seed in 0..5 {
        assert_eq!(losses(&format!("seed={seed};client>server:delay=20@0;server>client:delay=20@0")), quiet);
    }
}

#[test]
fn an_unused_pipeline_ends_at_once() {
    let start = std::time::Instant::now();
    drop(failure_scenarios::pipeline(Workers::Threads, ""));
    assert!(start.elapsed() < failure_scenarios::BOUND);
}

#[test]
fn invalid_settings_are_rejected_with_a_reason() {
    let model = || Mlp::default().model().unwrap();
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

/// Layers of a user who got something wrong.
struct Odd {
    name: &'static str,
    in_place: bool,
}

impl Layer for Odd {
    fn name(&self) -> &str {
        self.name
    }
    fn shapes(&self, input: Vec<SampleShape>, _: &mut SkipShapes) -> Result<Vec<SampleShape>, ShapeError> {
        Ok(input)
    }
    fn forward(&self, _: &mut LayerTensors<'_>, mut x: Vec<Tensor>, _: &mut Context<'_>) -> Result<Vec<Tensor>, Fault> {
        let y = if self.in_place { x[0].f_mul_scalar_(2.0)? } else { x[0].f_mul_scalar(2.0)? };
        Ok(vec![y])
    }
}

/// Recomputation would start from the changed input, and no graph would show it.
#[test]
fn a_layer_that_changes_its_input_in_place_is_detected() {
    let odd = |name, in_place| -> Arc<dyn Layer> { Arc::new(Odd { name, in_place }) };
    let model = Model::new(vec![odd("good", false), odd("bad", true)], vec![SampleShape::float(&[3])]);
    // With a graph libtorch itself objects; without one, only we can.
    for (recompute, expected) in [(Recompute::Never, "in-place"), (Recompute::Always, "layer `bad`")] {
        let builder = Pipeline::builder(model.clone()).place("a,b").loss(Loss::MeanSquared).recompute(recompute);
        let x = || Tensor::ones([2, 3], (Kind::Float, Device::Cpu));
        let error = builder.build().unwrap().train_step(&Batch::new(x(), x())).unwrap_err().to_string();
        assert!(error.starts_with("b failed while running 1F0") && error.contains(expected), "{error}");
        assert!(error.len() < 300, "{error}");
    }
}

#[test]
fn names_must_be_unique_and_plans_must_train() {
    let odd = |name| -> Arc<dyn Layer> { Arc::new(Odd { name, in_place: false }) };
    let twins = Model::new(vec![odd("x"), odd("x")], vec![SampleShape::float(&[3])]);
    let error = Pipeline::builder(twins).build().err().expect("an error").to_string();
    assert!(error.contains("layer x"), "{error}");
    let evaluation = evaluate_plan(&Request::new("a,b".parse().unwrap(), 2)).unwrap();
    let error = Pipeline::builder(Mlp::default().model().unwrap()).plan(evaluation).build().err().expect("an error");
    assert!(error.to_string().contains("training"), "{error}");
}

#[test]
fn a_batch_of_the_wrong_shape_is_rejected_and_the_pipeline_stays_usable() {
    let mut pipeline = failure_scenarios::pipeline(Workers::Threads, "");
    let wrong = Batch::new(
        Tensor::ones([6, 3, 8, 8], (Kind::Float, Device::Cpu)),
        Tensor::zeros([6], (Kind::Int64, Device::Cpu)),
    );
    let e = pipeline.train_step(&wrong).unwrap_err().to_string();
    assert!(e.contains("[1, 8, 8]") && e.contains("[6, 3, 8, 8]"), "{e}");
    let few = Batch::new(
        Tensor::ones([2, 1, 8, 8], (Kind::Float, Device::Cpu)),
        Tensor::zeros([2], (Kind::Int64, Device::Cpu)),
    );
    let e = pipeline.train_step(&few).unwrap_err().to_string();
    assert!(e.contains('2') && e.contains('3'), "{e}");
    assert_eq!(pipeline.evaluate(&few).unwrap().rows, 2, "evaluation takes fewer rows than micro-batches");
    pipeline.train_step(&failure_scenarios::batch()).unwrap();
}

/// In a clipped step workers wait for a second command. One of them dies in its last action, when the other may have
/// nothing left to do but wait for that.
#[test]
fn a_worker_that_dies_before_a_clipped_update_is_named_and_ends_all() {
    let plan = plan();
    for worker in plan.placement().worker_ids() {
        let (name, action) = (plan.placement().name(worker), *plan.actions(worker).last().unwrap());
        for fault in ["panic", "kill", "hang"] {
            let scenario = format!("{name}:{fault}@{action}");
            let attempt = || {
                let start = std::time::Instant::now();
                let mut pipeline = failure_scenarios::pipeline(Workers::Threads, &scenario);
                pipeline.set_clip_norm(Some(0.1));
                let failure = match pipeline.train_step(&failure_scenarios::batch()) {
                    Err(StepError::Failed(failure)) => failure,
                    other => panic!("{scenario}: {:?}", other.map(|o| o.loss)),
                };
                let told = std::time::Instant::now();
                drop(pipeline);
                let ended_after = told.elapsed();
                assert_named((failure, start.elapsed()), &scenario, name, Some(action));
                ended_after
            };
            // A thread that waits on is left behind after three seconds. A busy machine is slow now and then, but not always.
            let mut ended_after = (0..5).map(|_| attempt());
            assert!(ended_after.any(|took| took.as_secs_f64() < 2.0), "{scenario}: somebody waits on");
        }
    }
}
