//! Skip connections, and the partitions that they connect.
//!
//! A layer *stashes* a tensor under a name and a later layer *pops* it. If the two are in different partitions, the
//! tensor goes directly from one to the other through a *portal*, not through the partitions in between (torchgpipe,
//! section 3.3: otherwise the copies of a U-Net's long skips cost more than its layers). Every skip is stashed once and
//! popped once, so its gradient has exactly one way back.

use crate::partition::Balance;
use crate::PartitionId;
use std::collections::BTreeMap;

/// The names of the skips that one layer stashes and pops.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SkipUse {
    /// The names that the layer stashes.
    pub stash: Vec<String>,
    /// The names that the layer pops.
    pub pop: Vec<String>,
}

/// Why the skips of a model are inconsistent. Layers are counted from 0.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SkipError {
    /// The balance has another number of layers than the model.
    #[error("expected a balance over {layers} layers, got one over {got}: make the balance from this model's layers")]
    Layers {
        /// The number of layers of the model.
        layers: usize,
        /// The number of layers in the balance.
        got: usize,
    },
    /// A skip is popped before it is stashed, or never stashed.
    #[error("expected skip `{name}` to be stashed in a layer before layer {pop} pops it, got {}: stash it in an earlier layer",
        .stash.map_or("no stash at all".to_string(), |layer| format!("its stash in layer {layer}")))]
    PoppedBeforeStashed {
        /// The name of the skip.
        name: String,
        /// The layer that pops it.
        pop: usize,
        /// The layer that stashes it, if any does.
        stash: Option<usize>,
    },
    /// A skip is popped by two layers.
    #[error("expected skip `{name}` to be popped once, got layers {first} and {second}: stash it under a second name for the second reader")]
    PoppedTwice {
        /// The name of the skip.
        name: String,
        /// The first layer that pops it.
        first: usize,
        /// The second layer that pops it.
        second: usize,
    },
    /// A skip is stashed by two layers.
    #[error("expected skip `{name}` to be stashed once, got layers {first} and {second}: give each its own name")]
    StashedTwice {
        /// The name of the skip.
        name: String,
        /// The first layer that stashes it.
        first: usize,
        /// The second layer that stashes it.
        second: usize,
    },
    /// A skip is stashed and never popped.
    #[error("expected skip `{name}`, stashed in layer {stash}, to be popped by a later layer, got none: pop it or do not stash it")]
    NeverPopped {
        /// The name of the skip.
        name: String,
        /// The layer that stashes it.
        stash: usize,
    },
}

/// A skip connection with its two ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skip {
    /// The name of the skip.
    pub name: String,
    /// The layer that stashes it.
    pub stash_layer: usize,
    /// The layer that pops it.
    pub pop_layer: usize,
    /// The partition of the stashing layer.
    pub from: PartitionId,
    /// The partition of the popping layer.
    pub to: PartitionId,
}

/// A skip between two partitions.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Portal {
    /// The name of the skip.
    pub name: String,
    /// The partition that stashes it.
    pub from: PartitionId,
    /// The partition that pops it.
    pub to: PartitionId,
}

/// All skips of a model that has been cut into partitions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SkipLayout {
    skips: Vec<Skip>,
    portals: Vec<Portal>,
}

impl SkipLayout {
    /// Finds both ends of every skip; `layers[i]` has the skips of layer `i`.
    pub fn new(layers: &[SkipUse], balance: &Balance) -> Result<Self, SkipError> {
        if balance.layers() != layers.len() {
            return Err(SkipError::Layers { layers: layers.len(), got: balance.layers() });
        }
        let stashed = first_use(layers, |layer| &layer.stash)
            .map_err(|(name, first, second)| SkipError::StashedTwice { name, first, second })?;
        let popped = first_use(layers, |layer| &layer.pop).map_err(|(name, first, second)| SkipError::PoppedTwice {
            name,
            first,
            second,
        })?;
        for (&name, &pop) in &popped {
            let stash = stashed.get(name).copied();
            if stash.is_none_or(|stash| stash >= pop) {
                return Err(SkipError::PoppedBeforeStashed { name: name.to_string(), pop, stash });
            }
        }
        let mut skips = Vec::with_capacity(stashed.len());
        for (&name, &stash_layer) in &stashed {
            let Some(&pop_layer) = popped.get(name) else {
                return Err(SkipError::NeverPopped { name: name.to_string(), stash: stash_layer });
            };
            let (from, to) = (balance.partition_of(stash_layer), balance.partition_of(pop_layer));
            skips.push(Skip { name: name.to_string(), stash_layer, pop_layer, from, to });
        }
        // Sorted by layer, then name: both ends of a portal derive the same order independently.
        skips.sort_by(|a, b| (a.stash_layer, a.pop_layer, &a.name).cmp(&(b.stash_layer, b.pop_layer, &b.name)));
        let portals = skips
            .iter()
            .filter(|skip| skip.from != skip.to)
            .map(|skip| Portal { name: skip.name.clone(), from: skip.from, to: skip.to })
            .collect();
        Ok(Self { skips, portals })
    }

