//! The pure part of distgpipe: everything about a pipeline that can be decided without running it.
//!
//! The crate does no I/O, starts no threads, reads no clock and depends on no tensor library. So its tests are fast and
//! deterministic, and everything that reads untrusted bytes is fuzzed (`fuzz/` in the repository). The only thing it
//! reads from its environment is [`codec::SIMD_VARIABLE`], a switch for tests. Unsafe code is confined to the kernels
//! of the codecs (`codec/simd`); [`codec::zstd`] calls the C library of that name.
//!
//! | module | subject |
//! | --- | --- |
//! | [`id`] | the numbers of partitions, workers and micro-batches |
//! | [`microbatch`] | how a batch is split into micro-batches |
//! | [`partition`] | which layers form a partition |
//! | [`cut`] | cuts described by the names of layers or by the layers at both ends |
//! | [`balance`] | the search for the best cut, given the costs of layers, links and memory |
//! | [`placement`] | which worker runs which partition |
//! | [`skip`] | skip connections, and the partitions that they connect |
//! | [`schedule`] | the order of every worker's actions: generated, checked, simulated, drawn |
//! | [`codec`] | tensors to bytes and back |
//! | [`pt2`] | models that torch.export wrote: the graph, its layers, and where it can be cut |
//! | [`weights`] | the positions of tensors in safetensors and PyTorch files |
//! | [`wire`] | frames, the handshake, and limits on what a peer may send |

#![deny(unsafe_code)]

pub mod balance;
pub mod codec;
pub mod cut;
pub mod id;
pub mod microbatch;
pub mod partition;
pub mod placement;
pub mod pt2;
pub mod schedule;
pub mod skip;
pub mod weights;
pub mod wire;

pub use id::{MicroBatchId, PartitionId, WorkerId};
