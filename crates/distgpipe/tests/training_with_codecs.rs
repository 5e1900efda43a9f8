//! Models learn through codecs as they learn through raw links: real digits, client and server, and the accuracy on
//! digits they have not seen.

mod soundness;

use distgpipe::comm::codec_policy::CodecPolicy;
use distgpipe::data::Split;
use distgpipe::data::{Digits, Loader, LoaderOptions};
use distgpipe::model::zoo::{Mlp, MobileNetV2};
use distgpipe::train::learning_rate::Decay;
use distgpipe::train::{TrainOptions, Trainer};
use distgpipe::{Model, Optim, Pipeline};
use std::sync::Arc;

const CODECS: [&str; 5] = ["raw", "sort:16", "sort:12", "tile:8", "tile:4"];

/// How far apart the best and the worst may be.
const POINT: f64 = 0.01;

fn pipeline(model: &Model, balance: [usize; 3], codec: &str, rate: f64, seed: u64) -> Pipeline {
    Pipeline::builder(model.clone())
        .device(distgpipe::engine::Device::Cpu)
        .threads(1)
        .balance(balance)
        .place("client,server,client")
        .micro_batches(4)
        .optimizer(Optim::Sgd { momentum: 0.9, weight_decay: 0.0, nesterov: false })
        .learning_rate(rate)
        .seed(seed)
        .codecs(CodecPolicy::all(codec.parse().unwrap()))
        .build()
        .unwrap()
}

/// Trains, and gives the accuracy on the test digits, with the codec on.
fn learn(pipeline: &mut Pipeline, model: &Model, options: TrainOptions, seed: u64) -> f64 {
    let digits = |part| Arc::new(Digits::for_input(part, &model.input).unwrap());
    let train = Loader::new(digits(Split::Train), LoaderOptions::training(48, seed)).unwrap();
    let test = Loader::new(digits(Split::Test), LoaderOptions::testing(180)).unwrap();
    let batch = test.epoch(0).next().unwrap().unwrap();
    let trainer = Trainer::new(pipeline, train, Some(test), options).unwrap();
    let mut losses = Vec::new();
    let summary = trainer.run(soundness::losses_into(&mut losses)).unwrap();
    soundness::assert_pipeline_sound("the digits", &losses, pipeline, &batch);
    summary.test_accuracy().unwrap()
}

fn assert_close(what: &str, accuracies: &[f64], least: f64) {
    let told: Vec<String> = CODECS.iter().zip(accuracies).map(|(codec, a)| format!("{codec} {a:.4}")).collect();
    let [low, high] = [f64::min, f64::max].map(|of| accuracies.iter().copied().reduce(of).unwrap());
    assert!(high - low <= POINT, "{what}: more than a point apart: {}", told.join(", "));
    assert!(low >= least, "{what}: {}", told.join(", "));
}

#[test]
fn a_perceptron_trains_on_digits_through_every_codec() {
    const SEEDS: u64 = 3;
    let model = Mlp::default().model().unwrap();
    let options = TrainOptions { epochs: 10, rate_schedule: Decay::Cosine.into(), ..TrainOptions::default() };
    let accuracies = CODECS.map(|codec| {
        let of_seed = |seed| learn(&mut pipeline(&model, [1, 2, 1], codec, 0.05, seed), &model, options.clone(), seed);
        (0..SEEDS).map(of_seed).sum::<f64>() / SEEDS as f64
    });
    assert_close("perceptron", &accuracies, 0.95);
}

/// The gradients that two replicas share go through the codec, twice each.
#[test]
fn replicas_train_on_digits_through_codecs() {
    const SEEDS: u64 = 3;
    let model = Mlp::default().model().unwrap();
    let options = TrainOptions { epochs: 10, rate_schedule: Decay::Cosine.into(), ..TrainOptions::default() };
    let learned = ["raw", "bf16", "tile:8", "feedback(tile:4)"].map(|codec| {
        let of_seed = |seed| {
            let builder =
                Pipeline::builder(model.clone()).device(distgpipe::engine::Device::Cpu).threads(1).replicas(2);
            let codecs = CodecPolicy { replicas: codec.parse().unwrap(), ..CodecPolicy::default() };
            let builder = builder.micro_batches(1).optimizer(Optim::sgd(0.9)).learning_rate(0.05).seed(seed);
            learn(&mut builder.codecs(codecs).build().unwrap(), &model, options.clone(), seed)
        };
        (codec, (0..SEEDS).map(of_seed).sum::<f64>() / SEEDS as f64)
    });
    let (_, raw) = learned[0];
    assert!(learned.iter().all(|(_, accuracy)| (accuracy - raw).abs() <= POINT && *accuracy >= 0.95), "{learned:?}");
}

/// The first epochs go raw, once for all: what differs in the end is then the codec's doing, and not the luck of the first
/// steps, which moves this small model's accuracy by more than a point.
#[test]
fn a_small_mobilenet_trains_on_digits_through_every_codec() {
    let model = MobileNetV2 { width: 0.25, image: 8, strides: [1, 1, 2, 2, 1, 1, 1, 1], ..MobileNetV2::default() };
    let (model, balance) = (model.model().unwrap(), [1, 18, 1]);
    let options = TrainOptions { epochs: 6, ..TrainOptions::default() };
    let mut first = pipeline(&model, balance, "raw", 0.03, 0);
    learn(&mut first, &model, options.clone(), 0);
    let state = first.state().unwrap();
    let rest = TrainOptions { epochs: 3, rate_schedule: Decay::Cosine.into(), ..TrainOptions::default() };
    let accuracies = CODECS.map(|codec| {
        let mut pipeline = pipeline(&model, balance, codec, 0.01, 0);
        pipeline.load_state(&state).unwrap();
        learn(&mut pipeline, &model, rest.clone(), 1)
    });
    assert_close("MobileNetV2", &accuracies, 0.9);
}
