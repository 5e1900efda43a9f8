//! A partition on a worker: consecutive layers of the model with their tensors.

use crate::comm::abort::AbortFlag;
use crate::engine::{self, cuda, Autocast, Layout, Precision, Stream, TensorList};
use crate::failure::Fault;
use crate::model::layer::{Context, Layer, LayerTensors, PassMode, Role, SampleShape, TensorSpec};
use crate::model::Model;
use crate::runtime::deferred_batch_norm::DeferredBatchNorm;
use crate::runtime::portal::{MissingSkip, Parcel, Portals};
use distgpipe_core::partition::Balance;
use distgpipe_core::skip::SkipLayout;
use distgpipe_core::{MicroBatchId, PartitionId};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use tch::Tensor;

struct BuiltLayer {
    /// The layer's number in the model.
    index: usize,
    layer: Arc<dyn Layer>,
    specs: Vec<TensorSpec>,
    tensors: Vec<Tensor>,
    /// Whether an earlier layer of this worker has each tensor.
    shared: Vec<bool>,
    /// Which of them a pass only casts to bfloat16, and their casts for recorded passes.
    only_cast: Vec<bool>,
    casts: Vec<Option<Tensor>>,
    /// The same tensors, or their casts, as the leaves of each lane.
    of_lanes: Vec<Vec<Tensor>>,
}

impl BuiltLayer {
    fn of_lane(&self, lane: Option<usize>) -> &[Tensor] {
        lane.and_then(|lane| self.of_lanes.get(lane)).unwrap_or(&self.tensors)
    }
}

/// The tensors that a worker has built, by name. A layer that [ties](crate::model::ties) one of them gets a leaf of its own on
/// the same memory.
#[derive(Default)]
pub struct WorkerTensors {
    by_name: HashMap<String, Tensor>,
    /// Ends the construction when the run fails.
    abort: AbortFlag,
}

/// Consecutive layers with their tensors, and the edges to other partitions.
pub struct Partition {
    layers: Vec<BuiltLayer>,
    portals: Portals,
    /// The input of its first layer, for one sample.
    input: Vec<SampleShape>,
    first: bool,
    last: bool,
    device: tch::Device,
    precision: Precision,
    norms: DeferredBatchNorm,
    /// The lane whose leaves forward passes use; `None` for its own.
    lane: Option<usize>,
    /// Whether [`find_casts`](Self::find_casts) has looked for casts.
    knows_casts: bool,
}

/// What building a partition depends on besides the model.
pub struct PartitionOptions<'a> {
    /// Which layers form which partition.
    pub balance: &'a Balance,
    /// Which skip tensors go from which partition to which.
    pub skips: &'a SkipLayout,
    /// The random stream of the initial values.
    pub seed: Stream,
    /// The device that holds the tensors.
    pub device: tch::Device,
    /// Whether convolution weights are stored channels-last.
    pub channels_last: bool,
    /// The precision of forward passes. The tensors are 32-bit floats in either.
    pub precision: Precision,
}

/// Checks that the tensors of a partition fit in the memory of this host. Those of a GPU are built here one by one, so the largest
/// has to fit; libtorch reports where they do not fit there.
fn require_memory(model: &Model, id: PartitionId, options: &PartitionOptions<'_>) -> Result<(), Fault> {
    let bytes = |spec: &TensorSpec| {
        let elements = spec.dims.iter().map(|&dim| u128::try_from(dim).unwrap_or(0));
        elements.fold(spec.kind.elt_size_in_bytes() as u128, u128::saturating_mul)
    };
    let layers = options.balance.range(id).map(|index| model.layers[index].tensors());
    let sizes = layers.flatten().map(|spec| bytes(&spec));
    let (needs_bytes, what) = match options.device {
        tch::Device::Cpu => (sizes.fold(0, u128::saturating_add), "holding the tensors"),
        _ => (sizes.max().unwrap_or(0), "building the largest tensor"),
    };
    let what = format!("{what} of partition {id}");
    engine::require_memory(&what, needs_bytes, "use a smaller model, or more partitions on other hosts")
}

