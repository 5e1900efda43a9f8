//! What travels between two partitions, and in which order.
//!
//! A skip tensor goes straight from the partition that stashes it to the one that pops it, across workers, without
//! passing through those between; its gradient goes straight back. Between neighbours the skips ride along with the
//! activation. So a partition is a function of parcels to parcels: one from each earlier partition that has
//! something for it, one to each later partition that wants something.
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

/// What a partition gets from and gives to others.
#[derive(Clone, Debug)]
pub struct Portals {
    incoming: Vec<Edge>,
    outgoing: Vec<Edge>,
}

/// Tensors for or from another partition.
pub type Parcel = (PartitionId, Vec<Tensor>);

impl Portals {
    /// The edges of one partition out of so many.
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

    /// The partitions that send to this one, in order.
    pub fn sources(&self) -> impl Iterator<Item = PartitionId> + '_ {
        self.incoming.iter().map(|e| e.other)
    }

    /// The partitions this one sends to, in order.
    pub fn sinks(&self) -> impl Iterator<Item = PartitionId> + '_ {
        self.outgoing.iter().map(|e| e.other)
    }

    /// Takes parcels apart into the layers' input and the skips that will be popped.
    pub fn unpack(&self, parcels: &[Parcel]) -> Result<(Vec<Tensor>, BTreeMap<String, Tensor>), Fault> {
        let mut input = Vec::new();
        let mut skips = BTreeMap::new();
        for ((_, tensors), edge) in parcels.iter().zip(&self.incoming) {
            let activations = tensors.len().checked_sub(edge.skips.len());
            let activations = activations.filter(|&n| (n > 0) == edge.neighbour).ok_or_else(|| {
                let expected = format!("{} skip tensors from partition {}", edge.skips.len(), edge.other);
                Fault::protocol(expected, format!("{} tensors", tensors.len()))
            })?;
            input.extend(tensors[..activations].iter().map(Tensor::shallow_clone));
            for (name, tensor) in edge.skips.iter().zip(&tensors[activations..]) {
                skips.insert(name.clone(), tensor.shallow_clone());
            }
        }
        Ok((input, skips))
    }

    /// Makes the parcels out of the layers' output and the skips that were stashed.
    pub fn pack(&self, output: Vec<Tensor>, mut skips: BTreeMap<String, Tensor>) -> Result<Vec<Parcel>, Fault> {
        let mut output = Some(output);
        let mut parcels = Vec::with_capacity(self.outgoing.len());
        for edge in &self.outgoing {
            let mut tensors = if edge.neighbour { output.take().unwrap_or_default() } else { Vec::new() };
            for name in &edge.skips {
                let skip = skips.remove(name);
                tensors.push(skip.ok_or_else(|| {
                    Fault::protocol(format!("a layer to stash `{name}`, as its `Layer::skips` says"), "nothing")
                })?);
            }
            parcels.push((edge.other, tensors));
        }
        Ok(parcels)
    }
}
