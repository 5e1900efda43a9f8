//! The split of a batch into micro-batches: their number, and the rows of each.
//!
//! [`MicroBatches`] is the only place that decides this. Everything that counts micro-batches uses it: the schedule,
//! the weights of losses, deferred batch norm, recomputation of all but the last. (`torch.chunk(8)` of 10 rows silently
//! returns 5 pieces, and code that expects 8 then counts wrong.) A batch with too few rows for the requested number of
//! micro-batches is an error.

use crate::MicroBatchId;
use std::ops::Range;

/// Why a batch cannot be split.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MicroBatchError {
    /// Zero micro-batches were requested.
    #[error("expected at least 1 micro-batch, got 0: set micro-batches to 1 to run the batch in one piece")]
    NoMicroBatches,
    /// There are fewer rows than micro-batches, so at least one would be empty.
    #[error(
        "expected at least one row per micro-batch, got {rows} rows for {count} micro-batches: \
         use at most {rows} micro-batches, a batch of at least {count} rows, or drop this last short batch"
    )]
    TooFewRows {
        /// The number of rows of the batch.
        rows: usize,
        /// The requested number of micro-batches.
        count: usize,
    },
    /// The number of micro-batches does not fit a [`MicroBatchId`].
    #[error("expected at most {} micro-batches, got {count}: use fewer and larger micro-batches", u32::MAX)]
    TooMany {
        /// The requested number of micro-batches.
        count: usize,
    },
}

/// A batch of `rows` rows, split into `count` consecutive micro-batches. The first `rows % count` have one row more
/// than the others. None is empty.
///
/// ```
/// use distgpipe_core::{microbatch::MicroBatches, MicroBatchId};
/// let cut = MicroBatches::split(10, 4)?;
/// let rows: Vec<_> = cut.ids().map(|id| cut.range(id)).collect();
/// assert_eq!(rows, [0..3, 3..6, 6..8, 8..10]);
/// # Ok::<(), distgpipe_core::microbatch::MicroBatchError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MicroBatches {
    rows: usize,
    count: usize,
}

impl MicroBatches {
    /// Splits `rows` rows into exactly `count` micro-batches, or returns why that is not possible.
    pub fn split(rows: usize, count: usize) -> Result<Self, MicroBatchError> {
        if count == 0 {
            return Err(MicroBatchError::NoMicroBatches);
        }
        if u32::try_from(count).is_err() {
            return Err(MicroBatchError::TooMany { count });
        }
        if rows < count {
            return Err(MicroBatchError::TooFewRows { rows, count });
        }
        Ok(Self { rows, count })
    }

    /// The number of rows of the whole batch.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The number of micro-batches; never zero.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The rows of one micro-batch.
    ///
    /// # Panics
    /// If the batch has no such micro-batch.
    pub fn range(&self, id: MicroBatchId) -> Range<usize> {
        let start = self.start(id.index());
        start..start + self.len(id)
    }

    /// The number of rows of one micro-batch; never zero.
    ///
    /// # Panics
    /// If the batch has no such micro-batch.
    #[allow(clippy::len_without_is_empty)] // No micro-batch is empty.
    pub fn len(&self, id: MicroBatchId) -> usize {
        assert!(id.index() < self.count, "micro-batch {id} of {}", self.count);
        self.rows / self.count + usize::from(id.index() < self.rows % self.count)
    }

    /// The fraction of the batch's rows that one micro-batch has: its weight in a mean over the batch.
    ///
    /// # Panics
    /// If the batch has no such micro-batch.
    pub fn share(&self, id: MicroBatchId) -> f64 {
        self.len(id) as f64 / self.rows as f64
    }

    /// All micro-batches, in row order.
    pub fn ids(&self) -> impl Iterator<Item = MicroBatchId> {
        (0..self.count).map(MicroBatchId::new)
    }

    fn start(&self, index: usize) -> usize {
        index * (self.rows / self.count) + index.min(self.rows % self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn never_silently_fewer_micro_batches() {
        // torch.chunk(10 rows, 8) gives 5 pieces.
        assert_eq!(MicroBatches::split(10, 8).unwrap().count(), 8);
        assert_eq!(MicroBatches::split(3, 0), Err(MicroBatchError::NoMicroBatches));
        let error = MicroBatches::split(3, 4).unwrap_err();
        assert_eq!(error, MicroBatchError::TooFewRows { rows: 3, count: 4 });
        assert!(error.to_string().contains("use at most 3 micro-batches"), "{error}");
        assert!(MicroBatches::split(0, 1).is_err());
    }

    proptest! {
        #[test]
        fn ranges_tile_the_batch(rows in 1usize..5000, count in 1usize..200) {
            prop_assume!(rows >= count);
            let cut = MicroBatches::split(rows, count).unwrap();
            prop_assert_eq!(cut.ids().count(), count);
            let mut next = 0;
            let mut share = 0.0;
            for id in cut.ids() {
                let range = cut.range(id);
                prop_assert_eq!(range.start, next);
                prop_assert_eq!(range.len(), cut.len(id));
                prop_assert_eq!(range.len(), rows / count + usize::from(id.index() < rows % count));
                prop_assert!(!range.is_empty());
                next = range.end;
                share += cut.share(id);
            }
            prop_assert_eq!(next, rows);
            prop_assert!((share - 1.0).abs() < 1e-9);
        }
    }
}
