//! Training over epochs.
//!
//! | module | subject |
//! | --- | --- |
//! | `trainer` | [`Trainer`]: steps, tests and checkpoints over epochs |
//! | `control` | what an observer can do to the run |
//! | `best` | the best epoch, and when to stop because nothing improves |
//! | `options`, `events`, `summary` | what it is given, what it reports meanwhile, and the figures at the end |
//! | `evaluation` | [`Pipeline::evaluate_all`](crate::Pipeline::evaluate_all) |
//! | [`learning_rate`] | warm-up and decay |
//! | [`metrics`] | F1 and Matthews correlation |
//! | [`checkpoint`] | saving and resuming a run |
//! | [`weights`] | weight files of other programs |

mod best;
pub mod checkpoint;
mod control;
mod evaluation;
mod events;
pub mod learning_rate;
pub mod metrics;
mod options;
mod summary;
mod trainer;
pub mod weights;

pub use best::{BestEpoch, TestMetric};
pub use control::RunControl;
pub use events::{Event, StepDone};
pub use options::{Capture, SaveEvery, TrainOptions};
pub use summary::{
    BatchTimes, CodecSummary, EdgeSummary, EpochSummary, Evaluation, LinkLimit, LinkSummary, RunEnd, RunSummary,
    WorkerSummary,
};
pub use trainer::{Progress, TrainError, Trainer};
