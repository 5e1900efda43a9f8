//! Replicas against devices that each compute a part of the batch and add up what they have.

use crate::one_device::{assert_identical, soundness, OneDevice, Subject, Tensors};
use distgpipe::comm::codec_policy::CodecPolicy;
use distgpipe::comm::timeouts::Timeouts;
use distgpipe::{Builder, Optim, Pipeline, Recompute, Workers};
use distgpipe_core::schedule::Schedule;
use std::collections::BTreeMap;

const SEED: u64 = 5;
const RATE: f64 = 0.002;

/// So many replicas of a pipeline of these workers, two micro-batches each.
pub fn replicas(subject: &Subject, count: usize, placement: &str) -> Builder {
    Pipeline::builder(subject.model.clone())
        .device(distgpipe::engine::Device::Cpu)
        .threads(1)
        .place(placement)
        .micro_batches(2)
        .replicas(count)
        .recompute(Recompute::ExceptLast)
        .loss(subject.loss)
        .precision(subject.precision)
        .optimizer(Optim::sgd(0.9))
        .learning_rate(RATE)
        .seed(SEED)
        .timeouts(Timeouts { stall_s: 20.0, ..Timeouts::default() })
}

/// What two devices have together. Two numbers have one sum, so it can be compared bit for bit.
fn sum(a: &Tensors, b: &Tensors) -> Tensors {
    a.iter().map(|(name, a)| (name.clone(), a + &b[name])).collect()
}

/// Three steps of two replicas, whole and cut, are those of two devices that add up their gradients, bit for bit.
pub fn check_two(subjects: Vec<Subject>, workers: impl Fn(usize) -> Workers) {
    for subject in subjects {
        let cases = [("one", 1, Schedule::OneFOneB), ("client,server,client", 2, Schedule::GPipe)];
        for (placement, size, schedule) in cases {
            let builder = replicas(&subject, 2, placement).schedule(schedule).workers(workers(2 * size));
            let mut pipeline = builder.build().unwrap();
            let mut losses = Vec::new();
            let mut devices = [0, 1].map(|_| (OneDevice::new(&subject, SEED), BTreeMap::new()));
            for step in 0..3 {
                let what = format!("{} {placement} step {step}", subject.name);
                // Parts of 6 and 5 rows.
                let batch = subject.batch(11, 100 + step);
                let mut parts = devices.iter_mut().enumerate().map(|(replica, (device, _))| {
                    device.gradients_of(&batch, 4, 2 * replica..2 * replica + 2, schedule)
                });
                let ((loss_a, a), (loss_b, b)) = (parts.next().unwrap(), parts.next().unwrap());
                drop(parts);
                let gradients = sum(&a, &b);
                // Looking changes nothing.
                let (looked, got) = pipeline.gradients(&batch).unwrap();
                assert_identical(&format!("{what}: gradient"), &got, &gradients);
                let outcome = pipeline.train_step(&batch).unwrap();
                for loss in [looked.loss, outcome.loss] {
                    let expected = loss_a + loss_b;
                    assert!((loss - expected).abs() <= 1e-12 * expected.abs(), "{what}: {loss} {expected}");
                }
                losses.push(outcome.loss);
                devices.iter_mut().for_each(|(device, memory)| device.sgd(&gradients, memory, RATE));
                // The first one's batch norms are everybody's.
                assert_identical(&format!("{what}: state"), &pipeline.state().unwrap(), &devices[0].0.state());
            }
            soundness::assert_losses_sound(subject.name, &losses);
        }
    }
}

/// Asserts that three replicas with codecs on their links learn with these workers what they learn in threads, bit for bit: with
/// raw gradients between them, and with codecs that remember and that draw.
pub fn check_three(subjects: Vec<Subject>, workers: impl Fn() -> Workers) {
    for subject in subjects {
        for codec in ["raw", "zstd(feedback(tile:4))", "tile:6~"] {
            let what = format!("{}, {codec} between replicas", subject.name);
            let (threads, others) = (three(&subject, codec, Workers::Threads), three(&subject, codec, workers()));
            assert_identical(&what, &others.0, &threads.0);
            assert_identical(&what, &others.1, &threads.1);
        }
    }
}

/// Gradients of three replicas with codecs on their links, and what they have learned after two steps.
fn three(subject: &Subject, codec: &str, workers: Workers) -> (Tensors, Tensors) {
    let codecs = CodecPolicy {
        links: vec!["0-1=feedback(tile:8)".parse().unwrap()],
        replicas: codec.parse().unwrap(),
        ..CodecPolicy::default()
    };
    let builder = replicas(subject, 3, "client,server,client").codecs(codecs).workers(workers);
    let mut pipeline = builder.build().unwrap();
    let losses: Vec<f64> = (0..2).map(|step| pipeline.train_step(&subject.batch(13, step)).unwrap().loss).collect();
    let (gradients, state) = (pipeline.gradients(&subject.batch(13, 2)).unwrap().1, pipeline.state().unwrap());
    soundness::assert_sound(subject.name, &losses, &state);
    soundness::assert_gradients_moderate(subject.name, &gradients);
    (gradients, state)
}
