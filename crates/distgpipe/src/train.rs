//! Training over epochs.
//!
//! | module | subject |
//! | --- | --- |
//! | `trainer` | [`Trainer`]: steps, tests and checkpoints over epochs |
//! | `options`, `events`, `summary` | what it is given, what it reports meanwhile, and the figures at the end |
//! | [`learning_rate`] | warm-up and decay |
//! | [`metrics`] | F1 and Matthews correlation |
//! | [`checkpoint`] | saving and resuming a run |
//! | [`weights`] | weight files of other programs |

pub mod checkpoint;
mod events;
pub mod learning_rate;
pub mod metrics;
mod options;
mod summary;
mod trainer;
pub mod weights;

pub use events::{Event, Observer, StepDone};
pub use options::{Capture, SaveEvery, TrainOptions};
pub use summary::{EdgeSummary, EpochSummary, LinkLimit, LinkSummary, RunSummary, WorkerSummary};
pub use trainer::{Progress, TrainError, Trainer};
