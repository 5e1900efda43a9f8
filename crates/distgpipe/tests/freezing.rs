//! Frozen parameters: the rest is trained as on one device with the same parameters frozen, and partitions at the front
//! that are wholly frozen have no backward pass and receive no gradients.

#[path = "one_device/mod.rs"]
#[allow(dead_code)]
mod one_device;

use distgpipe::data::{Digits, Loader, LoaderOptions, Split};
use distgpipe::model::layer::Role;
use distgpipe::model::zoo::Mlp;
use distgpipe::train::{SaveEvery, TrainOptions, Trainer};
use distgpipe::{BuildError, Builder, Checkpoints, Model, Optim, Pipeline, Plan, Recompute, Schedule};
use distgpipe_core::schedule::Pass;
use one_device::{assert_identical, soundness, subjects, OneDevice, Subject, Tensors};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

const SEED: u64 = 5;
const RATE: f64 = 0.01;

/// The parameters of some layers.
fn parameters(model: &Model, layers: Range<usize>) -> Vec<String> {
    let tensors = model.layers[layers].iter().flat_map(|layer| layer.tensors());
    tensors.filter(|spec| spec.role == Role::Parameter).map(|spec| spec.name).collect()
}

fn frozen(builder: Builder, names: &[String]) -> Builder {
    names.iter().fold(builder, |builder, name| builder.freeze(name))
}

/// Gradients of the first batch and the state after a step of the second, on one device.
fn truth(subject: &Subject, names: &[String], schedule: Schedule) -> (Tensors, Tensors) {
    let mut device = OneDevice::new(subject, SEED);
    device.freeze(names);
    let (_, gradients) = device.gradients(&subject.batch(9, 1), 4, schedule);
    device.discard_norms();
    let (_, second) = device.gradients(&subject.batch(9, 2), 4, schedule);
    device.sgd(&second, &mut Tensors::new(), RATE);
    (gradients, device.state())
}

/// How many partitions at the front a pipeline of this placement has without anything to train.
fn leading(pipeline: &Pipeline, frozen_layers: usize) -> usize {
    let mut end = 0;
    let ends = pipeline.balance().sizes().iter().map(|size| {
        end += size;
        end
    });
    ends.take_while(|&end| end <= frozen_layers).count()
}

#[test]
fn gradients_and_updates_are_those_of_one_device_with_the_same_parameters_frozen() {
    for subject in subjects() {
        let layers = subject.model.layers.len();
        // The front, which needs no backward pass; and the back, which still passes gradients on.
        for range in [0..layers / 2, 0..layers - 1, layers / 2..layers] {
            let names = parameters(&subject.model, range.clone());
            assert!(!names.is_empty());
            for schedule in [Schedule::GPipe, Schedule::OneFOneB] {
                let (gradients, state) = truth(&subject, &names, schedule);
                assert!(names.iter().all(|name| !gradients.contains_key(name)) && !gradients.is_empty());
                let cuts = match schedule {
                    Schedule::GPipe => [("a,b", Recompute::Always), ("a,b,a,b", Recompute::Never)],
                    _ => [("client,server,client", Recompute::Never), ("a,b,c,d", Recompute::ExceptLast)],
                };
                for (placement, recompute) in cuts {
                    let what = format!("{} {range:?} frozen, {schedule} {placement} {recompute}", subject.name);
                    let builder = Pipeline::builder(subject.model.clone())
                        .device(distgpipe::engine::Device::Cpu)
                        .threads(1)
                        .place(placement)
                        .micro_batches(4)
                        .schedule(schedule)
                        .recompute(recompute)
                        .loss(subject.loss)
                        .optimizer(Optim::sgd(0.9))
                        .learning_rate(RATE)
                        .seed(SEED);
                    let mut pipeline = frozen(builder, &names).build().unwrap_or_else(|e| panic!("{what}: {e}"));
                    let without = if range.start == 0 { leading(&pipeline, range.end) } else { 0 };
                    assert_eq!(pipeline.plan().frozen(), without, "{what}");
                    let (_, got) = pipeline.gradients(&subject.batch(9, 1)).unwrap_or_else(|e| panic!("{what}: {e}"));
                    assert_identical(&format!("{what}: gradient"), &got, &gradients);
                    let outcome = pipeline.train_step(&subject.batch(9, 2)).unwrap();
                    assert_identical(&format!("{what}: state"), &pipeline.state().unwrap(), &state);
                    let links = outcome.workers.iter().flat_map(|worker| &worker.report.links);
                    for (edge, _) in links.flat_map(|(_, traffic)| &traffic.sent) {
                        let to_frozen = edge.pass == Pass::Backward && edge.to.index() < without;
                        assert!(!to_frozen, "{what}: a gradient went from {} to {}", edge.from, edge.to);
                    }
                }
            }
        }
    }
}

fn mlp() -> Model {
    Mlp { hidden: vec![16, 16, 16], ..Mlp::default() }.model().unwrap()
}

fn loader() -> Loader {
    let digits = Digits::new(Split::Train, Default::default()).unwrap();
    Loader::new(Arc::new(digits), LoaderOptions::training(128, 3)).unwrap()
}