    /// Every skip, by stashing layer, then popping layer, then name.
    pub fn skips(&self) -> &[Skip] {
        &self.skips
    }

    /// The skips that cross partitions, in the order of [`SkipLayout::skips`].
    pub fn portals(&self) -> &[Portal] {
        &self.portals
    }

    /// The pairs of partitions that portals connect, sorted, each once. They include neighbours, whose skips travel in
    /// the same message as the activation.
    pub fn edges(&self) -> Vec<(PartitionId, PartitionId)> {
        let mut edges: Vec<_> = self.portals.iter().map(|portal| (portal.from, portal.to)).collect();
        edges.sort();
        edges.dedup();
        edges
    }

    /// The portals that start in a partition, in the order of [`SkipLayout::portals`].
    pub fn outgoing(&self, partition: PartitionId) -> Vec<&Portal> {
        self.portals.iter().filter(|portal| portal.from == partition).collect()
    }

    /// The portals that end in a partition, in the order of [`SkipLayout::portals`].
    pub fn incoming(&self, partition: PartitionId) -> Vec<&Portal> {
        self.portals.iter().filter(|portal| portal.to == partition).collect()
    }
}

/// The layer that uses each name; an error with the name and both layers if two do.
fn first_use(
    layers: &[SkipUse],
    names: impl Fn(&SkipUse) -> &Vec<String>,
) -> Result<BTreeMap<&str, usize>, (String, usize, usize)> {
    let mut found = BTreeMap::new();
    for (index, layer) in layers.iter().enumerate() {
        for name in names(layer) {
            if let Some(first) = found.insert(name.as_str(), index) {
                return Err((name.clone(), first, index));
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layers(uses: &[(&[&str], &[&str])]) -> Vec<SkipUse> {
        let own = |names: &[&str]| names.iter().map(|name| name.to_string()).collect();
        uses.iter().map(|(stash, pop)| SkipUse { stash: own(stash), pop: own(pop) }).collect()
    }

    #[test]
    fn portals_are_the_skips_that_cross_partitions() {
        let uses = layers(&[(&["b", "a"], &[]), (&["c"], &["b"]), (&[], &[]), (&["d"], &["c"]), (&[], &["a", "d"])]);
        let balance = Balance::new(vec![2, 1, 2]).unwrap();
        let layout = SkipLayout::new(&uses, &balance).unwrap();
        let names: Vec<_> = layout.skips().iter().map(|skip| skip.name.as_str()).collect();
        assert_eq!(names, ["b", "a", "c", "d"]);
        let portal = |name: &str| Portal { name: name.into(), from: PartitionId(0), to: PartitionId(2) };
        assert_eq!(layout.portals(), [portal("a"), portal("c")]);
        assert_eq!(layout.edges(), [(PartitionId(0), PartitionId(2))]);
        assert_eq!(layout.outgoing(PartitionId(0)), [&portal("a"), &portal("c")]);
        assert_eq!(layout.incoming(PartitionId(2)), [&portal("a"), &portal("c")]);
        assert!(layout.outgoing(PartitionId(1)).is_empty());
    }

    #[test]
    fn skips_that_do_not_fit_are_named() {
        let balance = Balance::new(vec![1, 1, 1]).unwrap();
        let error = |uses| SkipLayout::new(&layers(uses), &balance).unwrap_err();
        let name = "a".to_string();
        assert_eq!(
            error(&[(&[], &["a"]), (&["a"], &[]), (&[], &[])]),
            SkipError::PoppedBeforeStashed { name: name.clone(), pop: 0, stash: Some(1) }
        );
        assert_eq!(
            error(&[(&["a"], &["a"]), (&[], &[]), (&[], &[])]),
            SkipError::PoppedBeforeStashed { name: name.clone(), pop: 0, stash: Some(0) }
        );
        let none = error(&[(&[], &["a"]), (&[], &[]), (&[], &[])]);
        assert!(none.to_string().contains("no stash at all"), "{none}");
        assert_eq!(
            error(&[(&["a"], &[]), (&[], &["a"]), (&[], &["a"])]),
            SkipError::PoppedTwice { name: name.clone(), first: 1, second: 2 }
        );
        assert_eq!(
            error(&[(&["a"], &[]), (&["a"], &[]), (&[], &["a"])]),
            SkipError::StashedTwice { name: name.clone(), first: 0, second: 1 }
        );
        assert_eq!(error(&[(&["a"], &[]), (&[], &[]), (&[], &[])]), SkipError::NeverPopped { name, stash: 0 });
        assert_eq!(SkipLayout::new(&[], &balance), Err(SkipError::Layers { layers: 0, got: 3 }));
    }
}
