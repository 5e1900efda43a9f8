//! Which tensors one partition sends another, and in which order.
//!
//! A skip tensor goes straight from the partition that stashes it to the one that pops it, without passing through the
//! partitions in between; its gradient goes straight back. Between neighbours, skips travel with the activation. So a
//! partition maps parcels to parcels: it takes one from each earlier partition that sends it something, and returns one
//! for each later partition that it sends something to.
//!
//! ```text
//!   P0 ── activation, skip b ──► P1 ── activation ──► P2
//!    └──────────────── skip a (portal) ───────────────┘
//! ```

use crate::failure::Fault;
use distgpipe_core::skip::SkipLayout;
use distgpipe_core::PartitionId;
use std::collections::BTreeMap;
use tch::Tensor;

/// One end of an edge between partitions: the other partition, whether it is the neighbour, and the skips by name.
#[derive(Clone, Debug)]
struct Edge {
    other: PartitionId,
    neighbour: bool,
    skips: Vec<String>,
}

/// The edges of a partition: what it receives from earlier partitions and sends to later ones.
#[derive(Clone, Debug)]
pub struct Portals {
    incoming: Vec<Edge>,
    outgoing: Vec<Edge>,
}

/// The tensors of one edge, with the partition at its other end: first the activation, if it is a neighbour, then
/// skips.
pub type Parcel = (PartitionId, Vec<Tensor>);

/// The name of a skip tensor that an outgoing edge needs and no layer has stashed.
#[derive(Debug)]
pub struct MissingSkip(pub String);

impl Portals {
    /// The edges of `partition`, one of `partitions`.
    pub fn new(partition: PartitionId, partitions: usize, layout: &SkipLayout) -> Self {
        let p = partition.index();
        let mut incoming: BTreeMap<PartitionId, Vec<String>> = BTreeMap::new();
        let mut outgoing = incoming.clone();
        if p > 0 {
            incoming.insert(PartitionId::new(p - 1), Vec::new());
        }
        if p + 1 < partitions {
            outgoing.insert(PartitionId::new(p + 1), Vec::new());
        }
        for portal in layout.incoming(partition) {
            incoming.entry(portal.from).or_default().push(portal.name.clone());
        }
        for portal in layout.outgoing(partition) {
            outgoing.entry(portal.to).or_default().push(portal.name.clone());
        }
        let edges = |map: BTreeMap<PartitionId, Vec<String>>| {
            map.into_iter()
                .map(|(other, skips)| Edge { other, neighbour: other.index().abs_diff(p) == 1, skips })
                .collect()
        };
        Portals { incoming: edges(incoming), outgoing: edges(outgoing) }
    }

    /// The partitions that send to this one, in ascending order.
    pub fn sources(&self) -> impl Iterator<Item = PartitionId> + '_ {
        self.incoming.iter().map(|e| e.other)
    }

    /// The partitions that this one sends to, in ascending order.
    pub fn sinks(&self) -> impl Iterator<Item = PartitionId> + '_ {
        self.outgoing.iter().map(|e| e.other)
    }

    /// Takes parcels apart into the first layer's input and the skips that will be popped.
    pub fn unpack(&self, parcels: &[Parcel]) -> Result<(Vec<Tensor>, BTreeMap<String, Tensor>), Fault> {
        let mut input = Vec::new();
        let mut skips = BTreeMap::new();
        for ((_, tensors), edge) in parcels.iter().zip(&self.incoming) {
            let activations = tensors.len().checked_sub(edge.skips.len());
            let activations = activations.filter(|&n| (n > 0) == edge.neighbour).ok_or_else(|| {
                let activation = if edge.neighbour { "an activation and " } else { "" };
                let expected = format!("{activation}{} skip tensors from partition {}", edge.skips.len(), edge.other);
                Fault::protocol(expected, format!("{} tensors", tensors.len()))
            })?;
            input.extend(tensors[..activations].iter().map(Tensor::shallow_clone));
            for (name, tensor) in edge.skips.iter().zip(&tensors[activations..]) {
                skips.insert(name.clone(), tensor.shallow_clone());
            }
        }
        Ok((input, skips))
    }

    /// Groups the last layer's output and the stashed skips into one parcel for each outgoing edge.
    pub fn pack(&self, output: Vec<Tensor>, mut skips: BTreeMap<String, Tensor>) -> Result<Vec<Parcel>, MissingSkip> {
        let mut output = Some(output);
        let mut parcels = Vec::with_capacity(self.outgoing.len());
        for edge in &self.outgoing {
            let mut tensors = if edge.neighbour { output.take().unwrap_or_default() } else { Vec::new() };
            for name in &edge.skips {
                tensors.push(skips.remove(name).ok_or_else(|| MissingSkip(name.clone()))?);
            }
            parcels.push((edge.other, tensors));
        }
        Ok(parcels)
    }
}
