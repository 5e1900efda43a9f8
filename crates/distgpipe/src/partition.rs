//! A partition as a worker holds it: the layers it runs, with their tensors.

use crate::deferred_batch_norm::DeferredBatchNorm;
use crate::engine::{self, Layout, Stream};
use crate::failure::Fault;
use crate::layer::{Context, Layer, Own, Passing, Role, TensorSpec};
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
    first: bool,
    last: bool,
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
        Ok(Partition {
            layers: layers.collect::<Result<_, Fault>>()?,
            portals: Portals::new(id, partitions, how.skips),
            first: id.index() == 0,
            last: id.index() + 1 == partitions,
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

    /// The edges to other partitions.
    pub fn portals(&self) -> &Portals {
        &self.portals
    }

    pub(crate) fn unpack(&self, parcels: &[Parcel]) -> Result<(Vec<Tensor>, BTreeMap<String, Tensor>), Fault> {
        match parcels {
            [(_, tensors)] if self.first => Ok((tensors.iter().map(Tensor::shallow_clone).collect(), BTreeMap::new())),
            parcels => self.portals.unpack(parcels),
        }
    }

    pub(crate) fn pack(&self, output: Vec<Tensor>, skips: BTreeMap<String, Tensor>) -> Result<Vec<Parcel>, Fault> {
        self.portals.pack(output, skips)
    }

    /// Runs the layers in order.
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
