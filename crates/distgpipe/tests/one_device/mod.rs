//! The truth that pipelines are compared with: one device that runs the same micro-batches one after the other, with
//! PyTorch's own `backward` over the whole graph. Shared by the thread and the process tests.

#[path = "../soundness/mod.rs"]
pub mod soundness;

use distgpipe::engine::{self, Autocast, Layout, Precision, Stream};
use distgpipe::model::layer::PassMode;
use distgpipe::model::zoo::{AmoebaNetD, MobileNetV2, ResNet, Roberta, UNet, Vgg13};
use distgpipe::runtime::partition::{Partition, PartitionOptions};
use distgpipe::tch::{no_grad, Device, Kind, Tensor};
use distgpipe::{Batch, Loss, LossFunction, Model, Schedule};
use distgpipe_core::microbatch::MicroBatches;
use distgpipe_core::partition::Balance;
use distgpipe_core::skip::{SkipLayout, SkipUse};
use distgpipe_core::{MicroBatchId, PartitionId};
use std::collections::BTreeMap;
use std::ops::Range;

pub type Tensors = BTreeMap<String, Tensor>;

/// A model small enough for hundreds of runs, with its batch and loss.
pub struct Subject {
    pub name: &'static str,
    pub model: Model,
    pub loss: Loss,
    /// What one device and the pipelines compute in.
    pub precision: Precision,
}

/// The models of the matrix: with dropout, batch norm, long skips, a mask that goes along, and two states that do.
///
/// Where there are batch norms, images are large enough for two rows to give them at least eight values of each channel: with
/// fewer, gradients explode.
pub fn subjects() -> Vec<Subject> {
    let precision = Precision::Fp32;
    let mobilenet = MobileNetV2 { width: 0.25, image: 16, strides: [1, 1, 2, 1, 1, 1, 2, 1], ..MobileNetV2::default() };
    let unet = UNet { convolutions: 2, channels: 4, depth: 2, image: 10, dropout: 0.1 };
    let roberta = Roberta {
        layers: 2,
        hidden: 16,
        heads: 2,
        feed_forward: 32,
        vocabulary: 50,
        tokens: 7,
        positions: 12,
        classes: 3,
        ..Roberta::default()
    };
    let amoebanet_d = AmoebaNetD { layers: 3, filters: 8, classes: 10, image: 64 };
    vec![
        Subject { name: "mobilenet_v2", model: mobilenet.model().unwrap(), loss: Loss::CrossEntropy, precision },
        Subject { name: "unet", model: unet.model().unwrap(), loss: Loss::MeanSquared, precision },
        Subject { name: "roberta", model: roberta.model().unwrap(), loss: Loss::CrossEntropy, precision },
        Subject { name: "amoebanet_d", model: amoebanet_d.model().unwrap(), loss: Loss::CrossEntropy, precision },
    ]
}

/// Every kind of model that there is, the matrix's included.
pub fn every_kind() -> Vec<Subject> {
    let resnet = |depth, image| ResNet { depth, classes: 10, image, width: 4 };
    let vgg = Vgg13 { classes: 10, image: 32, width: 4, hidden: 16, dropout: 0.5 };
    let (mut all, precision) = (subjects(), Precision::Fp32);
    all.extend([
        Subject { name: "resnet18", model: resnet(18, 64).model().unwrap(), loss: Loss::CrossEntropy, precision },
        Subject { name: "resnet50", model: resnet(50, 96).model().unwrap(), loss: Loss::CrossEntropy, precision },
        Subject { name: "vgg13", model: vgg.model().unwrap(), loss: Loss::CrossEntropy, precision },
    ]);
    all
}

/// Under autocast.
pub fn in_bf16(subjects: Vec<Subject>) -> Vec<Subject> {
    subjects.into_iter().map(|subject| Subject { precision: Precision::Bf16, ..subject }).collect()
}

