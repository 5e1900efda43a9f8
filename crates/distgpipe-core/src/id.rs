//! The numbers of partitions, workers and micro-batches, as types of their own so that they cannot be confused.

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub u32);

        impl $name {
            /// The id with this index.
            ///
            /// # Panics
            /// If the index does not fit 32 bits.
            pub fn new(index: usize) -> Self {
                Self(u32::try_from(index).expect("an index fits 32 bits"))
            }

            /// The id as an index into a slice.
            pub fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id! {
    /// The number of a partition: consecutive layers that run together, counted from the input.
    PartitionId
}
id! {
    /// The number of a worker: a thread, process or machine that runs partitions.
    WorkerId
}
id! {
    /// The number of a micro-batch in its batch.
    MicroBatchId
}
