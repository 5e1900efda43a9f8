//! Pipeline-parallel training across threads, processes and machines, on libtorch.
//!
//! A [`Model`] is a list of [`Layer`]s. A [`Pipeline`] cuts it into partitions, places them on workers, and streams
//! micro-batches through them by a [`Plan`]. With lossless links, the gradients are those of one device that runs the same
//! micro-batches.
//!
//! ```
//! use distgpipe::prelude::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut pipeline = Pipeline::builder(Mlp::default().model()?)
//!     .balance([1, 2, 1])
//!     .place("client,server,client")
//!     .micro_batches(8)
//!     .schedule(Schedule::OneFOneB)
//!     .build()?;
//! let digits = Digits::new(Split::Train, Default::default())?;
//! let loader = Loader::new(digits, LoaderOptions::training(64, 0))?;
//! for batch in loader.epoch(0).take(3) {
//!     let outcome = pipeline.train_step(&batch?)?;
//!     println!("loss {:.3}, {:.1} samples/s", outcome.loss, outcome.rows as f64 / outcome.seconds);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! | to … | see |
//! | --- | --- |
//! | build and step a pipeline | [`Pipeline`], [`Builder`] |
//! | train over epochs, with tests and checkpoints | [`Trainer`], [`TrainOptions`], [`Checkpoints`] |
//! | stop a run, evaluate or save from inside it | [`RunControl`] |
//! | give parameters their own learning rate, or freeze them | [`Builder::parameter_group`], [`Builder::freeze`] |
//! | use a model or data set that comes with the crate | [`zoo`], [`data`] |
//! | write your own layer, loss, optimizer or data set | [`Layer`], [`LossFunction`], [`UpdateRule`], [`Dataset`] |
//! | compress what crosses links | [`CodecPolicy`], [`CodecSpec`] |
//! | evaluate, predict, save and load weights | [`Pipeline::evaluate_all`], [`Pipeline::predict`], [`Pipeline::save`], [`Pipeline::load`] |
//! | run workers in other processes or on other machines | [`Workers`], [`worker_mode`] |
//!
//! # The host process
//!
//! The library prints nothing and never exits its host, unless the host is a worker: [`worker_mode`] ends a process that was
//! started as one, and a [`Server`] does with [`StuckPolicy::ExitProcess`]. It installs a counting allocator in front of libtorch's CPU allocator when the first
//! pipeline starts, to report the peak memory of each worker. It does not change malloc's settings:
//! [`tune_allocator`] does, and a binary that trains on a CPU should call it first.
//!
//! # Stability
//!
//! The public API is this page, [`prelude`], [`data`] and [`zoo`]. Modules that are not in the documentation are for the
//! `distgpipe` command and for tests, and may change in any release.

#[doc(hidden)]
pub mod comm;
pub mod data;
#[doc(hidden)]
pub mod driver;
#[doc(hidden)]
pub mod engine;
#[doc(hidden)]
pub mod failure;
#[doc(hidden)]
pub mod files;
#[doc(hidden)]
pub mod model;
pub mod prelude;
#[doc(hidden)]
pub mod runtime;
#[doc(hidden)]
pub mod sync;
#[doc(hidden)]
pub mod train;

pub use comm::codec_policy::{CodecPolicy, LinkOverride};
pub use comm::handshake::Token;
pub use comm::notice::Notice;
pub use comm::server_identity::{JoinString, JoinStringError};
pub use comm::timeouts::Timeouts;
pub use data::{DataError, Dataset, Loader, LoaderOptions};
pub use distgpipe_core::balance::{Link, Objective};
pub use distgpipe_core::codec::CodecSpec;
pub use distgpipe_core::schedule::{Plan, Recompute, Schedule};
pub use driver::auto_balance::AutoBalance;
pub use driver::builder::{BuildError, Builder};
pub use driver::launch::{WorkerProgram, Workers};
#[cfg(feature = "mpi")]
pub use driver::mpi::{MpiProgram, MpiRanks};
pub use driver::pipeline::{Batch, Pipeline, StepError, StepLink, StepOutcome, StepWait};
pub use driver::serve::{JobInfo, ServeEvent, ServeOptions, Server, StuckPolicy};
pub use driver::worker_mode::worker_mode;
pub use engine::{tune_allocator, Device, Devices, Precision, Tf32};
pub use failure::{Failure, Fault};
pub use model::layer::{Context, Init, Layer, LayerTensors, SampleShape, ShapeError, SkipShapes, TensorSpec};
pub use model::loss::{Loss, LossFunction};
pub use model::zoo;
pub use model::{Model, ModelSpec};
pub use runtime::accumulation::AccumulationStep;
pub use runtime::all_reduce::Reduce;
pub use runtime::graphs::{GraphMode, GraphOptions};
pub use runtime::optimizer::{Optim, ParameterState, ParameterUpdate, Slot, UpdateRule};
pub use runtime::parameter_groups::{ParameterGroup, ParameterGroupError};
pub use runtime::trace::PhaseTiming;
/// The version of the libtorch bindings that tensors of this crate are made of.
pub use tch;
pub use train::checkpoint::{Checkpoint, CheckpointError, Checkpoints};
pub use train::learning_rate::{Decay, RateFunction, RateSchedule, WarmUp};
pub use train::{BestEpoch, Evaluation, RunControl, RunEnd, TestMetric};
pub use train::{Event, RunSummary, SaveEvery, StepDone, TrainError, TrainOptions, Trainer};
