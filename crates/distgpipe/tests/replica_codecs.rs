//! Codecs on the gradients that replicas share: what is lost is what the codec loses at each hop, and all replicas have the same bits.

#[allow(dead_code)]
mod one_device;

use distgpipe::comm::codec_policy::CodecPolicy;
use distgpipe::comm::handshake::Token;
use distgpipe::model::zoo::Mlp;
use distgpipe::tch::{Device, Kind, Tensor};
use distgpipe::{Batch, Builder, Loss, Optim, Pipeline, Precision, ServeOptions, Server, Workers};
use distgpipe_core::codec::{Codec, CodecContext, CodecSpec, SerialExecutor, TensorView};
use distgpipe_core::schedule::Schedule;
use distgpipe_core::wire::{DType, Layout, Shape, TensorMeta, HEADER_BYTES};
use one_device::{assert_identical, bytes, soundness, OneDevice, Subject, Tensors};
use std::collections::BTreeMap;
use std::sync::Arc;

const SEED: u64 = 5;
const RATE: f64 = 0.05;

/// One of each kind that suits gradients, with and without state and randomness.
const CODECS: [&str; 10] = [
    "bf16",
    "f16",
    "uniform:8",
    "sort:8",
    "fast:8",
    "tile:4",
    "tile:3~",
    "feedback(tile:4)",
    "feedback(topk:0.1)",
    "zstd(feedback(tile:2))",
];

fn subject(hidden: Vec<i64>) -> Subject {
    let model = Mlp { hidden, dropout: 0.1, ..Mlp::default() }.model().unwrap();
    Subject { name: "mlp", model, loss: Loss::CrossEntropy, precision: Precision::Fp32 }
}

fn spec(text: &str) -> CodecSpec {
    text.parse().unwrap()
}

fn replicas(subject: &Subject, count: usize, codec: &str) -> Builder {
    Pipeline::builder(subject.model.clone())
        .device(distgpipe::engine::Device::Cpu)
        .threads(1)
        .micro_batches(1)
        .replicas(count)
        .codecs(CodecPolicy { replicas: spec(codec), ..CodecPolicy::default() })
        .loss(subject.loss)
        .optimizer(Optim::sgd(0.9))
        .learning_rate(RATE)
        .seed(SEED)
}

/// Digits that are not: each class has its own waves.
fn batch(rows: i64, seed: i64) -> Batch {
    let classes = (Tensor::arange(rows, (Kind::Int64, Device::Cpu)) * 7 + seed).remainder(10);
    let pixels = Tensor::arange(64, (Kind::Float, Device::Cpu)).view([1, 64]);
    let phase = classes.to_kind(Kind::Float).view([rows, 1]) * 0.7 + 0.1 * seed as f64;
    Batch::new((pixels * 0.37 + phase).sin().view([rows, 1, 8, 8]), classes)
}

/// What each replica answers to the same rows.
fn answers(pipeline: &mut Pipeline, count: i64) -> Vec<Vec<u8>> {
    let rows = 6;
    let x = batch(rows, 77).inputs.remove(0).repeat([count, 1, 1, 1]);
    let output = pipeline.predict(vec![x]).unwrap();
    (0..count).map(|replica| bytes(&output.narrow(0, replica * rows, rows).contiguous())).collect()
}

#[test]
fn replicas_stay_identical_with_every_codec() {
    let subject = subject(vec![40, 30]);
    for codec in CODECS {
        for count in [2, 3, 5] {
            let mut pipeline = replicas(&subject, count, codec).build().unwrap();
            let steps = 12;
            let losses: Vec<f64> = (0..steps).map(|step| pipeline.train_step(&batch(30, step)).unwrap().loss).collect();
            let answers = answers(&mut pipeline, count as i64);
            assert!(answers.iter().all(|answer| *answer == answers[0]), "{codec}, {count} replicas differ");
            soundness::assert_losses_sound(codec, &losses);
            assert!(losses[11] < losses[0], "{codec}, {count} replicas learn: {losses:?}");
        }
    }
}

/// The encoders of one share on its way round the ring.
struct Hops {
    encoders: Vec<Box<dyn Codec>>,
    decoder: Box<dyn Codec>,
}

impl Hops {
    fn new(codec: &str, replicas: usize) -> Self {
        let new = || spec(codec).codec(Arc::new(SerialExecutor));
        Hops { encoders: (0..replicas).map(|_| new()).collect(), decoder: new() }
    }

    /// What the codec makes of these values at a hop.
    fn rounded(&mut self, hop: usize, values: &Tensor, training: bool) -> Tensor {
        let dims = [values.numel()];
        let view = TensorView { dtype: DType::F32, dims: &dims, layout: Layout::Contiguous, bytes: &bytes(values) };
        let mut body = Vec::new();
        self.encoders[hop].encode(view, &CodecContext { training, ..CodecContext::default() }, &mut body).unwrap();
        let shape = Shape::new(&dims).unwrap();
        let meta = TensorMeta { dtype: DType::F32, layout: Layout::Contiguous, shape, codec: self.decoder.id() };
        let mut decoded = vec![0; 4 * values.numel()];
        self.decoder.decode(&meta, &body, &mut decoded).unwrap();
        let floats: Vec<f32> = decoded.chunks_exact(4).map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect();
        Tensor::from_slice(&floats)
    }
}

