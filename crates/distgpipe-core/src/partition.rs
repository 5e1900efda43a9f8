//! The partitions of a model: groups of consecutive layers. [`crate::balance`] finds the best ones.

use crate::PartitionId;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// Why a model cannot be cut.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PartitionError {
    /// Zero partitions were requested.
    #[error("expected at least 1 partition, got 0: use 1 to run the whole model on one worker")]
    NoPartitions,
    /// A partition has no layer.
    #[error("expected at least 1 layer in every partition, got 0 in partition {partition}: remove that partition from the balance")]
    EmptyPartition {
        /// The number of the empty partition.
        partition: usize,
    },
    /// There are more partitions than layers.
    #[error("expected at most {layers} partitions for a model of {layers} layers, got {partitions}: use fewer partitions or split a layer")]
    TooManyPartitions {
        /// The number of layers of the model.
        layers: usize,
        /// The requested number of partitions.
        partitions: usize,
    },
    /// The balance has another number of layers than the model.
    #[error("expected a balance over the model's {layers} layers, got {balance} which sums to {sum}: use for example {suggestion}, or balance the model automatically")]
    Sum {
        /// The number of layers of the model.
        layers: usize,
        /// The balance that was given.
        balance: Balance,
        /// The number of layers in that balance.
        sum: usize,
        /// An even balance with the same number of partitions, or as many as there are layers.
        suggestion: Balance,
    },
    /// The cost of a layer is negative or not finite.
    #[error("expected a finite cost of at least 0 for layer {layer}, got {got}: profile the model again or give the costs by hand")]
    BadCost {
        /// The index of the layer.
        layer: usize,
        /// The cost of the layer.
        got: f64,
    },
    /// The text is not a balance.
    #[error("expected layer counts separated by commas, as in `1,18,2`, got `{got}`")]
    Text {
        /// The part that is not a number, truncated.
        got: String,
    },
    /// The layer counts sum to more than a 32-bit number.
    #[error("expected layer counts that sum to at most {}, got more: check the balance for a typing error", u32::MAX)]
    TooManyLayers,
}

/// The number of layers in each partition, at least one.
///
/// ```
/// use distgpipe_core::{partition::Balance, PartitionId};
/// let balance: Balance = "1,18,2".parse()?;
/// assert_eq!(balance.range(PartitionId(1)), 1..19);
/// assert_eq!(balance.partition_of(19), PartitionId(2));
/// assert_eq!(Balance::even(5, 2)?.to_string(), "3,2");
/// # Ok::<(), distgpipe_core::partition::PartitionError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Vec<usize>", into = "Vec<usize>")]
pub struct Balance {
    sizes: Vec<usize>,
    /// Partition `i` has layers `starts[i]..starts[i + 1]`.
    starts: Vec<usize>,
}

impl Balance {
    /// The balance in which partition `i` has `sizes[i]` layers.
    pub fn new(sizes: Vec<usize>) -> Result<Self, PartitionError> {
        if sizes.is_empty() {
            return Err(PartitionError::NoPartitions);
        }
        if let Some(partition) = sizes.iter().position(|&size| size == 0) {
            return Err(PartitionError::EmptyPartition { partition });
        }
        let mut starts = Vec::with_capacity(sizes.len() + 1);
        let mut next = 0usize;
        starts.push(next);
        for &size in &sizes {
            next = next
                .checked_add(size)
                .filter(|&sum| u32::try_from(sum).is_ok())
                .ok_or(PartitionError::TooManyLayers)?;
            starts.push(next);
        }
        Ok(Self { sizes, starts })
    }

    /// The most even balance. The first `layers % partitions` partitions have one layer more than the others.
    pub fn even(layers: usize, partitions: usize) -> Result<Self, PartitionError> {
        if partitions == 0 {
            return Err(PartitionError::NoPartitions);
        }
        if partitions > layers {
            return Err(PartitionError::TooManyPartitions { layers, partitions });
        }
        let (size, longer) = (layers / partitions, layers % partitions);
        Self::new((0..partitions).map(|index| size + usize::from(index < longer)).collect())
    }

