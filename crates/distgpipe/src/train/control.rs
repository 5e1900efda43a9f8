//! What an observer can do to the run that it observes.

use crate::data::Loader;
use crate::driver::pipeline::{Batch, Pipeline, StepError, StepOutcome};
use crate::train::summary::Evaluation;
use crate::train::trainer::TrainError;
use std::collections::BTreeMap;
use std::path::Path;
use tch::Tensor;

/// Control over a run, for its observers: stops it, and evaluates, predicts and reads the model between two steps.
///
/// Nothing here changes what the run computes: not its random streams, not the state of its codecs, and not the gradients
/// of an update in progress.
pub struct RunControl<'a> {
    pub(super) pipeline: &'a mut Pipeline,
    pub(super) stop: &'a mut bool,
}

impl RunControl<'_> {
    /// Ends the run early, without an error. The trainer finishes the update in progress, skips what is left of a test,
    /// writes a last checkpoint if it writes any, and returns the summary. A later run can resume from that checkpoint.
    pub fn stop(&mut self) {
        *self.stop = true;
    }

    /// Loss and score of one batch; see [`Pipeline::evaluate`].
    pub fn evaluate(&mut self, batch: &Batch) -> Result<StepOutcome, StepError> {
        self.pipeline.evaluate(batch)
    }

    /// Loss and scores over all batches of a loader; see [`Pipeline::evaluate_all`].
    pub fn evaluate_all(&mut self, loader: &Loader) -> Result<Evaluation, TrainError> {
        self.pipeline.evaluate_all(loader)
    }

    /// The model's output for one batch of inputs; see [`Pipeline::predict`].
    pub fn predict(&mut self, inputs: Vec<Tensor>) -> Result<Tensor, StepError> {
        self.pipeline.predict(inputs)
    }

    /// Copies of all parameters and buffers, by name; see [`Pipeline::state`].
    pub fn state(&mut self) -> Result<BTreeMap<String, Tensor>, StepError> {
        self.pipeline.state()
    }

    /// Writes all parameters and buffers to a safetensors file; see [`Pipeline::save`].
    pub fn save(&mut self, path: impl AsRef<Path>) -> Result<(), StepError> {
        self.pipeline.save(path)
    }

    /// The pipeline that is trained.
    pub fn pipeline(&self) -> &Pipeline {
        self.pipeline
    }
}
