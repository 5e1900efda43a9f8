//! A partition as a worker holds it: the layers it runs, with their tensors.

use crate::deferred_batch_norm::DeferredBatchNorm;
use crate::engine::{self, Autocast, Layout, Precision, Stream};
use crate::failure::Fault;
use crate::layer::{Context, Layer, Own, Passing, Role, SampleShape, TensorSpec};
use crate::model::Model;
use crate::portal::{Parcel, Portals};
use distgpipe_core::partition::Balance;
use distgpipe_core::skip::SkipLayout;
use distgpipe_core::{MicroBatchId, PartitionId};
use std::collections::BTreeMap;
use std::sync::Arc;
use tch::Tensor;

/// A layer and its tensors.
struct Built {
    /// The layer's number in the model.
    index: usize,
    layer: Arc<dyn Layer>,
    specs: Vec<TensorSpec>,
    tensors: Vec<Tensor>,
}

/// Consecutive layers with their tensors.
pub struct Partition {
    layers: Vec<Built>,
    portals: Portals,
    /// What its first layer takes, for one sample.
    input: Vec<SampleShape>,
    first: bool,
    last: bool,
    device: tch::Device,
    precision: Precision,
    norms: DeferredBatchNorm,
}

/// What building needs to know besides the model.
pub struct Building<'a> {
    /// Which layers run together.
    pub balance: &'a Balance,
    /// Which skips go where.
    pub skips: &'a SkipLayout,
    /// The seed of the first values.
    pub seed: Stream,
    /// Where the tensors live.
    pub device: tch::Device,
    /// Whether convolution weights lie channels-last.
    pub channels_last: bool,
    /// What its passes compute in; the tensors are 32-bit floats either way.
    pub precision: Precision,
}

impl Partition {
    /// Makes the tensors of one partition of a model, and of no other.
    pub fn build(model: &Model, id: PartitionId, how: &Building<'_>) -> Result<Self, Fault> {
        let layers = how.balance.range(id).map(|index| {
            let layer = model.layers[index].clone();
            let specs = layer.tensors();
            let tensors = specs.iter().map(|spec| {
                let tensor = spec.build(how.seed, how.device)?;
                if !how.channels_last || spec.dims.len() != 4 {
                    return Ok(tensor);
                }
                let laid = engine::with_layout(&tensor.f_detach()?, Layout::ChannelsLast)?;
                Ok(laid.f_set_requires_grad(spec.role == Role::Parameter)?)
            });
            let tensors = tensors.collect::<Result<Vec<_>, Fault>>()?;
            Ok(Built { index, layer, specs, tensors })
        });
        let partitions = how.balance.partitions();
        let summary = model.summary().map_err(|e| Fault::protocol("layers that fit each other", e.to_string()))?;
        let input = match how.balance.range(id).start.checked_sub(1) {
            Some(before) => summary[before].output.clone(),
            None => model.input.clone(),
        };
        Ok(Partition {
            input,
            layers: layers.collect::<Result<_, Fault>>()?,
            portals: Portals::new(id, partitions, how.skips),
            first: id.index() == 0,
            last: id.index() + 1 == partitions,
            device: how.device,
            precision: how.precision,
            norms: DeferredBatchNorm::default(),
        })
    }

    /// Whether it takes the model's input.
    pub fn is_first(&self) -> bool {
        self.first
    }

    /// Whether it makes the model's output.
    pub fn is_last(&self) -> bool {
        self.last
    }

    /// What a forward pass, its loss included, has to be inside of.
    pub fn autocast(&self) -> Result<Autocast, Fault> {
        Autocast::enter(self.precision, self.device)
    }

    /// The edges to other partitions.
    pub fn portals(&self) -> &Portals {
        &self.portals
    }

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
                    let expected = format!("activations {:?} per row, in {}", self.input, self.precision);
                    return Err(Fault::protocol(expected, format!("{got:?}")));
                }
                Ok((input, skips))
            }
        }
    }

    pub(crate) fn pack(&self, output: Vec<Tensor>, skips: BTreeMap<String, Tensor>) -> Result<Vec<Parcel>, Fault> {
        self.portals.pack(output, skips)
    }

    /// Runs the layers in order, [in the thread's precision](Self::autocast).
    pub fn forward(
        &mut self,
        passing: Passing,
        micro_batch: MicroBatchId,
        stream: Stream,
        mut x: Vec<Tensor>,
        mut skips: BTreeMap<String, Tensor>,
    ) -> Result<(Vec<Tensor>, BTreeMap<String, Tensor>), Fault> {
        for built in &self.layers {
            let name = built.layer.name();
            let mut context = Context {
                passing,
                micro_batch,
                layer: built.index,
                layer_name: name,
                stream,
                draws: 0,
                norms_run: 0,
                norms: &mut self.norms,
                skips: &mut skips,
            };
            let mut own = Own::new(name, &built.tensors);
            x = built.layer.forward(&mut own, x, &mut context).map_err(|fault| match fault {
                Fault::Engine(why) => Fault::Layer { layer: name.to_owned(), why },
                other => other,
            })?;
        }
        Ok((x, skips))
    }

    /// A fault in the name of the layer that takes the partition's input.
    pub(crate) fn fault_of_first_layer(&self, why: &str) -> Fault {
        let layer = self.layers.first().map(|built| built.layer.name().to_owned()).unwrap_or_default();
        Fault::Layer { layer, why: why.to_owned() }
    }

    /// Its tensors with their names and roles.
    pub fn tensors(&self) -> impl Iterator<Item = (&TensorSpec, &Tensor)> {
        self.layers.iter().flat_map(|built| built.specs.iter().zip(&built.tensors))
    }

    /// Its learned tensors.
    pub fn parameters(&self) -> impl Iterator<Item = &Tensor> {
        self.tensors().filter(|(spec, _)| spec.role == Role::Parameter).map(|(_, tensor)| tensor)
    }

    /// The batch norms.
    pub fn norms(&mut self) -> &mut DeferredBatchNorm {
        &mut self.norms
    }
}
