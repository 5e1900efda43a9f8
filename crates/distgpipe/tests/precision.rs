//! bf16: what crosses, what stays, and who refuses. That gradients do not depend on the cut is in `transparency.rs`, that they
//! are PyTorch's in `golden.rs`.

mod soundness;

use distgpipe::comm::codec_policy::CodecPolicy;
use distgpipe::comm::traffic::EdgeTraffic;
use distgpipe::data::Split;
use distgpipe::data::{Digits, Loader, LoaderOptions};
use distgpipe::driver::profile;
use distgpipe::engine::{self, Stream};
use distgpipe::model::zoo::Mlp;
use distgpipe::runtime::micro_batch_pass::{Forward, Kept};
use distgpipe::runtime::partition::{Partition, PartitionOptions};
use distgpipe::tch::{Device, Kind, Tensor};
use distgpipe::train::learning_rate::Decay;
use distgpipe::train::{TrainOptions, Trainer};
use distgpipe::{Batch, Model, Optim, Pipeline, Precision};
use distgpipe_core::codec;
use distgpipe_core::partition::Balance;
use distgpipe_core::schedule::Pass;
use distgpipe_core::skip::SkipLayout;
use distgpipe_core::{MicroBatchId, PartitionId};
use std::sync::Arc;

const WIDTH: i64 = 64;

fn model() -> Model {
    Mlp { input: vec![32], hidden: vec![WIDTH, WIDTH], classes: 3, ..Mlp::default() }.model().unwrap()
}

fn pipeline(precision: Precision, codec: &str) -> Pipeline {
    Pipeline::builder(model())
        .device(engine::Device::Cpu)
        .threads(1)
        .balance([1, 1, 1])
        .place("client,server,client")
        .micro_batches(2)
        .precision(precision)
        .codecs(CodecPolicy::all(codec.parse().unwrap()))
        .build()
        .unwrap()
}

fn batch() -> Batch {
    let mut batch = profile::sample(&model(), 8, 3).unwrap();
    batch.samples = (0..8).collect();
    batch
}

#[test]
fn links_carry_two_bytes_a_value_in_bf16_and_parameters_keep_four() {
    for (precision, kind, size) in [(Precision::Fp32, Kind::Float, 4), (Precision::Bf16, Kind::BFloat16, 2)] {
        let mut pipeline = pipeline(precision, "raw");
        pipeline.capture_next();
        let (outcome, gradients) = pipeline.gradients(&batch()).unwrap();
        let captured = pipeline.captured().unwrap();
        assert_eq!(captured.len(), 2 * 2 * 2, "two cuts, two micro-batches, two ways");
        assert!(captured.values().all(|t| t.kind() == kind), "{captured:?}");
        assert!(gradients.values().all(|t| t.kind() == Kind::Float), "{gradients:?}");
        for (_, _, traffic) in outcome.links() {
            assert_eq!(traffic.payload_bytes, 2 * 8 * WIDTH as u64 * size);
        }
        let loss = pipeline.train_step(&batch()).unwrap().loss;
        soundness::assert_pipeline_sound("a step", &[loss], &mut pipeline, &batch());
        assert!(pipeline.state().unwrap().values().all(|t| t.kind() == Kind::Float));
        assert_eq!(pipeline.predict(batch().inputs).unwrap().kind(), kind);
    }
}

/// Tensors of two bytes a value go through codecs, not around them.
#[test]
fn every_codec_carries_what_a_bf16_run_sends() {
    for text in codec::ALL.iter().flat_map(|member| member.examples).filter(|text| **text != "raw") {
        let mut pipeline = pipeline(Precision::Bf16, text);
        let mut losses: Vec<f64> = (0..3).map(|_| pipeline.train_step(&batch()).unwrap().loss).collect();
        let outcome = pipeline.train_step(&batch()).unwrap();
        losses.push(outcome.loss);
        assert!(losses.iter().all(|loss| *loss < 3.0), "{text}: {losses:?}");
        soundness::assert_pipeline_sound(text, &losses, &mut pipeline, &batch());
        let sent: Vec<(Pass, EdgeTraffic)> = outcome
            .links()
            .iter()
            .flat_map(|(_, _, traffic)| &traffic.sent)
            .map(|(cut, sent)| (cut.pass, sent.clone()))
            .collect();
        assert_eq!(sent.len(), 4, "{text}");
        for (pass, EdgeTraffic { tensors, raw_bytes, wire_bytes, sent_raw, refusals, .. }) in sent {
            // 4 steps of 8 rows, in memory as they are.
            assert_eq!((tensors, raw_bytes), (8, 4 * 8 * WIDTH as u64 * 2), "{text} {pass:?}");
            assert_eq!(sent_raw, 0, "{text} {pass:?}: {refusals:?}");
            assert!(wire_bytes > 0, "{text} {pass:?}");
        }
    }
}

