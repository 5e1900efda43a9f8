//! Links with a codec, run by every transport: what a pipeline computes is what one device computes that rounds at the
//! cuts.

use crate::one_device::{assert_identical, in_bf16, sgd, soundness, subjects, Subject, Tensors};
use distgpipe::comm::codec_policy::CodecPolicy;
use distgpipe::engine::{self, Autocast, Layout, Stream};
use distgpipe::model::layer::{PassMode, Role};
use distgpipe::runtime::partition::{Partition, PartitionOptions};
use distgpipe::tch::{Device, Kind, Tensor};
use distgpipe::{Batch, LossFunction, Pipeline, Schedule, Workers};
use distgpipe_core::codec::{self, Codec, CodecContext, TensorView};
use distgpipe_core::microbatch::MicroBatches;
use distgpipe_core::partition::Balance;
use distgpipe_core::schedule::Pass;
use distgpipe_core::skip::{SkipLayout, SkipUse};
use distgpipe_core::wire::{self, DType, Shape, TensorMeta, HEADER_BYTES};
use distgpipe_core::{MicroBatchId, PartitionId};
use std::collections::BTreeMap;

const SEED: u64 = 7;
const ROWS: i64 = 11;
const MICRO_BATCHES: usize = 4;

/// The learning rate of plain SGD with momentum 0.9.
const RATE: f64 = 0.01;

/// A codec for activations and one for gradients. Every codec there is goes both ways in one of them.
const PAIRS: [(&str, &str); 13] = [
    ("raw", "raw"),
    ("f16", "bf16"),
    ("bf16", "f16"),
    ("uniform:8", "sort:8"),
    ("sort:4", "uniform:12"),
    ("tile:4", "tile:8"),
    ("raw", "tile:3"),
    ("fast:8", "topk:0.5"),
    ("topk:0.5", "fast:8"),
    ("svd:2", "feedback(tile:8)"),
    ("feedback(tile:4)", "svd:2"),
    ("delta(tile:4)", "delta(uniform:8)"),
    ("zstd(tile:4)", "zstd(feedback(tile:8))"),
];

/// The two ends of one direction of a link. Each has a codec of its own, because a codec may remember.
struct Ends {
    sender: Box<dyn Codec>,
    receiver: Box<dyn Codec>,
}

/// What a link knows about a tensor it carries.
struct Carried<'a> {
    pass: Pass,
    /// The partition before the cut.
    cut: usize,
    micro_batch: MicroBatchId,
    /// The tensor's place in its message.
    index: usize,
    samples: &'a [u64],
}