impl WorkerTensors {
    /// None yet. What is built with them stops after the tensor in progress when the run fails.
    pub fn new(abort: AbortFlag) -> Self {
        WorkerTensors { by_name: HashMap::new(), abort }
    }

    /// The leaf of a layer for this tensor.
    fn tensor(&mut self, spec: &TensorSpec, options: &PartitionOptions<'_>) -> Result<Tensor, Fault> {
        let leaf =
            |tensor: &Tensor| Ok::<_, Fault>(tensor.f_detach()?.f_set_requires_grad(spec.role == Role::Parameter)?);
        if let Some(tensor) = self.by_name.get(&spec.name) {
            return leaf(tensor);
        }
        // A large model takes minutes, and nobody may wait for it any more.
        self.abort.check()?;
        let mut tensor = spec.build(options.seed, options.device)?;
        if options.channels_last && spec.dims.len() == 4 {
            tensor = leaf(&engine::with_layout(&tensor.f_detach()?, Layout::ChannelsLast)?)?;
        }
        self.by_name.insert(spec.name.clone(), tensor.shallow_clone());
        Ok(tensor)
    }
}

impl Partition {
    /// Builds the tensors of one partition of a model, and of no other.
    pub fn build(model: &Model, id: PartitionId, options: &PartitionOptions<'_>) -> Result<Self, Fault> {
        Self::build_on(&mut WorkerTensors::default(), model, id, options)
    }

    /// The same, on a worker that has built other partitions.
    pub fn build_on(
        worker: &mut WorkerTensors,
        model: &Model,
        id: PartitionId,
        options: &PartitionOptions<'_>,
    ) -> Result<Self, Fault> {
        let mut summary = model.summary().map_err(Fault::invalid_model)?;
        let input = match options.balance.range(id).start.checked_sub(1) {
            Some(before) => std::mem::take(&mut summary[before].output),
            None => model.input.clone(),
        };
        Self::build_for(worker, model, id, input, options)
    }

    /// The same, where the input of the partition's first layer is known: finding it takes a pass over the model.
    pub(crate) fn build_for(
        worker: &mut WorkerTensors,
        model: &Model,
        id: PartitionId,
        input: Vec<SampleShape>,
        options: &PartitionOptions<'_>,
    ) -> Result<Self, Fault> {
        require_memory(model, id, options)?;
        let layers = options.balance.range(id).map(|index| {
            worker.abort.check()?;
            let layer = model.layers[index].clone();
            let specs = layer.tensors();
            let shared = specs.iter().map(|spec| worker.by_name.contains_key(&spec.name)).collect();
            let tensors = specs.iter().map(|spec| worker.tensor(spec, options));
            let tensors = tensors.collect::<Result<Vec<_>, Fault>>()?;
            let (only_cast, casts, of_lanes) = (Vec::new(), Vec::new(), Vec::new());
            Ok(BuiltLayer { index, layer, specs, tensors, shared, only_cast, casts, of_lanes })
        });
        let partitions = options.balance.partitions();
        Ok(Partition {
            input,
            layers: layers.collect::<Result<_, Fault>>()?,
            portals: Portals::new(id, partitions, options.skips),
            first: id.index() == 0,
            last: id.index() + 1 == partitions,
            device: options.device,
            precision: options.precision,
            norms: DeferredBatchNorm::default(),
            lane: None,
            knows_casts: options.precision == Precision::Fp32,
        })
    }

    /// Excludes parameters from training: they get no gradient, and no graph is kept for what only they would need.
    pub fn freeze(&mut self, frozen: impl Fn(&str) -> bool) -> Result<(), Fault> {
        for (spec, tensor, _) in self.all_tensors() {
            if spec.role == Role::Parameter && frozen(&spec.name) {
                let _ = tensor.f_set_requires_grad(false)?;
            }
        }
        Ok(())
    }

