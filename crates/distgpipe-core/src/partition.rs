//! Which layers run together, and the best cut for given costs.
//!
//! A pipeline is as fast as its slowest partition, so the best cut has the smallest largest cost
//! among all cuts into consecutive runs. torchgpipe's "block partition" finds it too; a greedy cut
//! does not. The search here is a dynamic programme over prefix sums: exact, and quick enough to run
//! at every start (ResNet-style models flatten to thousands of layers).

use crate::PartitionId;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// Why a model could not be cut.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PartitionError {
    /// No partition was asked for.
    #[error("expected at least 1 partition, got 0: use 1 to run the whole model on one worker")]
    NoPartitions,
    /// A partition has no layer.
    #[error("expected at least 1 layer in every partition, got 0 in partition {partition}: remove that partition from the balance")]
    EmptyPartition {
        /// The empty one.
        partition: usize,
    },
    /// There are more partitions than layers.
    #[error("expected at most {layers} partitions for a model of {layers} layers, got {partitions}: use fewer partitions or split a layer")]
    TooManyPartitions {
        /// Layers of the model.
        layers: usize,
        /// Partitions asked for.
        partitions: usize,
    },
    /// The balance speaks of another number of layers than the model has.
    #[error("expected a balance over the model's {layers} layers, got {balance} which sums to {sum}: use for example {suggestion}, or let costs decide")]
    Sum {
        /// Layers of the model.
        layers: usize,
        /// The balance as given.
        balance: Balance,
        /// Its sum.
        sum: usize,
        /// An even balance with as many partitions, as far as the layers go.
        suggestion: Balance,
    },
    /// A layer's cost is not a number that can be compared and summed.
    #[error("expected a finite cost of at least 0 for layer {layer}, got {got}: profile the model again or give the costs by hand")]
    BadCost {
        /// The layer.
        layer: usize,
        /// Its cost.
        got: f64,
    },
    /// The text is not a balance.
    #[error("expected layer counts separated by commas, as in `1,18,2`, got `{got}`")]
    Text {
        /// The piece that is not a number, shortened if it is long.
        got: String,
    },
    /// The layer counts add up to more than a machine can count.
    #[error("expected layer counts that sum to at most {}, got more: check the balance for a typing error", u32::MAX)]
    TooManyLayers,
}

/// Layers per partition; every partition has at least one.
///
/// ```
/// use distgpipe_core::{partition::Balance, PartitionId};
/// let balance: Balance = "1,18,2".parse()?;
/// assert_eq!(balance.range(PartitionId(1)), 1..19);
/// assert_eq!(balance.partition_of(19), PartitionId(2));
/// assert_eq!(Balance::optimal(&[1.0, 1.0, 1.0, 5.0], 2)?.to_string(), "3,1");
/// # Ok::<(), distgpipe_core::partition::PartitionError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Vec<usize>", into = "Vec<usize>")]
pub struct Balance {
    sizes: Vec<usize>,
    /// Partition `i` holds layers `starts[i]..starts[i + 1]`.
    starts: Vec<usize>,
}

impl Balance {
    /// Partition `i` gets the next `sizes[i]` layers.
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

    /// As many layers in each partition as possible; the first `layers % partitions` have one more.
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

    /// The cut whose largest partition cost is smallest among all cuts of `costs` into `partitions`
    /// consecutive runs. Among equals the more even one wins: the smallest sum of squared costs, then
    /// of squared layer counts, then longer runs first.
    pub fn optimal(costs: &[f64], partitions: usize) -> Result<Self, PartitionError> {
        if partitions == 0 {
            return Err(PartitionError::NoPartitions);
        }
        if partitions > costs.len() {
            return Err(PartitionError::TooManyPartitions { layers: costs.len(), partitions });
        }
        if let Some((layer, &got)) = costs.iter().enumerate().find(|(_, cost)| !(cost.is_finite() && **cost >= 0.0)) {
            return Err(PartitionError::BadCost { layer, got });
        }
        let sums = prefix_sums(costs);
        let limit = smallest_largest(&sums, partitions);
        Self::new(most_even_within(&sums, partitions, limit))
    }

    /// Whether this balance covers exactly a model of `layers` layers.
    pub fn check(&self, layers: usize) -> Result<(), PartitionError> {
        if self.layers() == layers {
            return Ok(());
        }
        let partitions = self.partitions().min(layers.max(1));
        let suggestion = Self::even(layers.max(1), partitions)?;
        Err(PartitionError::Sum { layers, balance: self.clone(), sum: self.layers(), suggestion })
    }

