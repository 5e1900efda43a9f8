//! What every test that trains must hold: its run trains soundly, on any instruction set.
//!
//! Two runs that diverge in the same way are still equal bit for bit, so the tests of equality would not notice. But a run whose
//! weights explode without becoming NaN on one processor ends in NaN on another, where sums round differently. Tests therefore
//! use settings whose loss falls and whose gradients stay moderate, and pass what they trained through [`assert_sound`].

#![allow(dead_code)] // Each test program uses some of these.

use distgpipe::tch::{Kind, Tensor};
use distgpipe::train::{Event, RunControl, TrainError};
use distgpipe::{Batch, Pipeline};
use std::collections::BTreeMap;

/// From this many steps on, the loss must fall: the mean of the last third must be below the mean of the first.
pub const STEPS_TO_FALL: usize = 8;

/// In fewer steps, which are of other batches each, no loss may be above this multiple of the first.
pub const LOSS_RISE_MAX: f64 = 1.5;

/// The largest norm of the gradients of all parameters together. A narrow ResNet-50 starts with about 120; models whose batch
/// norms see too few values reach thousands.
pub const GRADIENT_NORM_MAX: f64 = 200.0;

/// The largest magnitude of a parameter. All models here start with weights of a few units at most.
pub const PARAMETER_MAX: f64 = 20.0;

/// Asserts that training was sound: the losses of its steps are finite and fall, and its parameters stayed moderate.
/// `tensors` is the state of the model; running statistics of batch norms follow the data and are only checked to be finite.
pub fn assert_sound(what: &str, losses: &[f64], tensors: &BTreeMap<String, Tensor>) {
    assert_losses_sound(what, losses);
    assert_parameters_moderate(what, tensors);
}

/// The same for a pipeline that has trained, which must also have moderate gradients for this batch. Changes no parameter.
pub fn assert_pipeline_sound(what: &str, losses: &[f64], pipeline: &mut Pipeline, batch: &Batch) {
    assert_sound(what, losses, &pipeline.state().unwrap_or_else(|e| panic!("{what}: {e}")));
    assert_gradients_moderate(what, &pipeline.gradients(batch).unwrap_or_else(|e| panic!("{what}: {e}")).1);
}

/// An observer of a trainer that gathers the loss of each step.
pub fn losses_into(
    losses: &mut Vec<f64>,
) -> impl FnMut(&Event<'_>, &mut RunControl<'_>) -> Result<(), TrainError> + '_ {
    |event, _| {
        if let Event::StepDone(done) = event {
            losses.push(done.outcome.loss);
        }
        Ok(())
    }
}

/// The part of [`assert_sound`] that concerns the losses, one for each step, in order.
pub fn assert_losses_sound(what: &str, losses: &[f64]) {
    let Some(first) = losses.first() else { return };
    assert!(losses.iter().all(|loss| loss.is_finite()), "{what}: expected finite losses, got {losses:?}");
    if losses.len() < STEPS_TO_FALL {
        assert!(
            losses.iter().all(|loss| *loss <= LOSS_RISE_MAX * first.abs()),
            "{what}: expected losses of at most {LOSS_RISE_MAX} times the first, got {losses:?}"
        );
        return;
    }
    let third = losses.len() / 3;
    let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
    let (before, after) = (mean(&losses[..third]), mean(&losses[losses.len() - third..]));
    assert!(after < before, "{what}: expected the loss to fall, got {before} at first and {after} at last: {losses:?}");
}

/// The part of [`assert_sound`] that concerns the parameters.
pub fn assert_parameters_moderate(what: &str, tensors: &BTreeMap<String, Tensor>) {
    for (name, tensor) in tensors {
        let largest = largest(tensor);
        assert!(largest.is_finite(), "{what}: expected finite values in {name}, got {largest}");
        let statistic = ["running_mean", "running_var", "num_batches_tracked"].iter().any(|end| name.ends_with(end));
        assert!(
            statistic || largest <= PARAMETER_MAX,
            "{what}: expected magnitudes of at most {PARAMETER_MAX} in {name}, got {largest}"
        );
    }
}

/// Asserts that the gradients of all parameters together have a moderate norm.
pub fn assert_gradients_moderate(what: &str, gradients: &BTreeMap<String, Tensor>) {
    let squares = gradients.values().map(|gradient| {
        let gradient = gradient.to_kind(Kind::Double);
        f64::try_from((&gradient * &gradient).sum(Kind::Double)).expect("a number")
    });
    let norm = squares.sum::<f64>().sqrt();
    // A norm of NaN is not moderate either.
    assert!(norm <= GRADIENT_NORM_MAX, "{what}: expected gradients of norm {GRADIENT_NORM_MAX} at most, got {norm}");
}

/// The largest magnitude in a tensor; NaN if it has one.
fn largest(tensor: &Tensor) -> f64 {
    if tensor.numel() == 0 {
        return 0.0;
    }
    f64::try_from(tensor.to_kind(Kind::Double).abs().max()).expect("a number")
}