/// One device that sends what crosses a cut through a codec.
struct Rounding {
    name: String,
    partitions: Vec<Partition>,
    codecs: BTreeMap<(Pass, usize), Ends>,
    /// Whether codecs may remember what they carry.
    training: bool,
    step: u64,
    memory: Tensors,
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
        let how = PartitionOptions {
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
            for (pass, text) in [(Pass::Forward, forward), (Pass::Backward, backward)] {
                let [sender, receiver] = [(), ()].map(|()| codec::parse(text).unwrap());
                codecs.insert((pass, cut), Ends { sender, receiver });
            }
        }
        let name = format!("{} with {forward} and {backward}", subject.name);
        Rounding { name, partitions, codecs, training: false, step: 0, memory: Tensors::new(), wire_bytes: 0 }
    }

    /// The loss and every parameter's gradient, which no codec remembers.
    fn gradients(&mut self, subject: &Subject, batch: &Batch) -> (f64, Tensors) {
        self.training = false;
        let computed = self.compute(subject, batch);
        self.partitions.iter_mut().for_each(|partition| partition.norms().discard());
        computed
    }

    /// A step of training; gives the loss before it.
    fn train(&mut self, subject: &Subject, batch: &Batch) -> f64 {
        self.training = true;
        let (loss, gradients) = self.compute(subject, batch);
        self.partitions.iter_mut().for_each(|partition| sgd(partition, &gradients, &mut self.memory, RATE));
        self.step += 1;
        loss
    }

    fn compute(&mut self, subject: &Subject, batch: &Batch) -> (f64, Tensors) {
        self.partitions.iter().flat_map(Partition::trained).for_each(|(_, parameter)| engine::clear_grad(parameter));
        let rows = MicroBatches::split(batch.rows(), MICRO_BATCHES).unwrap();
        let mut loss = 0.0;
        for m in rows.ids() {
            let range = rows.range(m);
            let slice = |t: &Tensor| t.narrow(0, range.start as i64, range.len() as i64);
            let samples = &batch.samples[range.clone()];
            let inputs: Vec<Tensor> = batch
                .inputs
                .iter()
                .map(|t| distgpipe::runtime::micro_batch_pass::for_convolutions(slice(t)).unwrap())
                .collect();
            let casting = Autocast::enter(subject.precision, Device::Cpu).unwrap();
            let (arrived, made) = self.forward(m, samples, inputs);
            let last = made.last().unwrap();
            let of_rows = subject.loss.compute(&last[0], &slice(&batch.target)).unwrap();
            drop(casting);
            loss += f64::try_from(&of_rows).unwrap() * range.len() as f64;
            (of_rows * rows.share(m)).backward();
            for cut in (0..self.partitions.len() - 1).rev() {
                let both = made[cut].iter().zip(&arrived[cut + 1]).enumerate();
                let gradients: Vec<(Tensor, Option<Tensor>)> = both
                    .filter(|(_, (sent, _))| sent.requires_grad())
                    .map(|(index, (sent, came))| {
                        let carried = Carried { pass: Pass::Backward, cut, micro_batch: m, index, samples };
                        (sent.shallow_clone(), Some(self.carry(&carried, &came.grad())))
                    })
                    .collect();
                engine::backward(&gradients, None).unwrap();
            }
        }
        let tensors = self.partitions.iter().flat_map(Partition::tensors);
        let parameters = tensors.filter(|(spec, _)| spec.role == Role::Parameter);
        let gradients = parameters.map(|(spec, t)| (spec.name.clone(), t.grad().copy())).collect();
        soundness::assert_gradients_moderate(&self.name, &gradients);
        (loss / batch.rows() as f64, gradients)
    }

    /// The random stream of a micro-batch.
    fn stream(&self, m: MicroBatchId) -> Stream {
        Stream::new(SEED).named("steps").at(self.step).at(u64::from(m.0))
    }

    /// What arrives at each partition and what each makes, for one micro-batch.
    fn forward(
        &mut self,
        micro_batch: MicroBatchId,
        samples: &[u64],
        inputs: Vec<Tensor>,
    ) -> (Vec<Vec<Tensor>>, Vec<Vec<Tensor>>) {
        let stream = self.stream(micro_batch);
        let (mut arrived, mut made) = (vec![inputs], Vec::new());
        for p in 0..self.partitions.len() {
            let inputs = arrived[p].iter().map(Tensor::shallow_clone).collect();
            let (outputs, _) =
                self.partitions[p].forward(PassMode::Train, micro_batch, stream, inputs, BTreeMap::new()).unwrap();
            if p + 1 < self.partitions.len() {
                let rounded = outputs.iter().enumerate().map(|(index, t)| {
                    let carried = Carried { pass: Pass::Forward, cut: p, micro_batch, index, samples };
                    self.carry(&carried, &t.detach()).set_requires_grad(engine::is_float(t))
                });
                arrived.push(rounded.collect());
            }
            made.push(outputs);
        }
        (arrived, made)
    }

    /// A tensor as it comes out at the other end: rounded as 32-bit floats, and then to the type it had. What a codec refuses
    /// goes as it is. `zstd` carries masks as well.
    fn carry(&mut self, carried: &Carried<'_>, tensor: &Tensor) -> Tensor {
        let rounded = match self.codecs[&(carried.pass, carried.cut)].sender.id() {
            codec::CodecId::Raw => None,
            _ if engine::is_float(tensor) => self.round(carried, &tensor.to_kind(Kind::Float)),
            codec::CodecId::Zstd => self.round(carried, tensor),
            _ => None,
        };
        if let Some(rounded) = rounded {
            return rounded.to_kind(tensor.kind());
        }
        self.wire_bytes += (HEADER_BYTES + engine::bytes(tensor).unwrap().len()) as u64;
        engine::copy(tensor).unwrap()
    }

    /// 32-bit floats or 64-bit integers, encoded and decoded; `None` if the codec refuses them.
    fn round(&mut self, carried: &Carried<'_>, tensor: &Tensor) -> Option<Tensor> {
        let (from, to) = match carried.pass {
            Pass::Forward => (carried.cut, carried.cut + 1),
            Pass::Backward => (carried.cut + 1, carried.cut),
        };
        let seed = self.stream(carried.micro_batch).named("codec").at(from as u64).at(to as u64).seed();
        let context = CodecContext {
            slot: u64::from(carried.micro_batch.0) << 16 | carried.index as u64,
            seed: seed.wrapping_add(carried.index as u64),
            samples: carried.samples,
            training: self.training,
        };
        let dims: Vec<usize> = tensor.size().iter().map(|&d| d as usize).collect();
        let layout = match engine::layout(tensor) {
            Some(Layout::ChannelsLast) => wire::Layout::ChannelsLast,
            _ => wire::Layout::Contiguous,
        };
        let bytes = engine::bytes(tensor).unwrap();
        let dtype = if engine::is_float(tensor) { DType::F32 } else { DType::I64 };
        let view = TensorView { dtype, dims: &dims, layout, bytes };
        let (mut body, mut out) = (Vec::new(), vec![0; bytes.len()]);
        let Ends { sender, receiver } = self.codecs.get_mut(&(carried.pass, carried.cut)).unwrap();
        match sender.encode(view, &context, &mut body) {
            Ok(()) => {}
            Err(error) if error.refuses_tensor() => return None,
            Err(error) => panic!("{}: {error}", self.name),
        }
        self.wire_bytes += (HEADER_BYTES + body.len()) as u64;
        let meta = TensorMeta { dtype, layout, shape: Shape::new(&dims).unwrap(), codec: sender.id() };
        receiver.decode(&meta, &body, &mut out).unwrap();
        let values = Tensor::from_data_size(&out, &[(out.len() / dtype.size_bytes()) as i64], tensor.kind());
        Some(match (layout, &tensor.size()[..]) {
            (wire::Layout::ChannelsLast, &[n, c, h, w]) => values.view([n, h, w, c]).permute([0, 3, 1, 2]),
            _ => values.view(&tensor.size()[..]),
        })
    }

    fn state(&self) -> Tensors {
        let tensors = self.partitions.iter().flat_map(Partition::tensors);
        tensors.map(|(spec, t)| (spec.name.clone(), t.detach().copy())).collect()
    }
}