impl Subject {
    /// A batch for it; another one for every seed.
    pub fn batch(&self, rows: i64, seed: u64) -> Batch {
        let normal = |dims: &[i64], at: u64| {
            let mut t = engine::empty(dims, Kind::Float, Layout::Contiguous).unwrap();
            Stream::new(seed).at(at).normal(&mut t, 0.0, 1.0).unwrap();
            t
        };
        let classes = |n: i64| (normal(&[rows], 9) * 7.0).abs().to_kind(Kind::Int64).remainder(n);
        match self.name {
            "unet" => Batch::new(normal(&[rows, 3, 10, 10], 0), normal(&[rows, 1, 10, 10], 1)),
            "roberta" => {
                let ids = (normal(&[rows, 7], 0) * 20.0).abs().to_kind(Kind::Int64).remainder(50);
                // Every other row is two tokens shorter, so that the mask matters.
                let mask = Tensor::ones([rows, 7], (Kind::Int64, Device::Cpu));
                for row in (0..rows).step_by(2) {
                    let _ = mask.get(row).narrow(0, 5, 2).fill_(0);
                    let _ = ids.get(row).narrow(0, 5, 2).fill_(1);
                }
                Batch { inputs: vec![ids, mask], target: classes(3), samples: Vec::new() }
            }
            _ => {
                let image = self.model.input[0].dims[1];
                Batch::new(normal(&[rows, 3, image, image], 0), classes(10))
            }
        }
    }
}

/// One device.
pub struct OneDevice {
    name: &'static str,
    partition: Partition,
    loss: Loss,
    precision: Precision,
    stream: Stream,
    step: u64,
}

impl OneDevice {
    pub fn new(subject: &Subject, seed: u64) -> Self {
        // Sums over a batch depend on how many threads share them, so one device has as many as a worker.
        engine::start();
        engine::attach_thread(1, 0);
        let layers = subject.model.layers.len();
        let balance = Balance::even(layers, 1).unwrap();
        let uses: Vec<SkipUse> = subject.model.layers.iter().map(|l| l.skips()).collect();
        let skips = SkipLayout::new(&uses, &balance).unwrap();
        let stream = Stream::new(seed);
        let how = PartitionOptions {
            balance: &balance,
            skips: &skips,
            seed: stream.named("weights"),
            device: Device::Cpu,
            channels_last: true,
            precision: subject.precision,
        };
        let partition = Partition::build(&subject.model, PartitionId(0), &how).unwrap();
        let (loss, precision) = (subject.loss, subject.precision);
        OneDevice { name: subject.name, partition, loss, precision, stream: stream.named("steps"), step: 0 }
    }

    /// Forward and backward of one batch, micro-batch by micro-batch, last first where the schedule goes backward so:
    /// then even the order of additions is the same, and results can be compared bit for bit.
    pub fn gradients(&mut self, batch: &Batch, micro_batches: usize, schedule: Schedule) -> (f64, Tensors) {
        self.gradients_of(batch, micro_batches, 0..micro_batches, schedule)
    }

    /// The same of some of the batch's micro-batches: their part of the batch's loss and gradients.
    pub fn gradients_of(
        &mut self,
        batch: &Batch,
        micro_batches: usize,
        own: Range<usize>,
        schedule: Schedule,
    ) -> (f64, Tensors) {
        self.partition.trained().for_each(|(_, parameter)| engine::clear_grad(parameter));
        let rows = MicroBatches::split(batch.rows(), micro_batches).unwrap();
        let mut order: Vec<MicroBatchId> = rows.ids().filter(|m| own.contains(&m.index())).collect();
        if schedule == Schedule::GPipe {
            order.reverse();
        }
        let mut losses = BTreeMap::new();
        for m in order {
            let range = rows.range(m);
            let slice = |t: &Tensor| t.narrow(0, range.start as i64, range.len() as i64);
            let input = batch
                .inputs
                .iter()
                .map(|t| distgpipe::runtime::micro_batch_pass::for_convolutions(slice(t)).unwrap())
                .collect();
            let stream = self.stream.at(self.step).at(u64::from(m.0));
            let casting = Autocast::enter(self.precision, Device::Cpu).unwrap();
            let (output, _) = self.partition.forward(PassMode::Train, m, stream, input, BTreeMap::new()).unwrap();
            let loss = self.loss.compute(&output[0], &slice(&batch.target)).unwrap();
            drop(casting);
            losses.insert(m, f64::try_from(&loss).unwrap() * range.len() as f64);
            (loss * rows.share(m)).backward();
        }
        let gradients = self.partition.trained().map(|(spec, t)| (spec.name.clone(), t.grad().copy())).collect();
        soundness::assert_gradients_moderate(&format!("{} on one device", self.name), &gradients);
        (losses.values().sum::<f64>() / batch.rows() as f64, gradients)
    }

