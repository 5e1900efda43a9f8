//! The matrix of law 1, run by every transport.

use crate::one_device::{assert_identical, every_kind, in_bf16, soundness, subjects, OneDevice, Subject, Tensors};
use distgpipe::comm::timeouts::Timeouts;
use distgpipe::{Optim, Pipeline, Recompute, Schedule, Workers};
use std::collections::BTreeMap;

/// Partitions and where they run.
const PLACEMENTS: [&str; 6] = ["a", "a,b", "a,b,c", "a,b,c,d", "client,server,client", "a,b,a,b"];

/// Even and ragged: rows and micro-batches.
const BATCHES: [(i64, usize); 2] = [(8, 4), (11, 4)];

const RECOMPUTES: [Recompute; 3] = [Recompute::Never, Recompute::ExceptLast, Recompute::Always];

const SEED: u64 = 5;

/// The learning rate of plain SGD with momentum 0.9.
const RATE: f64 = 0.01;

/// What one device makes of the batches: per schedule order, the first gradients and the state after a step.
struct Truth {
    loss: f64,
    gradients: Tensors,
    state: Tensors,
}

fn truth(subject: &Subject, (rows, micro_batches): (i64, usize), schedule: Schedule) -> Truth {
    let mut device = OneDevice::new(subject, SEED);
    let (loss, gradients) = device.gradients(&subject.batch(rows, 1), micro_batches, schedule);
    device.discard_norms();
    let (_, second) = device.gradients(&subject.batch(rows, 2), micro_batches, schedule);
    device.sgd(&second, &mut Tensors::new(), RATE);
    Truth { loss, gradients, state: device.state() }
}

/// Checks one model in every combination; `workers` says where the workers of a placement run.
pub fn check_model(name: &str, workers: impl Fn(usize) -> Workers) {
    check_combinations(&of_name(subjects(), name), &PLACEMENTS, &BATCHES, &RECOMPUTES, workers);
}

/// The same under autocast, with the cuts and batches at which something could differ.
pub fn check_model_in_bf16(name: &str, workers: impl Fn(usize) -> Workers) {
    let subject = of_name(in_bf16(subjects()), name);
    let [plain, cast] = [&of_name(subjects(), name), &subject].map(|s| truth(s, BATCHES[1], Schedule::GPipe).loss);
    assert!(plain != cast && (plain - cast).abs() < 0.1 * plain, "{name}: loss {plain}, under autocast {cast}");
    let placements = ["a,b", "a,b,c", "client,server,client"];
    check_combinations(&subject, &placements, &BATCHES[1..], &[Recompute::Never, Recompute::Always], workers);
}

fn of_name(all: Vec<Subject>, name: &str) -> Subject {
    all.into_iter().find(|s| s.name == name).expect("a model of the matrix")
}

fn check_combinations(
    subject: &Subject,
    placements: &[&str],
    batches: &[(i64, usize)],
    recomputes: &[Recompute],
    workers: impl Fn(usize) -> Workers,
) {
    let name = subject.name;
    for &batch in batches {
        for backward_first in [Schedule::GPipe, Schedule::OneFOneB] {
            let truth = truth(subject, batch, backward_first);
            for schedule in
                Schedule::ALL.into_iter().filter(|&s| (s == Schedule::GPipe) == (backward_first == Schedule::GPipe))
            {
                for placement in placements {
                    for &recompute in recomputes {
                        let what = format!("{name} {schedule} {placement} {recompute} {batch:?}");
                        check_one(subject, &truth, &what, (schedule, placement, recompute, batch), &workers);
                    }
                }
            }
        }
    }
}

type Case<'a> = (Schedule, &'a str, Recompute, (i64, usize));

