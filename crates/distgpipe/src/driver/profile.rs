//! Measures the cost of each layer on a sample. Auto-balancing searches a cut with these costs.

use crate::comm::link_codecs::dtype_of;
use crate::comm::protocol::Job;
use crate::driver::pipeline::Batch;
use crate::engine::{self, Device, Precision, Stream};
use crate::failure::{Failure, Fault};
use crate::model::layer::PassMode;
use crate::model::Model;
use crate::runtime::micro_batch_pass::for_convolutions;
use crate::runtime::partition::{Partition, PartitionOptions};
use crate::runtime::portal::Parcel;
use distgpipe_core::partition::Balance;
use distgpipe_core::skip::{SkipLayout, SkipUse};
use distgpipe_core::wire::DType;
use distgpipe_core::{MicroBatchId, PartitionId};
use std::collections::{BTreeMap, HashMap};
use std::time::Instant;
use tch::Tensor;

/// The cost of a layer for the whole sample.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerProfile {
    /// The name that the layer has in its model.
    pub name: String,
    /// Seconds of the forward pass.
    pub forward_s: f64,
    /// Seconds of the backward pass.
    pub backward_s: f64,
    /// The most bytes that the forward pass holds for the backward pass, output included.
    pub held_bytes: u64,
    /// The element type of each output, which depends on the precision. Where one is missing, the type in the layer's
    /// shapes counts.
    pub output_types: Vec<DType>,
    /// The element type of each skip that the layer stashes, by name.
    pub stash_types: BTreeMap<String, DType>,
}

/// What to measure layers with, and how often.
pub struct ProfileOptions {
    /// The device that computes.
    pub device: Device,
    /// The number of libtorch threads that compute.
    pub threads: usize,
    /// Whether images and convolution weights lie channels-last.
    pub channels_last: bool,
    /// The precision of the forward pass.
    pub precision: Precision,
    /// Measured rounds. The shortest time counts, because other processes can only make it longer.
    pub rounds: usize,
}

impl ProfileOptions {
    /// Measures as the workers of a job will compute.
    pub fn of(job: &Job) -> Self {
        ProfileOptions {
            device: job.device(),
            threads: job.threads,
            channels_last: job.channels_last,
            precision: job.precision,
            rounds: 3,
        }
    }
}

/// Measures every layer on a sample, one after the other. Returns the costs in the order of layers.
pub fn measure(model: &Model, sample: &Batch, options: &ProfileOptions) -> Result<Vec<LayerProfile>, Failure> {
    engine::start();
    let measured = measure_all(model, sample, options);
    // The heap is now split into blocks that fit single layers, which would slow training down.
    engine::release_memory();
    measured
}

fn measure_all(model: &Model, sample: &Batch, options: &ProfileOptions) -> Result<Vec<LayerProfile>, Failure> {
    let inputs: Vec<Tensor> = sample.inputs.iter().map(Tensor::shallow_clone).collect();
    std::thread::scope(|scope| {
        let thread = engine::spawn_scoped(scope, "profiler", move || {
            engine::attach_thread(options.threads, METER);
            Profiler::new(model, options)?.run(inputs, options.rounds)
        })?;
        thread.join().unwrap_or_else(|_| Err(Fault::Panic("a layer panicked while it was measured".to_owned())))
    })
    .map_err(|fault| Failure::new("the profiler", "measuring the layers", fault))
}

/// The memory meter of the profiler: the last one, which no worker uses.
const METER: usize = 255;

struct Profiler<'a> {
    model: &'a Model,
    partitions: Vec<Partition>,
    device: tch::Device,
    channels_last: bool,
}

impl<'a> Profiler<'a> {
    fn new(model: &'a Model, options: &ProfileOptions) -> Result<Self, Fault> {
        let device = options.device.open();
        let device = device.map_err(|e| Fault::Device { device: options.device.to_string(), source: e.into() })?;
        // One layer per partition, so that the cost of a partition is that of its layer.
        let balance = Balance::even(model.layers.len(), model.layers.len()).map_err(Fault::invalid_model)?;
        let uses: Vec<SkipUse> = model.layers.iter().map(|l| l.skips()).collect();
        let skips = SkipLayout::new(&uses, &balance).map_err(Fault::invalid_model)?;
        let partition_options = PartitionOptions {
            balance: &balance,
            skips: &skips,
            seed: Stream::new(0),
            device,
            channels_last: options.channels_last,
            precision: options.precision,
        };
        let partitions = (0..model.layers.len())
            .map(|i| Partition::build(model, PartitionId::new(i), &partition_options))
            .collect::<Result<_, _>>()?;
        Ok(Profiler { model, partitions, device, channels_last: options.channels_last })
    }

    fn run(mut self, inputs: Vec<Tensor>, rounds: usize) -> Result<Vec<LayerProfile>, Fault> {
        let mut best: Vec<LayerProfile> = Vec::new();
        // The first round warms up caches and allocators, and is not counted.
        for round in 0..=rounds.max(1) {
            let costs = self.round(&inputs)?;
            if round <= 1 {
                best = costs;
                continue;
            }
            for (best, cost) in best.iter_mut().zip(costs) {
                best.forward_s = best.forward_s.min(cost.forward_s);
                best.backward_s = best.backward_s.min(cost.backward_s);
            }
        }
        Ok(best)
    }

