//! Evaluates a pipeline on all batches of a loader.

use crate::data::Loader;
use crate::driver::pipeline::{Pipeline, StepOutcome};
use crate::train::summary::{EpochTotals, Evaluation};
use crate::train::TrainError;
use std::ops::ControlFlow;
use std::time::Instant;

impl Pipeline {
    /// Loss, accuracy and other metrics over all batches of a loader, without training. Metrics are computed over all
    /// rows, not as means over batches. For one batch, see [`evaluate`](Self::evaluate).
    ///
    /// # Errors
    /// If a batch cannot be loaded, or a step fails.
    pub fn evaluate_all(&mut self, loader: &Loader) -> Result<Evaluation, TrainError> {
        self.evaluate_all_with(loader, |_| {})
    }

    /// [`evaluate_all`](Self::evaluate_all), with a call of `each` after every batch, for progress.
    ///
    /// # Errors
    /// If a batch cannot be loaded, or a step fails.
    pub fn evaluate_all_with(
        &mut self,
        loader: &Loader,
        mut each: impl FnMut(&StepOutcome),
    ) -> Result<Evaluation, TrainError> {
        let totals = evaluate_all(self, loader, |_, outcome| {
            each(outcome);
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(totals.evaluation())
    }
}

/// The sums over the batches of a loader, until `each`, which is called after every batch, breaks.
pub(super) fn evaluate_all(
    pipeline: &mut Pipeline,
    loader: &Loader,
    mut each: impl FnMut(&mut Pipeline, &StepOutcome) -> Result<ControlFlow<()>, TrainError>,
) -> Result<EpochTotals, TrainError> {
    let mut totals = EpochTotals::new(loader.classes());
    let mut requested = Instant::now();
    for batch in loader.epoch_for(pipeline, 0, 0) {
        let outcome = pipeline.evaluate(&batch?)?;
        totals.add(&outcome, requested.elapsed().as_secs_f64());
        if each(pipeline, &outcome)?.is_break() {
            break;
        }
        requested = Instant::now();
    }
    Ok(totals)
}
