//! What the driver asks of a worker after the job, and what the worker answers.

use crate::comm::traffic::Traffic;
use crate::runtime::clipping::{AfterBackward, F64Bits};
use crate::runtime::graphs::GraphReport;
use crate::runtime::trace::{PhaseTimes, Span};
use crate::train::metrics::ClassCounts;
use distgpipe_core::WorkerId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What a step computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// Forward, backward and update of the parameters.
    Train,
    /// Forward and backward. The gradients stay for the driver to collect; nothing is updated.
    Gradients,
    /// Forward, with loss and accuracy.
    Evaluate,
    /// Forward; the output is sent to the driver.
    Predict,
}

impl Purpose {
    /// Whether the step follows the training plan, backward passes included. All others run the forward-only plan.
    pub fn runs_backward(self) -> bool {
        matches!(self, Purpose::Train | Purpose::Gradients)
    }
}

/// One step, as one replica runs it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StepCommand {
    /// The number of the step in the run. It is part of the tags of the step's messages.
    pub number: u64,
    /// The number of batches trained on before this step. It selects random streams, so that an evaluation between two
    /// training steps changes nothing.
    #[serde(rename = "learned")]
    pub trained_batches: u64,
    /// What the step computes.
    pub purpose: Purpose,
    /// Rows of the batch, over all replicas.
    pub rows: usize,
    /// The number of micro-batches that the batch is split into, over all replicas.
    pub all_micro_batches: usize,
    /// The first micro-batch of this replica.
    pub first: usize,
    /// The number of micro-batches of this replica.
    pub micro_batches: usize,
    /// The number of batches whose gradients one update averages; at least 1.
    pub batches: u64,
    /// Whether gradients of earlier batches are discarded first.
    pub fresh: bool,
    /// What happens to the gradients after the backward pass.
    pub after: AfterBackward,
    /// The data set's indices of the samples in the rows. Empty unless a codec of the run needs them.
    pub samples: Vec<u64>,
    /// Whether the workers keep copies of the tensors that they send, for [`TensorSet::Captured`].
    pub capture: bool,
}

/// A set of tensors that the driver can collect from a worker, or load into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TensorSet {
    /// The parameters and buffers of the layers.
    State,
    /// The optimizer's state for each parameter; see [`crate::runtime::optimizer::Slot`].
    Optimizer,
    /// The gradients of the last [`Purpose::Gradients`] step.
    Gradients,
    /// What the worker sent over links in the last step with [`StepCommand::capture`], before any codec.
    Captured,
}

/// What the driver asks of a worker. Every command is answered, except for [`Command::Finish`].
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Command {
    /// Run a step; answered by a [`StepReport`].
    Step(StepCommand),
    /// Replace parameters and buffers by those of the first replica; answered by an empty report.
    #[serde(rename = "agree")]
    SyncReplicas,
    /// Skip a step that has no rows for this replica; answered by a [`StepReport`].
    #[serde(rename = "rest")]
    SkipStep,
    /// Update the parameters with the gradients whose norms the last step reported ([`AfterBackward::ReportNorms`]); answered by a
    /// [`StepReport`] on the update alone.
    Update {
        /// The learning rate of this update.
        learning_rate: f64,
        /// The factor that clips the gradients before the update.
        scale: F64Bits,
    },
    /// Send tensors to the driver; answered by their names, then by one message per tensor.
    Collect {
        /// The set that the tensors are from.
        #[serde(rename = "which")]
        set: TensorSet,
        /// The names of the wanted tensors; `None` for all of the set.
        names: Option<Vec<String>>,
    },
    /// Replace tensors by those that follow, one message per tensor; answered by an empty report.
    Load {
        /// The set that the tensors are from: [`TensorSet::State`] or [`TensorSet::Optimizer`].
        #[serde(rename = "which")]
        set: TensorSet,
        /// The names of the tensors, in the order in which they follow.
        names: Vec<String>,
    },
    /// Reset the codecs of all links to their initial state; answered by an empty report.
    #[serde(rename = "forget")]
    ResetCodecs,
    /// End the run. The worker sends no answer.
    Finish,
}

/// What one worker reports about a step.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct StepReport {
    /// The sum of the loss over the rows. `None` unless the worker has the last partition.
    pub loss_sum: Option<f64>,
    /// The number of rows whose class was predicted correctly.
    pub correct: Option<u64>,
    /// Predicted against true classes, in an evaluation.
    pub classes: Option<ClassCounts>,
    /// The squared norm of each gradient by parameter, if [`AfterBackward::ReportNorms`] asks for them.
    pub squared_norms: BTreeMap<String, F64Bits>,
    /// The largest magnitude among the worker's parameters, after an update that [checked it](crate::runtime::divergence).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parameter_max: Option<F64Bits>,
    /// Time spent in each phase of the step.
    pub phases: PhaseTimes,
    /// Time from the command to the report, in nanoseconds.
    pub step_ns: u64,
    /// The most bytes that tensors held; see [`crate::engine::peak_bytes`].
    pub peak_bytes: u64,
    /// The memory that the GPU's allocator holds; see [`crate::engine::reserved_bytes`].
    pub reserved_bytes: Option<u64>,
    /// What each outgoing link has carried since the run began.
    pub links: Vec<(WorkerId, Traffic)>,
    /// Single events, if [`Job::trace`](super::Job::trace) asks for them.
    pub spans: Vec<Span>,
    /// What the worker has recorded as CUDA graphs in this step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub graphs: Option<GraphReport>,
}

impl StepReport {
    /// Adds the report of a later part of the same step: the update that followed it.
    pub fn append(&mut self, later: StepReport) {
        self.parameter_max = later.parameter_max.or(self.parameter_max);
        self.phases = self.phases.plus(&later.phases);
        self.step_ns += later.step_ns;
        self.peak_bytes = self.peak_bytes.max(later.peak_bytes);
        self.spans.extend(later.spans);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Workers of the same version may have been built from other commits, so the JSON must not follow renames in Rust.
    #[test]
    fn commands_keep_their_names_in_json() {
        let names = vec!["fc.weight".to_owned()];
        for (command, expected) in [
            (Command::SyncReplicas, r#""agree""#),
            (Command::SkipStep, r#""rest""#),
            (Command::ResetCodecs, r#""forget""#),
            (Command::Finish, r#""finish""#),
            (Command::Collect { set: TensorSet::State, names: None }, r#"{"collect":{"which":"state","names":null}}"#),
            (
                Command::Load { set: TensorSet::Optimizer, names },
                r#"{"load":{"which":"optimizer","names":["fc.weight"]}}"#,
            ),
        ] {
            assert_eq!(serde_json::to_string(&command).unwrap(), expected);
        }
        let step = StepCommand {
            number: 7,
            trained_batches: 3,
            purpose: Purpose::Train,
            rows: 8,
            all_micro_batches: 4,
            first: 2,
            micro_batches: 2,
            batches: 1,
            fresh: true,
            after: AfterBackward::Keep,
            samples: Vec::new(),
            capture: false,
        };
        let expected = r#"{"step":{"number":7,"learned":3,"purpose":"train","rows":8,"all_micro_batches":4,"first":2,"micro_batches":2,"batches":1,"fresh":true,"after":"keep","samples":[],"capture":false}}"#;
        assert_eq!(serde_json::to_string(&Command::Step(step)).unwrap(), expected);
    }
}