    /// Whether its input is the model's input.
    pub fn is_first(&self) -> bool {
        self.first
    }

    /// Whether its output is the model's output.
    pub fn is_last(&self) -> bool {
        self.last
    }

    /// Sets the calling thread's precision for a forward pass and its loss, until the guard is dropped.
    pub fn autocast(&self) -> Result<Autocast, Fault> {
        Autocast::enter(self.precision, self.device)
    }

    /// The edges to other partitions, with the skip tensors that each carries.
    pub fn portals(&self) -> &Portals {
        &self.portals
    }

    /// Takes the parcels apart into the first layer's input and the skip tensors, and checks shapes and types.
    pub(crate) fn unpack(&self, parcels: &[Parcel]) -> Result<(Vec<Tensor>, BTreeMap<String, Tensor>), Fault> {
        match parcels {
            [(_, tensors)] if self.first => Ok((tensors.iter().map(Tensor::shallow_clone).collect(), BTreeMap::new())),
            parcels => {
                let (input, skips) = self.portals.unpack(parcels)?;
                let fits = |(tensor, shape): (&Tensor, &SampleShape)| {
                    self.precision.allows(shape.kind, tensor.kind()) && tensor.size().get(1..) == Some(&shape.dims[..])
                };
                if input.len() != self.input.len() || !input.iter().zip(&self.input).all(fits) {
                    let got: Vec<_> = input.iter().map(|t| (t.size(), t.kind())).collect();
                    let expected = format!("activations of {:?} per row in {}", self.input, self.precision);
                    return Err(Fault::protocol(expected, format!("{got:?}")));
                }
                Ok((input, skips))
            }
        }
    }

    /// Groups the last layer's output and the stashed skips into a parcel for each later partition.
    pub(crate) fn pack(&self, output: Vec<Tensor>, skips: BTreeMap<String, Tensor>) -> Result<Vec<Parcel>, Fault> {
        self.portals.pack(output, skips).map_err(|MissingSkip(name)| {
            let declares = |built: &&BuiltLayer| built.layer.skips().stash.contains(&name);
            let layer = self.layers.iter().find(declares).map_or("", |built| built.layer.name());
            Fault::layer(layer, format!("it did not stash `{name}`, although its `Layer::skips` declares that it does"))
        })
    }

    /// Runs the layers in order, in the thread's [precision](Self::autocast).
    pub fn forward(
        &mut self,
        mode: PassMode,
        micro_batch: MicroBatchId,
        stream: Stream,
        mut x: Vec<Tensor>,
        mut skips: BTreeMap<String, Tensor>,
    ) -> Result<(Vec<Tensor>, BTreeMap<String, Tensor>), Fault> {
        for built in &self.layers {
            let name = built.layer.name();
            let mut context = Context {
                mode,
                micro_batch,
                layer: built.index,
                layer_name: name,
                stream,
                draws: 0,
                norms_run: 0,
                norms: &mut self.norms,
                skips: &mut skips,
            };
            let mut tensors = LayerTensors::new(name, built.of_lane(self.lane));
            x = built.layer.forward(&mut tensors, x, &mut context).map_err(|fault| match fault {
                engine @ Fault::Engine(_) => Fault::layer(name, engine),
                other => other,
            })?;
        }
        Ok((x, skips))
    }

    pub(crate) fn first_layer_name(&self) -> &str {
        self.layers.first().map_or("", |built| built.layer.name())
    }

    pub(crate) fn last_layer_name(&self) -> &str {
        self.layers.last().map_or("", |built| built.layer.name())
    }

    fn all_tensors(&self) -> impl Iterator<Item = (&TensorSpec, &Tensor, bool)> {
        let zipped = self.layers.iter().flat_map(|built| built.specs.iter().zip(&built.tensors).zip(&built.shared));
        zipped.map(|((spec, tensor), &shared)| (spec, tensor, shared))
    }