    /// A plain SGD step with momentum 0.9 kept in `memory`, and the batch norms' commit.
    pub fn sgd(&mut self, gradients: &Tensors, memory: &mut Tensors, learning_rate: f64) {
        sgd(&mut self.partition, gradients, memory, learning_rate);
        soundness::assert_parameters_moderate(&format!("{} on one device", self.name), &self.state());
        self.step += 1;
    }

    /// Excludes parameters from training, as `requires_grad = False` does.
    #[allow(dead_code)] // The other tests freeze nothing.
    pub fn freeze(&mut self, frozen: &[String]) {
        self.partition.freeze(|name| frozen.iter().any(|frozen| frozen == name)).unwrap();
    }

    pub fn discard_norms(&mut self) {
        self.partition.norms().discard();
    }

    pub fn state(&self) -> Tensors {
        self.partition.tensors().map(|(spec, t)| (spec.name.clone(), t.detach().copy())).collect()
    }
}

/// A plain SGD step with momentum 0.9, kept in `memory`, of one partition's parameters, and its batch norms' commit.
pub fn sgd(partition: &mut Partition, gradients: &Tensors, memory: &mut Tensors, learning_rate: f64) {
    no_grad(|| {
        for (spec, tensor) in partition.tensors() {
            let Some(gradient) = gradients.get(&spec.name) else { continue };
            let buffer = match memory.remove(&spec.name) {
                Some(buffer) => buffer * 0.9 + gradient,
                None => gradient.copy(),
            };
            let _ = tensor.shallow_clone().f_add_(&(&buffer * -learning_rate)).unwrap();
            memory.insert(spec.name.clone(), buffer);
        }
    });
    partition.norms().commit().unwrap();
}

/// The bytes of a tensor on the CPU.
pub fn bytes(tensor: &Tensor) -> Vec<u8> {
    engine::bytes(&tensor.contiguous()).expect("a dense CPU tensor").to_vec()
}

/// Whether two tensors have the same type, shape and bytes. A NaN equals itself if its payload does, and -0 is not +0.
pub fn same_bits(a: &Tensor, b: &Tensor) -> bool {
    (a.kind(), a.size()) == (b.kind(), b.size()) && bytes(a) == bytes(b)
}

/// Asserts that two sets of tensors are equal bit for bit: see [`same_bits`].
pub fn assert_identical(what: &str, got: &Tensors, expected: &Tensors) {
    assert_eq!(got.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>(), "{what}: names");
    for (name, expected) in expected {
        let got = &got[name];
        assert_eq!((got.size(), got.kind()), (expected.size(), expected.kind()), "{what}: {name}");
        if !same_bits(got, expected) {
            let gap = (got.to_kind(Kind::Double) - expected.to_kind(Kind::Double)).abs().max();
            let size = expected.to_kind(Kind::Double).abs().max();
            panic!(
                "{what}: {name} differs by up to {} of {} (0 where only a sign of zero differs)",
                f64::try_from(&gap).unwrap(),
                f64::try_from(&size).unwrap()
            );
        }
    }
}
