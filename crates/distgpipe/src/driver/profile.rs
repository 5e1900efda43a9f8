//! Measures the cost of each layer on a sample. Auto-balancing searches a cut with these costs.

use crate::comm::link_codecs::dtype_of;
use crate::comm::protocol::Job;
use crate::driver::pipeline::Batch;
use crate::engine::{self, Device, Meter, Precision, Stream};
use crate::failure::{Failure, Fault};
use crate::model::layer::{PassMode, SampleShape};
use crate::model::Model;
use crate::runtime::micro_batch_pass::for_convolutions;
use crate::runtime::partition::{Partition, PartitionOptions, WorkerTensors};
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
    /// Rounds of [`measure`]. The shortest time counts, because other processes can only make it longer.
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

/// How far a measurement has come.
#[derive(Debug)]
pub enum ProfileProgress<'a> {
    /// A layer is about to be built or measured.
    Layer {
        /// The round, from 1; 0 while the layers are built and in the round that warms up.
        round: usize,
        /// The number of the layer, from 0.
        layer: usize,
    },
    /// A round is complete. It has the costs of all layers, in order.
    Round(&'a [LayerProfile]),
}

/// Hears how far a measurement has come, and returns whether it goes on.
pub type GoOn<'a> = dyn FnMut(ProfileProgress<'_>) -> bool + Send + 'a;

/// Measures every layer on a sample, one after the other. Returns the costs in the order of layers.
pub fn measure(model: &Model, sample: &Batch, options: &ProfileOptions) -> Result<Vec<LayerProfile>, Failure> {
    let (mut fastest, mut rounds): (Vec<LayerProfile>, usize) = (Vec::new(), 0);
    measure_while(model, sample, options, &mut |progress| {
        if let ProfileProgress::Round(costs) = progress {
            keep_fastest(&mut fastest, costs);
            rounds += 1;
        }
        rounds < options.rounds.max(1)
    })?;
    Ok(fastest)
}

/// Measures every layer on a sample, round after round, until `go_on` returns false. It is called before each layer and
/// after each round. The first round warms up caches and allocators; its costs are passed on only if `go_on` ends the
/// measurement before another round is complete.
pub fn measure_while(
    model: &Model,
    sample: &Batch,
    options: &ProfileOptions,
    go_on: &mut GoOn<'_>,
) -> Result<(), Failure> {
    engine::start();
    let measured = measure_on_thread(model, sample, options, go_on);
    // The heap is now split into blocks that fit single layers, which would slow training down.
    engine::release_memory();
    measured
}

/// Keeps the shortest times of each layer. The other figures are those of the first round.
pub fn keep_fastest(fastest: &mut Vec<LayerProfile>, round: &[LayerProfile]) {
    if fastest.is_empty() {
        fastest.extend_from_slice(round);
    }
    for (fastest, cost) in fastest.iter_mut().zip(round) {
        fastest.forward_s = fastest.forward_s.min(cost.forward_s);
        fastest.backward_s = fastest.backward_s.min(cost.backward_s);
    }
}

fn measure_on_thread(
    model: &Model,
    sample: &Batch,
    options: &ProfileOptions,
    go_on: &mut GoOn<'_>,
) -> Result<(), Failure> {
    let inputs: Vec<Tensor> = sample.inputs.iter().map(Tensor::shallow_clone).collect();
    std::thread::scope(|scope| {
        let thread = engine::spawn_scoped(scope, "profiler", move || {
            let meter = Meter::new();
            engine::attach_thread(options.threads, meter.number());
            match Profiler::build(model, options, meter, go_on)? {
                Some(mut profiler) => profiler.run(&inputs, go_on),
                None => Ok(()),
            }
        })?;
        thread.join().unwrap_or_else(|_| Err(Fault::Panic("a layer panicked while it was measured".to_owned())))
    })
    .map_err(|fault| Failure::new("the profiler", "measuring the layers", fault))
}

struct Profiler<'a> {
    model: &'a Model,
    partitions: Vec<Partition>,
    device: tch::Device,
    /// Counts the memory of the thread that measures.
    meter: Meter,
    channels_last: bool,
}