fn check_one(subject: &Subject, truth: &Truth, what: &str, case: Case<'_>, workers: &impl Fn(usize) -> Workers) {
    let (schedule, placement, recompute, (rows, micro_batches)) = case;
    let distinct: std::collections::BTreeSet<&str> = placement.split(',').collect();
    let mut pipeline = Pipeline::builder(subject.model.clone())
        .device(distgpipe::engine::Device::Cpu)
        .threads(1)
        .place(placement)
        .micro_batches(micro_batches)
        .schedule(schedule)
        .recompute(recompute)
        .loss(subject.loss)
        .precision(subject.precision)
        .optimizer(Optim::sgd(0.9))
        .learning_rate(RATE)
        .seed(SEED)
        .timeouts(Timeouts { stall_s: 20.0, ..Timeouts::default() })
        .workers(workers(distinct.len()))
        .build()
        .unwrap_or_else(|e| panic!("{what}: {e}"));
    let (outcome, gradients) = pipeline.gradients(&subject.batch(rows, 1)).unwrap_or_else(|e| panic!("{what}: {e}"));
    assert!(
        (outcome.loss - truth.loss).abs() <= 1e-12 * truth.loss.abs(),
        "{what}: loss {} {}",
        outcome.loss,
        truth.loss
    );
    assert_identical(&format!("{what}: gradient"), &gradients, &truth.gradients);
    pipeline.train_step(&subject.batch(rows, 2)).unwrap_or_else(|e| panic!("{what}: {e}"));
    let state = pipeline.state().unwrap_or_else(|e| panic!("{what}: {e}"));
    assert_identical(&format!("{what}: state"), &state, &truth.state);
}

/// Two partitions of every model, cut after each of its layers in turn: skips, second states and masks cross there.
pub fn check_every_cut(workers: impl Fn(usize) -> Workers) {
    check_cuts(every_kind(), workers);
}

/// The same under autocast, where the types of what crosses differ from cut to cut.
pub fn check_every_cut_in_bf16(workers: impl Fn(usize) -> Workers) {
    check_cuts(in_bf16(every_kind()), workers);
}

fn check_cuts(subjects: Vec<Subject>, workers: impl Fn(usize) -> Workers) {
    for subject in subjects {
        let batch = subject.batch(9, 1);
        let (loss, expected) = OneDevice::new(&subject, SEED).gradients(&batch, 2, Schedule::OneFOneB);
        let layers = subject.model.layers.len();
        for first in 1..layers {
            let what = format!("{} cut after {}", subject.name, subject.model.layers[first - 1].name());
            let mut pipeline = Pipeline::builder(subject.model.clone())
                .device(distgpipe::engine::Device::Cpu)
                .threads(1)
                .balance([first, layers - first])
                .micro_batches(2)
                .schedule(Schedule::OneFOneB)
                // One micro-batch is recomputed, the other kept.
                .recompute(Recompute::ExceptLast)
                .loss(subject.loss)
                .precision(subject.precision)
                .seed(SEED)
                .workers(workers(2))
                .build()
                .unwrap_or_else(|e| panic!("{what}: {e}"));
            let (outcome, gradients) = pipeline.gradients(&batch).unwrap_or_else(|e| panic!("{what}: {e}"));
            assert!((outcome.loss - loss).abs() <= 1e-12 * loss.abs(), "{what}: loss {} {loss}", outcome.loss);
            assert_identical(&what, &gradients, &expected);
        }
    }
}

/// Ten steps of training have the losses of one device.
pub fn check_ten_steps(workers: impl Fn(usize) -> Workers) {
    for subject in subjects() {
        let mut device = OneDevice::new(&subject, SEED);
        let mut memory = BTreeMap::new();
        let mut pipeline = Pipeline::builder(subject.model.clone())
            .device(distgpipe::engine::Device::Cpu)
            .threads(1)
            .place("client,server,client")
            .micro_batches(3)
            .schedule(Schedule::OneFOneB)
            .recompute(Recompute::ExceptLast)
            .loss(subject.loss)
            .optimizer(Optim::sgd(0.9))
            .learning_rate(RATE)
            .seed(SEED)
            .workers(workers(2))
            .build()
            .unwrap();
        let mut losses = Vec::new();
        for step in 0..10 {
            let batch = subject.batch(10, 100 + step % 3);
            let (expected, gradients) = device.gradients(&batch, 3, Schedule::OneFOneB);
            device.sgd(&gradients, &mut memory, RATE);
            let got = pipeline.train_step(&batch).unwrap().loss;
            let tolerance = 1e-6 * expected.abs().max(1e-3);
            // Evaluating and looking at gradients in between must change nothing.
            pipeline.evaluate(&batch).unwrap();
            pipeline.gradients(&batch).unwrap();
            assert!((got - expected).abs() <= tolerance, "{} step {step}: {got} against {expected}", subject.name);
            losses.push(got);
        }
        soundness::assert_losses_sound(subject.name, &losses);
    }
}