fn pipeline(subject: &Subject, balance: &Balance, codecs: CodecPolicy, workers: Workers) -> Pipeline {
    Pipeline::builder(subject.model.clone())
        .device(engine::Device::Cpu)
        .threads(1)
        .balance(balance.sizes())
        .place("client,server,client")
        .micro_batches(MICRO_BATCHES)
        .schedule(Schedule::OneFOneB)
        .loss(subject.loss)
        .precision(subject.precision)
        .optimizer(distgpipe::Optim::sgd(0.9))
        .learning_rate(RATE)
        .seed(SEED)
        .codecs(codecs)
        .workers(workers)
        .build()
        .unwrap()
}

pub fn codecs(forward: &str, backward: &str) -> CodecPolicy {
    CodecPolicy { forward: forward.parse().unwrap(), backward: backward.parse().unwrap(), ..CodecPolicy::default() }
}

/// Gradients, losses, trained parameters and counted bytes are those of one device that rounds at the cuts, bit for bit.
pub fn check_rounding(workers: impl Fn() -> Workers) {
    for member in codec::ALL {
        let named = |text: &str| text.split([':', '(']).next() == Some(member.name);
        let both = PAIRS.iter().any(|(forward, _)| named(forward)) && PAIRS.iter().any(|(_, backward)| named(backward));
        assert!(both, "{} is missing from the pairs", member.name);
    }
    let all = subjects().into_iter().chain(in_bf16(subjects()));
    for subject in &all.filter(|s| ["mobilenet_v2", "roberta"].contains(&s.name)).collect::<Vec<_>>() {
        for (forward, backward) in PAIRS {
            check_pair(subject, forward, backward, workers());
        }
    }
}

