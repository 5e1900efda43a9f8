//! Tied tensors: those that several layers use under one name, such as the embedding of a language model whose last layer
//! multiplies by the same matrix.
//!
//! ```text
//!   partition     0          1          2              client and server take turns:
//!   worker      client     server     client           both uses are on the client, which holds the matrix once
//!   layer       embedding  blocks     head
//!   gradient    Σ over micro-batches  Σ over micro-batches
//!                   └──────── + ──────────┘            before the update, in the order of layers
//! ```
//!
//! Each layer has a leaf of its own on the shared memory, which sums the gradients of that layer over the micro-batches. The
//! order of the additions is therefore the same for every cut, schedule and recomputation, and so are the bits of the sum. It
//! costs the memory of one gradient per layer that uses the tensor.

use crate::model::Model;
use distgpipe_core::partition::Balance;
use distgpipe_core::placement::Placement;
use std::collections::BTreeMap;

/// A tensor that several layers use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tie {
    /// The name of the tensor.
    pub tensor: String,
    /// The layers that use it, at least two, ascending.
    pub layers: Vec<usize>,
}

/// Layers that share a tensor are on different workers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{tensor}` is tied: layer {} uses it on worker {}, and layer {} on worker {}, but only one worker can hold it: {remedy}",
    .first.0, .first.1, .other.0, .other.1
)]
pub struct TieError {
    /// The name of the tensor.
    pub tensor: String,
    /// The first layer that uses it, and its worker.
    pub first: (String, String),
    /// The first layer on another worker that uses it, and that worker.
    pub other: (String, String),
    remedy: String,
}

impl Model {
    /// The tensors that several layers use, in the order of their names.
    pub fn ties(&self) -> Vec<Tie> {
        let mut users: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for (index, layer) in self.layers.iter().enumerate() {
            for spec in layer.tensors() {
                users.entry(spec.name).or_default().push(index);
            }
        }
        let several = users.into_iter().filter(|(_, layers)| layers.len() > 1);
        several.map(|(tensor, layers)| Tie { tensor, layers }).collect()
    }

    /// Checks that all layers that share a tensor are on one worker. The placement must have the partitions of the balance,
    /// and the balance the layers of the model.
    ///
    /// # Errors
    /// Names a tensor whose layers are on several workers, and the cuts and placements that are possible.
    pub fn check_ties(&self, balance: &Balance, placement: &Placement) -> Result<(), Box<TieError>> {
        let worker = |layer: usize| placement.worker_of(balance.partition_of(layer));
        for Tie { tensor, layers } in self.ties() {
            let first = layers[0];
            let Some(&other) = layers.iter().find(|&&layer| worker(layer) != worker(first)) else { continue };
            let named = |layer: usize| (self.layers[layer].name().to_owned(), placement.name(worker(layer)).to_owned());
            let remedy = self.remedy(&layers, balance, placement);
            return Err(Box::new(TieError { tensor, first: named(first), other: named(other), remedy }));
        }
        Ok(())
    }

    /// What keeps these layers on one worker.
    fn remedy(&self, layers: &[usize], balance: &Balance, placement: &Placement) -> String {
        let (first, last) = (layers[0], layers[layers.len() - 1]);
        let name = |layer: usize| self.layers[layer].name();
        let mut remedies = Vec::new();
        let owner = placement.worker_of(balance.partition_of(first));
        let moved = placement.partition_ids().map(|partition| {
            let uses = layers.iter().any(|&layer| balance.partition_of(layer) == partition);
            placement.name(if uses { owner } else { placement.worker_of(partition) })
        });
        let moved: Vec<&str> = moved.collect();
        if moved.iter().any(|worker| *worker != moved[0]) {
            remedies.push(format!("place their partitions on one worker, as in `Builder::place` {}", moved.join(",")));
        } else if last > first + 1 {
            let other = placement.worker_ids().find(|&worker| worker != owner);
            let (owner, other) = (placement.name(owner), other.map_or("server", |worker| placement.name(worker)));
            remedies.push(format!("cut into three partitions with `Builder::place` {owner},{other},{owner}"));
        }
        match (first > 0, last + 1 < self.layers.len()) {
            (true, true) => remedies.push(format!("cut only before {} or after {}", name(first), name(last))),
            (true, false) => remedies.push(format!("cut only before {}", name(first))),
            (false, true) => remedies.push(format!("cut only after {}", name(last))),
            (false, false) => {}
        }
        if self.spec.as_ref().is_some_and(|spec| spec.name == super::exported::NAME) {
            remedies.push("train independent copies with `ExportedOptions::untie`".to_owned());
        }
        remedies.join("; or ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::zoo::{Exported, ExportedOptions, Mlp};

    fn refused(model: &Model, sizes: &[usize], place: &str) -> String {
        let placement: Placement = place.parse().unwrap();
        let balance = Balance::new(sizes.to_vec()).unwrap();
        model.check_ties(&balance, &placement).unwrap_err().to_string()
    }

    #[test]
    fn an_error_says_which_placements_and_cuts_are_possible() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/pt2/gpt2.pt2");
        let model = Exported::open(file).unwrap();
        let layers = model.layers.len();
        let tie = &model.ties()[0];
        assert_eq!((&tie.tensor[..], model.ties().len()), ("model.transformer.wte.weight", 1));
        assert_eq!((tie.layers[0], tie.layers[1]), (0, layers - 1));
        let two = refused(&model, &[2, layers - 2], "client,server");
        assert!(two.contains("on worker client") && two.contains("on worker server"), "{two}");
        assert!(two.contains("three partitions with `Builder::place` client,server,client"), "{two}");
        assert!(two.ends_with("train independent copies with `ExportedOptions::untie`"), "{two}");
        let three = refused(&model, &[1, layers - 2, 1], "a,b,c");
        assert!(three.contains("as in `Builder::place` a,b,a"), "{three}");
        // A tie in the middle leaves cuts before and after it.
        let mut inner = model.clone();
        let plain = Exported::open_with(file, ExportedOptions { untie: true, ..ExportedOptions::default() }).unwrap();
        inner.layers.insert(0, Mlp::default().model().unwrap().layers[0].clone());
        let inner = refused(&inner, &[2, layers - 1], "a,b");
        assert!(inner.contains(&format!("cut only before {}", model.layers[0].name())), "{inner}");
        assert!(plain.ties().is_empty());
        let whole = Balance::even(layers, 3).unwrap();
        model.check_ties(&whole, &"client,server,client".parse().unwrap()).unwrap();
    }
}
