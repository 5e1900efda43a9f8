//! Detects parameters that grow without bound. Such a run may go on for many steps without a NaN, with weights of 1e15
//! and a loss that looks ordinary, so each worker reports the largest magnitude among its parameters from time to time.

use crate::engine::{self, Layout, TensorList};
use crate::failure::Fault;
use tch::{Kind, Tensor};

/// A parameter beyond this magnitude has diverged.
///
/// Parameters of trained networks are orders of magnitude smaller. At 1e6 neighbouring 32-bit floats are 0.06 apart,
/// which is more than an ordinary update, so such a parameter can no longer be trained.
pub const PARAMETER_MAGNITUDE_MAX: f64 = 1e6;

/// After the first updates, the magnitude is checked once in this many updates. A check reads each parameter once, while every
/// update reads and writes each of them, so the checks cost a small fraction of the updates.
const CHECK_INTERVAL: u64 = 16;

/// Whether a magnitude of a parameter shows that training has diverged. NaN does, too.
pub fn has_diverged(magnitude: f64) -> bool {
    magnitude.is_nan() || magnitude > PARAMETER_MAGNITUDE_MAX
}

/// Whether the parameters are checked after this update, counted from 1: after updates 1, 2, 4, 8, 16, 32, 48, …
pub(crate) fn is_check_due(update: u64) -> bool {
    update.is_multiple_of(CHECK_INTERVAL) || (update < CHECK_INTERVAL && update.is_power_of_two())
}

/// The larger of two magnitudes, or NaN if one of them is NaN.
pub(crate) fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b {
        a
    } else {
        b
    }
}

/// The largest magnitude among all values of the parameters, NaN if one of them is NaN, or `None` if there are no
/// values.
pub(crate) fn parameter_max<'a>(parameters: impl Iterator<Item = &'a Tensor>) -> Result<Option<f64>, Fault> {
    tch::no_grad(|| {
        let (on_gpu, on_host): (Vec<&Tensor>, Vec<&Tensor>) =
            parameters.filter(|parameter| parameter.numel() > 0).partition(|parameter| parameter.device().is_cuda());
        let mut bounds = on_gpu.into_iter().collect::<TensorList>().max_norm()?.into_tensors();
        // On a CPU, libtorch computes this norm twenty times as slowly as the two bounds.
        for parameter in on_host {
            // `aminmax` copies a tensor that is not contiguous. In this order of dimensions, channels-last is.
            let parameter = match engine::layout(parameter) {
                Some(Layout::ChannelsLast) => parameter.f_permute([0, 2, 3, 1])?,
                _ => parameter.shallow_clone(),
            };
            let (min, max) = parameter.f_aminmax(None, false)?;
            bounds.extend([min, max]);
        }
        if bounds.is_empty() {
            return Ok(None);
        }
        let bounds = bounds.iter().map(|bound| bound.f_to_kind(Kind::Double)).collect::<Result<Vec<_>, _>>()?;
        // One copy from the device for all parameters.
        Ok(Some(f64::try_from(Tensor::f_stack(&bounds, 0)?.f_abs()?.f_max()?)?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::profile;
    use crate::model::zoo::Mlp;
    use crate::Pipeline;
    use tch::Device;

    #[test]
    fn the_largest_magnitude_is_found_whatever_the_sign_layout_or_type() {
        let tensor = |values: &[f32]| Tensor::from_slice(values);
        let max = |tensors: &[Tensor]| parameter_max(tensors.iter()).unwrap();
        assert_eq!(max(&[]), None);
        assert_eq!(max(&[tensor(&[])]), None);
        assert_eq!(max(&[tensor(&[1.0, -3.0]), tensor(&[]), tensor(&[2.0])]), Some(3.0));
        assert_eq!(max(&[tensor(&[0.5]), tensor(&[-7.0]).to_kind(Kind::Double)]), Some(7.0));
        assert_eq!(max(&[tensor(&[f32::NEG_INFINITY])]), Some(f64::INFINITY));
        assert!(max(&[tensor(&[1.0]), tensor(&[2.0, f32::NAN])]).unwrap().is_nan());
        let image = Tensor::arange(24, (Kind::Float, Device::Cpu)).view([2, 3, 2, 2]);
        assert_eq!(max(&[engine::with_layout(&image, Layout::ChannelsLast).unwrap()]), Some(23.0));
    }

    #[test]
    fn a_nan_counts_as_diverged_and_is_never_hidden_by_another_worker() {
        assert!(has_diverged(f64::NAN) && has_diverged(1e15) && !has_diverged(1e3));
        assert!(larger(f64::NAN, 1.0).is_nan() && larger(1.0, f64::NAN).is_nan());
        assert_eq!((larger(1.0, 2.0), larger(2.0, 1.0)), (2.0, 2.0));
    }

    #[test]
    fn the_first_updates_are_checked_often_and_later_ones_regularly() {
        let due: Vec<u64> = (1..=50).filter(|&update| is_check_due(update)).collect();
        assert_eq!(due, [1, 2, 4, 8, 16, 32, 48]);
    }

    /// With a learning rate of 1e9 the weights exceed the bound in the first update, and the loss is still finite. These
    /// runs diverge on purpose, so they are exempt from the rule that tests train soundly (`tests/soundness`).
    #[test]
    fn weights_that_blow_up_are_reported_while_the_loss_is_finite() {
        for (learning_rate, clip_norm, diverges) in [(1e9, None, true), (1e9, Some(1.0), true), (0.01, None, false)] {
            let model = Mlp::default().model().unwrap();
            let batch = profile::sample(&model, 8, 0).unwrap();
            let mut pipeline = Pipeline::builder(model).place("a,b").micro_batches(2).build().unwrap();
            pipeline.set_learning_rate(learning_rate);
            pipeline.set_clip_norm(clip_norm);
            let outcome = pipeline.train_step(&batch).unwrap();
            let max = outcome.parameter_max().expect("the first update is checked");
            assert!(outcome.loss.is_finite() && max.is_finite());
            assert_eq!(has_diverged(max), diverges, "{learning_rate} {clip_norm:?}: {max}");
            assert_eq!(pipeline.evaluate(&batch).unwrap().parameter_max(), None, "no update, no check");
        }
    }
}