/// The same for one model and one pair of codecs: gradients, which leave no trace in a codec, and two steps of training with
/// the same samples, of which the second meets codecs that remember.
fn check_pair(subject: &Subject, forward: &str, backward: &str, workers: Workers) {
    let balance = Balance::new(vec![1, subject.model.layers.len() - 2, 1]).unwrap();
    let batch = Batch { samples: (0..ROWS as u64).collect(), ..subject.batch(ROWS, 1) };
    let what = format!("{} in {} {forward} {backward}", subject.name, subject.precision);
    let in_memory = matches!(workers, Workers::Threads) && (forward, backward) == ("raw", "raw");
    let mut rounding = Rounding::new(subject, &balance, forward, backward);
    let (loss, gradients) = rounding.gradients(subject, &batch);
    let mut pipeline = pipeline(subject, &balance, codecs(forward, backward), workers);
    let (outcome, got) = pipeline.gradients(&batch).unwrap();
    assert_eq!(outcome.loss.to_bits(), loss.to_bits(), "{what}");
    assert_identical(&what, &got, &gradients);
    let mut losses = Vec::new();
    for step in 0..2 {
        let expected = rounding.train(subject, &batch);
        let outcome = pipeline.train_step(&batch).unwrap();
        assert_eq!(outcome.loss.to_bits(), expected.to_bits(), "{what}: step {step}");
        losses.push(outcome.loss);
        let links = outcome.links();
        let counted: u64 = links.iter().flat_map(|(_, _, t)| &t.sent).map(|(_, cut)| cut.wire_bytes).sum();
        let expected = if in_memory { 0 } else { rounding.wire_bytes };
        assert_eq!(counted, expected, "{what}: bytes up to step {step}");
    }
    let state = pipeline.state().unwrap();
    assert_identical(&format!("{what}: state"), &state, &rounding.state());
    soundness::assert_sound(&what, &losses, &state);
}

/// The parameters after a few steps, with an evaluation in between or not.
pub fn learned(codecs: CodecPolicy, workers: Workers, evaluate: bool) -> Tensors {
    learned_by(&subjects()[0], codecs, workers, evaluate)
}

/// The same under autocast.
pub fn learned_in_bf16(codecs: CodecPolicy, workers: Workers, evaluate: bool) -> Tensors {
    learned_by(&in_bf16(subjects())[0], codecs, workers, evaluate)
}

fn learned_by(subject: &Subject, codecs: CodecPolicy, workers: Workers, evaluate: bool) -> Tensors {
    let balance = Balance::new(vec![1, subject.model.layers.len() - 2, 1]).unwrap();
    let mut pipeline = pipeline(subject, &balance, codecs, workers);
    let mut losses = Vec::new();
    for step in 0..4 {
        // Two batches in turn, as two epochs would bring them.
        let mut batch = subject.batch(ROWS, step % 2);
        batch.samples = (0..ROWS as u64).map(|row| 100 * (step % 2) + row).collect();
        losses.push(pipeline.train_step(&batch).unwrap().loss);
        if evaluate {
            // The samples of a test set are numbered from 0, as those of training are.
            let samples = (0..5).collect();
            pipeline.evaluate(&Batch { samples, ..subject.batch(5, 9) }).unwrap();
        }
    }
    let state = pipeline.state().unwrap();
    soundness::assert_sound(subject.name, &losses, &state);
    state
}
