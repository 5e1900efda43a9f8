//! Gradient clipping by the global norm, and what a worker does with its gradients after the backward pass.
//!
//! The norm covers all parameters, and no worker holds them all. So in a clipped step the workers stop before the
//! update and report the squared norm of each parameter's gradient. The driver adds them in the order of names, which
//! does not depend on the placement, and sends the same scale to all workers:
//!
//! ```text
//!   driver   Step ──►             ◄── norms     Update{scale} ──►             ◄── report
//!   worker        forward, backward        wait                  optimizer
//! ```

use crate::engine::{self, TensorList};
use crate::failure::Fault;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tch::{Kind, Tensor};

/// What a worker does with its gradients after the backward passes of a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AfterBackward {
    /// Keep them: the next batch adds to them, or the driver collects them.
    Keep,
    /// Update the parameters, then clear the gradients.
    Update {
        /// The learning rate of this update.
        learning_rate: f64,
    },
    /// Report their squared norms, and keep them for [`Command::Update`](crate::comm::protocol::Command::Update).
    #[serde(rename = "norms")]
    ReportNorms,
}

/// A number that JSON carries exactly, as the integer of its bits. JSON itself has no NaN and no infinities.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(into = "u64", from = "u64")]
pub struct F64Bits(pub f64);

impl From<F64Bits> for u64 {
    fn from(number: F64Bits) -> u64 {
        number.0.to_bits()
    }
}

impl From<u64> for F64Bits {
    fn from(bits: u64) -> Self {
        F64Bits(f64::from_bits(bits))
    }
}

/// How many gradients are squared at once.
const SQUARED_TOGETHER: usize = 16;

/// The squared 2-norm of each gradient, by the parameter's name. Parameters without a gradient are left out.
pub fn squared_norms<'a>(
    parameters: impl Iterator<Item = (&'a str, &'a Tensor)>,
) -> Result<BTreeMap<String, F64Bits>, Fault> {
    let named = parameters.filter_map(|(name, parameter)| Some((name.to_owned(), engine::grad(parameter)?)));
    let (names, gradients): (Vec<String>, Vec<Tensor>) = named.unzip();
    if gradients.is_empty() {
        return Ok(BTreeMap::new());
    }
    let mut sums = Vec::new();
    // Not all at once: the squares take twice the memory of the gradients.
    for gradients in gradients.chunks(SQUARED_TOGETHER) {
        let values = gradients.iter().collect::<TensorList>().in_double()?;
        for squares in values.mul_(&values)?.iter() {
            sums.push(squares.f_sum(Kind::Double)?);
        }
    }
    // One copy from the device for all norms.
    let sums: Vec<f64> = Vec::try_from(Tensor::f_stack(&sums, 0)?.f_to_device(tch::Device::Cpu)?)?;
    Ok(names.into_iter().zip(sums.into_iter().map(F64Bits)).collect())
}

/// The 2-norm over all parameters.
pub fn global_norm(squares: &BTreeMap<String, F64Bits>) -> f64 {
    squares.values().map(|square| square.0).sum::<f64>().sqrt()
}

/// The factor that scales gradients of this norm to at most `norm_max`: the coefficient of PyTorch's
/// `clip_grad_norm_`. A NaN norm gives NaN, as it does there, so that the next loss shows it.
pub fn clip_scale(norm: f64, norm_max: f64) -> f64 {
    let scale = norm_max / (norm + 1e-6);
    // Not `min`, which would turn NaN into 1.
    if scale > 1.0 {
        1.0
    } else {
        scale
    }
}

/// Multiplies every gradient in place.
pub fn scale_gradients<'a>(parameters: impl Iterator<Item = &'a Tensor>, scale: f64) -> Result<(), Fault> {
    if scale == 1.0 {
        return Ok(());
    }
    let gradients: TensorList = parameters.filter_map(engine::grad).collect();
    tch::no_grad(|| gradients.mul_scalar_(scale).map(|_| ()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nan_norm_stays_nan() {
        assert!(clip_scale(f64::NAN, 1.0).is_nan());
        assert_eq!(clip_scale(f64::INFINITY, 1.0), 0.0);
        assert_eq!((clip_scale(0.5, 1.0), clip_scale(0.0, 1.0)), (1.0, 1.0));
        assert!((clip_scale(4.0, 1.0) - 0.25).abs() < 1e-6);
        for number in [f64::NAN, f64::INFINITY, -0.0, 0.1 + 0.2, 5e-324] {
            let text = serde_json::to_string(&F64Bits(number)).unwrap();
            let back: F64Bits = serde_json::from_str(&text).unwrap();
            assert_eq!(back.0.to_bits(), number.to_bits(), "{text}");
        }
        let squares = [("a", 1.0), ("b", f64::NAN)].map(|(name, square)| (name.to_owned(), F64Bits(square)));
        assert!(global_norm(&squares.into()).is_nan());
    }

    /// Workers of another build read these names.
    #[test]
    fn a_step_command_names_the_use_of_its_gradients_as_before() {
        let json = |after: AfterBackward| serde_json::to_string(&after).unwrap();
        assert_eq!(json(AfterBackward::Keep), r#""keep""#);
        assert_eq!(json(AfterBackward::Update { learning_rate: 0.5 }), r#"{"update":{"learning_rate":0.5}}"#);
        assert_eq!(json(AfterBackward::ReportNorms), r#""norms""#);
    }
}
