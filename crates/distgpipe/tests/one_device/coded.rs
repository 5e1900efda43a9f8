//! Links with a codec, run by every transport: what a pipeline computes is what one device computes that rounds at the
//! cuts.

use crate::one_device::{assert_identical, in_bf16, subjects, Subject, Tensors};
use distgpipe::codecs::Codecs;
use distgpipe::core::codec::{self, Codec, Context, TensorView};
use distgpipe::core::microbatch::MicroBatches;
use distgpipe::core::partition::Balance;
use distgpipe::core::schedule::Pass;
use distgpipe::core::skip::{SkipLayout, SkipUse};
use distgpipe::core::wire::{self, DType, Shape, TensorMeta, HEADER_BYTES};
use distgpipe::core::{MicroBatchId, PartitionId};
use distgpipe::engine::{self, Autocast, Layout, Stream};
use distgpipe::layer::{Passing, Role};
use distgpipe::partition::{Building, Partition};
use distgpipe::tch::{Device, Kind, Tensor};
use distgpipe::{Batch, Pipeline, Schedule, Workers};
use std::collections::BTreeMap;

const SEED: u64 = 7;
const ROWS: i64 = 11;
const MICRO_BATCHES: usize = 4;

/// A codec for activations and one for gradients.
const PAIRS: [(&str, &str); 6] = [
    ("raw", "raw"),
    ("f16", "bf16"),
    ("uniform:8", "sort:8"),
    ("sort:4", "uniform:12"),
    ("tile:4", "tile:8"),
    ("raw", "tile:3"),
];

/// One device that sends what crosses a cut through a codec.
struct Rounding {
    partitions: Vec<Partition>,
    codecs: BTreeMap<(Pass, usize), Box<dyn Codec>>,
    /// What the frames of all tensors take.
    wire_bytes: u64,
}

impl Rounding {
    fn new(subject: &Subject, balance: &Balance, forward: &str, backward: &str) -> Self {
        engine::start();
        engine::attach_thread(1, 0);
        let uses: Vec<SkipUse> = subject.model.layers.iter().map(|l| l.skips()).collect();
        let skips = SkipLayout::new(&uses, balance).unwrap();
        let seed = Stream::new(SEED).named("weights");
        let how = Building {
            balance,
            skips: &skips,
            seed,
            device: Device::Cpu,
            channels_last: true,
            precision: subject.precision,
        };
        let ids = (0..balance.partitions()).map(PartitionId::new);
        let partitions = ids.map(|p| Partition::build(&subject.model, p, &how).unwrap()).collect();
        let mut codecs = BTreeMap::new();
        for cut in 0..balance.partitions() - 1 {
            codecs.insert((Pass::Forward, cut), codec::parse(forward).unwrap());
            codecs.insert((Pass::Backward, cut), codec::parse(backward).unwrap());
        }
        Rounding { partitions, codecs, wire_bytes: 0 }
    }

    /// The loss and every parameter's gradient.
    fn gradients(&mut self, subject: &Subject, batch: &Batch) -> (f64, Tensors) {
        let rows = MicroBatches::split(batch.rows(), MICRO_BATCHES).unwrap();
        let mut loss = 0.0;
        for m in rows.ids() {
            let range = rows.range(m);
            let slice = |t: &Tensor| t.narrow(0, range.start as i64, range.len() as i64);
            let inputs: Vec<Tensor> =
                batch.inputs.iter().map(|t| distgpipe::recompute::for_convolutions(slice(t)).unwrap()).collect();
            let casting = Autocast::enter(subject.precision, Device::Cpu).unwrap();
            let (arrived, made) = self.forward(m, inputs);
            let last = made.last().unwrap();
            let of_rows = subject.loss.compute(&last[0], &slice(&batch.target)).unwrap();
            drop(casting);
            loss += f64::try_from(&of_rows).unwrap() * range.len() as f64;
            (of_rows * rows.share(m)).backward();
            for cut in (0..self.partitions.len() - 1).rev() {
                let gradients: Vec<(Tensor, Option<Tensor>)> = made[cut]
                    .iter()
                    .zip(&arrived[cut + 1])
                    .filter(|(sent, _)| sent.requires_grad())
                    .map(|(sent, came)| (sent.shallow_clone(), Some(self.round((Pass::Backward, cut), &came.grad()))))
                    .collect();
                engine::backward(&gradients).unwrap();
            }
        }
        let tensors = self.partitions.iter().flat_map(Partition::tensors);
        let parameters = tensors.filter(|(spec, _)| spec.role == Role::Parameter);
        (loss / batch.rows() as f64, parameters.map(|(spec, t)| (spec.name.clone(), t.grad().copy())).collect())
    }

    /// What arrives at each partition and what each makes, for one micro-batch.
    fn forward(&mut self, m: MicroBatchId, inputs: Vec<Tensor>) -> (Vec<Vec<Tensor>>, Vec<Vec<Tensor>>) {
        let stream = Stream::new(SEED).named("steps").at(0).at(u64::from(m.0));
        let (mut arrived, mut made) = (vec![inputs], Vec::new());
        for p in 0..self.partitions.len() {
            let inputs = arrived[p].iter().map(Tensor::shallow_clone).collect();
            let (outputs, _) = self.partitions[p].forward(Passing::Train, m, stream, inputs, BTreeMap::new()).unwrap();
            if p + 1 < self.partitions.len() {
                let rounded = outputs.iter().map(|t| {
                    let float = engine::is_float(t);
                    self.round((Pass::Forward, p), &t.detach()).set_requires_grad(float)
                });
                arrived.push(rounded.collect());
            }
            made.push(outputs);
        }
        (arrived, made)
    }

