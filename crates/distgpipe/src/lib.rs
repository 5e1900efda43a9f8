//! Pipeline-parallel training across threads, processes and machines, on libtorch.
//!
//! A model is a list of layers. It is cut into partitions, which are placed on workers; micro-batches stream through
//! them by a plan. With a lossless link the gradients are those of one device running the same micro-batches.
//!
//! ```
//! use distgpipe::models::Mlp;
//! use distgpipe::{profile, Pipeline, Recompute, Schedule};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let model = Mlp::default().model()?;
//! let batch = profile::sample(&model, 32, 0)?; // made-up data; yours comes from a `data::Loader`
//! let mut pipeline = Pipeline::builder(model)
//!     .balance([1, 2, 1])
//!     .place("client,server,client")
//!     .micro_batches(8)
//!     .schedule(Schedule::OneFOneB)
//!     .recompute(Recompute::Never)
//!     .build()?;
//! let outcome = pipeline.train_step(&batch)?;
//! println!("loss {:.3}, {:.1} samples/s", outcome.loss, outcome.rows as f64 / outcome.seconds);
//! # Ok(())
//! # }
//! ```

pub mod auto_balance;
pub mod checkpoint;
pub mod codecs;
pub mod coding;
pub mod data;
pub mod deferred_batch_norm;
pub mod engine;
pub mod failure;
pub mod job;
pub mod launch;
pub mod layer;
pub mod layers;
pub mod link;
pub mod loss;
pub mod mailbox;
pub mod metrics;
pub mod model;
pub mod models;
pub mod optim;
pub mod partition;
pub mod pipeline;
pub mod portal;
pub mod profile;
pub mod rate;
pub mod recompute;
pub mod ring;
pub mod roster;
pub mod serve;
pub mod stage;
pub mod status;
pub mod trace;
pub mod trainer;
pub mod transport;
pub mod update;
pub mod weights;
pub mod worker;

pub use auto_balance::AutoBalance;
pub use distgpipe_core as core;
pub use distgpipe_core::schedule::{Plan, Recompute, Schedule};
pub use engine::Precision;
pub use failure::Failure;
pub use launch::{WorkerProgram, Workers};
pub use layer::{Context, Init, Layer, Own, SampleShape, ShapeError, SkipShapes, TensorSpec};
pub use loss::Loss;
pub use model::Model;
pub use optim::Optim;
pub use pipeline::{Batch, BuildError, Builder, Pipeline, StepError, StepOutcome};
pub use tch;
