//! What links do with codecs beside rounding: raw where it has to be, counted, captured. That they round as one device
//! would is in `transparency.rs`.

mod soundness;

use distgpipe::comm::codec_policy::CodecPolicy;
use distgpipe::comm::traffic::EdgeTraffic;
use distgpipe::driver::pipeline::StepOutcome;
use distgpipe::driver::profile;
use distgpipe::model::zoo::{Mlp, Roberta};
use distgpipe::{Batch, Model, Pipeline};
use distgpipe_core::schedule::Pass;
use distgpipe_core::wire::HEADER_BYTES;

fn codecs(forward: &str, backward: &str) -> CodecPolicy {
    CodecPolicy { forward: forward.parse().unwrap(), backward: backward.parse().unwrap(), ..CodecPolicy::default() }
}

fn model() -> Model {
    Mlp { input: vec![32], hidden: vec![64], classes: 3, ..Mlp::default() }.model().unwrap()
}

fn mlp(codecs: CodecPolicy) -> Pipeline {
    Pipeline::builder(model())
        .device(distgpipe::engine::Device::Cpu)
        .threads(1)
        .balance([1, 1])
        .place("a,b")
        .micro_batches(2)
        .codecs(codecs)
        .build()
        .unwrap()
}

fn batch(rows: usize) -> Batch {
    profile::sample(&model(), rows, 3).unwrap()
}

/// What a worker has sent in a pass.
fn sent(outcome: &StepOutcome, pass: Pass) -> EdgeTraffic {
    let links = outcome.workers.iter().flat_map(|worker| &worker.report.links);
    let mut cuts = links.flat_map(|(_, traffic)| &traffic.sent).filter(|(cut, _)| cut.pass == pass);
    cuts.next().map(|(_, sent)| sent.clone()).unwrap_or_default()
}

/// 8 rows of 64 floats in two messages.
const RAW: u64 = 8 * 64 * 4;
const RAW_FRAMES: u64 = RAW + 2 * HEADER_BYTES as u64;
/// In `uniform:8`: a byte each, and a table of 8 bytes a message.
const UNIFORM_FRAMES: u64 = RAW / 4 + 2 * (8 + HEADER_BYTES as u64);

#[test]
fn warm_up_steps_are_sent_raw_and_counted() {
    let mut pipeline = mlp(CodecPolicy { warm_up_steps: 2, ..codecs("uniform:8", "uniform:8") });
    let (mut carried, mut losses) = (0, Vec::new());
    for step in 0..4 {
        let outcome = pipeline.train_step(&batch(8)).unwrap();
        losses.push(outcome.loss);
        let EdgeTraffic { raw_bytes, wire_bytes, sent_raw, .. } = sent(&outcome, Pass::Forward);
        carried += if step < 2 { RAW_FRAMES } else { UNIFORM_FRAMES };
        let warm = 2 * (step + 1).min(2);
        assert_eq!((raw_bytes, wire_bytes, sent_raw), ((step + 1) * RAW, carried, warm), "step {step}");
    }
    soundness::assert_pipeline_sound("warm-up", &losses, &mut pipeline, &batch(8));
}

#[test]
fn evaluation_uses_the_codec_of_training_unless_turned_off() {
    let loss = |codecs: CodecPolicy| mlp(codecs).evaluate(&batch(8)).unwrap().loss;
    let raw = loss(CodecPolicy::default());
    assert_ne!(loss(codecs("uniform:1", "raw")), raw);
    assert_eq!(loss(codecs("raw", "uniform:1")), raw);
    assert_eq!(loss(CodecPolicy { evaluate: false, ..codecs("uniform:1", "uniform:1") }), raw);
}

/// What a codec cannot carry goes raw, is counted, and arrives as it was.
#[test]
fn a_tensor_with_nan_is_sent_raw_and_counted() {
    let mut pipeline = mlp(codecs("uniform:8", "uniform:8"));
    let damaged = batch(8);
    let _ = damaged.inputs[0].get(0).fill_(f64::NAN);
    let outcome = pipeline.evaluate(&damaged).unwrap();
    assert!(outcome.loss.is_nan());
    let traffic = sent(&outcome, Pass::Forward);
    // The first micro-batch has the row; the second is encoded.
    assert_eq!((traffic.tensors, traffic.sent_raw), (2, 1));
    let refusal = &traffic.refusals["not finite"];
    assert!(refusal.contains("got a NaN or an infinity at element 0"), "{refusal}");
    assert_eq!(traffic.wire_bytes, (RAW_FRAMES + UNIFORM_FRAMES) / 2);
}

#[test]
fn an_integer_mask_is_sent_raw_next_to_encoded_activations() {
    let small = Roberta { layers: 1, hidden: 16, heads: 2, feed_forward: 16, tokens: 7, ..Roberta::default() };
    let model = small.model().unwrap();
    let mut pipeline = Pipeline::builder(model.clone())
        .device(distgpipe::engine::Device::Cpu)
        .threads(1)
        .balance([2, model.layers.len() - 2])
        .micro_batches(2)
        .codecs(codecs("tile:8", "tile:8"))
        .build()
        .unwrap();
    let batch = profile::sample(&model, 4, 1).unwrap();
    let outcome = pipeline.train_step(&batch).unwrap();
    soundness::assert_pipeline_sound("roberta", &[outcome.loss], &mut pipeline, &batch);
    let traffic = sent(&outcome, Pass::Forward);
    assert_eq!((traffic.tensors, traffic.sent_raw), (4, 2));
    assert!(traffic.refusals["type"].contains("expected an F32, F16 or BF16 tensor for codec"));
}

#[test]
fn a_step_is_captured_as_it_was_before_the_codec() {
    let names = ["activation.0-1.0.0", "activation.0-1.1.0", "gradient.1-0.0.0", "gradient.1-0.1.0"];
    let captured = |codecs| {
        let mut pipeline = mlp(codecs);
        pipeline.capture_next();
        let first = pipeline.train_step(&batch(8)).unwrap().loss;
        let captured = pipeline.captured().unwrap();
        assert!(pipeline.captured().unwrap().is_empty(), "taken");
        let second = pipeline.train_step(&batch(8)).unwrap().loss;
        assert!(pipeline.captured().unwrap().is_empty(), "the next step was not asked");
        soundness::assert_pipeline_sound("captured", &[first, second], &mut pipeline, &batch(8));
        captured
    };
    let (raw, coded) = (captured(CodecPolicy::default()), captured(codecs("uniform:1", "raw")));
    assert!(raw.keys().eq(names.iter()), "{:?}", raw.keys());
    assert_eq!(raw[names[0]].size(), [4, 64]);
    // The activations are the same; the gradients are of another loss.
    assert_eq!(raw[names[0]], coded[names[0]]);
    assert_ne!(raw[names[2]], coded[names[2]]);
}

#[test]
fn codecs_for_links_that_do_not_exist_are_rejected() {
    let model = Mlp::default().model().unwrap();
    let codecs = CodecPolicy { links: vec!["0-2=f16".parse().unwrap()], ..CodecPolicy::default() };
    let error = Pipeline::builder(model).balance([2, 2]).codecs(codecs).build().err().unwrap().to_string();
    assert!(error.contains("expected codecs for one of the run's links, 0-1; got some for 0-2"), "{error}");
}
