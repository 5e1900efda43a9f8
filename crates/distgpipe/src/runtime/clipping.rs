//! From gradients to an update of the parameters: which batches make one, and how far it may go.
//!
//! ```text
//!   steps      0   1   2 │ 3   4   5 │ 6    an epoch of 7 batches, 3 to an update
//!   share     1/3 1/3 1/3│1/3 1/3 1/3│ 1    so that the gradient is the mean over the batches
//!   update     ·   ·   0 │ ·   ·   1 │ 2
//! ```
//!
//! Clipping looks at the norm over all parameters, which no worker has alone. So in a clipped step the workers stop
//! before the update and report the norm of each parameter's gradient; the driver adds them in the order of names,
//! which is the same whoever holds which, and tells everybody the same scale:
//!
//! ```text
//!   driver   Step ──►          ◄── norms     Update{scale} ──►           ◄── done
//!   worker        forward, backward      wait                   optimizer
//! ```

use crate::engine;
use crate::failure::Fault;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tch::{Kind, Tensor};

/// A batch's place among the batches of one update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// From 0.
    pub index: u64,
    /// How many batches the update has.
    pub of: u64,
}

impl Part {
    /// An update of one batch.
    pub const WHOLE: Part = Part { index: 0, of: 1 };

    /// Whether it begins the update.
    pub fn is_first(self) -> bool {
        self.index == 0
    }

    /// Whether the update follows it.
    pub fn is_last(self) -> bool {
        self.index + 1 == self.of
    }

    /// The part that follows; `None` after the last.
    pub fn next(self) -> Option<Part> {
        (!self.is_last()).then_some(Part { index: self.index + 1, ..self })
    }
}

/// How the steps of a run make updates. A function of the step's number, so that there is nothing to save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accumulation {
    /// Batches to an update; fewer at the end of an epoch.
    pub every: u64,
    /// Steps of a whole epoch.
    pub epoch_steps: u64,
    /// Steps of the run.
    pub steps: u64,
}

impl Accumulation {
    fn every(self) -> u64 {
        self.every.max(1)
    }

    /// A step's place in its update.
    pub fn part(self, step: u64) -> Part {
        let epoch = step / self.epoch_steps.max(1) * self.epoch_steps;
        let end = (epoch + self.epoch_steps).min(self.steps);
        let first = epoch + (step - epoch) / self.every() * self.every();
        Part { index: step - first, of: (end - first).min(self.every()) }
    }

    /// The update that a step is part of, from 0.
    pub fn update(self, step: u64) -> u64 {
        let (epoch, within) = (step / self.epoch_steps.max(1), step % self.epoch_steps.max(1));
        epoch * self.epoch_steps.div_ceil(self.every()) + within / self.every()
    }

    /// Updates of the run.
    pub fn updates(self) -> u64 {
        self.steps.checked_sub(1).map_or(0, |last| self.update(last) + 1)
    }
}

/// What becomes of the gradients after a training step's backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum After {
    /// They stay, for more to be added or to be looked at.
    Keep,
    /// They move the parameters.
    Update {
        /// By so much.
        learning_rate: f64,
    },
    /// They stay until [`Command::Update`](crate::job::Command::Update), and their norms are reported.
    Norms,
}

/// A number that goes through JSON as it is: NaN and infinities included, which JSON does not have.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(into = "u64", from = "u64")]
pub struct Exact(pub f64);

impl From<Exact> for u64 {
    fn from(number: Exact) -> u64 {
        number.0.to_bits()
    }
}

impl From<u64> for Exact {
    fn from(bits: u64) -> Self {
        Exact(f64::from_bits(bits))
    }
}