/// The sum over devices of one bucket of gradients, share by share, with the codec at every hop.
struct RoundingSum {
    hops: Vec<Hops>,
}

impl RoundingSum {
    fn new(codec: &str, devices: usize) -> Self {
        RoundingSum { hops: (0..devices).map(|_| Hops::new(codec, devices)).collect() }
    }

    fn of(&mut self, names: &[String], gradients: &[Tensors], training: bool) -> Tensors {
        let devices = gradients.len();
        let shares: Vec<Vec<Tensor>> = gradients
            .iter()
            .map(|own| {
                let flat: Vec<Tensor> = names.iter().rev().map(|name| own[name].reshape([-1])).collect();
                Tensor::cat(&flat, 0).tensor_split(devices as i64, 0)
            })
            .collect();
        let sums: Vec<Tensor> = (0..devices)
            .map(|share| {
                let mut sum = shares[share][share].shallow_clone();
                for hop in 0..devices - 1 {
                    let next = &shares[(share + hop + 1) % devices][share];
                    sum = self.hops[share].rounded(hop, &sum, training) + next;
                }
                self.hops[share].rounded(devices - 1, &sum, training)
            })
            .collect();
        let (flat, mut at) = (Tensor::cat(&sums, 0), 0);
        let mut all = Tensors::new();
        for name in names.iter().rev() {
            let like = &gradients[0][name];
            let elements = like.numel() as i64;
            all.insert(name.clone(), flat.narrow(0, at, elements).view(&like.size()[..]).copy());
            at += elements;
        }
        all
    }
}

/// Replicas with a codec are devices that round the partial sums of their gradients, bit for bit.
#[test]
fn replicas_with_a_codec_are_devices_that_round_at_each_hop() {
    let subject = subject(vec![33, 17]);
    for codec in ["bf16", "tile:8", "sort:8", "feedback(tile:4)", "feedback(topk:0.1)", "zstd(tile:4)"] {
        for count in [2, 3, 4] {
            let what = format!("{codec}, {count} replicas");
            let mut pipeline = replicas(&subject, count, codec).build().unwrap();
            let names: Vec<String> = pipeline.state_specs().iter().map(|spec| spec.name.clone()).collect();
            let mut devices: Vec<_> = (0..count).map(|_| (OneDevice::new(&subject, SEED), BTreeMap::new())).collect();
            let mut sum = RoundingSum::new(codec, count);
            for step in 0..4 {
                let batch = batch(30, step);
                let gradients: Vec<Tensors> = devices
                    .iter_mut()
                    .enumerate()
                    .map(|(replica, (device, _))| {
                        device.gradients_of(&batch, count, replica..replica + 1, Schedule::OneFOneB).1
                    })
                    .collect();
                // Looking leaves no trace in what a codec remembers.
                let looked = pipeline.gradients(&batch).unwrap().1;
                assert_identical(&format!("{what}: gradients"), &looked, &sum.of(&names, &gradients, false));
                let total = sum.of(&names, &gradients, true);
                pipeline.train_step(&batch).unwrap();
                devices.iter_mut().for_each(|(device, memory)| device.sgd(&total, memory, RATE));
                assert_identical(&format!("{what}: step {step}"), &pipeline.state().unwrap(), &devices[0].0.state());
            }
        }
    }
}

/// The bound in docs/training.md.
#[test]
fn a_value_loses_the_codecs_error_once_for_each_replica() {
    let subject = subject(vec![40, 30]);
    for count in [2, 3, 5] {
        let batch = batch(30, 1);
        let exact = replicas(&subject, count, "raw").build().unwrap().gradients(&batch).unwrap().1;
        let coded = replicas(&subject, count, "bf16").build().unwrap().gradients(&batch).unwrap().1;
        let mut magnitudes: Tensors = exact.iter().map(|(name, t)| (name.clone(), t.zeros_like())).collect();
        for replica in 0..count {
            let mut device = OneDevice::new(&subject, SEED);
            let own = device.gradients_of(&batch, count, replica..replica + 1, Schedule::OneFOneB).1;
            for (name, gradient) in own {
                let sum = &magnitudes[&name] + gradient.abs();
                magnitudes.insert(name, sum);
            }
        }
        let mut largest = 0.0f64;
        for (name, exact) in &exact {
            let bound = &magnitudes[name] * (count as f64 * 1.01 / 256.0) + 1e-30;
            let share = f64::try_from(((&coded[name] - exact).abs() / bound).max()).unwrap();
            largest = largest.max(share);
        }
        assert!(largest <= 1.0, "{count} replicas: {largest} of the bound");
        assert!(largest > 0.1, "{count} replicas: something is lost: {largest}");
    }
}

