//! The three numbers everything is named by. Newtypes, so that a worker is never taken for a partition.

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub u32);

        impl $name {
            /// The id with this index. Indices come from our own loops, so one beyond `u32` is a bug here.
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
    /// A partition: consecutive layers that run together, counted from the input.
    PartitionId
}
id! {
    /// A worker: a thread, process or machine that runs partitions.
    WorkerId
}
id! {
    /// A micro-batch of the current batch.
    MicroBatchId
}