    /// Its tensors with their specs, in the order of layers, without those that an earlier layer of the worker has.
    pub fn tensors(&self) -> impl Iterator<Item = (&TensorSpec, &Tensor)> {
        self.all_tensors().filter(|(_, _, shared)| !shared).map(|(spec, tensor, _)| (spec, tensor))
    }

    /// The leaves on tensors that an earlier layer of the worker has, in the order of layers.
    pub fn shared(&self) -> impl Iterator<Item = (&TensorSpec, &Tensor)> {
        self.all_tensors().filter(|(_, _, shared)| *shared).map(|(spec, tensor, _)| (spec, tensor))
    }

    /// Drops the gradients of all its leaves.
    pub fn clear_gradients(&self) {
        self.all_tensors().for_each(|(_, tensor, _)| engine::clear_grad(tensor));
    }

    /// The parameters that are trained, in the order of [`tensors`](Self::tensors): all but the frozen ones.
    pub fn trained(&self) -> impl Iterator<Item = (&TensorSpec, &Tensor)> {
        self.tensors().filter(|(spec, tensor)| spec.role == Role::Parameter && tensor.requires_grad())
    }

    /// Looks for parameters that a pass only casts to bfloat16, in the autograd graph of a pass, once.
    pub(crate) fn find_casts(&mut self, outputs: &[&Tensor]) -> Result<(), Fault> {
        if std::mem::replace(&mut self.knows_casts, true) {
            return Ok(());
        }
        for built in self.layers.iter_mut().filter(|built| built.layer.reads_parameters_for_gradients_only()) {
            built.only_cast = cuda::only_cast(outputs, &built.tensors.iter().collect::<Vec<_>>())?;
        }
        Ok(())
    }

    /// Makes the casts that recorded passes read instead of casting in each pass. Returns them, and the parameters that they must be
    /// copied from before each step.
    pub(crate) fn make_casts(&mut self) -> Result<(TensorList, TensorList), Fault> {
        let cast = |(tensor, only_cast): (&Tensor, bool)| match only_cast {
            true => Ok::<_, Fault>(Some(tensor.f_detach()?.f_to_kind(tch::Kind::BFloat16)?)),
            false => Ok(None),
        };
        for built in &mut self.layers {
            let only_cast = built.only_cast.iter().copied().chain(std::iter::repeat(false));
            built.casts = built.tensors.iter().zip(only_cast).map(cast).collect::<Result<_, _>>()?;
        }
        let pairs = self.layers.iter().flat_map(|built| built.casts.iter().zip(&built.tensors));
        let pairs = pairs.filter_map(|(cast, tensor)| Some((cast.as_ref()?, tensor)));
        Ok((pairs.clone().map(|(cast, _)| cast).collect(), pairs.map(|(_, tensor)| tensor).collect()))
    }

    /// Makes forward passes use the leaves of a lane: the same tensors or their casts, but with gradients of their own. libtorch ties a
    /// leaf to the stream that used it first, and streams would wait for each other there. Returns those that get gradients, in the
    /// order of layers and with tied ones.
    pub(crate) fn use_lane(&mut self, lane: Option<usize>) -> Result<Vec<Tensor>, Fault> {
        for built in &mut self.layers {
            while built.of_lanes.len() < lane.map_or(0, |lane| lane + 1) {
                let casts = built.casts.iter().map(Option::as_ref).chain(std::iter::repeat(None));
                let leaf = |(tensor, cast): (&Tensor, Option<&Tensor>)| {
                    let leaf = cast.unwrap_or(tensor).f_detach()?;
                    Ok::<_, Fault>(leaf.f_set_requires_grad(tensor.requires_grad())?)
                };
                built.of_lanes.push(built.tensors.iter().zip(casts).map(leaf).collect::<Result<_, _>>()?);
            }
        }
        self.lane = lane;
        let leaves = self.layers.iter().flat_map(|built| built.specs.iter().zip(built.of_lane(lane)));
        let trained = leaves.filter(|(spec, tensor)| spec.role == Role::Parameter && tensor.requires_grad());
        Ok(trained.map(|(_, tensor)| tensor.shallow_clone()).collect())
    }