    /// Checks that this balance covers a model of `layers` layers exactly.
    pub fn check(&self, layers: usize) -> Result<(), PartitionError> {
        if self.layers() == layers {
            return Ok(());
        }
        let partitions = self.partitions().min(layers.max(1));
        let suggestion = Self::even(layers.max(1), partitions)?;
        Err(PartitionError::Sum { layers, balance: self.clone(), sum: self.layers(), suggestion })
    }

    /// The number of layers in each partition.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// The number of partitions; never zero.
    pub fn partitions(&self) -> usize {
        self.sizes.len()
    }

    /// The number of layers in all partitions.
    pub fn layers(&self) -> usize {
        *self.starts.last().expect("starts is never empty")
    }

    /// The layers of one partition.
    ///
    /// # Panics
    /// If there is no such partition.
    pub fn range(&self, partition: PartitionId) -> Range<usize> {
        self.starts[partition.index()]..self.starts[partition.index() + 1]
    }

    /// The partition that a layer is in.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn partition_of(&self, layer: usize) -> PartitionId {
        assert!(layer < self.layers(), "layer {layer} of {}", self.layers());
        PartitionId::new(self.starts.partition_point(|&start| start <= layer) - 1)
    }
}

/// Parses layer counts separated by commas.
impl FromStr for Balance {
    type Err = PartitionError;

    fn from_str(text: &str) -> Result<Self, PartitionError> {
        let sizes = text.split(',').map(|piece| {
            piece.trim().parse().map_err(|_| PartitionError::Text { got: piece.trim().chars().take(40).collect() })
        });
        Self::new(sizes.collect::<Result<_, _>>()?)
    }
}

impl fmt::Display for Balance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, size) in self.sizes.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(f, "{comma}{size}")?;
        }
        Ok(())
    }
}

impl From<Balance> for Vec<usize> {
    fn from(balance: Balance) -> Self {
        balance.sizes
    }
}

impl TryFrom<Vec<usize>> for Balance {
    type Error = PartitionError;

    fn try_from(sizes: Vec<usize>) -> Result<Self, PartitionError> {
        Self::new(sizes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn text_and_serde_round_trip(sizes in prop::collection::vec(1usize..100, 1..9)) {
            let balance = Balance::new(sizes).unwrap();
            prop_assert_eq!(&balance.to_string().parse::<Balance>().unwrap(), &balance);
            let json = serde_json::to_string(&balance).unwrap();
            prop_assert_eq!(&serde_json::from_str::<Balance>(&json).unwrap(), &balance);
            for layer in 0..balance.layers() {
                prop_assert!(balance.range(balance.partition_of(layer)).contains(&layer));
            }
        }

        #[test]
        fn arbitrary_text_never_panics(text in ".*") {
            let _ = text.parse::<Balance>();
        }
    }

    #[test]
    fn errors_name_the_remedy() {
        let error = Balance::new(vec![1, 18, 2]).unwrap().check(20).unwrap_err();
        assert_eq!(
            error.to_string(),
            "expected a balance over the model's 20 layers, got 1,18,2 which sums to 21: \
             use for example 7,7,6, or balance the model automatically"
        );
        assert!(Balance::new(vec![1, 1]).unwrap().check(0).is_err());
        assert!(matches!(Balance::new(vec![1, 0]), Err(PartitionError::EmptyPartition { partition: 1 })));
        assert!(matches!(Balance::new(vec![]), Err(PartitionError::NoPartitions)));
        assert!(matches!(Balance::new(vec![usize::MAX, 1]), Err(PartitionError::TooManyLayers)));
        assert!(matches!(Balance::even(1, 2), Err(PartitionError::TooManyPartitions { layers: 1, partitions: 2 })));
        assert!(matches!(Balance::even(1, 0), Err(PartitionError::NoPartitions)));
        for bad in ["", "a", "1,,2", "1.5", "-1", "1 2"] {
            assert!(matches!(bad.parse::<Balance>(), Err(PartitionError::Text { .. })), "{bad}");
        }
    }
}