    /// A tensor as it comes out at the other end: rounded as floats, and then to what it was.
    fn round(&mut self, at: (Pass, usize), tensor: &Tensor) -> Tensor {
        if tensor.kind() == Kind::BFloat16 && self.codecs[&at].id() != codec::CodecId::Raw {
            return self.round(at, &tensor.to_kind(Kind::Float)).to_kind(Kind::BFloat16);
        }
        let bytes = engine::bytes(tensor).unwrap().to_vec();
        let codec = self.codecs.get_mut(&at).unwrap();
        if tensor.kind() != Kind::Float || codec.id() == codec::CodecId::Raw {
            self.wire_bytes += (HEADER_BYTES + bytes.len()) as u64;
            return engine::copy(tensor).unwrap();
        }
        let dims: Vec<usize> = tensor.size().iter().map(|&d| d as usize).collect();
        let layout = match engine::layout(tensor) {
            Some(Layout::ChannelsLast) => wire::Layout::ChannelsLast,
            _ => wire::Layout::Contiguous,
        };
        let view = TensorView { dtype: DType::F32, dims: &dims, layout, bytes: &bytes };
        let (mut body, mut out) = (Vec::new(), vec![0; bytes.len()]);
        codec.encode(view, &Context { learning: false, ..Context::default() }, &mut body).unwrap();
        self.wire_bytes += (HEADER_BYTES + body.len()) as u64;
        let shape = Shape::new(&dims).unwrap();
        codec.decode(&TensorMeta { dtype: DType::F32, layout, shape, codec: codec.id() }, &body, &mut out).unwrap();
        let values: Vec<f32> = out.chunks_exact(4).map(|b| f32::from_ne_bytes(b.try_into().unwrap())).collect();
        let values = Tensor::from_slice(&values);
        match (layout, &tensor.size()[..]) {
            (wire::Layout::ChannelsLast, &[n, c, h, w]) => values.view([n, h, w, c]).permute([0, 3, 1, 2]),
            _ => values.view(&tensor.size()[..]),
        }
    }
}

fn pipeline(subject: &Subject, balance: &Balance, codecs: Codecs, workers: Workers) -> Pipeline {
    Pipeline::builder(subject.model.clone())
        .balance(balance.sizes())
        .place("client,server,client")
        .micro_batches(MICRO_BATCHES)
        .schedule(Schedule::OneFOneB)
        .loss(subject.loss)
        .precision(subject.precision)
        .seed(SEED)
        .codecs(codecs)
        .workers(workers)
        .build()
        .unwrap()
}

pub fn codecs(forward: &str, backward: &str) -> Codecs {
    Codecs { forward: forward.parse().unwrap(), backward: backward.parse().unwrap(), ..Codecs::default() }
}

/// Gradients, loss and counted bytes are those of one device that rounds at the cuts, bit for bit.
pub fn check_rounding(workers: impl Fn() -> Workers) {
    let all = subjects().into_iter().chain(in_bf16(subjects()));
    for subject in &all.filter(|s| ["mobilenet_v2", "roberta"].contains(&s.name)).collect::<Vec<_>>() {
        let layers = subject.model.layers.len();
        let balance = Balance::new(vec![1, layers - 2, 1]).unwrap();
        let batch = subject.batch(ROWS, 1);
        for (forward, backward) in PAIRS {
            let what = format!("{} in {} {forward} {backward}", subject.name, subject.precision);
            let mut rounding = Rounding::new(subject, &balance, forward, backward);
            let (loss, gradients) = rounding.gradients(subject, &batch);
            let workers = workers();
            let threads = matches!(workers, Workers::Threads);
            let mut pipeline = pipeline(subject, &balance, codecs(forward, backward), workers);
            let (outcome, got) = pipeline.gradients(&batch).unwrap();
            assert_eq!(outcome.loss, loss, "{what}");
            assert_identical(&what, &got, &gradients);
            let links = outcome.links();
            let counted: u64 = links.iter().flat_map(|(_, _, t)| &t.sent).map(|(_, cut)| cut.wire_bytes).sum();
            let in_memory = counted == 0 && threads && (forward, backward) == ("raw", "raw");
            assert!(in_memory || counted == rounding.wire_bytes, "{what}: {counted} and {}", rounding.wire_bytes);
        }
    }
}

/// The parameters after a few steps, with an evaluation in between or not.
pub fn learned(codecs: Codecs, workers: Workers, evaluate: bool) -> Tensors {
    learned_by(&subjects()[0], codecs, workers, evaluate)
}

/// The same under autocast.
pub fn learned_in_bf16(codecs: Codecs, workers: Workers, evaluate: bool) -> Tensors {
    learned_by(&in_bf16(subjects())[0], codecs, workers, evaluate)
}

fn learned_by(subject: &Subject, codecs: Codecs, workers: Workers, evaluate: bool) -> Tensors {
    let balance = Balance::new(vec![1, subject.model.layers.len() - 2, 1]).unwrap();
    let mut pipeline = pipeline(subject, &balance, codecs, workers);
    for step in 0..4 {
        // Two batches in turn, as two epochs would bring them.
        let mut batch = subject.batch(ROWS, step % 2);
        batch.samples = (0..ROWS as u64).map(|row| 100 * (step % 2) + row).collect();
        pipeline.train_step(&batch).unwrap();
        if evaluate {
            // The samples of a test set are numbered from 0, as those of training are.
            let samples = (0..5).collect();
            pipeline.evaluate(&Batch { samples, ..subject.batch(5, 9) }).unwrap();
        }
    }
    pipeline.state().unwrap()
}