fn builder() -> Builder {
    let builder = Pipeline::builder(mlp()).device(distgpipe::engine::Device::Cpu).threads(1);
    builder.micro_batches(3).optimizer(Optim::adamw()).learning_rate(0.01).clip_norm(0.5).freeze("layers.[01].*")
}

fn options(steps: u64) -> TrainOptions {
    TrainOptions { epochs: 2, steps_max: Some(steps), accumulate: 2, ..TrainOptions::default() }
}

/// With clipping and accumulation; to this checkpoint folder if there is one, and from its newest checkpoint.
fn trained(builder: Builder, steps: u64, checkpoints: Option<&Checkpoints>) -> Tensors {
    let mut pipeline = builder.build().unwrap();
    let before = pipeline.state().unwrap();
    let mut trainer = Trainer::new(&mut pipeline, loader(), None, options(steps)).unwrap();
    if let Some(checkpoints) = checkpoints {
        trainer = trainer.save_to(checkpoints, SaveEvery::Steps(4), Default::default());
        if let (Some(newest), _) = checkpoints.newest().unwrap() {
            trainer = trainer.resume(&newest).unwrap();
        }
    }
    let mut losses = Vec::new();
    trainer.run(soundness::losses_into(&mut losses)).unwrap();
    let batch = loader().epoch(0).next().unwrap().unwrap();
    soundness::assert_pipeline_sound("frozen layers", &losses, &mut pipeline, &batch);
    let state = pipeline.state().unwrap();
    for (name, tensor) in &state {
        let frozen = name.starts_with("layers.0.") || name.starts_with("layers.1.");
        assert_eq!(tensor.equal(&before[name]), frozen, "{name}");
    }
    let kept: Vec<String> = pipeline.optimizer_specs().into_iter().map(|spec| spec.name).collect();
    assert!(kept.iter().any(|name| name == "first.layers.2.weight"), "{kept:?}");
    assert!(!kept.iter().any(|name| name.contains("layers.0.") || name.contains("layers.1.")), "{kept:?}");
    state
}

#[test]
fn clipping_accumulation_and_replicas_do_not_depend_on_the_cut_of_frozen_layers() {
    for replicas in [1, 2] {
        let builder = || builder().replicas(replicas).micro_batches(2);
        let one = trained(builder().place("a"), 10, None);
        for (place, balance) in [("a,b", [2, 2].to_vec()), ("a,b,c", [1, 2, 1].to_vec()), ("a,b,a", [1, 1, 2].to_vec())]
        {
            let got = trained(builder().place(place).balance(balance), 10, None);
            assert_identical(&format!("{place} × {replicas}"), &got, &one);
        }
    }
}

#[test]
fn a_run_with_frozen_layers_resumes_with_another_cut_but_not_with_others_frozen() {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("freezing");
    let _ = std::fs::remove_dir_all(&folder);
    let whole = trained(builder().place("a,b"), 16, None);
    let checkpoints = Checkpoints::open(&folder, 2).unwrap();
    trained(builder().place("a,b"), 8, Some(&checkpoints));
    let newest = checkpoints.newest().unwrap().0.unwrap();
    let mut other = builder().freeze("layers.2.bias").build().unwrap();
    let refused = newest.load(&mut other).unwrap_err().to_string();
    assert!(refused.contains("frozen parameters") && refused.contains("layers.2.bias"), "{refused}");
    let resumed = trained(builder().balance([1, 1, 1, 1]), 16, Some(&checkpoints));
    assert_identical("resumed", &resumed, &whole);
}

#[test]
fn a_plan_of_your_own_may_leave_out_only_the_backward_passes_of_frozen_partitions() {
    let frozen = builder().place("a,b,c").balance([1, 1, 2]).build().unwrap().plan().clone();
    assert_eq!(frozen.frozen(), 2);
    let plan = |plan: &Plan| builder().balance([1, 1, 2]).plan(plan.clone());
    assert!(plan(&frozen).build().is_ok());
    let full = Pipeline::builder(mlp()).place("a,b,c").balance([1, 1, 2]).micro_batches(3).build().unwrap();
    let mut pipeline = plan(full.plan()).build().unwrap();
    let batch = loader().epoch(0).next().unwrap().unwrap();
    let (_, gradients) = pipeline.gradients(&batch).unwrap();
    let (_, expected) = builder().build().unwrap().gradients(&batch).unwrap();
    assert_identical("with backward passes that nobody needs", &gradients, &expected);
    let refused = Pipeline::builder(mlp()).balance([1, 1, 2]).plan(frozen).build().err().unwrap();
    assert!(matches!(refused, BuildError::PlanFrozen { expected: 0, got: 2 }), "{refused}");
}

#[test]
fn patterns_that_match_nothing_or_everything_are_refused() {
    let error = |pattern: &str| Pipeline::builder(mlp()).freeze(pattern).build().err().unwrap().to_string();
    let said = error("layer.0.*");
    assert!(said.contains("no parameter matches `layer.0.*`") && said.contains("`layers.0."), "{said}");
    assert!(error("*").contains("nothing to train"));
}