/// A partition of two, the second, with what arrives there.
fn second(precision: Precision) -> Partition {
    let model = Mlp { input: vec![5], hidden: vec![4, 4], classes: 3, dropout: 0.0 }.model().unwrap();
    let balance = Balance::new(vec![1, 2]).unwrap();
    let skips = SkipLayout::new(&vec![Default::default(); 3], &balance).unwrap();
    let seed = Stream::new(0);
    let how = PartitionOptions {
        balance: &balance,
        skips: &skips,
        seed,
        device: Device::Cpu,
        channels_last: true,
        precision,
    };
    Partition::build(&model, PartitionId(1), &how).unwrap()
}

fn evaluated(precision: Precision, kind: Kind) -> Result<Kind, String> {
    engine::start();
    let arrived = vec![(PartitionId(0), vec![Tensor::ones([2, 4], (kind, Device::Cpu))])];
    let mut partition = second(precision);
    let forward = Forward {
        partition: &mut partition,
        micro_batch: MicroBatchId(0),
        stream: Stream::new(0),
        arrived,
        goal: None,
    };
    forward.evaluate().map(|made| made.parcels[0].1[0].kind()).map_err(|fault| fault.to_string())
}

#[test]
fn a_worker_rejects_tensors_of_another_precision() {
    use Precision::{Bf16, Fp32};
    assert_eq!(evaluated(Fp32, Kind::Float), Ok(Kind::Float));
    assert_eq!(evaluated(Bf16, Kind::Float), Ok(Kind::BFloat16));
    assert_eq!(evaluated(Bf16, Kind::BFloat16), Ok(Kind::BFloat16));
    for (precision, kind) in [(Fp32, Kind::BFloat16), (Fp32, Kind::Half), (Bf16, Kind::Half), (Bf16, Kind::Double)] {
        let refused = evaluated(precision, kind).unwrap_err();
        assert!(refused.contains(&format!("in {precision}")) && refused.contains(&format!("{kind:?}")), "{refused}");
    }
}

/// libtorch would cast it, and nobody would know that two workers compute differently.
#[test]
fn a_gradient_of_another_type_than_its_activation_is_rejected() {
    engine::start();
    let model = Mlp { input: vec![5], hidden: vec![4], classes: 3, dropout: 0.0 }.model().unwrap();
    let balance = Balance::new(vec![1, 1]).unwrap();
    let skips = SkipLayout::new(&vec![Default::default(); 2], &balance).unwrap();
    let (seed, precision) = (Stream::new(0), Precision::Bf16);
    let how = PartitionOptions {
        balance: &balance,
        skips: &skips,
        seed,
        device: Device::Cpu,
        channels_last: true,
        precision,
    };
    let mut partition = Partition::build(&model, PartitionId(0), &how).unwrap();
    let mut backward = |kind: Kind| {
        let arrived = vec![(PartitionId(0), vec![Tensor::ones([2, 5], (Kind::Float, Device::Cpu))])];
        let micro_batch = MicroBatchId(0);
        let forward = Forward { partition: &mut partition, micro_batch, stream: Stream::new(0), arrived, goal: None };
        let (_, flight) = forward.train(Kept::Activations, |_| true).unwrap();
        let gradient = Tensor::ones([2, 4], (kind, Device::Cpu));
        flight.unwrap().backward(vec![vec![Some(gradient)]], None).map(|_| ()).map_err(|fault| fault.to_string())
    };
    assert_eq!(backward(Kind::BFloat16), Ok(()));
    let refused = backward(Kind::Float).unwrap_err();
    assert!(refused.contains("a gradient of type BFloat16 from partition 1") && refused.contains("Float"), "{refused}");
}

#[test]
fn a_perceptron_trains_on_digits_in_bf16_through_codecs() {
    let model = Mlp::default().model().unwrap();
    let options = TrainOptions { epochs: 10, rate_schedule: Decay::Cosine.into(), ..TrainOptions::default() };
    for codec in ["raw", "f16", "sort:8", "uniform:8", "tile:4", "delta(tile:4)"] {
        let mut pipeline = Pipeline::builder(model.clone())
            .device(engine::Device::Cpu)
            .threads(1)
            .balance([1, 2, 1])
            .place("client,server,client")
            .micro_batches(4)
            .optimizer(Optim::Sgd { momentum: 0.9, weight_decay: 0.0, nesterov: false })
            .learning_rate(0.05)
            .precision(Precision::Bf16)
            .codecs(CodecPolicy::all(codec.parse().unwrap()))
            .build()
            .unwrap();
        let digits = |part| Arc::new(Digits::for_input(part, &model.input).unwrap());
        let train = Loader::new(digits(Split::Train), LoaderOptions::training(48, 0)).unwrap();
        let test = Loader::new(digits(Split::Test), LoaderOptions::testing(180)).unwrap();
        let batch = test.epoch(0).next().unwrap().unwrap();
        let trainer = Trainer::new(&mut pipeline, train, Some(test), options.clone()).unwrap();
        let mut losses = Vec::new();
        let accuracy = trainer.run(soundness::losses_into(&mut losses)).unwrap().test_accuracy().unwrap();
        soundness::assert_pipeline_sound(codec, &losses, &mut pipeline, &batch);
        assert!(accuracy >= 0.94, "{codec}: {accuracy}");
    }
}
