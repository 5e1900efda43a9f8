//! The result of a step: its figures, or why it did not run.

use super::StepLink;
use crate::comm::protocol::StepReport;
use crate::comm::traffic::Traffic;
use crate::failure::Failure;
use crate::runtime::accumulation::AccumulationStep;
use crate::runtime::divergence;
use crate::runtime::trace::Span;
use crate::train::metrics::ClassCounts;
use crate::train::weights::WeightsError;
use distgpipe_core::microbatch::MicroBatchError;

/// Why a step, or a transfer of tensors, did not succeed.
///
/// After [`Failed`](Self::Failed) the pipeline cannot be used any more; after every other error it can.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    /// The batch does not have the shape or type that the model takes.
    #[error("the batch has {got}; the model takes {expected}")]
    Batch {
        /// The inputs that the model takes.
        expected: String,
        /// The inputs that the batch has.
        got: String,
    },
    /// The learning rate is NaN or infinite.
    #[error("the learning rate is {got}; it must be finite: set `Builder::learning_rate` or call `Pipeline::set_learning_rate`")]
    LearningRate {
        /// The learning rate of the step.
        got: f64,
    },
    /// The norm to which gradients are clipped is not a positive number.
    #[error("gradients cannot be clipped to a norm of {got}; it must be finite and above 0: set `Builder::clip_norm` or call `Pipeline::set_clip_norm`")]
    ClipNorm {
        /// The norm that was set.
        got: f64,
    },
    /// The batch is not the next one of the update in progress.
    #[error("the update needs batch {} of {} next, got {} of {}: finish the update in progress first", expected.index + 1, expected.of, got.index + 1, got.of)]
    Accumulation {
        /// The batch that the update needs next.
        expected: AccumulationStep,
        /// The batch that was given.
        got: AccumulationStep,
    },
    /// The batch has too few rows for the plan's micro-batches.
    #[error(transparent)]
    MicroBatches(#[from] MicroBatchError),
    /// Tensors to load do not fit the model.
    #[error("cannot load: {0}")]
    Load(String),
    /// A file of weights cannot be read or written.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// A worker or a link failed. Build a new pipeline.
    #[error(transparent)]
    Failed(#[from] Failure),
}

/// One worker's part in a step.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct WorkerStep {
    /// The worker's name, such as `server` or `server/1`.
    pub name: String,
    /// The worker's times, memory and link traffic.
    pub report: StepReport,
}

/// The figures of a step.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StepOutcome {
    /// Rows of the batch.
    pub rows: usize,
    /// The mean loss over the rows.
    pub loss: f64,
    /// Rows classified correctly, for losses over classes.
    pub correct: Option<u64>,
    /// Counts of predicted and actual classes, in evaluation with such a loss.
    pub classes: Option<ClassCounts>,
    /// The norm of all gradients before clipping, if the step clipped them.
    pub gradient_norm: Option<f64>,
    /// Seconds from the first command to the last report.
    pub seconds: f64,
    /// What each direction of each link did in this step.
    pub step_links: Vec<StepLink>,
    /// One entry per worker, by worker number.
    pub workers: Vec<WorkerStep>,
}

impl StepOutcome {
    /// The fraction of rows classified correctly, from 0 to 1.
    pub fn accuracy(&self) -> Option<f64> {
        self.correct.map(|c| c as f64 / self.rows.max(1) as f64)
    }

    /// The largest magnitude of any parameter after the update of this step, or NaN if a parameter is NaN. Workers check it
    /// after updates 1, 2, 4, 8 and every 16th, so it is absent after most steps;
    /// [`has_diverged`](crate::runtime::divergence::has_diverged) judges it.
    pub fn parameter_max(&self) -> Option<f64> {
        let checked = self.workers.iter().filter_map(|worker| worker.report.parameter_max);
        checked.map(|max| max.0).reduce(divergence::larger)
    }

    /// The traffic of each link since the run began: sender, receiver, traffic.
    pub fn links(&self) -> Vec<(String, String, Traffic)> {
        let mut links = Vec::new();
        for worker in &self.workers {
            for (to, traffic) in &worker.report.links {
                if let Some(to) = self.workers.get(to.index()) {
                    links.push((worker.name.clone(), to.name.clone(), traffic.clone()));
                }
            }
        }
        links
    }

    /// The trace events of the step. Empty unless [`Builder::trace`](crate::Builder::trace) is on.
    pub fn spans(&self) -> impl Iterator<Item = &Span> {
        self.workers.iter().flat_map(|w| &w.report.spans)
    }
}