    /// Layers per partition.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// Number of partitions; never zero.
    pub fn partitions(&self) -> usize {
        self.sizes.len()
    }

    /// Number of layers in all partitions together.
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

    /// The partition that holds a layer.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn partition_of(&self, layer: usize) -> PartitionId {
        assert!(layer < self.layers(), "layer {layer} of {}", self.layers());
        PartitionId::new(self.starts.partition_point(|&start| start <= layer) - 1)
    }
}

/// `sums[j] - sums[i]` is the cost of layers `i..j`, in units of a power of two.
///
/// Whole numbers, because sums of floats round: seven layers of 0.1 would not cost the same at every
/// place, and rounding would decide what is a tie. The unit is such that the sum is below 2^52, so
/// costs keep 40 bits in a model of 4096 layers.
fn prefix_sums(costs: &[f64]) -> Vec<u64> {
    let largest = costs.iter().copied().fold(0.0, f64::max);
    let bits = 51 - (costs.len() as f64).log2().ceil() as i32;
    let exponent = if largest > 0.0 { bits - 1 - largest.log2().floor() as i32 } else { 0 };
    // In two steps: for the smallest floats the factor alone would be beyond the largest.
    let (half, rest) = (2f64.powi(exponent / 2), 2f64.powi(exponent - exponent / 2));
    let mut sums = Vec::with_capacity(costs.len() + 1);
    sums.push(0);
    let mut sum = 0u64;
    for cost in costs {
        sum += (cost * half * rest).round() as u64;
        sums.push(sum);
    }
    sums
}

/// The smallest largest cost over all cuts.
///
/// Legend: best[j] is the answer for the first j layers and k partitions. Over the last partition's
/// start i, best[i] grows and the cost of i..j shrinks, so the minimum of their maximum is where they
/// cross; a binary search finds it.
fn smallest_largest(sums: &[u64], partitions: usize) -> u64 {
    let layers = sums.len() - 1;
    let mut best = sums.to_vec();
    for k in 2..=partitions {
        let mut next = vec![u64::MAX; layers + 1];
        for j in k..=layers {
            let (mut low, mut high) = (k - 1, j - 1);
            while low < high {
                let middle = low + (high - low) / 2;
                if best[middle] >= sums[j] - sums[middle] {
                    high = middle;
                } else {
                    low = middle + 1;
                }
            }
            let at = |i: usize| best[i].max(sums[j] - sums[i]);
            next[j] = if low > k - 1 { at(low).min(at(low - 1)) } else { at(low) };
        }
        best = next;
    }
    best[layers]
}

/// The most even cut whose partitions all cost at most `limit`, as sizes.
fn most_even_within(sums: &[u64], partitions: usize, limit: u64) -> Vec<usize> {
    const NONE: (u128, u64) = (u128::MAX, u64::MAX);
    let layers = sums.len() - 1;
    // best[j] and, per k, the start of the last partition that reaches it.
    let mut best = vec![NONE; layers + 1];
    best[0] = (0, 0);
    let mut choice = vec![vec![0u32; layers + 1]; partitions];
    for (k, chosen) in choice.iter_mut().enumerate() {
        let mut next = vec![NONE; layers + 1];
        // Later partitions need a layer each.
        for j in k + 1..=layers - (partitions - 1 - k) {
            for i in (k..j).rev() {
                let cost = sums[j] - sums[i];
                if cost > limit {
                    break;
                }
                if best[i] == NONE {
                    continue;
                }
                let size = (j - i) as u64;
                let candidate = (best[i].0 + u128::from(cost) * u128::from(cost), best[i].1 + size * size);
                // Starts are tried from the last one down, and only a better one replaces: of equal
                // cuts the one with longer runs first stays.
                if candidate < next[j] {
                    next[j] = candidate;
                    chosen[j] = i as u32;
                }
            }
        }
        best = next;
    }
    let mut sizes = vec![0; partitions];
    let mut end = layers;
    for k in (0..partitions).rev() {
        let start = choice[k][end] as usize;
        sizes[k] = end - start;
        end = start;
    }
    sizes
}