    /// The running statistics of its batch norms.
    pub fn norms(&mut self) -> &mut DeferredBatchNorm {
        &mut self.norms
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Failure;
    use crate::model::layer::{Init, ShapeError, SkipShapes};
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// A layer with one small parameter, which sets the flag of its run when it is asked for it so often.
    struct Watched {
        name: String,
        dims: Vec<i64>,
        asked: Arc<AtomicUsize>,
        fails_at: usize,
        abort: AbortFlag,
    }

    impl Layer for Watched {
        fn name(&self) -> &str {
            &self.name
        }
        fn tensors(&self) -> Vec<TensorSpec> {
            if self.asked.fetch_add(1, Ordering::Relaxed) == self.fails_at {
                self.abort.fail(Failure::new("the driver", "ending the run", Fault::Lost));
            }
            vec![TensorSpec::parameter(format!("{}.weight", self.name), &self.dims, Init::Constant(0.0))]
        }
        fn shapes(&self, input: Vec<SampleShape>, _: &mut SkipShapes) -> Result<Vec<SampleShape>, ShapeError> {
            Ok(input)
        }
        fn forward(&self, _: &mut LayerTensors<'_>, x: Vec<Tensor>, _: &mut Context<'_>) -> Result<Vec<Tensor>, Fault> {
            Ok(x)
        }
    }

    /// Builds the only partition of such layers. Returns how often they were asked for their parameters.
    fn build(layers: usize, dims: &[i64], fails_at: usize, device: tch::Device) -> (usize, Result<Partition, Fault>) {
        let (asked, abort) = (Arc::new(AtomicUsize::new(0)), AbortFlag::default());
        let layer = |n: usize| -> Arc<dyn Layer> {
            let (name, dims) = (n.to_string(), dims.to_vec());
            Arc::new(Watched { name, dims, asked: asked.clone(), fails_at, abort: abort.clone() })
        };
        let model = Model::new((0..layers).map(layer).collect(), vec![SampleShape::float(&[3])]);
        let balance = Balance::even(layers, 1).unwrap();
        let uses: Vec<_> = model.layers.iter().map(|layer| layer.skips()).collect();
        let options = PartitionOptions {
            balance: &balance,
            skips: &SkipLayout::new(&uses, &balance).unwrap(),
            seed: Stream::new(0),
            device,
            channels_last: false,
            precision: Precision::Fp32,
        };
        let mut tensors = WorkerTensors::new(abort.clone());
        let built = Partition::build_on(&mut tensors, &model, PartitionId(0), &options);
        (asked.load(Ordering::Relaxed), built)
    }

    /// A worker once built its partitions to the end, however long that took, before it noticed that its driver had gone.
    #[test]
    fn a_run_that_fails_ends_the_construction_of_a_partition_after_the_layer_in_progress() {
        let (before, whole) = build(500, &[4], usize::MAX, tch::Device::Cpu);
        assert!(whole.is_ok() && before >= 1000, "{before}");
        let (asked, ended) = build(500, &[4], before - 400, tch::Device::Cpu);
        assert!(matches!(ended, Err(Fault::Reported(failure)) if failure.worker == "the driver"));
        assert!(asked <= before - 398, "{asked} of {before}");
    }

    /// The tensors of a GPU are built on the host first. This once aborted the process.
    #[test]
    fn the_memory_of_the_host_is_checked_whatever_the_device() {
        for (device, what) in
            [(tch::Device::Cpu, "holding the tensors"), (tch::Device::Cuda(0), "building the largest")]
        {
            let refused = build(2, &[1 << 22, 1 << 22], usize::MAX, device).1.err().map(|fault| fault.to_string());
            let refused = refused.unwrap_or_default();
            assert!(refused.starts_with(what) && refused.contains("TB of memory"), "{refused}");
        }
    }
}