impl<'a> Profiler<'a> {
    /// Builds all layers; `None` if `go_on` ends that.
    fn build(
        model: &'a Model,
        options: &ProfileOptions,
        meter: Meter,
        go_on: &mut GoOn<'_>,
    ) -> Result<Option<Self>, Fault> {
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
        let mut input = model.input.clone();
        let (mut partitions, mut tensors) = (Vec::new(), WorkerTensors::default());
        for (layer, summary) in model.summary().map_err(Fault::invalid_model)?.into_iter().enumerate() {
            if !go_on(ProfileProgress::Layer { round: 0, layer }) {
                return Ok(None);
            }
            let takes = std::mem::replace(&mut input, summary.output);
            let id = PartitionId::new(layer);
            partitions.push(Partition::build_for(&mut tensors, model, id, takes, &partition_options)?);
        }
        Ok(Some(Profiler { model, partitions, device, meter, channels_last: options.channels_last }))
    }

    fn run(&mut self, inputs: &[Tensor], go_on: &mut GoOn<'_>) -> Result<(), Fault> {
        let Some(mut warm_up) = self.round(inputs, 0, go_on)? else { return Ok(()) };
        for round in 1.. {
            match self.round(inputs, round, go_on)? {
                Some(costs) if go_on(ProfileProgress::Round(&costs)) => warm_up.clear(),
                Some(_) => break,
                None => {
                    if !warm_up.is_empty() {
                        go_on(ProfileProgress::Round(&warm_up));
                    }
                    break;
                }
            }
        }
        Ok(())
    }

    /// Measures each layer once; `None` if `go_on` ends that.
    fn round(
        &mut self,
        inputs: &[Tensor],
        round: usize,
        go_on: &mut GoOn<'_>,
    ) -> Result<Option<Vec<LayerProfile>>, Fault> {
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
            if !go_on(ProfileProgress::Layer { round, layer: i }) {
                return Ok(None);
            }
            let id = PartitionId::new(i);
            let arrived: Vec<Parcel> = match first.take() {
                Some(tensors) => vec![(id, tensors)],
                None => partition
                    .portals()
                    .sources()
                    .map(|from| (from, waiting.remove(&(from, id)).unwrap_or_default()))
                    .collect(),
            };
            let (cost, parcels) =
                measure_one(partition, &arrived, (self.device, &self.meter), self.model.layers[i].name())?;
            costs.push(cost);
            waiting.extend(parcels.into_iter().map(|(to, tensors)| ((id, to), tensors)));
        }
        Ok(Some(costs))
    }
}

fn measure_one(
    partition: &mut Partition,
    arrived: &[Parcel],
    (device, meter): (tch::Device, &Meter),
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
    engine::peak_bytes(device, meter.number());
    let before = engine::peak_bytes(device, meter.number());
    let casting = partition.autocast()?;
    let start = Instant::now();
    let (output, skips) = partition.forward(PassMode::Train, MicroBatchId(0), Stream::new(0), input, skips)?;
    synchronize(device);
    let forward_s = start.elapsed().as_secs_f64();
    drop(casting);
    let held_bytes = engine::peak_bytes(device, meter.number()).saturating_sub(before);
    let output_types = output.iter().map(|t| dtype_of(t.kind())).collect::<Result<_, _>>()?;
    let stash_types = skips.iter().map(|(name, t)| Ok((name.clone(), dtype_of(t.kind())?)));
    let stash_types = stash_types.collect::<Result<_, Fault>>()?;
    let parcels =
        if partition.is_last() { vec![(PartitionId(u32::MAX), output)] } else { partition.pack(output, skips)? };
    let roots = parcels.iter().flat_map(|(_, tensors)| tensors).filter(|t| t.requires_grad());
    let roots = roots.map(|t| Ok((t.shallow_clone(), Some(t.f_ones_like()?)))).collect::<Result<Vec<_>, Fault>>()?;
    let start = Instant::now();
    if !roots.is_empty() {
        engine::backward(&roots, None)?;
        synchronize(device);
    }
    let backward_s = start.elapsed().as_secs_f64();
    partition.clear_gradients();
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
    let elements = |spec: &SampleShape| {
        let dims = spec.dims.iter().map(|&dim| u128::try_from(dim).unwrap_or(0));
        dims.fold(rows as u128, u128::saturating_mul)
    };
    // Random floats, their conversion to another type, and a copy.
    let needs_bytes = model.input.iter().map(elements).fold(0, u128::saturating_add).saturating_mul(16);
    engine::require_memory(&format!("a sample of {rows} rows"), needs_bytes, "use fewer rows or a smaller input")?;
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