/// Layer counts separated by commas.
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

    fn costs_of(balance: &Balance, costs: &[f64]) -> Vec<f64> {
        (0..balance.partitions()).map(|p| costs[balance.range(PartitionId::new(p))].iter().sum()).collect()
    }

    /// (largest cost, sum of squared costs) of the best cut, by trying all of them.
    fn brute_force(costs: &[f64], partitions: usize) -> (f64, f64) {
        if partitions == 1 {
            let sum: f64 = costs.iter().sum();
            return (sum, sum * sum);
        }
        let mut best = (f64::INFINITY, f64::INFINITY);
        for first in 1..=costs.len() - (partitions - 1) {
            let sum: f64 = costs[..first].iter().sum();
            // The smallest largest cost of the rest is not enough: the even one among those within
            // the overall limit counts, so all cuts are listed.
            for rest in all_cuts(&costs[first..], partitions - 1) {
                let largest = rest.0.max(sum);
                let squares = rest.1 + sum * sum;
                if (largest, squares) < best {
                    best = (largest, squares);
                }
            }
        }
        best
    }

    fn all_cuts(costs: &[f64], partitions: usize) -> Vec<(f64, f64)> {
        if partitions == 1 {
            let sum: f64 = costs.iter().sum();
            return vec![(sum, sum * sum)];
        }
        let mut cuts = Vec::new();
        for first in 1..=costs.len() - (partitions - 1) {
            let sum: f64 = costs[..first].iter().sum();
            for (largest, squares) in all_cuts(&costs[first..], partitions - 1) {
                cuts.push((largest.max(sum), squares + sum * sum));
            }
        }
        cuts
    }

    proptest! {
        #[test]
        fn optimal_equals_brute_force(costs in prop::collection::vec(0u32..20, 1..11), partitions in 1usize..6) {
            prop_assume!(partitions <= costs.len());
            let costs: Vec<f64> = costs.iter().map(|&cost| f64::from(cost)).collect();
            let balance = Balance::optimal(&costs, partitions).unwrap();
            prop_assert_eq!(balance.partitions(), partitions);
            prop_assert!(balance.check(costs.len()).is_ok());
            let parts = costs_of(&balance, &costs);
            let got = (parts.iter().copied().fold(0.0, f64::max), parts.iter().map(|cost| cost * cost).sum::<f64>());
            prop_assert_eq!(got, brute_force(&costs, partitions));
        }

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
    fn equal_costs_give_the_even_balance() {
        for layers in 1..20 {
            for partitions in 1..=layers {
                let even = Balance::even(layers, partitions).unwrap();
                // With sums of floats, 1e300 gave 3,4 for seven layers and 1.0 gave 4,3.
                for cost in [1.0, 0.0, 0.1, 1e300, f64::MAX, f64::MIN_POSITIVE, 5e-324] {
                    assert_eq!(Balance::optimal(&vec![cost; layers], partitions).unwrap(), even, "{cost}");
                }
            }
        }
    }

    #[test]
    fn large_models_are_cut_at_once() {
        // The worst case: one layer so dear that every other cut is within the limit.
        let mut costs = vec![1.0; 2133];
        costs[1000] = 1e6;
        let balance = Balance::optimal(&costs, 8).unwrap();
        assert_eq!(balance.layers(), 2133);
        assert_eq!(balance.sizes()[balance.partition_of(1000).index()], 1);
    }

    #[test]
    fn errors_name_the_remedy() {
        let error = Balance::new(vec![1, 18, 2]).unwrap().check(20).unwrap_err();
        assert_eq!(
            error.to_string(),
            "expected a balance over the model's 20 layers, got 1,18,2 which sums to 21: \
             use for example 7,7,6, or let costs decide"
        );
        assert!(Balance::new(vec![1, 1]).unwrap().check(0).is_err());
        assert!(matches!(Balance::new(vec![1, 0]), Err(PartitionError::EmptyPartition { partition: 1 })));
        assert!(matches!(Balance::new(vec![]), Err(PartitionError::NoPartitions)));
        assert!(matches!(Balance::new(vec![usize::MAX, 1]), Err(PartitionError::TooManyLayers)));
        assert!(matches!(
            Balance::optimal(&[1.0], 2),
            Err(PartitionError::TooManyPartitions { layers: 1, partitions: 2 })
        ));
        assert!(matches!(Balance::optimal(&[1.0], 0), Err(PartitionError::NoPartitions)));
        for bad in [f64::NAN, -1.0, f64::INFINITY] {
            assert!(matches!(Balance::optimal(&[1.0, bad], 1), Err(PartitionError::BadCost { layer: 1, .. })));
        }
        for bad in ["", "a", "1,,2", "1.5", "-1", "1 2"] {
            assert!(matches!(bad.parse::<Balance>(), Err(PartitionError::Text { .. })), "{bad}");
        }
    }
}