    fn round(&mut self, inputs: &[Tensor]) -> Result<Vec<LayerProfile>, Fault> {
        let mut waiting: HashMap<(PartitionId, PartitionId), Vec<Tensor>> = HashMap::new();
        let first = inputs.iter().map(|t| {
            let t = t.f_to_device(self.device)?;
            if self.channels_last {
                for_convolutions(t)
            } else {
                Ok(t)
            }
        });
        let mut first = Some(first.collect::<Result<Vec<_>, Fault>>()?);
        let mut costs = Vec::new();
        for (i, partition) in self.partitions.iter_mut().enumerate() {
            let id = PartitionId::new(i);
            let arrived: Vec<Parcel> = match first.take() {
                Some(tensors) => vec![(id, tensors)],
                None => partition
                    .portals()
                    .sources()
                    .map(|from| (from, waiting.remove(&(from, id)).unwrap_or_default()))
                    .collect(),
            };
            let (cost, parcels) = measure_one(partition, &arrived, self.device, self.model.layers[i].name())?;
            costs.push(cost);
            waiting.extend(parcels.into_iter().map(|(to, tensors)| ((id, to), tensors)));
        }
        Ok(costs)
    }
}

fn measure_one(
    partition: &mut Partition,
    arrived: &[Parcel],
    device: tch::Device,
    name: &str,
) -> Result<(LayerProfile, Vec<Parcel>), Fault> {
    let leaf = |t: &Tensor| -> Result<Tensor, Fault> {
        // As in a run: the gradient of the input data is not computed.
        let float = engine::is_float(t) && !partition.is_first();
        Ok(t.f_detach()?.f_set_requires_grad(float)?)
    };
    let arrived = arrived
        .iter()
        .map(|(from, tensors)| Ok((*from, tensors.iter().map(leaf).collect::<Result<_, Fault>>()?)))
        .collect::<Result<Vec<Parcel>, Fault>>()?;
    let (input, skips) = partition.unpack(&arrived)?;
    engine::peak_bytes(device, METER);
    let before = engine::peak_bytes(device, METER);
    let casting = partition.autocast()?;
    let start = Instant::now();
    let (output, skips) = partition.forward(PassMode::Train, MicroBatchId(0), Stream::new(0), input, skips)?;
    synchronize(device);
    let forward_s = start.elapsed().as_secs_f64();
    drop(casting);
    let held_bytes = engine::peak_bytes(device, METER).saturating_sub(before);
    let output_types = output.iter().map(|t| dtype_of(t.kind())).collect::<Result<_, _>>()?;
    let stash_types = skips.iter().map(|(name, t)| Ok((name.clone(), dtype_of(t.kind())?)));
    let stash_types = stash_types.collect::<Result<_, Fault>>()?;
    let parcels =
        if partition.is_last() { vec![(PartitionId(u32::MAX), output)] } else { partition.pack(output, skips)? };
    let roots = parcels.iter().flat_map(|(_, tensors)| tensors).filter(|t| t.requires_grad());
    let roots = roots.map(|t| Ok((t.shallow_clone(), Some(t.f_ones_like()?)))).collect::<Result<Vec<_>, Fault>>()?;
    let start = Instant::now();
    if !roots.is_empty() {
        engine::backward(&roots)?;
        synchronize(device);
    }
    let backward_s = start.elapsed().as_secs_f64();
    partition.trained().for_each(|(_, parameter)| engine::clear_grad(parameter));
    partition.norms().discard();
    let detached = |(to, tensors): &Parcel| Ok((*to, tensors.iter().map(Tensor::f_detach).collect::<Result<_, _>>()?));
    let parcels = parcels.iter().map(detached).collect::<Result<_, Fault>>()?;
    let name = name.to_owned();
    Ok((LayerProfile { name, forward_s, backward_s, held_bytes, output_types, stash_types }, parcels))
}

fn synchronize(device: tch::Device) {
    if let tch::Device::Cuda(index) = device {
        tch::Cuda::synchronize(index as i64);
    }
}

/// A batch of random inputs for a model, to measure with. Integer inputs are all 1, which every model accepts as a token and
/// as a mask.
pub fn sample(model: &Model, rows: usize, seed: u64) -> Result<Batch, Fault> {
    let mut inputs = Vec::new();
    for (i, spec) in model.input.iter().enumerate() {
        let mut dims = vec![i64::try_from(rows).unwrap_or(1)];
        dims.extend(&spec.dims);
        let mut tensor = engine::empty(&dims, tch::Kind::Float, engine::Layout::Contiguous)?;
        Stream::new(seed).at(i as u64).normal(&mut tensor, 0.0, 1.0)?;
        inputs.push(match spec.kind {
            tch::Kind::Float => tensor,
            kind => tensor.f_ones_like()?.f_to_kind(kind)?,
        });
    }
    let target = Tensor::f_zeros([i64::try_from(rows).unwrap_or(1)], (tch::Kind::Int64, tch::Device::Cpu))?;
    Ok(Batch { inputs, target, samples: Vec::new() })
}
