//! The pure part of distgpipe: what can be said about a pipeline without running it.
//!
//! No I/O, no clock, no threads and no tensors live here, so everything in this crate can be
//! tested exhaustively, fuzzed and run under Miri.
//!
//! | module | what it answers |
//! | --- | --- |
//! | [`id`] | the three numbers everything is named by |
//! | [`microbatch`] | how many micro-batches, and which rows each has |
//! | [`partition`] | which layers run together, and the best cut for given costs |
//! | [`balance`] | the best cut when links, memory and the schedule count too |
//! | [`cut`] | the same, said by the layers' names or from both ends |
//! | [`placement`] | which worker runs which partition |
//! | [`skip`] | which partition pairs a skip tensor travels between |
//! | [`schedule`] | the order of every action of every worker: generated, checked, simulated, drawn |
//! | [`codec`] | tensor ↔ bytes |
//! | [`weights`] | where the tensors are in weight files of others |
//! | [`wire`] | the frame, the handshake and the limits on what a peer may send |

#![deny(unsafe_code)]

pub mod balance;
pub mod codec;
pub mod cut;
pub mod id;
pub mod microbatch;
pub mod partition;
pub mod placement;
pub mod schedule;
pub mod skip;
pub mod weights;
pub mod wire;

pub use id::{MicroBatchId, PartitionId, WorkerId};