/// The squared 2-norm of each gradient that there is, by the parameter's name.
pub fn squared_norms<'a>(
    parameters: impl Iterator<Item = (&'a str, &'a Tensor)>,
) -> Result<BTreeMap<String, Exact>, Fault> {
    let (mut names, mut sums) = (Vec::new(), Vec::new());
    for (name, parameter) in parameters {
        if let Some(gradient) = engine::grad(parameter) {
            names.push(name.to_owned());
            sums.push(gradient.f_to_kind(Kind::Double)?.f_square()?.f_sum(Kind::Double)?);
        }
    }
    if sums.is_empty() {
        return Ok(BTreeMap::new());
    }
    // One way from the device for all.
    let sums: Vec<f64> = Vec::try_from(Tensor::f_stack(&sums, 0)?.f_to_device(tch::Device::Cpu)?)?;
    Ok(names.into_iter().zip(sums.into_iter().map(Exact)).collect())
}

/// The norm over all parameters.
pub fn global_norm(squares: &BTreeMap<String, Exact>) -> f64 {
    squares.values().map(|square| square.0).sum::<f64>().sqrt()
}

/// What gradients of this norm are multiplied by so that it is at most `norm_max`: `clip_grad_norm_`'s coefficient. A
/// norm that is no number gives one that is none, as there: the next loss must tell.
pub fn clip_scale(norm: f64, norm_max: f64) -> f64 {
    let scale = norm_max / (norm + 1e-6);
    // Not `min`, which would make 1 of NaN.
    if scale > 1.0 {
        1.0
    } else {
        scale
    }
}

/// Multiplies every gradient.
pub fn scale_gradients<'a>(parameters: impl Iterator<Item = &'a Tensor>, scale: f64) -> Result<(), Fault> {
    if scale == 1.0 {
        return Ok(());
    }
    tch::no_grad(|| {
        for mut gradient in parameters.filter_map(engine::grad) {
            let _ = gradient.f_mul_scalar_(scale)?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every batch is in one update, every update is of consecutive batches of one epoch, and ends with its last.
    #[test]
    fn updates_end_after_so_many_steps_at_an_epochs_end_and_at_the_runs() {
        let parts = |every, epoch_steps, steps| {
            let accumulation = Accumulation { every, epoch_steps, steps };
            let of = |step| {
                let Part { index, of } = accumulation.part(step);
                (accumulation.update(step), index, of)
            };
            ((0..steps).map(of).collect::<Vec<_>>(), accumulation.updates())
        };
        assert_eq!(
            parts(3, 7, 9),
            (
                vec![
                    (0, 0, 3),
                    (0, 1, 3),
                    (0, 2, 3),
                    (1, 0, 3),
                    (1, 1, 3),
                    (1, 2, 3),
                    (2, 0, 1),
                    // The next epoch, which the run's end cuts short.
                    (3, 0, 2),
                    (3, 1, 2)
                ],
                4
            )
        );
        assert_eq!(parts(1, 2, 4).0, [(0, 0, 1), (1, 0, 1), (2, 0, 1), (3, 0, 1)]);
        assert_eq!(parts(5, 2, 4), (vec![(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)], 2));
        assert_eq!(parts(4, 7, 0).1, 0);
    }

    #[test]
    fn a_norm_that_is_no_number_is_not_made_one() {
        assert!(clip_scale(f64::NAN, 1.0).is_nan());
        assert_eq!(clip_scale(f64::INFINITY, 1.0), 0.0);
        assert_eq!((clip_scale(0.5, 1.0), clip_scale(0.0, 1.0)), (1.0, 1.0));
        assert!((clip_scale(4.0, 1.0) - 0.25).abs() < 1e-6);
        for number in [f64::NAN, f64::INFINITY, -0.0, 0.1 + 0.2, 5e-324] {
            let text = serde_json::to_string(&Exact(number)).unwrap();
            let back: Exact = serde_json::from_str(&text).unwrap();
            assert_eq!(back.0.to_bits(), number.to_bits(), "{text}");
        }
        let squares = [("a", 1.0), ("b", f64::NAN)].map(|(name, square)| (name.to_owned(), Exact(square)));
        assert!(global_norm(&squares.into()).is_nan());
    }
}