/// A worker on a thread of this process that serves one run over a socket.
fn server(token: Token) -> String {
    let listen = "127.0.0.1:0".parse().expect("an address");
    let server = Server::bind(ServeOptions { once: true, ..ServeOptions::new(listen, token) }).expect("a port");
    let address = server.address().expect("an address").to_string();
    std::thread::spawn(move || server.run(|| false, |_| {}));
    address
}

/// What the table says of the codec is what the socket carried.
#[test]
fn bytes_of_shares_are_those_of_the_socket() {
    let subject = subject(vec![600, 600]);
    let links = |codec: &str| {
        let token = Token([7; 32]);
        let workers = Workers::Remote { addresses: vec![server(token)], token };
        let mut pipeline = replicas(&subject, 2, codec).workers(workers).build().unwrap();
        pipeline.train_step(&batch(30, 0)).unwrap();
        let before = pipeline.train_step(&batch(30, 1)).unwrap();
        let after = pipeline.train_step(&batch(30, 2)).unwrap();
        let shares = |outcome: &distgpipe::StepOutcome| outcome.links()[0].2.shares.clone();
        let (before, shares) = (shares(&before), shares(&after));
        let added = shares.wire_bytes - before.wire_bytes;
        (after.step_links[0].training_bytes, added, shares.raw_bytes - before.raw_bytes, shares)
    };
    let (raw_bytes, counted, _, _) = links("raw");
    assert_eq!(counted, 0, "without a codec there is nothing to say of it");
    let elements: u64 = 64 * 600 + 600 + 600 * 600 + 600 + 600 * 10 + 10;
    // One bucket, in two shares: each worker sends one of each to the other.
    let parameters = 6;
    let exact = 4 * parameters + 2 * HEADER_BYTES as u64;
    for (codec, bits) in [("bf16", 16.0), ("tile:8", 8.5), ("feedback(tile:4)", 4.5)] {
        let (carried, wire, raw, shares) = links(codec);
        assert_eq!(raw, 4 * elements, "{codec}");
        // On the link to the second replica there are its rows and targets, too.
        assert_eq!(raw_bytes - carried, raw + 2 * HEADER_BYTES as u64 - wire, "{codec}");
        let expected = elements as f64 * bits / 8.0 + 2.0 * HEADER_BYTES as f64;
        assert!((wire as f64 / expected - 1.0).abs() < 0.01, "{codec}: {wire} of {expected}");
        assert!(carried > wire + exact && (shares.sent_raw, shares.refusals.len()) == (0, 0), "{codec}: {shares:?}");
    }
}

/// A gradient that is not finite goes raw to every replica, and is not hidden.
#[test]
fn gradients_that_are_not_finite_are_sent_raw() {
    let subject = subject(vec![20]);
    let mut pipeline = replicas(&subject, 3, "tile:8").build().unwrap();
    let poisoned = batch(30, 0);
    let _ = poisoned.inputs[0].get(29).fill_(f64::INFINITY);
    let (outcome, gradients) = pipeline.gradients(&poisoned).unwrap();
    assert!(gradients.values().any(|t| f64::try_from(t.isnan().any().to_kind(Kind::Double)).unwrap() > 0.0));
    let links = outcome.links();
    let refused: Vec<&String> = links.iter().flat_map(|(_, _, traffic)| traffic.shares.refusals.keys()).collect();
    assert!(!refused.is_empty() && refused.iter().all(|kind| *kind == "not finite"), "{refused:?}");
}

/// Raw in the first steps, and with the codec from then on.
#[test]
fn the_warm_up_applies_to_shares_too() {
    let subject = subject(vec![20]);
    let learned = |codec: &str, warm_up_steps: u64, steps: i64| {
        let codecs = CodecPolicy { replicas: spec(codec), warm_up_steps, ..CodecPolicy::default() };
        let mut pipeline = replicas(&subject, 2, codec).codecs(codecs).build().unwrap();
        (0..steps).for_each(|step| drop(pipeline.train_step(&batch(20, step)).unwrap()));
        pipeline.state().unwrap()
    };
    assert_identical("two steps of warm-up", &learned("tile:2", 2, 2), &learned("raw", 0, 2));
    let (warm, raw) = (learned("tile:2", 2, 3), learned("raw", 0, 3));
    assert!(warm.iter().any(|(name, t)| !one_device::same_bits(t, &raw[name])));
}

#[test]
fn a_codec_that_does_not_suit_gradients_is_refused() {
    let error = replicas(&subject(vec![20]), 2, "delta(tile:4)").build().err().unwrap().to_string();
    assert!(error.contains("`CodecPolicy::replicas`: expected a codec for flat tensors of gradients"), "{error}");
}
