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

#[path = "driver/auto_balance.rs"]
pub mod auto_balance;
#[path = "train/checkpoint.rs"]
pub mod checkpoint;
#[path = "comm/codec_policy.rs"]
pub mod codecs;
#[path = "comm/link_codecs.rs"]
pub mod coding;
pub mod data;
#[path = "runtime/deferred_batch_norm.rs"]
pub mod deferred_batch_norm;
pub mod engine;
pub mod failure;
#[path = "comm/protocol/job.rs"]
pub mod job;
#[path = "driver/launch.rs"]
pub mod launch;
#[path = "model/layer.rs"]
pub mod layer;
#[path = "model/blocks.rs"]
pub mod layers;
#[path = "comm/admission.rs"]
pub mod link;
#[path = "model/loss.rs"]
pub mod loss;
#[path = "comm/mailbox.rs"]
pub mod mailbox;
#[path = "train/metrics.rs"]
pub mod metrics;
pub mod model;
#[path = "model/zoo.rs"]
pub mod models;
#[path = "runtime/optimizer.rs"]
pub mod optim;
#[path = "runtime/partition.rs"]
pub mod partition;
#[path = "driver/pipeline.rs"]
pub mod pipeline;
#[path = "runtime/portal.rs"]
pub mod portal;
#[path = "driver/profile.rs"]
pub mod profile;
#[path = "train/learning_rate.rs"]
pub mod rate;
#[path = "runtime/micro_batch_pass.rs"]
pub mod recompute;
#[path = "runtime/all_reduce.rs"]
pub mod ring;
#[path = "comm/topology.rs"]
pub mod roster;
#[path = "driver/serve.rs"]
pub mod serve;
#[path = "runtime/stage.rs"]
pub mod stage;
#[path = "comm/status.rs"]
pub mod status;
#[path = "runtime/trace.rs"]
pub mod trace;
#[path = "train/trainer.rs"]
pub mod trainer;
#[path = "comm/transport.rs"]
pub mod transport;
#[path = "runtime/clipping.rs"]
pub mod update;
#[path = "train/weights.rs"]
pub mod weights;
#[path = "runtime/worker.rs"]
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
